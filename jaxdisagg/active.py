"""A request while a decode or mixed node serves it, and the account of where its time went."""

from dataclasses import dataclass, field

from jaxdisagg.api import GenerationRequest, RequestTiming
from jaxdisagg.page_pool import Lease
from jaxdisagg.request import DecodeState, Life
from jaxdisagg.runner import RowSampling
from jaxdisagg.scheduler import DecodeRow
from jaxdisagg.token_stream import TokenStream


@dataclass
class PrefillAccount:
    """Who prefilled a request and what it cost; times are seconds, sizes as counted."""

    node: str | None = None
    queue: float = 0.0
    compute: float = 0.0
    pages: int = 0
    page_writes: int = 0
    bytes: int = 0
    reported: bool = False


@dataclass(eq=False)
class ActiveRequest:
    """One request; changed by the node's step loop alone. Times are of `time.monotonic`."""

    request: GenerationRequest
    stream: TokenStream
    life: Life[DecodeState]
    sampling: RowSampling
    arrived: float
    rank: int = 0
    lease: Lease | None = None
    context: int = -1  # its row of the context buffer, if anything was prefilled
    row: DecodeRow | None = None
    generated: int = 0
    failed: bool = False
    held: bool = False  # its pages are not given back yet, see DecodeNode.hold
    sent_at: float | None = None
    ready_at: float | None = None
    first_token_at: float | None = None
    account: PrefillAccount = field(default_factory=PrefillAccount)

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.id

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt, the last one included."""
        return len(self.request.prompt)

    @property
    def cache_tokens(self) -> int:
        """Cache rows that it may ever write: the last token drawn is never run."""
        return self.prompt_length + self.request.max_tokens - 1

    @property
    def outstanding_tokens(self) -> int:
        """Tokens still to be prefilled or drawn."""
        to_prefill = 0 if self.row is not None or self.life.over else self.prompt_length - 1
        return to_prefill + self.request.max_tokens - self.generated

    def timing(self) -> RequestTiming | None:
        """The terms of the time to the first token, adding up; None before it is all known."""
        if self.first_token_at is None or self.ready_at is None:
            return None
        if not self.account.reported and self.sent_at is not None:
            return None
        sent = self.ready_at if self.sent_at is None else self.sent_at
        waited = self.ready_at - sent
        # The prefill node's own clock measured its terms; what they leave of the wait was the
        # transfer that computing did not hide, control messages included.
        queue = min(self.account.queue, waited)
        compute = min(self.account.compute, waited - queue)
        return RequestTiming(
            queue=sent - self.arrived + queue,
            prefill=compute,
            exposed_transfer=waited - queue - compute,
            first_decode=self.first_token_at - self.ready_at,
            ttft=self.first_token_at - self.arrived,
            prefill_node=self.account.node,
            pages=self.account.pages,
            page_writes=self.account.page_writes,
            bytes=self.account.bytes,
        )
