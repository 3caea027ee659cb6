"""A partly filled blob as a file of FUSE's, for kernels without fanotify's pre-content events: EROFS is mounted over that file.

The kernel's protocol is spoken here, for one file that is the root of its file system: no library, no daemon but the layers' loader
(`loader`). A request that was read waits in the journal until it is answered (`gate`), and anybody who has the descriptor of /dev/fuse
can answer it by its number: so a killed worker costs its readers nothing but time. Holder, Edge and worker have copies of
that descriptor. When the last one is gone the kernel ends what waits with ECONNABORTED and every later read with ENOTCONN, which EROFS
shows as EIO: readers never see zeros.

EROFS does not let go of a file that it is mounted over. So a layer that has become whole stays behind FUSE for the sandboxes
that are on it, and new ones get a mount of the plain file. ``<data>.fuse`` is there as long, with a shared flock of the worker that
serves: without the flock those sandboxes are broken.

The protocol: Linux, include/uapi/linux/fuse.h, from 7.23 (Linux 4.2) on. Standard library, syscalls and mounts only: the holder loads it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import struct
import threading
import time

import msgspec

from dsec import syscalls
from dsec.layers import mounts
from dsec.layers.gate import SLOTS, Event, Over
from dsec.layers.mounts import LayerMount

_IN = struct.Struct("<IIQQIIIHH")  # length, opcode, unique, node, uid, gid, pid, extensions
_OUT = struct.Struct("<IiQ")  # length, -errno, unique
_READ = struct.Struct("<QQI")  # handle, offset, length: the beginning of fuse_read_in
_ATTR = struct.Struct("<QIIQQQQQQIIIIIIIIII")  # fuse_attr_out with its fuse_attr
_INIT = struct.Struct("<IIIIHHIIHH32x")  # fuse_init_out
_LOOKUP, _FORGET, _GETATTR, _READ_OP, _INIT_OP, _INTERRUPT, _BATCH_FORGET = 1, 2, 3, 15, 26, 36, 42
_ASYNC_READ, _ASYNC_DIO, _MAX_PAGES = 1 << 0, 1 << 15, 1 << 22
_SCRAP = 8192  # FUSE_MIN_READ_BUFFER: the kernel refuses to be read with less
_PAGES = 256  # of one request: 1 MiB
_FOREVER = 1 << 40  # seconds that attributes hold
_OPEN_S = 5.0


def beside(data: str) -> str:
    """The file that says that something is mounted over this blob through FUSE."""
    return data + ".fuse"


def served(data: str) -> bool | None:
    """Whether a worker serves the mounts that stand on this blob through FUSE; None when there are none."""
    return mounts.held(beside(data))


def forget(data: str) -> None:
    """Nothing stands on this blob through FUSE any more, if nobody serves it."""
    with contextlib.suppress(FileNotFoundError):
        if served(data) is False:
            os.unlink(beside(data))


def _hold(path: str) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_SH)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)  # somebody took it away just now


class Fuse:
    """The worker's end of one blob: a `gate.Gate`."""

    slot = 128
    lasting = True

    def __init__(self, fd: int, data: int, path: str) -> None:
        self.fd = fd
        self._data = data
        self._size = os.fstat(data).st_size
        self._path = path
        self._scrap = bytearray(_SCRAP)
        self._nowait = os.RWF_NOWAIT
        self._lock = _hold(beside(path))

    def take(self, slot: memoryview) -> bool:
        return _take(self.fd, slot, self._scrap)

    def event(self, slot: memoryview) -> Event | None:
        length, opcode, unique, *_ = _IN.unpack_from(slot)
        if length < _IN.size:
            return None
        if opcode == _READ_OP:
            _, offset, wanted = _READ.unpack_from(slot, _IN.size)
            return unique, offset, wanted
        _control(self.fd, slot, self._size)
        return None

    def answer(self, event: Event, error: int, *, wait: bool = True) -> bool:
        unique, offset, length = event
        length = max(0, min(length, self._size - offset))
        buffer = bytearray(0 if error else length)
        if not error:
            try:
                got = self._fetch(buffer, offset, wait)
            except BlockingIOError:
                return False
            except OSError:
                got = -1
            if got != length:
                # A short answer would mean the end of the file, and zeros from there on.
                error, buffer = errno.EIO, bytearray()
        _reply(self.fd, unique, error, buffer)
        return True

    def _fetch(self, buffer: bytearray, offset: int, wait: bool) -> int:
        if not wait and self._nowait:
            try:
                got = os.preadv(self._data, [buffer], offset, self._nowait)
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:
                    raise
                self._nowait = 0  # this file system never says whether it would wait
            else:
                if got < len(buffer):
                    raise BlockingIOError
                return got
        view, done = memoryview(buffer), 0
        while done < len(buffer):
            got = os.preadv(self._data, [view[done:]], offset + done)
            if not got:
                break
            done += got
        return done

    def forget(self, event: Event) -> None:
        """Nothing came with it but its number."""

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._lock)
        forget(self._path)


def _take(fd: int, slot: memoryview, scrap: bytearray) -> bool:
    try:
        return os.readv(fd, [slot, scrap]) > 0
    except OSError as error:
        if error.errno in (errno.ENODEV, errno.ECONNABORTED):
            raise Over from error
        if error.errno in (errno.EAGAIN, errno.EINTR, errno.ENOENT):  # ENOENT: its reader was just interrupted
            return False
        raise


def _reply(fd: int, unique: int, error: int = 0, body: bytes | bytearray = b"") -> None:
    """ENOENT and the like: nobody waits for this answer any more, or all is over; then `take` says so."""
    with contextlib.suppress(FileNotFoundError, BlockingIOError):
        try:
            os.writev(fd, [_OUT.pack(_OUT.size + len(body), -error, unique), body])
        except OSError as problem:
            if problem.errno not in (errno.ENODEV, errno.ECONNABORTED, errno.EPERM):
                raise


def _control(fd: int, request: memoryview, size: int) -> None:
    """Answer what is no read. ENOSYS is an answer that the kernel keeps in mind: it opens, flushes and closes without us from then on."""
    _, opcode, unique, node, *_ = _IN.unpack_from(request)
    if opcode == _INIT_OP:
        major, minor, ahead, offered = struct.unpack_from("<IIII", request, _IN.size)
        if major < 7:
            _reply(fd, unique, errno.EPROTO)
            return
        flags = (_ASYNC_READ | _ASYNC_DIO | _MAX_PAGES) & offered
        # Version 7.31 at most (Linux 5.4): nothing of what came later is used.
        _reply(fd, unique, 0, _INIT.pack(7, min(minor, 31), ahead, flags, 64, 48, 4096, 1, _PAGES, 0))
    elif opcode == _GETATTR and node == 1:
        blocks = (size + 511) // 512
        attributes = (1, size, blocks, 0, 0, 0, 0, 0, 0, 0o100400, 1, 0, 0, 0, 4096, 0)
        _reply(fd, unique, 0, _ATTR.pack(_FOREVER, 0, 0, *attributes))
    elif opcode not in (_FORGET, _BATCH_FORGET):
        _reply(fd, unique, errno.ENOENT if opcode == _LOOKUP else errno.ENOSYS)


# --- the holder's part -----------------------------------------------------------------------------------------------


def make(data: str) -> tuple[int, int, int, int]:
    """A FUSE file in a blob's place: the descriptors of /dev/fuse, the blob, its journal, and that file.

    Raises `OSError`: ENOSYS when disabled, ENOENT without /dev/fuse, ENODEV where the kernel has no FUSE.
    """
    fds: list[int] = []
    try:
        fds.append(os.open(data, os.O_RDWR | os.O_CLOEXEC))
        fds.append(os.memfd_create("dsec-journal", os.MFD_CLOEXEC))
        os.ftruncate(fds[1], Fuse.slot * SLOTS)
        device, file = _mount(os.fstat(fds[0]).st_size)
        fds += [device, file]
        os.close(_hold(beside(data)))
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return device, fds[0], fds[1], file


def open_layer(mount: LayerMount, file: int) -> int:
    """`mounts.open_layer` over the file that `make` gave. Nothing is read from it meanwhile, so this does not wait for the worker."""
    if os.fstat(file).st_size != os.stat(mount.devices[-1]).st_size:
        raise OSError(errno.EIO, f"{mount.devices[-1]}: its size has changed")
    over = msgspec.structs.replace(mount, devices=(*mount.devices[:-1], f"/proc/self/fd/{file}"))
    return mounts.open_layer(over, marked=True, direct=True)  # FUSE would keep a copy of every page beside those of EROFS and of the blob


def _mount(size: int) -> tuple[int, int]:
    """A file of ``size`` bytes whose reads come to the first descriptor; the second has it open. It is mounted nowhere."""
    if syscalls.disabled("fuse"):
        raise OSError(errno.ENOSYS, "FUSE is disabled by DSEC_DISABLE")
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        options = [("fd", str(device)), ("rootmode", "100400"), ("user_id", "0"), ("group_id", "0")]
        root = syscalls.new_mount("fuse", options, syscalls.MOUNT_ATTR_RDONLY | syscalls.MOUNT_ATTR_NODEV)
        try:
            return device, _open(device, root, size)
        finally:
            os.close(root)
    except BaseException:
        os.close(device)
        raise


def _open(device: int, root: int, size: int) -> int:
    """Open the file: a thread does, for the kernel asks us meanwhile. All that it would ask later is asked and answered here once
    (attributes, open, flush), so that nobody who opens, mounts or closes waits for the worker."""
    found: list[int | OSError] = []
    given_up = threading.Event()
    lock = threading.Lock()
    ended, end = os.pipe2(os.O_CLOEXEC)

    def work() -> None:
        what: int | OSError
        try:
            what = _open_twice(f"/proc/self/fd/{root}", size)
        except OSError as error:
            what = error
        with lock:
            found.append(what)
            if given_up.is_set():
                _let_go(found)
        os.close(end)

    threading.Thread(target=work, name="dsec-fuse-open", daemon=True).start()
    scrap, request = bytearray(_SCRAP), memoryview(bytearray(Fuse.slot))
    late = time.monotonic() + _OPEN_S
    poll = select.poll()
    poll.register(device, select.POLLIN)
    poll.register(ended, select.POLLIN)
    try:
        while ended not in (ready := dict(poll.poll(_OPEN_S * 1e3))):
            if time.monotonic() > late:  # the thread is sent away by the kernel when the caller closes the device
                raise OSError(errno.ETIMEDOUT, "the kernel does not open a FUSE file")
            if device in ready and _take(device, request, scrap):
                _control(device, request, size)
    except BaseException:
        with lock:
            given_up.set()
            _let_go(found)
        raise
    finally:
        os.close(ended)
    if isinstance(found[0], OSError):
        raise found[0]
    return found[0]


def _let_go(found: list[int | OSError]) -> None:
    """Close the file, if there is one: nobody waits for it any more."""
    for file in found:
        if isinstance(file, int):
            os.close(file)


def _open_twice(path: str, size: int) -> int:
    """The first to be opened and closed asks all that the kernel does not ask again."""
    os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if (found := os.fstat(file).st_size) != size:
        os.close(file)
        raise OSError(errno.EIO, f"a FUSE file of {found} bytes where {size} were meant")
    return file


def attempt() -> None:
    """Make such a file and let it go; blocks for a few milliseconds, needs root. Raises `OSError` where that cannot be."""
    try:
        for fd in _mount(4096):
            os.close(fd)
    except Over as error:
        raise OSError(errno.ENODEV, "the kernel ends what is mounted through FUSE") from error
