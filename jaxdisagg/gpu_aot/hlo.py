"""Reading the text of a compiled program: what it reduces, calls, aliases and moves as a whole.

The text is XLA's, `jax.stages.Compiled.as_text()`. An address that stays the same proves nothing: a
step may rewrite a whole cache in place and so undo what a remote writer has put there meanwhile.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# `%name = TYPE opcode(...)`; TYPE is an array, `bf16[4,2,32]{2,1,0}`, or a bracket of them.
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?\S+ = ((?:\(.*?\)|\S+)) ([a-z][a-z\d-]*)\(")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_ALIAS = re.compile(r"\{(\d+)[^}]*\}: \((\d+), \{\}")
_COMPUTATION = re.compile(r"^(ENTRY )?%?\S+ \(.*\{$")

# What may produce a whole cache: naming it, passing it on, writing some of it in place. A fusion
# is judged by the instructions of its body, which stand in the text as well.
PASSING = frozenset(
    {
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
)
MOVING = frozenset(
    {"copy", "copy-start", "convert", "transpose", "reverse", "all-gather", "all-gather-start"}
)
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclass(frozen=True)
class Instruction:
    """One instruction: its results, each as (dtype, elements), and whether it is in the entry."""

    opcode: str
    results: tuple[tuple[str, int], ...]
    line: str
    in_entry: bool

    @property
    def elements(self) -> int:
        """Elements of the largest result."""
        return max((n for _, n in self.results), default=0)

    def attribute(self, pattern: str) -> str | None:
        """The first group of `pattern` in the line, if it is there."""
        found = re.search(pattern, self.line)
        return found[1] if found else None


@dataclass(frozen=True)
class Sent:
    """One array that a collective sends: combined and asynchronous ones are told apart."""

    opcode: str  # of COLLECTIVES
    dtype: str
    elements: int  # of the result, on one device
    in_entry: bool  # else in a branch or in a loop


def instructions(text: str) -> Iterator[Instruction]:
    """Every instruction of the text with an array among its results, in order."""
    in_entry = False
    for line in text.splitlines():
        found = _INSTRUCTION.match(line)
        if found is None:
            opening = _COMPUTATION.match(line)
            if opening:
                in_entry = opening[1] is not None
            continue
        results = tuple(
            (dtype, math.prod(int(n) for n in dims.split(",") if n))
            for dtype, dims in _ARRAY.findall(found[1])
        )
        if results:
            yield Instruction(found[2], results, line.strip(), in_entry)


def count(text: str, opcode: str) -> int:
    """How often an operation occurs, its asynchronous start counting as one."""
    return sum(i.opcode in (opcode, f"{opcode}-start") for i in instructions(text))


def collectives(text: str) -> list[Sent]:
    """Every array that a collective of the text sends, one for each of a combined one."""
    found = []
    for i in instructions(text):
        opcode = i.opcode.removesuffix("-start")
        if opcode not in COLLECTIVES:
            continue
        results = i.results
        if i.opcode != opcode:  # a start's result is (operands, results)
            results = results[len(results) // 2 :]
        found += [Sent(opcode, dtype, n, i.in_entry) for dtype, n in results]
    return found


def custom_calls(text: str, target: str) -> list[Instruction]:
    """The calls of a custom call target, in order."""
    name = f'custom_call_target="{target}"'
    return [i for i in instructions(text) if i.opcode == "custom-call" and name in i.line]


def aliases(text: str) -> dict[int, int]:
    """Which outputs of the program are parameters in place: output -> parameter."""
    header = text[: text.find("entry_computation_layout")]
    return {int(output): int(parameter) for output, parameter in _ALIAS.findall(header)}


def moved(text: str, cache_elements: int, weight_elements: Iterable[int] = ()) -> list[str]:
    """The lines that move a whole cache or weight, cut short.

    Any instruction with as many elements as a cache shard, or more, that does not merely pass it
    on or write into it; a copy, convert, transpose or gather with exactly the elements of a
    weight's shard (so choose sizes that no activation shares).
    """
    weights = frozenset(weight_elements)
    return [
        i.line[:200]
        for i in instructions(text)
        if (i.elements >= cache_elements and i.opcode not in PASSING)
        or (i.elements in weights and i.opcode in MOVING)
    ]
