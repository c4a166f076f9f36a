"""Paged-attention operations: one folder per op with its reference and its back ends."""
