"""How two page sizes cut tokens, and which chunk completes what."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdisagg.page_spans import Span, page_spans, pages_for

sizes = st.integers(1, 24)


def test_equal_pages_are_one_span():
    found = page_spans(16, 16)
    assert found.period == 16
    assert found.spans == (Span(0, 16, 0, 0),)


def test_a_large_page_is_cut_by_small_ones():
    found = page_spans(16, 64)
    assert found.period == 64
    assert found.spans == tuple(Span(16 * i, 16 * i + 16, i, 0) for i in range(4))
    back = page_spans(64, 16)
    assert back.spans == tuple(Span(16 * i, 16 * i + 16, 0, i) for i in range(4))


def test_pages_that_do_not_divide_cut_each_other():
    found = page_spans(16, 24)
    assert found.period == 48
    assert found.spans == (
        Span(0, 16, 0, 0),
        Span(16, 24, 1, 0),
        Span(24, 32, 1, 1),
        Span(32, 48, 2, 1),
    )


@given(sizes, sizes)
def test_spans_cover_a_period_within_one_page_of_each_side(a, b):
    found = page_spans(a, b)
    assert found.period % a == found.period % b == 0
    tokens = [t for span in found.spans for t in range(span.begin, span.end)]
    assert tokens == list(range(found.period))
    for span in found.spans:
        assert {t // a for t in range(span.begin, span.end)} == {span.source_page}
        assert {t // b for t in range(span.begin, span.end)} == {span.destination_page}
    gcd = int(np.gcd(a, b))
    assert len(found.spans) == (a + b) // gcd - 1, "a cut where no page ends"


@given(sizes, sizes, st.integers(1, 120), st.lists(st.integers(0, 200), max_size=8))
def test_chunks_cover_each_span_once_and_only_when_it_is_complete(a, b, length, cuts):
    found, rows = page_spans(a, b), length - 1
    bounds = sorted([0, rows, *(c % (rows + 1) for c in cuts)])  # empty chunks too
    pages = np.arange(pages_for(length, a)), np.arange(pages_for(length, b))
    covered: list[int] = []
    for begin, end in pairwise(bounds):
        for span in found.spans:
            periods = found.completed(span, begin, end, rows)
            lists = found.pages_of(span, periods, *pages)
            assert [len(each) for each in lists] == [len(periods)] * 2
            for period, source, destination in zip(periods, *lists, strict=True):
                first, last = period * found.period + np.array([span.begin, span.end - 1])
                assert first < rows
                assert end >= min(last + 1, rows), "sent before it was complete"
                assert source == first // a == last // a
                assert destination == first // b == last // b
                covered += range(first, min(last + 1, rows))
    assert sorted(covered) == list(range(rows))
    for span in found.spans:
        begins = range(span.begin, rows, found.period)
        assert found.count(span, rows) == len(begins)


@pytest.mark.parametrize(
    ("length", "pages"), [(1, 0), (2, 1), (16, 1), (17, 1), (18, 2), (33, 2), (34, 3)]
)
def test_the_last_token_is_the_decoders(length, pages):
    assert pages_for(length, 16) == pages


@pytest.mark.parametrize(("begin", "end", "total"), [(-1, 3, 5), (3, 2, 5), (0, 6, 5)])
def test_a_range_that_is_no_chunk_is_refused(begin, end, total):
    spans = page_spans(4, 6)
    with pytest.raises(ValueError, match="chunk"):
        spans.completed(spans.spans[0], begin, end, total)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt_length"):
        pages_for(0, 16)
