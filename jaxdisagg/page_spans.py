"""How the pages of two nodes cut the same tokens, and what of them is complete after a chunk.

Where both nodes have pages of one size, a span is a page. Otherwise the tokens are cut wherever a
page ends on either side: a span lies in one source page and one destination page. The cuts repeat
after the least common multiple of the two sizes, the period.
"""

import functools
import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True)
class Span:
    """Tokens [begin, end) of every period: in page `source_page` of its pages on the prefill node,
    in page `destination_page` on the decode node.
    """

    begin: int
    end: int
    source_page: int
    destination_page: int


@dataclass(frozen=True)
class PageSpans:
    """The spans of one period of `period` tokens, in order."""

    source_page_size: int
    destination_page_size: int
    period: int
    spans: tuple[Span, ...]

    def count(self, span: Span, rows: int) -> int:
        """How many of the spans that begin in the first `rows` tokens are this one."""
        return max(0, -(-(rows - span.begin) // self.period))

    def completed(self, span: Span, begin: int, end: int, total: int) -> range:
        """In which periods of a prompt rows [begin, end) of `total` complete this span.

        A span goes with the chunk that writes its last row; a partly filled last one with the chunk
        that ends at `total` (= prompt length - 1). Every span belongs to exactly one chunk.
        """
        if not 0 <= begin <= end <= total:
            raise ValueError(f"chunk: rows {begin}..{end} of {total} are no chunk")
        if begin == end:
            return range(0)
        whole = (begin - span.end) // self.period + 1
        if end == total:
            return range(whole, self.count(span, total))
        return range(whole, (end - span.end) // self.period + 1)

    def pages_of(
        self, span: Span, periods: range, source_pages: np.ndarray, destination_pages: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The pages in which a span lies in `periods`, of a request's pages on either side."""

        def of(pages: np.ndarray, page_size: int, first: int) -> np.ndarray:
            step = self.period // page_size
            return pages[first + periods.start * step : first + periods.stop * step : step]

        return (
            of(source_pages, self.source_page_size, span.source_page),
            of(destination_pages, self.destination_page_size, span.destination_page),
        )


@functools.lru_cache
def page_spans(source_page_size: int, destination_page_size: int) -> PageSpans:
    """The spans of two page sizes in tokens: (source + destination) / their gcd - 1 of them."""
    period = math.lcm(source_page_size, destination_page_size)
    cuts = {*range(0, period, source_page_size), *range(0, period, destination_page_size)}
    bounds = [*sorted(cuts), period]
    spans = tuple(
        Span(begin, end, begin // source_page_size, begin // destination_page_size)
        for begin, end in pairwise(bounds)
    )
    return PageSpans(source_page_size, destination_page_size, period, spans)


def pages_for(prompt_length: int, page_size: int) -> int:
    """Pages that hold tokens 0..prompt_length-2: the last token is the decoder's. 0 for L = 1."""
    if prompt_length < 1:
        raise ValueError(f"prompt_length: {prompt_length}, must be at least 1")
    return -(-(prompt_length - 1) // page_size)
