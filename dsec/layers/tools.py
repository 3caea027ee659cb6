"""Run a foreign program (mkfs.erofs, mmdebstrap, git, cp) without blocking the loop and without leaving it behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import aiofiles

from dsec.errors import DsecError, NodeError, Unsupported

P = ParamSpec("P")
T = TypeVar("T")
Progress = Callable[[str], None]


def silent(_line: str) -> None:
    """The default progress callback."""


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`asyncio.to_thread`, but a cancel is passed on only when the thread has ended: what it works on is not removed under its hands.

    The disk's errors (full, read-only, damaged, vanished) become `NodeError`; a full disk may be retried.
    """
    return await _to_the_end(asyncio.to_thread(function, *args, **kwargs))


async def read(path: str | os.PathLike[str]) -> bytes:
    """A whole file; cancels and errors as in `in_thread`."""

    async def work() -> bytes:
        async with aiofiles.open(path, "rb") as file:
            return await file.read()

    return await _to_the_end(work())


async def write(path: str | os.PathLike[str], data: bytes) -> None:
    """A file with nothing but ``data``; cancels and errors as in `in_thread`."""

    async def work() -> None:
        async with aiofiles.open(path, "wb") as file:
            await file.write(data)

    await _to_the_end(work())


async def _to_the_end(steps: Coroutine[Any, Any, T]) -> T:
    work = asyncio.ensure_future(steps)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # seen: the caller is told of the cancel instead
        raise
    except DsecError:
        raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise NodeError(f"the layer store's disk: {error}", reason="disk" if full else "", retryable=full) from error


def find(name: str, package: str) -> str:
    """The program's path. Raises `Unsupported`, naming the Debian package that holds it."""
    path = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if path is None:
        raise Unsupported(f"{name} is not installed", reason=f"no {name} in PATH", fix=f"apt-get install {package}")
    return path


async def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    stdin: bytes = b"",
    progress: Progress = silent,
    secrets: Sequence[str] = (),
) -> str:
    """Run to its end and return its output (stdout and stderr together, the last 400 lines).

    Each line goes to ``progress`` as it comes. The environment is PATH, a C locale and ``env``, nothing of ours. When the caller
    is cancelled the program's whole process group is killed and waited for. Raises `NodeError` with the last lines when it fails;
    ``secrets`` are blotted out of everything shown.
    """
    clean = {"PATH": os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin", "LC_ALL": "C.UTF-8", "HOME": "/nonexistent", **(env or {})}
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=clean,
        cwd=cwd,
        start_new_session=True,
    )
    lines: deque[str] = deque(maxlen=400)
    try:
        if process.stdin is not None:
            process.stdin.write(stdin)
            await process.stdin.drain()
            process.stdin.close()
        assert process.stdout is not None
        buffer = b""
        while chunk := await process.stdout.read(65536):
            *whole, buffer = (buffer + chunk).replace(b"\r", b"\n").split(b"\n")
            buffer = buffer[-4096:]
            for raw in whole:
                if line := _blot(raw.decode(errors="replace").strip(), secrets):
                    lines.append(line)
                    progress(line)
        if buffer:
            lines.append(_blot(buffer.decode(errors="replace").strip(), secrets))
        code = await process.wait()
    finally:
        if process.returncode is None:
            _kill_group(process.pid)
            await asyncio.shield(process.wait())
    if code != 0:
        tail = " | ".join(list(lines)[-5:])
        raise NodeError(f"{os.path.basename(argv[0])} failed with exit code {code}: {tail}", retryable=False)
    return "\n".join(lines)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it ended between the check and the signal
        return


def _blot(line: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        line = line.replace(secret, "***")
    return line
