"""Rotary position embedding: the config forms, the frequencies, the rotation."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.hf_config import flag, integer, number

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """How angles grow with the position. `factor` and what follows belong to the scaled kinds."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    # yarn alone: the turns over the original context above which a wave is kept, below which it is
    # slowed by `factor`; whether the bounds are rounded to whole pairs; what cos and sin are
    # multiplied by; the mscale of the softmax (0: none)
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"rope_type: {self.kind!r} is not supported ({', '.join(KINDS)})")
        for name in ("theta", "factor", "low_freq_factor", "high_freq_factor"):
            if not getattr(self, name) > 0:
                raise ValueError(f"rope {name}: expected > 0, got {getattr(self, name)}")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("rope high_freq_factor: must exceed low_freq_factor")
        if self.kind == "yarn" and not self.beta_fast >= self.beta_slow > 0:
            raise ValueError(
                f"rope beta_fast: {self.beta_fast} must be at least beta_slow {self.beta_slow}, "
                f"both > 0"
            )

    @property
    def softmax_factor(self) -> float:
        """What the softmax scale is multiplied by, in families that heed mscale_all_dim."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2


def rope_from_hf(hf: Mapping[str, Any], kinds: Collection[str] = KINDS) -> RopeConfig:
    """Read either form: `rope_parameters`, or `rope_theta` with `rope_scaling`.

    Raises ValueError naming a type that is not among `kinds` or a missing or malformed field.
    """
    given = {name: hf[name] for name in ("rope_parameters", "rope_scaling") if hf.get(name)}
    for name, value in given.items():
        if not isinstance(value, Mapping):
            raise ValueError(f"{name}: expected an object, got {value!r}")
    scaling = next(iter(given.values()), {})
    for name, value in given.get("rope_scaling", {}).items():
        known = "rope_type" if name == "type" and "type" not in scaling else name
        if scaling.get(known) != value:  # readers disagree about which of the two goes first
            raise ValueError(
                f"rope_scaling: {name} {value!r} differs from rope_parameters, which has "
                f"{scaling.get(known)!r}"
            )
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in kinds:
        raise ValueError(f"rope_type: {kind!r} is not supported (supported: {', '.join(kinds)})")
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
    if kind != "yarn" and scaling.get("mscale_all_dim"):
        raise ValueError(f"mscale_all_dim: not supported with rope_type {kind!r} (only yarn)")
    if kind == "yarn":
        scaled |= _yarn_from_hf(fields, scaled["factor"])
    return RopeConfig(theta=number(fields, "rope_theta", default=10000.0), kind=kind, **scaled)


def _yarn_from_hf(fields: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """The fields of `RopeConfig` that yarn alone has.

    cos and sin grow by `attention_factor` if that is given, else by the ratio of the mscales of
    `mscale` and `mscale_all_dim`, else by the mscale of 1.
    """
    mscale = number(fields, "mscale", default=0.0, zero=True)
    all_dim = number(fields, "mscale_all_dim", default=0.0, zero=True)
    # The published implementations disagree about what one of them alone means, except mscale 1.
    if all_dim and not mscale:
        raise ValueError(f"mscale: missing, but mscale_all_dim is {all_dim}")
    if mscale not in (0, 1) and not all_dim:
        raise ValueError(f"mscale_all_dim: missing, but mscale is {mscale}")
    ratio = _mscale(factor, mscale or 1.0) / _mscale(factor, all_dim)
    return {
        "beta_fast": number(fields, "beta_fast", default=32.0),
        "beta_slow": number(fields, "beta_slow", default=1.0),
        "truncate": flag(fields, "truncate", default=True),
        "attention_factor": number(fields, "attention_factor", default=ratio),
        "mscale_all_dim": all_dim,
        "original_max_position": integer(fields, "original_max_position_embeddings"),
    }


def _mscale(factor: float, weight: float) -> float:
    """0.1 * weight * ln(factor) + 1 (YaRN, arXiv 2309.00071, eq. 22); 1 for a factor up to 1."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


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
    if config.kind == "yarn":
        keep = _yarn_kept(config, head_dim)
        freqs = (1 - keep) * freqs / np.float32(config.factor) + keep * freqs
    return freqs.astype(np.float32)


def _yarn_kept(config: RopeConfig, head_dim: int) -> np.ndarray:
    """f32 [H/2], 1 where a pair's wave is kept and 0 where it is slowed (YaRN, section 3.2).

    The ramp between is linear in the number of the pair, from the pair that turns `beta_fast` times
    over the original context to the one that turns `beta_slow` times.
    """

    def pair(turns: float) -> float:  # at which this many turns are made
        wave = config.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(wave) / (2 * math.log(config.theta))

    low, high = pair(config.beta_fast), pair(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = max(high - low, 0.001)  # never a division by zero
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(span)
    return 1 - np.clip(ramp, 0, 1)


def rope_tables(
    config: RopeConfig, head_dim: int, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), each f32 [T, 1, H/2], for positions [T]; made once a step for all layers."""
    freqs = jnp.asarray(inverse_frequencies(config, head_dim))
    angles = positions.astype(jnp.float32)[:, None, None] * freqs
    scale = config.attention_factor
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(
    x: jax.Array, tables: tuple[jax.Array, jax.Array], *, interleaved: bool = False
) -> jax.Array:
    """Rotate x [T, heads, H]; in f32, result in x's dtype.

    Its pairs are (i, i + H/2), or (2i, 2i + 1) if interleaved. In the result they are (i, i + H/2)
    in either case: queries and keys change alike, so their products do not.
    """
    cos, sin = tables
    wide = x.astype(jnp.float32)
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else jnp.split(wide, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
