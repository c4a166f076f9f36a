"""Prometheus metrics of a node's HTTP server, in a registry of their own."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from jaxdisagg.api import RequestTiming

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# So many answers wait at most for their timings: those of failed requests never come.
MAX_UNKNOWN = 256
TTFT_TERMS = ("queue", "prefill", "exposed_transfer", "first_decode")


class StateMetrics:
    """A registry with the numbers of /debug/state, which `state` gives when they are read."""

    def __init__(self, state: Callable[[], Mapping[str, Any]]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_StateCollector(state))

    def render(self) -> tuple[bytes, str]:
        """The metrics in Prometheus' text format, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


class ServerMetrics(StateMetrics):
    """What the HTTP server of a decode or mixed node counts.

    ttft is the time to the first token, split into terms that add up to term="total"; itl the
    time between two tokens of one request, both in seconds.
    """

    def __init__(self, state: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__(state)
        self._unknown: deque[Callable[[], RequestTiming | None]] = deque(maxlen=MAX_UNKNOWN)
        self.requests = Counter(
            "jaxdisagg_requests",
            "HTTP generation requests by outcome: ok, rejected (4xx), failed, cancelled.",
            ("endpoint", "outcome"),
            registry=self.registry,
        )
        self.finished = Counter(
            "jaxdisagg_answers",
            "Finished answers by finish reason.",
            ("reason",),
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "jaxdisagg_prompt_tokens", "Tokens of started prompts.", registry=self.registry
        )
        self.generated_tokens = Counter(
            "jaxdisagg_generated_tokens", "Generated tokens.", registry=self.registry
        )
        self.ttft = Histogram(
            "jaxdisagg_ttft_seconds",
            "Time to the first token by term; the terms add up to total.",
            ("term",),
            registry=self.registry,
            buckets=SECONDS,
        )
        self.itl = Histogram(
            "jaxdisagg_itl_seconds",
            "Time between two tokens of one request.",
            registry=self.registry,
            buckets=SECONDS,
        )

    def on_token(self, gap: float | None) -> None:
        """Count a token, `gap` seconds after the one before it (None: the first)."""
        self.generated_tokens.inc()
        if gap is not None:
            self.itl.observe(gap)

    def on_answer(self, timing: Callable[[], RequestTiming | None]) -> None:
        """Record where the time to a first token went: now, or when `timing` knows it."""
        if not self._record(timing):
            self._unknown.append(timing)

    def render(self) -> tuple[bytes, str]:
        """Ask once more for what was not known when its answer ended."""
        waiting, self._unknown = self._unknown, deque(maxlen=MAX_UNKNOWN)
        self._unknown.extend(timing for timing in waiting if not self._record(timing))
        return super().render()

    def _record(self, ask: Callable[[], RequestTiming | None]) -> bool:
        timing = ask()
        if timing is None:
            return False
        self.ttft.labels("total").observe(timing.ttft)
        for term in TTFT_TERMS:
            self.ttft.labels(term).observe(getattr(timing, term))
        return True


class _StateCollector(Collector):
    """The numbers of /debug/state as one gauge with a label for each."""

    def __init__(self, state: Callable[[], Mapping[str, Any]]) -> None:
        self._state = state

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return [self._family()]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        family = self._family()
        for name, value in flatten(self._state()):
            family.add_metric([name], value)
        return [family]

    def _family(self) -> GaugeMetricFamily:
        text = "Numbers of the engine's /debug/state, named by their path in it."
        return GaugeMetricFamily("jaxdisagg_engine_state", text, labels=["name"])


def flatten(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in nested mappings, named by their path with dots; lists are left out."""
    for key, value in document.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flatten(value, f"{name}.")
        elif isinstance(value, int | float):
            yield name, float(value)
