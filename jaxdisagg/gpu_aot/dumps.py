"""What the compiler of Mosaic GPU kernels writes down about each kernel, read back.

With MOSAIC_GPU_DUMP_TO=folder it writes, for each kernel that it assembles, NAME_i.ptx and
NAME_i.ptxas (the assembler's report of registers and spills), and for each that it lowers
NAME_j.*.txt, whose launch says how much shared memory it asks for. A kernel that the process has
assembled before is not assembled again: so i and j differ, and a process should compile one program
only. XLA's own kernels are not in there.
"""

import math
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_VARIABLES = ("MOSAIC_GPU_DUMP_TO", "MOSAIC_GPU_DUMP_PTXAS")
_CONSTANT = r"%c(\d+)\w*"  # how MLIR names a constant
_LAUNCHED = re.compile(rf"gpu\.launch .* dynamic_shared_memory_size {_CONSTANT}")
_THREADS = re.compile(r"\.(?:maxntid|reqntid) (\d+), (\d+), (\d+)")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_STATIC = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class KernelResources:
    """What one compiled kernel takes: registers per thread, bytes of spills and shared memory.

    Of several kernels of one name in a program the shared memory is that of the largest.
    """

    name: str
    registers: int
    spill_stores: int
    spill_loads: int
    smem_bytes: int
    threads: int  # of a block


@contextmanager
def dumping(folder: Path) -> Generator[None]:
    """Have the kernels that are compiled meanwhile described in `folder`, which must exist.

    The compiler reads the environment of the process at each kernel: one at a time.
    """
    before = {name: os.environ.get(name) for name in _VARIABLES}
    os.environ.update(dict(zip(_VARIABLES, (str(folder), "1"), strict=True)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def read_dumps(folder: Path) -> list[KernelResources]:
    """The kernels described in `folder`, in the order in which they were compiled.

    Raises ValueError naming the file for a description that lacks a figure.
    """
    files = sorted(folder.glob("*.ptxas"), key=lambda f: int(f.stem.rpartition("_")[2]))
    return [_read_kernel(file) for file in files]


def _read_kernel(ptxas: Path) -> KernelResources:
    name, report, ptx = ptxas.stem.rpartition("_")[0], ptxas.read_text(), ptxas.with_suffix(".ptx")
    stores, loads = _figures(_SPILLS, ptxas, report)
    (registers,) = _figures(_REGISTERS, ptxas, report)
    lowered = sorted(ptxas.parent.glob(f"{name}_*.before_layout_inference.txt"))
    if not lowered:
        raise ValueError(f"{ptxas.name}: nothing says what was lowered")
    static = _STATIC.search(report)
    return KernelResources(
        name=name,
        registers=registers,
        spill_stores=stores,
        spill_loads=loads,
        smem_bytes=max(_figures(_LAUNCHED, file, file.read_text())[0] for file in lowered)
        + (int(static[1]) if static else 0),
        threads=math.prod(_figures(_THREADS, ptx, ptx.read_text())),
    )


def _figures(pattern: re.Pattern[str], file: Path, text: str) -> list[int]:
    found = pattern.search(text)
    if found is None:
        raise ValueError(f"{file.name}: nothing like {pattern.pattern!r}: has the report changed?")
    return [int(group) for group in found.groups()]
