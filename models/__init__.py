"""Model families as pure step functions over a paged cache, and their checkpoints."""
