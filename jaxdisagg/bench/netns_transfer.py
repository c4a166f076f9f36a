"""The transfer benchmark across a test bed's links, as shares of their line rate."""

import statistics
from itertools import zip_longest
from typing import Any

from jaxdisagg.bench.netns import Bed
from jaxdisagg.bench.transfer import Bench, in_turns, permutations
from jaxdisagg.bench.transfer_side import TransferSide, two_cores


def measure_pair(bed: Bed, options: dict[str, Any], sizes: list[int]) -> list[dict[str, Any]]:
    """One row for each page size: the benchmark across the bed's links, beside raw TCP on them."""
    cores = two_cores()
    sender, receiver = (
        TransferSide(
            provider=options["provider"],
            bind=side.addresses[0],
            domains=side.addresses,
            bytes_in_flight=options["window"] << 10,
            core=core,
        )
        for side, core in zip((bed.left, bed.right), cores, strict=True)
    )
    left, right = len(bed.left.addresses), len(bed.right.addresses)
    total = (options["megabytes"] << 20) * min(left, right)
    line = bed.rate_mbit * min(left, right) / 8e3
    rows = []
    with Bench(
        sender,
        receiver,
        total // 2,
        streams=max(left, right),
        sender_place=bed.left.namespace.entered,
        receiver_place=bed.right.namespace.entered,
    ) as bench:
        for page in sizes:
            source, destination = permutations(total // 2, page, total)
            before, units_before = bench.engine.domain_counters(), bench.received_units
            frames = [0] * left

            def counted_transfer(*pages: Any, frames: list[int] = frames) -> float:
                """The transfer alone, and what the kernel saw leave through each NIC."""
                earlier = bed.left.sent_bytes()
                seconds = bench.transfer(*pages)
                for nic, sent in enumerate(bed.left.sent_bytes()):
                    frames[nic] += sent - earlier[nic]
                return seconds

            ways = (counted_transfer, bench.raw_tcp)
            rounds = list(
                in_turns(ways, page, source, destination, len(source) // 8, options["rounds"])
            )
            transfer, tcp = (statistics.median(gbps) for gbps in rounds[-1])
            rows.append(
                {
                    "provider": bench.engine.provider,
                    "nics": left,
                    "peer_nics": right,
                    "mtu": bed.mtu,
                    "page_bytes": page,
                    "rounds": options["rounds"],
                    "bytes": total,
                    "line_gbps": line,
                    "payload_line_gbps": line * bed.payload_share,
                    "gbps": transfer,
                    "of_line": transfer / line,
                    "of_line_least": min(rounds[-1][0]) / line,
                    "of_payload_line": transfer / line / bed.payload_share,
                    "raw_tcp_gbps": tcp,
                    "raw_tcp_of_line": tcp / line,
                    "nic_bytes": [
                        b["bytes_completed"] - a["bytes_completed"]
                        for a, b in zip(before, bench.engine.domain_counters(), strict=True)
                    ],
                    "nic_frame_bytes": frames,
                    "peer_nic_pages": [
                        after - earlier
                        for earlier, after in zip_longest(
                            units_before, bench.received_units, fillvalue=0
                        )
                    ],
                }
            )
    return rows
