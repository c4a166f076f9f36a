"""A checkpoint back into Hugging Face safetensors: stacks, parts and transposes undone."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from models.interface import HFSource, ModelConfig, ModelFamily, ParamSpec
from models.registry import family_of
from models.weights.files import TensorWriter
from models.weights.loading import Checkpoint, shared_tensors


def stored_tensors(
    family: ModelFamily, config: ModelConfig
) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Name, shape and dtype of every tensor in a checkpoint of this model, sorted by name.

    The copies that the family calls shared are among them.
    """
    found = {
        source.name: (source.shape, np.dtype(spec.dtype))
        for spec in family.abstract_params(config).values()
        for source in spec.sources
    }
    found |= {copy: found[main] for copy, main in shared_tensors(family, config).items()}
    return dict(sorted(found.items()))


def write_safetensors(
    folder: Path, checkpoint: Checkpoint, config: ModelConfig, *, files: int = 1
) -> None:
    """Write a checkpoint that was opened for `config` as safetensors; config.json is not written.

    One parameter at a time is on the host. Raises ValueError when `files` exceeds the tensors.
    """
    family = family_of(config)
    copies: dict[str, list[str]] = {}
    for copy, main in shared_tensors(family, config).items():
        copies.setdefault(main, []).append(copy)
    # Tensors of which only parts have come so far, and how many elements those have.
    begun: dict[str, np.ndarray] = {}
    come: dict[str, int] = {}
    with TensorWriter(folder, stored_tensors(family, config), files=files) as writer:
        for name, spec in checkpoint.specs.items():
            value = np.asarray(checkpoint.load([name])[name])
            for source, part in _parts(spec, value):
                tensor = part
                if source.take is not None:
                    tensor = begun.setdefault(source.name, np.empty(source.shape, part.dtype))
                    axis, begin, end = source.take
                    tensor.reshape(source.view)[(slice(None),) * axis + (slice(begin, end),)] = part
                    come[source.name] = come.get(source.name, 0) + part.size
                    if come[source.name] < tensor.size:
                        continue
                    del begun[source.name]
                for target in (source.name, *copies.get(source.name, ())):
                    writer.write(target, tensor.reshape(source.shape))


def _parts(spec: ParamSpec, value: np.ndarray) -> Iterator[tuple[HFSource, np.ndarray]]:
    """What a parameter's value says of each of its sources, in the order of the source's view."""
    for source, part in zip(spec.sources, value if spec.stacked else [value], strict=True):
        yield source, part.transpose(np.argsort(source.order))
