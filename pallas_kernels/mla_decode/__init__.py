"""One query token per row against a paged cache of latents (multi-head latent attention)."""

from pallas_kernels.mla_decode.api import mla_decode

__all__ = ["mla_decode"]
