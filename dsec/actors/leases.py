"""Leases of an Edge: a client's renewed claim on its sandboxes. Pure; times are monotonic seconds.

A lease belongs to a job and outlives a connection. While the bus is away no lease can be renewed, so the clocks stop, and a whole
lease of grace follows when it is back. What no lease ever names is reaped after its own time (a client that died between asking and
learning the answer, or a second answer of a repeated create).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Held(msgspec.Struct):
    """One lease on this Edge. ``expires`` is 0 while its clock stands still."""

    id: str
    owner: tuple[str, str]  # principal, project
    ttl: float
    expires: float
    seq: int = 0
    members: set[str] = set()  # ulids that belong to it
    unclaimed: dict[str, float] = {}  # of those, never named by the client yet: ulid -> when it is reaped


class Renewed(msgspec.Struct, frozen=True):
    """What a renewal means: ``stop`` what was dropped, ``unknown`` was claimed and is not here."""

    stop: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    held: int = 0


class Leases:
    def __init__(self, unclaimed: float) -> None:
        self._unclaimed = unclaimed
        self.held: dict[str, Held] = {}
        self.of: dict[str, str] = {}  # ulid -> lease
        self._away_since = 0.0

    def add(self, lease: str, owner: tuple[str, str], ttl: float, ulid: str, now: float, claimed: bool = False) -> bool:
        """A sandbox was accepted for ``lease``; False when that id is somebody else's. Repeats change nothing."""
        entry = self.held.get(lease)
        if entry is None:
            entry = self.held[lease] = Held(id=lease, owner=owner, ttl=ttl, expires=now + ttl)
        elif entry.owner != owner:
            return False
        elif not entry.members:
            # An empty lease has no clock worth keeping: its first member begins it anew.
            entry.ttl, entry.expires = ttl, now + ttl
        if ulid not in entry.members:
            entry.members.add(ulid)
            self.of[ulid] = lease
            if not claimed:
                entry.unclaimed[ulid] = now + max(self._unclaimed, ttl)
        return True

    def remove(self, ulid: str) -> None:
        """It has stopped; the lease holds it no more."""
        lease = self.of.pop(ulid, "")
        entry = self.held.get(lease)
        if entry is not None:
            entry.members.discard(ulid)
            entry.unclaimed.pop(ulid, None)
            if not entry.members:
                del self.held[lease]

    def renew(
        self, lease: str, owner: tuple[str, str], ttl: float, seq: int, claims: Iterable[str], drops: Iterable[str], end: bool, now: float
    ) -> Renewed:
        """The client lives. Out-of-order renewals (lower ``seq``) still renew, and their deltas are still true: claims and drops
        only add up. Claims and drops of another owner's sandboxes count as unknown."""
        entry = self.held.get(lease)
        if entry is None or entry.owner != owner:
            return Renewed(unknown=tuple(claims))
        entry.ttl, entry.seq = ttl, max(entry.seq, seq)
        entry.expires = now + ttl
        stop = [ulid for ulid in drops if ulid in entry.members]
        unknown = []
        for ulid in claims:
            if ulid in entry.members:
                entry.unclaimed.pop(ulid, None)
            else:
                unknown.append(ulid)
        if end:
            stop = list(entry.members)
        return Renewed(stop=tuple(stop), unknown=tuple(unknown), held=len(entry.members))

    def away(self, now: float) -> None:
        """The bus is gone: clocks stop."""
        if not self._away_since:
            self._away_since = now

    def back(self, now: float) -> None:
        """The bus is there again: every lease gets one whole period."""
        self._away_since = 0.0
        for entry in self.held.values():
            entry.expires = now + entry.ttl
            for ulid in entry.unclaimed:
                entry.unclaimed[ulid] = now + max(self._unclaimed, entry.ttl)

    def due(self, now: float) -> bool:
        """Whether `expired` would name any, were the clocks running."""
        return any(now >= entry.expires or any(now >= at for at in entry.unclaimed.values()) for entry in self.held.values())

    def expired(self, now: float) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(ulids whose lease lapsed, ulids that no lease ever named). They stay members until `remove`, but are told once a lapse."""
        if self._away_since:
            return (), ()
        lapsed: list[str] = []
        orphans: list[str] = []
        for entry in self.held.values():
            if now >= entry.expires:
                lapsed += entry.members
                entry.expires = now + entry.ttl  # told again a lease later, should stopping them hang
                continue
            due = [ulid for ulid, at in entry.unclaimed.items() if now >= at]
            for ulid in due:
                entry.unclaimed[ulid] = now + entry.ttl
            orphans += due
        return tuple(lapsed), tuple(orphans)
