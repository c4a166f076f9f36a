"""What nodes say of GPUs, how a deployment deals them, and what a process's environment becomes."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jaxdisagg import gpu_setup
from jaxdisagg.config import MeshConfig, NodeConfig, ServeConfig
from jaxdisagg.config_text import parse_node
from jaxdisagg.deployment import Deployment, DeploymentError
from jaxdisagg.gpu_setup import cuda_plugins, set_gpus, visible_gpus
from jaxdisagg.gpu_sharing import share_gpus
from jaxdisagg.group.start import comparable, differences

BASE = NodeConfig(role="decode", model=Path("m"), id="d")

# A driver that hides devices as CUDA does: by CUDA_VISIBLE_DEVICES, which names them by number or
# by (the beginning of) a UUID, up to the first that is not there. It has GPUS devices.
DRIVER = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static int shown[64], count = -1;
static void uuid(int i, char* out) { sprintf(out, "GPU-%08x", 0xa0 + i); }
int cuInit(unsigned flags) {
  const char* all = getenv("GPUS");
  int there = all ? atoi(all) : 0;
  const char* words = getenv("CUDA_VISIBLE_DEVICES");
  count = 0;
  if (!words) { while (count < there) { shown[count] = count; count++; } return flags != 0; }
  char copy[512]; snprintf(copy, sizeof copy, "%s", words);
  for (char* word = strtok(copy, ","); word; word = strtok(NULL, ",")) {
    int found = -1;
    for (int i = 0; i < there; i++) {
      char name[32], number[16];
      uuid(i, name); sprintf(number, "%d", i);
      if (!strcmp(word, name) || !strcmp(word, number)) found = i;
    }
    if (found < 0) break;
    shown[count++] = found;
  }
  return 0;
}
int cuDeviceGetCount(int* out) { *out = count; return count < 0 ? 3 : 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetPCIBusId(char* text, int length, int device) {
  snprintf(text, length, "0000:%02x:00.0", 0x10 + shown[device]);
  return 0;
}
"""


@pytest.fixture(scope="session")
def driver(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    library = folder / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "driver.c"], check=True)
    return library


@pytest.fixture
def machine(driver, monkeypatch):
    """A machine with 4 GPUs and a jax with a CUDA back end."""
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER",
                 "JAX_DEFAULT_MATMUL_PRECISION", "XLA_CLIENT_MEM_FRACTION"):  # fmt: skip
        monkeypatch.setenv(name, "x")  # so that what is set below is taken back
        monkeypatch.delenv(name)
    monkeypatch.setenv("JAXDISAGG_LIBCUDA", str(driver))
    monkeypatch.setenv("GPUS", "4")
    monkeypatch.setattr(gpu_setup, "cuda_plugins", lambda: ["xla_cuda13"])
    return monkeypatch


# ---- the words -------------------------------------------------------------------------------


def test_words():
    node = parse_node("tp=2,gpus=1+3,gpu_memory=0.4", BASE)
    assert (node.mesh.gpus, node.gpu_memory) == ((1, 3), 0.4)
    assert node.device_memory == "auto"
    assert parse_node("device_memory=staged", BASE).device_memory == "staged"
    two = parse_node("tp=2,dp=2,processes=2,gpus=4-7", BASE)
    assert [two.mesh.gpus_of(i) for i in (0, 1)] == [(4, 5), (6, 7)]
    apart = parse_node("tp=4,processes=2,gpus=0-1", BASE)  # on a machine each
    assert [apart.mesh.gpus_of(i) for i in (0, 1)] == [(0, 1)] * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp=2,gpus=1+1", "gpus: 1 is named twice"),
        ("tp=2,gpus=0", r"gpus=0: 1 for the dp\*tp=2 devices of processes=1"),
        ("tp=4,processes=2,gpus=0-2", "3 for the dp.tp=4 devices of processes=2"),
        ("gpus=0+1", r"gpus=0\+1: 2 for the dp\*tp=1 devices"),
        ("gpus=a", "gpus='a': expected numbers such as"),
        ("gpus=1024", "gpus='1024': the numbers must be below 1024"),
        ("gpus=0,gpus=0", "gpus comes twice"),
        ("gpu_memory=much", "gpu_memory='much': expected a part of 1"),
        ("gpu_memory=1", "gpu_memory=1.0 must be a part of 1"),
        ("gpu_memory=-0.1", "gpu_memory=-0.1 must be a part"),
        ("gpu_memory=nan", "gpu_memory=nan must be a part"),
        ("device_memory=pinned", "device_memory='pinned' must be one of auto, direct, staged"),
    ],
)
def test_bad_words_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        parse_node(text, BASE)


def test_processes_of_a_node_may_have_other_gpus():
    node = replace(BASE, mesh=MeshConfig(tp=2, processes=2, gpus=(0,)))
    other = replace(node, mesh=MeshConfig(tp=2, processes=2, gpus=(5,)), gpu_memory=0.5)
    assert differences(comparable(other), comparable(node)) is None


# ---- a deployment deals ----------------------------------------------------------------------


def dealt(texts: list[str], visible: int) -> list[tuple[tuple[int, ...], float]]:
    nodes = [parse_node(text, replace(BASE, id=f"n{i}")) for i, text in enumerate(texts)]
    return [(node.mesh.gpus, node.gpu_memory) for node in share_gpus(nodes, visible)]


@pytest.mark.parametrize(
    ("texts", "visible", "expected"),
    [
        (["", ""], 0, [((), 0.0), ((), 0.0)]),
        (["", ""], 1, [((0,), 0.45), ((0,), 0.45)]),
        (["", "", ""], 1, [((0,), 0.3)] * 3),
        (["", ""], 2, [((0,), 0.0), ((1,), 0.0)]),
        (["tp=2", "tp=2"], 4, [((0, 1), 0.0), ((2, 3), 0.0)]),
        (["tp=2", "tp=2"], 2, [((0, 1), 0.45), ((0, 1), 0.45)]),
        # the second node's other GPU is its alone, but its memory is one number
        (["tp=2", "tp=2"], 3, [((0, 1), 0.45), ((2, 0), 0.45)]),
        (["gpus=1", ""], 2, [((1,), 0.0), ((0,), 0.0)]),
        (["gpus=0", ""], 1, [((0,), 0.45), ((0,), 0.45)]),
        (["gpu_memory=0.6", ""], 1, [((0,), 0.6), ((0,), 0.3)]),
        (["gpu_memory=0.6", "gpu_memory=0.35"], 1, [((0,), 0.6), ((0,), 0.35)]),
        (["gpu_memory=0.95"], 1, [((0,), 0.95)]),
        (["tp=2,gpus=2-3", "gpus=0", "tp=2"], 4, [((2, 3), 0.0), ((0,), 0.45), ((0, 1), 0.45)]),
    ],
)
def test_dealing(texts, visible, expected):
    assert dealt(texts, visible) == expected


@pytest.mark.parametrize(
    ("texts", "visible", "message"),
    [
        (["tp=2", ""], 1, r"n0: dp\*tp=2 takes 2 GPUs, the machine shows 1 \(JAX_PLATFORMS=cpu"),
        (["gpus=1", ""], 1, "n0: gpus=1: the machine shows 1 CUDA devices"),
        (["gpu_memory=0.6", "gpu_memory=0.5"], 1, "gpu_memory: 0.6 of n0 . 0.5 of n1 do not fit"),
        (["gpu_memory=0.9", ""], 1, "gpu_memory: 0.9 of n0 . 0 of n1 do not fit on GPU 0"),
        (["tp=2,processes=2,gpus=0"], 4, r"n0: gpus=0: 1 for the dp\*tp=2 devices of all"),
    ],
)
def test_what_cannot_be_dealt(texts, visible, message):
    with pytest.raises(ValueError, match=message):
        dealt(texts, visible)


def test_a_deployment_refuses_before_it_starts_anything(machine, serving_nodes):
    deployment = Deployment(serving_nodes("tp=8"))
    machine.setattr(deployment, "_check_fit", lambda: None)
    with pytest.raises(DeploymentError, match=r"d: dp\*tp=8 takes 8 GPUs, the machine shows 4"):
        deployment.start()
    assert deployment.nodes == []


@pytest.fixture
def serving_nodes():
    return lambda text: ServeConfig((replace(parse_node(text, BASE), role="mixed"),), port=0)


# ---- what jax will find ----------------------------------------------------------------------


def test_how_many_gpus_jax_would_use(machine):
    assert visible_gpus() == 4
    machine.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert visible_gpus() == 1
    machine.setenv("JAX_PLATFORMS", "cuda,cpu")
    assert visible_gpus() == 1
    machine.setenv("JAX_PLATFORMS", "cpu,cuda")
    assert visible_gpus() == 0
    machine.delenv("JAX_PLATFORMS")
    machine.setattr(gpu_setup, "cuda_plugins", list)
    assert visible_gpus() == 0


def test_plugins_are_found_by_module_and_by_entry_point(tmp_path, monkeypatch):
    (tmp_path / "jax_plugins" / "xla_cuda99").mkdir(parents=True)
    (tmp_path / "jax_plugins" / "xla_cuda99" / "__init__.py").touch()
    (tmp_path / "other-1.dist-info").mkdir()
    (tmp_path / "other-1.dist-info" / "METADATA").write_text("Name: other\nVersion: 1\n")
    (tmp_path / "other-1.dist-info" / "entry_points.txt").write_text(
        "[jax_plugins]\nmy_cuda = somewhere\nxla_tpu = elsewhere\n"
    )
    code = "from jaxdisagg.gpu_setup import cuda_plugins; print(*cuda_plugins())"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, text=True, check=True,
        capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == ["my_cuda", "xla_cuda99"]
    assert cuda_plugins() == []  # the base install is for CPUs


# ---- a process's environment -----------------------------------------------------------------


def environment_of(machine, node: NodeConfig) -> dict[str, str]:
    set_gpus(node)
    names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "JAX_PLATFORMS",
             "XLA_CLIENT_MEM_FRACTION", "JAX_DEFAULT_MATMUL_PRECISION")  # fmt: skip
    return {name: gpu_setup.os.environ[name] for name in names if name in gpu_setup.os.environ}


def test_each_process_sees_its_share(machine):
    node = parse_node("tp=4,processes=2,gpus=3+1+0+2,gpu_memory=0.4", BASE)
    expected = {
        "CUDA_VISIBLE_DEVICES": "3,1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "JAX_PLATFORMS": "cuda,cpu",
        "XLA_CLIENT_MEM_FRACTION": "0.4",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    }
    machine.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert environment_of(machine, node) == expected
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in gpu_setup.os.environ
    from ffi_transport.topology import cuda_addresses

    assert cuda_addresses() == ["0000:13:00.0", "0000:11:00.0"]
    for name in expected:
        machine.delenv(name)
    follower = replace(node, process=1, group="h:1", dtype="bfloat16", gpu_memory=0.0)
    assert environment_of(machine, follower) == {
        "CUDA_VISIBLE_DEVICES": "0,2",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "JAX_PLATFORMS": "cuda,cpu",
    }


@pytest.mark.parametrize(
    ("outer", "inner", "addresses"),
    [
        ("2,3", "3,2", ["0000:13:00.0", "0000:12:00.0"]),
        ("GPU-000000a3, GPU-000000a1", "GPU-000000a1,GPU-000000a3",
         ["0000:11:00.0", "0000:13:00.0"]),
    ],
)  # fmt: skip
def test_numbers_count_within_what_the_process_may_see(machine, outer, inner, addresses):
    machine.setenv("CUDA_VISIBLE_DEVICES", outer)
    found = environment_of(machine, parse_node("tp=2,gpus=1+0", replace(BASE, dtype="bfloat16")))
    assert found == {"CUDA_VISIBLE_DEVICES": inner, "JAX_PLATFORMS": "cuda,cpu"}
    from ffi_transport.topology import cuda_addresses

    assert cuda_addresses() == addresses


@pytest.mark.parametrize(
    ("variables", "text", "message"),
    [
        ({}, "gpus=4", r"gpus=4: no such CUDA device \(CUDA_VISIBLE_DEVICES=4 shows 0 of 1\)"),
        ({}, "tp=3,gpus=0+9+1", r"gpus=9: no such CUDA device .* shows 1 of 3"),
        ({"JAXDISAGG_LIBCUDA": "libnone.so"}, "gpus=0", "gpus=0: no such CUDA device"),
        ({"CUDA_VISIBLE_DEVICES": "2"}, "gpus=1", "gpus=1: CUDA_VISIBLE_DEVICES=2 names 1 devices"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "gpus=0", "gpus=0: CUDA_VISIBLE_DEVICES= names 0 devices"),
        ({"JAX_PLATFORMS": "cpu"}, "gpus=0", "gpus=0: JAX_PLATFORMS=cpu uses none"),
    ],
)
def test_gpus_that_cannot_be_used_are_named(machine, variables, text, message):
    for name, value in variables.items():
        machine.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        set_gpus(parse_node(text, BASE))


def test_a_jax_for_cpus_says_what_to_install(machine):
    machine.setattr(gpu_setup, "cuda_plugins", list)
    with pytest.raises(ValueError, match=r"gpus=0: this jax is for CPUs alone; .*\[cuda13\]"):
        set_gpus(parse_node("gpus=0", BASE))


def test_a_node_on_cpus_keeps_its_environment(machine):
    machine.setenv("JAX_PLATFORMS", "cpu")
    assert environment_of(machine, BASE) == {"JAX_PLATFORMS": "cpu"}
    machine.delenv("JAX_PLATFORMS")
    # one that was not told which GPUs still multiplies in float32
    assert environment_of(machine, BASE) == {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"JAX_PLATFORMS": "cpu"}, "JAX_PLATFORMS=cpu uses none"),
        ({"GPUS": "0"}, "there is no CUDA device"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "there is no CUDA device"),
    ],
)
def test_memory_of_no_gpu_is_refused(machine, variables, why):
    node = parse_node("gpu_memory=0.4", BASE)
    assert environment_of(machine, node)["XLA_CLIENT_MEM_FRACTION"] == "0.4"
    for name, value in variables.items():
        machine.setenv(name, value)
    with pytest.raises(ValueError, match=f"gpu_memory=0.4: {why}"):
        set_gpus(node)
    machine.delenv("JAX_PLATFORMS", raising=False)
    machine.setattr(gpu_setup, "cuda_plugins", list)
    with pytest.raises(ValueError, match=r"gpu_memory=0\.4: this jax is for CPUs alone"):
        set_gpus(node)
