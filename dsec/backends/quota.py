"""Project quotas (ext4, xfs): a directory whose files and all that is made in it count to one number, which has limits in bytes and files.

A sandbox's project derives from its upper's inode number, which is its own on that file system while the directory is there. All
functions block: call them in a thread. Structures: include/uapi/linux/{fs,quota,dqblk_xfs}.h.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import tempfile

from dsec import syscalls

FS_IOC_FSGETXATTR, FS_IOC_FSSETXATTR = 0x801C581F, 0x401C5820
FS_XFLAG_PROJINHERIT = 0x200
Q_GETQUOTA, Q_SETQUOTA, Q_XGETQSTAT = 0x800007, 0x800008, 0x5805
PROJECTS = 2  # PRJQUOTA
QIF_BLIMITS, QIF_ILIMITS = 1, 4
QIF_DQBLKSIZE = 1024  # bytes of a block in limits; what is used is told in bytes
FS_QUOTA_PDQ_ENFD = 1 << 5
_XATTR = struct.Struct("<5I8x")  # struct fsxattr: flags, extent size, extents, project, copy-on-write extent size
_DQBLK = struct.Struct("<8QI4x")  # struct if_dqblk: hard and soft bytes, used, hard and soft inodes, used, two times, valid
_FIRST, _COUNT = 1 << 30, 1 << 30  # projects of ours: far above those that people write into /etc/projid
_TRIES = 64


def project_of(fd: int) -> int:
    """The project of an open file or directory; 0 when it has none."""
    return int(_XATTR.unpack(fcntl.ioctl(fd, FS_IOC_FSGETXATTR, bytes(_XATTR.size)))[3])


def _set_project(fd: int, number: int) -> None:
    flags, extent, extents, _, cow = _XATTR.unpack(fcntl.ioctl(fd, FS_IOC_FSGETXATTR, bytes(_XATTR.size)))
    fcntl.ioctl(fd, FS_IOC_FSSETXATTR, _XATTR.pack(flags | FS_XFLAG_PROJINHERIT, extent, extents, number, cow))


class Account(tuple[int, int, int, int]):
    """(limit in bytes, bytes used, limit in inodes, inodes used) of a project; a limit of 0 is none."""

    __slots__ = ()


def account(fd: int, number: int) -> Account:
    """What the file system that ``fd`` is on knows of a project."""
    answer = bytearray(_DQBLK.size)
    try:
        syscalls.quotactl_fd(fd, Q_GETQUOTA << 8 | PROJECTS, number, answer)
    except OSError as error:
        if error.errno == errno.ENOENT:  # xfs: never heard of it
            return Account((0, 0, 0, 0))
        raise
    hard, _, space, files, _, inodes, _, _, _ = _DQBLK.unpack(answer)
    return Account((hard * QIF_DQBLKSIZE, space, files, inodes))


def _limit(fd: int, number: int, size: int, inodes: int) -> None:
    blocks = size // QIF_DQBLKSIZE
    wanted = bytearray(_DQBLK.pack(blocks, 0, 0, inodes, 0, 0, 0, 0, QIF_BLIMITS | QIF_ILIMITS))
    syscalls.quotactl_fd(fd, Q_SETQUOTA << 8 | PROJECTS, number, wanted)


def make(path: str, size: int, inodes: int) -> int:
    """A new directory whose contents are bounded; its project. Raises `OSError`; nothing half-made stays."""
    os.mkdir(path, 0o700)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            start = os.fstat(fd).st_ino
            for attempt in range(_TRIES):
                number = _FIRST + (start + attempt) % _COUNT
                if account(fd, number) == (0, 0, 0, 0):  # else an inode number above 2^30 means the same: the next one is asked
                    _limit(fd, number, size, inodes)
                    _set_project(fd, number)
                    return number
        finally:
            os.close(fd)
        raise OSError(errno.EBUSY, f"{path}: no free project number after {_TRIES} tries")
    except BaseException:
        remove(path)
        raise


def remove(path: str) -> None:
    """Lift the limits of a directory's project, so that nothing of it stays once its files are gone. Idempotent."""
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            number = project_of(fd)
            if number >= _FIRST:
                _limit(fd, number, 0, 0)
        finally:
            os.close(fd)


def used(path: str) -> int:
    """Bytes that a bounded directory takes."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return account(fd, project_of(fd))[1]
    finally:
        os.close(fd)


def trouble(place: str) -> str:
    """Why the file system of ``place`` keeps no project quota, or "" where a limit was set, kept and taken back."""
    try:
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        return str(error)
    try:
        state = bytearray(256)  # struct fs_quota_stat: version, 1 byte of padding, flags
        syscalls.quotactl_fd(fd, Q_XGETQSTAT << 8 | PROJECTS, 0, state)
        if not struct.unpack_from("<H", state, 2)[0] & FS_QUOTA_PDQ_ENFD:
            return "its project quotas are not enforced (mount it with prjquota)"
        with tempfile.TemporaryDirectory(prefix=".probe-", dir=place) as folder:
            number = make(f"{folder}/d", 1 << 20, 16)
            try:
                if account(fd, number)[:1] != (1 << 20,):
                    return "it does not keep what it is told"
            finally:
                remove(f"{folder}/d")
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.ESRCH, errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL):
            return "no project quota" + (": this kernel has none" if error.errno == errno.ENOSYS else "")
        return f"no project quota: {error.strerror}"
    finally:
        os.close(fd)
    return ""
