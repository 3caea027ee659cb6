"""One outcome per request id: a repeated request gets the first one's answer, a reused id with another body is refused."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from dsec.errors import Conflict, DsecError


class Key(NamedTuple):
    project: str
    principal: str
    verb: str
    id: str


class _Entry(NamedTuple):
    digest: bytes
    at: float
    outcome: asyncio.Future[Any]


class Idempotency:
    """Remembers outcomes for ``retention`` seconds, ``limit`` of them at most (the oldest finished go first).

    A retryable error (`Busy`, `Unavailable`, …) is not remembered: it means that nothing was done, and the repeat is the retry.
    The memory is this process's; what must survive a restart belongs to the handler's own durable record.
    """

    def __init__(self, *, retention: float = 600.0, limit: int = 100_000, clock: Callable[[], float] = time.monotonic) -> None:
        self.retention = retention
        self.limit = limit
        self._clock = clock
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    async def run(self, key: Key, body: bytes, do: Callable[[], Awaitable[Any]]) -> Any:
        """``do()``'s result, run once per key. Raises `Conflict` (reason ``request_id_conflict``) when the key had another body.

        A caller that is cancelled does not cancel the work while it is shared: it runs on, and its outcome is kept.
        """
        self._expire()
        digest = hashlib.blake2b(body, digest_size=16).digest()
        entry = self._entries.get(key)
        if entry is None:
            task = asyncio.ensure_future(do())
            entry = self._entries[key] = _Entry(digest, self._clock(), task)
            task.add_done_callback(lambda done: self._settle(key, done))
        elif entry.digest != digest:
            raise Conflict(
                "this request id was used for another request",
                field=key.verb,
                value=key.id,
                reason="request_id_conflict",
                fix="use a new id for a new request",
            )
        return await asyncio.shield(entry.outcome)

    def _settle(self, key: Key, done: asyncio.Future[Any]) -> None:
        if done.cancelled():
            self._entries.pop(key, None)
            return
        error = done.exception()
        if error is not None and not (isinstance(error, DsecError) and not error.retryable):
            self._entries.pop(key, None)

    def _expire(self) -> None:
        """Entries are in order of arrival, so only the head is looked at; unfinished ones are never dropped."""
        horizon = self._clock() - self.retention
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if not entry.outcome.done() or (entry.at > horizon and len(self._entries) < self.limit):
                return
            del self._entries[key]
