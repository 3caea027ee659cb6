"""System-call filters: a profile as a table, compiled in Python to a classic BPF program that is a binary tree.

The default profile is an allow-list: a call is allowed because it is in the table (syscall_numbers.json, Linux 6.19: x86_64, i386,
aarch64) and not in `DENIED`; a call that the table does not know is answered ENOSYS, as an older kernel would, so that a C library
falls back. Denied calls are answered EPERM. Calls of the x32 ABI are answered ENOSYS.

Compiled ahead because the program is the same for all sandboxes: handing crun rules costs 11 ms a launch, the program 0-1 ms.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import platform
import struct
import sys
from collections.abc import Mapping
from importlib import resources
from typing import Any

import msgspec

from dsec import syscalls

ARCHES = ("x86_64", "i386", "aarch64")
_AUDIT = {"x86_64": 0xC000003E, "i386": 0x40000003, "aarch64": 0xC00000B7}
_NATIVE = {"x86_64": ("x86_64", "i386"), "aarch64": ("aarch64",)}

ALLOW = 0x7FFF0000
KILL = 0x80000000
_ERRNO = 0x00050000
EPERM = _ERRNO | errno.EPERM
ENOSYS = _ERRNO | errno.ENOSYS

# Not here: uprobe and uretprobe, which the kernel never shows to filters and which only its own trampolines may call.
# Denied by name, with the reason. The kernel's own checks would refuse most of them without the capability; the filter also
# keeps their code out of reach.
DENIED: Mapping[str, tuple[str, ...]] = {
    "mounts: the sandbox's own view is what masks and read-only paths stand on": (
        *("mount", "umount", "umount2", "pivot_root", "fsopen", "fsconfig", "fsmount", "fspick", "move_mount", "open_tree"),
        *("open_tree_attr", "mount_setattr", "setns", "unshare", "listns"),
    ),
    "large kernel interfaces with a history of faults": (
        *("bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register", "fanotify_init"),
        *("fanotify_mark", "kcmp", "lookup_dcookie", "uselib", "vm86", "vm86old", "ustat", "sysfs", "_sysctl"),
    ),
    "key rings are not part of any namespace": ("keyctl", "add_key", "request_key"),
    "other processes' descriptors and handles to files outside the root": ("pidfd_getfd", "open_by_handle_at"),
    "the node as a whole": (
        *("kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "create_module", "query_module"),
        *("get_kernel_syms", "nfsservctl", "swapon", "swapoff", "reboot", "acct", "quotactl", "quotactl_fd", "syslog", "vhangup"),
        *("settimeofday", "stime", "clock_settime", "clock_settime64", "iopl", "ioperm", "sethostname", "setdomainname", "bdflush"),
    ),
    "one count for the whole node (fs.aio-max-nr): who takes it all takes it from everybody; databases go on without": ("io_setup",),
    "memory placement affects neighbours": (
        *("mbind", "set_mempolicy", "set_mempolicy_home_node", "get_mempolicy", "move_pages", "migrate_pages"),
    ),
    "never implemented, or long gone": (
        *("afs_syscall", "break", "epoll_ctl_old", "epoll_wait_old", "ftime", "getpmsg", "gtty", "idle", "lock", "mpx", "prof", "profil"),
        *("putpmsg", "security", "stty", "tuxcall", "ulimit", "vserver"),
    ),
}
# Arguments are in user memory where no filter can look; the C library falls back.
NOT_FILTERABLE: Mapping[str, str] = {
    "clone3": "its flags are in memory",
    "socketcall": "the address family is in memory (i386 only)",
}

NAMESPACES = 0x7E020000  # CLONE_NEWNS NEWCGROUP NEWUTS NEWIPC NEWUSER NEWPID NEWNET
FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK: neither AF_PACKET nor AF_ALG, AF_VSOCK, ...
# Type and number of an ioctl, without its direction and size: the same request has other sizes in other ABIs. The kernel
# looks at the low 32 bits only, so higher bits must not hide it.
IOCTLS = {0x586D: "XFS_IOC_SWAPEXT", 0x5881: "XFS_IOC_EXCHANGE_RANGE", 0x660F: "EXT4_IOC_MOVE_EXT"}
IOCTLS_EXACT = {0x5412: "TIOCSTI", 0x541C: "TIOCLINUX"}
PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0x40000, 0xFFFFFFFF)  # Linux, Linux32, UNAME26, both, no randomisation, ask


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One profile: what is denied on top of what the table does not hold, and whether arguments are looked at."""

    name: str
    denied: frozenset[str]
    arguments: bool = True


@functools.cache
def numbers() -> dict[str, tuple[int, int, int]]:
    """Call name -> its number on each of `ARCHES` (-1: does not exist there)."""
    text = resources.files("dsec.security").joinpath("syscall_numbers.json").read_text()
    return {name: (row[0], row[1], row[2]) for name, row in json.loads(text).items()}


def denied_names() -> frozenset[str]:
    return frozenset(name for names in DENIED.values() for name in names)


@functools.cache
def profile(name: str) -> Profile:
    """The profile called ``name``. Raises `KeyError`."""
    return {"default": Profile(name="default", denied=denied_names())}[name]


def available() -> bool:
    """Whether this kernel has filters."""
    try:
        syscalls.prctl(21)  # PR_GET_SECCOMP: EINVAL without CONFIG_SECCOMP
    except OSError:
        return False
    return True


@functools.cache
def compiled(profile: Profile, machine: str = "") -> bytes:
    """The program for a node of architecture ``machine`` (default: this one): 8 bytes an instruction."""
    arches = _NATIVE[machine or _machine()]
    body: list[bytes] = [_ret(KILL)]
    for arch in reversed(arches):
        tree = [_load(0), *_tree(_ranges(profile, arch))]
        body = [*_branch("eq", _AUDIT[arch], tree, body)]
    code = [_load(4), *body]
    if len(code) > 4096:
        raise ValueError(f"{len(code)} instructions, the kernel takes 4096")
    return b"".join(code)


def digest(profile: Profile, machine: str = "") -> str:
    """Names the compiled program; changes when the table or the compiler changes its meaning."""
    return hashlib.sha256(compiled(profile, machine)).hexdigest()


def to_oci(profile: Profile) -> dict[str, Any]:
    """The profile as runtime-spec rules, for runc. Its rules cannot compare the low bits of an ioctl: those three are not in it."""
    names = set(numbers()) - profile.denied - set(NOT_FILTERABLE)
    plain = sorted(names - {"clone", "socket", "personality"})

    def rule(name: str, op: str, index: int, value: int, two: int = 0) -> dict[str, Any]:
        argument = {"index": index, "op": f"SCMP_CMP_{op}", "value": value, "valueTwo": two}
        return {"names": [name], "action": "SCMP_ACT_ALLOW", "args": [argument]}

    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": errno.ENOSYS,
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86"] if _machine() == "x86_64" else ["SCMP_ARCH_AARCH64"],
        "syscalls": [
            {"names": plain, "action": "SCMP_ACT_ALLOW"},
            {"names": sorted(profile.denied), "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM},
            rule("clone", "MASKED_EQ", 0, NAMESPACES, 0),
            *(rule("socket", "EQ", 0, family) for family in FAMILIES),
            *(rule("personality", "EQ", 0, value) for value in PERSONALITIES),
        ],
    }


def run(program: bytes, arch: str, nr: int, args: tuple[int, ...] = ()) -> int:
    """What the program answers for a call: an interpreter of the instructions used here, for tests and `dsec inspect`."""
    args = (*args, *(0,) * (6 - len(args)))
    data = struct.pack("<iIQ6Q", nr if nr < 2**31 else nr - 2**32, _AUDIT[arch], 0, *args)
    at = accumulator = 0
    while True:
        op, jt, jf, k = struct.unpack_from("=HBBI", program, at * 8)
        at += 1
        if op == 0x20:
            accumulator = int(struct.unpack_from("<I", data, k)[0])
        elif op == 0x54:
            accumulator &= k
        elif op == 0x05:
            at += k
        elif op == 0x06:
            return int(k)
        else:
            hit = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[op]
            at += jt if hit else jf


# --- the compiler ----------------------------------------------------------------------------------------------------

_JUMPS = {"eq": 0x15, "ge": 0x35, "set": 0x45}


def _ret(value: int) -> bytes:
    return struct.pack("=HBBI", 0x06, 0, 0, value)


def _load(offset: int) -> bytes:
    return struct.pack("=HBBI", 0x20, 0, 0, offset)


def _and(mask: int) -> bytes:
    return struct.pack("=HBBI", 0x54, 0, 0, mask)


def _jump(kind: str, k: int, jt: int, jf: int) -> bytes:
    return struct.pack("=HBBI", _JUMPS[kind], jt, jf, k)


def _branch(kind: str, k: int, yes: list[bytes], no: list[bytes]) -> list[bytes]:
    """``yes`` if the accumulator compares to ``k``, else ``no``; both end in a return. Conditional jumps reach 255 instructions."""
    if len(no) <= 255:
        return [_jump(kind, k, len(no), 0), *no, *yes]
    return [_jump(kind, k, 0, 1), struct.pack("=HBBI", 0x05, 0, 0, len(no)), *no, *yes]


def _ranges(profile: Profile, arch: str) -> list[tuple[int, tuple[bytes, ...]]]:
    """(first number, what to do) in ascending order; each reaches to the next one's beginning."""
    column = ARCHES.index(arch)
    actions: dict[int, tuple[bytes, ...]] = {}
    for name, row in numbers().items():
        if row[column] >= 0:
            actions[row[column]] = tuple(_action(profile, name))
    unknown = (_ret(ENOSYS),)
    ranges: list[tuple[int, tuple[bytes, ...]]] = []
    for number in range(max(actions) + 2):
        action = actions.get(number, unknown)
        if not ranges or ranges[-1][1] != action:
            ranges.append((number, action))
    return ranges


def _action(profile: Profile, name: str) -> list[bytes]:
    if name in profile.denied:
        return [_ret(EPERM)]
    if name in NOT_FILTERABLE:
        return [_ret(ENOSYS)]
    if profile.arguments:
        low = 16 if sys.byteorder == "little" else 20  # the low half of the first argument
        if name == "clone":
            return [_load(low), *_branch("set", NAMESPACES, [_ret(EPERM)], [_ret(ALLOW)])]
        if name == "socket":
            return [_load(low), *_any_of(FAMILIES, [_ret(ALLOW)], [_ret(EPERM)])]
        if name == "personality":
            return [_load(low), *_any_of(PERSONALITIES, [_ret(ALLOW)], [_ret(EPERM)])]
        if name == "ioctl":
            loose = [_and(0xFFFF), *_any_of(tuple(IOCTLS), [_ret(EPERM)], [_ret(ALLOW)])]
            return [_load(low + 8), *_any_of(tuple(IOCTLS_EXACT), [_ret(EPERM)], loose)]
    return [_ret(ALLOW)]


def _any_of(values: tuple[int, ...], yes: list[bytes], no: list[bytes]) -> list[bytes]:
    code = no
    for value in reversed(values):
        code = _branch("eq", value, yes, code)
    return code


def _tree(ranges: list[tuple[int, tuple[bytes, ...]]]) -> list[bytes]:
    if len(ranges) == 1:
        return list(ranges[0][1])
    middle = len(ranges) // 2
    return _branch("ge", ranges[middle][0], _tree(ranges[middle:]), _tree(ranges[:middle]))


def _machine() -> str:
    machine = platform.machine()
    if machine not in _NATIVE:
        raise KeyError(f"no system-call table for {machine}")
    return machine
