"""Immediate slots of a decode node (R2, R3): each names one request's writes while it lasts."""


class SlotAllocator:
    """Slots 0 .. 2**bits - 1, handed out in turn from a random start.

    A slot comes again only after all others had their turn, so an immediate that is late by less
    than that finds its slot unarmed and is dropped as stale.
    """

    def __init__(self, start: int, bits: int = 20) -> None:
        self._size = 1 << bits
        self._next = start % self._size
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        """How many slots can be taken."""
        return self._size - len(self._used)

    def take(self) -> int:
        """The next free slot. Raises RuntimeError when there is none."""
        if not self.free:
            raise RuntimeError(f"all {self._size} immediate slots are in use")
        while self._next in self._used:
            self._next = (self._next + 1) % self._size
        slot = self._next
        self._used.add(slot)
        self._next = (slot + 1) % self._size
        return slot

    def give(self, slot: int) -> None:
        """Return a slot that nothing can be written under any more."""
        self._used.remove(slot)
