"""The goldens of golden_cases.CASES: what `numerics/make_goldens.py` has made of them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from golden_cases import NEW_TOKENS, PROMPT_LENGTHS

from models.checkpoint import weights_fingerprint

GOLDENS = Path(__file__).resolve().parents[1] / "numerics" / "goldens"
MARGIN = 1e-3  # choices of experts closer than this are not in the goldens
COUNT = range(len(PROMPT_LENGTHS))


@dataclass(frozen=True)
class Golden:
    """What transformers gives for each prompt; lists are parallel."""

    prompts: list[list[int]]
    logits: list[np.ndarray]  # f32 [L, V]
    greedy: np.ndarray  # [prompts, NEW_TOKENS]
    logprobs: np.ndarray  # f32 [prompts, NEW_TOKENS]


@dataclass(frozen=True)
class MtpGolden:
    """What the reference of the MTP module gives; lists are parallel."""

    sequences: list[list[int]]  # the prompts, each with its greedy continuation
    logits: list[np.ndarray]  # f32 [L + NEW_TOKENS - 1, V], row i for token i + 2
    drafts: np.ndarray  # [prompts, NEW_TOKENS] for each greedy token, -1 where there is none


def load(name: str, folder: Path) -> Golden:
    """Raises AssertionError when the weights in `folder` are not those that it was made with."""
    with np.load(GOLDENS / f"{name}.npz") as data:
        assert weights_fingerprint(folder) == str(data["fingerprint"]), "other weights than golden"
        assert data.get("margin", np.inf) >= MARGIN, "a choice of experts is a close call"
        golden = Golden(
            [data[f"tokens_{i}"].tolist() for i in COUNT],
            [data[f"logits_{i}"] for i in COUNT],
            np.stack([data[f"greedy_{i}"] for i in COUNT]),
            np.stack([data[f"logprobs_{i}"] for i in COUNT]),
        )
    assert golden.greedy.shape == (len(COUNT), NEW_TOKENS)
    return golden


def load_mtp(name: str, folder: Path) -> MtpGolden:
    """The golden of a case of MTP_CASES' module; raises as `load` does."""
    main = load(name, folder)
    with np.load(GOLDENS / f"{name}.npz") as data, np.load(GOLDENS / f"{name}_mtp.npz") as module:
        assert str(data["fingerprint"]) == str(module["fingerprint"])
        return MtpGolden(
            [[*main.prompts[i], *main.greedy[i].tolist()] for i in COUNT],
            [module[f"mtp_{i}"] for i in COUNT],
            np.stack([data[f"drafts_{i}"] for i in COUNT]),
        )
