"""OpenAI's JSON for completions and chat completions, whole and in chunks."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

from jaxdisagg.api import RequestTiming, TokenOutput
from jaxdisagg.http.generation import Piece
from jaxdisagg.http.preparation import Job
from jaxdisagg.tokenizer import Tokenizer

# JSON has no infinity; this is what OpenAI sends in its place.
LOWEST_LOGPROB = -9999.0

Json = dict[str, Any]


class Format(Protocol):
    """How one endpoint words its answers."""

    def opening(self, index: int) -> Json | None:
        """The choice of a chunk that goes before a prompt's first piece, if there is one."""
        ...

    def chunk_choice(self, piece: Piece) -> Json:
        """The choice of the chunk that carries a piece."""
        ...

    def choice(self, pieces: Sequence[Piece]) -> Json:
        """The choice of a whole answer, from all its pieces."""
        ...

    @property
    def chunk_object(self) -> str:
        """`object` of a chunk."""
        ...

    @property
    def object(self) -> str:
        """`object` of a whole answer."""
        ...


class CompletionFormat:
    """/v1/completions; token texts that are no whole characters are written bytes:\\xf0\\x9f."""

    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, tokenizer: Tokenizer, with_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs

    def opening(self, index: int) -> Json | None:
        """Nothing goes before the first piece."""
        return None

    def chunk_choice(self, piece: Piece) -> Json:
        """One piece and its logprobs."""
        return self.choice([piece])

    def choice(self, pieces: Sequence[Piece]) -> Json:
        """The joined pieces and their logprobs, in parallel lists."""
        logprobs = None
        if self._with_logprobs:
            tokens = [entry for piece in pieces for entry in piece.tokens]
            logprobs = {
                "tokens": [self._text(output.token) for _, output in tokens],
                "token_logprobs": [_finite(output.logprob) for _, output in tokens],
                "top_logprobs": [self._top(output) for _, output in tokens],
                "text_offset": [start for start, _ in tokens],
            }
        return {
            "index": pieces[0].index,
            "text": "".join(piece.text for piece in pieces),
            "logprobs": logprobs,
            "finish_reason": pieces[-1].finish_reason,
        }

    def _top(self, output: TokenOutput) -> dict[str, float]:
        """Alternatives by text; of those with equal text the best counts."""
        found: dict[str, float] = {}
        for token, logprob in [*output.top, (output.token, output.logprob)]:
            found.setdefault(self._text(token), _finite(logprob))
        return found

    def _text(self, token: int | None) -> str:
        return token_text(self._tokenizer.token_bytes(token)) if token is not None else ""


class ChatFormat:
    """/v1/chat/completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, with_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs

    def opening(self, index: int) -> Json | None:
        """The chunk that says whose turn it is."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk_choice(self, piece: Piece) -> Json:
        """One piece and its logprobs."""
        return {
            "index": piece.index,
            "delta": {"content": piece.text},
            "logprobs": self._logprobs([piece]),
            "finish_reason": piece.finish_reason,
        }

    def choice(self, pieces: Sequence[Piece]) -> Json:
        """The message and its logprobs."""
        content = "".join(piece.text for piece in pieces)
        return {
            "index": pieces[0].index,
            "message": {"role": "assistant", "content": content, "refusal": None},
            "logprobs": self._logprobs(pieces),
            "finish_reason": pieces[-1].finish_reason,
        }

    def _logprobs(self, pieces: Sequence[Piece]) -> Json | None:
        if not self._with_logprobs:
            return None
        outputs = [output for piece in pieces for _, output in piece.tokens]
        entries = [
            {
                **self._entry(output.token, output.logprob),
                "top_logprobs": [self._entry(token, logprob) for token, logprob in output.top],
            }
            for output in outputs
        ]
        return {"content": entries, "refusal": None}

    def _entry(self, token: int | None, logprob: float | None) -> Json:
        data = b"" if token is None else self._tokenizer.token_bytes(token)
        return {"token": token_text(data), "logprob": _finite(logprob), "bytes": list(data)}


def envelope(job: Job, kind: str, choices: Sequence[Json], **more: Any) -> Json:
    """The document around choices: a whole answer or a chunk."""
    head = {"id": job.id, "object": kind, "created": job.created, "model": job.model}
    return {**head, "choices": list(choices), **more}


def usage(prompt_tokens: int, completion_tokens: int) -> Json:
    """The usage object, in tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def with_timing(choice: Json, timing: RequestTiming | None) -> Json:
    """A finished choice plus our `timing` object: the fields of RequestTiming, or null."""
    return {**choice, "timing": None if timing is None else asdict(timing)}


def token_text(data: bytes) -> str:
    """A token's bytes as text, or as bytes:\\xf0\\x9f where they are no whole characters."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float | None) -> float:
    return LOWEST_LOGPROB if logprob is None else max(logprob, LOWEST_LOGPROB)
