"""Hypothesis strategies: pairs of nodes of one small cache, on any meshes, with any page sizes."""

import dataclasses

from hypothesis import strategies as st

from jaxdisagg.cache_layout import CacheLayout

HEADS = (1, 2, 3, 4, 6, 8, 12)
PAGE_SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16)

Pair = tuple[CacheLayout, CacheLayout]


def fitting_tp(kv_heads: int) -> list[int]:
    """tp degrees up to 12 that cut the heads, or copy them, evenly."""
    return [t for t in range(1, 13) if kv_heads % t == 0 or t % kv_heads == 0]


@st.composite
def pairs(draw, page_sizes: bool = True) -> Pair:
    """A prefill and a decode node; with `page_sizes` half of them have pages of two sizes."""
    latent = draw(st.booleans())
    heads = 1 if latent else draw(st.sampled_from(HEADS))
    tp = st.integers(1, 8) if latent else st.sampled_from(fitting_tp(heads))
    source = CacheLayout(
        "mla" if latent else "gqa",
        layers=draw(st.integers(1, 2)),
        kv_heads=heads,
        head_dim=draw(st.sampled_from([1, 3])),
        page_size=draw(st.sampled_from(PAGE_SIZES)),
        itemsize=draw(st.sampled_from([1, 2])),
        tp=draw(tp),
        dp=draw(st.integers(1, 3)),
    )
    other = page_sizes and draw(st.booleans())
    size = draw(st.sampled_from(PAGE_SIZES)) if other else source.page_size
    destination = dataclasses.replace(
        source, page_size=size, tp=draw(tp), dp=draw(st.integers(1, 3))
    )
    return source, destination


lengths = st.integers(2, 60)
cuts = st.lists(st.integers(0, 99), max_size=4)
seeds = st.integers(0, 2**32 - 1)
