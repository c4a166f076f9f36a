"""The whole sharded step programs that are compiled: real models, cut to a few layers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ffi_transport.trigger import make_trigger
from jaxdisagg.mesh import make_mesh
from jaxdisagg.speculative_step import Seats, SpeculativePrograms
from jaxdisagg.step import DecodeInputs, PrefillInputs, StepPrograms
from models.interface import Mode, ModelConfig
from models.registry import parse_config, read_json_object
from models.sharding import DEFAULT_RULES

TP = 8
PAGE_SIZE = 64
WIDTH = 256  # pages of a row: 16,384 tokens
PREFILL_ROWS = 8


@dataclass(frozen=True)
class StepCase:
    """A step program of one model. Sizes are no powers of two: see `Step.weights`.

    `attention` is the kernel that each layer's attention must be, called `calls` times (mla_prefill
    attends to the first keys before its loop over the others), `model` a config.json.
    """

    model: str
    program: Mode
    attention: str
    calls: int = 1
    drafts: bool = False
    layers: int = 4
    tokens: int = 1088  # of a prefill step
    rows: int = 68  # of a decode step
    pages: int = 8192

    @property
    def name(self) -> str:
        """How a failure and the table name it."""
        return f"{self.model} {self.program}{' with drafts' if self.drafts else ''}"


STEP_CASES = (
    StepCase("qwen3-coder-480b", "prefill", "paged_prefill"),
    StepCase("qwen3-coder-480b", "decode", "gqa_decode"),
    StepCase("deepseek-r1", "prefill", "mla_prefill", calls=2),
    StepCase("deepseek-r1", "decode", "mla_decode"),
    StepCase("deepseek-r1", "decode", "mla_decode", drafts=True),
)


@dataclass(frozen=True)
class Step:
    """A step program, and what its compiled form is held against; sizes are of one device."""

    case: StepCase
    lowered: jax.stages.Lowered
    config: ModelConfig
    caches: int  # one of each layer; the MTP module's is one more
    cache_elements: int  # of one layer's cache
    cache_bytes: int
    weights: frozenset[int]  # elements of each matrix; no activation should have as many
    activations: int  # tokens or rows that go through the layers at once
    states: int  # arrays besides the caches that must stay where they are


def lower_step(case: StepCase, folder: Path, devices: Sequence[jax.Device]) -> Step:
    """The step program of `case`, its model's config in `folder`, for tp = 8 of these devices.

    Raises FileNotFoundError or ValueError for a config that is not there or not supported.
    """
    family, config = parse_config(_cut(read_json_object(folder / f"{case.model}.json"), case))
    config = replace(config, mtp=case.drafts)
    spec = family.cache_spec(config)
    mesh = make_mesh(tp=TP, dp=1, kv_heads=spec.num_kv_heads, devices=devices)

    def array(shape: tuple[int, ...], dtype: Any, where: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, where))

    kind = SpeculativePrograms if case.drafts else StepPrograms
    programs = kind(
        family, config, mesh, DEFAULT_RULES, page_size=PAGE_SIZE, trigger=make_trigger(0)
    )
    params = {
        name: array(p.shape, p.dtype, DEFAULT_RULES.spec(*p.axes))
        for name, p in family.abstract_params(config).items()
    }
    cache = array(spec.shape(case.pages, PAGE_SIZE), spec.dtype, spec.partition)
    caches = (cache,) * spec.num_layers
    by_rank, rows = P("dp"), PREFILL_ROWS if case.program == "prefill" else case.rows
    context = array((case.rows, config.hidden_size), spec.dtype, by_rank)
    table = array((rows, WIDTH), jnp.int32, by_rank)
    if case.program == "prefill":
        inputs = PrefillInputs(
            tokens=array((case.tokens, 4), jnp.int32, by_rank),
            page_table=table,
            lengths=array((rows,), jnp.int32, by_rank),
            last=array((rows, 2), jnp.int32, by_rank),
        )
        step = array((), jnp.int32, P())
        lowered = programs.prefill.lower(params, caches, context, step, inputs)
    else:
        inputs = DecodeInputs(
            ints=array((rows, 7), jnp.int32, by_rank),
            floats=array((rows, 2), jnp.float32, by_rank),
            page_table=table,
        )
        seats: Any = array((rows + 1,), jnp.int32, by_rank)
        if case.drafts:
            ints: Any = array((rows + 1, 4), jnp.int32, by_rank)
            hidden: Any = array((rows + 1, 2, config.hidden_size), config.dtype, by_rank)
            seats = Seats(ints, hidden)
        lowered = programs.decode.lower(params, caches, seats, context, inputs)
    return Step(
        case=case,
        lowered=lowered,
        config=config,
        caches=spec.num_layers,
        cache_elements=_local_elements(cache),
        cache_bytes=_local_elements(cache) * jnp.dtype(spec.dtype).itemsize,
        weights=frozenset(_local_elements(p) for p in params.values() if len(p.shape) > 1),
        activations=case.tokens if case.program == "prefill" else rows * (1 + case.drafts),
        states=2 if case.drafts else 1,
    )


def _cut(hf: dict[str, Any], case: StepCase) -> dict[str, Any]:
    """The config with a few layers, of which one keeps a dense MLP where the first ones do."""
    dense = {"first_k_dense_replace": 1} if hf.get("first_k_dense_replace") else {}
    return hf | {"num_hidden_layers": case.layers} | dense


def _local_elements(array: jax.ShapeDtypeStruct) -> int:
    count = 1
    for n in array.sharding.shard_shape(array.shape):
        count *= n
    return count
