"""What a request's page writes follow from; a process that plans needs nothing else of it."""

import msgspec


class PlannedRequest(msgspec.Struct, frozen=True, array_like=True):
    """What a request's writes follow from, beside its chunks; each process of the node gets it.

    It lies on dp rank `rank` here and `dp_rank` there, and `total` of its rows are sent. Pages are
    packed uint32 in the order of the tokens. `context_row` is its row of the context buffer here,
    `context` the buffer lent to it there, if it wants one.
    """

    rank: int
    dp_rank: int
    seed: int
    total: int
    source_pages: bytes
    destination_pages: bytes
    context_row: int
    context: int | None
