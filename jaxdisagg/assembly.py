"""Puts a node together: runner, warm-up, registration, HELLO, messenger, loop."""

from collections.abc import Callable

from ffi_transport.engine import TransferEngine
from ffi_transport.trigger import make_trigger
from ffi_transport.types import EngineConfig
from jaxdisagg.api import EngineInfo
from jaxdisagg.config import NodeConfig
from jaxdisagg.decode_messenger import DecodeMessenger
from jaxdisagg.decode_node import DecodeNode
from jaxdisagg.event_pump import EventPump
from jaxdisagg.local_prefiller import LocalPrefiller
from jaxdisagg.messages import NodeHello, encode
from jaxdisagg.model_loading import LoadedModel
from jaxdisagg.prefill_messenger import PrefillMessenger
from jaxdisagg.prefill_node import PrefillNode
from jaxdisagg.registration import register_cache
from jaxdisagg.runner import ModelRunner
from jaxdisagg.sampler import MAX_LOGPROBS
from jaxdisagg.transfer_plan import CacheLayout
from models.interface import Hook

Progress = Callable[[str], None]


def open_fabric(node: NodeConfig) -> TransferEngine:
    """The node's transfer engine, at its fixed HELLO address. It greets nobody yet.

    Raises FabricUnavailable naming what is missing: the library, a provider, or a free port.
    """
    return TransferEngine(
        EngineConfig(provider=node.provider, bind=node.host, control_port=node.fabric_port),
        hello=None,
    )


def _runner(node: NodeConfig, model: LoadedModel, trigger: Hook | None = None) -> ModelRunner:
    return ModelRunner(
        node, model.family, model.config, model.params, model.mesh, model.rules, trigger=trigger
    )


def _hello(
    node: NodeConfig, model: LoadedModel, runner: ModelRunner, engine: TransferEngine
) -> NodeHello:
    spec = runner.cache.spec
    regions, contexts = register_cache(engine, runner.cache, source=node.role == "prefill")
    return NodeHello(
        role="prefill" if node.role == "prefill" else "decode",
        node=node.id,
        epoch=engine.epoch,
        model=model.fingerprint,
        dtype=model.config.dtype,
        layout=CacheLayout(
            kind=spec.kind,
            layers=spec.num_layers,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            page_size=node.cache.page_size,
            itemsize=runner.cache.layers[0].dtype.itemsize,
            tp=node.mesh.tp,
            dp=node.mesh.dp,
        ),
        num_pages=node.cache.pages,
        max_model_len=node.batch.max_model_len,
        regions=regions,
        contexts=contexts,
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


class PrefillParts:
    """A prefill node that runs: its loop, its engine and the pump between them."""

    def __init__(
        self, node: NodeConfig, model: LoadedModel, engine: TransferEngine, progress: Progress
    ) -> None:
        self.engine = engine
        self.runner = _runner(node, model, make_trigger(engine.index))
        self.runner.warm_up(progress)
        hello = _hello(node, model, self.runner, engine)
        messenger = PrefillMessenger(engine, hello, self.runner.cache, model.config.vocab_size)
        self.node = PrefillNode(node, self.runner, messenger)
        messenger.attach(self.node)
        self._pump = EventPump(engine, messenger.on_events, self.node.fail, "prefill-events")
        self.node.start()
        self._pump.start()
        engine.set_hello(encode(hello))

    def stop(self, timeout: float) -> None:
        """Stop the loop, then the fabric (which says goodbye), then the pump."""
        self.node.stop(timeout)
        self._pump.stop()
        self.engine.close()


class DecodeParts:
    """A decode node that runs: its loop, its messenger, its engine and the pump between them."""

    def __init__(
        self, node: NodeConfig, model: LoadedModel, engine: TransferEngine, progress: Progress
    ) -> None:
        self.engine = engine
        self.runner = _runner(node, model)
        self.runner.warm_up(progress)
        hello = _hello(node, model, self.runner, engine)
        self.node = DecodeNode(node, self.runner, engine_info(node, model))
        self.messenger = DecodeMessenger(self.node, engine, hello)
        self.node.prefiller = self.messenger
        self._pump = EventPump(engine, self.messenger.on_events, self.node.fail, "decode-events")
        self.node.start()
        self._pump.start()
        engine.set_hello(encode(hello))

    def stop(self, timeout: float) -> None:
        """Stop the loop, then the fabric (which says goodbye), then the pump."""
        self.node.stop(timeout)
        self._pump.stop()
        self.engine.close()


class MixedParts:
    """A mixed node that runs."""

    def __init__(self, node: NodeConfig, model: LoadedModel, progress: Progress) -> None:
        self.runner = _runner(node, model)
        self.runner.warm_up(progress)
        self.node = DecodeNode(node, self.runner, engine_info(node, model))
        self.node.prefiller = LocalPrefiller(self.node)
        self.node.start()

    def stop(self, timeout: float) -> None:
        """Stop the loop."""
        self.node.stop(timeout)
