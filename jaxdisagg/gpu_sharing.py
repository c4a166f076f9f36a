"""Which of a machine's CUDA devices each node of a deployment uses, and how much of their memory.

Words and defaults alone: what the driver shows is `gpu_setup`'s business.
"""

from collections.abc import Sequence
from dataclasses import replace

from jaxdisagg.config import NodeConfig

# Of a GPU's memory, what the nodes on it take together where they do not say: their contexts and
# libraries need the rest.
SHARED_MEMORY = 0.9


def share_gpus(nodes: Sequence[NodeConfig], visible: int) -> tuple[NodeConfig, ...]:
    """The nodes with `mesh.gpus` and `gpu_memory` filled in where they say nothing of them.

    `visible` CUDA devices are there; with 0 the nodes stay as they are. GPUs that no node names are
    dealt in order, a node's devices after another's; where there are too few, nodes share them, and
    with those all others. Nodes that share a GPU divide SHARED_MEMORY of it, less what some of them
    name; a node alone on its GPUs keeps jax's default.

    Raises ValueError naming the node and `gpus`, for a GPU that is not there, for fewer than a node
    of several processes has devices, or for a node with more devices than there are GPUs; or
    `gpu_memory`, where the nodes on one GPU ask for more than all of it.
    """
    for node in nodes:
        _check_whole(node)
    if not visible:
        return tuple(nodes)
    for node in nodes:
        for gpu in node.mesh.gpus:
            if gpu >= visible:
                raise ValueError(f"{node.id}: gpus={gpu}: the machine shows {visible} CUDA devices")
    dealt = _deal(nodes, visible)
    return tuple(replace(node, gpu_memory=_memory(node, dealt)) for node in dealt)


def _check_whole(node: NodeConfig) -> None:
    """A deployment starts all of a node's processes, each of which needs GPUs of its own."""
    if node.mesh.gpus and len(node.mesh.gpus) < node.mesh.devices:
        raise ValueError(
            f"{node.id}: gpus={'+'.join(map(str, node.mesh.gpus))}: {len(node.mesh.gpus)} for the "
            f"dp*tp={node.mesh.devices} devices of all its processes"
        )


def _deal(nodes: Sequence[NodeConfig], visible: int) -> list[NodeConfig]:
    named = {gpu for node in nodes for gpu in node.mesh.gpus}
    free = [gpu for gpu in range(visible) if gpu not in named]
    silent = [node for node in nodes if not node.mesh.gpus]
    enough = len(free) >= max((node.mesh.devices for node in silent), default=0)
    order = free if enough else list(range(visible))
    found, at = [], 0
    for node in nodes:
        if not node.mesh.gpus:
            need = node.mesh.devices
            if need > visible:
                raise ValueError(
                    f"{node.id}: dp*tp={need} takes {need} GPUs, the machine shows {visible} "
                    "(JAX_PLATFORMS=cpu takes CPU devices instead)"
                )
            gpus = tuple(order[(at + i) % len(order)] for i in range(need))
            node, at = replace(node, mesh=replace(node.mesh, gpus=gpus)), at + need
        found.append(node)
    return found


def _memory(node: NodeConfig, nodes: Sequence[NodeConfig]) -> float:
    """The part of its GPUs' memory that a node takes; 0: it is alone and leaves that to jax."""
    parts = []
    for gpu in node.mesh.gpus:
        here = [other for other in nodes if gpu in other.mesh.gpus]
        said = sum(other.gpu_memory for other in here)
        silent = sum(not other.gpu_memory for other in here)
        if said > 1 or (silent and said >= SHARED_MEMORY and len(here) > 1):
            what = " + ".join(f"{other.gpu_memory:g} of {other.id}" for other in here)
            raise ValueError(f"gpu_memory: {what} do not fit on GPU {gpu}")
        if len(here) > 1 and silent:
            parts.append((SHARED_MEMORY - said) / silent)
    return node.gpu_memory or round(min(parts, default=0.0), 4)
