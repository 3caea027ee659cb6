"""What a guest's frames mean to whoever asked: results put together, output in pieces, statuses and typed errors. No I/O."""

from __future__ import annotations

import asyncio
import errno
import os
from collections import deque
from collections.abc import Mapping
from typing import cast

from dsec.backends.base import Chunk
from dsec.backends.guest import wire
from dsec.errors import Busy, Conflict, Denied, DsecError, InvalidRequest, NotFound, SandboxError, Unsupported
from dsec.model import Captured, OpStatus, Stat

SMALL_PIECES = 1_024  # that wait to be handed on, before they are made fewer
MERGED = 128 * 1024  # bytes of neighbouring pieces of output that are handed on as one

FIXES = {"user": "name a user of the image, or a number", "cwd": "name a directory that is there and that the user may enter"}
REASONS: dict[int, str] = {wire.Code.STALE: "stale_generation", wire.Code.REUSED: "request_id_conflict"}
BY_CODE: dict[int, type[DsecError]] = {
    wire.Code.INVALID: InvalidRequest,
    wire.Code.NOT_FOUND: NotFound,
    wire.Code.CONFLICT: Conflict,
    wire.Code.DENIED: Denied,
    wire.Code.BUSY: Busy,
    wire.Code.SANDBOX: SandboxError,
    wire.Code.STALE: Conflict,
    wire.Code.UNSUPPORTED: Unsupported,
    wire.Code.REUSED: Conflict,
}


class Result:
    """The end of one operation as this connection will tell it; None in `future` means that the connection was lost."""

    __slots__ = ("future", "parts")

    def __init__(self, future: asyncio.Future[wire.Done | wire.Error | None]) -> None:
        self.future = future
        self.parts: list[list[bytes]] = [[], [], [], []]

    def feed(self, kind: int, value: object) -> bool:
        """A frame of the answer; True when it was the last."""
        if isinstance(value, wire.Done):
            if any(self.parts):
                value = wire.Done(value.status, tuple(b"".join(p) + v for p, v in zip(self.parts, value.parts, strict=True)))  # type: ignore[arg-type]
            self._set(value)
        elif kind == wire.Type.CAPTURE:
            index, data = cast(tuple[int, bytes], value)
            self.parts[index].append(data)
            return False
        elif isinstance(value, wire.Error) or value is None:
            self._set(value)
        else:
            return False
        return True

    def _set(self, value: wire.Done | wire.Error | None) -> None:
        if not self.future.done():
            self.future.set_result(value)


class Reader:
    """What `output` holds: chunks that arrived, and whoever waits for the next."""

    __slots__ = ("chunks", "ended", "error", "lost", "most", "waiter")

    def __init__(self) -> None:
        self.chunks: deque[Chunk] = deque()
        self.most = SMALL_PIECES
        self.waiter: asyncio.Future[None] | None = None
        self.ended = self.lost = False
        self.error: wire.Error | None = None

    def take(self) -> Chunk:
        """The oldest chunk, with those that follow it in its stream: a message to the caller costs more than a copy."""
        chunk = self.chunks.popleft()
        end = chunk.offset + len(chunk.data)
        parts = [chunk.data]
        while self.chunks:
            more = self.chunks[0]
            if more.stream != chunk.stream or more.offset != end or end + len(more.data) - chunk.offset > MERGED:
                break
            parts.append(more.data)
            end += len(more.data)
            self.chunks.popleft()
        return chunk if len(parts) == 1 else Chunk(chunk.stream, chunk.offset, b"".join(parts))

    def _taken(self) -> Chunk | None:
        return self.take() if self.chunks else None

    def feed(self, kind: int, value: object) -> bool:
        last = True
        if isinstance(value, Chunk):
            self.chunks.append(value)
            if len(self.chunks) > self.most:  # credit counts bytes: a million of one byte each would take a hundred times their memory
                self.chunks = deque(iter(self._taken, None))
                self.most = max(SMALL_PIECES, 2 * len(self.chunks))
            last = False
        elif kind == wire.Type.END:
            self.ended = True
        elif isinstance(value, wire.Error):
            self.error = value
        else:
            self.lost = True
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)
        return last


class OwnFrames:
    """Turns a `WireError` of our own encoding into the caller's `InvalidRequest`."""

    def __init__(self, sandbox_id: str) -> None:
        self.sandbox_id = sandbox_id

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, wire.WireError):
            raise InvalidRequest(str(error), field=error.field, sandbox=self.sandbox_id) from None


def guest_error(error: wire.Error, values: Mapping[str, str], sandbox_id: str) -> DsecError:
    """The typed error of the guest's; ``values`` holds the order's fields, so that the error names the value that was wrong."""
    cls = BY_CODE.get(error.code, SandboxError)
    message = error.message[:400]
    reason = REASONS.get(error.code) or errno.errorcode.get(error.errno, "")
    detail = os.strerror(error.errno) if error.errno and error.field != "user" else ""  # a user is looked up, not opened
    if detail.lower() not in message.lower():
        message = f"{message}: {detail}"
    return cls(
        message,
        field=error.field,
        value=values.get(error.field, ""),
        fix=FIXES.get(error.field, ""),
        sandbox=sandbox_id,
        reason=reason,
    )


def op_status(status: wire.Status, parts: tuple[bytes, bytes, bytes, bytes] = (b"", b"", b"", b"")) -> OpStatus:
    done = status.ended
    return OpStatus(
        op=status.op,
        running=not done,
        exit_code=status.code if done and not status.signalled else None,
        signal=status.code if done and status.signalled else None,
        timed_out=status.timed_out,
        oom_killed=status.oom,
        duration_ms=status.micros / 1000,
        stdout=Captured(head=parts[0], tail=parts[1], total=status.totals[0]),
        stderr=Captured(head=parts[2], tail=parts[3], total=status.totals[1]),
        pid=status.pid,
        kind=status.kind,
    )


def stat(item: wire.FileStat) -> Stat:
    return Stat(
        name=item.name,
        kind=item.kind,
        size=item.size,
        mode=item.mode,
        uid=item.uid,
        gid=item.gid,
        mtime=item.mtime_ns / 1e9,
        target=item.target,
    )
