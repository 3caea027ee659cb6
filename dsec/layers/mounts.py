"""A layer as a mount descriptor: read-only, detached, attached nowhere.

`open_layer` makes one mount of one layer. A node makes it once (its holder process keeps the descriptor) and gives it to every
sandbox as a lowerdir: each mount of an image has a page cache of its own, so a second mount would double the memory. Nothing is
attached to any tree, so a kill -9 of the holder leaves no mount behind; a loop device is set to clear itself.

Imports dsec.syscalls, the standard library and msgspec only: the holder process loads it. All functions may sleep on the disk:
call them in a thread or in the holder, never on an event loop.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from typing import Literal

import msgspec

from dsec import syscalls

Kind = Literal["erofs_file", "erofs_loop", "dir"]

LOOP_CTL_GET_FREE = 0x4C82
LOOP_CONFIGURE = 0x4C0A
LO_FLAGS_READ_ONLY = 1
LO_FLAGS_AUTOCLEAR = 4
LO_FLAGS_DIRECT_IO = 16
_LOOP_TRIES = 64

# A sandbox sees the overlay's own flags, not these; they keep a holder of the descriptor from writing or opening devices.
_ATTRIBUTES = syscalls.MOUNT_ATTR_RDONLY | syscalls.MOUNT_ATTR_NODEV
# What a kernel says that cannot mount EROFS from a file: no such type, not a block device, no such option.
_NO_FILE_BACKED = frozenset({errno.ENOTBLK, errno.ENODEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})


class Lazy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the chunks of a partly filled blob come from (`lazy`, `loader`).

    ``name``: the layer's digest; ``remote``: URL of the store; ``manifest``: path of the manifest; ``touched``: where the order of first
    reads is written; ``ahead``: chunks to fetch unasked; ``patience``: seconds that a reader waits for a store that cannot be reached
    before it gets EIO; ``way``: what holds readers of holes back, a fanotify mark on the blob or a FUSE file in its place.
    """

    name: str
    remote: str
    manifest: str
    touched: str = ""
    ahead: tuple[int, ...] = ()
    patience: float = 10.0
    way: Literal["fanotify", "fuse"] = "fanotify"


def bitmap(data: str) -> str:
    """Which chunks of a blob are there; no such file when the blob is whole."""
    return data + ".map"


class LayerMount(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one layer is mounted on this node.

    ``erofs_file``: source is an EROFS image, mounted straight from the file (Linux 6.12 and later, 40 us).
    ``erofs_loop``: the same image through a loop device (any kernel with EROFS).
    ``dir``: source is a directory, bound read-only (any kernel with open_tree; the directory must never change).
    ``devices``: extra blobs of a multi-device image, in the image's order. ``size``: bytes that source must have (0: unchecked).
    ``lazy``: the last device may still be partly filled; it is then mounted under a mark only.
    """

    kind: Kind
    source: str
    devices: tuple[str, ...] = ()
    size: int = 0
    lazy: Lazy | None = None


def open_layer(mount: LayerMount, *, marked: bool = False, direct: bool | None = None) -> int:
    """A detached read-only mount of the layer; the caller closes the descriptor.

    ``marked``: the caller guards every partly filled blob. Without that it is refused, for its holes would read as zeros. ``direct``:
    read past the page cache of the image's own file; None: where nothing is being filled.

    Raises `OSError`: ENOENT (no such source), EIO (its size is not the recorded one, or a blob is partly filled), ENOSYS (kind
    disabled by DSEC_DISABLE), and what the file system said about a damaged image (EUCLEAN, EFSCORRUPTED, EINVAL).
    """
    if syscalls.disabled(mount.kind):
        raise OSError(errno.ENOSYS, f"{mount.kind} mounts are disabled by DSEC_DISABLE")
    if mount.kind == "dir":
        return _open_dir(mount.source)
    for path in (mount.source, *mount.devices):
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(errno.EINVAL, f"{path}: not a regular file")
    if not marked:
        for path in mount.devices:
            if os.path.exists(bitmap(path)):
                raise OSError(errno.EIO, f"{path}: partly filled, and nobody would fill it")
    if mount.size and (actual := os.stat(mount.source).st_size) != mount.size:
        raise OSError(errno.EIO, f"{mount.source}: {actual} bytes where {mount.size} were recorded")
    return _open_file(mount, not marked if direct is None else direct) if mount.kind == "erofs_file" else _open_loop(mount)


def held(path: str | os.PathLike[str]) -> bool | None:
    """Whether somebody holds a flock on a file or directory; None when it is not there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def pin_layer(mount: LayerMount) -> int:
    """Say that this layer is in use: a descriptor with a shared flock on its source. While it is open (it may be passed on by
    SCM_RIGHTS or inherited), the store neither removes nor collects the layer, whatever process asks; it ends with its last holder.

    Raises `OSError`: ENOENT, and EBUSY while the store is just removing it.
    """
    fd = os.open(mount.source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.stat(mount.source).st_ino != os.fstat(fd).st_ino:  # removed and made again between open and flock
            raise OSError(errno.EBUSY, f"{mount.source}: being replaced")
    except BlockingIOError:
        os.close(fd)
        raise OSError(errno.EBUSY, f"{mount.source}: being removed") from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open_dir(path: str) -> int:
    fd = syscalls.open_tree(path)
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, f"{path}: not a directory")
        syscalls.mount_setattr(fd, attr_set=_ATTRIBUTES)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open_file(mount: LayerMount, direct: bool) -> int:
    options: list[tuple[str, str | int | None]] = [("source", mount.source), ("ro", None)]
    options += [("device", device) for device in mount.devices]
    if direct and not syscalls.disabled("directio"):
        # Without it every page is cached twice: in the image's file and in the mount. For a blob that is being filled that is as it should
        # be: a direct read would first have to write to the disk what was fetched a moment ago.
        try:
            return syscalls.new_mount("erofs", [*options, ("directio", None)], _ATTRIBUTES)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return syscalls.new_mount("erofs", options, _ATTRIBUTES)


def _open_loop(mount: LayerMount) -> int:
    loops: list[int] = []
    try:
        paths = []
        for image in (mount.source, *mount.devices):
            path, loop = _attach_loop(image)
            loops.append(loop)
            paths.append(path)
        options: list[tuple[str, str | int | None]] = [("source", paths[0]), ("ro", None)]
        options += [("device", path) for path in paths[1:]]
        return syscalls.new_mount("erofs", options, _ATTRIBUTES)
    finally:
        # The mount holds the devices from here on; AUTOCLEAR detaches them when it ends, or now if it failed.
        for loop in loops:
            os.close(loop)


def _attach_loop(image: str) -> tuple[str, int]:
    backing = os.open(image, os.O_RDONLY | os.O_CLOEXEC)
    try:
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
        try:
            for _ in range(_LOOP_TRIES):
                number = fcntl.ioctl(control, LOOP_CTL_GET_FREE)
                path = f"/dev/loop{number}"
                loop = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    _configure_loop(loop, backing, image)
                except OSError as error:
                    os.close(loop)
                    if error.errno == errno.EBUSY:  # another process took it between the two calls
                        continue
                    raise
                return path, loop
        finally:
            os.close(control)
    finally:
        os.close(backing)
    raise OSError(errno.EBUSY, f"{image}: no free loop device after {_LOOP_TRIES} tries")


def _configure_loop(loop: int, backing: int, image: str) -> None:
    """struct loop_config (linux/loop.h): fd, block size, struct loop_info64, 8 reserved words."""
    base = LO_FLAGS_READ_ONLY | LO_FLAGS_AUTOCLEAR
    for flags in (base | LO_FLAGS_DIRECT_IO, base):  # not every file system below can do direct I/O
        info = struct.pack("=5Q4I64s64s32s2Q", 0, 0, 0, 0, 0, 0, 0, 0, flags, os.fsencode(image)[:63], b"", b"", 0, 0)
        config = struct.pack("=II", backing, 4096) + info + bytes(64)
        try:
            fcntl.ioctl(loop, LOOP_CONFIGURE, config)
        except OSError as error:
            if error.errno != errno.EINVAL or flags == base:
                raise
        else:
            return


def probe(image: str, devices: tuple[str, ...] = ()) -> tuple[Kind, str]:
    """The best kind that this kernel really mounts for the given EROFS image, and why a better one was passed over ("" if none was).

    Falls back erofs_file -> erofs_loop -> dir. ``image`` must be known to be good: a damaged one looks like an old kernel (EINVAL).
    """
    reasons = []
    kinds: tuple[Kind, ...] = ("erofs_file", "erofs_loop")
    for kind in kinds:
        try:
            os.close(open_layer(LayerMount(kind=kind, source=image, devices=devices)))
        except OSError as error:
            if kind == "erofs_file" and error.errno not in _NO_FILE_BACKED:
                raise
            reasons.append(f"{kind}: {error.strerror}")
        else:
            return kind, "; ".join(reasons)
    return "dir", "; ".join(reasons)
