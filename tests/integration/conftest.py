"""A small model with a tokenizer, for nodes that are processes of their own."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from random_checkpoint import write_checkpoint
from serving_model import CONFIG
from side_process import SideProcess


@pytest.fixture(scope="session")
def serving_folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """Random Qwen3 weights (std 0.25, untied) beside the tiny byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("serving") / "tiny-qwen3"
    write_checkpoint(folder, CONFIG, std=0.25, seed=7)
    for file in tiny_folder.iterdir():
        shutil.copy(file, folder / file.name)
    return folder


@pytest.fixture(scope="session")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, SideProcess]]:
    """A process with eight devices for all prefill nodes, and one for all decode nodes."""
    folder = tmp_path_factory.mktemp("sides")
    with SideProcess("prefill", folder) as prefill, SideProcess("decode", folder) as decode:
        yield {"prefill": prefill, "decode": decode}
