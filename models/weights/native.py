"""The native form of a model folder: parameters as the program holds them, saved with orbax.

Beside config.json and the tokenizer's files lie `params/`, which orbax writes, and `native.json`:
the version of the form, the dtype of the weights and their fingerprint. Parameters are restored
onto any mesh, each device reading what it needs of them, without a copy of the model on one host.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from models.interface import ModelConfig, Params, ParamSpec
from models.quantization import FIELD as QUANTIZATION
from models.registry import family_of
from models.sharding import ShardingRules
from models.weights.loading import listed
from models.weights.native_info import NATIVE, VERSION, read_info
from models.weights.stats import AnonymousMemory

PARAMS = "params"

# A device's shard is read in whole chunks, some of which it needs only in part.
_CHUNK_BYTES = 1 << 22
# What is read at a time: as much as the largest parameter, but not less than this.
_BATCH_BYTES = 1 << 24


def config_as(hf: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The content of config.json for the same model with plain weights of this dtype."""
    names = [name for name in ("dtype", "torch_dtype") if name in hf] or ["dtype"]
    kept = {name: value for name, value in hf.items() if name != QUANTIZATION}
    return {**kept, **dict.fromkeys(names, dtype)}


def save_native(
    folder: Path, params: Params, hf: Mapping[str, Any], *, dtype: str, weights: str
) -> None:
    """Write a native folder: config.json from `hf` (as read), parameters, and what they are.

    `dtype` is the model's, `weights` the fingerprint that the folder will have. Raises ValueError
    when `folder` already holds parameters. native.json comes last: without it the folder is none.
    """
    target = (folder / PARAMS).resolve()
    if target.exists():
        raise ValueError(f"{target} is already there")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_as(hf, dtype), indent=2) + "\n")
    gigabytes = 1 + max(p.nbytes for p in params.values()) // 10**9
    # One replica writes a shard as it is: cutting it among the replicas would compile programs. And
    # no sharding is noted, since whoever reads names its own.
    arrays = ocp.type_handlers.ArrayHandler(
        use_replica_parallel=False, enable_write_sharding_file=False
    )
    handler = ocp.PyTreeCheckpointHandler(
        type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, arrays)),
        use_zarr3=False,
        use_compression=False,  # weights hardly shrink, and reading gets slower
        save_concurrent_gb=gigabytes,
        save_device_host_concurrent_gb=gigabytes,
    )
    saving = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in params}
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(target, args=ocp.args.PyTreeSave(params, save_args=saving))
    info = {"version": VERSION, "dtype": dtype, "weights": weights}
    (folder / NATIVE).write_text(json.dumps(info, indent=2) + "\n")


class NativeCheckpoint:
    """A `checkpoint.Checkpoint` in the native form.

    The constructor raises FileNotFoundError without parameters, ValueError when the mesh does not
    fit, when native.json or orbax's metadata is damaged, and with the whole list when parameters
    are missing, unknown or misshapen. Those of an MTP module that the config does not ask for are
    left out. `load` raises ValueError naming the folder when its files are damaged.
    """

    def __init__(self, folder: Path, config: ModelConfig, mesh: Mesh, rules: ShardingRules) -> None:
        family = family_of(config)
        family.check_mesh(config, mesh, rules)
        self.specs = family.abstract_params(config)
        self._mesh, self._rules = mesh, rules
        self._path = (folder / PARAMS).resolve()
        read_info(folder)
        if not self._path.is_dir():
            raise FileNotFoundError(f"no {PARAMS} in the native model folder {folder}")
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            try:
                stored = checkpointer.metadata(self._path).item_metadata
            except (ValueError, KeyError, OSError) as error:
                raise ValueError(f"{self._path} is no checkpoint of orbax: {error}") from None
        if stored is None:
            raise ValueError(f"{self._path} is no checkpoint of orbax")
        known = dict(self.specs)
        if config.mtp_layers:
            known |= family.abstract_params(replace(config, mtp=True))
        if problems := _misfits(self.specs, known, stored.tree):
            raise ValueError(listed(folder, problems))
        self.exact = all(
            jnp.dtype(stored.tree[name].dtype) == jnp.dtype(spec.dtype)
            for name, spec in self.specs.items()
        )

    def load(self, names: Iterable[str], memory: AnonymousMemory | None = None) -> Params:
        """See checkpoint.Checkpoint."""
        names, params = list(names), {}
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            for batch in self._batches(names):
                wanted = {name: self._array(self.specs[name]) for name in batch}
                if memory is not None:
                    for array in wanted.values():
                        memory.expect(array)
                restoring = {
                    name: ocp.ArrayRestoreArgs(
                        sharding=array.sharding, global_shape=array.shape, dtype=array.dtype
                    )
                    for name, array in wanted.items()
                }
                args = ocp.args.PyTreeRestore(
                    item=dict.fromkeys(batch, 0), restore_args=restoring, partial_restore=True
                )
                try:
                    params |= jax.block_until_ready(checkpointer.restore(self._path, args=args))
                except Exception as error:  # orbax raises bare Exception for damaged files
                    reason = str(error.__cause__ or error).splitlines()[0]
                    raise ValueError(f"{self._path} cannot be read: {reason}") from error
        return {name: params[name] for name in names}

    def _array(self, spec: ParamSpec) -> jax.ShapeDtypeStruct:
        sharding = self._rules.sharding(self._mesh, spec.axes)
        return jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype), sharding=sharding)

    def _batches(self, names: list[str]) -> Iterator[list[str]]:
        """The names in groups that are read together, each no larger than the largest parameter."""
        sizes = {n: _nbytes(self.specs[n]) for n in names}
        most = max(_BATCH_BYTES, *sizes.values())
        batch: list[str] = []
        for name, size in sizes.items():
            if batch and sum(sizes[n] for n in batch) + size > most:
                yield batch
                batch = []
            batch.append(name)
        if batch:
            yield batch


def _nbytes(spec: ParamSpec) -> int:
    return math.prod(spec.shape) * jnp.dtype(spec.dtype).itemsize


def _misfits(
    wanted: Mapping[str, ParamSpec], known: Mapping[str, ParamSpec], stored: Mapping[str, Any]
) -> list[str]:
    """A line for everything in which orbax's metadata differ from the model."""
    problems = [f"missing: {n} {list(s.shape)}" for n, s in wanted.items() if n not in stored]
    for name, array in stored.items():
        if name not in known:
            problems.append(f"unknown: {name} {list(array.shape)}")
        elif name in wanted and tuple(array.shape) != wanted[name].shape:
            expected = list(wanted[name].shape)
            problems.append(f"misshapen: {name} {list(array.shape)}, expected {expected}")
        elif not jnp.issubdtype(array.dtype, jnp.floating):
            problems.append(f"dtype {array.dtype}: {name}")
    return problems
