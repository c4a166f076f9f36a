"""Where the time of a prefill went, as the prefill node tells it: only for people."""

from jaxdisagg.active import ActiveRequest
from jaxdisagg.messages import Telemetry


class PrefillReports:
    """Requests that have their cache, by attempt; a report may come before or after the count.

    At most `kept` are waited for: a node that reports nothing must not fill the memory.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._open: dict[str, ActiveRequest] = {}

    def expect(self, attempt_id: str, active: ActiveRequest) -> None:
        """The attempt's writes have all come; its report may follow."""
        self._open[attempt_id] = active
        while len(self._open) > self._kept:
            del self._open[next(iter(self._open))]

    def take(self, report: Telemetry, awaiting: ActiveRequest | None) -> None:
        """Enter a report into the request's account; `awaiting` is its request before the count."""
        active = self._open.pop(report.request, awaiting)
        if active is None:
            return
        active.account.queue = report.queue_s
        active.account.compute = report.prefill_s
        active.account.bytes = report.bytes
        active.account.reported = True
