"""What prefill attention moves and computes."""

from collections.abc import Iterable

from pallas_kernels.cost import Cost


def cost(
    chunks: Iterable[tuple[int, int]], *, num_heads: int, kv_heads: int, head_dim: int
) -> Cost:
    """Of `api.paged_prefill` with these chunks (tokens before, tokens), of a row each, in bf16.

    K and V of a chunk's row once, q and the result once; the FLOPs are those of the pairs that the
    causal mask keeps.
    """
    chunks = list(chunks)
    tokens = sum(n for _, n in chunks)
    keys = sum(before + n for before, n in chunks)
    pairs = sum(n * before + n * (n + 1) // 2 for before, n in chunks)
    elements = 2 * tokens * num_heads * head_dim + 2 * keys * kv_heads * head_dim
    return Cost(bytes=2 * elements, flops=4 * pairs * num_heads * head_dim)
