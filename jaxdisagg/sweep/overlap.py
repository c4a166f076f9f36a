"""Transfer beside compute: what a layer-wise transfer hides, and the tail that it does not."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Stage:
    """One layer of one prefill step: seconds until its pages may go, and after; bytes per NIC."""

    before: float
    after: float
    load: np.ndarray


@dataclass(frozen=True)
class Overlap:
    """Seconds. `compute` of the whole prefill, `wire` of the busiest NIC with nothing to wait for.

    `tail` is what the transfer outlasts the prefill by. `hidden`: when the last layer's pages are
    ready nothing of earlier layers waits any more, so that the tail is that layer's own.
    """

    compute: float
    wire: float
    tail: float
    hidden: bool


def overlap(stages: Sequence[Stage], context: np.ndarray, gbps: float) -> Overlap:
    """Run the stages one after the other, each NIC sending what is ready, first in first out.

    `context` are the bytes per NIC that follow the last stage. NICs run at `gbps` (10^9 bits/s) and
    wait for nothing else: not for each other, nor for the other side.
    """
    seconds_per_byte = 8 / (gbps * 1e9)
    now, hidden = 0.0, True
    done = np.zeros_like(context, dtype=float)
    for number, stage in enumerate(stages, 1):
        now += stage.before
        if number == len(stages):
            hidden = bool((done <= now).all())
        done = np.maximum(done, now) + stage.load * seconds_per_byte
        now += stage.after
    done = np.maximum(done, now) + context * seconds_per_byte
    total = sum((stage.load for stage in stages), context)
    return Overlap(
        compute=now,
        wire=float(total.max()) * seconds_per_byte,
        tail=float(done.max()) - now,
        hidden=hidden,
    )
