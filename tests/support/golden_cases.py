"""The random models and prompts of the goldens: plain data, read by the tests and the generator.

Weights are wide (std 0.25) so that greedy tokens see a damaged cache. The models are small, yet
unlike each other in everything that a family reads from its config.
"""

from typing import Any

import golden_dense
import golden_experts
import golden_latent

PROMPT_LENGTHS = (1, 2, 15, 16, 17, 40, 100)
NEW_TOKENS = 12
STD = 0.25

# name -> (config.json, seed of the weights)
CASES: dict[str, tuple[dict[str, Any], int]] = {
    **golden_dense.CASES,
    **golden_experts.CASES,
    **golden_latent.CASES,
}
# Those whose MTP module has a golden of its own, NAME_mtp.npz.
MTP_CASES = tuple(name for name, (c, _) in CASES.items() if c.get("num_nextn_predict_layers"))

# The models of the end-to-end tests, whose goldens golden_serving.py reads: pages of 16 tokens and
# chunks of 64 meet prompts on both sides of their edges. name -> (prompt lengths, prompts of each)
SERVING: dict[str, tuple[tuple[int, ...], int]] = {
    "qwen3_serving": ((1, 2, 15, 16, 17, 63, 64, 65, 128, 193), 6),
    "qwen3_moe_serving": ((1, 2, 15, 16, 17, 63, 64, 65, 193), 4),
    "deepseek_serving": ((1, 2, 15, 16, 17, 63, 64, 65, 193), 4),
}
SERVING_BEST = 5

# Every model that `golden_folder` writes; those not in CASES have other goldens, or none.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    **CASES,
    "qwen3_serving": golden_dense.SERVING,
    "qwen3_moe_serving": golden_experts.SERVING,
    "deepseek_serving": golden_latent.SERVING,
}
# Models whose greedy tokens are mostly among the first few, so that a random MTP module's drafts
# are right now and then: the head's other rows are this much smaller.
FEW_TOKENS = {"deepseek_serving": (4, 0.1)}
