"""Chunks of several rows, flat in one batch, against a paged cache of grouped KV heads."""

from pallas_kernels.paged_prefill.api import paged_prefill

__all__ = ["paged_prefill"]
