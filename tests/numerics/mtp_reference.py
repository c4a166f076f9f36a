"""DeepSeek-V3's multi-token-prediction module in torch: for `make_goldens.py`, in its environment.

Composed from transformers' own decoder layer and norm as the published module is (DeepSeek-V3
report, section 2.2, with the order of concatenation of the released weights), and read from the
tensors `model.layers.{L}.*` of the checkpoint. transformers' own `MtpModel` is the second opinion.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers.modeling_layers import MtpModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3ForCausalLM,
    DeepseekV3RMSNorm,
)

AGREEMENT = 1e-4  # between the two opinions, of any logit


class MtpReference(nn.Module):
    """One module; embedding and head are copies of the main model's, read from where it keeps them.

    Row i takes the hidden state of token i after the main model's final norm and the embedding of
    token i + 1, attends to rows 0..i, and gives logits for token i + 2.
    """

    def __init__(self, main: DeepseekV3ForCausalLM, folder: Path) -> None:
        super().__init__()
        config = main.config
        size, eps, layer = config.hidden_size, config.rms_norm_eps, config.num_hidden_layers
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.enorm = DeepseekV3RMSNorm(size, eps)
        self.hnorm = DeepseekV3RMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = DeepseekV3DecoderLayer(config, layer)  # past the dense ones: with experts
        self.norm = DeepseekV3RMSNorm(size, eps)
        self.head = nn.Linear(size, config.vocab_size, bias=False)
        self.rotary = main.model.rotary_emb
        self._read(load_file(folder / "model.safetensors"), f"model.layers.{layer}.")
        self.eval()

    def _read(self, tensors: dict[str, torch.Tensor], prefix: str) -> None:
        mine = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        state = {
            "head.weight": mine.pop("shared_head.head.weight"),
            "norm.weight": mine.pop("shared_head.norm.weight"),
        }
        for part in ("embed_tokens", "enorm", "hnorm", "eh_proj"):
            state[f"{part}.weight"] = mine.pop(f"{part}.weight")
        # The layer holds its experts in two stacks, gate above up.
        experts = self.block.mlp.experts.num_experts

        def weights(name: str) -> list[torch.Tensor]:
            return [mine.pop(f"mlp.experts.{e}.{name}_proj.weight") for e in range(experts)]

        pairs = zip(weights("gate"), weights("up"), strict=True)
        state["block.mlp.experts.gate_up_proj"] = torch.stack([torch.cat(p) for p in pairs])
        state["block.mlp.experts.down_proj"] = torch.stack(weights("down"))
        state |= {f"block.{name}": tensor for name, tensor in mine.items()}
        self.load_state_dict(state)

    def forward(self, hidden: torch.Tensor, next_tokens: torch.Tensor) -> torch.Tensor:
        """hidden [T, D] of tokens 0.. and the tokens [T] after them: logits [T, V]."""
        embedded = self.enorm(self.embed_tokens(next_tokens))
        x = self.eh_proj(torch.cat([embedded, self.hnorm(hidden)], -1))[None]
        positions = torch.arange(len(next_tokens))[None]
        ahead = torch.full((len(next_tokens),) * 2, float("-inf")).triu(1)[None, None]
        x = self.block(
            x, attention_mask=ahead, position_embeddings=self.rotary(x, positions), cache=None
        )
        return self.head(self.norm(x[0]))


def load(main: DeepseekV3ForCausalLM, folder: Path) -> MtpReference:
    """The module of a checkpoint, once it agrees with transformers' reading of the same tensors."""
    layer = main.config.num_hidden_layers
    reference = MtpReference(main, folder)
    # transformers knows the module by the number of the released model's layers alone.
    main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layer}\..*"]
    theirs = MtpModel.from_pretrained(main).eval()
    tokens = torch.randint(0, main.config.vocab_size, (40,), generator=torch.manual_seed(0))
    hidden = main.model(tokens[None]).last_hidden_state[0]
    mine = reference(hidden[:-1], tokens[1:])
    positions = torch.arange(1, len(tokens))[None]
    state = theirs.forward_layer(0, hidden[None, :-1], positions, None, input_ids=tokens[None, 1:])
    difference = (theirs.shared_head(state)[0] - mine).abs().max()
    assert difference < AGREEMENT, f"the two references of MTP differ by {difference}"
    return reference
