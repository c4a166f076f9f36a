"""The multi-token-prediction (MTP) module: one more layer, which predicts the token after next.

DeepSeek-V3 technical report (arXiv 2412.19437), section 2.2. The hidden state that it takes is
after the main model's final norm, and the projection takes [embedding ; hidden state], as in the
serving engines that run the released weights (the report's formula writes the other order).
"""

import jax
import jax.numpy as jnp
from flax import nnx

from models.interface import Params
from models.layers import RMSNorm, declare, rms_norm


class MTPModule(nnx.Module):
    """What the module has besides the embedding and the head, which are those of the main model.

    `layer` is its decoder layer, `prefix` that of its tensors. The projection is whole on every
    tensor rank: [2 D, D].
    """

    def __init__(self, prefix: str, hidden: int, layer: nnx.Module, dtype: str) -> None:
        self.embedding_norm = RMSNorm(f"{prefix}.enorm.weight", hidden, "embed", dtype)
        self.hidden_norm = RMSNorm(f"{prefix}.hnorm.weight", hidden, "embed", dtype)
        self.projection = declare(
            f"{prefix}.eh_proj.weight", (2 * hidden, hidden), (None, "embed"), dtype, inputs=1
        )
        self.layer = layer
        self.norm = RMSNorm(f"{prefix}.shared_head.norm.weight", hidden, "embed", dtype)


def combine(params: Params, embedded: jax.Array, hidden: jax.Array, eps: float) -> jax.Array:
    """What the module's layer runs on, [dp*T, D].

    embedded [dp*T, D] of the tokens that follow, hidden [dp*T, D] after the final norm. The module
    is the attribute `mtp` of its model: `params` has it under that name.
    """
    both = (
        rms_norm(embedded, params["mtp.embedding_norm.scale"], eps),
        rms_norm(hidden, params["mtp.hidden_norm.scale"], eps),
    )
    return jnp.dot(jnp.concatenate(both, axis=-1), params["mtp.projection"])


def shared_tensors(prefix: str, head: str) -> dict[str, str]:
    """Name of each copy that a checkpoint keeps under `prefix` -> the main model's tensor.

    `head` is the main model's head, or its embedding where they are tied.
    """
    return {
        f"{prefix}.embed_tokens.weight": "model.embed_tokens.weight",
        f"{prefix}.shared_head.head.weight": head,
    }
