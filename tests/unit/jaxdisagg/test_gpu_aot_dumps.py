"""The compiler's reports, as jax 0.11.2 and 0.12 wrote them, and what is read from them."""

import os
from pathlib import Path

import pytest

from jaxdisagg.gpu_aot.chips import CHIPS, H100, H200, target_config
from jaxdisagg.gpu_aot.dumps import KernelResources, dumping, read_dumps
from jaxdisagg.gpu_aot.thunks import Thunks, parse_thunks, read_thunks

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'gqa_decode_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for gqa_decode_mosaic_gpu_kernel
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 2 barriers, 1 bytes smem
ptxas info    : Compile time = 94.299 ms
"""
PTX = (
    ".visible .entry gqa_decode_mosaic_gpu_kernel(\n)\n.maxntid {threads}, 1, 1\n.minnctapersm 1\n"
)
MLIR = (
    "    %108 = gpu.launch async [%18] blocks(%arg2, %arg3, %arg4) in (%arg8 = %c8, %arg9 = %c4, "
    "%arg10 = %c4) threads(%arg5, %arg6, %arg7) in (%arg11 = %c{threads}, %arg12 = %c1, %arg13 = "
    "%c1) dynamic_shared_memory_size %c{smem}_i32 {{\n"
)


def describe(
    folder: Path, name: str, threads=128, smem=117800, lowered=None, **figures: int
) -> None:
    values = {"registers": 140, "stack": 0, "stores": 0, "loads": 0} | figures
    (folder / f"{name}.ptxas").write_text(PTXAS.format(**values))
    (folder / f"{name}.ptx").write_text(PTX.format(threads=threads))
    text = MLIR.format(threads=threads, smem=smem)
    (folder / f"{lowered or name}.before_layout_inference.txt").write_text(text)


def test_a_kernel_is_read_from_its_reports(tmp_path: Path):
    describe(tmp_path, "mla_decode_11", threads=384, registers=168, stores=412, loads=396)
    describe(tmp_path, "gqa_decode_2")
    assert read_dumps(tmp_path) == [
        KernelResources("gqa_decode", 140, 0, 0, 117801, 128),
        KernelResources("mla_decode", 168, 412, 396, 117801, 384),
    ]


def test_shared_memory_is_that_of_the_largest_of_the_name(tmp_path: Path):
    """Of several layers one is assembled, under another number than it was lowered under."""
    describe(tmp_path, "grouped_0", lowered="grouped_3", smem=1000)
    text = MLIR.format(threads=128, smem=2000)
    (tmp_path / "grouped_1.before_layout_inference.txt").write_text(text)
    assert [kernel.smem_bytes for kernel in read_dumps(tmp_path)] == [2001]


@pytest.mark.parametrize("missing", ["ptxas", "ptx", "before_layout_inference.txt"])
def test_a_report_without_its_figures_is_refused_by_name(tmp_path: Path, missing: str):
    describe(tmp_path, "gqa_decode_0")
    (tmp_path / f"gqa_decode_0.{missing}").write_text("something else\n")
    with pytest.raises(ValueError, match=rf"gqa_decode_0\.{missing}: nothing like"):
        read_dumps(tmp_path)


def test_a_kernel_that_nothing_lowered_is_refused(tmp_path: Path):
    describe(tmp_path, "gqa_decode_0", lowered="other_0")
    with pytest.raises(ValueError, match="gqa_decode_0"):
        read_dumps(tmp_path)


def test_dumping_leaves_the_environment_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", "before")
    monkeypatch.delenv("MOSAIC_GPU_DUMP_PTXAS", raising=False)
    with dumping(tmp_path):
        assert os.environ["MOSAIC_GPU_DUMP_TO"] == str(tmp_path)
        assert os.environ["MOSAIC_GPU_DUMP_PTXAS"] == "1"
    assert os.environ["MOSAIC_GPU_DUMP_TO"] == "before"
    assert "MOSAIC_GPU_DUMP_PTXAS" not in os.environ


def test_registers_are_shared_among_a_blocks_threads():
    # 65,536 in all, by eights, at most 255 each: the occupancy rules of CUDA
    found = [H200.registers_per_thread(threads) for threads in (128, 256, 384, 512, 1024)]
    assert found == [255, 255, 168, 128, 64]


def test_a_chip_is_described_by_what_its_data_sheet_says():
    for chip in CHIPS:
        text = target_config(chip)
        assert "feature_extension: ACCELERATED_FEATURES" in text, "for sm_90a"
        assert "shared_memory_per_block_optin: 232448" in text
        assert text.count("{") == text.count("}") == 2
        assert f'device_description_str: "NVIDIA {chip.name}"' in text
    assert "memory_bandwidth: 4800000000000" in target_config(H200)
    assert "memory_bandwidth: 3350000000000" in target_config(H100)


THUNKS = """\
001: kPartitionId   [source       | next=002 (1)] kPartitionId
004: kAsyncStart    [prev=003 (1) | next=000 (3)] stream=communication_stream[0], async_id=4
    005: kAllReduce [source | sink] kAllReduce
000: kCommandBuffer [prev=003 (2) | next=022 (3)]
    006: kCustomKernel [source       | next=007 (1)] input_pad_reduce_fusion grid: [1, 1, 1]
    007: kCustomCall   [prev=006 (1) | next=010 (3)] kCustomCall
    008: kWhile        [prev=007 (1) | sink        ]
022: kWhile         [prev=000 (1) | next=053 (2)]
condition:
    023: kCustomKernel [source | sink] wrapped_compare_2 grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    028: kWhile        [prev=027 (1) | sink        ]
      body:
        000: kCommandBuffer [source       | next=038 (1)]
            030: kCustomCall [source       | next=031 (1)] kCustomCall
        050: kCustomCall  [prev=000 (2) | sink        ] kCustomCall
207: kConditional   [prev=000 (1) | next=208 (1)]
  false_branch:
  true_branch:
    204: kConditional   [prev=000 (1) | next=205 (1)]
212: kCustomCall   [prev=105 (1) | next=000 (1)] kCustomCall
"""


def test_thunks_are_counted_inside_and_outside_of_command_buffers():
    thunks = parse_thunks(THUNKS)
    assert thunks == Thunks(captured_calls=2, other_calls=2, loops=2, branches=2)
    assert thunks.host_waits == 4


def test_the_list_after_the_passes_is_preferred(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="thunk sequence"):
        read_thunks(tmp_path)
    (tmp_path / "module_0001.jit__decode.thunk_sequence.txt").write_text("057: kCustomCall [] x\n")
    assert read_thunks(tmp_path).other_calls == 1
    (tmp_path / "module_0001.jit__decode.thunk_sequence_after_thunk_passes.txt").write_text(THUNKS)
    assert read_thunks(tmp_path).captured_calls == 2
