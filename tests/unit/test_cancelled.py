"""The memory of creates that were given up."""

from __future__ import annotations

from dsec.actors.cancelled import Cancelled
from libdsec.plan import ranges

ME = ("local", "default")


def test_ranges_say_the_same_as_their_indices() -> None:
    """Ascending indices become runs."""
    assert ranges([]) == []
    assert ranges([3]) == [(3, 1)]
    assert ranges([0, 1, 2, 5, 7, 8]) == [(0, 3), (5, 1), (7, 2)]


def test_only_what_was_named_is_cancelled() -> None:
    """The owner, the burst and the index; what was cancelled before stays so."""
    given_up = Cancelled()
    given_up.add(ME, "b", ranges([0, 1, 2, 5, 7, 8]), 0.0)
    assert [index for index in range(11) if given_up.has(ME, "b", index)] == [0, 1, 2, 5, 7, 8]
    assert not given_up.has(ME, "c", 0)
    assert not given_up.has(("local", "other"), "b", 0)
    given_up.add(ME, "b", [(3, 1)], 1.0)
    given_up.add(ME, "b", [(3, 1)], 1.0)
    assert [index for index in range(11) if given_up.has(ME, "b", index)] == [0, 1, 2, 3, 5, 7, 8]


def test_it_forgets_by_age_and_number() -> None:
    """Neither time nor callers make it grow without bound."""
    given_up = Cancelled(keep=10.0, limit=3)
    for number in range(5):
        given_up.add(ME, f"b{number}", [(0, 1)], float(number))
    assert [given_up.has(ME, f"b{number}", 0) for number in range(5)] == [False, False, True, True, True]
    given_up.add(ME, "late", [(0, 1)], 100.0)
    assert len(given_up) == 1
