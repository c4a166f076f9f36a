"""LLM serving with prefill and decode on separate device meshes, in JAX."""
