"""Paged attention and experts' matmuls: a folder per op with its reference and back ends."""
