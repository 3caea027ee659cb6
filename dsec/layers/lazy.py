"""The holder's part of loading on demand: marks partly filled blobs and keeps alive the process that fills them.

Each blob has a kit of three descriptors: a fanotify group with one mark, the blob opened for writing, and the journal. The blob is
opened before it is marked, so writes through this descriptor raise no events (the kernel decides at open), and a mount made after
the mark raises them always. Order is everything: open, mark, mount. While anybody holds the group, a reader of a hole waits; when the
last one lets go, it reads zeros. So the Edge holds a copy of each kit, and the worker another.

The journal is shared memory into which events are read. The kernel has written an event there before a SIGKILL can end the reading
process, so whoever comes next finds all that waits for an answer (`loader`).

Standard library, dsec.syscalls and mounts only, and nothing that sleeps: the holder runs it in its one thread.
"""

from __future__ import annotations

import array
import errno
import fcntl
import json
import os
import socket
import sys
from typing import Any

from dsec import syscalls
from dsec.layers.mounts import LayerMount, bitmap

SLOT = 64  # bytes: one event with its range; less than two
SLOTS = 1024  # events under way a blob
CONTROL_FD = 3
MAX_MESSAGE = 128 * 1024


class Kit:
    """What keeps one blob's readers safe. ``spec`` is what the worker is told."""

    def __init__(self, spec: dict[str, Any], fds: tuple[int, int, int]) -> None:
        self.spec = spec
        self.fds = fds

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def being_filled(data: str) -> bool:
    """Whether a worker fills this blob when it is read, or it is whole. (Each worker holds a shared flock on the bitmap.)"""
    try:
        lock = os.open(bitmap(data), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def make_kit(mount: LayerMount) -> Kit:
    """Open and mark the mount's blob; others (another node's daemon on the same store, a worker that outlived its holder) may have marked
    it too: every reader then waits for all of them. Raises `OSError`: ENOSYS or EINVAL where the kernel has no pre-content events,
    EMFILE when root has too many groups (fs.fanotify.max_user_groups)."""
    if syscalls.disabled("fanotify"):
        raise OSError(errno.ENOSYS, "fanotify is disabled by DSEC_DISABLE")
    if mount.lazy is None:
        raise OSError(errno.EINVAL, "this layer is not loaded on demand")
    data = mount.devices[-1]
    fds: list[int] = []
    try:
        flags = syscalls.FAN_CLASS_PRE_CONTENT | syscalls.FAN_CLOEXEC | syscalls.FAN_NONBLOCK | syscalls.FAN_UNLIMITED_QUEUE
        fds.append(syscalls.fanotify_init(flags, os.O_RDONLY | os.O_LARGEFILE | os.O_CLOEXEC))
        fds.append(os.open(data, os.O_RDWR | os.O_CLOEXEC))
        fds.append(os.memfd_create("dsec-journal", os.MFD_CLOEXEC))
        os.ftruncate(fds[2], SLOT * SLOTS)
        syscalls.fanotify_mark(fds[0], syscalls.FAN_MARK_ADD, syscalls.FAN_PRE_ACCESS, data)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    lazy = mount.lazy
    spec = {"name": lazy.name, "remote": lazy.remote, "manifest": lazy.manifest, "data": data, "touched": lazy.touched}
    return Kit({**spec, "ahead": list(lazy.ahead), "patience": lazy.patience}, (fds[0], fds[1], fds[2]))


class Loader:
    """The worker process and the kits that it serves; started with the first kit, and again whenever it ends."""

    def __init__(self) -> None:
        self.kits: dict[str, Kit] = {}
        self.sock: socket.socket | None = None
        self.pid = 0
        self.pidfd = -1
        self.deaths = 0

    def start(self) -> None:
        """Idempotent. Gives every kit to a new worker."""
        if self.pidfd >= 0:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        high = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, 10)
        theirs.close()
        try:
            self.pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-m", "dsec.layers.loader"],
                os.environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, high, CONTROL_FD)],
                setsigmask=(),
                setpgroup=0,
            )
            self.pidfd = syscalls.pidfd_open(self.pid)
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(high)
        ours.setblocking(False)
        self.sock = ours
        for kit in self.kits.values():
            self._give(kit)

    def add(self, kit: Kit) -> None:
        """Serve a blob from now on."""
        self.kits[kit.spec["name"]] = kit
        if self.pidfd < 0:
            self.start()
        else:
            self._give(kit)

    def drop(self, name: str) -> None:
        """Let go of a blob that is whole, or that nothing has mounted."""
        if (kit := self.kits.pop(name, None)) is not None:
            kit.close()
            if self.sock is not None:
                self._send({"op": "drop", "name": name}, ())

    def quit(self) -> None:
        """Tell the worker to end: nothing is mounted any more."""
        self._send({"op": "quit"}, ())

    def ended(self) -> None:
        """The worker is gone (its descriptor is readable)."""
        syscalls.waitid(self.pidfd, block=True)
        os.close(self.pidfd)
        self.pidfd, self.pid = -1, 0
        self.deaths += 1
        if self.sock is not None:
            self.sock.close()
            self.sock = None

    def read(self) -> dict[str, Any] | None:
        """News of the worker: ``{"event": "layer", "name", "what": "whole" | "trouble" | "recovered", …}``."""
        try:
            data = self.sock.recv(MAX_MESSAGE) if self.sock is not None else b""
        except OSError:
            return None
        news: dict[str, Any] | None = json.loads(data) if data else None
        return news

    def _give(self, kit: Kit) -> None:
        self._send({"op": "add", **kit.spec}, kit.fds)

    def _send(self, message: dict[str, Any], fds: tuple[int, ...]) -> None:
        if self.sock is None:
            return
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.sock.setblocking(True)  # the worker's reader does nothing else; it cannot be late for long
        try:
            self.sock.settimeout(5.0)
            self.sock.sendmsg([json.dumps(message).encode()], rights)
        except OSError as error:  # it is ending; the next one is given everything
            sys.stderr.write(f"holder: the loader does not take a message: {error}\n")
        finally:
            self.sock.setblocking(False)
