"""Tokens to text, one at a time: whole characters only, and never past a stop string."""

import codecs
from collections.abc import Sequence

from jaxdisagg.tokenizer import Tokenizer


class Detokenizer:
    """The text of one growing answer.

    Bytes that do not end a UTF-8 character wait for the next token. Text that could be the
    start of a stop string waits until it is certain; once a stop string is complete, `stopped`
    is set and the text ends before it. The joined results depend on the tokens alone, not on
    how their text is cut: the stop string that is complete first ends the text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        if not all(stop):
            raise ValueError("a stop string is empty")
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False
        self.emitted = 0
        """Characters returned so far."""

    @property
    def decoded(self) -> int:
        """Characters decoded so far, those held back included: where the next token starts."""
        return self.emitted + len(self._held)

    def push(self, token: int) -> str:
        """Add a token and return the text that became certain, which may be empty."""
        if self.stopped:
            raise ValueError("a token after the end of the text")
        if self._tokenizer.is_special(token):
            return ""
        return self._take(self._decoder.decode(self._tokenizer.token_bytes(token)))

    def finish(self) -> str:
        """Return what was held back; bytes of an incomplete character become U+FFFD."""
        if self.stopped:
            return ""
        text = self._take(self._decoder.decode(b"", final=True))
        if not self.stopped:
            text += self._held
            self.emitted += len(self._held)
            self._held = ""
        return text

    def _take(self, new: str) -> str:
        text = self._held + new
        ends = [(at + len(s), at) for s in self._stop if (at := text.find(s)) >= 0]
        if ends:
            self.stopped = True
            certain = min(ends)[1]
            self._held = ""
        else:
            certain = len(text) - max((_overlap(text, s) for s in self._stop), default=0)
            self._held = text[certain:]
        self.emitted += certain
        return text[:certain]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
