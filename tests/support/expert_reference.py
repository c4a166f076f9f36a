"""Mixture of experts written from its formula, one token at a time, in numpy and f64."""

import numpy as np


def gated_mlp(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    x, gate, up, down = (a.astype(np.float64) for a in (x, gate, up, down))
    inner = x @ gate
    return (inner / (1 + np.exp(-inner)) * (x @ up)) @ down


def experts(x, ids, weights, live, gate, up, down, shared=None) -> np.ndarray:
    """[T, D] in f64; rows that are not live are zeros."""
    out = np.zeros(x.shape)
    for t in np.flatnonzero(live):
        for e, weight in zip(ids[t], weights[t], strict=True):
            out[t] += weight * gated_mlp(x[t], gate[e], up[e], down[e])
        if shared is not None:
            out[t] += gated_mlp(x[t], *shared)
    return out


def route_softmax(logits: np.ndarray, k: int, *, normalise: bool) -> list[dict[int, float]]:
    """Of each token: expert -> weight."""
    routes = []
    for row in logits.astype(np.float64):
        odds = np.exp(row - row.max())
        chosen = sorted(range(len(row)), key=lambda e: -odds[e])[:k]
        total = sum(odds[e] for e in chosen) if normalise else odds.sum()
        routes.append({e: odds[e] / total for e in chosen})
    return routes


def route_sigmoid_grouped(
    logits: np.ndarray,
    bias: np.ndarray,
    k: int,
    *,
    groups: int,
    top_groups: int,
    normalise: bool,
    scale: float,
) -> list[dict[int, float]]:
    """Of each token: expert -> weight."""
    size = logits.shape[1] // groups
    routes = []
    for row in logits.astype(np.float64):
        score = 1 / (1 + np.exp(-row))
        biased = score + bias
        members = [range(g * size, (g + 1) * size) for g in range(groups)]
        rank = [sum(sorted((biased[e] for e in m), reverse=True)[:2]) for m in members]
        best = sorted(range(groups), key=lambda g: -rank[g])[:top_groups]
        allowed = [e for g in best for e in members[g]]
        chosen = sorted(allowed, key=lambda e: -biased[e])[:k]
        total = sum(score[e] for e in chosen) + 1e-20 if normalise else 1.0
        routes.append({e: score[e] / total * scale for e in chosen})
    return routes
