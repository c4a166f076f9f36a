"""The layers that families share: declarations as nnx modules, computations as pure functions.

A module here is built under `nnx.eval_shape` alone: it says which parameters a layer has, with
their shapes, logical axes and Hugging Face names side by side. The step never calls a module; it
calls the functions below on arrays of the flat parameter dict.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from models.interface import HFSource, ParamSpec
from models.sharding import ShardingRules


def declare(
    name: str,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    dtype: str,
    *,
    inputs: int = 0,
    stack: int = 0,
) -> nnx.Param:
    """A parameter read from the Hugging Face tensor `name`.

    With `inputs` = n > 0 the first n dimensions are the matmul's inputs: the tensor on disk is
    [outputs, inputs], each group flattened, and is transposed once at loading, so that a step
    multiplies `x @ w` without moving a weight. With 0 the tensor is taken as it lies. With `stack`
    = E > 0 there are E tensors, `{}` in the name being their number, and the parameter is
    [E, *shape]; `axes` then begins with the axis of the stack.
    """
    outputs = shape[inputs:]
    if inputs:
        on_disk = (math.prod(outputs), math.prod(shape[:inputs]))
        order = (*range(len(outputs), len(shape)), *range(len(outputs)))
    else:
        on_disk, order = shape, tuple(range(len(shape)))
    names = [name.format(i) for i in range(stack)] if stack else [name]
    sources = [HFSource(n, on_disk, (*outputs, *shape[:inputs]), order) for n in names]
    full = (stack, *shape) if stack else shape
    return parameter(full, axes, dtype, *sources, stacked=bool(stack))


def parameter(
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    dtype: str,
    *sources: HFSource,
    stacked: bool = False,
) -> nnx.Param:
    """A parameter whose sources `declare` cannot say, such as a part of a tensor."""
    return nnx.Param(jnp.zeros(shape, dtype), axes=axes, sources=sources, stacked=stacked)


def abstract_params(build: Callable[[], nnx.Module]) -> dict[str, ParamSpec]:
    """Every parameter of the module that `build` makes, by dotted path; allocates nothing."""
    state = nnx.state(nnx.eval_shape(build), nnx.Param)
    specs = {}
    for path, variable in nnx.to_flat_state(state):
        value, meta = variable.get_value(), variable.get_metadata()
        specs[".".join(map(str, path))] = ParamSpec(
            tuple(value.shape), str(value.dtype), meta["axes"], meta["sources"], meta["stacked"]
        )
    return specs


class RMSNorm(nnx.Module):
    """A scale per feature."""

    def __init__(self, name: str, size: int, axis: str | None, dtype: str) -> None:
        self.scale = declare(name, (size,), (axis,), dtype)


class Table(nnx.Module):
    """One row per vocabulary entry: the embedding, and the head in the same [V, D] layout."""

    def __init__(self, name: str, vocab: int, hidden: int, dtype: str) -> None:
        self.table = declare(name, (vocab, hidden), ("vocab", "embed"), dtype)


class GatedMLP(nnx.Module):
    """silu(x @ gate) * (x @ up) @ down."""

    def __init__(self, prefix: str, hidden: int, ffn: int, dtype: str) -> None:
        wide = ((hidden, ffn), ("embed", "ffn"))
        self.gate = declare(f"{prefix}.gate_proj.weight", *wide, dtype, inputs=1)
        self.up = declare(f"{prefix}.up_proj.weight", *wide, dtype, inputs=1)
        self.down = declare(
            f"{prefix}.down_proj.weight", (ffn, hidden), ("ffn", "embed"), dtype, inputs=1
        )


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x [..., D] over its root mean square, times scale [D]; the mean in f32, result as x."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * scale


def embed(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of table [V, D] for tokens [T]; ids are in range (the caller has checked them)."""
    return table.at[tokens].get(mode="clip")


def output_projection(x: jax.Array, o: jax.Array) -> jax.Array:
    """x [T, N, H] times o [N, H, D]: [T, D], partial sums over shards of N until constrained.

    As one plain matmul: with two contracted axes the CPU takes twice as long.
    """
    return jnp.dot(x.reshape(x.shape[0], -1), o.reshape(-1, o.shape[-1]))


def gated_mlp(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """x [T, D] -> [T, D]; partial sums over shards of F until the caller constrains the result."""
    # silu and the product in f32: in bf16 the CPU rounds after every operation, which costs more.
    gated = jax.nn.silu(jnp.dot(x, gate, preferred_element_type=jnp.float32))
    hidden = gated * jnp.dot(x, up, preferred_element_type=jnp.float32)
    return jnp.dot(hidden.astype(x.dtype), down)


def vocabulary_logits(
    hidden: jax.Array, table: jax.Array, *, mesh: Mesh, rules: ShardingRules
) -> jax.Array:
    """`project_to_vocabulary` of hidden [dp*R, D], sharded on ('dp', 'vocab')."""
    sharding = rules.sharding(mesh, ("batch", "vocab"))
    return lax.with_sharding_constraint(project_to_vocabulary(hidden, table), sharding)


def project_to_vocabulary(hidden: jax.Array, table: jax.Array) -> jax.Array:
    """f32 [R, V] of hidden [R, D] and table [V, D].

    Contracts both last axes with f32 accumulation, so that neither a tied nor an untied head is
    transposed or converted as a whole.
    """
    return lax.dot_general(
        hidden, table, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
