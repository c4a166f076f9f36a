"""Free ports for processes that start in a while, or again."""

import random
import socket
from pathlib import Path

FIRST = 10_000


def ports() -> dict[str, int]:
    """A node's own, so that it finds them free when it is restarted."""
    return {"http_port": free_port(), "fabric_port": free_port()}


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody holds, and that the kernel gives to nobody meanwhile.

    It gives ports from ip_local_port_range on, to listeners that take any and to whoever connects.
    """
    ranges = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    end = int(ranges.split()[0])
    if end <= FIRST:
        end = FIRST + 10_000
    for port in random.SystemRandom().sample(range(FIRST, end), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port among 100 of {FIRST}..{end - 1}")
