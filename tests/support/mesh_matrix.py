"""Pairs of nodes by the meshes of both sides, each node built once on a process of its side."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from mesh_cases import Mesh, Model
from side_process import SideError, SideProcess

DEVICES = 8  # of a side's process


@dataclass(frozen=True)
class Served:
    """One prompt of a pair: the answer, and the memory of both nodes (mesh_side.MeshSide.taken)."""

    prompt: list[int]
    answer: dict[str, Any]
    source: dict[str, Any] | None
    target: dict[str, Any] | None


@dataclass
class Matrix:
    """All pairs of one model, over two processes that other matrices share."""

    model: Model
    sides: dict[str, SideProcess]
    _built: set[tuple[str, Mesh]] = field(default_factory=set)
    _fabric: dict[Mesh, str] = field(default_factory=dict)
    _connected: set[tuple[Mesh, Mesh]] = field(default_factory=set)
    _rounds: int = 0

    def pair(self, prefill: Mesh, decode: Mesh) -> "Pair":
        """The nodes of a pair, connected; those that are there already are used again."""
        wanted = [("prefill", prefill), ("decode", decode)]
        fresh = [(role, mesh) for role, mesh in wanted if (role, mesh) not in self._built]
        for role, mesh in fresh:
            self.sides[role].send("build", **self._node(role, mesh))
        problems = []
        for role, mesh in fresh:  # both answers are read, whatever the first one says
            try:
                answer = self.sides[role].answer(f"build {role} {mesh}")
            except SideError as error:
                problems.append(error)
                continue
            self._built.add((role, mesh))
            if role == "prefill":
                self._fabric[mesh] = answer["fabric"]
        if problems:
            raise problems[0]
        if (prefill, decode) not in self._connected:
            known = [self._fabric[p] for p, d in self._connected if d == decode]
            addresses = [*known, self._fabric[prefill]]
            name = self.name("decode", decode)
            state = self.sides["decode"].ask("connect", name=name, fabric=addresses)
            assert "node" in state[self._fabric[prefill]], state
            self._connected.add((prefill, decode))
        return Pair(self, prefill, decode)

    def mixed(self, prompts: Sequence[list[int]], max_tokens: int) -> list[dict[str, Any]]:
        """What a node that prefills and decodes by itself answers on one device."""
        side = self.sides["decode"]
        node = self._node("mixed", Mesh())
        side.ask("build", **node)
        try:
            order = {"name": node["name"], "prompts": list(prompts), "max_tokens": max_tokens}
            return side.ask("generate", orders=[order])[0]
        finally:
            side.ask("close", names=[node["name"]])

    def name(self, role: str, mesh: Mesh) -> str:
        """A node's."""
        return f"{self.model.name}-{role}-{mesh}"

    def _node(self, role: str, mesh: Mesh) -> dict[str, Any]:
        what: dict[str, Any] = {"sentinel": self.model.kv_heads}
        if self.model.folder is not None:
            what = {"model": str(self.model.folder)}
        # The page ids of no two nodes are in the same order.
        seed = 100 * (role == "decode") + 10 * mesh.tp + mesh.dp
        return {
            "name": self.name(role, mesh),
            "role": role,
            "tp": mesh.tp,
            "dp": mesh.dp,
            "page_size": mesh.page,
            "pages": mesh.pages,
            "seed": seed,
            # From the last device down where there are dp ranks: ordinals that begin above 0, and
            # less to share among nodes that run at once.
            "first_device": DEVICES - mesh.tp * mesh.dp if mesh.dp > 1 else 0,
            "dtype": self.model.dtype,
            **what,
        }

    def next_prefix(self) -> str:
        """Of request ids, which no two rounds share."""
        self._rounds += 1
        return f"{self.model.name}-{self._rounds}"

    def close(self) -> None:
        """Stop the nodes; the processes go on."""
        for role, side in self.sides.items():
            names = [self.name(*node) for node in self._built if node[0] == role]
            side.send("close", names=names)
        for side in self.sides.values():
            side.answer("close")


@dataclass(frozen=True)
class Pair:
    """Two connected nodes."""

    matrix: Matrix
    prefill: Mesh
    decode: Mesh

    def ask(self, role: str, op: str, **how: Any) -> Any:
        """Give an order to the node of a side."""
        mesh = self.prefill if role == "prefill" else self.decode
        return self.matrix.sides[role].ask(op, name=self.matrix.name(role, mesh), **how)

    @contextmanager
    def damaged(self, how: str) -> Iterator[None]:
        """Let the prefill node send wrongly, in one of the ways of plan_damage.py."""
        self.ask("prefill", "damage", how=how)
        try:
            yield
        finally:
            self.ask("prefill", "damage", how=None)

    def check_checksums(self, one: Served) -> None:
        """Every rank of the decode node holds what every rank with the same heads sent."""
        if one.source is None or one.target is None:
            assert len(one.prompt) == 1
            return
        model, found = self.matrix.model, {}
        for mesh, sums in (
            (self.prefill, one.source["checksums"]),
            (self.decode, one.target["checksums"]),
        ):
            assert len(sums) == mesh.tp
            for rank, layers in enumerate(sums):
                assert len(layers) == model.layers
                for layer, heads in enumerate(layers):
                    for head, value in zip(model.heads_of(rank, mesh.tp), heads, strict=True):
                        known = found.setdefault((layer, head), value)
                        assert value == known, (
                            f"the pages of layer {layer} head {head} differ at {mesh} rank {rank}, "
                            f"prompt of {len(one.prompt)}"
                        )
        contexts = {*one.source["contexts"], *one.target["contexts"]}
        assert len(contexts) == 1, f"contexts of a prompt of {len(one.prompt)} differ"

    def poison(self) -> None:
        """Overwrite the memory of both nodes."""
        for role in ("prefill", "decode"):
            self.ask(role, "poison")

    def strays(self) -> list[str]:
        """Where either node's memory changed beside the requests since `poison`."""
        return [
            f"{role}: {place}"
            for role in ("prefill", "decode")
            for place in self.ask(role, "strays")
        ]

    def page_writes(self) -> list[int]:
        """What each side has counted since it was built."""
        return [self.ask(role, "state")["page_writes"] for role in ("prefill", "decode")]

    def order(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int,
        leave: Sequence[float | None] = (),
    ) -> dict[str, Any]:
        """What the decode process is told to serve these prompts by this pair.

        Client number i leaves after `leave[i]` seconds, if it has not got its answer by then.
        """
        return {
            "leave": list(leave),
            "name": self.matrix.name("decode", self.decode),
            "via": self.matrix.name("prefill", self.prefill),
            "prompts": list(prompts),
            "max_tokens": max_tokens,
            "prefix": self.matrix.next_prefix(),
        }

    def serve(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int,
        folder: Path | None = None,
        leave: Sequence[float | None] = (),
    ) -> list[Served]:
        """Serve all prompts at once; with `folder` the memory's values are written there, too."""
        order = self.order(prompts, max_tokens, leave)
        (answers,) = self.matrix.sides["decode"].ask("generate", orders=[order])
        return self.served(prompts, answers, folder)

    def served(
        self,
        prompts: Sequence[list[int]],
        answers: Sequence[dict[str, Any]],
        folder: Path | None = None,
    ) -> list[Served]:
        """The answers to an order of this pair, beside the memory of both nodes."""
        where = None if folder is None else str(folder)
        targets = self.ask("decode", "taken", folder=where)
        attempts = [taken["attempt"] for taken in targets]
        sources = self.ask("prefill", "taken", attempts=attempts, folder=where)
        of = {t["request"]: (s, t) for s, t in zip(sources, targets, strict=True)}
        nothing = (None, None)
        return [
            Served(prompt, answer, *of.get(answer["id"], nothing))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]


def serve_at_once(
    pairs: Sequence[Pair], prompts: Sequence[list[int]], max_tokens: int, folder: Path
) -> list[list[Served]]:
    """The prompts by each of several pairs of one matrix, their decode nodes different."""
    orders = [pair.order(prompts, max_tokens) for pair in pairs]
    found = pairs[0].matrix.sides["decode"].ask("generate", orders=orders)
    return [
        pair.served(prompts, answers, folder) for pair, answers in zip(pairs, found, strict=True)
    ]


class Matrices:
    """The matrix of one model at a time; a context manager."""

    def __init__(self, sides: dict[str, SideProcess]) -> None:
        self.sides = sides
        self._open: Matrix | None = None

    def of(self, model: Model) -> Matrix:
        """The matrix of a model. The nodes of another one are stopped."""
        if self._open is None or self._open.model != model:
            self._close()
            self._open = Matrix(model, self.sides)
        return self._open

    def pair(self, model: Model, prefill: Mesh, decode: Mesh) -> Pair:
        """A pair of nodes of a model."""
        return self.of(model).pair(prefill, decode)

    def _close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
