"""Puts a node together: runner, warm-up, registration, HELLO, messenger, loop."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from ffi_transport.engine import TransferEngine
from ffi_transport.trigger import make_trigger
from jaxdisagg.api import EngineInfo
from jaxdisagg.config import START_SECONDS, NodeConfig
from jaxdisagg.decode_messenger import DecodeMessenger
from jaxdisagg.decode_node import DecodeNode
from jaxdisagg.event_pump import EventPump
from jaxdisagg.group.decode_fabric import DecodeFabric
from jaxdisagg.group.gathering import Memory, gather
from jaxdisagg.group.leader import LeaderGroup
from jaxdisagg.group.messages import WarmedUp
from jaxdisagg.group.node_fabric import NodeFabric
from jaxdisagg.group.prefill_fabric import PrefillFabric
from jaxdisagg.group.processes import Group, OneProcess
from jaxdisagg.hello import NodeHello
from jaxdisagg.local_prefiller import LocalPrefiller
from jaxdisagg.model_fit import cache_layout
from jaxdisagg.model_loading import LoadedModel
from jaxdisagg.prefill_messenger import PrefillMessenger
from jaxdisagg.prefill_node import PrefillNode
from jaxdisagg.registration import register_cache
from jaxdisagg.runner import ModelRunner
from jaxdisagg.sampler import MAX_LOGPROBS
from jaxdisagg.step_plans import StepPlanner
from jaxdisagg.trigger_slots import open_slots

Progress = Callable[[str], None]

ABANDON_SECONDS = 1.0  # for a node's loop to fail by itself when a follower is lost


def make_runner(
    node: NodeConfig,
    model: LoadedModel,
    engine: TransferEngine | None,
    group: LeaderGroup | None = None,
) -> ModelRunner:
    """The runner of a node, or of one of its processes; only a prefill node's steps trigger.

    `group` is the leader's, for a node of several processes: its followers run what this one does.
    """
    trigger = make_trigger(engine.index) if engine is not None and node.role == "prefill" else None
    runner = ModelRunner(
        node,
        model.family,
        model.config,
        model.params,
        model.mesh,
        model.rules,
        trigger=trigger,
        share=None if group is None else group.broadcast,
    )
    if trigger is not None and engine is not None:
        open_slots(engine, runner.cache)
    return runner


def _warm_runner(
    node: NodeConfig,
    model: LoadedModel,
    engine: TransferEngine | None,
    group: LeaderGroup | None,
    progress: Progress,
) -> ModelRunner:
    runner = make_runner(node, model, engine, group)
    runner.warm_up(progress)
    if group is not None:
        group.collect(WarmedUp, START_SECONDS)
    return runner


def _lead(group: LeaderGroup | None, node: PrefillNode | DecodeNode) -> None:
    """A node of several processes shows them, and fails when one of them is lost."""
    if group is None:
        return
    runner = node.runner
    node.processes = lambda: group.state(runner.steps, runner.compiles_after_warm_up)
    node.explain = group.explain
    group.when_lost(lambda reason: node.abandon(reason, ABANDON_SECONDS))


def _hello(
    node: NodeConfig,
    model: LoadedModel,
    runner: ModelRunner,
    engine: TransferEngine,
    memory: Memory,
) -> NodeHello:
    return NodeHello(
        role="prefill" if node.role == "prefill" else "decode",
        node=node.id,
        epoch=engine.epoch,
        model=model.fingerprint,
        dtype=model.config.dtype,
        layout=cache_layout(node, runner.cache.spec),
        num_pages=node.cache.pages,
        max_model_len=node.batch.max_model_len,
        regions=memory.regions,
        contexts=memory.contexts,
        mtp=node.mtp,
        processes=memory.processes,
    )


def engine_info(node: NodeConfig, model: LoadedModel) -> EngineInfo:
    """What the HTTP server tells and checks."""
    return EngineInfo(
        model=model.name,
        vocab_size=model.config.vocab_size,
        max_model_len=node.batch.max_model_len,
        max_logprobs=MAX_LOGPROBS,
        role="mixed" if node.role == "mixed" else "decode",
    )


class FabricParts[N: (PrefillNode, DecodeNode)](ABC):
    """A node with a transfer engine that runs, and the way to stop all of it."""

    node: N

    def __init__(
        self,
        config: NodeConfig,
        model: LoadedModel,
        engine: TransferEngine,
        progress: Progress,
        group: LeaderGroup | None = None,
    ) -> None:
        self.engine = engine
        self.runner = _warm_runner(config, model, engine, group, progress)
        processes = group or OneProcess()
        own = register_cache(
            engine,
            self.runner.cache,
            cache_layout(config, self.runner.cache.spec),
            source=config.role == "prefill",
        )
        memory = gather(processes, engine.control_address, own)
        hello = _hello(config, model, self.runner, engine, memory)
        fabric = self._assemble(config, model, processes, hello, memory)
        _lead(group, self.node)
        self._pump = EventPump(engine, fabric.on_events, self.node.fail, f"{hello.role}-events")
        self.node.start()
        self._pump.start()
        fabric.introduce(hello)  # from now on those who greet are answered

    @abstractmethod
    def _assemble(
        self,
        config: NodeConfig,
        model: LoadedModel,
        processes: Group,
        hello: NodeHello,
        memory: Memory,
    ) -> NodeFabric:
        """Make `node`, of `engine` and `runner`; returns its fabric."""

    def stop(self, timeout: float) -> None:
        """Stop the loop, then the pump, then the fabric, which says goodbye."""
        self.node.stop(timeout)
        self._pump.stop()
        self.engine.close()


class PrefillParts(FabricParts[PrefillNode]):
    """A prefill node that runs."""

    def _assemble(
        self,
        config: NodeConfig,
        model: LoadedModel,
        processes: Group,
        hello: NodeHello,
        memory: Memory,
    ) -> NodeFabric:
        fabric = PrefillFabric(
            self.engine,
            processes,
            StepPlanner(hello.layout, self.runner.cache),
            hello.layout,
            name=config.id,
            modes=memory.modes,
            fence_s=config.timeouts.cancel_fence,
            stranger_s=config.timeouts.connect,
        )
        messenger = PrefillMessenger(fabric, hello, model.config.vocab_size)
        self.node = PrefillNode(config, self.runner, messenger)
        messenger.attach(self.node)
        return fabric


class DecodeParts(FabricParts[DecodeNode]):
    """A decode node that runs."""

    def _assemble(
        self,
        config: NodeConfig,
        model: LoadedModel,
        processes: Group,
        hello: NodeHello,
        memory: Memory,
    ) -> NodeFabric:
        fabric = DecodeFabric(
            self.engine,
            processes,
            memory.landings,
            name=config.id,
            modes=memory.modes,
            fence_s=config.timeouts.cancel_fence,
            arm_s=config.timeouts.connect,
        )
        self.node = DecodeNode(config, self.runner, engine_info(config, model))
        self.messenger = DecodeMessenger(self.node, fabric, hello)
        self.node.prefiller = self.messenger
        return fabric


class MixedParts:
    """A mixed node that runs."""

    def __init__(
        self,
        node: NodeConfig,
        model: LoadedModel,
        progress: Progress,
        group: LeaderGroup | None = None,
    ) -> None:
        self.runner = _warm_runner(node, model, None, group, progress)
        self.node = DecodeNode(node, self.runner, engine_info(node, model))
        self.node.prefiller = LocalPrefiller(self.node)
        _lead(group, self.node)
        self.node.start()

    def stop(self, timeout: float) -> None:
        """Stop the loop."""
        self.node.stop(timeout)
