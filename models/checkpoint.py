"""Hugging Face safetensors into sharded device arrays, each shard read straight from the file."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open

from models.interface import HFSource, ModelConfig, Params, ParamSpec
from models.registry import family_of, read_json_object
from models.sharding import ShardingRules

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file: its dtype as written there, and where its bytes lie."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def open(self) -> np.ndarray:
        """The tensor as a read-only memory map; nothing is read until it is indexed."""
        return np.memmap(self.file, _DTYPES[self.dtype], "r", self.offset, self.shape)


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


def list_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a model folder, from its single file or from its sharded index.

    Raises FileNotFoundError or ValueError naming the file.
    """
    if (folder / SINGLE).is_file():
        return _read_header(folder / SINGLE)
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(f"no {SINGLE} and no {INDEX} in the model folder {folder}")
    weight_map = read_json_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(f, str) and Path(f).name == f for f in weight_map.values()
    ):
        raise ValueError(f"{folder / INDEX}: weight_map: expected tensor names to file names")
    missing = sorted({f for f in weight_map.values() if not (folder / f).is_file()})
    if missing:
        raise FileNotFoundError(f"{folder / INDEX} names files that are missing: {missing}")
    files = {f: _read_header(folder / f) for f in sorted(set(weight_map.values()))}
    absent = sorted(name for name, f in weight_map.items() if name not in files[f])
    if absent:
        raise ValueError(f"{folder / INDEX}: not in the file that it names: {', '.join(absent)}")
    return {name: files[f][name] for name, f in weight_map.items()}


def weights_fingerprint(path: str | Path) -> str:
    """16 hex digits over every tensor's name, dtype, shape and up to 12 KiB of its bytes.

    Cheap enough for start-up. It tells other weights of the same shapes apart (a finetune, another
    dtype); it is no integrity check, since the bytes between the samples are not read.
    """
    digest = hashlib.sha256()
    sample = 4096
    for name, tensor in sorted(list_tensors(Path(path)).items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        if tensor.dtype in _DTYPES:
            data = tensor.open().reshape(-1).view(np.uint8)
            middle = len(data) // 2
            for part in (data[:sample], data[middle : middle + sample], data[-sample:]):
                digest.update(part.tobytes())
    return digest.hexdigest()[:16]


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, its header checked against its size."""
    try:
        with safe_open(file, framework="numpy"):
            pass  # refuses a header that is broken or does not fit the file
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{file} is not a safetensors file: {error}") from None
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(file, t["dtype"], tuple(t["shape"]), 8 + size + t["data_offsets"][0])
        for name, t in header.items()
    }


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
        elif tensor.dtype not in _DTYPES:
            problems.append(f"dtype {tensor.dtype}: {name} (supported: {', '.join(_DTYPES)})")
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
