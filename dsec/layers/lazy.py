"""The holder's part of loading on demand: marks partly filled blobs and keeps alive the process that fills them.

Each blob has a kit of three descriptors: a fanotify group with one mark, the blob opened for writing, and the journal. Writes through
that descriptor raise no events, whoever else has marked the blob (`open_unseen`), and a mount made after the mark raises them always.
Order is everything: mark, then mount. While anybody holds the group, a reader of a hole waits; when the last one lets go, it reads
zeros. So the Edge holds a copy of each kit, and the worker another.

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
import struct
import sys
import threading
from typing import Any

from dsec import syscalls
from dsec.layers import fuse
from dsec.layers.gate import SLOTS, Fanotify
from dsec.layers.mounts import LayerMount, bitmap, open_layer

CONTROL_FD = 3
MAX_MESSAGE = 128 * 1024


class Kit:
    """What keeps one blob's readers safe. ``spec`` is what the worker is told; ``fds``: what readers wait at, the blob, the journal, and
    of a FUSE kit the file that stands for the blob, as long as it is to be mounted."""

    def __init__(self, spec: dict[str, Any], fds: tuple[int, ...]) -> None:
        self.spec = spec
        self.fds = fds

    @property
    def by_fuse(self) -> bool:
        return self.spec.get("way") == "fuse"

    def open(self, mount: LayerMount) -> int:
        """The layer as a mount whose holes are guarded (`mounts.open_layer`)."""
        if not self.by_fuse:
            return open_layer(mount, marked=True)
        if len(self.fds) < 4:
            raise OSError(errno.EBUSY, "the layer has just become whole")
        return fuse.open_layer(mount, self.fds[3])

    def settle(self) -> None:
        """The blob is whole: nothing more is mounted through FUSE; what is, stays as it is."""
        for fd in self.fds[3:]:
            os.close(fd)
        self.fds = self.fds[:3]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def being_filled(data: str) -> bool:
    """Whether a worker fills this blob, or it is whole. (Each worker holds a shared flock on the bitmap.)"""
    return _locked(bitmap(data))


def guarded(data: str) -> bool:
    """Whether somebody has this blob's kit, so that readers of its holes wait; the worker may be dead or not have begun yet. (A kit has
    a shared flock on the blob, which is there as long as any copy of it.) True too when the blob is gone: nobody reads it anew."""
    return _locked(data)


def _locked(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(fd).st_nlink == 0  # gone between the two calls
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


class _Opener:
    """A fanotify group of this process, kept: ending one waits for a grace period of the kernel (up to 16 ms)."""

    def __init__(self) -> None:
        self.group = -1
        self.lock = threading.Lock()

    def open(self, path: str) -> int:
        with self.lock:
            if self.group < 0:
                flags = syscalls.FAN_CLOEXEC | syscalls.FAN_NONBLOCK
                self.group = syscalls.fanotify_init(flags, os.O_RDWR | os.O_LARGEFILE | os.O_CLOEXEC)
            plain = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                syscalls.fanotify_mark(self.group, syscalls.FAN_MARK_ADD, syscalls.FAN_OPEN, path)
                try:
                    os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                    return self._take(os.fstat(plain))
                finally:
                    syscalls.fanotify_mark(self.group, syscalls.FAN_MARK_REMOVE, syscalls.FAN_OPEN, path)
            finally:
                os.close(plain)

    def _take(self, wanted: os.stat_result) -> int:
        """One descriptor of the file; others (of whoever opened it just now, or a file that was opened so before) are closed."""
        found = -1
        while True:
            try:
                data = os.read(self.group, 4096)
            except BlockingIOError:
                break
            at = 0
            while at + 24 <= len(data):
                length, _, _, _, _, fd, _ = struct.unpack_from("=IBBHQii", data, at)
                at += max(length, 24)
                if fd < 0:
                    continue
                if found < 0 and os.path.samestat(os.fstat(fd), wanted):
                    found = fd
                else:
                    os.close(fd)
        if found < 0:
            raise OSError(errno.EIO, "the kernel gave no descriptor that raises no events")
        return found


_opener = _Opener()


def open_unseen(path: str) -> int:
    """Open a file for reading and writing so that nothing done through the descriptor raises a fanotify event, in any group.

    Whether a descriptor raises pre-content events is decided when it is opened, by the marks of that moment: one that is opened when
    somebody else has marked the file already raises them, and a worker that writes through it would wait for itself. Descriptors that
    come with an event never do (FMODE_NONOTIFY), so we open the file under a mark of our own and keep what the event brings.
    Raises `OSError`."""
    return _opener.open(path)


def make_kit(mount: LayerMount) -> Kit:
    """Open and mark the mount's blob; others (another node's daemon on the same store, a worker that outlived its holder) may have marked
    it too: every reader then waits for all of them. Raises `OSError`: ENOSYS or EINVAL where the kernel has no pre-content events,
    EMFILE when root has too many groups (fs.fanotify.max_user_groups). Where the mount says so, a FUSE file instead of a mark."""
    if mount.lazy is None:
        raise OSError(errno.EINVAL, "this layer is not loaded on demand")
    lazy, data = mount.lazy, mount.devices[-1]
    spec: dict[str, Any] = {"name": lazy.name, "remote": lazy.remote, "manifest": lazy.manifest, "data": data, "touched": lazy.touched}
    spec |= {"meta": mount.source, "ahead": list(lazy.ahead), "patience": lazy.patience, "way": lazy.way}
    kit = Kit(spec, fuse.make(data) if lazy.way == "fuse" else _mark(data))
    fcntl.flock(kit.fds[1], fcntl.LOCK_SH)  # `guarded`
    return kit


def _mark(data: str) -> tuple[int, int, int]:
    if syscalls.disabled("fanotify"):
        raise OSError(errno.ENOSYS, "fanotify is disabled by DSEC_DISABLE")
    fds: list[int] = []
    try:
        flags = syscalls.FAN_CLASS_PRE_CONTENT | syscalls.FAN_CLOEXEC | syscalls.FAN_NONBLOCK | syscalls.FAN_UNLIMITED_QUEUE
        fds.append(syscalls.fanotify_init(flags, os.O_RDONLY | os.O_LARGEFILE | os.O_CLOEXEC))
        fds.append(open_unseen(data))
        fds.append(os.memfd_create("dsec-journal", os.MFD_CLOEXEC))
        os.ftruncate(fds[2], Fanotify.slot * SLOTS)
        syscalls.fanotify_mark(fds[0], syscalls.FAN_MARK_ADD, syscalls.FAN_PRE_ACCESS, data)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds[0], fds[1], fds[2]


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

    def mounted(self, name: str, fd: int) -> None:
        """The layer of a kit that was just added is mounted: the worker may read through it what a prefetch list names."""
        kit = self.kits[name]
        if kit.spec["ahead"] and not kit.by_fuse:
            self._send({"op": "mounted", "name": name}, (fd,))

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
        self._send({"op": "add", **kit.spec}, kit.fds[:3])

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
