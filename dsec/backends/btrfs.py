"""A btrfs file system as a store of sandboxes' uppers: a subvolume each, bounded by a qgroup. Standard library only (the holder mounts it).

btrfs counts bytes, files' own records included, and no files; above its limit a write gets EDQUOT. Making a subvolume takes 0.05 ms,
limiting it 0.01 ms; removing it hands its extents to the kernel's cleaner, which takes the qgroup away too (Linux 6.11, before
that it is taken away first). All functions block: call them in a thread. Numbers and structures: include/uapi/linux/btrfs.h.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import uuid

from dsec import syscalls

_MAGIC = 0x94 << 8
SUBVOL_CREATE = 1 << 30 | 4096 << 16 | _MAGIC | 14
SNAP_DESTROY = 1 << 30 | 4096 << 16 | _MAGIC | 15
INO_LOOKUP = 3 << 30 | 4096 << 16 | _MAGIC | 18
FS_INFO = 2 << 30 | 1024 << 16 | _MAGIC | 31
QUOTA_CTL = 3 << 30 | 16 << 16 | _MAGIC | 40
QGROUP_CREATE = 1 << 30 | 16 << 16 | _MAGIC | 42
QGROUP_LIMIT = 2 << 30 | 48 << 16 | _MAGIC | 43
ENABLE, ENABLE_SIMPLE = 1, 4  # BTRFS_QUOTA_CTL_…; the simple kind (Linux 6.7) charges each extent to who wrote it, and walks nothing
MAX_RFER = 1  # BTRFS_QGROUP_LIMIT_MAX_RFER
TOP_INODE = 256  # of every subvolume

LOOP_CTL_GET_FREE, LOOP_CONFIGURE, LOOP_GET_STATUS64 = 0x4C82, 0x4C0A, 0x4C05
LO_FLAGS_AUTOCLEAR, LO_FLAGS_DIRECT_IO = 4, 16
_LOOP_TRIES = 64


def _named(name: str) -> bytearray:
    """struct btrfs_ioctl_vol_args: a descriptor that is not used here, and a name."""
    return bytearray(struct.pack("<q", 0) + os.fsencode(name).ljust(4088, b"\0"))


def make(store: str, name: str, size: int) -> None:
    """A new subvolume ``store/name`` that takes ``size`` bytes at most. Raises `OSError`; nothing half-made stays."""
    top = os.open(store, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(top, SUBVOL_CREATE, _named(name))
        try:
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
            try:
                # The limit's flags, most bytes that it refers to; then exclusive ones and reserves, unused. Group 0: this one's.
                fcntl.ioctl(fd, QGROUP_LIMIT, struct.pack("<6Q", 0, MAX_RFER, size, 0, 0, 0))
            finally:
                os.close(fd)
        except BaseException:
            fcntl.ioctl(top, SNAP_DESTROY, _named(name))
            raise
    finally:
        os.close(top)


def remove(store: str, name: str) -> None:
    """Take a subvolume away with all that is in it, and its qgroup. Idempotent. Raises `OSError` (EBUSY: somebody's root)."""
    top = os.open(store, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
        try:
            number = subvolume(fd)
        finally:
            os.close(fd)
        with contextlib.suppress(OSError):  # EBUSY from Linux 6.11 on, where the cleaner does it
            fcntl.ioctl(top, QGROUP_CREATE, struct.pack("<QQ", 0, number))  # create: 0
        fcntl.ioctl(top, SNAP_DESTROY, _named(name))
    except FileNotFoundError:
        return
    finally:
        os.close(top)


def subvolume(fd: int) -> int:
    """The number of the subvolume that a directory is in."""
    asked = bytearray(4096)
    struct.pack_into("<QQ", asked, 0, 0, TOP_INODE)
    fcntl.ioctl(fd, INO_LOOKUP, asked)
    return int(struct.unpack_from("<Q", asked)[0])


def _sysfs(fd: int) -> str:
    """Where the kernel tells of the file system that ``fd`` is on."""
    told = bytearray(1024)  # struct btrfs_ioctl_fs_info_args: highest device, how many, then the file system's id
    fcntl.ioctl(fd, FS_INFO, told)
    return f"/sys/fs/btrfs/{uuid.UUID(bytes=bytes(told[16:32]))}"


def used(path: str) -> int:
    """Bytes that a subvolume takes: what its qgroup counts, and what is reserved for that which is not on the disk yet."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        group = f"{_sysfs(fd)}/qgroups/0_{subvolume(fd)}"
    finally:
        os.close(fd)
    total = 0
    for name in ("referenced", "rsv_data"):
        with open(f"{group}/{name}") as file:
            total += int(file.read())
    return total


def is_btrfs(path: str) -> bool:
    """Whether a directory is on btrfs (it alone has this ioctl)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        subvolume(fd)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def known() -> bool:
    """Whether this kernel has btrfs (where it is a module: loaded, or to be loaded by the mount)."""
    try:
        os.close(syscalls.fsopen("btrfs"))
    except OSError:
        return False
    return True


def counts(path: str) -> bool:
    """Whether quotas are on in the btrfs that ``path`` is on."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return os.path.isdir(f"{_sysfs(fd)}/qgroups")
    finally:
        os.close(fd)


# --- a store in a file ----------------------------------------------------------------------------------------------------------


def attached(image: str) -> str:
    """The loop device that has this file, or "": then no file system of it is mounted anywhere."""
    try:
        wanted = os.stat(image)
        names = [entry.name for entry in os.scandir("/sys/block") if entry.name.startswith("loop")]
    except FileNotFoundError:
        return ""
    for name in names:
        with contextlib.suppress(OSError), open(f"/sys/block/{name}/loop/backing_file") as file:
            if os.path.basename(file.read().strip()) != os.path.basename(image):
                continue
            fd = os.open(f"/dev/{name}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                status = bytearray(232)
                fcntl.ioctl(fd, LOOP_GET_STATUS64, status)
            finally:
                os.close(fd)
            device, inode = struct.unpack_from("<QQ", status)
            # The kernel tells a device number in its own coding (huge_encode_dev): it is compared as major and minor.
            same = (device >> 8 & 0xFFF, device & 0xFF | device >> 12 & 0xFFF00) == (os.major(wanted.st_dev), os.minor(wanted.st_dev))
            if inode == wanted.st_ino and same:
                return f"/dev/{name}"
    return ""


def attach(image: str) -> tuple[str, int]:
    """A loop device for the file, which clears itself: its path, and a descriptor that keeps it until it is mounted."""
    backing = os.open(image, os.O_RDWR | os.O_CLOEXEC)
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        # struct loop_config: file, block size, struct loop_info64 (flags at 52, name at 56), reserved. Direct: not cached twice.
        info = bytearray(232)
        struct.pack_into("<I", info, 52, LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO)
        name = os.fsencode(image)[:63]
        info[56 : 56 + len(name)] = name
        config = struct.pack("<II", backing, 4096) + bytes(info) + bytes(64)
        for _ in range(_LOOP_TRIES):
            path = f"/dev/loop{fcntl.ioctl(control, LOOP_CTL_GET_FREE)}"
            loop = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(loop, LOOP_CONFIGURE, config)
                return path, loop
            except OSError as error:
                os.close(loop)
                if error.errno != errno.EBUSY:  # else somebody took the device in between
                    raise
    finally:
        os.close(control)
        os.close(backing)
    raise OSError(errno.EBUSY, f"{image}: no free loop device after {_LOOP_TRIES} tries")


def mount_image(image: str) -> int:
    """A detached mount of the btrfs in a file, with quotas on: the same file system for everybody who has it mounted already. Without
    barriers: after a crash of the machine nobody reads it again, and a sandbox near its limit makes the kernel commit often.

    Raises `OSError`."""
    loop = -1
    device = attached(image)
    if not device:
        device, loop = attach(image)
    try:
        mount = syscalls.new_mount(
            "btrfs",
            [("source", device), ("discard", "async"), ("nobarrier", None)],
            syscalls.MOUNT_ATTR_NODEV | syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NOATIME,
        )
    finally:
        if loop >= 0:
            os.close(loop)
    try:
        top = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=mount)
        try:
            enable(top)
        finally:
            os.close(top)
    except BaseException:
        os.close(mount)
        raise
    return mount


def enable(top: int) -> None:
    """Quotas on, where they are not yet: on a file system that is still empty, so that nothing has to be counted again."""
    for kind in (ENABLE_SIMPLE, ENABLE):
        try:
            fcntl.ioctl(top, QUOTA_CTL, struct.pack("<QQ", kind, 0))
            return
        except OSError as error:
            if error.errno == errno.EEXIST:
                return
            if kind == ENABLE or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
