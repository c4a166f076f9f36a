"""What the triggers of a step post: a step's chunks as native page plans (M7, R1).

Only pages that a chunk completes are sent, a partly filled last one with the last chunk, so every
byte is sent once. The context follows the last chunk, one more unit for each device that decodes.
"""

from typing import TYPE_CHECKING

import numpy as np

from ffi_transport.types import PageUnit, PlanWrite
from jaxdisagg.cache import PagedCache
from jaxdisagg.registration import RemoteCache
from jaxdisagg.scheduler import Chunk
from jaxdisagg.transfer_plan import CacheLayout, TransferPlan, plan

if TYPE_CHECKING:
    from jaxdisagg.prefill_node import PrefillRequest


class StepPlanner:
    """Plans for one prefill node's cache; `layers` counts the context buffer as one more."""

    def __init__(self, layout: CacheLayout, cache: PagedCache) -> None:
        self._layout = layout
        self._cache = cache
        self._ordinal = {shard.rank: shard.ordinal for shard in cache.shards() if shard.layer == 0}
        self.ordinals = tuple(self._ordinal.values())
        self.layers = len(cache.layers) + 1

    def writes_of(
        self, chunk: Chunk, request: "PrefillRequest", remote: RemoteCache
    ) -> list[PlanWrite]:
        """The writes that a chunk of a request, whose pages and transfer are there, releases."""
        transfer_plan = plan(self._layout, remote.hello.layout, request.message.seed)
        pages = transfer_plan.chunk_pages(chunk.begin, chunk.end, chunk.job.total)
        writes = self._pages(transfer_plan, request, remote, pages) if pages else []
        if chunk.last and request.message.context is not None:
            writes += self._contexts(transfer_plan, request, remote, request.message.context)
        return writes

    def _pages(
        self,
        transfer_plan: TransferPlan,
        request: "PrefillRequest",
        remote: RemoteCache,
        pages: range,
    ) -> list[PlanWrite]:
        assert request.lease is not None
        assert request.transfer is not None
        message = request.message
        source, destination = transfer_plan.source, transfer_plan.destination
        source_pages = request.lease.pages[pages.start : pages.stop]
        destination_pages = message.page_ids()[pages.start : pages.stop]
        return [
            PlanWrite(
                transfer=request.transfer,
                ordinal=self._ordinal[source.ordinal(request.rank, unit.source_rank)],
                first_layer=0,
                layers=source.layers,
                source_pages=source_pages,
                destination_pages=destination_pages,
                unit=PageUnit(
                    source_page_bytes=source.shard_bytes,
                    source_offset=unit.source_offset,
                    destination_page_bytes=destination.shard_bytes,
                    destination_offset=unit.destination_offset,
                    length=unit.length,
                ),
                remotes=remote.layers(message.dp_rank, unit.destination_rank),
            )
            for unit in transfer_plan.units
        ]

    def _contexts(
        self,
        transfer_plan: TransferPlan,
        request: "PrefillRequest",
        remote: RemoteCache,
        buffer: int,
    ) -> list[PlanWrite]:
        """A write of one unit to each tp rank: the hidden state of the last prefilled token.

        It follows the last layer. Every rank gets one, since each runs the MTP module on its own.
        """
        assert request.transfer is not None
        writes = []
        for rank, origin in enumerate(transfer_plan.context_sources):
            region, buffers = remote.context(request.message.dp_rank, rank)
            write = PlanWrite(
                transfer=request.transfer,
                ordinal=self._ordinal[self._layout.ordinal(request.rank, origin)],
                first_layer=self.layers - 1,
                layers=1,
                source_pages=np.array([request.context], np.uint32),
                destination_pages=np.array([buffer], np.uint32),
                unit=PageUnit(
                    source_page_bytes=self._cache.context_bytes,
                    source_offset=0,
                    destination_page_bytes=buffers.buffer_bytes,
                    destination_offset=0,
                    length=buffers.buffer_bytes,
                ),
                remotes=(region,),
            )
            writes.append(write)
        return writes
