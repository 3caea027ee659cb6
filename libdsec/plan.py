"""Pure parts of a create: cutting a burst into slices, and deciding what each piece of news means.

A single create is a burst of one. The client's word decides: the first Edge that accepts an index is claimed, any other that
accepts the same index is dropped (dsec/bus/messages.py tells the whole flow).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from dsec.bus import codec
from dsec.bus.messages import BurstNews, CreateItem
from dsec.errors import DsecError, InvalidRequest, from_body
from dsec.model import LayerRef, SandboxId, SandboxSpec
from libdsec.spec import whole

SLICE_BYTES = 400_000
SLICE_SPECS = 4_000  # a worker's way to the bus takes no more at once
BURST_LIMIT = 1_000_000


class Slice(msgspec.Struct, frozen=True):
    """What one `CreateRequest` carries."""

    specs: tuple[SandboxSpec, ...]
    items: tuple[CreateItem, ...]


def expand(spec: SandboxSpec | Sequence[SandboxSpec], n: int | None) -> list[SandboxSpec]:
    """The spec of every index. One spec is repeated ``n`` times; a list stands for itself and ``n`` may only repeat its length."""
    if isinstance(spec, SandboxSpec):
        count = 1 if n is None else n
        return [spec] * whole(count, "n", 1, BURST_LIMIT)
    specs = list(spec)
    for at, item in enumerate(specs):
        if not isinstance(item, SandboxSpec):
            raise InvalidRequest("is not a spec", field=f"specs[{at}]", value=item, fix="make it with libdsec.spec(image, …)")
    if not 1 <= len(specs) <= BURST_LIMIT:
        raise InvalidRequest("is out of range", field="specs", value=str(len(specs)), fix="give at least one spec")
    if n is not None and n != len(specs):
        raise InvalidRequest(f"differs from the number of specs, {len(specs)}", field="n", value=n, fix="leave it out, or give one spec")
    return specs


def slices(specs: Sequence[SandboxSpec], indices: Sequence[int] | None = None, limit: int = SLICE_BYTES) -> Iterator[Slice]:
    """Cut ``specs`` (by index) into messages below ``limit`` bytes; equal specs travel once a slice, runs of them are counted."""
    wanted = range(len(specs)) if indices is None else indices
    keys: dict[int, bytes] = {}  # id(spec) -> encoded: the same object is encoded once
    table: dict[bytes, int] = {}
    chosen: list[SandboxSpec] = []
    items: list[list[int]] = []  # spec, first, count
    used = 0
    for index in wanted:
        spec = specs[index]
        key = keys.get(id(spec))
        if key is None:
            key = keys[id(spec)] = codec.encode(spec)
            if len(key) > limit:
                raise InvalidRequest(f"is {len(key)} bytes long, more than {limit}", field="spec", fix="put large values into files")
        number = table.get(key)
        cost = 24 + (len(key) if number is None else 0)
        if items and (used + cost > limit or (number is None and len(chosen) >= SLICE_SPECS)):
            yield Slice(tuple(chosen), tuple(CreateItem(spec=s, first=f, count=c) for s, f, c in items))
            table, chosen, items, used, number = {}, [], [], 0, None
            cost = 24 + len(key)
        if number is None:
            number = table[key] = len(chosen)
            chosen.append(spec)
        last = items[-1] if items else None
        if last is not None and last[0] == number and last[1] + last[2] == index:
            last[2] += 1
        else:
            items.append([number, index, 1])
            used += cost
    if items:
        yield Slice(tuple(chosen), tuple(CreateItem(spec=s, first=f, count=c) for s, f, c in items))


class Ready(msgspec.Struct, frozen=True):
    index: int
    id: SandboxId
    layers: tuple[LayerRef, ...] = ()
    degraded: tuple[str, ...] = ()


class Meaning(msgspec.Struct):
    """What news ask the client to do."""

    claims: list[SandboxId] = []
    drops: list[SandboxId] = []
    ready: list[Ready] = []
    failed: list[int] = []


class Ledger:
    """Where each index of a burst stands. Every index settles once: ready or failed."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.owner: list[SandboxId | None] = [None] * n
        self.ready: dict[int, Ready] = {}
        self.errors: dict[int, DsecError] = {}
        self.spent: set[SandboxId] = set()  # failed, and their index was placed again: nothing is heard of them any more
        self.closed = False  # cancelled, or past its deadline: whatever still arrives is dropped

    @property
    def settled(self) -> bool:
        return len(self.ready) + len(self.errors) >= self.n

    @property
    def ahead(self) -> int:
        """How many can still become ready, those that are included."""
        return self.n - len(self.errors)

    def pending(self) -> list[int]:
        return [index for index in range(self.n) if index not in self.ready and index not in self.errors]

    def unplaced(self) -> list[int]:
        return [index for index in self.pending() if self.owner[index] is None]

    def take(self, news: BurstNews) -> Meaning:
        meaning = Meaning()
        for placed in news.accepted:
            self._accept(placed.index, SandboxId(news.edge, placed.ulid), meaning)
        for item in news.ready:
            sandbox = SandboxId(news.edge, item.ulid)
            if self._accept(item.index, sandbox, meaning) and item.index not in self.ready:
                ready = self.ready[item.index] = Ready(item.index, sandbox, item.layers, item.degraded)
                meaning.ready.append(ready)
        for failure in news.failed:
            self._fail(failure.index, SandboxId(news.edge, failure.ulid) if failure.ulid else None, from_body(failure.error), meaning)
        return meaning

    def _accept(self, index: int, sandbox: SandboxId, meaning: Meaning) -> bool:
        """Whether this sandbox is the one for its index."""
        if not 0 <= index < self.n:
            meaning.drops.append(sandbox)
            return False
        if sandbox in self.spent:
            return False
        owner = self.owner[index]
        if owner == sandbox:
            if index in self.errors:
                meaning.drops.append(sandbox)
                return False
            return True
        if owner is not None or self.closed or index in self.errors:
            meaning.drops.append(sandbox)
            return False
        self.owner[index] = sandbox
        meaning.claims.append(sandbox)
        return True

    def _fail(self, index: int, sandbox: SandboxId | None, error: DsecError, meaning: Meaning) -> None:
        if not 0 <= index < self.n or index in self.errors or index in self.ready or sandbox in self.spent:
            return
        owner = self.owner[index]
        # A refusal or the failure of a competitor says nothing about the one that holds the index.
        if owner is not None and owner != sandbox:
            return
        if sandbox is not None and not error.sandbox:
            error.sandbox = str(sandbox)
        self.errors[index] = error
        meaning.failed.append(index)

    def reopen(self, index: int) -> SandboxId | None:
        """A failed index is wanted all the same. Returns the sandbox that failed."""
        del self.errors[index]
        owner, self.owner[index] = self.owner[index], None
        if owner is not None:
            self.spent.add(owner)
        return owner

    def close(self, error: DsecError) -> list[SandboxId]:
        """Nothing more is wanted: unsettled indices fail with ``error``. Returns the sandboxes to drop, the ready ones not among them."""
        self.closed = True
        late = []
        for index in self.pending():
            self.errors[index] = error
            owner = self.owner[index]
            if owner is not None:
                late.append(owner)
        return late


def ranges(indices: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending indices as (first, how many)."""
    found: list[tuple[int, int]] = []
    for index in indices:
        if found and index == found[-1][0] + found[-1][1]:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((index, 1))
    return found
