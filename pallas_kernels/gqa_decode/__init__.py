"""One query token per row against a paged cache of grouped KV heads."""

from pallas_kernels.gqa_decode.api import gqa_decode

__all__ = ["gqa_decode"]
