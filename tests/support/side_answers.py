"""What a mesh_side.py process answers about a request: its tokens, and what its pages held."""

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
from page_tap import Taken

from jaxdisagg.api import GenerationRequest, RequestError
from jaxdisagg.decode_node import DecodeNode


async def answer_to(
    node: DecodeNode, order: GenerationRequest, leave: float | None
) -> dict[str, Any]:
    """The answer to a prompt, or the error that it got, if the client did not leave before."""
    tokens, logprobs, gaps = [], [], []
    try:
        async with asyncio.timeout(leave), aclosing(node.generate(order)) as outputs:
            async for output in outputs:
                tokens.append(output.token)
                logprobs.append(output.logprob)
                gaps.append(output.top[0][1] - output.top[1][1])
    except RequestError as error:
        return {"id": order.id, "status": error.status, "error": str(error)}
    except TimeoutError:
        return {"id": order.id, "left": True}
    return {"id": order.id, "tokens": tokens, "logprobs": logprobs, "gap": min(gaps)}


def described(taken: Taken, node: str, folder: str | None) -> dict[str, Any]:
    file = None
    if folder is not None:
        file = str(Path(folder) / f"{node}-{taken.attempt}.npz")
        np.savez(file, rows=taken.rows, contexts=taken.contexts)
    return {
        "request": taken.request,
        "attempt": taken.attempt,
        "dp_rank": taken.dp_rank,
        "pages": taken.pages.tolist(),
        "fresh": taken.fresh.tolist(),
        "checksums": taken.checksums(),
        "contexts": taken.context_checksums(),
        "file": file,
    }
