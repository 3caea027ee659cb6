"""Which ways of stacking layers this kernel has, found out by trying. Nothing stays: it all happens in a thread's own mount namespace.

`by_descriptor`: clones of detached mounts, given to an overlay by descriptor (Linux 6.15; overlay's part came with 6.13).
`idmapped`: an overlay over mounts that are mapped into a user namespace (Linux 5.19; tmpfs 6.3), attached or not.
Both block for a few milliseconds: call them from a thread where an event loop runs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
from collections.abc import Callable

from dsec import syscalls

_ID_BASE = 1 << 20  # of the throw-away user namespace


def by_descriptor() -> None:
    """Raises `OSError` where overlays have to be made by paths."""
    if syscalls.disabled("overlay_fd"):
        raise OSError(errno.ENOSYS, "disabled by DSEC_DISABLE")
    _apart(_descriptors)


def idmapped() -> None:
    """Raises `OSError` where a sandbox cannot have a user namespace of its own over shared layers."""
    if syscalls.disabled("userns"):
        raise OSError(errno.ENOSYS, "user namespaces are disabled by DSEC_DISABLE")
    _apart(_idmapped)


def _apart(probe: Callable[[contextlib.ExitStack], None]) -> None:
    """Runs it in a thread with a mount namespace of its own, which ends with the thread; file-system ids are a thread's too."""
    problem: list[OSError] = []

    def run() -> None:
        try:
            syscalls.unshare(syscalls.CLONE_NEWNS)
            syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
            with contextlib.ExitStack() as stack:
                probe(stack)
        except OSError as error:
            problem.append(error)

    thread = threading.Thread(target=run, name="dsec-probe")
    thread.start()
    thread.join()
    if problem:
        raise problem[0]


def _keep(stack: contextlib.ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd


def _fill(fd: int) -> None:
    for name in ("lower", "upper", "work"):
        os.mkdir(name, 0o755, dir_fd=fd)
    os.close(os.open("lower/f", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644, dir_fd=fd))


def _descriptors(stack: contextlib.ExitStack) -> None:
    scratch = _keep(stack, syscalls.new_mount("tmpfs", [("size", "1m"), ("mode", "0755")]))
    _fill(scratch)
    copy = _keep(stack, syscalls.open_tree("", syscalls.OPEN_TREE_CLONE | syscalls.OPEN_TREE_CLOEXEC | syscalls.AT_EMPTY_PATH, scratch))
    lower, upper, work = (
        _keep(stack, os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=copy)) for name in ("lower", "upper", "work")
    )
    _keep(stack, syscalls.new_mount("overlay", [("lowerdir+", lower), ("upperdir", upper), ("workdir", work)]))


def _idmapped(stack: contextlib.ExitStack) -> None:
    place = stack.enter_context(tempfile.TemporaryDirectory(prefix="dsec-probe-"))
    syscalls.mount("none", place, "tmpfs", 0, "size=1m,mode=755")
    stack.callback(syscalls.umount2, place, syscalls.MNT_DETACH)
    top = _keep(stack, os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    _fill(top)
    os.mkdir("mapped", dir_fd=top)
    os.mkdir("merged", dir_fd=top)
    userns = _keep(stack, syscalls.make_userns(_ID_BASE))
    copy = _keep(stack, syscalls.open_tree(place))
    syscalls.mount_setattr(copy, attr_set=syscalls.MOUNT_ATTR_IDMAP, userns_fd=userns)
    syscalls.move_mount(copy, f"{place}/mapped")
    stack.callback(syscalls.umount2, f"{place}/mapped", syscalls.MNT_DETACH)
    layers = ",".join(f"{kind}={place}/mapped/{name}" for kind, name in (("lowerdir", "lower"), ("upperdir", "upper"), ("workdir", "work")))
    # The mounter's ids must be in the map, else the overlay is silently read-only.
    syscalls.setfsgid(_ID_BASE)
    syscalls.setfsuid(_ID_BASE)
    try:
        syscalls.regain_capabilities()
        syscalls.mount("overlay", f"{place}/merged", "overlay", 0, layers)
        stack.callback(syscalls.umount2, f"{place}/merged", syscalls.MNT_DETACH)
        if os.stat(f"{place}/merged/f").st_uid != _ID_BASE:
            raise OSError(errno.EIO, "the overlay does not show mapped owners")
        os.mkdir(f"{place}/merged/written")
    finally:
        syscalls.setfsuid(0)
        syscalls.setfsgid(0)
