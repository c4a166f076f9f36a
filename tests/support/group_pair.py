"""Two nodes of several processes, connected as their messengers would, and what is moved."""

import numpy as np
from group_nodes import CONTEXT_BYTES, PAGES, SECONDS, Side, at_once, run_until

from ffi_transport.events import PeerConnected
from jaxdisagg.hello import NodeHello
from jaxdisagg.landings import Destination
from jaxdisagg.messages import decode_greeting, pack
from jaxdisagg.planned_request import PlannedRequest
from jaxdisagg.process_shares import ranks_of
from jaxdisagg.transfer_plan import CacheLayout, plan

TOKENS = 36  # of prompt; 35 are sent, in 3 pages of 16
TOTAL = TOKENS - 1


def gqa(tp=2, dp=1, heads=4):
    return CacheLayout("gqa", layers=2, kv_heads=heads, head_dim=8, page_size=16, itemsize=4,
                       tp=tp, dp=dp)  # fmt: skip


def mla(tp=2, dp=1):
    return CacheLayout("mla", layers=2, kv_heads=1, head_dim=24, page_size=16, itemsize=4,
                       tp=tp, dp=dp)  # fmt: skip


class Both:
    """A prefill side and a decode side, connected as the messengers would."""

    def __init__(self, source, destination, processes=(2, 2), *, link=True, **more):
        self.prefill = Side("prefill", source, processes[0], **more.get("prefill", {}))
        self.decode = Side("decode", destination, processes[1], **more.get("decode", {}))
        self.sides = (self.prefill, self.decode)
        self.steps = 0
        self.peer = self.at_prefill = None
        self.prefill.on_event = self._greet
        if link:
            self.connect()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        at_once([side.close for side in self.sides])

    def _greet(self, event):
        """What the prefill side's messenger does with who greets it."""
        if not isinstance(event, PeerConnected):
            self.prefill.events.append(event)
            return
        hello = decode_greeting(event.hello)
        if isinstance(hello, NodeHello):
            self.prefill.prefill.know(event.peer, hello, event.hello)
            self.at_prefill = event.peer
        else:
            self.prefill.prefill.member(0, event.peer, hello.node, hello.epoch, hello.process)

    def run_until(self, condition, what):
        run_until(self.sides, condition, what)

    def connect(self):
        """Returns once the prefill side knows all of the decode side's processes."""
        fabric = self.decode.decode
        peer = fabric.connect(self.prefill.address, SECONDS)
        links = fabric.link(peer, self.prefill.address, self.prefill.hello, SECONDS)
        fabric.admit(peer, self.prefill.hello, links)
        self.peer = peer
        self.run_until(self.whole, "all links stand")

    def whole(self):
        known = self.at_prefill in self.prefill.prefill._peers
        return known and self.prefill.prefill.missing(self.at_prefill) is None

    def request(self, seed=7, rank=0, dp_rank=0, **changes):
        values = {
            "rank": rank,
            "dp_rank": dp_rank,
            "seed": seed,
            "total": TOTAL,
            "source_pages": pack([3, 9, 4]),
            "destination_pages": pack([11, 2, 7]),
            "context_row": 1,
            "context": 2,
        }
        return PlannedRequest(**(values | changes))

    def expected(self, request):
        moves = plan(self.prefill.layout, self.decode.layout, request.seed)
        count = self.decode.hello.process_count
        return tuple(
            moves.expected_units(
                TOKENS,
                context=True,
                destination_ranks=ranks_of(self.decode.layout, request.dp_rank, process, count),
            )
            for process in range(count)
        )

    def arm(self, slot, expected, request=None):
        told = []
        request = request or self.request()
        where = Destination(request.dp_rank, request.destination_pages, request.context)
        self.decode.decode.arm(slot, expected, where, told.append)
        self.run_until(lambda: told, "the counters are armed")
        assert told == [None]

    def begin(self, request, slot=5):
        """Arm, open and file two chunks; their triggers have not fired."""
        expected = self.expected(request)
        self.arm(slot, expected, request)
        fabric = self.prefill.prefill
        transfer = fabric.open_transfer(self.at_prefill, slot, request)
        for begin, end in ((0, 20), (20, TOTAL)):
            self.steps += 1
            fabric.file_step(self.steps, [(transfer, begin, end)])
        return transfer, expected

    def fire_all(self, processes=None):
        self.filed(self.steps)
        for step in (self.steps - 1, self.steps):
            self.prefill.fire(step, processes)

    def filed(self, step):
        """Wait until every follower has filed the plan: a step comes behind it in its queue."""
        filed = self.prefill.group.filed
        self.run_until(lambda: all(number >= step for number in filed.values()), "plans are filed")


def content(layout, rank, layer, page):
    """A rank's part of a page: by which byte of the whole page each is, heads coming first."""
    shards = 1 if layout.kind == "mla" else min(layout.tp, layout.kv_heads)
    first = rank * shards // layout.tp * layout.shard_bytes
    ids = np.arange(first, first + layout.shard_bytes)
    return ((ids * 31 + layer * 7 + page * 101) % 251 + 1).astype(np.uint8)


def fill(side, dp_rank):
    for rank in range(side.layout.tp):
        ordinal = side.layout.ordinal(dp_rank, rank)
        for layer in range(side.layout.layers):
            for index, page in enumerate((3, 9, 4)):
                side.bytes(ordinal, layer)[page] = content(side.layout, rank, layer, index)
        side.bytes(ordinal, side.layout.layers)[1] = np.arange(1, CONTEXT_BYTES + 1)


def arrived(side, dp_rank):
    """Every byte of the request's pages is where it belongs, and no other byte was touched."""
    for ordinal in range(side.layout.devices):
        rank, mine = ordinal % side.layout.tp, ordinal // side.layout.tp == dp_rank
        for layer in range(side.layout.layers):
            wanted = np.zeros((PAGES, side.layout.shard_bytes), np.uint8)
            for index, page in enumerate((11, 2, 7) if mine else ()):
                wanted[page] = content(side.layout, rank, layer, index)
            np.testing.assert_array_equal(side.bytes(ordinal, layer), wanted)
        context = side.bytes(ordinal, side.layout.layers)
        assert context[2].tolist() == (list(range(1, CONTEXT_BYTES + 1)) if mine else [0] * 64)
        assert not np.delete(context, 2, axis=0).any()
