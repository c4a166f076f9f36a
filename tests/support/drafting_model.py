"""A paged model whose MTP module runs along with every step."""

from pathlib import Path

import jax
import numpy as np
from paged_model import PagedModel

from models.interface import Caches, StepBatch


class DraftingModel(PagedModel):
    """Each step runs the model, then its module with the tokens that follow, which are given.

    What `append`, `prefill` and `teacher_forced` return is [tokens, 2V]: logits of the next token,
    then the module's of the one after it.
    """

    def __init__(self, folder: Path, **how: int) -> None:
        super().__init__(folder, mtp=True, **how)
        self.drafting_step = jax.jit(
            self._drafting_step, static_argnames=("mode",), donate_argnames="caches"
        )

    def _drafting_step(
        self,
        params: dict[str, jax.Array],
        batch: StepBatch,
        following: jax.Array,
        caches: Caches,
        mode: str,
    ) -> tuple[jax.Array, jax.Array, Caches]:
        where = {"mesh": self.mesh, "rules": self.rules}
        how = {**where, "mode": mode}
        main = self.config.num_layers
        hidden, new = self.family.forward(self.config, params, batch, caches[:main], **how)
        state, last = self.family.draft(
            self.config, params, batch, hidden, following, caches[main], **how
        )
        logits = self.family.logits(self.config, params, hidden, **where)
        drafts = self.family.draft_logits(self.config, params, state, **where)
        return logits, drafts, (*new, last)

    def append(self, work: dict[int, list[int]], mode: str) -> dict[int, np.ndarray]:
        """Run one step; the tokens that follow are those of `following`, a list per sequence."""
        starts = {n: int(self.lengths[n % self.dp, n // self.dp]) for n in work}
        batch, where = self.batch(work, mode)
        following = np.zeros(batch.tokens.shape, np.int32)
        for number, part in where.items():
            begin = starts[number]
            following[part] = self.following[number][begin : begin + len(work[number])]
        logits, drafts, self.caches = self.drafting_step(
            self.params, batch, jax.device_put(following, self.by_rank), self.caches, mode=mode
        )
        host = np.concatenate([np.asarray(logits), np.asarray(drafts)], axis=1)
        return {number: host[part] for number, part in where.items()}

    def follow(
        self, sequences: list[list[int]], chunk: int | None
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """All tokens but the last: (logits, the module's logits), [L - 1, V] of each sequence.

        In chunks, or with None by a decode step for each token.
        """
        self.reset()
        self.following = [ids[1:] for ids in sequences]
        given = [ids[:-1] for ids in sequences]
        both = self.teacher_forced(given) if chunk is None else self.prefill(given, chunk)
        return [self.main(rows) for rows in both], [self.drafts(rows) for rows in both]

    def main(self, both: np.ndarray) -> np.ndarray:
        """The logits [tokens, V] of the next tokens."""
        return both[:, : self.config.vocab_size]

    def drafts(self, both: np.ndarray) -> np.ndarray:
        """The module's logits [tokens, V]."""
        return both[:, self.config.vocab_size :]
