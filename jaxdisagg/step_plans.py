"""What the triggers of a step post: a step's chunks as native page plans (M7, R1).

Only pages (or, where the two sides' pages differ in size, spans) that a chunk completes are sent, a
partly filled last one with the last chunk, so every byte is sent once. The context follows the last
chunk, one more unit for each device that decodes.
"""

from collections.abc import Mapping

import numpy as np

from ffi_transport.types import PageUnit, PlanWrite
from jaxdisagg.cache import PagedCache
from jaxdisagg.cache_layout import CacheLayout
from jaxdisagg.messages import unpack
from jaxdisagg.planned_request import PlannedRequest
from jaxdisagg.process_shares import process_of
from jaxdisagg.registration import RemoteCache
from jaxdisagg.transfer_plan import TransferPlan, plan


class StepPlanner:
    """Plans for the devices of a prefill node's cache that this process holds.

    `ordinals` are these devices' own numbers; `layers` counts the context buffer as one more.
    """

    def __init__(self, layout: CacheLayout, cache: PagedCache) -> None:
        self._layout = layout
        self._cache = cache
        self._ordinal = {shard.rank: shard.ordinal for shard in cache.shards() if shard.layer == 0}
        self.ordinals = tuple(self._ordinal.values())
        self.layers = len(cache.layers) + 1

    def writes_of(
        self,
        request: PlannedRequest,
        begin: int,
        end: int,
        remote: RemoteCache,
        transfers: Mapping[int, int],
    ) -> list[PlanWrite]:
        """The writes from this process that rows [begin, end) of a request release.

        `transfers` holds the native transfer to each process of the decode node; where there is
        none, nothing is left to write.
        """
        transfer_plan = plan(self._layout, remote.hello.layout, request.seed)
        writes = self._pages(transfer_plan, request, remote, transfers, begin, end)
        if end == request.total and request.context is not None:
            writes += self._contexts(transfer_plan, request, remote, transfers, request.context)
        return writes

    def _way(
        self,
        request: PlannedRequest,
        remote: RemoteCache,
        transfers: Mapping[int, int],
        source_rank: int,
        destination_rank: int,
    ) -> tuple[int, int] | None:
        """Ordinal and transfer of what goes from one tp rank to another, if it goes from here."""
        ordinal = self._ordinal.get(self._layout.ordinal(request.rank, source_rank))
        layout = remote.hello.layout
        destination = layout.ordinal(request.dp_rank, destination_rank)
        process = process_of(destination, layout.devices, remote.hello.process_count)
        transfer = transfers.get(process)
        return None if ordinal is None or transfer is None else (ordinal, transfer)

    def _pages(
        self,
        transfer_plan: TransferPlan,
        request: PlannedRequest,
        remote: RemoteCache,
        transfers: Mapping[int, int],
        begin: int,
        end: int,
    ) -> list[PlanWrite]:
        source, destination = transfer_plan.source, transfer_plan.destination
        pages = unpack(request.source_pages), unpack(request.destination_pages)
        spans = transfer_plan.spans
        writes = []
        for span, units in zip(spans.spans, transfer_plan.units_by_span, strict=True):
            periods = spans.completed(span, begin, end, request.total)
            if not periods:
                continue
            source_pages, destination_pages = spans.pages_of(span, periods, *pages)
            for unit in units:
                way = self._way(request, remote, transfers, unit.source_rank, unit.destination_rank)
                if way is None:
                    continue
                ordinal, transfer = way
                write = PlanWrite(
                    transfer=transfer,
                    ordinal=ordinal,
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
                    remotes=remote.layers(request.dp_rank, unit.destination_rank),
                )
                writes.append(write)
        return writes

    def _contexts(
        self,
        transfer_plan: TransferPlan,
        request: PlannedRequest,
        remote: RemoteCache,
        transfers: Mapping[int, int],
        buffer: int,
    ) -> list[PlanWrite]:
        """A write of one unit to each tp rank: the hidden state of the last prefilled token.

        It follows the last layer. Every rank gets one, since each runs the MTP module on its own.
        """
        writes = []
        for rank, origin in enumerate(transfer_plan.context_sources):
            way = self._way(request, remote, transfers, origin, rank)
            if way is None:
                continue
            ordinal, transfer = way
            region, buffers = remote.context(request.dp_rank, rank)
            write = PlanWrite(
                transfer=transfer,
                ordinal=ordinal,
                first_layer=self.layers - 1,
                layers=1,
                source_pages=np.array([request.context_row], np.uint32),
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
