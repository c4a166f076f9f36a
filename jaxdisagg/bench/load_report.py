"""What load segments come to: percentiles, rates, stalls, and ratios between servers."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from jaxdisagg.bench.client import TTFT_TERMS, Record, Segment

RATIOS = ("ttft_p50_ms", "itl_p50_ms", "itl_p99_ms", "itl_max_ms", "tokens_per_s")


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value below which `percent` of the values lie (nearest rank); None without values."""
    if not values:
        return None
    rank = -(-len(values) * percent // 100)
    return sorted(values)[min(len(values), max(1, int(rank))) - 1]


def row_of(segments: Sequence[Segment], lanes: int) -> dict[str, Any]:
    """One server's row from its segments, each with `lanes` streams: times in ms, rates per second.

    itl_* are over the requests, stream_* over the streams beside them. stall_ms_per_request is
    what the gaps of one stream exceed their median by, summed, for each request that came.
    """
    requests = [record for segment in segments for record in segment.requests]
    streams = [record for segment in segments for record in segment.streams]
    good = [record for record in requests if record.error is None]
    seconds = sum(segment.seconds for segment in segments)
    errors = [record.error for record in (*requests, *streams) if record.error is not None]
    return {
        "seconds": round(seconds, 3),
        "requests": len(requests),
        "failed": len(errors),
        "first_error": errors[0] if errors else None,
        "requests_per_s": _ratio(len(good), seconds),
        "tokens_per_s": _ratio(sum(len(r.arrivals) for r in (*requests, *streams)), seconds),
        **_spread("ttft", [r.arrivals[0] for r in good if r.arrivals]),
        **_terms(good),
        **_spread("itl", [gap for r in good for gap in r.gaps]),
        **_spread("stream_itl", [gap for r in streams for gap in r.gaps]),
        "stream_tokens_per_s": _ratio(sum(len(r.arrivals) for r in streams), seconds),
        "stall_ms_per_request": _stall(streams, lanes, len(requests)),
    }


def add_ratios(rows: Sequence[dict[str, Any]]) -> None:
    """Give each row `ratios` of its numbers to those of the first row, where both have them."""
    for row in rows:
        row["ratios"] = {
            name: round(row[name] / rows[0][name], 4)
            for name in (*RATIOS, *(f"stream_{name}" for name in RATIOS if "ttft" not in name))
            if row.get(name) is not None and rows[0].get(name)
        }


def _spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    numbers = {"p50": 50.0, "p99": 99.0, "max": 100.0}
    return {f"{name}_{key}_ms": _ms(percentile(values, p)) for key, p in numbers.items()}


def _terms(records: Sequence[Record]) -> dict[str, float | None]:
    """Medians of the terms of the time to the first token, where the server tells them."""
    timings = [record.timing for record in records if record.timing is not None]
    return {
        f"{term}_p50_ms": _ms(percentile([timing[term] for timing in timings], 50.0))
        for term in TTFT_TERMS
    }


def _stall(streams: Sequence[Record], lanes: int, requests: int) -> float | None:
    gaps = [gap for record in streams for gap in record.gaps]
    if not gaps or not requests:
        return None
    usual = median(gaps)
    return _ms(sum(max(0.0, gap - usual) for gap in gaps) / lanes / requests)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)


def _ratio(a: float, b: float) -> float | None:
    return round(a / b, 3) if b else None
