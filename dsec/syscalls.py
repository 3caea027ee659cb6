"""The system calls that Python's standard library lacks: one small function each, ctypes and stdlib only.

Start-up budget: importing this file costs under 5 ms and under 1 MiB (ctypes is the bulk of it); nothing is called, opened or
probed at import. The holder process and the launch path import it and nothing else of the project, so keep it that way.

Every function raises `OSError` with the kernel's errno and the call's name; none retries on EINTR (the calls here do not
return it, or the caller wants to know). Calls that may sleep on a disk or on a lock (mounts, umounts, clone) belong in a thread
or in a helper process, never on an event loop. Names and constants are the kernel's own (include/uapi/linux/*.h).

Idea of a single stdlib-only syscall file: systemd's mkosi, mkosi/sandbox.py.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct
from collections.abc import Sequence

# What DSEC_DISABLE may hide: what the doctor looks at, and some that it does not.
FEATURES = frozenset(
    """
    kernel root sys_resource cgroup cgroup2 freezer memory_reclaim cpu_idle swap erofs_file erofs_loop mkfs_erofs mkfs_erofs_1_8
    overlay_fd userns idmap fanotify fuse on_demand disk_limit mmdebstrap native oci crun runc guest docker criu kvm qemu nats_server
    seccomp landlock bpf nft network ipv6 bpf_lsm apparmor core_sched pid_max nofile inotify ptys neighbours conntrack
    btrfs directio erofs_utils hand quota upper_idmap zram
    """.split()  # noqa: SIM905 - words are easier to read than fifty lines
)

AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000

# mount(2), umount2(2)
MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_MOVE = 8192
MS_REC = 16384
MS_PRIVATE = 1 << 18
MS_SLAVE = 1 << 19
MNT_DETACH = 2

# fsopen(2), fsconfig(2), fsmount(2), open_tree(2), move_mount(2), mount_setattr(2)
FSOPEN_CLOEXEC = 1
FSCONFIG_SET_FLAG = 0
FSCONFIG_SET_STRING = 1
FSCONFIG_SET_PATH = 3
FSCONFIG_SET_PATH_EMPTY = 4
FSCONFIG_SET_FD = 5
FSCONFIG_CMD_CREATE = 6
FSCONFIG_CMD_RECONFIGURE = 7
FSMOUNT_CLOEXEC = 1
OPEN_TREE_CLONE = 1
OPEN_TREE_CLOEXEC = os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH = 4
MOVE_MOUNT_T_EMPTY_PATH = 0x40
MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4
MOUNT_ATTR_NOEXEC = 0x8
MOUNT_ATTR_NOATIME = 0x10
MOUNT_ATTR_NODIRATIME = 0x80
MOUNT_ATTR_IDMAP = 0x100000

# fanotify(7), pre-content events (Linux 6.14)
FAN_CLOEXEC = 0x1
FAN_NONBLOCK = 0x2
FAN_CLASS_PRE_CONTENT = 0x8
FAN_UNLIMITED_QUEUE = 0x10
FAN_MARK_ADD = 0x1
FAN_MARK_REMOVE = 0x2
FAN_OPEN = 0x20
FAN_PRE_ACCESS = 0x100000
FAN_ALLOW = 0x1
FAN_DENY = 0x2
FAN_EVENT_INFO_TYPE_RANGE = 6

# clone(2), unshare(2), setns(2)
CLONE_VM = 0x100
CLONE_VFORK = 0x4000
CLONE_NEWNS = 0x20000
CLONE_NEWCGROUP = 0x2000000
CLONE_NEWUTS = 0x4000000
CLONE_NEWIPC = 0x8000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
WALL = 0x40000000  # __WALL: also children whose exit signal is not SIGCHLD

# prctl(2)
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

# process_madvise(2), swapon(2)
MADV_WILLNEED = 3
MADV_PAGEOUT = 21
SWAP_FLAG_PREFER = 0x8000
SWAP_FLAG_PRIO_MASK = 0x7FFF

_CAPABILITY_VERSION_3 = 0x20080522  # linux/capability.h

# openat2(2)
RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
RESOLVE_IN_ROOT = 0x10

# Numbers of the calls that glibc 2.36 (Debian 12) has no wrapper for. Since 2019 new calls share one number on every
# architecture (asm-generic), so x86_64 and aarch64 need one table.
_NR = {
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "openat2": 437,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "landlock_create_ruleset": 444,
}
_ARCHES = ("x86_64", "aarch64")
_KCMP = {"x86_64": 312, "aarch64": 272}  # older than the common table
SHORT_SLICE = 0.0001  # seconds, the shortest that the kernel takes: for who does little at a time while others wait for it
_SCHED = {"x86_64": (314, 315), "aarch64": (274, 275)}  # sched_setattr and sched_getattr, likewise

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
_libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
_libc.prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)
_libc.clone.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _MountAttr(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


class _OpenHow(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("flags", "mode", "resolve")]


def disabled(name: str) -> bool:
    """True when ``DSEC_DISABLE`` (comma separated) names this feature: the kernel is to be treated as if it lacked it."""
    return name in _hidden(os.environ.get("DSEC_DISABLE", ""))


def _hidden(text: str) -> list[str]:
    return text.replace(" ", "").split(",")


def not_features(text: str) -> list[str]:
    """Those names in a value of ``DSEC_DISABLE`` that hide nothing, for they are not in `FEATURES`."""
    return [name for name in _hidden(text) if name and name not in FEATURES]


def oserror(call: str, subject: str | bytes | None = None) -> OSError:
    """The last failed call as an exception: errno, the kernel's words, the call and what it was about."""
    code = ctypes.get_errno()
    about = f"{call} {os.fsdecode(subject)}" if subject else call
    return OSError(code, f"{about}: {os.strerror(code)}")


def _syscall(call: str, *args: object, subject: str | bytes | None = None) -> int:
    if platform.machine() not in _ARCHES:
        raise OSError(errno.ENOSYS, f"{call}: syscall numbers are known for {' and '.join(_ARCHES)} only")
    # Variadic in C: without explicit widths ctypes would pass 32 bits and leave the upper half of a register undefined.
    wide = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    result = int(_libc.syscall(ctypes.c_long(_NR[call]), *wide))
    if result < 0:
        raise oserror(call, subject)
    return result


def _bytes(text: str | bytes | None) -> bytes | None:
    return None if text is None else os.fsencode(text)


# --- mounts, the old calls -------------------------------------------------------------------------------------------


def mount(source: str, target: str, fstype: str | None = None, flags: int = 0, data: str = "") -> None:
    """mount(2). Target and source are paths; ``data`` is the file system's own option string."""
    if _libc.mount(_bytes(source), _bytes(target), _bytes(fstype), flags, _bytes(data)) != 0:
        raise oserror("mount", target)


def umount2(target: str, flags: int = 0) -> None:
    """umount2(2); `MNT_DETACH` takes it out of the tree at once and frees it when its last user is gone."""
    if _libc.umount2(_bytes(target), flags) != 0:
        raise oserror("umount2", target)


# --- mounts, the new calls: a mount is a descriptor and lives exactly as long as someone holds it ----------------------


def fsopen(fstype: str) -> int:
    """A configuration context for a new superblock of ``fstype``."""
    return _syscall("fsopen", _bytes(fstype), FSOPEN_CLOEXEC, subject=fstype)


def fsconfig(fd: int, command: int, key: str | None = None, value: str | None = None, aux: int = 0) -> None:
    """fsconfig(2) as it is; `fs_log` has the kernel's reason after a failure."""
    _syscall("fsconfig", fd, command, _bytes(key), _bytes(value), aux, subject=key)


def fsmount(fd: int, attributes: int = 0) -> int:
    """A detached mount of a created context."""
    return _syscall("fsmount", fd, FSMOUNT_CLOEXEC, attributes)


def fs_log(fd: int) -> str:
    """What the file system said about a context (errors, warnings), as one line."""
    lines = []
    os.set_blocking(fd, False)
    while True:
        try:
            lines.append(os.read(fd, 4096).decode(errors="replace").strip())
        except OSError:  # ENODATA: the log is read to its end
            return "; ".join(lines)


def open_tree(path: str, flags: int = OPEN_TREE_CLONE, dirfd: int = AT_FDCWD) -> int:
    """A path as a mount descriptor; with `OPEN_TREE_CLONE` a detached bind mount of it."""
    return _syscall("open_tree", dirfd, _bytes(path), flags | OPEN_TREE_CLOEXEC, subject=path)


def move_mount(fd: int, target: str, dirfd: int = AT_FDCWD) -> None:
    """Attach a detached mount at a path; an empty path means ``dirfd`` itself."""
    flags = MOVE_MOUNT_F_EMPTY_PATH | (0 if target else MOVE_MOUNT_T_EMPTY_PATH)
    _syscall("move_mount", fd, b"", dirfd, _bytes(target), flags, subject=target)


def mount_setattr(
    fd: int, *, attr_set: int = 0, attr_clr: int = 0, propagation: int = 0, userns_fd: int = -1, recursive: bool = False
) -> None:
    """Change a mount given by descriptor. A ``userns_fd`` makes it idmapped: only while it is detached, and only once."""
    if userns_fd >= 0:
        attr_set |= MOUNT_ATTR_IDMAP
    attr = _MountAttr(attr_set, attr_clr, propagation, max(userns_fd, 0))
    flags = AT_EMPTY_PATH | (AT_RECURSIVE if recursive else 0)
    _syscall("mount_setattr", fd, b"", flags, ctypes.byref(attr), ctypes.sizeof(attr))


def new_mount(fstype: str, options: Sequence[tuple[str, str | int | None]], attributes: int = 0) -> int:
    """fsopen + fsconfig of each option + create + fsmount: a detached mount of a new superblock.

    An option's value is a string, a descriptor (int), or None for a flag. The error carries the file system's own words.
    """
    context = fsopen(fstype)
    try:
        try:
            for key, value in options:
                if value is None:
                    fsconfig(context, FSCONFIG_SET_FLAG, key)
                elif isinstance(value, int):
                    fsconfig(context, FSCONFIG_SET_FD, key, None, value)
                else:
                    fsconfig(context, FSCONFIG_SET_STRING, key, value)
            fsconfig(context, FSCONFIG_CMD_CREATE)
        except OSError as error:
            said = fs_log(context)
            raise OSError(error.errno, f"{fstype}: {error.strerror}" + (f" [{said}]" if said else "")) from None
        return fsmount(context, attributes)
    finally:
        os.close(context)


# --- namespaces ------------------------------------------------------------------------------------------------------


def unshare(flags: int) -> None:
    """unshare(2) for the calling thread (`CLONE_NEWUSER` needs a process with one thread)."""
    if _libc.unshare(ctypes.c_int(flags)) != 0:
        raise oserror("unshare")


def setns(fd: int, nstype: int = 0) -> None:
    """setns(2) for the calling thread, by namespace descriptor or pidfd."""
    if _libc.setns(ctypes.c_int(fd), ctypes.c_int(nstype)) != 0:
        raise oserror("setns")


def make_userns(base: int, count: int = 65_536) -> int:
    """A user namespace in which ids 0…count-1 are base…base+count-1 outside; returns its descriptor (close-on-exec).

    Costs about 0.1 ms whatever the caller's size, and may be called in any thread of any process: the child shares our memory
    (CLONE_VM, so no page table is copied), runs nothing but libc's ``_exit`` on a stack of its own, and is a zombie when clone
    returns (CLONE_VFORK). A zombie still owns its credentials, so its maps can be written and its namespace opened; then it is
    reaped. Its exit signal is 0: no SIGCHLD, and a foreign wait(-1) cannot take it.

    Raises `OSError` (EPERM without CAP_SYS_ADMIN, ENOSPC at user.max_user_namespaces, ENOSYS when disabled).
    """
    if disabled("userns"):
        raise OSError(errno.ENOSYS, "user namespaces are disabled by DSEC_DISABLE")
    stack = ctypes.create_string_buffer(16384)
    top = (ctypes.addressof(stack) + len(stack)) & ~0xF
    leave = ctypes.cast(_libc._exit, ctypes.c_void_p)
    # A signal that came in while the child lives would run our handlers twice, in shared memory.
    before = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    try:
        pid = _libc.clone(leave, top, CLONE_NEWUSER | CLONE_VM | CLONE_VFORK, None)
        code = ctypes.get_errno()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if pid < 0:
        raise OSError(code, f"clone(CLONE_NEWUSER): {os.strerror(code)}")
    try:
        for name in ("uid_map", "gid_map"):
            fd = os.open(f"/proc/{pid}/{name}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(fd, b"0 %d %d\n" % (base, count))
            finally:
                os.close(fd)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.waitid(os.P_PID, pid, os.WEXITED | WALL)


# --- processes -------------------------------------------------------------------------------------------------------


def pidfd_open(pid: int) -> int:
    """A descriptor that names one process and no later one with the same pid; readable when it has ended."""
    return os.pidfd_open(pid)


def pidfd_send_signal(pidfd: int, signum: int) -> bool:
    """Send a signal; False when the process has ended already."""
    try:
        signal.pidfd_send_signal(pidfd, signum)
    except ProcessLookupError:
        return False
    return True


def pidfd_getfd(pidfd: int, number: int) -> int:
    """A copy of a descriptor of another process. Needs ptrace access to it. Raises `OSError`."""
    return _syscall("pidfd_getfd", pidfd, number, 0)


def same_memory(pid: int, other: int) -> bool:
    """Whether two processes run in one memory, as a parent in vfork(2) and its child do (kcmp(2), KCMP_VM)."""
    number = _KCMP.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, "kcmp is known for x86_64 and aarch64 only")
    order = int(_libc.syscall(*(ctypes.c_long(each) for each in (number, pid, other, 1, 0, 0))))
    if order < 0:
        raise oserror("kcmp")
    return order == 0


class _SchedAttr(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("size", "policy")),
        ("flags", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("nice", "priority")),
        *((name, ctypes.c_uint64) for name in ("runtime", "deadline", "period")),
    )


def run_slice(seconds: float = SHORT_SLICE, thread: int = 0) -> bool:
    """A thread (0: the calling one) wants to run for so long at a time: a short time comes first when it wakes, a long one lets others in.
    Its share of the processor stays what it is, and what it starts has the usual slice. Linux 6.12; older kernels take no notice. False
    where the wish was not taken: another scheduling policy than the usual one, or a kernel that refuses."""
    numbers = _SCHED.get(platform.machine())
    attributes = _SchedAttr()
    place, size = ctypes.byref(attributes), ctypes.c_long(ctypes.sizeof(attributes))
    whom, zero = ctypes.c_long(thread), ctypes.c_long(0)
    if numbers is None or _libc.syscall(ctypes.c_long(numbers[1]), whom, place, size, zero) or attributes.policy:
        return False
    attributes.flags |= 1  # SCHED_FLAG_RESET_ON_FORK
    attributes.runtime = round(seconds * 1e9)
    return not _libc.syscall(ctypes.c_long(numbers[0]), whom, place, zero)


def waitid(pidfd: int, *, block: bool = False, keep: bool = False) -> tuple[int, int] | None:
    """How a child ended: ``(exit code, 0)`` or ``(-1, signal)``; None while it runs (never with ``block``).

    ``keep`` leaves the zombie in place. Waiting by pidfd is O(1), where wait(-1) walks every child.
    """
    found = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | WALL | (0 if block else os.WNOHANG) | (os.WNOWAIT if keep else 0))
    if found is None:
        return None
    return (found.si_status, 0) if found.si_code == os.CLD_EXITED else (-1, found.si_status)


def process_madvise(pidfd: int, ranges: Sequence[tuple[int, int]], advice: int) -> int:
    """Advise on another process's memory, ``(address, length)`` each, 1,024 ranges at most; the bytes that were advised, which are
    fewer when a range is not mapped any more. Needs ptrace access to the process and CAP_SYS_NICE."""
    vector = (_IoVec * len(ranges))(*(_IoVec(base, length) for base, length in ranges))
    return _syscall("process_madvise", pidfd, vector, len(ranges), advice, 0)


# --- swap ------------------------------------------------------------------------------------------------------------


def swapon(path: str, priority: int) -> None:
    """Begin to swap to a device or file that bears a swap signature; 0 to 32767, the highest is filled first."""
    if _libc.swapon(os.fsencode(path), SWAP_FLAG_PREFER | (priority & SWAP_FLAG_PRIO_MASK)) < 0:
        raise oserror("swapon", path)


def swapoff(path: str) -> None:
    """Stop swapping to it; all that lies there is read back first, so it may take long."""
    if _libc.swapoff(os.fsencode(path)) < 0:
        raise oserror("swapoff", path)


# --- attributes of this process --------------------------------------------------------------------------------------


def quotactl_fd(fd: int, command: int, number: int, address: bytearray) -> None:
    """quotactl(2) for the file system that ``fd`` is on (Linux 5.14); ``command`` as QCMD makes it, ``address`` is read or written."""
    _syscall("quotactl_fd", fd, command, number, (ctypes.c_char * len(address)).from_buffer(address))


def prctl(option: int, arg2: int = 0, arg3: int = 0, arg4: int = 0, arg5: int = 0) -> int:
    """prctl(2)."""
    result = int(_libc.prctl(option, arg2, arg3, arg4, arg5))
    if result < 0:
        raise oserror(f"prctl({option})")
    return result


def set_child_subreaper(on: bool = True) -> None:
    """Orphans below this process become its children instead of init's."""
    prctl(PR_SET_CHILD_SUBREAPER, int(on))


def set_no_new_privs() -> None:
    """No exec below this process gains privileges; cannot be undone."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def setfsuid(uid: int) -> int:
    """Set the calling *thread's* file-system user id; returns the one before. Raises EPERM where the kernel kept the old one.

    An overlay whose mounter's fsuid is not in the mounts' id map is silently read-only, so it is set around FSCONFIG_CMD_CREATE.
    """
    return _setfsid("setfsuid", uid)


def setfsgid(gid: int) -> int:
    """As `setfsuid`, for the group."""
    return _setfsid("setfsgid", gid)


def _setfsid(call: str, value: int) -> int:
    function = getattr(_libc, call)
    before = int(function(ctypes.c_uint(value)))
    # The call has no error return: asking with an impossible id answers the present one.
    if int(function(ctypes.c_uint(0xFFFFFFFF))) & 0xFFFFFFFF != value:
        raise OSError(errno.EPERM, f"{call}({value}): {os.strerror(errno.EPERM)}")
    return before


def regain_capabilities() -> None:
    """Make every permitted capability of the calling *thread* effective again (capset(2)).

    `setfsuid` to another id than 0 drops the file capabilities, and an overlay with an upper needs them at its creation: it makes its
    work directory with mode 0 (EACCES otherwise). Back at fsuid 0 the kernel gives them back by itself.
    """
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice, for 64 bits
    if _libc.capget(header, sets) != 0:
        raise oserror("capget")
    sets[0], sets[3] = sets[1], sets[4]
    if _libc.capset(header, sets) != 0:
        raise oserror("capset")


# --- files -----------------------------------------------------------------------------------------------------------


def openat2(dirfd: int, path: str | bytes, flags: int, mode: int = 0, resolve: int = RESOLVE_IN_ROOT) -> int:
    """Open below ``dirfd`` as if it were the root (by default), so no link and no ``..`` leaves it. Close-on-exec."""
    how = _OpenHow(flags | os.O_CLOEXEC, mode, resolve)
    return _syscall("openat2", dirfd, _bytes(path), ctypes.byref(how), ctypes.sizeof(how), subject=path)


# --- what this kernel can do (dsec doctor asks; nothing stays) --------------------------------------------------------


def landlock_abi() -> int:
    """Version of the Landlock ABI, 0 where there is none (landlock_create_ruleset with LANDLOCK_CREATE_RULESET_VERSION)."""
    try:
        return _syscall("landlock_create_ruleset", None, 0, 1)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP):
            return 0
        raise


def bpf_prog_load(prog_type: int, expected_attach_type: int = 0) -> int:
    """Loads the program ``r0 = 1; exit`` and returns its descriptor: shows whether the kernel takes this type (linux/bpf.h).

    Raises `OSError` EPERM (not allowed), EINVAL (the type is not built in).
    """
    instructions = ctypes.create_string_buffer(b"\xb7\x00\x00\x00\x01\x00\x00\x00" + b"\x95" + bytes(7), 16)
    text = ctypes.create_string_buffer(b"GPL")
    attributes = ctypes.create_string_buffer(128)
    struct.pack_into("=IIQQ", attributes, 0, prog_type, 2, ctypes.addressof(instructions), ctypes.addressof(text))
    struct.pack_into("=I", attributes, 68, expected_attach_type)
    number = 321 if platform.machine() == "x86_64" else 280
    result = int(_libc.syscall(ctypes.c_long(number), ctypes.c_long(5), attributes, ctypes.c_long(len(attributes))))
    if result < 0:
        raise oserror("bpf(BPF_PROG_LOAD)")
    return result


def fanotify_init(flags: int, event_flags: int = os.O_RDONLY | os.O_CLOEXEC) -> int:
    """A fanotify descriptor (fanotify_init(2)). Raises `OSError` EINVAL where the kernel lacks a flag, EPERM without CAP_SYS_ADMIN."""
    result = int(_libc.fanotify_init(ctypes.c_uint(flags), ctypes.c_uint(event_flags)))
    if result < 0:
        raise oserror("fanotify_init")
    return result


def fanotify_mark(fd: int, flags: int, mask: int, path: str) -> None:
    """Adds or removes a mark on a path (fanotify_mark(2))."""
    call = _libc.fanotify_mark(ctypes.c_int(fd), ctypes.c_uint(flags), ctypes.c_uint64(mask), ctypes.c_int(AT_FDCWD), os.fsencode(path))
    if call < 0:
        raise oserror("fanotify_mark", path)


def fanotify_event(data: bytes | memoryview) -> tuple[int, int, int] | None:
    """The first pre-content event in what was read: ``(descriptor, offset, length)``; None for an overflow or for nothing.

    struct fanotify_event_metadata, then records of which FAN_EVENT_INFO_TYPE_RANGE says what is to be read; without one it is all.
    """
    if len(data) < 24:
        return None
    length, _, _, head, _, fd, _ = struct.unpack_from("=IBBHQii", data)
    if length < 24 or fd < 0:
        return None
    at = head
    while at + 24 <= min(length, len(data)):
        kind, _, size = struct.unpack_from("=BBH", data, at)
        if kind == FAN_EVENT_INFO_TYPE_RANGE:
            _, offset, count = struct.unpack_from("=IQQ", data, at + 4)
            return fd, offset, count
        at += max(size, 4)
    return fd, 0, 1 << 62


def fanotify_answer(fanotify: int, event_fd: int, error: int = 0) -> bool:
    """Lets the reader go on, or gives it an errno. False when no event with this descriptor's number waits (any more).

    The kernel looks for the number alone: a process that never had the descriptor can answer for one that died with it.
    """
    verdict = FAN_DENY | (error & 0xFF) << 24 if error else FAN_ALLOW
    try:
        os.write(fanotify, struct.pack("=iI", event_fd, verdict))
    except FileNotFoundError:
        return False
    return True
