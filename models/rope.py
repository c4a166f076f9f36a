"""Rotary position embedding: the config forms, the frequencies, the rotation."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.hf_config import integer, number

KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True)
class RopeConfig:
    """How angles grow with the position. `factor` and what follows belong to the scaled kinds."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"rope_type: {self.kind!r} is not supported ({', '.join(KINDS)})")
        for name in ("theta", "factor", "low_freq_factor", "high_freq_factor"):
            if not getattr(self, name) > 0:
                raise ValueError(f"rope {name}: expected > 0, got {getattr(self, name)}")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("rope high_freq_factor: must exceed low_freq_factor")


def rope_from_hf(hf: Mapping[str, Any]) -> RopeConfig:
    """Read either form: `rope_parameters`, or `rope_theta` with `rope_scaling`.

    Raises ValueError naming an unsupported type or a missing or malformed field.
    """
    scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ValueError(f"rope_parameters: expected an object, got {scaling!r}")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in KINDS:
        raise ValueError(f"rope_type: {kind!r} is not supported (supported: {', '.join(KINDS)})")
    partial = scaling.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor: {partial!r} is not supported (only 1.0)")
    fields = {**hf, **{name: value for name, value in scaling.items() if value is not None}}
    scaled: dict[str, Any] = {}
    if kind != "default":
        scaled["factor"] = number(fields, "factor")
    if kind == "llama3":
        scaled["low_freq_factor"] = number(fields, "low_freq_factor")
        scaled["high_freq_factor"] = number(fields, "high_freq_factor")
        original = integer(fields, "original_max_position_embeddings")
        scaled["original_max_position"] = original
    return RopeConfig(theta=number(fields, "rope_theta", default=10000.0), kind=kind, **scaled)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """f32 [H/2], radians per position."""
    powers = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    freqs = (1.0 / np.float32(config.theta) ** powers).astype(np.float32)
    if config.kind == "linear":
        return freqs / np.float32(config.factor)
    if config.kind == "llama3":
        # Long waves are slowed by `factor`, short ones kept, those between blended.
        turns = config.original_max_position * freqs / (2 * math.pi)
        span = config.high_freq_factor - config.low_freq_factor
        keep = np.clip((turns - config.low_freq_factor) / span, 0.0, 1.0)
        freqs = (1 - keep) * freqs / config.factor + keep * freqs
    return freqs.astype(np.float32)


def rope_tables(
    config: RopeConfig, head_dim: int, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), each f32 [T, 1, H/2], for positions [T]; made once a step for all layers."""
    freqs = jnp.asarray(inverse_frequencies(config, head_dim))
    angles = positions.astype(jnp.float32)[:, None, None] * freqs
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate x [T, heads, H], whose pairs are (i, i + H/2); in f32, result in x's dtype."""
    cos, sin = tables
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
