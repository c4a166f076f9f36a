"""How the processes of a node start as one: their configuration, and jax.distributed."""

from dataclasses import replace
from pathlib import Path

import jax
import msgspec

from jaxdisagg.config import NodeConfig
from jaxdisagg.group.errors import GroupError

# jax ends the process (SIGABRT) when it finds that another is gone. The channel finds it first and
# says which, so jax's own watch only has to be slower than any `timeouts.member`.
_WATCH_FACTOR = 10
_LEAST_WATCH_SECONDS = 100


def comparable(node: NodeConfig) -> str:
    """What must be the same in all processes of a node, as JSON.

    Not the process's own number and addresses, its CPUs, GPUs and NICs, nor paths, which may differ
    by machine: the model and the rules are compared as loaded.
    """
    same = replace(
        node,
        process=0,
        group=None,
        host="",
        http_port=0,
        fabric_port=0,
        router=None,
        model=Path(),
        rules=None,
        nics=(),
        gpu_memory=0.0,
        mesh=replace(node.mesh, cpus=(), gpus=()),
    )
    return msgspec.json.encode(same, enc_hook=str).decode()


def differences(ours: str, leaders: str) -> str | None:
    """The first field in which two configurations (of `comparable`) differ, or None."""

    def flat(document: dict, prefix: str = "") -> dict[str, object]:
        found: dict[str, object] = {}
        for name, value in document.items():
            if isinstance(value, dict):
                found |= flat(value, f"{prefix}{name}.")
            else:
                found[prefix + name] = value
        return found

    a, b = flat(msgspec.json.decode(ours)), flat(msgspec.json.decode(leaders))
    for name in a | b:
        if a.get(name) != b.get(name):
            return f"{name}: {a.get(name)} here, {b.get(name)} at process 0; they must be the same"
    return None


def initialize(coordinator: str, node: NodeConfig, timeout: float) -> None:
    """Let jax know the devices of all processes; process 0 coordinates at this address.

    On CPUs collectives go over gloo, on GPUs over NCCL; there each process sees its own devices
    alone (`gpu_setup`), so that all it sees are its share. Before the first use of a device. Raises
    GroupError if not all of them come within `timeout` seconds.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    watch = max(_LEAST_WATCH_SECONDS, int(_WATCH_FACTOR * node.timeouts.member))
    try:
        jax.distributed.initialize(
            coordinator,
            node.mesh.processes,
            node.process,
            cluster_detection_method="deactivate",
            initialization_timeout=max(int(timeout), 1),
            heartbeat_timeout_seconds=watch,
            coordinator_bind_address=coordinator,
        )
    except RuntimeError as error:
        raise GroupError(f"jax.distributed at {coordinator}: {error}") from None
