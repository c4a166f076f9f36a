"""Whether a compiled step leaves the cache and the weights where they are.

An address that stays the same proves nothing: a step may rewrite the whole cache in place and so
undo what a remote writer has put there meanwhile. So the compiled program itself is read.
"""

import math
import re
from collections.abc import Iterable

import jax

# `%name = bf16[4,2,2,16,32]{4,3,2,1,0} opcode(...)`, in entry and fused computations alike.
_INSTRUCTION = re.compile(r"=\s+\(?(\w+)\[([\d,]*)\]\S*\s+([\w-]+)\(")
# What may produce a whole cache: naming it, passing it on, writing some of it in place. A fusion
# is judged by the instructions of its body, which stand in the text as well.
_PASSING = {
    "parameter",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "call",
    "fusion",
    "opt-barrier",
    "scatter",
    "dynamic-update-slice",
}
_MOVING = {"copy", "copy-start", "convert", "transpose", "select", "reverse", "all-gather"}


def instructions(text: str) -> Iterable[tuple[int, str, str]]:
    """(elements, opcode, line) of every instruction of an HLO text with an array result."""
    for line in text.splitlines():
        match = _INSTRUCTION.search(line)
        if match:
            dims = [int(d) for d in match.group(2).split(",") if d]
            yield math.prod(dims), match.group(3), line.strip()


def local_elements(array: jax.Array) -> int:
    """Elements of one device's shard."""
    return math.prod(array.sharding.shard_shape(array.shape))


def count(text: str, opcode: str) -> int:
    """How often an operation occurs, its asynchronous start counting as one."""
    return sum(op in (opcode, f"{opcode}-start") for _, op, _ in instructions(text))


def check_in_place(
    compiled: jax.stages.Compiled,
    caches: Iterable[jax.Array],
    params: Iterable[jax.Array],
    *,
    temp_bytes: int | None = None,
) -> None:
    """Raise AssertionError with the lines that move a cache shard or a weight, whole.

    Fails on any instruction with as many elements as a cache shard, or more, that does not merely
    pass it on or write into it; on a copy, convert, transpose or select with exactly the elements
    of a weight's shard (matrices only; choose sizes that no activation shares); when the caches are
    not all aliased; and when temporaries exceed `temp_bytes` (one cache shard if not given).
    """
    caches = list(caches)
    text = compiled.as_text()
    cache_elements = min(map(local_elements, caches))
    weight_elements = {local_elements(p) for p in params if p.ndim > 1}
    bad = [
        line[:200]
        for elements, op, line in instructions(text)
        if (elements >= cache_elements and op not in _PASSING)
        or (elements in weight_elements and op in _MOVING)
    ]
    assert not bad, "whole caches or weights are moved:\n" + "\n".join(bad)
    shards = [local_elements(c) * c.dtype.itemsize for c in caches]
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(shards), "not every cache is aliased"
    limit = min(shards) if temp_bytes is None else temp_bytes
    assert memory.temp_size_in_bytes < limit, f"{memory.temp_size_in_bytes} temporary bytes"
