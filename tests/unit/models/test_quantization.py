"""Block-quantised fp8: what a config may ask for, and what the loader makes of it."""

import pytest

from models.quantization import BlockFp8, read_quantization

DEEPSEEK = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


def test_the_released_form_is_read():
    assert read_quantization({"quantization_config": DEEPSEEK}) == BlockFp8(128, 128)
    more = {**DEEPSEEK, "modules_to_not_convert": ["lm_head"], "scale_fmt": "ue8m0"}
    assert read_quantization({"quantization_config": more}) == BlockFp8(128, 128)
    # transformers leaves `fmt` out; the dtype of the tensors says the same
    without = {k: v for k, v in DEEPSEEK.items() if k != "fmt"}
    assert read_quantization({"quantization_config": without}) == BlockFp8(128, 128)
    assert read_quantization({}) is None
    assert read_quantization({"quantization_config": None}) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "gptq"}, r"quantization_config\.quant_method: 'gptq' .*'fp8'"),
        ({"fmt": "e5m2"}, r"quantization_config\.fmt: 'e5m2' .*'e4m3'"),
        ({"activation_scheme": "static"}, r"quantization_config\.activation_scheme: 'static'"),
        ({"scale_fmt": "float"}, r"quantization_config\.scale_fmt: 'float'"),
        ({"weight_block_size": None}, r"weight_block_size: expected two integers > 0, got None"),
        ({"weight_block_size": [128]}, r"weight_block_size: expected two integers > 0"),
        ({"weight_block_size": [128, 0]}, r"weight_block_size: expected two integers > 0"),
        ({"weight_block_size": [128, True]}, r"weight_block_size: expected two integers > 0"),
        ({"kv_cache_scheme": {}}, r"quantization_config\.kv_cache_scheme: .*unknown field"),
    ],
)
def test_anything_else_is_refused_by_name(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        read_quantization({"quantization_config": {**DEEPSEEK, **change}})


@pytest.mark.parametrize("name", ["quant_method", "weight_block_size"])
def test_a_missing_field_is_named(name: str):
    fields = {k: v for k, v in DEEPSEEK.items() if k != name}
    with pytest.raises(ValueError, match=rf"quantization_config\.{name}: missing"):
        read_quantization({"quantization_config": fields})


def test_it_must_be_an_object():
    with pytest.raises(ValueError, match="quantization_config: expected an object, got 'fp8'"):
        read_quantization({"quantization_config": "fp8"})
