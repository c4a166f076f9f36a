"""Counts XLA compilations, so that a compile after warm-up shows in a metric instead of a stall."""

import threading

from jax import monitoring

_LOWERING = "/jax/core/compile/jaxpr_to_mlir_module_duration"


class CompileCounter:
    """How many programs were lowered in this process since it was made.

    Lowering is counted, not the back end's work: a hit in the persistent compilation cache is
    still a program that nobody warmed up.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _LOWERING:
            with self._lock:
                self._count += 1

    @property
    def count(self) -> int:
        """Programs lowered so far."""
        return self._count
