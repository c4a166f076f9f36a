"""Whether nodes fit their model and each other: from their configs and config.json, no devices.

What can be known so is refused before any process loads weights or compiles. Nodes that are started
apart find the rest when they greet (`hello.compatibility`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import cast

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxdisagg.cache_layout import CacheLayout
from jaxdisagg.config import NodeConfig
from jaxdisagg.mesh import expert_axes, split_tp
from jaxdisagg.transfer_plan import plan
from models.interface import CacheSpec, ModelConfig, ModelFamily
from models.registry import load_config
from models.sharding import MESH_AXES, ShardingRules, load_rules, make_rules


@dataclass(frozen=True)
class ModelFit:
    """A node's model as the node will run it, and the layout of its cache."""

    family: ModelFamily
    config: ModelConfig
    rules: ShardingRules
    layout: CacheLayout


def cache_layout(node: NodeConfig, spec: CacheSpec) -> CacheLayout:
    """How the cache will lie in memory. Raises ValueError if tp does not fit the KV heads."""
    split_tp(node.mesh.tp, spec.num_kv_heads)
    return CacheLayout(
        kind=spec.kind,
        layers=spec.num_layers,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        page_size=node.cache.page_size,
        itemsize=jnp.dtype(spec.dtype).itemsize,
        tp=node.mesh.tp,
        dp=node.mesh.dp,
    )


def fit_model(node: NodeConfig) -> ModelFit:
    """The node's model on the node's mesh.

    Raises FileNotFoundError or ValueError, naming the field, when the folder holds no supported
    model, or its dtype, limits, mesh, rules, `ep` or `mtp` do not fit that model.
    """
    return fit_config(node, *load_config(node.model))


def fit_config(node: NodeConfig, family: ModelFamily, config: ModelConfig) -> ModelFit:
    """A model that needs no folder on the node's mesh; `node.model` is not read.

    Raises ValueError as `fit_model`.
    """
    config = replace(config, dtype=node.dtype, mtp=node.mtp)
    if node.batch.max_model_len > config.max_position:
        raise ValueError(
            f"max_model_len={node.batch.max_model_len} exceeds the model's "
            f"max_position_embeddings={config.max_position}"
        )
    tp, dp, ep = node.mesh.tp, node.mesh.dp, node.mesh.ep
    if ep > 1 and not _has_experts(family, config):
        raise ValueError(f"ep={ep}: a {family.name} model has no experts to cut")
    experts = expert_axes(tp=tp, dp=dp, ep=ep)
    rules = make_rules(experts) if node.rules is None else load_rules(node.rules, experts)
    spec = family.cache_spec(config)
    layout = cache_layout(node, spec)
    kv, rep = split_tp(tp, spec.num_kv_heads)
    mesh = AbstractMesh((dp, kv, rep), MESH_AXES)
    family.check_mesh(config, cast(Mesh, mesh), rules)  # it reads the shape alone
    if node.rules is not None:  # the default table has been tried
        for parameter in family.abstract_params(config).values():
            rules.spec(*parameter.axes)
        rules.spec("batch", "vocab")  # logits
    return ModelFit(family, config, rules, layout)


def _has_experts(family: ModelFamily, config: ModelConfig) -> bool:
    return any("experts" in spec.axes for spec in family.abstract_params(config).values())


def check_nodes(nodes: Iterable[NodeConfig]) -> None:
    """Check every node against its model, and each prefill node against each decode node.

    Raises FileNotFoundError or ValueError: one line with the node, or both nodes, and the field.
    """
    prefill: list[tuple[NodeConfig, CacheLayout]] = []
    decode: list[tuple[NodeConfig, CacheLayout]] = []
    for node in nodes:
        try:
            layout = fit_model(node).layout
        except (FileNotFoundError, ValueError) as error:
            raise type(error)(f"{node.id}: {error}") from None
        if node.role != "mixed":
            (prefill if node.role == "prefill" else decode).append((node, layout))
    for source, ours in prefill:
        for target, theirs in decode:
            try:
                plan(ours, theirs)
            except ValueError as error:
                raise ValueError(f"{source.id} and {target.id}: {error}") from None
