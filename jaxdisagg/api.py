"""What the HTTP server asks of an engine: requests in, tokens out. Plain data, no jax."""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn; the default is greedy.

    `temperature` 0 is greedy. `top_k` 0 keeps every token. `seed` is 0..2**32-1; None draws one at
    random when the request is admitted. Equal seeds give equal tokens, whatever else is in the
    batch.
    `logprobs` is the number of alternatives reported for each token (None: no logprobs at all).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to continue. `stop_token_ids` end it and are not part of the answer."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class TokenOutput:
    """One generated token; `logprob` and `top` only when logprobs were asked for.

    `top` holds (token id, logprob), best first. The last output of a request carries
    `finish_reason`; `token` is None where the request ended on a stop token.
    """

    token: int | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class RequestTiming:
    """Where the time to the first token went, in seconds; the terms add up to `ttft`."""

    queue: float
    prefill: float
    exposed_transfer: float
    first_decode: float
    ttft: float
    prefill_node: str | None
    pages: int
    page_writes: int
    bytes: int


@dataclass(frozen=True)
class EngineInfo:
    """What the engine serves and its limits, in tokens."""

    model: str
    vocab_size: int
    max_model_len: int
    max_logprobs: int
    role: Literal["decode", "mixed"]


class RequestError(Exception):
    """A request that could not be served. `status` is the HTTP status it deserves.

    4xx is the client's fault and names `param`; 5xx is ours: `message` says what was missing.
    """

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param


class Engine(Protocol):
    """What a decode or mixed node offers to the HTTP server that runs in its event loop."""

    @property
    def info(self) -> EngineInfo:
        """The model and the limits; fixed once the node is ready."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenOutput]:
        """Stream the tokens of a request.

        Raises RequestError at the first `anext` if the request cannot be admitted, later if it
        fails midway. Closing the iterator (`aclose`, a cancelled task) cancels the request.
        """
        ...

    def finish(self, request_id: str) -> None:
        """The tokens so far are the whole answer, as its text reached a stop string.

        The request ends as finished, not as cancelled; its iterator is closed next.
        """
        ...

    def timing(self, request_id: str) -> RequestTiming | None:
        """Where the time of a request went: None before it is all known, and once forgotten.

        A prefill node's share may be told after the answer has ended, so it is kept for a while.
        """
        ...

    def ready(self) -> tuple[bool, str]:
        """Whether requests can be served now, and if not, what is missing."""
        ...

    def state(self) -> Mapping[str, Any]:
        """The JSON document of /debug/state; numbers in nested mappings become metrics."""
        ...
