"""When an Edge must ask whether it has been declared lost, and what a lease's end needs."""

from __future__ import annotations

from dsec.actors.leases import Leases
from dsec.actors.standing import Touch


def test_in_touch_there_is_no_doubt() -> None:
    """Pings that are answered keep it away for ever."""
    touch = Touch(trust=10.0, now=0.0)
    for now in range(5, 500, 5):
        assert not touch.proved(now - 0.1, now)
        assert not touch.doubtful(now + 4.0)


def test_a_silence_is_a_doubt_until_the_fence_was_read() -> None:
    """It begins by itself, and an answer that comes at last does not end it: what happened meanwhile is not known."""
    touch = Touch(trust=10.0, now=0.0)
    assert not touch.doubtful(10.0)
    assert touch.doubtful(10.1)
    assert touch.proved(12.0, 12.1)
    assert touch.doubtful(12.2)
    touch.cleared(12.2)
    assert not touch.doubtful(22.0)
    assert touch.doubtful(22.3)


def test_an_answer_proves_what_was_sent_and_not_more() -> None:
    """An answer that came late shows that we were heard when we asked; and a late one takes nothing back."""
    touch = Touch(trust=10.0, now=0.0)
    assert not touch.proved(1.0, 9.0)
    assert touch.doubtful(11.1)
    touch = Touch(trust=10.0, now=0.0)
    touch.proved(5.0, 5.1)
    touch.proved(4.0, 5.2)
    assert not touch.doubtful(15.0)


def test_who_is_told_doubts() -> None:
    """A Watcher's word is enough."""
    touch = Touch(trust=10.0, now=0.0)
    touch.doubt()
    assert touch.doubtful(0.1)


def test_an_end_of_a_lease_is_seen_before_it_is_told() -> None:
    """`due` changes nothing: whether the bus is there can be asked in between, and the lease goes on where it is not."""
    leases = Leases(unclaimed=60.0)
    leases.add("L", ("me", "p"), 30.0, "a", 0.0)
    leases.renew("L", ("me", "p"), 30, 1, ["a"], [], False, 1.0)
    assert not leases.due(30.9)
    assert leases.due(31.0)
    leases.away(31.0)
    leases.back(40.0)
    assert not leases.due(69.0)
    assert leases.due(70.0)
    assert leases.expired(70.0)[0] == ("a",)
