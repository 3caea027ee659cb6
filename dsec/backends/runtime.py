"""What the container backend needs of its node: an OCI runtime, the static programs, short socket paths, limits to hand on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import resource
import shutil
import socket
from collections.abc import Awaitable, Callable, Iterable

from dsec import syscalls
from dsec.errors import DsecError, Unsupported
from dsec.qos.cgroup import AHEAD

MAX_SOCKET_PATH = 107
AGAIN = 1.0  # seconds
_RUNTIMES = ("crun", "runc")


def socket_dir(state_dir: str) -> str:
    """``<state>/run``, or a short name in /run where a socket's path would be longer than the kernel's 107 bytes."""
    path = f"{state_dir}/run"
    if len(os.fsencode(path)) + 1 + 26 <= MAX_SOCKET_PATH:
        return path
    return f"/run/dsec-{hashlib.sha256(os.fsencode(state_dir)).hexdigest()[:16]}"


def forget_ahead(run: str) -> None:
    """Remove the sockets that zygotes have made ahead (launcher/ahead.c) and that no sandbox got: their processes are killed with their
    groups, when the Edge begins and when it ends."""
    with os.scandir(run) as entries:
        for entry in entries:
            if entry.name.startswith(AHEAD):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(entry.path)


def listen_at(path: str) -> socket.socket:
    """A listener there, whatever was there before. It is for root alone. Raises `OSError`."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(64)
    except BaseException:
        listener.close()
        raise
    return listener


def find_runtime(name: str) -> str:
    candidates = _RUNTIMES if name == "auto" else (name,)
    path = next((found for candidate in candidates if (found := shutil.which(candidate))), None)
    if path is None:
        raise Unsupported(
            f"no OCI runtime ({' or '.join(candidates)}) on this node",
            field="container.runtime",
            value=name,
            fix="apt install crun",
            reason="runtime",
        )
    return path


def programs(launcher: str, guest: str) -> tuple[str, str]:
    """Launcher and guest binaries, built when they are not there; and the loader's library, without which it is slower."""
    from dsec.backends.guest import build

    with contextlib.suppress(build.BuildError):
        build.ensure(program="hand")
    if launcher and guest:
        return launcher, guest
    return launcher or str(build.ensure(program="launcher")), guest or str(build.ensure())


def nofile() -> tuple[int, int]:
    """Descriptors of a process inside: 1,024 as everywhere, and as many as the node lets us give for those who raise it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    return min(1024, most), most


def userns_trouble() -> str:
    """Why user namespaces cannot be made here; empty when they can."""
    try:
        fd = syscalls.make_userns(100_000)
    except OSError as error:
        return f"user namespaces: {os.strerror(error.errno or errno.EIO)}"
    os.close(fd)
    return ""


def init_among(pids: Iterable[int]) -> int:
    """The process that is number 1 in its pid namespace; 0 when there is none."""
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
            for line in file:
                if line.startswith("NSpid:"):
                    numbers = line.split()[1:]
                    if len(numbers) > 1 and numbers[-1] == "1":
                        return pid
    return 0


async def until_done(work: Callable[[], Awaitable[object]], over: Callable[[], bool]) -> None:
    """Try what fails again, until it does not or it is ``over``."""
    while not over():
        await asyncio.sleep(AGAIN)
        with contextlib.suppress(DsecError, OSError):
            await work()
            return


_REASONS = {errno.EMFILE: "descriptors", errno.ENFILE: "descriptors", errno.ENOSPC: "disk", errno.EROFS: "disk"}


def reason(error: Exception) -> str:
    """The word of an error for programs: of the system's, whether it is descriptors or the disk that the node lacks."""
    if isinstance(error, OSError):
        return _REASONS.get(error.errno or 0, "")
    return str(getattr(error, "reason", ""))


async def through_cancels(task: asyncio.Task[None]) -> None:
    """Wait for ``task`` even when the waiter is cancelled again."""
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([task])
