"""Whether a compiled step leaves the caches and the weights where they are."""

import math
from collections.abc import Iterable

import jax

from jaxdisagg.gpu_aot.hlo import count, moved

__all__ = ["check_in_place", "count"]


def local_elements(array: jax.Array) -> int:
    """Elements of one device's shard."""
    return math.prod(array.sharding.shard_shape(array.shape))


def check_in_place(
    compiled: jax.stages.Compiled,
    caches: Iterable[jax.Array],
    params: Iterable[jax.Array],
    *,
    temp_bytes: int | None = None,
) -> None:
    """Raise AssertionError with the lines that move a cache shard or a weight, whole.

    Fails where `moved` finds one (of weights only matrices count), when the caches are not all
    aliased, and when temporaries exceed `temp_bytes` (one cache shard if not given).
    """
    caches = list(caches)
    bad = moved(
        compiled.as_text(),
        min(map(local_elements, caches)),
        {local_elements(p) for p in params if p.ndim > 1},
    )
    assert not bad, "whole caches or weights are moved:\n" + "\n".join(bad)
    shards = [local_elements(c) * c.dtype.itemsize for c in caches]
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(shards), "not every cache is aliased"
    limit = min(shards) if temp_bytes is None else temp_bytes
    assert memory.temp_size_in_bytes < limit, f"{memory.temp_size_in_bytes} temporary bytes"
