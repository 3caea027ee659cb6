"""Trees of files that are taken away. Mounts are never entered: what is mounted somewhere below is not ours to remove, and is the node's
own /dev where a build that broke off has left it. So it is an error, and everything behind the mount stays.

`shutil.rmtree` enters mounts, and has a frame of Python and a descriptor for each level; here there are two descriptors, however deep
what a sandbox has made is. All functions block: call them in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from dsec import syscalls

_TRIES = 3  # of `clear`: what is just ending may write there still, or remove its own
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove(path: str | Path) -> None:
    """Take a directory away with all that is in it.

    Raises `FileNotFoundError`; `OSError` EXDEV for a mount (``path`` itself, or below it), ENOTDIR or ELOOP for what is no directory.
    """
    empty(path)
    os.rmdir(path)


def empty(path: str | Path) -> None:
    """Take away what is in a directory. Raises as `remove`."""
    above, name = os.path.split(os.path.abspath(path))
    top = os.open(above, _FLAGS & ~os.O_NOFOLLOW)
    try:
        fd = _enter(top, name, str(path))
    finally:
        os.close(top)
    levels: list[tuple[str, tuple[int, int], list[str]]] = []  # above ``fd``: the name below it, who it is, what it still has to enter
    try:
        todo, seen = _scan(fd)
        while True:
            if todo:
                name = todo.pop()
                below = _enter(fd, name, "/".join([str(path), *(level[0] for level in levels), name]))
                levels.append((name, _who(fd), todo))
                os.close(fd)
                fd = below
                todo, seen = _scan(fd)
            elif seen:
                todo, seen = _scan(fd)  # some file systems leave names out while others are removed
            elif levels:
                name, who, todo = levels.pop()
                up = os.open("..", _FLAGS, dir_fd=fd)
                os.close(fd)
                fd, seen = up, True
                if _who(fd) != who:
                    raise OSError(errno.ESTALE, "somebody moves directories in a tree that is being removed", str(path))
                os.rmdir(name, dir_fd=fd)
            else:
                return
    finally:
        os.close(fd)


def clear(path: str | Path) -> None:
    """`remove`, as far as that can be done: for temporary directories. What is mounted stays, with all that is behind it."""
    for _ in range(_TRIES):
        with contextlib.suppress(OSError):
            remove(path)
            return


def _enter(above: int, name: str, path: str) -> int:
    try:
        return syscalls.openat2(above, name, _FLAGS, resolve=syscalls.RESOLVE_NO_XDEV)
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise OSError(errno.EXDEV, "something is mounted there: unmount it first", path) from None
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None


def _who(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _scan(fd: int) -> tuple[list[str], bool]:
    """Unlink everything but directories: their names, and whether there was anything."""
    directories, seen = [], False
    with os.scandir(fd) as entries:
        for entry in entries:
            seen = True
            if entry.is_dir(follow_symlinks=False):
                directories.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=fd)
    return directories, seen
