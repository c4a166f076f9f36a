"""One table from the logical axes of parameters and activations to mesh axes.

Mesh axes are ('dp', 'kv', 'rep'): KV heads shard over 'kv', and where there are more tensor ranks
than KV heads, 'rep' counts the ranks that hold the same KV heads.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("dp", "kv", "rep")

_DEFAULT: dict[str, tuple[str, ...]] = {
    "batch": ("dp",),  # tokens, requests and pages
    "vocab": ("kv", "rep"),
    "embed": (),
    "heads": ("kv", "rep"),
    "kv_heads": ("kv",),
    "head_dim": (),
    "ffn": ("kv", "rep"),
    "latent": (),  # low-rank projections: every rank computes the whole latent
    "experts": (),
    "expert_ffn": ("kv", "rep"),
}
# The cache layout and the attention over it are written for these; a rule file cannot move them.
_FIXED = ("batch", "heads", "kv_heads", "head_dim", "latent")


@dataclass(frozen=True)
class ShardingRules:
    """Logical axis -> mesh axes, as sorted pairs (hashable). Build it with `make_rules`."""

    table: tuple[tuple[str, tuple[str, ...]], ...]

    def mesh_axes(self, axis: str) -> tuple[str, ...]:
        """The mesh axes of a logical axis; ValueError when the table does not know it."""
        for name, axes in self.table:
            if name == axis:
                return axes
        raise ValueError(f"sharding rules: no rule for logical axis {axis!r}")

    def spec(self, *axes: str | None) -> PartitionSpec:
        """The partition of an array with these logical axes (None: not sharded).

        Raises ValueError when two of its dimensions would use the same mesh axis.
        """
        used: dict[str, str] = {}
        entries: list[str | tuple[str, ...] | None] = []
        for axis in axes:
            mesh_axes = () if axis is None else self.mesh_axes(axis)
            for m in mesh_axes:
                if m in used:
                    raise ValueError(
                        f"sharding rules: {used[m]!r} and {axis!r} of one array both map to "
                        f"mesh axis {m!r}"
                    )
                used[m] = str(axis)
            entries.append(mesh_axes if len(mesh_axes) > 1 else mesh_axes[0] if mesh_axes else None)
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    def sharding(self, mesh: Mesh, axes: Iterable[str | None]) -> NamedSharding:
        """`spec` of these axes on a mesh."""
        return NamedSharding(mesh, self.spec(*axes))

    def shards(self, mesh: Mesh, axis: str) -> int:
        """Into how many parts a logical axis is cut on this mesh."""
        count = 1
        for m in self.mesh_axes(axis):
            count *= mesh.shape[m]
        return count

    def check(self, mesh: Mesh, *sizes: Mapping[str, tuple[str, int]]) -> None:
        """Raise ValueError naming each field whose logical axis the mesh does not divide.

        `sizes` map a logical axis to (field name, size).
        """
        misfits = []
        for axis, (field, size) in (item for mapping in sizes for item in mapping.items()):
            shards = self.shards(mesh, axis)
            if size % shards:
                misfits.append(f"{field} {size} does not divide into {shards} shards of {axis!r}")
        if misfits:
            raise ValueError("mesh does not fit the model: " + "; ".join(misfits))


def make_rules(*overrides: Mapping[str, Any]) -> ShardingRules:
    """The default table with some logical axes mapped elsewhere, the last mapping winning.

    A value is a mesh axis, a list of them, or an empty list (replicated). Raises ValueError naming
    an unknown logical axis, an unknown or repeated mesh axis, or an axis that is fixed.
    """
    table = dict(_DEFAULT)
    for axis, value in (item for mapping in overrides for item in mapping.items()):
        if axis not in table:
            known = ", ".join(sorted(table))
            raise ValueError(f"sharding rules: unknown logical axis {axis!r} (known: {known})")
        axes = (value,) if isinstance(value, str) else value
        if not isinstance(axes, list | tuple) or not all(isinstance(a, str) for a in axes):
            raise ValueError(f"sharding rules: {axis}: expected a list of mesh axes, got {value!r}")
        for m in axes:
            if m not in MESH_AXES:
                raise ValueError(
                    f"sharding rules: {axis}: unknown mesh axis {m!r} "
                    f"(known: {', '.join(MESH_AXES)})"
                )
        if len(set(axes)) != len(axes):
            raise ValueError(f"sharding rules: {axis}: a mesh axis is named twice in {value!r}")
        if axis in _FIXED and tuple(axes) != table[axis]:
            raise ValueError(f"sharding rules: {axis}: fixed at {table[axis]} by the cache layout")
        table[axis] = tuple(axes)
    return ShardingRules(tuple(sorted(table.items())))


def load_rules(path: str | Path, *beneath: Mapping[str, Any]) -> ShardingRules:
    """Rules from a TOML file with a table `[rules]`: `ffn = ["kv", "rep"]`, one line per axis.

    What the file leaves out comes from the mappings `beneath`, then from the default table.

    Raises FileNotFoundError or ValueError, both naming the file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"sharding rules: no such file: {path}")
    try:
        document = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"sharding rules: {path} is not TOML: {error}") from None
    rules = document.get("rules")
    if not isinstance(rules, dict) or set(document) != {"rules"}:
        raise ValueError(f"sharding rules: {path}: expected exactly one table, [rules]")
    try:
        return make_rules(*beneath, rules)
    except ValueError as error:
        raise ValueError(f"{error} (in {path})") from None


DEFAULT_RULES = make_rules()
