"""Reading the list of what XLA's run time does for a program: its thunks.

With `xla_dump_to` XLA writes that list, one line a thunk, a level of four spaces for what is inside
another. What is inside a command buffer is captured once into a CUDA graph and replayed.
"""

import re
from dataclasses import dataclass
from pathlib import Path

DUMP_OPTION = "xla_dump_to"
# After the pass that makes command buffers, where there were any to make.
_SUFFIXES = ("thunk_sequence_after_thunk_passes.txt", "thunk_sequence.txt")
_THUNK = re.compile(r"^(\s*)\d+: k(\w+)")


@dataclass(frozen=True)
class Thunks:
    """What one program's list of thunks says.

    Before a while loop's next round, and before a branch, the host waits for the device, unless
    they are in a command buffer: then the next step cannot be dispatched meanwhile.
    """

    captured_calls: int  # custom calls in command buffers
    other_calls: int  # custom calls outside
    loops: int  # while loops outside command buffers; a loop in a loop counts as one more
    branches: int  # conditionals outside command buffers

    @property
    def host_waits(self) -> int:
        """Places where the host waits at least once in a step."""
        return self.loops + self.branches


def read_thunks(folder: Path) -> Thunks:
    """The list in `folder`, where one program alone was dumped; FileNotFoundError without one."""
    for suffix in _SUFFIXES:
        for file in sorted(folder.glob(f"*.{suffix}")):
            return parse_thunks(file.read_text())
    raise FileNotFoundError(f"{folder}: XLA has dumped no thunk sequence there")


def parse_thunks(text: str) -> Thunks:
    """The figures of a list of thunks."""
    inside, outside = [], []
    buffer: int | None = None  # the depth of the command buffer that we are in
    for line in text.splitlines():
        found = _THUNK.match(line)
        if found is None:
            continue
        depth, kind = len(found[1]), found[2]
        if buffer is not None and depth <= buffer:
            buffer = None
        (outside if buffer is None else inside).append(kind)
        if kind == "CommandBuffer" and buffer is None:
            buffer = depth
    return Thunks(
        captured_calls=inside.count("CustomCall"),
        other_calls=outside.count("CustomCall"),
        loops=outside.count("While"),
        branches=outside.count("Conditional"),
    )
