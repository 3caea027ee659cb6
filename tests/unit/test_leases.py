"""Leases: claims, drops, expiry, and what a bus outage does to them."""

from __future__ import annotations

from dsec.actors.leases import Leases

ME = ("me", "p")


def held(*ulids: str, ttl: float = 30.0) -> Leases:
    leases = Leases(unclaimed=60.0)
    for ulid in ulids:
        leases.add("L", ME, ttl, ulid, 0.0)
    return leases


def test_c01_a_lapsed_lease_gives_up_all_that_it_held() -> None:
    """When renewals stop, everything of the lease is told as lapsed, once a period."""
    leases = held("a", "b")
    leases.renew("L", ME, 30, 1, ["a", "b"], [], False, 10.0)
    assert leases.expired(39.0) == ((), ())
    assert set(leases.expired(40.0)[0]) == {"a", "b"}
    assert leases.expired(41.0) == ((), ())


def test_what_no_lease_ever_names_is_reaped() -> None:
    """A second answer of a repeated create is never claimed, and goes while the lease lives on."""
    leases = held("a", "b")
    for now in (10.0, 30.0, 50.0):
        leases.renew("L", ME, 30, 1, ["a"], [], False, now)
    assert leases.expired(59.0) == ((), ())
    assert leases.expired(60.0) == ((), ("b",))


def test_drops_are_stopped_and_unknown_claims_are_told() -> None:
    """A renewal answers what it dropped here and what this node does not have."""
    renewed = held("a", "b").renew("L", ME, 30, 1, ["a", "x"], ["b", "y"], False, 1.0)
    assert renewed.stop == ("b",)
    assert renewed.unknown == ("x",)
    assert renewed.held == 2


def test_a_lease_belongs_to_its_owner() -> None:
    """Somebody else's renewal, claim or drop does nothing."""
    leases = held("a")
    assert leases.renew("L", ("you", "p"), 30, 1, ["a"], ["a"], True, 29.0).unknown == ("a",)
    assert leases.expired(31.0)[0] == ("a",)
    assert not leases.add("L", ("you", "p"), 30, "z", 0.0)


def test_clocks_stand_still_while_the_bus_is_away_and_a_whole_lease_follows() -> None:
    """An outage of any length costs no sandbox."""
    leases = held("a")
    leases.away(5.0)
    assert leases.expired(10_000.0) == ((), ())
    leases.back(10_000.0)
    assert leases.expired(10_029.0) == ((), ())
    assert leases.expired(10_030.0)[0] == ("a",)


def test_an_end_gives_up_everything_at_once() -> None:
    """``end`` names all members."""
    assert set(held("a", "b").renew("L", ME, 30, 1, [], [], True, 1.0).stop) == {"a", "b"}


def test_an_empty_lease_is_forgotten() -> None:
    """When its last sandbox has stopped there is nothing to keep."""
    leases = held("a")
    leases.remove("a")
    assert not leases.held
    assert leases.expired(1000.0) == ((), ())
