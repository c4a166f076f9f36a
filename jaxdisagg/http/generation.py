"""Running a job: the engine's tokens become pieces of text, for one prompt or several at once."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from jaxdisagg.api import Engine, FinishReason, GenerationRequest, TokenOutput
from jaxdisagg.detokenizer import Detokenizer
from jaxdisagg.http.preparation import Job
from jaxdisagg.metrics import ServerMetrics
from jaxdisagg.tokenizer import Tokenizer


@dataclass(frozen=True)
class Piece:
    """What one step added to the answer of one prompt.

    `tokens` are those whose text begins in what has been sent so far, each with the place in
    the answer, in characters, where it begins; they may come later than they were generated,
    where their text was held back. Only filled when logprobs were asked for.
    """

    index: int
    text: str
    tokens: tuple[tuple[int, TokenOutput], ...] = ()
    finish_reason: FinishReason | None = None


class Answer:
    """The growing answer to one prompt. `completion_tokens` counts what was generated."""

    def __init__(
        self,
        index: int,
        request: GenerationRequest,
        stop: Sequence[str],
        engine: Engine,
        tokenizer: Tokenizer,
        metrics: ServerMetrics,
    ) -> None:
        self.index = index
        self.request = request
        self.completion_tokens = 0
        self._engine = engine
        self._metrics = metrics
        self._detokenizer = Detokenizer(tokenizer, stop)
        self._waiting: list[tuple[int, TokenOutput]] = []

    async def pieces(self) -> AsyncGenerator[Piece]:
        """Generate; the last piece has a finish reason. Closing this earlier cancels the request.

        Raises RequestError as the engine does, and where the engine ends without a reason.
        """
        self._metrics.prompt_tokens.inc(len(self.request.prompt))
        last = None
        try:
            async with aclosing(self._engine.generate(self.request)) as outputs:
                async for output in outputs:
                    if output.token is not None:
                        self.completion_tokens += 1
                        now = time.perf_counter()
                        self._metrics.on_token(None if last is None else now - last)
                        last = now
                    piece = self._piece(output)
                    if piece.finish_reason is not None:
                        if output.finish_reason is None:
                            self._engine.finish(self.request.id)
                        break
                    yield piece
                else:
                    raise RuntimeError(f"the engine gave no finish reason for {self.request.id}")
        finally:
            if last is not None:
                self._metrics.on_answer(lambda: self._engine.timing(self.request.id))
        self._metrics.finished.labels(piece.finish_reason).inc()
        yield piece

    def _piece(self, output: TokenOutput) -> Piece:
        text = ""
        detokenizer = self._detokenizer
        if output.token is not None:
            if self.request.sampling.logprobs is not None:
                self._waiting.append((detokenizer.decoded, output))
            text = detokenizer.push(output.token)
        reason = output.finish_reason
        if reason is not None:
            text += detokenizer.finish()
        if detokenizer.stopped:
            reason = "stop"
        whole = reason is not None and not detokenizer.stopped
        sent = [entry for entry in self._waiting if whole or entry[0] < detokenizer.emitted]
        del self._waiting[: len(sent)]
        return Piece(self.index, text, tuple(sent), reason)


def make_answers(
    job: Job, engine: Engine, tokenizer: Tokenizer, metrics: ServerMetrics
) -> list[Answer]:
    """One answer for each prompt of a job, not yet started."""
    return [
        Answer(i, request, job.stop, engine, tokenizer, metrics)
        for i, request in enumerate(job.requests)
    ]


async def merged(answers: Sequence[Answer]) -> AsyncGenerator[Piece]:
    """Pieces of all answers as they come; the first only when every answer has one.

    So a request that cannot be admitted raises before anything is yielded. Closing this, or a
    failure of one answer, cancels them all.
    """
    if len(answers) == 1:
        async with aclosing(answers[0].pieces()) as pieces:
            async for piece in pieces:
                yield piece
        return
    queue: asyncio.Queue[Piece | Exception] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(answer, queue)) for answer in answers]
    try:
        unseen, running = set(range(len(answers))), len(answers)
        early: list[Piece] = []
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            early.append(item)
            unseen.discard(item.index)
            running -= item.finish_reason is not None
            if not unseen:
                for piece in early:
                    yield piece
                early.clear()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(answer: Answer, queue: asyncio.Queue[Piece | Exception]) -> None:
    # The queue needs no bound: an answer has at most max_tokens pieces.
    try:
        async with aclosing(answer.pieces()) as pieces:
            async for piece in pieces:
                queue.put_nowait(piece)
    except Exception as error:
        queue.put_nowait(error)
