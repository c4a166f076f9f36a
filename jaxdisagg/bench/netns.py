"""A test bed of network namespaces: two machines with rate-limited NICs at one switch.

Everything lives in namespaces that no name points to, only descriptors of this process: the
calling thread moves into one of its own (the switch) and makes one for each side. So whatever ends
the process, a crash or SIGKILL as well, the kernel takes links, limits and addresses down with it;
nothing can be left over, nothing shows in the machine's own network, and beds run side by side.

A NIC is a veth pair between a side and the switch's bridge. tc's token bucket limits both its ends,
so a NIC sends and receives at most `rate_mbit`. What the bucket counts are Ethernet frames without
check sum, preamble and gap: `payload_share` says what part of that TCP's payload can be.
"""

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NETWORK = "10.77.0.0/16"
SWITCH_ADDRESS = "10.77.0.1"
MAX_NICS = 16
IPV4 = Path("/proc/sys/net/ipv4")  # of the calling thread's namespace
ETHERNET_BYTES = 14
IP_TCP_BYTES = 20 + 20 + 12  # TCP with its time stamps
# A bucket holds a whole 64 KiB send with the headers of its frames, which it would have to cut up
# otherwise; the queue holds any window, so that nothing is lost and TCP never slows down for it.
BURST_BYTES = 128 << 10
QUEUE_BYTES = 64 << 20


class BedUnavailable(Exception):
    """This machine cannot make such a bed; the text names what is missing."""


@dataclass(frozen=True)
class Namespace:
    """A network namespace that lives as long as its descriptor, or a process in it."""

    descriptor: int

    @staticmethod
    def current() -> "Namespace":
        """The calling thread's."""
        return Namespace(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))

    @property
    def path(self) -> str:
        """Where `ip` finds it."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    @contextlib.contextmanager
    def entered(self) -> Generator[None]:
        """Be in it for a while: sockets, threads and processes made meanwhile stay in it."""
        home = Namespace.current()
        try:
            os.setns(self.descriptor, os.CLONE_NEWNET)
            yield
        finally:
            os.setns(home.descriptor, os.CLONE_NEWNET)
            home.close()

    def close(self) -> None:
        """Let go of it."""
        os.close(self.descriptor)


def _may_make_networks() -> bool:
    """Whether the calling thread has CAP_SYS_ADMIN and CAP_NET_ADMIN."""
    status = Path("/proc/thread-self/status").read_text()
    effective = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    wanted = 1 << 21 | 1 << 12
    return int(effective.split()[1], 16) & wanted == wanted


def _own_namespace() -> None:
    """Move the calling thread into a new network namespace, as root or as a user.

    Raises BedUnavailable where neither is allowed. A user's way needs a process of one thread.
    """
    try:
        if _may_make_networks():
            os.unshare(os.CLONE_NEWNET)
            return
        user, group = os.getuid(), os.getgid()
        os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    except OSError as error:
        raise BedUnavailable(
            "no permission to make a network namespace: that takes root (CAP_SYS_ADMIN and "
            f"CAP_NET_ADMIN), or user namespaces open to everybody ({error.strerror})"
        ) from None


def _run(tool: str, lines: list[str]) -> None:
    """Commands of one tool, in the calling thread's namespace. RuntimeError with what it said."""
    done = subprocess.run(
        [tool, "-batch", "-"], input="\n".join(lines), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())
        raise RuntimeError(f"{tool} failed: {said}")


def _probe() -> None:
    """Raises BedUnavailable naming what the kernel cannot do, in a namespace to throw away."""
    for tool, lines, what in (
        ("ip", ["link add name probe0 type veth peer name probe1"], "a veth pair (kernel: veth)"),
        ("ip", ["link add name probe2 type bridge"], "a bridge (kernel: bridge)"),
        ("ip", ["rule add from 10.77.0.1 lookup 100"],
         "a route by source address (kernel: IP_MULTIPLE_TABLES)"),
        ("tc", ["qdisc add dev probe0 root tbf rate 1gbit burst 128kb limit 1mb"],
         "a token bucket (kernel: sch_tbf)"),
    ):  # fmt: skip
        try:
            _run(tool, lines)
        except RuntimeError as error:
            raise BedUnavailable(f"cannot make {what}: {error}") from None


@dataclass(frozen=True)
class Side:
    """One of the two machines: its namespace and the addresses of its NICs."""

    namespace: Namespace
    addresses: tuple[str, ...]

    def sent_bytes(self) -> tuple[int, ...]:
        """Bytes of Ethernet frames that each NIC has sent, as the limiter counted them."""
        with self.namespace.entered():
            text = subprocess.run(
                ["tc", "-s", "-j", "qdisc", "show"], capture_output=True, text=True, check=True
            ).stdout
        sent: dict[str, Any] = {q["dev"]: q["bytes"] for q in json.loads(text) if q.get("root")}
        return tuple(int(sent[f"nic{i}"]) for i in range(len(self.addresses)))


class Bed:
    """Two sides with NICs of `rate_mbit` Mbit/s each. A context manager.

    The thread that makes it stands at the switch (SWITCH_ADDRESS) until it is closed; close it
    there. As a user, not root, a process can make beds only while it has one thread, and does not
    come back from the namespaces. Raises BedUnavailable naming what the machine lacks, and
    ValueError for numbers that no bed has.
    """

    def __init__(
        self, left: int, right: int, *, rate_mbit: int, mtu: int = 1500, congestion: str = ""
    ) -> None:
        for name, value, low, high in (
            ("left", left, 1, MAX_NICS), ("right", right, 1, MAX_NICS),
            ("rate_mbit", rate_mbit, 1, 100_000), ("mtu", mtu, 576, 65535),
        ):  # fmt: skip
            if not low <= value <= high:
                raise ValueError(f"{name}={value} must be in {low}..{high}")
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise BedUnavailable(f"no `{tool}` on PATH (package iproute2)")
        self.rate_mbit, self.mtu, self.congestion = rate_mbit, mtu, congestion
        self._open: list[Namespace] = [Namespace.current()]
        try:
            _own_namespace()
            _probe()
            os.unshare(os.CLONE_NEWNET)  # the probe's links stay behind
            self.left, self.right = self._side(1, left), self._side(2, right)
            self._switch()
            for side, port in ((self.left, "left"), (self.right, "right")):
                self._connect(side, port)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Bed":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Go back to where the thread was; the links are gone once no process is in a side."""
        with contextlib.suppress(PermissionError):  # a user cannot
            os.setns(self._open[0].descriptor, os.CLONE_NEWNET)
        while self._open:
            self._open.pop().close()

    @property
    def payload_share(self) -> float:
        """The part of the line rate that TCP's payload can have, headers being what they are."""
        return (self.mtu - IP_TCP_BYTES) / (self.mtu + ETHERNET_BYTES)

    def _side(self, number: int, nics: int) -> Side:
        home = Namespace.current()
        os.unshare(os.CLONE_NEWNET)
        namespace = Namespace.current()
        self._open.append(namespace)
        os.setns(home.descriptor, os.CLONE_NEWNET)
        home.close()
        return Side(namespace, tuple(f"10.77.{number}.{i + 1}" for i in range(nics)))

    def _switch(self) -> None:
        self._settings()
        lines = [
            "link set lo up",
            "link add name switch type bridge",
            f"address add {SWITCH_ADDRESS}/16 dev switch",
        ]
        for side, port in ((self.left, "left"), (self.right, "right")):
            for i in range(len(side.addresses)):
                lines += [
                    f"link add name {port}{i} mtu {self.mtu} type veth "
                    f"peer name nic{i} mtu {self.mtu} netns {side.namespace.path}",
                    f"link set {port}{i} master switch up",
                ]
        _run("ip", [*lines, "link set switch up"])

    def _connect(self, side: Side, port: str) -> None:
        nics = range(len(side.addresses))
        self._limit([f"{port}{i}" for i in nics])
        lines = ["link set lo up"]
        for i, address in enumerate(side.addresses):
            lines += [
                f"address add {address}/16 dev nic{i} noprefixroute",
                f"link set nic{i} up",
                # What is sent from an address leaves through its NIC.
                f"rule add from {address} lookup {100 + i}",
                f"route add {NETWORK} dev nic{i} src {address} table {100 + i}",
            ]
        lines.append(f"route add {NETWORK} dev nic0 src {side.addresses[0]}")
        with side.namespace.entered():
            self._settings()
            _run("ip", lines)
            self._limit([f"nic{i}" for i in nics])

    def _limit(self, devices: list[str]) -> None:
        _run(
            "tc",
            [
                f"qdisc add dev {device} root tbf rate {self.rate_mbit}mbit "
                f"burst {BURST_BYTES} limit {QUEUE_BYTES}"
                for device in devices
            ],
        )

    def _settings(self) -> None:
        """NICs of one network answer and ask for their own addresses alone."""
        values = {"conf/all/arp_ignore": "1", "conf/all/arp_announce": "2",
                  "conf/all/rp_filter": "0", "conf/default/rp_filter": "0"}  # fmt: skip
        for name, value in values.items():
            file = IPV4 / name
            try:
                if file.read_text().strip() != value:
                    file.write_text(value)
            except OSError as error:
                raise BedUnavailable(f"{file} cannot be set to {value}: {error.strerror}") from None
        if self.congestion:
            try:
                (IPV4 / "tcp_congestion_control").write_text(self.congestion)
            except OSError as error:
                known = (IPV4 / "tcp_available_congestion_control").read_text().split()
                raise ValueError(
                    f"congestion={self.congestion!r}: {error.strerror}; this kernel has "
                    f"{', '.join(known)}, of which a namespace may not take every one"
                ) from None
