"""Runs scheduled steps on the device: fills the host inputs, dispatches, reads results later.

It owns the device state (parameters, cache, context buffer, seats) and threads it through the
donating step programs. Dispatch is asynchronous: a result object is read one step late.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxdisagg.cache import PagedCache
from jaxdisagg.compile_counter import CompileCounter
from jaxdisagg.config import NodeConfig
from jaxdisagg.group.lockstep import meet, pack, place, unpack
from jaxdisagg.group.messages import Step, WarmedUp
from jaxdisagg.scheduler import DecodeStep, PrefillStep
from jaxdisagg.speculative_step import SpeculativePrograms
from jaxdisagg.step import (
    CONTEXT,
    LIMIT,
    POSITION,
    SEAT,
    SEED,
    TEMPERATURE,
    TOKEN,
    TOP_K,
    TOP_P,
    DecodeInputs,
    DecodeOutputs,
    PrefillInputs,
    StepPrograms,
    empty_decode,
    empty_prefill,
)
from jaxdisagg.step_results import DecodeResult, PrefillResult
from models.interface import Hook, ModelConfig, ModelFamily, Params
from models.sharding import ShardingRules


@dataclass(frozen=True)
class RowSampling:
    """A row's sampling parameters as the step takes them; `seed` is 32 bits."""

    temperature: float
    top_k: int
    top_p: float
    seed: int


class ModelRunner:
    """One node's model on its mesh. Used by one thread.

    Of a node of several processes each has a runner. The leader's tells the others by `share` what
    it is about to run, and theirs `follow`.
    """

    def __init__(
        self,
        node: NodeConfig,
        family: ModelFamily,
        config: ModelConfig,
        params: Params,
        mesh: Mesh,
        rules: ShardingRules,
        *,
        trigger: Hook | None = None,
        share: Callable[[Step | WarmedUp], None] | None = None,
    ) -> None:
        batch = node.batch
        self._share = share
        self.node = node
        self.mesh = mesh
        self.dp = mesh.shape["dp"]
        self.width = node.table_width
        self.seats_per_rank = batch.decode_rows[-1]
        self.params = params
        self.cache = PagedCache(
            family.cache_spec(config),
            mesh,
            pages=node.cache.pages,
            page_size=node.cache.page_size,
            context_rows=context_rows(node),
            hidden_size=config.hidden_size,
        )
        programs = SpeculativePrograms if config.mtp else StepPrograms
        self.programs = programs(
            family, config, mesh, rules, page_size=node.cache.page_size, trigger=trigger
        )
        self.compiles = CompileCounter()
        self._warm: int | None = None
        self._seats = self.programs.empty_seats(self.seats_per_rank + 1)
        self._step = 0
        self.steps = 0  # run so far, those of the warm-up too

    @property
    def compiles_after_warm_up(self) -> int:
        """Programs lowered since warm-up ended: 0, or a bug."""
        return 0 if self._warm is None else self.compiles.count - self._warm

    def warm_up(self, advance: Callable[[str], None] = lambda _: None) -> None:
        """Compile and run every program that the role needs, on padding alone."""
        role, batch = self.node.role, self.node.batch
        if self._share is not None:
            self._share(Step("meet", 0, 0, ()))
            meet(self.mesh)
        for tokens in batch.chunks if role != "decode" else ():
            self._run_prefill(0, empty_prefill(self.dp, tokens, batch.prefill_rows, self.width))
            advance(f"prefill {tokens} tokens")
        for rows in batch.decode_rows if role != "prefill" else ():
            inputs = empty_decode(self.dp, rows, self.width, self.seats_per_rank)
            outputs = self._run_decode(inputs)
            np.asarray(outputs.tokens)
            advance(f"decode {rows} rows")
        if self._share is not None:
            self._share(WarmedUp())
        self.end_warm_up()

    def end_warm_up(self) -> None:
        """From now on a compilation is a bug, and a cache that moves is an error."""
        jax.block_until_ready((self.cache.layers, self.cache.context, self._seats))
        self.cache.freeze_addresses()
        self._warm = self.compiles.count

    def next_step_number(self) -> int:
        """The 64-bit number that the next prefill step will carry; its plan is filed under it."""
        return self._step + 1

    def prefill(self, step: PrefillStep, contexts: dict[str, int] | None = None) -> PrefillResult:
        """Dispatch a prefill step. `contexts` maps a finished job's id to its context row."""
        self._step += 1
        rows_per_rank = self.node.batch.prefill_rows
        inputs = empty_prefill(self.dp, step.bucket, rows_per_rank, self.width)
        token = [0] * self.dp
        row = [0] * self.dp
        for chunk in step.chunks:
            job, n = chunk.job, chunk.end - chunk.begin
            r = job.rank
            at = r * step.bucket + token[r]
            line = r * rows_per_rank + row[r]
            inputs.tokens[at : at + n, 0] = job.tokens[chunk.begin : chunk.end]
            inputs.tokens[at : at + n, 1] = np.arange(chunk.begin, chunk.end)
            inputs.tokens[at : at + n, 2] = row[r]
            inputs.tokens[at : at + n, 3] = job.tokens[chunk.begin + 1 : chunk.end + 1]
            held = -(-chunk.end // self.node.cache.page_size)
            inputs.page_table[line, :held] = job.pages[:held]
            inputs.lengths[line] = chunk.end
            token[r] += n
            row[r] += 1
            if chunk.last and contexts is not None:
                inputs.last[line] = token[r] - 1, contexts[job.id]
        return PrefillResult(step, self._run_prefill(self._step, inputs))

    def decode(self, step: DecodeStep, sampling: Callable[[str], RowSampling]) -> DecodeResult:
        """Dispatch a decode step; `sampling` gives a row's parameters by its id."""
        inputs = empty_decode(self.dp, step.bucket, self.width, self.seats_per_rank)
        count = [0] * self.dp
        index = np.zeros(len(step.runs), np.int64)
        for i, run in enumerate(step.runs):
            row, how = run.row, sampling(run.row.id)
            at = row.rank * step.bucket + count[row.rank]
            count[row.rank] += 1
            index[i] = at
            inputs.ints[at, [SEAT, TOKEN, POSITION, LIMIT, CONTEXT, TOP_K]] = (
                row.seat,
                run.token,
                run.position,
                row.limit,
                row.context,
                how.top_k,
            )
            inputs.ints[at, SEED] = np.uint32(how.seed).astype(np.int32)
            inputs.floats[at, [TEMPERATURE, TOP_P]] = how.temperature, how.top_p
            inputs.page_table[at, : len(row.pages)] = row.pages
        outputs = self._run_decode(inputs)
        for array in jax.tree.leaves(outputs):
            array.copy_to_host_async()
        return DecodeResult(step, index, outputs)

    def follow(self, step: Step) -> Any:
        """Run a step of the leader's; returns arrays that are ready once it has run.

        Raises ValueError for a step that this node has not.
        """
        if step.kind == "meet":
            meet(self.mesh)
            return ()
        batch = self.node.batch
        if step.kind == "prefill":
            padding = empty_prefill(self.dp, step.bucket, batch.prefill_rows, self.width)
            return self._run_prefill(step.number, unpack(step, padding))
        if step.kind == "decode":
            padding = empty_decode(self.dp, step.bucket, self.width, self.seats_per_rank)
            return self._run_decode(unpack(step, padding))
        raise ValueError(f"kind={step.kind!r} must be prefill, decode or meet")

    def _run_prefill(self, number: int, inputs: PrefillInputs[np.ndarray]) -> jax.Array:
        if self._share is not None:
            self._share(pack("prefill", number, len(inputs.tokens) // self.dp, inputs))
        self.steps += 1
        low = np.array(number & 0xFFFFFFFF, np.uint32).astype(np.int32)
        self.cache.layers, self.cache.context, states = self.programs.prefill(
            self.params,
            self.cache.layers,
            self.cache.context,
            place(low, self.programs.replicated),
            place(inputs, self.programs.by_rank),
        )
        return states

    def _run_decode(self, inputs: DecodeInputs[np.ndarray]) -> DecodeOutputs:
        if self._share is not None:
            self._share(pack("decode", 0, len(inputs.ints) // self.dp, inputs))
        self.steps += 1
        self.cache.layers, self._seats, outputs = self.programs.decode(
            self.params,
            self.cache.layers,
            self._seats,
            self.cache.context,
            place(inputs, self.programs.by_rank),
        )
        return outputs


def warm_up_steps(node: NodeConfig) -> int:
    """How often `ModelRunner.warm_up` calls back for such a node."""
    prefill = len(node.batch.chunks) if node.role != "decode" else 0
    decode = len(node.batch.decode_rows) if node.role != "prefill" else 0
    return prefill + decode


def context_rows(node: NodeConfig) -> int:
    """Rows of the context buffer per dp rank: one for each request that may hold one, and scratch.

    A prefill node holds one per request from its last chunk to its last acknowledgement, a decode
    node one per request with pages; a mixed node only needs them to draft from.
    """
    return 1 if node.role == "mixed" and not node.mtp else node.max_requests + 1
