"""How long a device computes on a layer of a prefill step: an estimate from shapes, no measurement.

A token costs 2 FLOPs per weight that it is multiplied with, and attention 2 (Hk + Hv) per query
head and (query, key) pair, Hk and Hv being the sizes of a head's key and value: QK^T and the
weighted sum, of causal pairs alone (Kaplan et al. 2020, arXiv 2001.08361, section 2.1, which counts
all pairs). Of experts a token meets its `experts_per_token`. Norms, rotary positions, the router's
choice, softmax, embedding and head are left out, and so are collectives: their time, like every
other loss, is in the model FLOPs utilisation (Chowdhery et al. 2022, arXiv 2204.02311, appendix B)
that the user assumes.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from jax.sharding import AbstractMesh, Mesh

from jaxdisagg.model_fit import ModelFit
from models.interface import ParamSpec
from models.sharding import MESH_AXES

_LAYER = re.compile(r"(layers\.\d+|mtp)\.(.*)")
_CONTRACTED = {"embed", "latent"}  # every matrix of a layer has one of them as input or output


@dataclass(frozen=True)
class Device:
    """What a device computes: `tflops` (10^12 FLOPs/s, dense, of the dtype), of it the share `mfu`.

    Raises ValueError naming the field.
    """

    tflops: float
    mfu: float

    def __post_init__(self) -> None:
        if not 0 < self.tflops < math.inf:
            raise ValueError(f"tflops: {self.tflops}, must be above 0")
        if not 0 < self.mfu <= 1:
            raise ValueError(f"mfu: {self.mfu}, must be above 0 and at most 1")

    def seconds(self, flops: float) -> float:
        """Seconds for so many FLOPs."""
        return flops / (self.tflops * 1e12 * self.mfu)


@dataclass(frozen=True)
class LayerWork:
    """FLOPs of one device for one layer: `attention` and `mlp` per token, `pair` per causal pair.

    The layer's pages leave after the attention's output projection, so `mlp` is what they may hide
    under first.
    """

    attention: float
    mlp: float
    pair: float

    def before_pages(self, begin: int, end: int) -> float:
        """FLOPs until the pages of the tokens [begin, end), behind `begin` cached ones, may go."""
        tokens = end - begin
        pairs = tokens * begin + tokens * (tokens + 1) // 2
        return tokens * self.attention + pairs * self.pair

    def after_pages(self, begin: int, end: int) -> float:
        """FLOPs of the rest of the layer for the same tokens."""
        return (end - begin) * self.mlp


def layer_work(fit: ModelFit) -> tuple[LayerWork, ...]:
    """The work of every layer that has a cache, in order, on a device of the node's mesh.

    Weights are cut by the node's sharding rules, so a projection that tensor ranks repeat (a
    latent, KV heads with copies) is counted whole on each. Every dp rank is taken to prefill such a
    prompt at the same time: experts that are cut over dp then meet the tokens of all dp ranks,
    which is as much work as if they were not. Raises ValueError naming what a family does not tell.
    """
    by_layer: dict[str, dict[str, ParamSpec]] = {}
    for path, spec in fit.family.abstract_params(fit.config).items():
        if found := _LAYER.fullmatch(path):
            by_layer.setdefault(found[1], {})[found[2]] = spec
    if len(by_layer) != fit.layout.layers:
        raise ValueError(
            f"layers: parameters of {len(by_layer)} layers, the cache has {fit.layout.layers}"
        )
    return tuple(_work(fit, layer, specs) for layer, specs in by_layer.items())


def active_parameters(fit: ModelFit) -> tuple[int, int]:
    """(all parameters, those that a token meets): of experts its `experts_per_token`."""
    specs = fit.family.abstract_params(fit.config).values()
    return sum(math.prod(s.shape) for s in specs), round(sum(_active(fit, s) for s in specs))


def _active(fit: ModelFit, spec: ParamSpec) -> float:
    weights = math.prod(spec.shape)
    if not spec.axes or spec.axes[0] != "experts":
        return weights
    chosen = getattr(fit.config, "experts_per_token", None)
    if not isinstance(chosen, int):
        raise ValueError(f"experts_per_token: the config of {fit.family.name} does not have it")
    return weights * chosen / spec.shape[0]


def _work(fit: ModelFit, layer: str, specs: Mapping[str, ParamSpec]) -> LayerWork:
    shape = (1, fit.layout.shards, fit.layout.replicas)
    mesh = cast(Mesh, AbstractMesh(shape, MESH_AXES))  # the rules read its shape alone

    def shards(axes: Iterable[str | None]) -> int:
        return math.prod(fit.rules.shards(mesh, axis) for axis in axes if axis is not None)

    per_token = {True: 0.0, False: 0.0}
    query = value = None
    for name, spec in specs.items():
        if len(spec.shape) < 2 or not _CONTRACTED & set(spec.axes):
            continue
        of_attention = re.search(r"(^|\.)(attention\.|projection$)", name) is not None
        per_token[of_attention] += 2 * _active(fit, spec) / shards(spec.axes)
        if spec.axes[-2:] == ("heads", "head_dim"):
            query = spec.shape[-2:]
        elif spec.axes == ("heads", "head_dim", "embed"):
            value = spec.shape[:2]
    if query is None or value is None:
        raise ValueError(f"{layer}: {fit.family.name} declares no query or output projection")
    (heads, key_size), (_, value_size) = query, value
    pair = 2 * (key_size + value_size) * heads / shards(("heads",))
    return LayerWork(per_token[True], per_token[False], pair)
