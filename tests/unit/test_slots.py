"""The numbers that live sandboxes hold, and the promise of who has which next."""

from __future__ import annotations

from dsec.actors.intake import Slots


def test_the_next_ones_take_what_was_promised() -> None:
    """In this order, whatever is given back meanwhile; and nobody else is given it."""
    slots = Slots()
    assert slots.take() == 0
    assert slots.upcoming(2) == (1, 2)
    slots.give_back(0)
    assert slots.upcoming(1) == (1,)
    assert [slots.take() for _ in range(4)] == [1, 2, 0, 3]


def test_a_number_is_used_again() -> None:
    """With promises all the time numbers stay as small as the sandboxes are few."""
    slots = Slots()
    seen = set()
    for _ in range(50):
        slot = slots.take()
        seen.add(slot)
        slots.upcoming(2)
        slots.give_back(slot)
    assert seen == {0, 1, 2}
