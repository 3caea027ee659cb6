"""Many sandboxes in one call, as they become ready. A single create is a burst of one.

Whatever the caller does (cancel, leave, raise), no sandbox of a burst stays that nobody wants: what was placed is dropped by the
lease at once, what arrives later is dropped when it arrives, and what this client never hears of no lease ever claims.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from dsec.bus import codec, subjects
from dsec.bus.call import Asked
from dsec.bus.messages import BurstNews, CancelRequest, CreateAck, CreateRequest, Empty, Failed, InfoReply, ReadyItem
from dsec.bus.transport import Msg
from dsec.errors import BurstError, DeadlineExceeded, DsecError, NodeError, SandboxGone, from_body, to_body
from dsec.model import ExitReason, SandboxId, SandboxSpec, State, new_ulid
from libdsec.plan import Ledger, Slice, ranges, slices
from libdsec.sandbox import Sandbox
from libdsec.wire import SILENCE, is_silence, unanswered

if TYPE_CHECKING:
    from libdsec.client import Client

ACK = 0.5  # seconds in which a Scheduler acknowledges a slice; then it is sent again under the same id
LOOK_AFTER = 2.5  # seconds without news after which we ask: news travel at most once
RESEND_AFTER = 10.0  # seconds between repeats of slices of which something was never placed
RANGES = 20_000  # of indices in one message
LOOK_AT = 64  # sandboxes looked at in one round


class Part(NamedTuple):
    """A slice with the burst id and number under which it is sent."""

    burst: str
    number: int
    slice: Slice


class Gathering:
    """One create under way: sends the slices, hears the news, keeps the ledger."""

    def __init__(self, client: Client, specs: Sequence[SandboxSpec], deadline: float) -> None:
        self.client = client
        self.specs = specs
        self.burst = new_ulid()
        self.ledger = Ledger(len(specs))
        self.parts: list[Part] = [Part(self.burst, number, part) for number, part in enumerate(slices(specs))]
        self._again: set[int] = set()  # indices that were placed a second time
        self.arrived: deque[Sandbox] = deque()
        self.indices: dict[SandboxId, int] = {}
        self.news = asyncio.Event()
        self.fatal: DsecError | None = None
        self.until = asyncio.get_running_loop().time() + deadline
        self.deadline = deadline
        self._heard = asyncio.get_running_loop().time()
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------------ sending
    def begin(self) -> None:
        """Starts at once and waits for nothing."""
        self.client._gatherings[self.burst] = self
        first: Asked[CreateAck] | None = None
        if len(self.parts) == 1:  # on its way before anything else is done here
            with contextlib.suppress(DsecError):  # `_send_part` finds out
                wire, left = self.client._wire, self.until - asyncio.get_running_loop().time()
                subject = subjects.api(wire.unit, "create", wire.caller)
                first = Asked(wire.guard(), subject, self._request(self.parts[0], left), CreateAck, timeout=min(ACK, max(0.05, left)))
        self._spawn(self._send(self.parts, first))
        self._spawn(self._look())

    def _spawn(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.append(task)

    def _request(self, part: Part, left: float) -> CreateRequest:
        return CreateRequest(
            burst=part.burst,
            slice=part.number,
            specs=part.slice.specs,
            items=part.slice.items,
            inbox=self.client._inbox_of(part.burst),
            deadline_ms=max(1, int(left * 1000)),
            lease=self.client._leases.lease,
        )

    async def _send(self, parts: Sequence[Part], first: Asked[CreateAck] | None = None) -> None:
        """Slices one after the other in the order of their indices, a few of them unacknowledged at a time. ``first``: the first attempt
        with the only one."""
        gate = asyncio.Semaphore(8)

        async def one(part: Part) -> None:
            async with gate:
                await self._send_part(part)

        try:
            if len(parts) == 1:
                await self._send_part(parts[0], first)
            else:
                await asyncio.gather(*(one(part) for part in parts))
        except DsecError as error:
            self.fatal = error
            self.news.set()

    async def _send_part(self, part: Part, asked: Asked[CreateAck] | None = None) -> None:
        loop = asyncio.get_running_loop()
        wire = self.client._wire
        subject = subjects.api(wire.unit, "create", wire.caller)
        silent_until = min(self.until, loop.time() + SILENCE)
        pause = 0.05
        while not self.ledger.closed:
            left = self.until - loop.time()
            try:
                if asked is not None:
                    attempt, asked = asked, None
                    await attempt
                else:
                    await wire.ask(subject, self._request(part, left), CreateAck, timeout=min(ACK, max(0.05, left)))
                return
            except DsecError as error:
                if not (is_silence(error) or error.retryable):
                    raise
                if loop.time() > (silent_until if is_silence(error) else self.until):
                    if any(owner is not None for owner in self.ledger.owner):
                        return  # the acknowledgement was lost, the work is under way
                    raise unanswered(error, "the Scheduler") if is_silence(error) else error from None
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, 1.0)

    # ------------------------------------------------------------------ hearing
    def on_news(self, msg: Msg) -> None:
        try:
            news = codec.decode(msg.data, BurstNews)
        except DsecError as error:
            self.client._wire.log.error("client.bad_news", burst=self.burst, error=str(error))
            return
        self.take(news)

    def take(self, news: BurstNews) -> None:
        meaning = self.ledger.take(news)
        leases = self.client._leases
        if meaning.claims:
            leases.claim(meaning.claims)
        if meaning.drops:
            leases.drop(meaning.drops)
        if self.ledger.closed:
            return
        self._heard = asyncio.get_running_loop().time()
        if news.waiting and self.client.on_wait is not None:
            self.client.on_wait(news.waiting, from_body(news.why) if news.why is not None else None)
        for ready in meaning.ready:
            spec = self.specs[ready.index]
            if spec.on_client_loss == "keep":
                leases.claim([ready.id], keep=True)
            self.indices[ready.id] = ready.index
            self.arrived.append(
                Sandbox(
                    self.client,
                    ready.id,
                    labels=spec.labels,
                    layers=ready.layers,
                    degraded=ready.degraded,
                    exec_timeout=spec.exec_timeout_ms / 1000,
                )
            )
        again = []
        for index in meaning.failed:
            owner = self.ledger.owner[index]
            if owner is not None:
                leases.drop([owner])
            if self._worth_another(index):
                self.ledger.reopen(index)
                again.append(index)
        if again:
            self._place_again(again)
        if meaning.ready or meaning.failed:
            self.news.set()

    def _worth_another(self, index: int) -> bool:
        """A node that failed to launch it (its Edge restarted, a mount failed) says nothing about the others: once more, somewhere."""
        error = self.ledger.errors[index]
        left = self.until - asyncio.get_running_loop().time()
        launch = isinstance(error, NodeError) or (isinstance(error, SandboxGone) and error.reason == ExitReason.LAUNCH_FAILED)
        return launch and self.ledger.owner[index] is not None and index not in self._again and left > 1.0

    def _place_again(self, indices: list[int]) -> None:
        """Under a new burst id, since the old one names what has failed."""
        self._again.update(indices)
        burst = new_ulid()
        self.client._gatherings[burst] = self
        parts = [Part(burst, number, part) for number, part in enumerate(slices(self.specs, indices))]
        self.parts += parts
        self._spawn(self._send(parts))

    def reconnected(self) -> None:
        """News of the time without connection are lost: look soon."""
        self._heard = 0.0

    async def _look(self) -> None:
        """When it has been quiet, ask the Edges about what was placed, and the Scheduler again about what was not."""
        loop = asyncio.get_running_loop()
        resend_at = loop.time() + RESEND_AFTER
        while not self.ledger.closed and not self.ledger.settled:
            await asyncio.sleep(0.5)
            if loop.time() - self._heard < LOOK_AFTER:
                continue
            self._heard = loop.time()
            placed = [index for index in self.ledger.pending() if self.ledger.owner[index] is not None]
            await asyncio.gather(*(self._look_at(index) for index in placed[:LOOK_AT]))
            unplaced = set(self.ledger.unplaced())
            if unplaced and loop.time() >= resend_at:
                resend_at = loop.time() + RESEND_AFTER
                again = [
                    part
                    for part in self.parts
                    if any(not unplaced.isdisjoint(range(item.first, item.first + item.count)) for item in part.slice.items)
                ]
                await self._send(again)

    async def _look_at(self, index: int) -> None:
        sandbox = self.ledger.owner[index]
        assert sandbox is not None
        try:
            info = (await self.client._request(sandbox, "info", Empty(), InfoReply, timeout=2.0, repeat=False)).info
        except SandboxGone as error:
            self._report(sandbox, failed=(Failed(index=index, ulid=sandbox.ulid, error=to_body(error)),))
            return
        except DsecError as error:
            self.client._wire.log.debug("client.look_failed", sandbox=str(sandbox), error=str(error))
            return
        if info.state in (State.STOPPING, State.STOPPED):
            reason = info.exit.reason if info.exit is not None else "broken"
            detail = info.exit.detail if info.exit is not None else ""
            gone = SandboxGone(detail or "it ended before it was ready", sandbox=info.id, reason=reason)
            self._report(sandbox, failed=(Failed(index=index, ulid=sandbox.ulid, error=gone.body()),))
        elif info.state not in (State.PENDING, State.CREATING):
            item = ReadyItem(index=index, ulid=sandbox.ulid, layers=info.layers, degraded=info.degraded)
            self._report(sandbox, ready=(item,))

    def _report(self, sandbox: SandboxId, ready: tuple[ReadyItem, ...] = (), failed: tuple[Failed, ...] = ()) -> None:
        self.take(BurstNews(burst=self.burst, edge=sandbox.edge, ready=ready, failed=failed))

    # ------------------------------------------------------------------ ending
    def close(self, error: DsecError) -> None:
        """Nothing more is wanted. Synchronous: it works in the middle of a cancellation."""
        for task in self._tasks:
            task.cancel()
        unwanted = self.ledger.pending()
        late = self.ledger.close(error)
        if late:
            self.client._leases.drop(late)
        self._cancel(unwanted)
        self.client._retire(self)

    def _cancel(self, unwanted: list[int]) -> None:
        """Tell the Edges what need not be made: we may be gone before we hear of it. Nobody answers; what misses it no lease claims."""
        wire = self.client._wire
        rows = ranges(unwanted)
        subject = subjects.everyone(wire.unit, "cancel", wire.caller)
        for burst in {part.burst for part in self.parts} if rows else ():
            for at in range(0, len(rows), RANGES):
                try:
                    wire.post(subject, CancelRequest(burst=burst, ranges=tuple(rows[at : at + RANGES])))
                except DsecError as error:
                    wire.log.debug("client.cancel_lost", burst=burst, error=str(error))

    def overdue(self) -> DeadlineExceeded:
        fix = "see `dsec node ls` for room, or raise the time-out"
        return DeadlineExceeded(f"not ready within {self.deadline:g} s", reason="create", fix=fix)

    async def next(self) -> Sandbox | None:
        """The next ready sandbox; None when every index has settled or the deadline has passed."""
        loop = asyncio.get_running_loop()
        while not self.arrived:
            if self.fatal is not None:
                raise self.fatal
            if self.ledger.settled or loop.time() >= self.until:
                return None
            self.news.clear()
            try:
                async with asyncio.timeout_at(self.until):
                    await self.news.wait()
            except TimeoutError:
                continue
        return self.arrived.popleft()


class Burst:
    """Made by `Client.burst`; an async context manager and an async iterator over sandboxes as they become ready.

    ``failed`` holds (index, error). Leaving the block stops every sandbox of the burst.
    """

    def __init__(self, client: Client, specs: list[SandboxSpec], min_ready: int, deadline: float, keep_partial: bool) -> None:
        self.n = len(specs)
        self.min_ready = min_ready
        self.sandboxes: list[Sandbox] = []
        self._client = client
        self._specs = specs
        self._deadline = deadline
        self._keep_partial = keep_partial
        self._gathering: Gathering | None = None
        self._over = False

    @property
    def failed(self) -> list[tuple[int, DsecError]]:
        """What did not become ready, by index."""
        return sorted(self._gathering.ledger.errors.items()) if self._gathering is not None else []

    def index(self, sandbox: Sandbox) -> int:
        """The index of a ready sandbox of this burst: its place among the specs."""
        if self._gathering is None or sandbox._id not in self._gathering.indices:
            raise ValueError(f"{sandbox!r} is not of this burst")
        return self._gathering.indices[sandbox._id]

    async def __aenter__(self) -> Self:
        self._client._wire.guard()
        self._gathering = Gathering(self._client, self._specs, self._deadline)
        self._gathering.begin()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close("the burst was left")
        kept = isinstance(error, BurstError) and self._keep_partial
        if not kept:
            await self._client._stop_all(self.sandboxes)

    async def __aiter__(self) -> AsyncIterator[Sandbox]:
        """Ready sandboxes, each once; those that came before the iteration began first.

        Raises `BurstError` as soon as ``min_ready`` cannot be reached any more, or is not reached at the deadline: then all are
        stopped, unless ``keep_partial`` (they are in ``sandboxes``).
        """
        at = 0
        while True:
            while at < len(self.sandboxes):
                at += 1
                yield self.sandboxes[at - 1]
            if not await self._advance():
                return

    async def wait(self) -> list[Sandbox]:
        """All that became ready, once every index has settled or the deadline has passed. Raises `BurstError` as iteration does."""
        while await self._advance():
            pass
        return list(self.sandboxes)

    async def _advance(self) -> bool:
        gathering = self._gathering
        if gathering is None:
            raise RuntimeError("this burst was not started: use `async with client.burst(…) as b`")
        if self._over:
            return False
        if gathering.ledger.ahead < self.min_ready:
            await self._fail(gathering)
        try:
            sandbox = await gathering.next()
        except DsecError as error:
            for index in gathering.ledger.pending():
                gathering.ledger.errors[index] = error
            await self._fail(gathering)
            raise
        if sandbox is not None:
            self.sandboxes.append(sandbox)
            return True
        self._close(f"not ready within {self._deadline:g} s")
        if len(self.sandboxes) < self.min_ready:
            await self._fail(gathering)
        return False

    def _close(self, why: str) -> None:
        if self._gathering is None or self._over:
            return
        self._over = True
        self._gathering.close(DeadlineExceeded(why, reason="burst"))
        while self._gathering.arrived:
            self.sandboxes.append(self._gathering.arrived.popleft())

    async def _fail(self, gathering: Gathering) -> None:
        self._close(f"not ready within {self._deadline:g} s")
        if not self._keep_partial:
            await self._client._stop_all(self.sandboxes)
        errors = [error for _, error in self.failed]
        reasons = summary(errors)
        counts = f"{len(gathering.ledger.ready)} of {self.n} sandboxes became ready, {self.min_ready} were wanted"
        fixes = {error.fix for error in errors}  # what all of them advise is advice for the burst
        fix = fixes.pop() if len(fixes) == 1 else ""
        raise BurstError(f"{counts}: {reasons}" if reasons else counts, reason="min_ready", fix=fix)


def summary(errors: Sequence[DsecError], most: int = 3) -> str:
    """The commonest errors with their counts, in one line: which field and value, not which sandbox."""
    counts: dict[str, int] = {}
    for error in errors:
        where = f"{error.field}={error.value!r}: " if error.field and error.value else f"{error.field}: " if error.field else ""
        text = where + error.message
        counts[text] = counts.get(text, 0) + 1
    ranked = sorted(counts.items(), key=lambda item: -item[1])
    return "; ".join(f"{count} x {text}" for text, count in ranked[:most]) + ("; …" if len(ranked) > most else "")


async def create_one(client: Client, spec: SandboxSpec, deadline: float) -> Sandbox:
    """A burst of one. Cancelled or failed at any point, it leaves nothing."""
    gathering = Gathering(client, [spec], deadline)
    sandbox: Sandbox | None = None
    try:
        gathering.begin()
        sandbox = await gathering.next()
        if sandbox is None:
            raise gathering.ledger.errors.get(0) or gathering.overdue()
        return sandbox
    finally:
        gathering.close(gathering.overdue())
        if sandbox is None:
            client._leases.drop([found._id for found in gathering.arrived])
