"""How close a model comes to choosing other experts: for `make_goldens.py`, in its environment.

A choice of experts is a step: where two scores nearly tie, the float noise of another order of
summation takes the other expert and changes everything after. Prompts of the goldens are drawn so
that no choice is close.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def recorded(*models: torch.nn.Module) -> Iterator[list[np.ndarray]]:
    """While it lasts, every call of a router appends its margins, f64 [tokens]."""
    margins: list[np.ndarray] = []

    def record(router: torch.nn.Module, _: object, output: tuple[torch.Tensor, ...]) -> None:
        margins.append(margin(router, output[0].double().numpy()))

    routers = [
        m for model in models for m in model.modules() if type(m).__name__.endswith("Router")
    ]
    hooks = [router.register_forward_hook(record) for router in routers]
    try:
        yield margins
    finally:
        for hook in hooks:
            hook.remove()


def margin(router: torch.nn.Module, logits: np.ndarray) -> np.ndarray:
    """By how much each token's [T, E] last choice beats the first that was not chosen.

    Softmax routers choose by the logits. DeepSeek's chooses by sigmoid plus bias: first the groups,
    by the sum of their best two, then experts within them; the closer of both counts.
    """
    if not hasattr(router, "e_score_correction_bias"):
        return _last_against_next(logits, router.top_k)
    scores = 1 / (1 + np.exp(-logits)) + router.e_score_correction_bias.double().numpy()
    grouped = scores.reshape(len(scores), router.num_group, -1)
    totals = np.sort(grouped, -1)[..., -2:].sum(-1)
    kept = np.argsort(-totals, -1)[:, : router.topk_group]
    allowed = np.take_along_axis(grouped, kept[..., None], 1).reshape(len(scores), -1)
    return np.minimum(
        _last_against_next(totals, router.topk_group), _last_against_next(allowed, router.top_k)
    )


def _last_against_next(scores: np.ndarray, k: int) -> np.ndarray:
    if k == scores.shape[-1]:
        return np.full(len(scores), np.inf)
    best = -np.sort(-scores, -1)
    return best[:, k - 1] - best[:, k]
