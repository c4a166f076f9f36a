"""A model on a mesh with a paged cache, driven by hand: the smallest engine that tests can read."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxdisagg.mesh import expert_axes, make_mesh
from models.checkpoint import load_params
from models.interface import Caches, Hook, StepBatch
from models.registry import load_config
from models.sharding import make_rules

PAGE_SIZE = 16
WIDTH = 14  # pages per row
ROWS = 8  # per dp rank
TOKENS = 128  # per dp rank and prefill step


class PagedModel:
    """Sequences by number: number i lives in dp rank i % dp, row i // dp, in shuffled pages."""

    def __init__(
        self,
        folder: Path,
        *,
        tp: int = 1,
        dp: int = 1,
        ep: int = 1,
        dtype: str = "float32",
        mtp: bool = False,
    ) -> None:
        self.family, config = load_config(folder)
        self.config = dataclasses.replace(config, dtype=dtype, mtp=mtp)
        self.spec = self.family.cache_spec(self.config)
        self.dp = dp
        self.mesh = make_mesh(tp=tp, dp=dp, kv_heads=self.spec.num_kv_heads)
        self.rules = make_rules(expert_axes(tp=tp, dp=dp, ep=ep))
        self.params = load_params(folder, self.config, self.mesh, self.rules)
        self.by_rank = NamedSharding(self.mesh, PartitionSpec("dp"))
        self.step = jax.jit(self._step, static_argnames=("mode",), donate_argnames="caches")
        self.reset()

    def reset(self) -> None:
        """Empty caches and tables. Unwritten slots hold NaN, which must never reach a result."""
        pages = 1 + ROWS * WIDTH
        sharding = NamedSharding(self.mesh, self.spec.partition)
        empty = np.full(self.spec.shape(self.dp * pages, PAGE_SIZE), np.nan)
        self.caches = tuple(
            jax.device_put(jnp.asarray(empty, self.config.dtype), sharding)
            for _ in range(self.spec.num_layers)
        )
        ids = np.random.default_rng(0).permuted(np.tile(np.arange(1, pages), (self.dp, 1)), axis=1)
        self.table = ids.reshape(self.dp, ROWS, WIDTH).astype(np.int32)
        self.lengths = np.zeros((self.dp, ROWS), np.int32)

    def _step(
        self, params: dict[str, jax.Array], batch: StepBatch, caches: Caches, mode: str
    ) -> tuple[jax.Array, Caches]:
        return self.forward(params, batch, caches, mode)

    def forward(
        self,
        params: dict[str, jax.Array],
        batch: StepBatch,
        caches: Caches,
        mode: str,
        hook: Hook | None = None,
        hook_operands: tuple[jax.Array, ...] = (),
    ) -> tuple[jax.Array, Caches]:
        """(logits f32 [dp*T, V], caches) of every token of the batch."""
        hidden, caches = self.family.forward(
            self.config,
            params,
            batch,
            caches,
            mesh=self.mesh,
            rules=self.rules,
            mode=mode,
            hook=hook,
            hook_operands=hook_operands,
        )
        where = {"mesh": self.mesh, "rules": self.rules}
        return self.family.logits(self.config, params, hidden, **where), caches

    def batch(self, work: dict[int, list[int]], mode: str) -> tuple[StepBatch, dict[int, slice]]:
        """Append tokens to sequences: the step's inputs, and where in them each sequence lies."""
        size = ROWS if mode == "decode" else TOKENS
        tokens, positions, slots = (np.zeros((self.dp, size), np.int32) for _ in range(3))
        rows = np.full((self.dp, size), -1, np.int32)
        used = [0] * self.dp
        where = {}
        lengths = np.zeros_like(self.lengths) if mode == "decode" else self.lengths
        for number, ids in work.items():
            rank, row = number % self.dp, number // self.dp
            at = row if mode == "decode" else used[rank]
            part = slice(at, at + len(ids))
            start = self.lengths[rank, row]
            position = np.arange(start, start + len(ids))
            tokens[rank, part], positions[rank, part], rows[rank, part] = ids, position, row
            page = self.table[rank, row, position // PAGE_SIZE]
            slots[rank, part] = page * PAGE_SIZE + position % PAGE_SIZE
            self.lengths[rank, row] += len(ids)
            lengths[rank, row] = self.lengths[rank, row]
            used[rank] += len(ids)
            where[number] = slice(rank * size + at, rank * size + at + len(ids))
        table = self.table.reshape(-1, WIDTH)
        host = (tokens.ravel(), positions.ravel(), rows.ravel(), slots.ravel(), table)
        arrays = (jax.device_put(a, self.by_rank) for a in (*host, lengths.ravel()))
        return StepBatch(*arrays), where

    def append(self, work: dict[int, list[int]], mode: str) -> dict[int, np.ndarray]:
        """Run one step on tokens of several sequences: number -> logits [tokens, V]."""
        batch, where = self.batch(work, mode)
        logits, self.caches = self.step(self.params, batch, self.caches, mode=mode)
        host = np.asarray(logits)
        return {number: host[part] for number, part in where.items()}

    def prefill(self, prompts: list[list[int]], chunk: int) -> list[np.ndarray]:
        """All prompts in chunks, as many of them in a step as fit: the logits [L, V] of each."""
        out: list[list[np.ndarray]] = [[] for _ in prompts]
        left = {i: list(ids) for i, ids in enumerate(prompts)}
        while any(left.values()):
            work: dict[int, list[int]] = {}
            room = [TOKENS] * self.dp
            for i, ids in left.items():
                piece = ids[:chunk]
                if piece and len(piece) <= room[i % self.dp]:
                    room[i % self.dp] -= len(piece)
                    work[i], left[i] = piece, ids[len(piece) :]
            for i, logits in self.append(work, "prefill").items():
                out[i].append(logits)
        return [np.concatenate(parts) for parts in out]

    def teacher_forced(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """Every token of every sequence by a decode step of its own: logits [L, V] of each."""
        out: list[list[np.ndarray]] = [[] for _ in sequences]
        for t in range(max(map(len, sequences))):
            work = {i: [ids[t]] for i, ids in enumerate(sequences) if t < len(ids)}
            for i, logits in self.append(work, "decode").items():
                out[i].append(logits)
        return [np.concatenate(parts) for parts in out]

    def continue_greedily(
        self, last_logits: list[np.ndarray], count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """From the logits [V] of each prompt's last token: tokens and logprobs [prompts, count]."""
        logits = np.stack(last_logits)
        tokens, logprobs = [], []
        for step in range(count):
            best = logits.argmax(-1)
            tokens.append(best)
            logprobs.append(log_softmax(logits)[np.arange(len(best)), best])
            if step < count - 1:
                out = self.append({i: [int(t)] for i, t in enumerate(best)}, "decode")
                logits = np.stack([out[i][0] for i in range(len(best))])
        return np.stack(tokens, 1), np.stack(logprobs, 1)

    def drop_page(self, number: int, page: int, first_layer: int = 0) -> None:
        """Put zeros in place of one page of a sequence, in layers from one on, on every device."""
        drop = jax.jit(lambda c, i: c.at[i].set(0), donate_argnums=0)
        index = self.page_index(number, page)
        hurt = (drop(c, index) for c in self.caches[first_layer:])
        self.caches = (*self.caches[:first_layer], *hurt)

    def exchange_pages(self, one: int, other: int, page: int) -> None:
        """Let two sequences have each other's page, in every layer and on every device."""
        pair = np.array([self.page_index(one, page), self.page_index(other, page)])
        exchange = jax.jit(lambda c, i: c.at[i].set(c[i[::-1]]), donate_argnums=0)
        self.caches = tuple(exchange(c, pair) for c in self.caches)

    def page_index(self, number: int, page: int) -> int:
        """Where a page of a sequence lies in the cache arrays, over all dp ranks."""
        rank, row = number % self.dp, number // self.dp
        return rank * (self.caches[0].shape[0] // self.dp) + int(self.table[rank, row, page])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, in f64."""
    wide = logits.astype(np.float64)
    wide = wide - wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))
