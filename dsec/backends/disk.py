"""What a sandbox's writable upper can live on here, and what the kernel can do with it. Everything is tried, not guessed.

``quota``: a directory with a project quota, bytes and inodes; ``btrfs``: a subvolume with a qgroup, bytes only, on the state directory's
own btrfs or on one in a sparse file beside it; ``tmpfs``: size and inodes limited, in memory; ``loop``: an ext4 image of the limit's size
for each sandbox; ``dir``: a plain directory, which has no limit. All functions block: call them in a thread.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time

from dsec import syscalls
from dsec.backends import btrfs, quota
from dsec.backends.base import LaunchPlan
from dsec.backends.driver import upper_path
from dsec.errors import NodeError, Unsupported

CLEAR_TIMEOUT = 3.0  # seconds that a loop device takes to clear itself, at most
MIN_STORE = 256 << 20  # what mkfs.btrfs makes a file system of that is of use
MIN_LOOP = 8 << 20
_EXT4_FEATURES = ("-O", "^has_journal,^resize_inode", "-E", "lazy_itable_init=1,nodiscard,root_owner=0:0")
_EXT4 = ("-q", "-F", "-m", "0", "-b", "4096", "-I", "256", *_EXT4_FEATURES)


class Disks:
    """The disks of one Edge. ``wanted`` and ``store_bytes``: `ContainerConfig.disk` and ``disk_store_bytes``."""

    def __init__(self, state_dir: str, wanted: str = "auto", store_bytes: int = 0) -> None:
        self.state = state_dir
        self.wanted = wanted
        self.store_bytes = store_bytes
        self.modes: tuple[str, ...] = ()  # best first
        self.missing: dict[str, str] = {}  # ``disk=MODE`` -> why not
        self.image = f"{state_dir}/disks.btrfs"
        self.place = f"{state_dir}/disks"
        self.in_image = False  # the store of subvolumes is a file, and the holder mounts it
        self.root = ""  # that store as this process reaches it
        self.measured = ("", 0)  # what the uppers share that are not memory: which it is, and its bytes

    @classmethod
    def seen(cls, state_dir: str, wanted: str, store_bytes: int, userns: bool = True) -> Disks:
        """The disks that an Edge would find there, with nothing made. A directory that is not there yet is looked for in its parent.

        Raises `Unsupported` as `look`."""
        where = state_dir
        while not os.path.isdir(where):
            where = os.path.dirname(where) or "/"
        disks = cls(where, wanted, store_bytes)
        disks.look(userns, make=False)
        return disks

    def look(self, userns: bool, make: bool = True) -> None:
        """Find out what there is, and ``make`` the btrfs store where it is wanted.

        Raises `Unsupported` when ``container.disk`` names what this node does not have, `NodeError`."""
        found = {mode: self._trouble(mode, userns, make) for mode in ("quota", "btrfs", "tmpfs", "loop", "dir")}
        self.missing = {f"disk={mode}": why for mode, why in found.items() if why}
        modes = [mode for mode, why in found.items() if not why]
        if self.wanted != "auto":
            if found[self.wanted]:
                fix = f"use auto or {' or '.join(modes[:-1])}"
                raise Unsupported(found[self.wanted], field="container.disk", value=self.wanted, fix=fix, reason="disk")
            modes.sort(key=lambda mode: mode != self.wanted)
        self.modes = tuple(modes)
        self.measured = self._measure()

    def _measure(self) -> tuple[str, int]:
        """The file of subvolumes, where there is one, else the state directory's file system."""
        if self.in_image:
            return self.image, os.path.getsize(self.image)
        room = os.statvfs(self.state)
        return f"device {os.stat(self.state).st_dev}", room.f_blocks * room.f_frsize

    def _trouble(self, mode: str, userns: bool, make: bool) -> str:
        if mode in ("quota", "btrfs") and syscalls.disabled(mode):
            return "disabled by DSEC_DISABLE"
        if mode == "quota":
            # The owner of a file may give it to another project, unless it is in a user namespace.
            return quota.trouble(self.state) if userns else "without user namespaces root in a sandbox could leave its project"
        if mode == "btrfs":
            return self._store_trouble(make)
        if mode == "loop":
            if shutil.which("mkfs.ext4") is None:
                return "no mkfs.ext4"
            return "" if os.path.exists("/dev/loop-control") else "no loop devices"
        return ""

    def _store_trouble(self, make: bool) -> str:
        if btrfs.is_btrfs(self.state):
            with contextlib.suppress(OSError):
                if not btrfs.counts(self.state):
                    return f"{self.state} is on btrfs without quotas (btrfs quota enable)"
                btrfs.make(self.state, ".probe", 1 << 20)
                btrfs.remove(self.state, ".probe")
                if make:
                    os.makedirs(self.place, mode=0o700, exist_ok=True)
                    self.root = self.place
                return ""
            return f"subvolumes cannot be made in {self.state}"
        # Where a sandbox of an earlier Edge stands on the file, it is kept as it is, whatever is configured now.
        self.in_image = bool(btrfs.attached(self.image))
        if not self.store_bytes:
            return "the state directory is not on btrfs, and container.disk_store_bytes gives no room for a store in a file"
        if not self.in_image:
            if why := self._no_store():
                return why
            if make:
                self._make_store()
                self.in_image = True
        return ""

    def _no_store(self) -> str:
        if shutil.which("mkfs.btrfs") is None:
            return "no mkfs.btrfs (apt-get install btrfs-progs)"
        if not os.path.exists("/dev/loop-control"):
            return "no loop devices"
        if not btrfs.known():
            return "this kernel has no btrfs"
        if self.store_bytes < MIN_STORE:
            return f"container.disk_store_bytes={self.store_bytes} is less than {MIN_STORE}"
        room = os.statvfs(self.state)
        if (free := room.f_bavail * room.f_frsize) < self.store_bytes:
            return f"container.disk_store_bytes={self.store_bytes}, and {self.state} has {free} bytes free"
        return ""

    def _make_store(self) -> None:
        """An empty store. Nothing of an earlier one is of use: its sandboxes are gone. Sparse: what it holds takes room, and no more."""
        self.forget()
        try:
            with open(self.image, "xb") as file:
                os.chmod(self.image, 0o600)
                file.truncate(self.store_bytes)
            _run("mkfs.btrfs", "-q", "-K", "-m", "single", "-d", "single", self.image)
        except OSError as error:
            self.forget()
            raise NodeError(f"{self.image}: {error}", reason="disk") from error

    def reached(self, holder: int) -> None:
        """The store is mounted in the namespace of this process: it is reached through it."""
        self.root = f"/proc/{holder}/root{os.path.realpath(self.place)}"

    def make(self, plan: LaunchPlan) -> None:
        """The upper of a sandbox. Raises `NodeError`."""
        size, inodes = plan.resources.disk, plan.resources.inodes
        try:
            if plan.disk_mode == "dir":
                os.makedirs(upper_path(plan), mode=0o700, exist_ok=True)
            elif plan.disk_mode == "loop":
                make_ext4(upper_path(plan), size, inodes)
            elif plan.disk_mode == "quota":
                quota.make(upper_path(plan), size, inodes)
            elif plan.disk_mode == "btrfs":
                btrfs.make(self.root, plan.ulid, size)
        except OSError as error:
            raise NodeError(f"cannot make its disk ({plan.disk_mode}): {error}", reason="disk") from error

    def remove(self, ulid: str, box: str) -> None:
        """What a sandbox's disk holds besides the directory ``box``. Idempotent. Raises `OSError`, `NodeError`."""
        if "quota" in self.modes:
            with contextlib.suppress(NotADirectoryError):  # an ext4 image is a file
                quota.remove(f"{box}/disk")
        if self.root:
            if not os.path.isdir(self.root):  # it is reached through the holder
                raise NodeError("the holder that has the store of disks is gone", sandbox=ulid, reason="disk")
            btrfs.remove(self.root, ulid)

    def names(self) -> tuple[str, ...]:
        """Ulids that the store holds."""
        return tuple(os.listdir(self.root)) if self.root else ()

    def used(self, plan: LaunchPlan, init: int) -> int:
        """Bytes in the upper; 0 where nobody counts them, or when it is gone."""
        try:
            if plan.disk_mode == "btrfs":
                return btrfs.used(f"{self.root}/{plan.ulid}")
            if plan.disk_mode == "quota":
                return quota.used(upper_path(plan))
            if plan.disk_mode == "dir":
                return 0
            stat = os.statvfs(f"/proc/{init}/root")  # an overlay's is that of its upper's file system
        except OSError:
            return 0
        return (stat.f_blocks - stat.f_bfree) * stat.f_frsize

    def forget(self) -> None:
        """Remove the store unless somebody has it mounted; the holder that just ended takes a moment to let go."""
        end = time.monotonic() + CLEAR_TIMEOUT
        while (used := bool(btrfs.attached(self.image))) and time.monotonic() < end:
            time.sleep(0.01)
        if not used:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.image)
        with contextlib.suppress(OSError):
            os.rmdir(self.place)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise NodeError(f"{command[0]}: {error}", reason="disk") from error
    if done.returncode:
        raise NodeError(f"{command[0]}: {done.stderr.strip()[-300:]}", reason="disk")


def make_ext4(path: str, size: int, inodes: int) -> None:
    """A sparse image for a ``loop`` upper. Without a journal: nothing in it outlives its sandbox. Raises `NodeError`."""
    try:
        with open(path, "xb") as file:
            file.truncate(max(size, MIN_LOOP))
    except OSError as error:
        raise NodeError(f"{path}: {error}", reason="disk") from error
    # The inode table is part of the image: an eighth of it at most.
    _run("mkfs.ext4", *_EXT4, "-N", str(min(inodes, max(size, MIN_LOOP) // 2048)), path)


def mappable(state_dir: str) -> frozenset[str]:
    """Disk modes whose file system can be id-mapped here (tmpfs: Linux 6.3). For the others the upper is owned by the mapped ids on
    disk, and a layer packed from it is right under this sandbox's range only."""
    if syscalls.disabled("upper_idmap"):
        return frozenset()
    try:
        userns = syscalls.make_userns(100_000)
    except OSError:
        return frozenset()
    found = {"loop", "btrfs"}  # Linux 5.12 and 5.15, older than anything else that is needed
    try:
        for mode in ("tmpfs", "dir"):
            with contextlib.suppress(OSError):
                _try_map(mode, state_dir, userns)
                found |= {mode, "quota"} if mode == "dir" else {mode}  # the same file system
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
