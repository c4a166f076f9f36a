"""Chunks of several rows, flat in one batch, against a paged cache of latents."""

from pallas_kernels.mla_prefill.api import mla_prefill

__all__ = ["mla_prefill"]
