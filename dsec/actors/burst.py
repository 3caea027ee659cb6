"""The Scheduler's bookkeeping of a burst: slices, batches for Edges, what was refused, and one deadline for all of it. Pure.

A slice lives until each of its sandboxes was accepted by an Edge or has failed. A refused one is placed again until the deadline of the
whole create; one whose outcome is unknown (the Edge did not answer) is asked about again at the *same* Edge, never placed on another,
unless that Edge was declared lost.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from dsec.actors.placement import Requirement, Unplaced
from dsec.bus.messages import CreateItem, Failed, LaunchItem, Lease, Refusal
from dsec.errors import Busy, DeadlineExceeded, DsecError, ErrorBody, InvalidRequest, NodeError, Unavailable, Unsupported
from dsec.model import GIB

ITEM_BYTES = 24  # one LaunchItem as msgpack, at most
ITEMS_AT_ONCE = 2_000  # in one message: were all refused, their errors must fit one answer


class Batch(msgspec.Struct, frozen=True):
    """What goes to one Edge in one message: its own specs, its items numbered by them."""

    edge: str
    specs: tuple[msgspec.Raw, ...]
    items: tuple[LaunchItem, ...]
    pairs: tuple[tuple[int, int], ...]  # (index, spec of the slice), to place again what is refused


def batches(edge: str, pairs: Sequence[tuple[int, int]], specs: Sequence[msgspec.Raw], limit: int) -> Iterator[Batch]:
    """Cut one Edge's share of a slice into messages below ``limit`` bytes; a spec is sent once in each."""
    chosen: dict[int, int] = {}
    raws: list[msgspec.Raw] = []
    items: list[LaunchItem] = []
    part: list[tuple[int, int]] = []
    size = 0
    for pair in pairs:
        index, spec = pair
        more = ITEM_BYTES + (0 if spec in chosen else len(memoryview(specs[spec])))
        if part and (size + more > limit or len(part) >= ITEMS_AT_ONCE):
            yield Batch(edge, tuple(raws), tuple(items), tuple(part))
            chosen, raws, items, part, size = {}, [], [], [], 0
            more = ITEM_BYTES + len(memoryview(specs[spec]))
        size += more
        at = chosen.get(spec)
        if at is None:
            at = chosen[spec] = len(raws)
            raws.append(specs[spec])
        items.append(LaunchItem(index=index, spec=at))
        part.append(pair)
    if part:
        yield Batch(edge, tuple(raws), tuple(items), tuple(part))


def check_items(specs: int, items: Sequence[CreateItem], most: int = 100_000) -> int:
    """How many sandboxes the items ask for. Raises `InvalidRequest` for spec numbers and counts that cannot be."""
    total = 0
    for item in items:
        if not 0 <= item.spec < specs:
            raise InvalidRequest("names a spec that the request does not have", field="items.spec", value=item.spec)
        if item.count < 1 or item.first < 0:
            raise InvalidRequest("must count at least one sandbox", field="items.count", value=item.count)
        if item.first + item.count > 1 << 31:
            raise InvalidRequest("numbers sandboxes beyond 2**31", field="items.first", value=item.first)
        total += item.count
    if not 1 <= total <= most:
        raise InvalidRequest(f"a slice holds 1 to {most} sandboxes", field="items", value=total)
    return total


class Slice:
    """One slice of a burst on its way. ``deadline`` is monotonic."""

    def __init__(
        self,
        burst: str,
        number: int,
        *,
        principal: str,
        project: str,
        specs: Sequence[msgspec.Raw],
        needs: Sequence[Requirement],
        items: Sequence[CreateItem],
        inbox: str,
        deadline: float,
        lease: Lease | None,
    ) -> None:
        self.burst, self.number, self.principal, self.project = burst, number, principal, project
        self.specs, self.needs, self.items, self.inbox, self.deadline, self.lease = specs, needs, items, inbox, deadline, lease
        self.waiting: list[CreateItem] = list(items)  # to be placed, as runs
        self.size = 2048 + sum(len(memoryview(raw)) + 256 for raw in specs) + 160 * sum(item.count for item in items)  # bytes, about
        self.out: set[int] = set()  # sent to an Edge, no answer yet
        self.where: dict[str, list[tuple[int, int]]] = {}  # Edge -> what it accepted
        self.failed: dict[int, Failed] = {}
        self.why: dict[int, ErrorBody] = {}  # the last refusal of each that still waits
        self.told: set[int] = set()  # of those, the ones whose refusal is an Edge's
        self.without: dict[int, frozenset[str]] = {}  # Edges that lack what it needs (a layer)
        self.attempt = 0
        self.repeated = False  # it came once more while it was not settled
        self.tell_at = 0.0  # when the caller hears next what it waits for

    @property
    def settled(self) -> bool:
        return not self.waiting and not self.out

    def is_same(self, specs: Sequence[msgspec.Raw], items: Sequence[CreateItem]) -> bool:
        """Whether this is the request that made it, once more (remaining time and inbox may differ)."""
        return list(specs) == list(self.specs) and list(items) == list(self.items)

    def groups(self) -> dict[frozenset[str], list[CreateItem]]:
        """What waits, by the Edges that must not be asked again; empties `waiting`."""
        if not self.without:
            waiting, self.waiting = self.waiting, []
            return {frozenset(): waiting} if waiting else {}
        answer: dict[frozenset[str], list[CreateItem]] = {}
        for item in self.waiting:
            if item.count == 1:
                answer.setdefault(self.without.get(item.first, frozenset()), []).append(item)
                continue
            for index in range(item.first, item.first + item.count):
                answer.setdefault(self.without.get(index, frozenset()), []).append(CreateItem(spec=item.spec, first=index))
        self.waiting = []
        return answer

    def sent(self, batch: Batch) -> None:
        self.out.update(index for index, _ in batch.pairs)

    def accepted(self, batch: Batch, indices: Sequence[int]) -> None:
        self.out.difference_update(indices)
        if len(indices) == len(batch.pairs):
            self.where.setdefault(batch.edge, []).extend(batch.pairs)
        else:
            taken = set(indices)
            self.where.setdefault(batch.edge, []).extend(pair for pair in batch.pairs if pair[0] in taken)
        for index in indices:
            self.why.pop(index, None)

    def refused(self, batch: Batch, refusals: Sequence[Refusal]) -> list[Failed]:
        """Refusals of an Edge: final ones fail (answered), the others wait to be placed again."""
        specs = dict(batch.pairs)
        failed = []
        for refusal in refusals:
            index = refusal.index
            if index not in specs:
                continue
            self.out.discard(index)
            if refusal.final:
                failed.append(self._fail(index, refusal.error))
                continue
            self.why[index] = refusal.error
            self.told.add(index)
            if refusal.filter == "layers":
                self.without[index] = self.without.get(index, frozenset()) | {batch.edge}
            self.waiting.append(CreateItem(spec=specs[index], first=index))
        return failed

    def returned(self, batch: Batch, error: DsecError) -> None:
        """Nobody took the batch (no such subscriber): it is as if it had never been sent."""
        for index, spec in batch.pairs:
            if index in self.out:
                self.out.discard(index)
                self.why[index] = error.body()
                if isinstance(error, NodeError):  # its own words, such as a full disk: more than that no node is left
                    self.told.add(index)
                self.waiting.append(CreateItem(spec=spec, first=index))

    def unplaced(self, rows: Sequence[Unplaced]) -> list[Failed]:
        """What no node takes: final ones fail, the others wait."""
        failed = []
        for row in rows:
            error = refusal_error(row.filter, row.final, self.specs[row.spec] if row.final else None)
            if row.filter == "layers" and row.index in self.why:
                failed.append(self._fail(row.index, self.why[row.index]))  # every node was asked and lacks it
            elif row.final:
                failed.append(self._fail(row.index, error.body()))
            else:
                # An Edge's own words say more than the picture's: they are kept.
                if row.index not in self.told:
                    self.why[row.index] = error.body()
                self.waiting.append(CreateItem(spec=row.spec, first=row.index))
        return failed

    def waits_for(self) -> tuple[int, ErrorBody | None]:
        """How many wait, and the last refusal of the first of them that has one."""
        why = next((self.why[item.first] for item in self.waiting if item.first in self.why), None)
        return sum(item.count for item in self.waiting), why

    def expire(self) -> list[Failed]:
        """The deadline has passed: what waits fails with the reason of its last refusal; what is out is the Edge's to end."""
        failed = []
        for item in self.waiting:
            for index in range(item.first, item.first + item.count):
                why = self.why.get(index)
                text = f"not placed within the deadline: {why.message}" if why else "not placed within the deadline"
                error = DeadlineExceeded(text, reason=why.reason or why.code if why else "deadline", fix=why.fix if why else "")
                failed.append(self._fail(index, error.body()))
        self.waiting = []
        for index in sorted(self.out):
            before = f"; before that: {self.why[index].message}" if index in self.told and index in self.why else ""
            error = DeadlineExceeded(f"the node did not answer within the deadline{before}", reason="unknown")
            failed.append(self._fail(index, error.body()))
        self.out.clear()
        return failed

    def fail(self, index: int, error: DsecError) -> Failed:
        self.out.discard(index)
        return self._fail(index, error.body())

    def _fail(self, index: int, error: ErrorBody) -> Failed:
        failed = self.failed[index] = Failed(index=index, error=error)
        self.why.pop(index, None)
        return failed


def refusal_error(refused_by: str, final: bool, spec: msgspec.Raw | None = None) -> DsecError:
    """The error behind a placement filter's name, with what ``spec`` asks for there."""
    if refused_by == "nodes":
        return Unavailable("no node is up", reason="nodes", fix="start an Edge: dsec up, or dsec serve edge")
    if final and refused_by == "backend":
        fix = "see `dsec node ls` for what nodes offer"
        return Unsupported("no node offers this backend", field="backend", value=asked(spec, "backend"), reason="backend", fix=fix)
    if final and refused_by in ("arch", "devices", "labels"):
        field = "node_labels" if refused_by == "labels" else refused_by
        message = f"no node has the {refused_by} that the spec asks for"
        return Unsupported(message, field=field, value=asked(spec, field), reason=refused_by, fix="see `dsec node ls --json`")
    if final:
        field, fix = f"resources.{refused_by}", "ask for less; `dsec node ls` shows what there is"
        value, words = asked(spec, field), refused_by
        if refused_by in ("memory", "disk") and value:
            words = f"{int(value) / GIB:.9g} GiB of {refused_by}"
        if refused_by == "memory":
            fix += ". Where writable layers are in memory, the disk limit counts too"
        return InvalidRequest(f"{words} is more than any node has, were it empty", field=field, value=value, reason=refused_by, fix=fix)
    if refused_by == "checkpoint":
        return Unavailable("the node that keeps the checkpoint is away", reason="checkpoint", fix="see `dsec node ls`")
    return Busy(f"no node has room now: {refused_by}", reason=refused_by, fix="wait, ask for less or add nodes")


def asked(spec: msgspec.Raw | None, field: str) -> str:
    """What an encoded spec says at ``field`` (``resources.memory``); empty where it leaves the default or there is no such field."""
    value: Any = msgspec.msgpack.decode(spec) if spec is not None else None
    for name in field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return "" if value is None else str(value)


def pause_before(attempt: int, first: float, most: float, rng: random.Random) -> float:
    """Seconds before the next attempt: exponential with full jitter, so that refused bursts do not return as one spike."""
    return rng.uniform(0.5, 1.0) * min(most, first * 2.0 ** min(attempt, 16))
