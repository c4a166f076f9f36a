"""A small model with a tokenizer, for nodes that are processes of their own."""

import shutil
from pathlib import Path

import pytest
from random_checkpoint import write_checkpoint
from serving_model import CONFIG


@pytest.fixture(scope="session")
def serving_folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """Random Qwen3 weights (std 0.25, untied) beside the tiny byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("serving") / "tiny-qwen3"
    write_checkpoint(folder, CONFIG, std=0.25, seed=7)
    for file in tiny_folder.iterdir():
        shutil.copy(file, folder / file.name)
    return folder
