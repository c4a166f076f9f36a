"""Prompts and what a reference makes of them: for `make_goldens.py`, in its environment."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import golden_routing
import mtp_reference
import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

logging.set_verbosity_error()  # the tensors of an MTP module, which the main model does not read
logging.disable_progress_bar()

ROUTING_MARGIN = 1e-3
TRIES = 2000


@dataclass(frozen=True)
class Sequence:
    """A prompt of L tokens and n greedy tokens; rows are those of all tokens but the last."""

    prompt: list[int]
    greedy: np.ndarray  # int32 [n], continued one by one with a cache
    logprobs: np.ndarray  # f32 [n], of those tokens
    first: np.ndarray  # f32 [V] log-softmax of the first of them
    logits: np.ndarray  # f32 [L + n - 1, V], in one pass
    mtp: np.ndarray | None  # f32 [L + n - 1, V]; row i predicts token i + 2
    gap: float  # smallest difference of the best two logits, over the greedy tokens and drafts
    margin: float  # the closest choice of experts of any token and layer; inf without experts

    @property
    def drafts(self) -> np.ndarray:
        """int32 [n]: what the MTP module says in place of each greedy token; -1 where it cannot."""
        assert self.mtp is not None
        before = [-1] if len(self.prompt) == 1 else []
        rows = self.mtp[max(len(self.prompt) - 2, 0) : -1]
        return np.array([*before, *rows.argmax(-1)], np.int32)


class Reference:
    """A checkpoint's model in transformers, f32, and its MTP module where it has one."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        modules = getattr(self.model.config, "num_nextn_predict_layers", 0)
        self.mtp = mtp_reference.load(self.model, folder) if modules else None
        self.vocab = self.model.config.vocab_size

    def draw(
        self, rng: np.random.Generator, length: int, new: int, smallest_gap: float
    ) -> Sequence:
        """A random prompt whose logits and choices of experts are no close calls.

        A token whose choices are close is drawn again in its place; a prompt whose continuation is
        close is drawn again as a whole.
        """
        for _ in range(TRIES):
            ids = rng.integers(0, self.vocab, length).tolist()
            while (token := self._first_close_call(ids)) is not None:
                ids[token] = int(rng.integers(0, self.vocab))
            sequence = self.continued(ids, new)
            if sequence.gap >= smallest_gap and sequence.margin >= ROUTING_MARGIN:
                return sequence
        raise AssertionError(f"no prompt of {length} tokens without a close call")

    def continued(self, ids: list[int], new: int) -> Sequence:
        """What the model makes of a prompt."""
        generated = self._greedy(ids, new)
        every = [*ids, *generated["greedy"].tolist()]
        hidden, margins = self._hidden(every[:-1])
        logits = self.model.lm_head(hidden).numpy()
        mtp, gap = None, generated.pop("gap")
        if self.mtp is not None:
            mtp, mtp_margins = self._drafted(hidden, every[1:])
            margins = np.minimum(margins, mtp_margins)
            gap = min(gap, best_two(mtp[max(len(ids) - 2, 0) : -1]))
        return Sequence(ids, logits=logits, mtp=mtp, gap=gap, margin=margins.min(), **generated)

    def noise(self, sequences: list[Sequence]) -> float:
        """The largest difference of a logit when the model runs in f64; it stays in f64."""
        self.model.double()
        if self.mtp is not None:
            self.mtp.double()
        worst = 0.0
        for sequence in sequences:
            every = [*sequence.prompt, *sequence.greedy.tolist()]
            hidden, _ = self._hidden(every[:-1])
            exact = self.model.lm_head(hidden).numpy()
            worst = max(worst, np.abs(exact - sequence.logits).max())
            if self.mtp is not None:
                exact, _ = self._drafted(hidden, every[1:])
                worst = max(worst, np.abs(exact - sequence.mtp).max())
        return worst

    def _greedy(self, ids: list[int], count: int) -> dict[str, Any]:
        """Continue with a cache, token by token."""
        step = torch.tensor([ids])
        cache, tokens, logprobs, first, gap = None, [], [], None, np.inf
        for _ in range(count):
            out = self.model(step, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits = out.logits[0, -1].float()
            gap = min(gap, best_two(logits[None].numpy()))
            distribution = logits.log_softmax(-1)
            first = distribution if first is None else first
            token = int(logits.argmax())
            tokens.append(token)
            logprobs.append(float(distribution[token]))
            step = torch.tensor([[token]])
        return {
            "greedy": np.array(tokens, np.int32),
            "logprobs": np.array(logprobs, np.float32),
            "first": first.numpy(),
            "gap": gap,
        }

    def _hidden(self, ids: list[int]) -> tuple[torch.Tensor, np.ndarray]:
        """After the final norm [T, D], and each token's closest choice of experts [T]."""
        with golden_routing.recorded(self.model) as margins:
            hidden = self.model.model(torch.tensor([ids])).last_hidden_state[0]
        return hidden, np.min([np.full(len(ids), np.inf), *margins], 0)

    def _drafted(
        self, hidden: torch.Tensor, next_tokens: list[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The MTP module's logits [T, V], and each row's closest choice of experts [T]."""
        with golden_routing.recorded(self.mtp) as margins:
            logits = self.mtp(hidden, torch.tensor(next_tokens))
        return logits.numpy(), np.min(margins, 0)

    def _first_close_call(self, ids: list[int]) -> int | None:
        """The first token whose arrival makes a choice of experts close."""
        hidden, margins = self._hidden(ids)
        if self.mtp is not None and len(ids) > 1:
            _, drafted = self._drafted(hidden[:-1], ids[1:])
            margins[1:] = np.minimum(margins[1:], drafted)
        close = np.flatnonzero(margins < ROUTING_MARGIN)
        return int(close[0]) if len(close) else None


def best_two(logits: np.ndarray) -> float:
    """The smallest difference of the best two over rows [T, V]."""
    best = np.sort(logits, -1)
    return float((best[:, -1] - best[:, -2]).min(initial=np.inf))
