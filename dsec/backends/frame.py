"""From a `LaunchPlan` to what a zygote reads: a frame of launcher/launcher.h. Pure.

A frame says everything: what is not in it does not happen, and what a zygote does not understand it refuses. So what this file cannot
put into a frame it refuses too.
"""

from __future__ import annotations

import enum
import functools
import resource
import struct
from collections.abc import Iterable, Sequence

from dsec.backends.base import LaunchPlan, Mount
from dsec.backends.driver import upper_path
from dsec.backends.holder_parts import FRAMES
from dsec.backends.render import GUEST_PATH, NOFILE, OOM_SCORE_ADJ, guest_options
from dsec.errors import Unsupported
from dsec.qos.cgroup import Order as Groups

MAGIC = 0x314C5344
VERSION = FRAMES  # that is written here
HEAD = struct.Struct("=IHHII")
SECTION = struct.Struct("=HHI")
MAX_FRAME = 2 << 20

CLONE_NEWNS = 0x20000
CLONE_NEWCGROUP = 0x2000000
CLONE_NEWUTS = 0x4000000
CLONE_NEWIPC = 0x8000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET

NODES = ("null", "zero", "full", "random", "urandom", "tty")
LINKS = (  # pairs: what it says, where it is
    *("/proc/self/fd", "/dev/fd"),
    *("/proc/self/fd/0", "/dev/stdin"),
    *("/proc/self/fd/1", "/dev/stdout"),
    *("/proc/self/fd/2", "/dev/stderr"),
    *("pts/ptmx", "/dev/ptmx"),
    *("/proc/kcore", "/dev/core"),
)
_FLAGS = {
    "ro": 0x1,
    "nosuid": 0x2,
    "nodev": 0x4,
    "noexec": 0x8,
    "noatime": 0x400,
    "nodiratime": 0x800,
    "relatime": 0x200000,
    "strictatime": 0x1000000,
}
_CAPABILITIES = (
    *("CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "LINUX_IMMUTABLE"),
    *("NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER", "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT"),
    *("SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE", "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE"),
    *("AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP", "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ"),
    *("PERFMON", "BPF", "CHECKPOINT_RESTORE"),
)


class Tag(enum.IntEnum):
    """The sections, as launcher.h numbers them."""

    LOWERS = 1
    IDS = 2
    UPPER = 3
    NAMESPACES = 4
    HOSTNAME = 5
    ARGV = 6
    ENV = 7
    MOUNT = 8
    NODES = 9
    LINKS = 10
    MASKED = 11
    READONLY = 12
    GROUPS = 13
    GROUP2 = 14
    RLIMIT = 15
    CAPS = 16
    NO_NEW_PRIVS = 17
    SECCOMP = 18
    OOM = 19
    MADE = 20
    SETTINGS = 21
    SOCKET = 22


NO_GROUPS = Groups((), (), ())
UPPER_TMPFS, UPPER_DIRECTORY, UPPER_LOOP = 1, 2, 3


def render(
    plan: LaunchPlan,
    *,
    lowers: int,
    socket: str,
    args: Sequence[str] = (GUEST_PATH,),
    groups: Groups = NO_GROUPS,
    group2: str = "",
    seccomp: bytes = b"",
    nofile: tuple[int, int] = NOFILE,
    own_upper: bool = False,
) -> bytes:
    """The frame of one launch.

    ``lowers``: how many descriptors of layers go with it, the agent's own included. ``socket``: where the agent listens. ``groups``: the
    cgroups to make and, on v1, to join; ``group2``: a v2 directory to be born in. ``own_upper``: the file system of the upper cannot be
    id-mapped, so its directories get root's id on disk.

    Raises `Unsupported` with field and value for what a frame cannot say.
    """
    base = plan.idmap.base if plan.idmap is not None else 0
    sections: list[tuple[Tag, bytes]] = [
        (Tag.LOWERS, struct.pack("=I", lowers)),
        (Tag.UPPER, _upper(plan, base if own_upper else 0)),
        (Tag.HOSTNAME, _texts("hostname", [plan.hostname])),
        (Tag.ARGV, _texts("argv", args)),
        (Tag.ENV, _texts("env", [f"{name}={value}" for name, value in plan.env.items()])),
        *((Tag.MOUNT, _mount(mount, base if mount.fstype == "devpts" else 0)) for mount in plan.mounts),
        (Tag.MADE, _texts("groups", groups.directories)),
        (Tag.SETTINGS, _texts("groups", [text for setting in groups.settings for text in setting])),
        (Tag.SOCKET, _texts("socket", [socket])),
    ]
    if plan.idmap is not None:
        sections.append((Tag.IDS, struct.pack("=II", plan.idmap.base, plan.idmap.count)))
    if group2:
        sections.append((Tag.GROUP2, _texts("group2", [group2])))
    else:
        sections.append((Tag.GROUPS, _texts("groups", groups.joins)))
    return pack(sections, _common(plan.masked, plan.readonly, plan.capabilities, nofile, seccomp))


Packed = tuple[int, bytes]  # how many sections, and how they stand in a frame


def pack(sections: Iterable[tuple[int, bytes]], further: Packed = (0, b"")) -> bytes:
    """Sections to a frame."""
    count, body = _pack(sections)
    size = HEAD.size + len(body) + len(further[1])
    if size > MAX_FRAME:
        raise Unsupported("more than a launch takes", field="env", value=size, fix=f"use less than {MAX_FRAME} bytes", reason="launcher")
    return b"".join((HEAD.pack(MAGIC, VERSION, count + further[0], size, 0), body, further[1]))


def _pack(sections: Iterable[tuple[int, bytes]]) -> Packed:
    parts = [piece for tag, body in sections for piece in (SECTION.pack(tag, 0, len(body)), body)]
    return len(parts) // 2, b"".join(parts)


@functools.lru_cache(16)
def _common(
    masked: tuple[str, ...], readonly: tuple[str, ...], capabilities: tuple[str, ...], nofile: tuple[int, int], seccomp: bytes
) -> Packed:
    """The sections that are the same in most frames."""
    sections: list[tuple[Tag, bytes]] = [
        (Tag.NAMESPACES, struct.pack("=I", NAMESPACES)),
        (Tag.NODES, _texts("nodes", NODES)),
        (Tag.LINKS, _texts("links", LINKS)),
        (Tag.MASKED, _texts("masked", masked)),
        (Tag.READONLY, _texts("readonly", readonly)),
        (Tag.RLIMIT, struct.pack("=IIQQ", resource.RLIMIT_NOFILE, 0, *nofile)),
        (Tag.RLIMIT, struct.pack("=IIQQ", resource.RLIMIT_CORE, 0, 0, 0)),
        (Tag.CAPS, struct.pack("=Q", capability_set(capabilities))),
        (Tag.NO_NEW_PRIVS, struct.pack("=I", 1)),
        (Tag.OOM, struct.pack("=i", OOM_SCORE_ADJ)),
    ]
    if seccomp:
        sections.append((Tag.SECCOMP, seccomp))
    return _pack(sections)


def capability_set(names: tuple[str, ...]) -> int:
    """Bits of capabilities by their names (``CAP_KILL``). Raises `Unsupported` for one that is not known."""
    bits = 0
    for name in names:
        try:
            bits |= 1 << _CAPABILITIES.index(name.removeprefix("CAP_"))
        except ValueError:
            raise Unsupported("no such capability", field="capabilities", value=name, reason="launcher") from None
    return bits


def arguments(plan: LaunchPlan, listener_fd: int, upper_fd: int) -> tuple[str, ...]:
    """What the agent is started as."""
    return (GUEST_PATH, "--fd", str(listener_fd), "--upper", str(upper_fd), *guest_options(plan))


def _texts(field: str, texts: Iterable[str]) -> bytes:
    encoded = [text.encode(errors="surrogateescape") for text in texts]
    if any(b"\0" in text for text in encoded):
        raise Unsupported("holds a NUL byte", field=field, reason="launcher")
    return b"".join(text + b"\0" for text in encoded)


def _upper(plan: LaunchPlan, owned_by: int) -> bytes:
    if plan.disk_mode == "tmpfs":
        return struct.pack("=II", UPPER_TMPFS, owned_by) + _texts("upper", [str(plan.resources.disk), str(plan.resources.inodes), ""])
    kind = UPPER_LOOP if plan.disk_mode == "loop" else UPPER_DIRECTORY
    return struct.pack("=II", kind, owned_by) + _texts("upper", ["", "", upper_path(plan)])


@functools.lru_cache(1024)
def _mount(mount: Mount, base: int) -> bytes:
    """``gid=`` of a devpts is an id inside; its mounter stands outside."""
    flags, data = 0, []
    for option in mount.options:
        if option in _FLAGS:
            flags |= _FLAGS[option]
        elif mount.fstype == "devpts" and option.startswith("gid="):
            data.append(f"gid={base + int(option[4:])}")
        else:
            data.append(option)
    return struct.pack("=II", flags, 0) + _texts("mounts", [mount.fstype, mount.source, mount.target, ",".join(data)])
