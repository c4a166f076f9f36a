"""Print the table of docs/numerics.md: `python tests/numerics/error_table.py`.

For every mesh and every family the largest difference of a logit from transformers' in f32, over
the family's models named below (with --all over all its golden models that fit the mesh), all
their prompts, each whole and then token by token through the paged cache. Devices are those of the
CPU. Progress goes to stderr.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "tests" / "support"), str(REPOSITORY / "scripts"), str(REPOSITORY)]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(REPOSITORY / ".cache" / "jax"))

import golden_logits  # noqa: E402
import golden_weights  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
from drafting_model import DraftingModel  # noqa: E402
from golden_cases import CASES, MTP_CASES  # noqa: E402
from golden_meshes import MESHES, Mesh, fits, label  # noqa: E402
from paged_model import PagedModel  # noqa: E402

FAMILIES = {
    "llama": "Llama",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "deepseek_v3": "DeepSeek-V3",
    "mtp": "its MTP module",
}

# Those that fit every mesh and differ the most in what is sharded.
USUAL = (
    "llama_untied",
    "qwen3_untied",
    "qwen3_moe_untied",
    "qwen3_moe_unnormalised",
    "deepseek_yarn",
    "deepseek_plain",
)


def differences(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """The largest over a list of prompts; NaN counts."""
    return float(np.max([np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True)]))


def main_error(name: str, folder: Path, mesh: Mesh) -> float:
    """Of a model's logits."""
    golden = golden_logits.load(name, folder)
    model = PagedModel(folder, **dict(zip(("tp", "dp", "ep"), mesh, strict=True)))
    whole = differences(model.prefill(golden.prompts, chunk=128), golden.logits)
    model.reset()
    return max(whole, differences(model.teacher_forced(golden.prompts), golden.logits))


def mtp_error(name: str, folder: Path, mesh: Mesh) -> float:
    """Of its module's."""
    golden = golden_logits.load_mtp(name, folder)
    model = DraftingModel(folder, **dict(zip(("tp", "dp", "ep"), mesh, strict=True)))
    ways = (model.follow(golden.sequences, chunk)[1] for chunk in (128, None))
    return max(differences(way, golden.logits) for way in ways)


def errors(mesh: Mesh, folders: dict[str, Path]) -> Iterator[tuple[str, float]]:
    """(family, error) of every case that fits."""
    for name, folder in folders.items():
        config = CASES[name][0]
        if not fits(config, mesh):
            continue
        of_family = [(config["model_type"], main_error)]
        if name in MTP_CASES:
            of_family.append(("mtp", mtp_error))
        for family, measure in of_family:
            error = measure(name, folder, mesh)
            print(label(name, mesh), FAMILIES[family], f"{error:.1e}", file=sys.stderr, flush=True)
            yield family, error
            jax.clear_caches()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--all", action="store_true", help="all golden models, not the usual six")
    args = parser.parse_args()
    print("| tp | dp | ep | " + " | ".join(FAMILIES.values()) + " |")
    print("|---|---|---|" + "---|" * len(FAMILIES))
    with tempfile.TemporaryDirectory() as temporary:
        folders = {name: Path(temporary) / name for name in (CASES if args.all else USUAL)}
        for name, folder in folders.items():
            golden_weights.write(folder, name)
        for mesh in (m for m in MESHES if m[0] * m[1] in args.devices):
            worst: dict[str, float] = {}
            for family, error in errors(mesh, folders):
                worst[family] = float(np.max([worst.get(family, 0.0), error]))
            cells = [*map(str, mesh), *(f"{worst[f]:.1e}" if f in worst else "" for f in FAMILIES)]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
