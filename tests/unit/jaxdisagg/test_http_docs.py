"""docs/http-api.md names every error code and every metric, and no others."""

import re

import httpx
from repository import REPOSITORY

from jaxdisagg.router import create_router_app
from jaxdisagg.server import create_app, create_status_app

DOCS = (REPOSITORY / "docs" / "http-api.md").read_text()


def section(title: str) -> str:
    return DOCS.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """The cells of a table, without its two head lines."""
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def names(cell: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", cell))


def test_the_errors_are_those_of_the_sources():
    in_sources = set()
    for path in (REPOSITORY / "jaxdisagg").rglob("*.py"):
        for line in re.findall(r"code ?= ?(.+)", path.read_text()):
            in_sources |= set(re.findall(r'(?:^|else )"(\w+)"', line))
    table = rows(section("Errors"))
    assert set().union(*(names(row[0]) for row in table)) == in_sources
    assert all(re.fullmatch(r"\d{3}(, \d{3})*", row[1]) for row in table)


async def metrics_of(app) -> dict[str, str]:
    """The type of each metric by name."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        text = (await client.get("/metrics")).text
    found = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    return {name: kind for name, kind in found.items() if not name.endswith("_created")}


async def test_the_metrics_are_those_that_are_served(engine, tiny_tokenizer):
    apps = {
        "decode, mixed": create_app(engine, tiny_tokenizer),
        "router": create_router_app(),
        "all": create_status_app(dict, engine.ready),
    }
    served = {at: await metrics_of(app) for at, app in apps.items()}
    documented: dict[str, dict[str, str]] = {at: {} for at in apps}
    for name, kind, _labels, at, _text in rows(section("Metrics")):
        documented[at][name.strip("`")] = kind
    for at in ("decode, mixed", "router"):
        assert served[at] == documented[at] | documented["all"], at
    assert served["all"] == documented["all"]
