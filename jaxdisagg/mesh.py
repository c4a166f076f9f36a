"""Device meshes: `tp=`, `dp=` as users say them, axes (dp, kv, rep) as the programs see them.

tp = kv * rep, with kv = min(tp, K) for K KV heads (1 for a latent cache). KV heads shard on 'kv'
and are replicated over 'rep'; query heads, FFN and vocabulary shard on ('kv', 'rep').
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from models.sharding import MESH_AXES


def split_tp(tp: int, kv_heads: int) -> tuple[int, int]:
    """(kv, rep) of a tp degree. Raises ValueError if tp neither divides nor is a multiple."""
    kv = min(tp, kv_heads)
    if tp % kv or kv_heads % kv:
        raise ValueError(
            f"tp={tp} does not fit {kv_heads} KV heads: it must divide or be a multiple of them"
        )
    return kv, tp // kv


def expert_axes(*, tp: int, dp: int, ep: int) -> dict[str, list[str]]:
    """Sharding rules of the experts for a degree `ep`, which adds no devices.

    1: every expert on every dp rank, cut inside over tp. dp: experts over dp, each cut inside over
    tp. tp: experts over tp, whole, a copy on every dp rank. dp*tp: experts over all devices, whole.
    Where dp equals tp, `ep` means dp; a rule file can say otherwise.
    """
    inside = ["kv", "rep"]
    if ep == 1:
        return {"experts": [], "expert_ffn": inside}
    if ep == dp * tp:
        return {"experts": ["dp", *inside], "expert_ffn": []}
    if ep == dp:
        return {"experts": ["dp"], "expert_ffn": inside}
    if ep == tp:
        return {"experts": inside, "expert_ffn": []}
    raise ValueError(f"ep={ep} must be 1, dp={dp}, tp={tp} or dp*tp={dp * tp}")


def make_mesh(
    *, tp: int, dp: int, kv_heads: int, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Mesh of dp * tp devices with axes (dp, kv, rep), every axis Auto.

    Raises ValueError when there are fewer devices or tp does not fit the KV heads.
    """
    available = list(jax.local_devices() if devices is None else devices)
    needed = tp * dp
    if needed > len(available):
        raise ValueError(f"tp={tp} dp={dp} needs {needed} devices, {len(available)} are there")
    kv, rep = split_tp(tp, kv_heads)
    grid = np.array(available[:needed], dtype=object).reshape(dp, kv, rep)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def node_devices(count: int, processes: int) -> list[jax.Device]:
    """A node's devices in rank order, an equal share of `count` from each of its processes.

    Of one process all that it has, of which its mesh takes the first `count`. Raises ValueError
    when jax knows another number of processes, or one of them has fewer.
    """
    if processes == 1:
        return jax.local_devices()
    if jax.process_count() != processes:
        raise ValueError(f"processes={processes}, but jax knows {jax.process_count()}")
    share = count // processes
    found: list[jax.Device] = []
    for process in range(processes):
        own = sorted(jax.local_devices(process), key=lambda device: device.id)
        if len(own) < share:
            raise ValueError(
                f"process {process} has {len(own)} devices, its share of dp*tp={count} is {share}"
            )
        found += own[:share]
    return found


def rank_devices(mesh: Mesh) -> list[jax.Device]:
    """Devices in rank order: rank = dp_rank * tp + tp_rank."""
    return list(mesh.devices.reshape(-1))


def is_gpu(device: jax.Device) -> bool:
    """Whether a device, of this process or another, is a CUDA one."""
    return device.platform in ("gpu", "cuda")
