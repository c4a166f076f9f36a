"""Steps of a node of several processes: the leader's host inputs as a message, and back.

Each process runs the same programs in the same order on the same inputs, and puts on its own
devices its own part of them; what a program does across processes is XLA's business.
"""

import itertools
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, shard_map
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdisagg.group.messages import Step


def pack(kind: str, number: int, bucket: int, inputs: Any) -> Step:
    """The message for one step; `inputs` are PrefillInputs or DecodeInputs of NumPy arrays."""
    arrays = tuple(getattr(inputs, f.name).tobytes() for f in fields(inputs))
    return Step(kind, number, bucket, arrays)


def unpack(step: Step, padding: Any) -> Any:
    """The inputs of a step; `padding` are inputs of the same bucket, of which it takes the shapes.

    Raises ValueError when they are of another size: the processes do not run the same node.
    """
    found = {}
    for f, data in zip(fields(padding), step.arrays, strict=True):
        like = getattr(padding, f.name)
        if len(data) != like.nbytes:
            raise ValueError(
                f"{f.name}: {len(data)} bytes came for a {step.kind} step of {step.bucket}, "
                f"{like.nbytes} were expected"
            )
        found[f.name] = np.frombuffer(data, like.dtype).reshape(like.shape)
    return type(padding)(**found)


def place(inputs: Any, sharding: NamedSharding) -> Any:
    """Host arrays on the mesh, without asking other processes.

    `jax.device_put` onto the devices of several processes compares the array among them first,
    which is a collective operation.
    """
    if not sharding.mesh.is_multi_process:
        return jax.device_put(inputs, sharding)
    return jax.tree.map(
        lambda array: jax.make_array_from_callback(array.shape, sharding, array.__getitem__),
        inputs,
    )


def meet(mesh: Mesh) -> None:
    """Run one sum over every group of devices that a step's collectives may span.

    The first collective of a group connects its processes, which must then all come within half a
    minute; in a step that each of them compiles first they might not.
    """
    axes = [name for name, size in mesh.shape.items() if size > 1]
    groups = [g for n in range(1, len(axes) + 1) for g in itertools.combinations(axes, n)]

    def sums(x: jax.Array) -> list[jax.Array]:
        return [lax.psum(x, group) for group in groups]

    run = jax.jit(shard_map(sums, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    one = place(np.ones(1, np.float32), NamedSharding(mesh, P()))
    for found, group in zip(run(one), groups, strict=True):
        expected = np.prod([mesh.shape[name] for name in group])
        if np.asarray(found)[0] != jnp.float32(expected):
            raise RuntimeError(f"a sum over {group} of {expected} devices gave {found}")
