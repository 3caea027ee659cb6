"""What a sandbox's writable upper can live on here, and what the kernel can do with it. Everything is tried, not guessed.

``tmpfs``: size and inodes limited, in memory. ``loop``: an ext4 image of the limit's size, for large writes. ``dir``: a plain
directory, which has no limit. All functions block: call them in a thread.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile

from dsec import syscalls
from dsec.errors import NodeError

MIN_LOOP = 8 << 20
_EXT4 = ("-q", "-F", "-m", "0", "-O", "^has_journal,^resize_inode", "-E", "lazy_itable_init=1,nodiscard,root_owner=0:0", "-b", "4096")


def modes() -> tuple[tuple[str, ...], dict[str, str]]:
    """The disk modes of this node, best first, and why others are missing."""
    missing: dict[str, str] = {}
    found = ["tmpfs"]
    if shutil.which("mkfs.ext4") is None:
        missing["disk=loop"] = "no mkfs.ext4"
    elif not os.path.exists("/dev/loop-control"):
        missing["disk=loop"] = "no loop devices"
    else:
        found.append("loop")
    return (*found, "dir"), missing


def make_ext4(path: str, size: int, inodes: int) -> None:
    """A sparse image for a ``loop`` upper. Without a journal: nothing in it outlives its sandbox. Raises `NodeError`."""
    try:
        with open(path, "xb") as file:
            file.truncate(max(size, MIN_LOOP))
        # The inode table is part of the image: an eighth of it at most.
        command = ["mkfs.ext4", *_EXT4, "-N", str(min(inodes, max(size, MIN_LOOP) // 2048)), path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise NodeError(f"mkfs.ext4: {error}", reason="disk") from error
    if done.returncode:
        raise NodeError(f"mkfs.ext4: {done.stderr.strip()[-300:]}", reason="disk")


def mappable(state_dir: str) -> frozenset[str]:
    """Disk modes whose file system can be id-mapped here (tmpfs: Linux 6.3). For the others the upper is owned by the mapped ids on
    disk, and a layer packed from it is right under this sandbox's range only."""
    if syscalls.disabled("upper_idmap"):
        return frozenset()
    try:
        userns = syscalls.make_userns(100_000)
    except OSError:
        return frozenset()
    found = {"loop"}  # ext4: Linux 5.12, older than anything else that is needed
    try:
        for mode in ("tmpfs", "dir"):
            with contextlib.suppress(OSError):
                _try_map(mode, state_dir, userns)
                found.add(mode)
    finally:
        os.close(userns)
    return frozenset(found)


def _try_map(mode: str, state_dir: str, userns: int) -> None:
    with tempfile.TemporaryDirectory(prefix=".probe-", dir=state_dir) as place:
        fd = syscalls.new_mount("tmpfs", [("size", "64k")]) if mode == "tmpfs" else syscalls.open_tree(place)
        try:
            syscalls.mount_setattr(fd, attr_set=syscalls.MOUNT_ATTR_IDMAP, userns_fd=userns)
        finally:
            os.close(fd)
