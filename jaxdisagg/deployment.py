"""A deployment on this machine: a router in this process and every node in one or more others."""

import json
import logging
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from jaxdisagg.config import START_SECONDS, NodeConfig, ServeConfig
from jaxdisagg.gpu_setup import visible_gpus
from jaxdisagg.gpu_sharing import share_gpus
from jaxdisagg.group.key import KEY_VARIABLE
from jaxdisagg.node_process import encode_config
from jaxdisagg.router_thread import RouterThread

log = logging.getLogger(__name__)

STOP_SECONDS = 10.0


class DeploymentError(Exception):
    """A deployment that did not come up; the text is for a person and names the node."""


@dataclass
class NodeProcess:
    """A node's process and the last that it said; of several, `followers` are all but the first."""

    config: NodeConfig
    process: subprocess.Popen[str]
    key: str = ""
    followers: "list[NodeProcess]" = field(default_factory=list)
    progress: str = "starting"
    done: int = 0
    total: int = 1
    ready: dict[str, Any] | None = None
    error: str | None = None

    @property
    def name(self) -> str:
        """The node's id, and which of its processes this is, if there are several."""
        process = self.config.process
        return f"{self.config.id} process {process}" if process else self.config.id

    @property
    def url(self) -> str:
        """Its HTTP address; only once it is ready."""
        assert self.ready is not None
        return self.ready["url"]


@dataclass
class Deployment:
    """Start with `start`, end with `stop`, or use it as a context manager.

    `progress` is called with every node's process whenever one of them said something.
    """

    config: ServeConfig
    progress: Callable[[list[NodeProcess]], None] = lambda nodes: None
    nodes: list[NodeProcess] = field(default_factory=list)
    url: str = ""

    def __post_init__(self) -> None:
        self._said: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._stopping = False
        self._spawning = threading.Lock()
        self._router = RouterThread()

    def __enter__(self) -> "Deployment":
        if not self.url:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything; returns once every decode node can serve.

        Raises DeploymentError, with everything stopped again, if a node does not fit its model or
        its peers or the machine's GPUs (before any process is started), says what is wrong, ends,
        or is not ready in time. Raises ValueError if the router's port cannot be had.
        """
        try:
            self._check_fit()
            nodes = self._share_gpus()
            self.url = self._router.start(self.config.host, self.config.port)
            for node in nodes:
                self.nodes.append(self._spawn(replace(node, router=self.url)))
            self._wait_ready(time.monotonic() + START_SECONDS)
            self._wait_connected(time.monotonic() + 30.0)
        except BaseException:
            self.stop()
            raise

    def _check_fit(self) -> None:
        # Imported here: jax takes a second, and a wrong option or `--help` needs none of it.
        from jaxdisagg.model_fit import check_nodes

        try:
            check_nodes(self.config.nodes)
        except (FileNotFoundError, ValueError) as error:
            raise DeploymentError(str(error)) from None

    def _share_gpus(self) -> tuple[NodeConfig, ...]:
        try:
            return share_gpus(self.config.nodes, visible_gpus())
        except ValueError as error:
            raise DeploymentError(str(error)) from None

    def _spawn(self, node: NodeConfig, key: str = "") -> NodeProcess:
        if node.mesh.processes > 1:
            key = key or secrets.token_hex(32)
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxdisagg.node_process", encode_config(node)],
            stdin=subprocess.PIPE,  # its end is the node's end
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ({KEY_VARIABLE: key} if key else {}),
        )
        spawned = NodeProcess(node, process, key)
        threading.Thread(target=self._listen, args=(spawned,), daemon=True).start()
        return spawned

    def _spawn_followers(self, leader: NodeProcess, address: str) -> None:
        with self._spawning:  # nothing may be started once `stop` has looked what there is
            if self._stopping:
                return
            for i in range(1, leader.config.mesh.processes):
                config = replace(
                    leader.config, process=i, group=address, http_port=0, fabric_port=0
                )
                leader.followers.append(self._spawn(config, leader.key))

    def _listen(self, node: NodeProcess) -> None:
        assert node.process.stdout is not None
        with node.process.stdout as lines:
            for line in lines:
                try:
                    said = json.loads(line)
                except ValueError:
                    log.info("%s: %s", node.config.id, line.rstrip())
                    continue
                node.progress = said.get("progress", node.progress)
                node.done = said.get("done", node.done)
                node.total = said.get("total", node.total)
                node.error = said.get("error", node.error)
                node.ready = said.get("ready", node.ready)
                if "group" in said:
                    self._spawn_followers(node, said["group"])
                self._said.put(None)
        node.process.wait()
        assert node.process.stdin is not None
        node.process.stdin.close()
        self._said.put(None)

    def _wait_ready(self, deadline: float) -> None:
        while not all(node.ready for node in self.nodes):
            try:
                self._said.get(timeout=max(deadline - time.monotonic(), 0.01))
            except queue.Empty:
                waiting = ", ".join(
                    f"{n.name} ({n.progress})" for n in self._processes() if not n.ready
                )
                raise DeploymentError(f"not ready after {START_SECONDS:.0f} s: {waiting}") from None
            self.progress(self.nodes)
            self._check_alive()

    def _wait_connected(self, deadline: float) -> None:
        """Wait until each decode node is connected to a prefill node, and the router knows."""
        answering = {n.config.id: n.url for n in self.nodes if n.config.role != "prefill"}
        for name, url in (answering | {"router": self.url}).items():
            while (problem := _health_problem(url)) is not None:
                self._check_alive()
                if time.monotonic() > deadline:
                    raise DeploymentError(f"{name}: {problem}")
                time.sleep(0.05)

    def _check_alive(self) -> None:
        # A leader repeats what its followers say, who know it first.
        processes = sorted(self._processes(), key=lambda node: -node.config.process)
        for node in processes:
            if node.error is not None:
                raise DeploymentError(f"{node.name}: {node.error}")
        for node in processes:
            if node.process.poll() is not None:
                raise DeploymentError(
                    f"{node.name} ended with code {node.process.returncode} while {node.progress}"
                )

    def _processes(self) -> list[NodeProcess]:
        """All processes of all nodes."""
        return [process for node in self.nodes for process in (node, *node.followers)]

    def ended(self) -> list[NodeProcess]:
        """The nodes whose process, or first process, has ended by itself."""
        return [node for node in self.nodes if node.process.poll() is not None]

    def node(self, node_id: str) -> NodeProcess:
        """A node by its id; KeyError if there is none."""
        for node in self.nodes:
            if node.config.id == node_id:
                return node
        raise KeyError(node_id)

    def restart(self, node_id: str) -> NodeProcess:
        """Start a node that has ended anew, on the ports that it had; returns once it is ready."""
        old = self.node(node_id)
        old.process.wait(timeout=STOP_SECONDS)
        _end(old.followers, STOP_SECONDS)
        config = old.config
        if old.ready is not None:
            http_port = int(old.ready["url"].rsplit(":", 1)[1])
            fabric = old.ready["fabric"]
            config = replace(
                config,
                http_port=http_port,
                fabric_port=int(fabric.rsplit(":", 1)[1]) if fabric else 0,
            )
        self.nodes[self.nodes.index(old)] = self._spawn(config)
        self._wait_ready(time.monotonic() + START_SECONDS)
        return self.node(node_id)

    def stop(self) -> None:
        """End every node, by force if one does not end in time, and the router."""
        with self._spawning:
            self._stopping = True
        for node in self.nodes:
            if node.process.poll() is None:
                node.process.terminate()
        _end(self.nodes, STOP_SECONDS)
        _end([follower for node in self.nodes for follower in node.followers], 1.0)
        self._router.stop()


def _end(nodes: list[NodeProcess], timeout: float) -> None:
    """Wait until these processes have ended, by force after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    for node in nodes:
        try:
            node.process.wait(timeout=max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            log.warning("%s did not end by itself", node.name)
            node.process.kill()
            node.process.wait()


def _health_problem(url: str) -> str | None:
    """None if the server at `url` can answer requests, or what it lacks."""
    try:
        answer = httpx.get(f"{url}/health", timeout=5.0)
    except httpx.HTTPError as error:
        return str(error)
    if answer.status_code == 200:
        return None
    try:
        body = answer.json()
        return str(body.get("missing") or body)
    except ValueError:
        return answer.text
