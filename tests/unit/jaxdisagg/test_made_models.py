"""Models that are written when they are asked for by name."""

import json
from pathlib import Path

import made_models
import pytest
import typer
from made_models import MADE, RECIPE, default_nodes, model_folder
from repository import load_script

from jaxdisagg.config import NodeConfig
from jaxdisagg.config_text import parse_node
from models.checkpoint import weights_fingerprint
from models.registry import load_config

NAME = Path("tiny-qwen3-moe")


def test_a_model_is_made_once_and_again_when_its_recipe_changes(tmp_path: Path, monkeypatch):
    folder = model_folder(NAME, tmp_path)
    assert folder == tmp_path / NAME
    assert [f.name for f in tmp_path.iterdir()] == [str(NAME)]
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert model_folder(NAME, tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    weights = weights_fingerprint(folder)
    recipe = made_models.MadeModel({**MADE[str(NAME)].options, "seed": 5}, "", "")
    monkeypatch.setitem(MADE, str(NAME), recipe)
    model_folder(NAME, tmp_path)
    assert weights_fingerprint(folder) != weights
    assert json.loads((folder / RECIPE).read_text())["seed"] == 5
    assert [f.name for f in tmp_path.iterdir()] == [str(NAME)]


def test_what_is_no_name_is_a_folder(tmp_path: Path, monkeypatch):
    assert model_folder(tmp_path / "none") == tmp_path / "none"
    assert default_nodes(tmp_path) == ("", "")
    assert default_nodes(NAME, 1) == ("", "")  # GPUs, where none can be made up
    assert default_nodes(NAME, 2) == default_nodes(NAME) == ("tp=2,ep=2", "tp=2,ep=2")
    (tmp_path / NAME).mkdir()
    monkeypatch.chdir(tmp_path)
    assert model_folder(NAME, tmp_path / "made") == NAME
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("more", "nodes"),
    [
        ({}, [("prefill", 2, 1), ("decode", 1, 1)]),
        ({"mixed": ["tp=4,ep=4"]}, [("mixed", 4, 4)]),
    ],
)
def test_serve_takes_its_nodes_unless_others_are_asked_for(more, nodes, tmp_path, monkeypatch):
    serve = load_script("serve")
    seen = []

    def start(config, console):
        seen.append(config)
        raise typer.Exit(7)

    monkeypatch.setattr(serve, "start_or_exit", start)
    monkeypatch.setattr(serve.signal, "signal", lambda *_: None)
    monkeypatch.setattr(serve, "model_folder", lambda model: model_folder(model, tmp_path))
    monkeypatch.setattr(serve.os, "environ", {})
    with pytest.raises(typer.Exit):
        serve.main(Path("tiny-deepseek"), **more)
    (config,) = seen
    assert [(n.role, n.mesh.tp, n.mesh.ep) for n in config.nodes] == nodes
    assert {n.model for n in config.nodes} == {tmp_path / "tiny-deepseek"}


@pytest.mark.parametrize("name", MADE)
def test_each_can_be_read_and_served_by_its_nodes(name: str, tmp_path: Path):
    folder = model_folder(Path(name), tmp_path)
    family, config = load_config(folder)
    assert family.cache_spec(config).num_layers > 1
    for text in default_nodes(Path(name)):
        node = parse_node(text, NodeConfig(role="mixed", model=folder))
        assert config.vocab_size % node.mesh.tp == 0
        assert text
