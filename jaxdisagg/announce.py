"""How nodes tell the router that they are there, and learn who else is (R23)."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Annotated, Literal

import httpx
import msgspec

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
ANNOUNCE_PATH = "/internal/announce"
LEAVE_PATH = "/internal/leave"

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class NodeInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a node says of itself with every heartbeat.

    `url` is the base of its HTTP server, which decode and mixed nodes must have; `fabric_address`
    is where a prefill node takes its HELLO. `load` is its outstanding tokens. A node that is not
    `ready` says in `missing` what it waits for. Raises ValueError if what its role needs is absent.
    """

    id: Name
    role: Literal["prefill", "decode", "mixed"]
    model: Name
    url: Name | None = None
    fabric_address: Name | None = None
    load: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0
    ready: bool = True
    missing: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    heartbeat_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = HEARTBEAT_S

    def __post_init__(self) -> None:
        needed = "fabric_address" if self.role == "prefill" else "url"
        if getattr(self, needed) is None:
            raise ValueError(f"a {self.role} node must announce its {needed}")


class Members(msgspec.Struct, frozen=True):
    """The router's answer to a heartbeat: every node that it knows to be there."""

    nodes: tuple[NodeInfo, ...]


class Announcer:
    """Heartbeats of one node, from a task of the running event loop.

    `describe` is called for each. `members` is the last list that the router sent: it is kept
    when the router is down, which is logged once. `on_members` is called when the list changes.
    """

    def __init__(
        self,
        router_url: str,
        describe: Callable[[], NodeInfo],
        *,
        heartbeat_s: float = HEARTBEAT_S,
        on_members: Callable[[tuple[NodeInfo, ...]], None] | None = None,
    ) -> None:
        self.members: tuple[NodeInfo, ...] = ()
        self.connected = False
        self._warned = False
        self._describe = describe
        self._heartbeat_s = heartbeat_s
        self._on_members = on_members
        self._router_url = router_url
        # trust_env=False: heartbeats go to the router itself, whatever proxy the shell names.
        self._client = httpx.AsyncClient(
            base_url=router_url, timeout=max(2.0, 2 * heartbeat_s), trust_env=False
        )
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def start(self) -> None:
        """Begin to announce; the first heartbeat goes out at once."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End the heartbeats and tell the router, if it is there, that the node leaves."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
            if self.connected:
                try:
                    await self._post(LEAVE_PATH)
                except (httpx.HTTPError, msgspec.MsgspecError):
                    logger.info("the router at %s did not hear us leave", self._router_url)
        await self._client.aclose()

    async def announce(self) -> None:
        """Send one heartbeat; a router that is down or talks nonsense is logged, not raised."""
        try:
            members = await self._post(ANNOUNCE_PATH)
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            if not self._warned:
                logger.warning("the router at %s does not answer: %s", self._router_url, error)
            self._warned, self.connected = True, False
            return
        if not self.connected:
            logger.info("announced to the router at %s", self._router_url)
        self._warned, self.connected = False, True
        if members != self.members:
            self.members = members
            if self._on_members is not None:
                self._on_members(members)

    def changed(self) -> None:
        """What `describe` says is different now: the router need not wait for the heartbeat."""
        self._changed.set()

    async def _run(self) -> None:
        while True:
            await self.announce()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), self._heartbeat_s)
            self._changed.clear()

    async def _post(self, path: str) -> tuple[NodeInfo, ...]:
        info = msgspec.structs.replace(self._describe(), heartbeat_s=self._heartbeat_s)
        response = await self._client.post(path, content=msgspec.json.encode(info))
        response.raise_for_status()
        return msgspec.json.decode(response.content, type=Members).nodes
