"""From a model folder and a node's mesh to sharded parameters, with every misfit named."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
from jax.sharding import Mesh

from jaxdisagg.config import DEFAULT_MODEL_LEN, NodeConfig
from jaxdisagg.gpu_setup import BACK_END_ERRORS, why_no_devices
from jaxdisagg.mesh import make_mesh, node_devices
from jaxdisagg.model_fit import fit_model
from models.checkpoint import load_measured, open_checkpoint, weights_fingerprint
from models.interface import ModelConfig, ModelFamily, Params
from models.registry import load_config
from models.sharding import ShardingRules

log = logging.getLogger(__name__)


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


def _own_devices(node: NodeConfig) -> list[jax.Device]:
    """The node's devices. Raises ValueError where jax's back end does not start."""
    try:
        return node_devices(node.mesh.devices, node.mesh.processes)
    except BACK_END_ERRORS as error:
        why = why_no_devices(error)
        if not node.mesh.gpus:
            raise ValueError(f"jax finds no devices: {why}") from error
        words = "+".join(map(str, node.mesh.gpus))
        raise ValueError(f"gpus={words}: jax cannot use them: {why}") from error


def load_model(node: NodeConfig, devices: Sequence[jax.Device] | None = None) -> LoadedModel:
    """Load the node's model onto its mesh (of `devices`, by default the node's own).

    Of a node of several processes each loads what its devices hold.

    Raises FileNotFoundError or ValueError, for a person to read, when the folder, the mesh, the
    rules or the limits do not fit.
    """
    fit = fit_model(node)
    config, rules = fit.config, fit.rules
    if devices is None:
        devices = _own_devices(node)
    mesh = make_mesh(
        tp=node.mesh.tp, dp=node.mesh.dp, kv_heads=fit.layout.kv_heads, devices=devices
    )
    params, stats = load_measured(open_checkpoint(node.model, config, mesh, rules))
    log.info("loaded %s: %s", node.model, stats)
    architecture = replace(config, mtp=False).fingerprint()  # HELLO names mtp by itself
    fingerprint = f"{architecture}-{weights_fingerprint(node.model)}"
    name = node.model.resolve().name
    return LoadedModel(name, fit.family, config, params, mesh, rules, fingerprint)
