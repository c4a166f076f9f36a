"""HTTP to processes of this machine: past every proxy, without certificates, with one deadline.

Reading the certificates takes longer than any answer, on every call of `httpx.get`.
"""

from typing import Any

import httpx

SECONDS = 60.0


def get(url: str) -> httpx.Response:
    """The answer, whatever its status."""
    return httpx.get(url, timeout=SECONDS, verify=False, trust_env=False)


def post(url: str, body: dict[str, Any], *, read_s: float = SECONDS) -> httpx.Response:
    """The same of a JSON body; httpx.ReadTimeout if nothing is sent for `read_s`."""
    timeout = httpx.Timeout(SECONDS, read=read_s)
    return httpx.post(url, json=body, timeout=timeout, verify=False, trust_env=False)


def healthy(url: str) -> bool:
    """Whether /health there says so; not while nobody answers."""
    try:
        return get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False
