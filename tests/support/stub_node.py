"""A mixed node without a model, as a process: `python stub_node.py TOKENIZER_FOLDER ROUTER_URL`.

It answers every request with "h", prints its URL and announces itself, until it is killed.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

from jaxdisagg.announce import Announcer, NodeInfo
from jaxdisagg.api import EngineInfo, GenerationRequest, TokenOutput
from jaxdisagg.server import HttpServer, bind, create_app
from jaxdisagg.tokenizer import Tokenizer


class StubEngine:
    """An `api.Engine`."""

    info = EngineInfo("tiny", 262, 100, 5, "mixed")

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenOutput]:
        yield TokenOutput(ord("h"), finish_reason="length")

    def finish(self, request_id: str) -> None:
        pass

    def timing(self, request_id: str) -> None:
        return None

    def ready(self) -> tuple[bool, str]:
        return True, ""

    def state(self) -> dict[str, int]:
        return {}


async def main(folder: Path, router: str) -> None:
    server = HttpServer(
        create_app(StubEngine(), Tokenizer.from_folder(folder)), bind("127.0.0.1", 0)
    )
    await server.start()
    url = "http://{}:{}".format(*server.address)
    print(url, flush=True)
    info = NodeInfo(id="n0", role="mixed", model="tiny", url=url)
    Announcer(router, lambda: info).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
