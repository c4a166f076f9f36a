"""A model folder into sharded device arrays: each device's shard is made and put there by itself.

The folder holds Hugging Face safetensors, which are read here, or the native form (see
`models.weights.native`).
"""

import hashlib
import math
import mmap
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from models.interface import HFSource, ModelConfig, ModelFamily, Params, ParamSpec
from models.quantization import SCALE_SUFFIX, BlockFp8, read_quantization
from models.registry import family_of, read_json_object
from models.sharding import ShardingRules
from models.weights.files import DTYPES, StoredTensor, list_tensors
from models.weights.native_info import is_native, read_info
from models.weights.stats import AnonymousMemory, LoadStats, device_bytes
from models.weights.views import BlockFp8View, PlainView, TensorView

_PROBLEMS_SHOWN = 50
_COMPARED_BYTES = 1 << 24  # of two tensors that must be equal, at a time
_MAPPED_BYTES = 1 << 20  # of a shard that gets memory of its own from the kernel
_FP8 = "F8_E4M3"
_UNQUANTIZED = tuple(name for name in DTYPES if name != _FP8)


class Checkpoint(Protocol):
    """A folder whose content has been found to fit a config.

    `specs` are the parameters by name, any of which can be loaded without the others. `exact` says
    whether all are stored in their dtypes of `specs`.
    """

    specs: dict[str, ParamSpec]
    exact: bool

    def load(self, names: Iterable[str], memory: AnonymousMemory | None = None) -> Params:
        """The parameters of these names, in the dtypes of `specs`, on their devices.

        `memory` is told of each before it is made.
        """
        ...


def open_checkpoint(
    path: str | Path, config: ModelConfig, mesh: Mesh, rules: ShardingRules
) -> Checkpoint:
    """The checkpoint at `path`, whatever its form, for the config on a mesh.

    Raises FileNotFoundError when weight files are missing; ValueError when a file is damaged, when
    the mesh does not fit, and once, with the whole list, when tensors are missing, unknown,
    misshapen or of an unsupported dtype, or copies that should be equal are not.
    """
    if is_native(Path(path)):
        from models.weights.native import NativeCheckpoint  # orbax takes half a second to import

        return NativeCheckpoint(Path(path), config, mesh, rules)
    return SafetensorsCheckpoint(Path(path), config, mesh, rules)


def load_params(path: str | Path, config: ModelConfig, mesh: Mesh, rules: ShardingRules) -> Params:
    """Every parameter of the model at `path`, in the config's dtype, sharded by the rules.

    Raises what `open_checkpoint` does.
    """
    checkpoint = open_checkpoint(path, config, mesh, rules)
    return checkpoint.load(checkpoint.specs)


def load_measured(checkpoint: Checkpoint) -> tuple[Params, LoadStats]:
    """Every parameter of a checkpoint, and what loading them took."""
    begin = time.perf_counter()
    with AnonymousMemory() as memory:
        params = jax.block_until_ready(checkpoint.load(checkpoint.specs, memory))
    seconds = time.perf_counter() - begin
    return params, LoadStats(
        parameters=sum(p.size for p in params.values()),
        device_bytes=device_bytes(params.values()),
        seconds=seconds,
        largest_tensor=max(
            math.prod(source.shape) * np.dtype(spec.dtype).itemsize
            for spec in checkpoint.specs.values()
            for source in spec.sources
        ),
        host_peak=memory.peak,
    )


def shared_tensors(family: ModelFamily, config: ModelConfig) -> dict[str, str]:
    """Tensors that a checkpoint stores although they are copies: name of the copy -> of the main.

    Families say so in a method `shared_tensors(config)`, which they need not have.
    """
    method = getattr(family, "shared_tensors", None)
    return {} if method is None else dict(method(config))


def weights_fingerprint(path: str | Path) -> str:
    """16 hex digits over every tensor's name, dtype, shape and up to 12 KiB of its bytes.

    Cheap enough for start-up. It tells other weights of the same shapes apart (a finetune, another
    dtype); it is no integrity check, since the bytes between the samples are not read. A native
    folder has that of the folder that it was made from, if the dtypes are the same.
    """
    if is_native(Path(path)):
        return read_info(Path(path)).weights
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


class SafetensorsCheckpoint:
    """A `Checkpoint` in Hugging Face form; the constructor raises what `open_checkpoint` does."""

    def __init__(self, folder: Path, config: ModelConfig, mesh: Mesh, rules: ShardingRules) -> None:
        family = family_of(config)
        family.check_mesh(config, mesh, rules)
        self.specs = family.abstract_params(config)
        self._mesh, self._rules = mesh, rules
        self._block = read_quantization(read_json_object(folder / "config.json"))
        self._stored = list_tensors(folder)
        copies = shared_tensors(family, config)
        expected = {s.name: s.shape for spec in self.specs.values() for s in spec.sources}
        kept = {
            name: tensor
            for name, tensor in self._stored.items()
            if name not in copies
            and not family.ignores_tensor(config, name)
            and not family.ignores_tensor(config, name.removesuffix(SCALE_SUFFIX))
        }
        problems = [
            *_misfits(expected, kept, self._block),
            *_unequal_copies(copies, self._stored),
        ]
        if problems:
            raise ValueError(listed(folder, problems))
        self.exact = all(
            DTYPES[self._stored[source.name].dtype] == np.dtype(spec.dtype)
            for spec in self.specs.values()
            for source in spec.sources
        )

    def load(self, names: Iterable[str], memory: AnonymousMemory | None = None) -> Params:
        """See Checkpoint."""
        params = {}
        for name in names:
            spec = self.specs[name]
            sharding = self._rules.sharding(self._mesh, spec.axes)
            if memory is not None:
                memory.expect(jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding))
            params[name] = self._load(spec, sharding)
        return params

    def _load(self, spec: ParamSpec, sharding: NamedSharding) -> jax.Array:
        """One parameter; a shard is made once, and copied for its replicas."""
        views = [self._view(source) for source in spec.sources]
        devices: dict[tuple[slice, ...], list[jax.Device]] = {}
        for device, index in sharding.addressable_devices_indices_map(spec.shape).items():
            devices.setdefault(index or (slice(None),) * len(spec.shape), []).append(device)
        arrays = []
        for index, replicas in devices.items():
            shape = tuple(len(range(*i.indices(n))) for i, n in zip(index, spec.shape, strict=True))
            first = _aligned(shape, np.dtype(spec.dtype))
            _fill(first, views, index, stacked=spec.stacked)
            for device in replicas:
                shard = first
                if device != replicas[0]:
                    shard = _aligned(shape, first.dtype)
                    shard[...] = first
                # Waiting keeps the shards of one device at a time on the host.
                arrays.append(jax.device_put(shard, device).block_until_ready())
        return jax.make_array_from_single_device_arrays(spec.shape, sharding, arrays)

    def _view(self, source: HFSource) -> TensorView:
        tensor = self._stored[source.name]
        if tensor.dtype != _FP8 or self._block is None:
            return PlainView(tensor.open(), source)
        scales = self._stored[source.name + SCALE_SUFFIX].open().astype(np.float32)
        if not np.isfinite(scales).all():
            raise ValueError(f"{source.name}{SCALE_SUFFIX} has values that are not finite")
        return BlockFp8View(tensor.open(), scales, self._block, source)


def _fill(
    shard: np.ndarray, views: list[TensorView], index: tuple[slice, ...], *, stacked: bool
) -> None:
    """Read one shard of a parameter, from one tensor or from the stacked ones it covers."""
    if not stacked:
        views[0].read(index, shard)
        return
    for view, out in zip(views[index[0]], shard, strict=True):
        view.read(index[1:], out)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A writable array at an address from which the CPU back end takes it without a copy."""
    size = math.prod(shape) * dtype.itemsize
    if size >= _MAPPED_BYTES:
        # numpy would ask for huge pages, which a kernel whose memory is full of cached files makes
        # room for first: loading took twice as long.
        raw = np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
        begin = 0
    else:
        raw = np.empty(size + 64, np.uint8)
        begin = -raw.ctypes.data % 64
    return raw[begin : begin + size].view(dtype).reshape(shape)


def _misfits(
    expected: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, StoredTensor],
    block: BlockFp8 | None,
) -> list[str]:
    """A line for everything in which the files differ from the model."""
    scales = {
        name + SCALE_SUFFIX: block.grid(tensor.shape)
        for name, tensor in stored.items()
        if block is not None and tensor.dtype == _FP8 and len(tensor.shape) == 2
    }
    shapes = {**expected, **{n: s for n, s in scales.items() if n not in expected}}
    problems = [f"missing: {n} {list(shape)}" for n, shape in shapes.items() if n not in stored]
    for name, tensor in stored.items():
        if name not in shapes:
            problems.append(f"unknown: {name} {list(tensor.shape)}")
        elif tensor.shape != shapes[name]:
            problems.append(
                f"misshapen: {name} {list(tensor.shape)}, expected {list(shapes[name])}"
            )
        elif tensor.dtype == _FP8 and name not in scales:
            if block is None:
                problems.append(f"dtype {_FP8}: {name} (config.json has no quantization_config)")
            elif len(tensor.shape) != 2:
                problems.append(f"dtype {_FP8}: {name} (only matrices can be in fp8)")
        elif tensor.dtype not in _UNQUANTIZED:
            problems.append(f"dtype {tensor.dtype}: {name} (supported: {', '.join(_UNQUANTIZED)})")
    return problems


def _unequal_copies(copies: Mapping[str, str], stored: Mapping[str, StoredTensor]) -> list[str]:
    """A line for every stored copy that is not byte for byte the tensor in whose place it is."""
    return [
        f"unequal: {copy} should be a copy of {main}"
        for copy, main in copies.items()
        if copy in stored and main in stored and not _equal(stored[copy], stored[main])
    ]


def _equal(a: StoredTensor, b: StoredTensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape) or a.dtype not in DTYPES:
        return False
    x, y = (t.open().reshape(-1).view(np.uint8) for t in (a, b))
    return all(
        np.array_equal(x[i : i + _COMPARED_BYTES], y[i : i + _COMPARED_BYTES])
        for i in range(0, len(x), _COMPARED_BYTES)
    )


def listed(folder: Path, problems: list[str]) -> str:
    """The message of an error that lists what is wrong in a folder, cut where it gets long."""
    shown = problems[:_PROBLEMS_SHOWN]
    if len(problems) > len(shown):
        shown.append(f"... and {len(problems) - len(shown)} more")
    return (
        f"{folder}: the tensors do not fit the config ({len(problems)} problems):\n  "
        + "\n  ".join(shown)
    )
