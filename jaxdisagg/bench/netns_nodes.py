"""A prefill node and a decode node at the two sides of a test bed, and a mixed node to compare."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from jaxdisagg.bench.netns import SWITCH_ADDRESS, Bed, Namespace, Side
from jaxdisagg.config import BatchConfig, NodeConfig, Role, ServeConfig
from jaxdisagg.config_text import parse_node
from jaxdisagg.deployment import Deployment, NodeProcess

ANSWER_SECONDS = 120.0
BATCH = BatchConfig(chunks=(64,), decode_rows=(2,))  # few steps to compile
PREFILL, DECODE = "prefill-0", "decode-0"


class SplitError(Exception):
    """Answers or counts of the nodes are not what they must be; the text says which."""


@dataclass
class PlacedDeployment(Deployment):
    """A deployment whose nodes live in network namespaces: `places` by node id."""

    places: Mapping[str, Namespace] = field(default_factory=dict)

    def _spawn(self, node: NodeConfig, *more: Any, **named: Any) -> NodeProcess:
        with self.places[node.id].entered():
            return super()._spawn(node, *more, **named)


@dataclass(frozen=True)
class Answer:
    """One greedy answer: its tokens' texts and logprobs, and the page-writes counted for it."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    page_writes: int


@dataclass(frozen=True)
class Split:
    """What the requests made of a prefill and a decode node.

    `pushed` and `counted` are page-writes as each side says. Per NIC of the prefill node:
    `posted_bytes` as its engine says, `frame_bytes` as the kernel's limiter says, which counts
    control messages and headers, too. `received_units`: page-writes counted at each NIC of the
    decode node.
    """

    answers: tuple[Answer, ...]
    pushed: int
    counted: int
    posted_bytes: tuple[int, ...]
    frame_bytes: tuple[int, ...]
    received_units: tuple[int, ...]

    def problem(self, whole: Sequence[Answer]) -> str | None:
        """What is wrong, beside the answers of one process; None if everything adds up."""
        for number, (apart, one) in enumerate(zip(self.answers, whole, strict=True)):
            if apart.tokens != one.tokens:
                return f"answer {number}: {apart.tokens} apart, {one.tokens} in one process"
        sums = (self.pushed, self.counted, sum(self.received_units))
        if len({*sums, sum(a.page_writes for a in self.answers)}) != 1:
            return f"page-writes: pushed, counted, counted at the NICs: {sums}"
        for nic, (posted, frames) in enumerate(
            zip(self.posted_bytes, self.frame_bytes, strict=True)
        ):
            if posted > frames:
                return f"nic{nic} has sent {frames} bytes, the engine says {posted}"
        return None


def prompts(count: int, length: int) -> list[list[int]]:
    """Token ids of bytes, a different sequence for each prompt."""
    return [[(7 * i + 31 * number) % 250 for i in range(length)] for number in range(count)]


def ask(url: str, prompt: Sequence[int], max_tokens: int, *, apart: bool) -> Answer:
    """The greedy answer to a prompt. Raises SplitError with what the server says instead."""
    body = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "logprobs": 1}
    response = httpx.post(
        f"{url}/v1/completions",
        json=body,
        headers={"x-jaxdisagg-timing": "1"},
        timeout=ANSWER_SECONDS,
    )
    if response.status_code != 200:
        raise SplitError(f"{url} answered {response.status_code}: {response.text}")
    choice = response.json()["choices"][0]
    logprobs = choice["logprobs"]
    return Answer(
        tuple(logprobs["tokens"]),
        tuple(logprobs["token_logprobs"]),
        choice["timing"]["page_writes"] if apart else 0,
    )


def run_split(
    bed: Bed,
    model: Path,
    nodes: tuple[str, str],
    questions: Sequence[Sequence[int]],
    max_tokens: int,
) -> Split:
    """Ask a prefill node at the left side and a decode node at the right one.

    `nodes` describes them as `parse_node` takes it. Raises DeploymentError when they do not come
    up, ValueError for what does not fit.
    """
    configs = (
        _node("prefill", model, nodes[0], bed.left),
        _node("decode", model, nodes[1], bed.right),
    )
    places = {PREFILL: bed.left.namespace, DECODE: bed.right.namespace}
    serve = ServeConfig(configs, host=SWITCH_ADDRESS, port=0)
    with PlacedDeployment(serve, places=places) as deployment:
        frames = bed.left.sent_bytes()
        answers = tuple(
            ask(deployment.url, question, max_tokens, apart=True) for question in questions
        )
        frames = tuple(b - a for a, b in zip(frames, bed.left.sent_bytes(), strict=True))
        prefill, decode = (_state(deployment.node(name)) for name in (PREFILL, DECODE))
    return Split(
        answers,
        prefill["page_writes"],
        decode["page_writes"],
        _by_nic(prefill, bed.left, "bytes_completed"),
        frames,
        _by_nic(decode, bed.right, "units_counted"),
    )


def run_whole(
    model: Path, questions: Sequence[Sequence[int]], max_tokens: int
) -> tuple[Answer, ...]:
    """The same answers by one process, at the switch."""
    node = NodeConfig(role="mixed", model=model, id="mixed-0", batch=BATCH, host=SWITCH_ADDRESS)
    with Deployment(ServeConfig((node,), host=SWITCH_ADDRESS, port=0)) as deployment:
        return tuple(
            ask(deployment.url, question, max_tokens, apart=False) for question in questions
        )


def _node(role: Role, model: Path, text: str, side: Side) -> NodeConfig:
    base = NodeConfig(
        role, model, f"{role}-0", batch=BATCH, host=side.addresses[0], nics=side.addresses
    )
    return parse_node(text, base)


def _by_nic(state: dict[str, Any], side: Side, key: str) -> tuple[int, ...]:
    """A number of each of the side's NICs, summed over the node's processes."""
    domains = state["fabric"]["domains"]
    return tuple(sum(d[key] for d in domains if d["name"] == nic) for nic in side.addresses)


def _state(node: NodeProcess) -> dict[str, Any]:
    return httpx.get(f"{node.url}/debug/state", timeout=10.0).json()
