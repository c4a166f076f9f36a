"""From a model folder and a node's mesh to sharded parameters, with every misfit named."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
from jax.sharding import Mesh

from jaxdisagg.config import DEFAULT_MODEL_LEN, NodeConfig
from jaxdisagg.mesh import expert_axes, make_mesh
from models.checkpoint import load_params, weights_fingerprint
from models.interface import ModelConfig, ModelFamily, Params
from models.registry import load_config
from models.sharding import ShardingRules, load_rules, make_rules


@dataclass(frozen=True)
class LoadedModel:
    """A model on a mesh. `fingerprint` differs when architecture, dtype or weights differ."""

    name: str
    family: ModelFamily
    config: ModelConfig
    params: Params
    mesh: Mesh
    rules: ShardingRules
    fingerprint: str


def resolve_limits(node: NodeConfig) -> NodeConfig:
    """The node with the limits that its model decides filled in; reads config.json alone.

    Raises FileNotFoundError or ValueError for a folder that holds no supported model.
    """
    if node.batch.max_model_len:
        return node
    _, config = load_config(node.model)
    length = min(DEFAULT_MODEL_LEN, config.max_position)
    return replace(node, batch=replace(node.batch, max_model_len=length))


def load_model(node: NodeConfig, devices: Sequence[jax.Device] | None = None) -> LoadedModel:
    """Load the node's model onto its mesh (of `devices`, by default this process's own).

    Raises FileNotFoundError or ValueError, for a person to read, when the folder, the mesh, the
    rules or the limits do not fit.
    """
    family, config = load_config(node.model)
    config = replace(config, dtype=node.dtype, mtp=node.mtp)
    if node.batch.max_model_len > config.max_position:
        raise ValueError(
            f"max_model_len={node.batch.max_model_len} exceeds the model's "
            f"max_position_embeddings={config.max_position}"
        )
    experts = expert_axes(tp=node.mesh.tp, dp=node.mesh.dp, ep=node.mesh.ep)
    rules = make_rules(experts) if node.rules is None else load_rules(node.rules, experts)
    kv_heads = family.cache_spec(config).num_kv_heads
    mesh = make_mesh(tp=node.mesh.tp, dp=node.mesh.dp, kv_heads=kv_heads, devices=devices)
    params = load_params(node.model, config, mesh, rules)
    fingerprint = f"{config.fingerprint()}-{weights_fingerprint(node.model)}"
    return LoadedModel(node.model.resolve().name, family, config, params, mesh, rules, fingerprint)
