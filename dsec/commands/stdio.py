"""Our own standard streams, joined to those of a command in a sandbox."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from libdsec import ExecResult, Process

BLOCK = 128 * 1024


def has_input() -> bool:
    """Whether standard input is a pipe, a socket or a file: what somebody meant to pass on. A terminal or /dev/null is not."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


async def read_all(limit: int = 64 << 20) -> bytes:
    """Standard input to its end, at most ``limit`` bytes."""
    parts: list[bytes] = []
    size = 0
    async for data in Blocks():
        size += len(data)
        if size > limit:
            from dsec.errors import InvalidRequest

            raise InvalidRequest(f"is longer than {limit} bytes", field="stdin", fix="leave --json out, or copy a file with `dsec cp`")
        parts.append(data)
    return b"".join(parts)


class Blocks:
    """Blocks of standard input as they come, without holding a thread where the kernel can tell us that there is something."""

    def __init__(self) -> None:
        self._watch = not stat.S_ISREG(os.fstat(0).st_mode)

    def __aiter__(self) -> Blocks:
        return self

    async def __anext__(self) -> bytes:
        if self._watch:
            await self._readable()
        data = os.read(0, BLOCK)
        if not data:
            raise StopAsyncIteration
        return data

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        try:
            loop.add_reader(0, _set, ready)
        except (PermissionError, OSError):  # epoll does not know this kind of file; a read of it does not block either
            self._watch = False
            return
        try:
            await ready
        finally:
            loop.remove_reader(0)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def attach(process: Process, *, feed: bool) -> ExecResult:
    """Output to our streams as it comes, our input to its own; its result."""

    async def write_input() -> None:
        async for data in Blocks():
            await process.write(data)
        await process.close_stdin()

    from dsec.errors import DsecError

    feeding = asyncio.create_task(write_input()) if feed else None
    try:
        async for event in process:
            stream = sys.stdout if event.stream == "stdout" else sys.stderr
            if event.gap:
                sys.stderr.write(f"dsec: {event.gap} bytes of {event.stream} are not kept\n")
            await asyncio.to_thread(write_all, stream.buffer.fileno(), event.data)
        return await process.wait()
    finally:
        if feeding is not None:
            feeding.cancel()
            results = await asyncio.gather(feeding, return_exceptions=True)
            problem = results[0]
            if isinstance(problem, Exception) and not isinstance(problem, DsecError):  # a command may well end before its input does
                raise problem


def write_all(descriptor: int, data: bytes) -> None:
    """All of it, however slow the reader is."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
