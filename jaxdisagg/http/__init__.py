"""The OpenAI-compatible HTTP API over an engine; knows nothing of jax.

schemas (what a body may hold) -> preparation (checks against the model, tokenizes) ->
generation (tokens to pieces of text) -> formats (pieces to OpenAI's JSON) -> routes;
streaming has the SSE response and the watch for clients that leave, errors the error objects.
"""
