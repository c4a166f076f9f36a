"""Hugging Face safetensors into sharded device arrays, each shard read straight from the file."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from models.interface import HFSource, ModelConfig, ModelFamily, Params, ParamSpec
from models.registry import family_of
from models.safetensors_files import DTYPES, StoredTensor, list_tensors
from models.sharding import ShardingRules


def load_params(path: str | Path, config: ModelConfig, mesh: Mesh, rules: ShardingRules) -> Params:
    """Every parameter of the model at `path`, in the config's dtype, sharded by the rules.

    Raises FileNotFoundError when weight files are missing; ValueError when a file is no
    safetensors file, when the mesh does not fit, and once, with the whole list, when tensors are
    missing, unknown, misshapen or of an unsupported dtype.
    """
    folder = Path(path)
    family = family_of(config)
    family.check_mesh(config, mesh, rules)
    specs = family.abstract_params(config)
    stored = list_tensors(folder)
    ignored = {name for name in stored if family.ignores_tensor(config, name)}
    _check(folder, specs, {n: t for n, t in stored.items() if n not in ignored})
    return {name: _load(stored, spec, mesh, rules) for name, spec in specs.items()}


def shared_tensors(family: ModelFamily, config: ModelConfig) -> dict[str, str]:
    """Tensors that a checkpoint stores although they are copies: name of the copy -> of the main.

    Families say so in a method `shared_tensors(config)`, which they need not have.
    """
    method = getattr(family, "shared_tensors", None)
    return {} if method is None else dict(method(config))


def weights_fingerprint(path: str | Path) -> str:
    """16 hex digits over every tensor's name, dtype, shape and up to 12 KiB of its bytes.

    Cheap enough for start-up. It tells other weights of the same shapes apart (a finetune, another
    dtype); it is no integrity check, since the bytes between the samples are not read.
    """
    digest = hashlib.sha256()
    sample = 4096
    for name, tensor in sorted(list_tensors(Path(path)).items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        if tensor.dtype in DTYPES:
            data = tensor.open().reshape(-1).view(np.uint8)
            middle = len(data) // 2
            for part in (data[:sample], data[middle : middle + sample], data[-sample:]):
                digest.update(part.tobytes())
    return digest.hexdigest()[:16]


def _check(
    folder: Path, specs: Mapping[str, ParamSpec], stored: Mapping[str, StoredTensor]
) -> None:
    """Raise one ValueError that lists everything in which the files differ from the model."""
    expected = {s.name: s.shape for spec in specs.values() for s in spec.sources}
    problems = [f"missing: {n} {list(shape)}" for n, shape in expected.items() if n not in stored]
    for name, tensor in stored.items():
        if name not in expected:
            problems.append(f"unknown: {name} {list(tensor.shape)}")
        elif tensor.shape != expected[name]:
            problems.append(
                f"misshapen: {name} {list(tensor.shape)}, expected {list(expected[name])}"
            )
        elif tensor.dtype not in DTYPES:
            problems.append(f"dtype {tensor.dtype}: {name} (supported: {', '.join(DTYPES)})")
    if problems:
        raise ValueError(
            f"{folder}: the tensors do not fit the config ({len(problems)} problems):\n  "
            + "\n  ".join(problems)
        )


def _view(tensor: StoredTensor, source: HFSource) -> np.ndarray:
    """The part of a stored tensor that a parameter is made of, in the parameter's order."""
    view = tensor.open().reshape(source.view)
    if source.take is not None:
        axis, begin, end = source.take
        view = view[(slice(None),) * axis + (slice(begin, end),)]
    return view.transpose(source.order)


def _load(
    stored: Mapping[str, StoredTensor], spec: ParamSpec, mesh: Mesh, rules: ShardingRules
) -> jax.Array:
    """One parameter; each device's slice is read, converted and put there on its own."""
    views = [_view(stored[source.name], source) for source in spec.sources]

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        index = index or (slice(None),) * len(spec.shape)
        # A copy in every case: jax may keep what it is given, and must not keep a mapped file.
        if spec.stacked:
            parts = [view[index[1:]] for view in views[index[0]]]
            out = np.empty((len(parts), *parts[0].shape), spec.dtype)
            for i, part in enumerate(parts):
                out[i] = part
            return out
        return np.array(views[0][index], dtype=spec.dtype, order="C", copy=True)

    return jax.make_array_from_callback(spec.shape, rules.sharding(mesh, spec.axes), shard)
