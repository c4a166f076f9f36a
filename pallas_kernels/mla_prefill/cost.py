"""What latent prefill moves and computes."""

from collections.abc import Iterable

from pallas_kernels.cost import Cost


def cost(
    chunks: Iterable[tuple[int, int]],
    *,
    heads: int,
    nope: int,
    rotated: int,
    latent: int,
    v_dim: int,
    itemsize: int = 2,
) -> Cost:
    """Of chunks (positions before it, tokens), one a row, decompressed once each.

    Bytes are the operands' and the result's. A kernel that keeps plain keys and values in device
    memory moves 2 * heads * (nope + v_dim) * itemsize more for each key.
    """
    chunks = list(chunks)
    tokens = sum(n for _, n in chunks)
    keys = sum(before + n for before, n in chunks)
    pairs = sum(n * before + n * (n + 1) // 2 for before, n in chunks)
    elements = tokens * heads * (nope + rotated + v_dim) + keys * (latent + rotated)
    elements += heads * (nope + v_dim) * latent
    per_head = pairs * (nope + rotated + v_dim) + keys * latent * (nope + v_dim)
    return Cost(bytes=elements * itemsize, flops=2 * heads * per_head)
