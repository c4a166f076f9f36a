"""Reading programs: lines as XLA wrote them for eight H200 (jax 0.12), cut to what is read."""

import pytest

from jaxdisagg.gpu_aot import hlo

HEADER = (
    "HloModule jit__prefill, is_scheduled=true, input_output_alias={ {0}: (26, {}, may-alias), "
    "{1}: (27, {}, may-alias), {4}: (28, {}, must-alias) }, entry_computation_layout={(bf16[18992,"
    "6144]{1,0})->(bf16[4096,1,2,64,128]{4,3,2,1,0})}, num_partitions=8"
)
BRANCH = """\
%region_48.62_spmd (arg_tuple.1: (s32[64,64])) -> (s32[64]) {
  %all-gather.7 = (s32[64,8]{0,1}, f32[64,8]{0,1}) all-gather(%bitcast.265.0, %bitcast.261.0), \
channel_id=10, replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={1}
}
"""
ENTRY = """\
ENTRY %main.71_spmd (param.63: bf16[18992,6144], param.1: bf16[4096,1,2,64,128]) -> (bf16[1]) {
  %param.71 = bf16[4096,1,2,64,128]{4,3,2,1,0} parameter(1)
  %bitcast.73.0 = bf16[1024,6144]{1,0} bitcast(%loop_select_fusion.6), metadata={op_name="(x)"}
  %all-reduce-start = ((bf16[1024,6144]{1,0}), bf16[1024,6144]{1,0}) all-reduce-start(%b), \
channel_id=5, to_apply=%add.3.clone, output_to_operand_aliasing={{1}: (0, {})}
  %all-reduce-done = bf16[1024,6144]{1,0} all-reduce-done(%all-reduce-start), metadata={}
  %psum.3 = (bf16[1024,6144]{1,0}, f32[64]{0}) all-reduce(%a, %c), channel_id=6, to_apply=%add
  %input_scatter_fusion.4 = bf16[4096,1,2,64,128]{4,3,2,1,0} fusion(%param.71, %gemm), kind=kInput
  %ffi_call.9 = bf16[1024,6144]{1,0} custom-call(%param.73, %wrapped_add, %i), \
custom_call_target="jaxdisagg_layer_trigger", output_to_operand_aliasing={{}: (1, {})}, \
backend_config={engine = 0 : i32, layer = 2 : i32}
  %copy.150 = s32[] copy(%constant_791_clone_1)
  ROOT %tuple.145 = (bf16[4096,1,2,64,128]{4,3,2,1,0}, /*index=1*/bf16[8,6144]{1,0}) tuple(%i, %f)
}
"""
TEXT = f"{HEADER}\n\n{BRANCH}\n{ENTRY}"
CACHE = 4096 * 2 * 64 * 128


def test_instructions_have_opcodes_sizes_and_a_place():
    found = [(i.opcode, i.elements, i.in_entry) for i in hlo.instructions(TEXT)]
    assert found[0] == ("all-gather", 512, False)
    assert found[1:3] == [("parameter", CACHE, True), ("bitcast", 1024 * 6144, True)]
    assert found[-2:] == [("copy", 1, True), ("tuple", CACHE, True)]
    assert len(found) == 10


def test_collectives_count_arrays_combined_or_asynchronous():
    sent = [(s.opcode, s.dtype, s.elements, s.in_entry) for s in hlo.collectives(TEXT)]
    assert sent == [
        ("all-gather", "s32", 512, False),
        ("all-gather", "f32", 512, False),
        ("all-reduce", "bf16", 1024 * 6144, True),
        ("all-reduce", "bf16", 1024 * 6144, True),
        ("all-reduce", "f32", 64, True),
    ]
    assert hlo.count(TEXT, "all-reduce") == 2


def test_aliases_are_those_of_the_header():
    assert hlo.aliases(TEXT) == {0: 26, 1: 27, 4: 28}
    assert hlo.aliases(TEXT.replace("input_output_alias=", "other=").partition("{ {")[0]) == {}


def test_custom_calls_are_found_by_target():
    (call,) = hlo.custom_calls(TEXT, "jaxdisagg_layer_trigger")
    assert call.attribute(r"\blayer = (\d+)") == "2"
    assert hlo.custom_calls(TEXT, "jaxdisagg_layer") == []


def test_a_cache_written_in_place_is_not_moved():
    assert hlo.moved(TEXT, CACHE) == []


@pytest.mark.parametrize("opcode", ["copy", "convert", "select", "transpose", "custom-call"])
def test_a_cache_that_is_moved_is_named(opcode: str):
    line = f"%bad.1 = bf16[4096,1,2,64,128]{{4,3,2,1,0}} {opcode}(%param.71)"
    (found,) = hlo.moved(f"{TEXT}\n  {line}\n", CACHE)
    assert found == line


def test_a_copy_that_is_one_result_of_several_is_found():
    line = "%bad.1 = (s32[], bf16[4096,1,2,64,128]{4,3,2,1,0}) copy-start(%param.71)"
    assert hlo.moved(f"{TEXT}\n{line}\n", CACHE) == [line]


def test_a_converted_weight_is_named_and_another_size_is_not():
    line = "%convert.2 = f32[6144,1536]{1,0} convert(%param.5)"
    assert hlo.moved(f"{TEXT}\n{line}\n", CACHE, {6144 * 1536}) == [line]
    assert hlo.moved(f"{TEXT}\n{line}\n", CACHE, {6144 * 1537}) == []
