"""Nodes and deployments from the words of a command line, and from TOML."""

import tomllib
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from jaxdisagg.config import (
    DEFAULT_PORT,
    MAX_CPUS,
    MAX_GPUS,
    NodeConfig,
    ServeConfig,
    is_number,
)


def parse_numbers(text: str, option: str) -> tuple[int, ...]:
    """`64,256` as numbers. Raises ValueError naming the option."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option}={text!r}: expected numbers such as 64,256") from None


def parse_list(text: str, option: str, limit: int) -> tuple[int, ...]:
    """Numbers below `limit` from `0`, `0+2` or `0-3`. Raises ValueError naming the option."""
    found: list[int] = []
    for part in text.split("+"):
        first, _, last = part.partition("-")
        last = last or first
        if not is_number(first) or not is_number(last) or int(first) > int(last):
            raise ValueError(f"{option}={text!r}: expected numbers such as 0, 0+2 or 0-3")
        if int(last) >= limit:
            raise ValueError(f"{option}={text!r}: the numbers must be below {limit}")
        found.extend(range(int(first), int(last) + 1))
    return tuple(found)


_LISTS = {"cpus": MAX_CPUS, "gpus": MAX_GPUS}


def _fraction(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"gpu_memory={value!r}: expected a part of 1, as 0.4") from None


def parse_node(text: str, base: NodeConfig) -> NodeConfig:
    """A node from `tp=2,dp=1,cpus=0-1,pages=512`; what is left out comes from `base`.

    Raises ValueError naming an unknown key, one that comes twice, or a bad value.
    """
    mesh, cache, node = {}, {}, {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, eq, value = item.partition("=")
        if key in mesh or key in cache or key in node:
            raise ValueError(f"{key} comes twice in {text!r}")
        if key in _LISTS and eq:
            mesh[key] = parse_list(value, key, _LISTS[key])
            continue
        if key == "gpu_memory" and eq:
            node[key] = _fraction(value)
            continue
        if key == "device_memory" and eq:
            node[key] = value
            continue
        if key == "nics" and eq:
            node["nics"] = tuple(value.split("+"))
            continue
        target = {
            "tp": mesh, "dp": mesh, "ep": mesh, "processes": mesh,
            "pages": cache, "page_size": cache, "fabric_port": node, "http_port": node,
        }.get(key)  # fmt: skip
        if target is None or not eq:
            raise ValueError(
                f"{item!r}: expected tp=, dp=, ep=, processes=, cpus=, gpus=, gpu_memory=, "
                "device_memory=, nics=, pages=, page_size=, http_port=, fabric_port="
            )
        if not is_number(value):
            raise ValueError(f"{key}={value!r}: expected a whole number")
        target[key] = int(value)
    return replace(
        base, mesh=replace(base.mesh, **mesh), cache=replace(base.cache, **cache), **node
    )


def node_from_toml(table: dict[str, Any], base: NodeConfig) -> NodeConfig:
    """A node from one `[[node]]` table of a TOML file; what is left out comes from `base`.

    Raises ValueError naming an unknown key, or a value of another type.
    """
    values: dict[str, Any] = asdict(base)
    for key, value in table.items():
        inner = values.get(key)
        both = isinstance(inner, dict) and isinstance(value, dict)
        values[key] = inner | value if both else value
    return decode_node(values)


def decode_node(values: Any) -> NodeConfig:
    """A node from plain values (of JSON or TOML).

    Raises ValueError naming an unknown key, or a value of another type.
    """

    def path(kind: type, value: Any) -> Any:
        if kind is Path and isinstance(value, str | Path):
            return Path(value)
        raise ValueError(f"expected a path, got {value!r}")

    if isinstance(values, dict):
        _check_keys(values, NodeConfig, "")
    return msgspec.convert(values, NodeConfig, dec_hook=path)


def _check_keys(values: dict[str, Any], kind: type, inside: str) -> None:
    known = {f.name: f.type for f in fields(kind)}
    for key, value in values.items():
        if key not in known:
            place = f"{inside}.{key}" if inside else key
            raise ValueError(
                f"{place}: unknown; {inside or 'a node'} has {', '.join(sorted(known))}"
            )
        inner = known[key]
        if isinstance(value, dict) and isinstance(inner, type) and is_dataclass(inner):
            _check_keys(value, inner, key)


def serve_from_toml(
    path: Path, base: NodeConfig, host: str | None = None, port: int | None = None
) -> ServeConfig:
    """A deployment from a TOML file with `port`, `host` and `[[node]]` tables.

    `host` and `port`, where given, stand above the file's. Raises ValueError naming what is wrong.
    """
    try:
        document = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from error
    except OSError as error:
        raise ValueError(f"--config: {path} cannot be read: {error.strerror}") from None
    nodes = document.pop("node", [])
    if not isinstance(nodes, list) or not all(isinstance(table, dict) for table in nodes):
        raise ValueError(f"{path}: node: expected [[node]] tables")
    unknown = sorted(set(document) - {"host", "port"})
    if unknown:
        raise ValueError(f"{path}: {unknown[0]}: unknown; expected host, port and [[node]] tables")
    host = document.get("host", base.host) if host is None else host
    port = document.get("port", DEFAULT_PORT) if port is None else port
    if not isinstance(host, str) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise ValueError(f"{path}: host={host!r}, port={port!r}: expected a name and 0..65535")
    try:
        configs = [
            node_from_toml(table, replace(base, id=f"{table.get('role', base.role)}-{i}"))
            for i, table in enumerate(nodes)
        ]
        return ServeConfig(tuple(configs), host, port)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
