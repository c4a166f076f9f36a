"""scripts/demo.py as a user runs it, on small models that it makes itself."""

import os
import signal
import subprocess
import sys

import pytest
import typer
from repository import REPOSITORY, load_script


def demo(*arguments: str) -> tuple[int, str]:
    """The exit status and, on one line, everything that it said."""
    process = subprocess.Popen(
        [sys.executable, str(REPOSITORY / "scripts" / "demo.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert "Traceback" not in output
    return process.returncode, " ".join(output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tp", "2", "--decode", "tp=1"), "--tp is short for both nodes"),
        (("--prefill", "tp=two"), "tp='two': expected a whole number"),
        (("--dtype", "fp4"), "dtype='fp4' must be one of"),
    ],
)
def test_options_that_cannot_work_are_answered_in_a_line(arguments, message):
    code, output = demo("--model", "tiny-qwen3-moe", *arguments)
    assert code == 2
    assert output.startswith("error: ")
    assert message in output


def test_a_model_without_drafts_is_refused_by_name():
    code, output = demo("--model", "tiny-qwen3-moe", "--mtp")
    assert code == 2
    assert "mtp: this model has no MTP module" in output


@pytest.mark.parametrize("more", [("--mtp",), pytest.param((), marks=pytest.mark.slow)])
def test_tiny_deepseek_is_served_from_two_ranks_to_one(more):
    code, output = demo("--model", "tiny-deepseek", "--max-tokens", "12", *more)
    assert code == 0, output
    assert "prefill (tp 2) and decode (tp 1) apart" in output
    assert "random weights: the text is noise" in output
    # 49 tokens, the last of which is the decoder's, in pages of 16; one rank, whatever sent them
    layers = 5 if more else 4
    assert f"1 tp rank x (3 pages x {layers} layers + 1 context)" in output
    assert f"page-writes pushed │ {3 * layers + 1} (" in output
    assert "a copy of every page" in output
    assert ("drafts │" in output) == bool(more)
    assert "the 12 tokens equal those of the one-process node (tp 1" in output


def answer_of(demo, *tokens):
    return demo.Answer("model", tokens, (-0.5,) * len(tokens), (0.0,) * len(tokens), {})


def test_tokens_that_differ_fail_the_demo_in_float32_alone(capsys):
    demo = load_script("demo")
    demo.compare(answer_of(demo, "a", "b"), answer_of(demo, "a", "b"), "tp 1", "float32")
    assert "the 2 tokens equal" in capsys.readouterr().out
    for other in (("a", "c"), ("a",), ("a", "b", "c")):
        with pytest.raises(typer.Exit) as ended:
            demo.compare(answer_of(demo, "a", "b"), answer_of(demo, *other), "tp 1", "float32")
        assert ended.value.exit_code == 1
        assert "the tokens differ" in capsys.readouterr().out
    demo.compare(answer_of(demo, "a", "b"), answer_of(demo, "c", "b"), "tp 1", "bfloat16")
    output = " ".join(capsys.readouterr().out.split())
    assert "the first 0 of 2 tokens equal" in output
    assert "in bfloat16 two programs round differently" in output


@pytest.mark.slow
def test_tiny_qwen3_moe_is_served_with_its_experts_apart():
    code, output = demo("--model", "tiny-qwen3-moe", "--max-tokens", "12")
    assert code == 0, output
    assert "2 tp ranks x (3 pages x 4 layers + 1 context)" in output
    assert "its heads of every page" in output
    assert "the 12 tokens equal those of the one-process node (tp 1" in output
