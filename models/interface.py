"""What a model family offers and what a step gives it: batch, cache, parameters, hook.

Shape letters, here and in the family files: B requests, T tokens, S cached length, D model,
N/K query/KV heads, H head dim, F ffn, E experts, V vocab, P pages, Z page size, W page-table width,
R rows; where a latent cache is meant, R is its kv_lora_rank and C its rope dims.
Sizes are per dp rank unless written `dp*`; the leading axes of batch arrays and caches are
dp-major, so that a shard of a rank is contiguous.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import jax
from jax.sharding import Mesh, PartitionSpec

from models.sharding import ShardingRules

Mode = Literal["prefill", "decode"]
Params = dict[str, jax.Array]
Caches = tuple[jax.Array, ...]

# hook(*operands, x [T, D], cache_l (local shard), layer) -> x. It runs inside a shard_map on local
# shards, once per device and layer, after the all-reduce of the output projection and after the
# layer's cache write. It must return x's values unchanged.
Hook = Callable[..., jax.Array]

DTYPES = ("bfloat16", "float32")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepBatch:
    """One step's int32 inputs, all sharded on 'dp' along their first axis.

    Token t of row r writes its K/V at `slots[t]` and attends to cache positions 0..positions[t] of
    row r. In decode mode T == R and token i belongs to row i.
    """

    tokens: jax.Array  # [dp*T] token ids; any valid id for padding
    positions: jax.Array  # [dp*T] position in the sequence, 0-based; 0 for padding
    rows: jax.Array  # [dp*T] row of this rank's page table; -1 for padding
    slots: jax.Array  # [dp*T] page * Z + offset, page ids local to the rank; padding: page 0
    page_table: jax.Array  # [dp*R, W] page ids; entries past the row's length may be anything
    lengths: jax.Array  # [dp*R] tokens in the cache after this step; 0 for an unused row


@dataclass(frozen=True)
class CacheSpec:
    """The paged cache of a model: one array per layer, page 0 of each dp rank is scratch.

    gqa: [pages, K, 2, Z, H]. mla: [pages, Z, R+C], one latent vector and one rotated key per token,
    a copy on every tp rank; `num_kv_heads` is 1 and `head_dim` R+C.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    kind: Literal["gqa", "mla"] = "gqa"

    @property
    def partition(self) -> PartitionSpec:
        """How a layer's array is sharded: pages over 'dp', KV heads (if it has any) over 'kv'."""
        return PartitionSpec("dp", "kv") if self.kind == "gqa" else PartitionSpec("dp")

    def shape(self, pages: int, page_size: int) -> tuple[int, ...]:
        """Global shape of a layer's array, `pages` over all dp ranks."""
        if self.kind == "mla":
            return (pages, page_size, self.head_dim)
        return (pages, self.num_kv_heads, 2, page_size, self.head_dim)


@dataclass(frozen=True)
class HFSource:
    """The Hugging Face tensor that a parameter is read from.

    A tensor `name` of shape `shape` on disk is reshaped to `view`, cut along one axis of that to
    `take` = (axis, begin, end) if given, then transposed by `order`.
    """

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    order: tuple[int, ...]
    take: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class ParamSpec:
    """Shape, dtype and logical axes (one name or None per dimension) of a parameter; its origin.

    With one source the parameter is that tensor; with several (experts) they are stacked along a
    new first axis. `stacked` tells a stack of one apart.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]
    sources: tuple[HFSource, ...]
    stacked: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What every family needs; families add their fields. Raises ValueError naming a bad field."""

    family: ClassVar[str]

    vocab_size: int
    num_layers: int
    hidden_size: int
    max_position: int
    dtype: str = "bfloat16"  # of parameters, activations and cache
    mtp_layers: int = 0  # MTP modules that the checkpoint offers
    mtp: bool = False  # whether the (first) MTP module is loaded, cached and drafts

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "hidden_size", "max_position"):
            require_positive(self, name)
        if self.mtp and not self.mtp_layers:
            raise ValueError("mtp: this model has no MTP module (num_nextn_predict_layers is 0)")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: {self.dtype!r} is not one of {', '.join(DTYPES)}")

    def fingerprint(self) -> str:
        """16 hex digits that differ when any field differs; the weights are not part of it."""
        fields = {"family": self.family, **dataclasses.asdict(self)}
        text = json.dumps(fields, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def require_positive(config: Any, *names: str) -> None:
    """Raise ValueError naming the first of the fields that is not an integer > 0."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ValueError(f"{name}: expected an integer > 0, got {value!r}")


class ModelFamily(Protocol):
    """The functions of one architecture. Stateless; all of it is driven by its config."""

    name: str
    architectures: tuple[str, ...]  # the names in config.json's `architectures` that it reads

    def config_from_hf(self, hf: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face config.json; ValueError names an unsupported or missing field."""
        ...

    def abstract_params(self, config: Any) -> dict[str, ParamSpec]:
        """Every parameter by path, in the order of the layers."""
        ...

    def ignores_tensor(self, config: Any, name: str) -> bool:
        """Whether a checkpoint may hold this tensor although the model has no use for it."""
        ...

    def cache_spec(self, config: Any) -> CacheSpec:
        """The cache of all layers: `num_layers` that `forward` uses, one more if `config.mtp`."""
        ...

    def check_mesh(self, config: Any, mesh: Mesh, rules: ShardingRules) -> None:
        """Raise ValueError naming each field that does not fit the mesh."""
        ...

    def forward(
        self,
        config: Any,
        params: Params,
        batch: StepBatch,
        caches: Caches,
        *,
        mesh: Mesh,
        rules: ShardingRules,
        mode: Mode,
        hook: Hook | None = None,
        hook_operands: tuple[jax.Array, ...] = (),
    ) -> tuple[jax.Array, Caches]:
        """Write the batch's K/V, run all main layers, return (hidden [dp*T, D], new caches).

        `caches` are those of the `num_layers` main layers.

        `hidden` is after the final norm, in the config's dtype, sharded on 'dp'; rows of padding
        hold finite values of no meaning. The caller donates `caches`. Traceable under jit; pure.
        `hook_operands` are replicated arrays handed to the hook first.
        """
        ...

    def logits(
        self, config: Any, params: Params, hidden: jax.Array, *, mesh: Mesh, rules: ShardingRules
    ) -> jax.Array:
        """f32 [dp*R, V] of hidden [dp*R, D], sharded on ('dp', 'vocab')."""
        ...


class DraftingFamily(ModelFamily, Protocol):
    """A family with a multi-token-prediction (MTP) module, used when `config.mtp`.

    Row i of the module combines the hidden state of token i with the embedding of token i+1, keeps
    its own cache layer (index `num_layers`), and predicts token i+2.
    """

    def draft(
        self,
        config: Any,
        params: Params,
        batch: StepBatch,
        hidden: jax.Array,
        next_tokens: jax.Array,
        cache: jax.Array,
        *,
        mesh: Mesh,
        rules: ShardingRules,
        mode: Mode,
        hook: Hook | None = None,
        hook_operands: tuple[jax.Array, ...] = (),
    ) -> tuple[jax.Array, jax.Array]:
        """Run the module on rows of `batch`, return (state [dp*T, D], the layer's new cache).

        `hidden` [dp*T, D] is what `forward` gives for the batch's tokens (after the final norm),
        `next_tokens` i32 [dp*T] the tokens that follow them; `batch.tokens` is not read. The hook
        is called with layer `num_layers`. The caller donates `cache`. Traceable under jit; pure.
        """
        ...

    def draft_logits(
        self, config: Any, params: Params, state: jax.Array, *, mesh: Mesh, rules: ShardingRules
    ) -> jax.Array:
        """f32 [dp*R, V] of the module's state [dp*R, D], sharded on ('dp', 'vocab')."""
        ...
