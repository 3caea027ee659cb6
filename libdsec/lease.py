"""The client's claim on its job: one background task renews one lease with every Edge that holds something of it.

Nothing depends on the client's last words: when renewals stop, each Edge ends what the lease held (by ``on_client_loss``). Claims
and drops are deltas, repeated until the Edge acknowledges them. The lease's id outlives a connection, so a restarted client
takes its job up again with ``connect(lease="…")``.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable

from dsec.bus import subjects
from dsec.bus.messages import Lease, LeaseAck, LeaseRenew
from dsec.errors import DsecError
from dsec.model import SandboxId
from libdsec.wire import Wire

DELTAS = 10_000  # ulids in one renewal: 28 bytes each, far below the 1 MiB payload
RETRY = 0.25


class Side:
    """The lease as one Edge should know it."""

    __slots__ = ("claims", "drops", "due", "failures", "held", "retry_at", "seq", "task")

    def __init__(self) -> None:
        self.held: dict[str, bool] = {}  # ulid -> whether it is kept when the client goes
        self.claims: set[str] = set()
        self.drops: set[str] = set()
        self.seq = 0
        self.due = 0.0  # of the next renewal
        self.retry_at = 0.0  # not before, after a failure
        self.failures = 0
        self.task: asyncio.Task[None] | None = None

    @property
    def dirty(self) -> bool:
        return bool(self.claims or self.drops)


class LeaseKeeper:
    """Renews until closed. ``claim``, ``drop`` and ``release`` never wait; they wake the renewer."""

    def __init__(self, wire: Wire, lease: Lease, *, named: bool) -> None:
        self.wire = wire
        self.lease = lease
        self.named = named  # chosen by the user: it outlives this client
        self.sides: dict[str, Side] = {}
        self.unknown: set[str] = set()  # claimed, but the Edge does not have them
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def claim(self, sandboxes: Iterable[SandboxId], keep: bool = False) -> None:
        """These are ours; ``keep``: they stay when the client leaves in peace."""
        for sandbox in sandboxes:
            side = self._side(sandbox.edge)
            side.held[sandbox.ulid] = keep
            side.claims.add(sandbox.ulid)
        self._changed()

    def drop(self, sandboxes: Iterable[SandboxId]) -> None:
        """Stop these; nobody waits for their end."""
        for sandbox in sandboxes:
            side = self._side(sandbox.edge)
            side.held.pop(sandbox.ulid, None)
            side.claims.discard(sandbox.ulid)
            side.drops.add(sandbox.ulid)
        self._changed()

    def release(self, sandbox: SandboxId) -> None:
        """It has ended; there is nothing to claim any more."""
        side = self.sides.get(sandbox.edge)
        if side is not None:
            side.held.pop(sandbox.ulid, None)
            side.claims.discard(sandbox.ulid)

    def holds(self, sandbox: SandboxId) -> bool:
        side = self.sides.get(sandbox.edge)
        return side is not None and sandbox.ulid in side.held

    def renew_now(self) -> None:
        """After a reconnection: every Edge hears from us at once."""
        for side in self.sides.values():
            side.due = side.retry_at = 0.0
        self._wake.set()

    async def flush(self, timeout: float) -> bool:
        """Wait until every claim and drop is acknowledged, at most ``timeout`` seconds. Whether they are."""
        end = asyncio.get_running_loop().time() + timeout
        while any(side.dirty for side in self.sides.values()):
            if asyncio.get_running_loop().time() >= end:
                return False
            self._wake.set()
            await asyncio.sleep(0.01)
        return True

    async def close(self, timeout: float = 2.0) -> None:
        """Say good-bye where it matters: what is not kept ends at once instead of when the lease lapses."""
        self._closed = True
        if not self.named:
            self.drop([SandboxId(edge, ulid) for edge, side in self.sides.items() for ulid, keep in list(side.held.items()) if not keep])
        try:
            if not await self.flush(timeout):
                self.wire.log.warning("client.lease_not_flushed", lease=self.lease.id, after_s=timeout)
        finally:
            task, self._task = self._task, None
            if task is not None:
                task.cancel()
                await asyncio.wait([task])

    def _side(self, edge: str) -> Side:
        side = self.sides.get(edge)
        if side is None:
            side = self.sides[edge] = Side()
        return side

    def _changed(self) -> None:
        self._wake.set()
        if self._task is None and not self._closed:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="dsec-lease")

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        period = self.lease.ttl_ms / 3000
        while True:
            self._wake.clear()
            now = loop.time()
            wait = period
            for edge, side in list(self.sides.items()):
                if side.task is not None and not side.task.done():
                    continue
                if not side.held and not side.dirty:
                    del self.sides[edge]
                    continue
                at = max(side.retry_at, 0.0 if side.dirty else side.due)
                if at > now:
                    wait = min(wait, at - now)
                    continue
                side.due = now + period * random.uniform(0.9, 1.0)
                side.task = loop.create_task(self._renew(edge, side), name=f"dsec-renew-{edge}")
                side.task.add_done_callback(lambda _: self._wake.set())
            try:
                async with asyncio.timeout(max(wait, 0.005)):
                    await self._wake.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(0.02)  # news come in batches: one renewal carries what arrives together

    async def _renew(self, edge: str, side: Side) -> None:
        side.seq += 1
        claims, drops = tuple(side.claims)[:DELTAS], tuple(side.drops)[:DELTAS]
        message = LeaseRenew(lease=self.lease.id, ttl_ms=self.lease.ttl_ms, seq=side.seq, claims=claims, drops=drops)
        subject = subjects.lease(self.wire.unit, edge, self.wire.caller)
        try:
            ack = await self.wire.ask(subject, message, LeaseAck, timeout=min(2.0, self.lease.ttl_ms / 3000))
        except DsecError as error:
            self.wire.log.debug("client.lease_renewal_failed", edge=edge, error=str(error))
            side.failures += 1
            pause = min(RETRY * 2 ** min(side.failures - 1, 6), self.lease.ttl_ms / 6000) * random.uniform(0.5, 1.0)
            side.retry_at = side.due = asyncio.get_running_loop().time() + pause
            return
        side.claims.difference_update(claims)
        side.drops.difference_update(drops)
        for ulid in ack.unknown:
            self.unknown.add(f"{edge}-{ulid}")
        side.failures, side.retry_at = 0, 0.0
