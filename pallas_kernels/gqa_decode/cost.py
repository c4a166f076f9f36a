"""What decode attention moves and computes."""

from collections.abc import Sequence

from pallas_kernels.cost import Cost


def cost(
    lengths: Sequence[int],
    *,
    num_heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    cache_itemsize: int = 2,
) -> Cost:
    """Of `api.gqa_decode` with rows of these lengths: K and V of every token, q and the result.

    q and the result are bf16; cache_itemsize is 2 for bf16 and 1 for e4m3.
    """
    tokens = sum(lengths)
    pages = sum(-(-length // page_size) for length in lengths)
    return Cost(
        bytes=2 * tokens * kv_heads * head_dim * cache_itemsize
        + 2 * len(lengths) * num_heads * head_dim * 2
        + 4 * (pages + len(lengths)),
        flops=4 * tokens * num_heads * head_dim,
    )
