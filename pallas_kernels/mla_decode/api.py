"""The latent decode operation: shapes, checks, choice of back end."""

import functools

import jax

from pallas_kernels.dispatch import AUTO, check_latent, dispatch
from pallas_kernels.mla_decode import reference, xla


def mla_decode(
    q: jax.Array,
    cache: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    latent: int,
    backend: str = AUTO,
) -> jax.Array:
    """Absorbed attention of one token per row to its first `lengths` cached latents.

    q [B, N, R+C], the query already projected into the latent space and its rotated part behind it;
    cache [P, Z, R+C], each row a normed latent and the rotated key that all heads share; page_table
    [B, W] i32; lengths [B] i32, at most W*Z; latent is R. Returns [B, N, R] in q's dtype: the
    average of the rows' first R values under softmax(scale * q . row), which the caller projects to
    the head's values; with that it equals attention over decompressed keys and values
    (DeepSeek-V2, arXiv:2405.04434, section 2.1 and appendix C). A row of length 0 gives zeros.
    Softmax in f32. What lies in pages or offsets past a row's length, NaN included, never reaches a
    result. Works on local shards of any number of heads inside a shard_map. Raises ValueError for
    shapes that do not fit and for an unknown back end.
    """
    check_latent(q, cache, page_table)
    if q.shape[2] != cache.shape[2] or not 0 < latent <= cache.shape[2]:
        raise ValueError(
            f"q {q.shape} and latent {latent} do not fit cache {cache.shape}: q and cache must be "
            f"equally wide, and latent between 1 and that width"
        )
    if page_table.shape[0] != q.shape[0] or lengths.shape != q.shape[:1]:
        raise ValueError(
            f"q {q.shape}, page_table {page_table.shape} and lengths {lengths.shape} differ in rows"
        )
    backends = {
        "reference": functools.partial(reference.mla_decode, scale=scale, latent=latent),
        "xla": functools.partial(xla.mla_decode, scale=scale, latent=latent),
    }
    return dispatch(backend, backends, (q, cache, page_table, lengths))
