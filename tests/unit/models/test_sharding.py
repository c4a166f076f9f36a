"""The rule table: what it maps, what it refuses, how it is overridden."""

from pathlib import Path

import pytest
from jax.sharding import PartitionSpec as P

from jaxdisagg.mesh import make_mesh
from models.sharding import DEFAULT_RULES, load_rules, make_rules


def test_the_default_table():
    assert DEFAULT_RULES.spec("batch", None) == P("dp")
    assert DEFAULT_RULES.spec("vocab", "embed") == P(("kv", "rep"))
    assert DEFAULT_RULES.spec("embed", "heads", "head_dim") == P(None, ("kv", "rep"))
    assert DEFAULT_RULES.spec("embed", "kv_heads", "head_dim") == P(None, "kv")
    assert DEFAULT_RULES.spec("batch", "kv_heads") == P("dp", "kv")


def test_two_dimensions_on_one_mesh_axis_are_refused():
    with pytest.raises(ValueError, match="'ffn' and 'vocab' of one array both map to"):
        DEFAULT_RULES.spec("ffn", "vocab")


def test_an_unknown_logical_axis_is_refused():
    with pytest.raises(ValueError, match="no rule for logical axis 'layers'"):
        DEFAULT_RULES.spec("layers")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"fnn": ["kv"]}, "unknown logical axis 'fnn'"),
        ({"ffn": ["tp"]}, "unknown mesh axis 'tp'"),
        ({"ffn": ["kv", "kv"]}, "ffn: a mesh axis is named twice"),
        ({"ffn": 3}, "ffn: expected a list of mesh axes"),
        ({"kv_heads": []}, "kv_heads: fixed at"),
    ],
)
def test_bad_overrides_are_refused_by_name(overrides, message):
    with pytest.raises(ValueError, match=message):
        make_rules(overrides)


def test_rules_from_a_file(tmp_path: Path):
    file = tmp_path / "rules.toml"
    file.write_text('[rules]\nffn = "kv"\nvocab = []\n')
    rules = load_rules(file)
    assert rules.spec("embed", "ffn") == P(None, "kv")
    assert rules.spec("vocab", "embed") == P()
    assert rules.spec("batch", "heads") == DEFAULT_RULES.spec("batch", "heads")
    assert hash(rules) != hash(DEFAULT_RULES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ffn = [", "is not TOML"),
        ('ffn = ["kv"]', r"expected exactly one table, \[rules\]"),
        ('[rules]\nffn = ["tp"]', "unknown mesh axis 'tp'.*rules.toml"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, message: str):
    file = tmp_path / "rules.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_rules(file)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"no such file: .*none\.toml"):
        load_rules(tmp_path / "none.toml")


def test_a_mesh_that_does_not_divide_is_refused_with_every_field():
    mesh = make_mesh(tp=4, dp=1, kv_heads=2)
    assert DEFAULT_RULES.shards(mesh, "heads") == 4
    assert DEFAULT_RULES.shards(mesh, "kv_heads") == 2
    with pytest.raises(ValueError, match=r"intermediate_size 6 .* 4 shards.*; vocab_size 9"):
        DEFAULT_RULES.check(mesh, {"ffn": ("intermediate_size", 6), "vocab": ("vocab_size", 9)})
    DEFAULT_RULES.check(mesh, {"ffn": ("intermediate_size", 8), "kv_heads": ("kv", 2)})
