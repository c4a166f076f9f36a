"""Families from other distributions: found, preferred to nothing built in, and refused by name."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import plugin_site
import pytest
from golden_cases import MODELS
from qwen2_case import CONFIG

from models.plugins import GROUP, load_plugins
from models.registry import FAMILIES, family_of, load_config

MODULE = """
from models.gqa_decoder import GQAFamily
from models.qwen3 import LlamaConfig
class Config(LlamaConfig):
    family = {name!r}
    architectures = {architectures!r}
FAMILY = GQAFamily(Config)
"""


def model_folder(tmp_path: Path, **change: object) -> Path:
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **change}))
    return folder


@pytest.fixture
def offer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Callable[..., str]]:
    """Write a distribution `plug-NAME` with a module `plug_NAME` and one entry point NAME."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    modules = []

    def write(name: str, text: str, value: str = "FAMILY") -> str:
        module = f"plug_{name}"
        modules.append(module)
        value = f"{module}:{value}"
        plugin_site.write(
            tmp_path / "site", f"plug-{name}", "1.5", {GROUP: {name: value}}, {f"{module}.py": text}
        )
        return f"entry point {name} = {value} of plug-{name} 1.5"

    yield write
    for module in modules:
        sys.modules.pop(module, None)


def family(name: str, *architectures: str) -> str:
    return MODULE.format(name=name, architectures=architectures)


def test_a_family_from_outside_is_found_by_its_architectures(tmp_path: Path, offer):
    folder = model_folder(tmp_path)
    with pytest.raises(ValueError, match=r"Qwen2ForCausalLM is not supported \(supported: Qwen3F"):
        load_config(folder)
    offer("toy", family("toy", "OtherForCausalLM", "Qwen2ForCausalLM"))
    found, config = load_config(folder)
    assert (found.name, config.family) == ("toy", "toy")
    assert type(config).__module__ == "plug_toy"
    assert family_of(config) is found
    assert found not in FAMILIES
    with pytest.raises(ValueError, match=r"supported: Qwen3F.*, OtherForCausalLM, Qwen2ForC.*\)$"):
        load_config(model_folder(tmp_path, architectures=["MambaForCausalLM"]))


def test_the_distribution_leaves_with_its_folder(tmp_path: Path, offer, monkeypatch):
    """Nothing is remembered: what is off the path is gone."""
    offer("toy", family("toy", "Qwen2ForCausalLM"))
    _, config = load_config(model_folder(tmp_path))
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(tmp_path / "site")])
    with pytest.raises(ValueError, match=r"family: 'toy' is not supported"):
        family_of(config)


@pytest.mark.parametrize(
    ("text", "value", "why"),
    [
        ("import no_such_module", "FAMILY", "ModuleNotFoundError: No module named 'no_such_module"),
        ("raise RuntimeError('two\\nlines')", "FAMILY", "RuntimeError: two lines"),
        ("def f(:", "FAMILY", "SyntaxError: invalid syntax"),
        (family("toy", "Toy"), "FAMILIES", "AttributeError: module 'plug_toy' has no attribute"),
        ("FAMILY = None", "FAMILY", "expected a model family, got None: it has no `name`"),
        (
            family("toy", "Toy"),
            "GQAFamily",
            "expected an instance of a model family, got the c",
        ),
        (
            "import models.rope as FAMILY",
            "FAMILY",
            "expected an instance of a model family, got the m",
        ),
        (
            family("toy", "Toy") + "FAMILY.architectures = 'Toy'",
            "FAMILY",
            "architectures: expected a tuple of names, got 'Toy'",
        ),
        (
            "class F:\n  name = 'toy'\n  architectures = ('Toy',)\n  logits = print\nFAMILY = F()",
            "FAMILY",
            "the family 'toy' has no config_from_hf, abstract_params, ignores_tensor, cache_spec, "
            "check_mesh, forward",
        ),
        (family("qwen3", "Toy"), "FAMILY", "name: 'qwen3' is taken by a built-in family"),
        (
            family("toy", "Toy", "LlamaForCausalLM"),
            "FAMILY",
            "architectures: LlamaForCausalLM is taken by the built-in family 'llama'",
        ),
    ],
)
def test_a_broken_plugin_is_named_when_nothing_else_reads_the_model(
    tmp_path: Path, offer, text: str, value: str, why: str
):
    origin = offer("toy", text, value)
    with pytest.raises(ValueError, match="architectures: Toy is not supported") as error:
        load_config(model_folder(tmp_path, architectures=["Toy"]))
    assert f"; not usable: {origin} (group {GROUP}): {why}" in str(error.value)
    assert "\n" not in str(error.value)
    # It stops neither a built-in family nor another plugin.
    folder = model_folder(tmp_path)
    (folder / "config.json").write_text(json.dumps(MODELS["llama_untied"][0]))
    read, config = load_config(folder)
    assert read in FAMILIES
    assert family_of(config) is read
    offer("good", family("good", "Qwen2ForCausalLM"))
    assert load_config(model_folder(tmp_path))[0].name == "good"


def test_a_built_in_family_is_found_without_importing_a_plugin(tmp_path: Path, offer):
    offer("toy", "raise SystemExit('imported')")
    folder = model_folder(tmp_path)
    (folder / "config.json").write_text(json.dumps(MODELS["qwen3_untied"][0]))
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path / "site")!r})
from models.registry import family_of, load_config
family_of(load_config({str(folder)!r})[1])
assert "plug_toy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_an_architecture_that_two_plugins_offer_is_refused_by_both_names(tmp_path: Path, offer):
    one = offer("one", family("one", "Qwen2ForCausalLM", "AForCausalLM"))
    two = offer("two", family("two", "Qwen2ForCausalLM"))
    with pytest.raises(ValueError, match="Qwen2ForCausalLM is offered twice: ") as error:
        load_config(model_folder(tmp_path))
    assert one in str(error.value)
    assert two in str(error.value)
    assert load_config(model_folder(tmp_path, architectures=["AForCausalLM"]))[0].name == "one"


def test_a_config_that_its_family_would_not_find_again_is_refused(tmp_path: Path, offer):
    text = family("toy", "Qwen2ForCausalLM") + "FAMILY.name = 'other'"
    offer("toy", text)
    with pytest.raises(ValueError, match="family: 'toy' was read by the family 'other'"):
        load_config(model_folder(tmp_path))


def test_the_built_in_families_fit_their_own_rules(offer):
    """Names and architectures are used once, and each of them would pass as a plugin."""
    names = [f.name for f in FAMILIES]
    architectures = [name for f in FAMILIES for name in f.architectures]
    assert len(set(names)) == len(names)
    assert len(set(architectures)) == len(architectures)
    offer("all", "from models.registry import FAMILIES\nFAMILY = FAMILIES[-1]")
    (plugin,) = load_plugins(())
    assert plugin.family is FAMILIES[-1]
    assert not plugin.problem
