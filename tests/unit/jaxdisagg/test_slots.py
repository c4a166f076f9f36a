"""Immediate slots are handed out in turn, so that a late immediate finds its slot unarmed."""

import pytest

from jaxdisagg.slots import SlotAllocator


def test_slots_wrap_and_skip_those_in_use():
    slots = SlotAllocator(start=6, bits=3)
    assert [slots.take() for _ in range(3)] == [6, 7, 0]
    slots.give(7)
    assert [slots.take() for _ in range(5)] == [1, 2, 3, 4, 5]
    assert slots.take() == 7
    assert slots.free == 0
    with pytest.raises(RuntimeError, match="all 8 immediate slots"):
        slots.take()


def test_a_freed_slot_is_the_last_to_come_again():
    slots = SlotAllocator(start=0, bits=3)
    first = slots.take()
    slots.give(first)
    later = []
    for _ in range(8):
        later.append(slots.take())
        slots.give(later[-1])
    assert later[-1] == first
    assert first not in later[:-1]


def test_a_slot_that_is_not_taken_cannot_be_given():
    with pytest.raises(KeyError):
        SlotAllocator(start=0, bits=3).give(1)
