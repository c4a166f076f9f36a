"""What the compiled step programs may not do: move a cache or a weight, or lose the trigger.

An address that stays proves nothing (a step may rewrite the whole cache in place and so undo what
a remote wrote meanwhile): the HLO is read, and a concurrent writer has the last word.
"""

import ctypes
import re
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo_guard import check_in_place, count
from nodes import node_config, wait_until
from random_checkpoint import write_checkpoint
from scripted_drafts import load_with_drafts
from serving_model import CONFIG

from ffi_transport.engine import TransferEngine
from ffi_transport.events import TransferEnded
from ffi_transport.trigger import TARGET, make_trigger
from ffi_transport.types import EngineConfig, PageUnit
from jaxdisagg.cache import Shard
from jaxdisagg.config import BatchConfig, CacheConfig
from jaxdisagg.model_loading import load_model
from jaxdisagg.runner import ModelRunner, RowSampling
from jaxdisagg.scheduler import DecodeRow, DecodeScheduler, PrefillJob, PrefillScheduler
from jaxdisagg.step import empty_decode, empty_prefill

# Sizes of which no activation of these steps has as many elements as a weight's shard.
MODEL = CONFIG | {
    "hidden_size": 72,
    "intermediate_size": 176,
    "head_dim": 32,
}
TOKENS = 40
MESHES = [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2)]
# Some of each; the whole product runs in the long matrix.
SHORT = {
    (1, 1, "float32"),
    (2, 1, "bfloat16"),
    (4, 1, "float32"),
    (2, 2, "bfloat16"),
}


@pytest.fixture(scope="module")
def engine():
    with TransferEngine(EngineConfig(provider="loopback")) as engine:
        yield engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guards") / "model"
    write_checkpoint(folder, MODEL, seed=3)
    return folder


@pytest.fixture
def runner(request, folder, engine):
    tp, dp, dtype, *drafts = request.param
    node = node_config(
        "mixed",
        folder,
        tp=tp,
        dp=dp,
        dtype=dtype,
        mtp=bool(drafts),
        # a cache shard bigger than any activation or weight of these steps
        cache=CacheConfig(page_size=16, pages=1024),
        batch=BatchConfig(chunks=(TOKENS,), decode_rows=(2,), max_model_len=128),
    )
    model = (load_with_drafts if drafts else load_model)(node, jax.devices()[: tp * dp])
    return ModelRunner(
        node,
        model.family,
        model.config,
        model.params,
        model.mesh,
        model.rules,
        trigger=make_trigger(engine.index),
    )


def compiled(runner, program):
    place = runner.programs.by_rank
    if program == "prefill":
        inputs = jax.device_put(empty_prefill(runner.dp, TOKENS, 8, runner.width), place)
        step = jax.device_put(np.int32(1), runner.programs.replicated)
        arguments = (runner.params, runner.cache.layers, runner.cache.context, step, inputs)
        return runner.programs.prefill.lower(*arguments).compile()
    inputs = jax.device_put(empty_decode(runner.dp, 2, runner.width, 2), place)
    seats = runner.programs.empty_seats(3)
    arguments = (runner.params, runner.cache.layers, seats, runner.cache.context, inputs)
    return runner.programs.decode.lower(*arguments).compile()


@pytest.mark.parametrize("program", ["prefill", "decode"])
@pytest.mark.parametrize(
    "runner",
    [
        pytest.param(
            (tp, dp, dtype),
            id=f"tp{tp}-dp{dp}-{dtype}",
            marks=[] if (tp, dp, dtype) in SHORT else [pytest.mark.slow],
        )
        for tp, dp in MESHES
        for dtype in ("float32", "bfloat16")
    ]
    + [
        pytest.param((1, 1, "bfloat16", "drafts"), id="tp1-dp1-drafts", marks=pytest.mark.slow),
        pytest.param((2, 2, "float32", "drafts"), id="tp2-dp2-drafts"),
    ],
    indirect=True,
)
def test_caches_and_weights_stay_where_they_are(runner, program):
    executable = compiled(runner, program)
    check_in_place(executable, runner.cache.layers, runner.params.values())
    calls = len(re.findall(TARGET, executable.as_text()))
    layers = len(runner.cache.layers)
    assert calls == (layers + 1 if program == "prefill" else 0), "one call per layer, and context"
    if runner.node.mesh.tp > 1 and program == "prefill":
        # two per layer and one for the vocabulary-sharded embedding
        assert count(executable.as_text(), "all-reduce") <= 2 * layers + 1


@pytest.mark.parametrize(
    "runner",
    [(4, 2, "float32"), (4, 2, "float32", "drafts")],
    indirect=True,
    ids=["tp4-dp2", "tp4-dp2-drafts"],
)
def test_one_call_per_device_and_layer_in_order(runner):
    with TransferEngine(EngineConfig(provider="loopback", trace=True)) as engine:
        runner.programs._trigger = make_trigger(engine.index)
        layers = len(runner.cache.layers) + 1
        runner.warm_up()
        before = 8 * layers
        wait_until(lambda: len(engine.trace()) == before, "the triggers of the warm-up")
        for _ in range(5):
            run_prefill(runner).wait()
        # The engine's thread records them, a moment after the step has run.
        wait_until(lambda: len(engine.trace()) >= 6 * before, "the triggers of five steps")
        fired = engine.trace()[before:]
    for number in range(1, 6):
        for ordinal in range(8):
            mine = fired[(fired["step"] == number) & (fired["ordinal"] == ordinal)]
            assert mine["layer"].tolist() == list(range(layers))
    assert len(fired) == 5 * 8 * layers


def run_prefill(runner):
    scheduler = PrefillScheduler(runner.dp, (TOKENS,), 8)
    for rank in range(runner.dp):
        job = PrefillJob(str(rank), rank, np.arange(33), np.array([1, 2], np.uint32), 32)
        scheduler.add(job)
    step = scheduler.next_step()
    assert step is not None
    return runner.prefill(step, {str(rank): 0 for rank in range(runner.dp)})


class RemoteWriter:
    """Writes pages of a live cache through the engine, again and again, and looks for losses.

    Page i of `pages` pages from `first` on gets the round's value in every layer; when a round has
    been acknowledged, the memory itself must hold it, now and a little later.
    """

    def __init__(self, engine, shards, page_bytes, first=512, pages=128):
        self.rounds = 0
        self.lost = 0
        self._stop = threading.Event()
        self._writer = TransferEngine(EngineConfig(provider="loopback"))
        self._peer = self._writer.connect(engine.control_address, 60.0)
        self._source = np.zeros(pages * page_bytes, np.uint8)
        self._region = self._writer.register_memory(self._source.ctypes.data, self._source.nbytes)
        self._targets = [engine.register_memory(s.address, s.nbytes) for s in shards]
        self._memory = [
            np.frombuffer(
                (ctypes.c_uint8 * (pages * page_bytes)).from_address(
                    s.address + first * page_bytes
                ),
                np.uint8,
            )
            for s in shards
        ]
        self._ids = np.arange(pages, dtype=np.uint32)
        self._first = first
        self._unit = PageUnit(page_bytes, 0, page_bytes, 0, page_bytes)
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join(timeout=30)
        self._writer.close()
        assert not self._thread.is_alive()

    def _run(self):
        while not self._stop.is_set():
            value = 1 + self.rounds % 250
            self._source[:] = value
            transfer = self._writer.open_transfer(self._peer, 1)
            for target in self._targets:
                self._writer.write_paged(
                    transfer,
                    self._region,
                    target.remote(),
                    self._ids,
                    self._first + self._ids,
                    self._unit,
                )
            self._writer.seal(transfer)
            if not self._ended(transfer):
                return
            for _ in range(2):
                self.lost += sum(int((memory != value).sum()) for memory in self._memory)
                time.sleep(0.001)
            self.rounds += 1

    def _ended(self, transfer):
        while not self._stop.is_set():
            for event in self._writer.poll(0.2):
                if isinstance(event, TransferEnded) and event.transfer == transfer:
                    assert event.status == "completed"
                    return True
        return False


@pytest.mark.parametrize("runner", [(1, 1, "float32")], indirect=True, ids=["tp1-f32"])
def test_what_the_warm_up_compiles_is_not_counted_as_compiled_after_it(runner):
    counts = []
    runner.warm_up(lambda _: counts.append(runner.compiles_after_warm_up))
    assert runner.compiles.count > 0
    assert counts == [0, 0], "of a prefill and of a decode step"
    jax.jit(lambda x: x + 3)(np.ones(3, np.float32))
    assert runner.compiles_after_warm_up > 0


@pytest.mark.parametrize(
    "runner", [(1, 1, "float32"), (2, 1, "bfloat16")], indirect=True, ids=["tp1-f32", "tp2-bf16"]
)
def test_a_concurrent_remote_writer_loses_nothing(runner, engine):
    runner.warm_up()
    cache = runner.cache
    shards = [s for s in cache.shards() if s.rank == 0 and s.layer < len(cache.layers)]
    decode = DecodeScheduler(1, (2,))
    decode.add(DecodeRow("r", 0, np.arange(3, 11, dtype=np.uint32), 1, 0, 120))
    greedy = RowSampling(0.0, 0, 1.0, 0)
    with RemoteWriter(engine, shards, cache.page_bytes) as writer:
        for _ in range(100):
            run_prefill(runner).wait()
            step = decode.next_step()
            assert step is not None
            runner.decode(step, lambda _: greedy).tokens()
        deadline = time.monotonic() + 60
        while writer.rounds <= 3:  # its thread got few turns
            assert time.monotonic() < deadline
            run_prefill(runner).wait()
        assert cache.check_addresses() is None
    assert writer.lost == 0


def test_the_writer_notices_a_step_that_rewrites_its_cache(engine):
    """The control: a whole-cache select keeps the address and still undoes remote writes."""
    rewrite = jax.jit(lambda c, x: jnp.where(c < -1, x, c), donate_argnums=0)
    cache = rewrite(jnp.zeros((1024, 4096), jnp.float32), 0.0)
    address = cache.unsafe_buffer_pointer()
    shard = Shard(0, 0, 0, address, cache.nbytes)
    deadline = time.monotonic() + 60
    with RemoteWriter(engine, [shard], 4096 * 4) as writer:
        while not writer.lost and time.monotonic() < deadline:
            cache = rewrite(cache, 0.0).block_until_ready()
            assert cache.unsafe_buffer_pointer() == address
    assert writer.lost > 0
