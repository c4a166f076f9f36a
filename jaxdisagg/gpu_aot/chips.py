"""The chips that programs are compiled for, and how they are described to the compiler."""

from dataclasses import dataclass

import jax
from jax.experimental import topologies

MAX_REGISTERS = 255
"""Of one thread (CUDA C++ Programming Guide, technical specifications by compute capability)."""


@dataclass(frozen=True)
class Chip:
    """Public facts of one GPU: NVIDIA's data sheets, and CUDA's table of limits per capability."""

    name: str
    capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    memory_bytes: int
    memory_bandwidth: float  # bytes/s
    matmul_rate: float  # bf16 multiply-adds of dense matrices, FLOP/s (two for each)
    l2_bytes: int
    clock_ghz: float
    smem_per_core: int = 228 * 1024
    smem_per_block: int = 227 * 1024  # the most that one block may ask for
    registers: int = 65536  # 32-bit ones, of a core and of a block

    def registers_per_thread(self, threads: int) -> int:
        """The most that each of a block's threads can have; registers are given out by eights."""
        return min(MAX_REGISTERS, self.registers // threads // 8 * 8)


# NVIDIA H100 and H200 data sheets, SXM: the same processor, another memory.
H100 = Chip("H100", (9, 0), 132, 80 * 2**30, 3.35e12, 989e12, 50 * 2**20, 1.98)
H200 = Chip("H200", (9, 0), 132, 141 * 2**30, 4.8e12, 989e12, 50 * 2**20, 1.98)
CHIPS = (H100, H200)


def target_config(chip: Chip) -> str:
    """What XLA wants to know of a GPU that is not there, as the text of its protocol buffer.

    The field names are XLA's (GpuTargetConfigProto). With the accelerated features it compiles for
    `sm_90a`, which wgmma and TMA need.
    """
    major, minor = chip.capability
    device: dict[str, object] = {
        "cuda_compute_capability": {
            "major": major,
            "minor": minor,
            "feature_extension": "ACCELERATED_FEATURES",
        },
        "core_count": chip.cores,
        "fpus_per_core": 128,
        "clock_rate_ghz": chip.clock_ghz,
        "device_memory_size": chip.memory_bytes,
        "memory_bandwidth": round(chip.memory_bandwidth),
        "l2_cache_size": chip.l2_bytes,
        "shared_memory_per_core": chip.smem_per_core,
        "shared_memory_per_block": 48 * 1024,
        "shared_memory_per_block_optin": chip.smem_per_block,
        "registers_per_core_limit": chip.registers,
        "registers_per_block_limit": chip.registers,
        "threads_per_warp": 32,
        "threads_per_block_limit": 1024,
        "threads_per_core_limit": 2048,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
    }
    config: dict[str, object] = {
        "gpu_device_info": device,
        "platform_name": '"CUDA"',
        "device_description_str": f'"NVIDIA {chip.name}"',
    }
    return "\n".join(_lines(config)) + "\n"


def _lines(fields: dict[str, object], indent: str = "") -> list[str]:
    lines = []
    for name, value in fields.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name} {{", *_lines(value, indent + "  "), f"{indent}}}"]
        else:
            lines.append(f"{indent}{name}: {value}")
    return lines


def devices(chip: Chip, count: int) -> list[jax.Device]:
    """`count` devices of this kind in one machine, to compile for.

    Raises RuntimeError when jax has no CUDA plugin here.
    """
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=target_config(chip),
        topology=f"1x1x{count}",
    )
    return list(topology.devices)
