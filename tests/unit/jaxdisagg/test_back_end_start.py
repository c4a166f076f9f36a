"""A node whose jax finds no devices says in one line why."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxdisagg import model_loading
from jaxdisagg.config import NodeConfig
from jaxdisagg.config_text import parse_node
from jaxdisagg.gpu_setup import why_no_devices
from jaxdisagg.model_loading import load_model

BASE = NodeConfig(role="decode", model=Path("m"), id="d")


def test_a_back_end_that_does_not_start_is_named(monkeypatch):
    def fail(*_: object) -> list[jax.Device]:
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(model_loading, "fit_model", lambda node: type("Fit", (), {
        "config": None, "rules": None})())  # fmt: skip
    monkeypatch.setattr(model_loading, "node_devices", fail)
    with pytest.raises(ValueError, match="gpus=2: jax cannot use them: Unable to initialize"):
        load_model(parse_node("gpus=2", BASE))
    with pytest.raises(ValueError, match="jax finds no devices: Unable to initialize"):
        load_model(BASE)


def test_a_platform_without_its_back_end_is_one_line(monkeypatch):
    # What jax does then, asked of jax itself, in a process whose jax has not started yet.
    code = (
        "import jax\n"
        "from jaxdisagg.gpu_setup import BACK_END_ERRORS, why_no_devices\n"
        "try: jax.local_devices()\n"
        "except BACK_END_ERRORS as error: print(why_no_devices(error))"
    )
    for platform, why in (
        ("cuda", "JAX_PLATFORMS=cuda: this jax is for CPUs alone; install jaxdisagg[cuda13]"),
        ("conv", "Unable to initialize backend 'conv'"),
    ):
        monkeypatch.setenv("JAX_PLATFORMS", platform)
        done = subprocess.run(
            [sys.executable, "-c", code], text=True, check=True, capture_output=True, timeout=60
        )
        assert done.stdout.startswith(why)
        assert done.stdout.count("\n") == 1
    assert why_no_devices(AssertionError()) == "no platform of JAX_PLATFORMS=conv is there"
