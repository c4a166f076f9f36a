"""Writing safetensors one tensor at a time; the library reads them back."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tensor_files import load_file

from models.weights.files import TensorWriter, list_tensors

TENSORS = {
    "a": np.arange(5, dtype=ml_dtypes.bfloat16),
    "b": np.arange(12, dtype=np.float32).reshape(3, 4),
    "c": np.arange(3).astype(ml_dtypes.float8_e4m3fn),
    "d": np.arange(6, dtype=np.float16).reshape(1, 6),
    "e": np.zeros((0, 4), np.float32),
}
ANNOUNCED = {name: (t.shape, t.dtype) for name, t in TENSORS.items()}


def write(folder: Path, files: int) -> None:
    with TensorWriter(folder, ANNOUNCED, files=files) as writer:
        for name in sorted(TENSORS, reverse=True):
            writer.write(name, TENSORS[name])


@pytest.mark.parametrize("files", [1, 2, 5])
def test_the_library_reads_what_was_written(tmp_path: Path, files: int):
    write(tmp_path, files)
    found = {n: t for f in tmp_path.glob("*.safetensors") for n, t in load_file(f).items()}
    assert len(list(tmp_path.glob("*.safetensors"))) == files
    assert found.keys() == TENSORS.keys() == list_tensors(tmp_path).keys()
    for name, tensor in TENSORS.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].tobytes() == tensor.tobytes()


def test_only_the_form_written_last_is_found(tmp_path: Path):
    write(tmp_path, 2)
    write(tmp_path, 1)
    assert {t.file.name for t in list_tensors(tmp_path).values()} == {"model.safetensors"}
    write(tmp_path, 2)
    assert "model.safetensors" not in {t.file.name for t in list_tensors(tmp_path).values()}


def test_what_does_not_fit_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="files: 6 is not between 1 and the 5 tensors"):
        TensorWriter(tmp_path, ANNOUNCED, files=6)
    with pytest.raises(ValueError, match="dtype: int32 cannot be written"):
        TensorWriter(tmp_path, {"i": ((2,), np.dtype(np.int32))})
    with (
        pytest.raises(ValueError, match=r"b: float32 \(4, 3\)"),
        TensorWriter(tmp_path, ANNOUNCED) as writer,
    ):
        writer.write("b", TENSORS["b"].reshape(4, 3))


def test_a_tensor_left_out_is_an_error(tmp_path: Path):
    with (
        pytest.raises(ValueError, match="never written: a, c, d, e"),
        TensorWriter(tmp_path, ANNOUNCED, files=2) as writer,
    ):
        writer.write("b", TENSORS["b"])
    assert not (tmp_path / "model.safetensors.index.json").exists()
