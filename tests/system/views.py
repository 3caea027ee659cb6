"""What a process inside of a container is given, seen from the node: the same questions to whatever started it."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import stat
import struct
from pathlib import Path

from dsec.security import seccomp

View = dict[str, dict[str, str]]  # section -> what -> how it is

NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")
STATUS = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Seccomp_filters")
MORE = ("THP_enabled", "Speculation_Store_Bypass", "SpeculationIndirectBranch")
_NS_GET_USERNS = 0xB701
_SEIZE, _INTERRUPT, _DETACH, _GET_FILTER = 0x4206, 0x4207, 17, 0x420C
_ARCHES = {"x86_64": 0xC000003E, "i386": 0x40000003, "x32": 0xC000003E, "aarch64": 0xC00000B7, "arm": 0x40000028}
X32_BIT = 0x40000000
MACHINES = {"x86_64": ("x86_64", "i386", "x32"), "aarch64": ("aarch64", "arm")}
ACTIONS = {0x7FFF0000: "allow", 0x00050001: "EPERM", 0x00050026: "ENOSYS", 0x80000000: "kill", 0x00000000: "kill thread"}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def look(pid: int) -> View:
    """Everything about the process ``pid`` but what its filters say (`verdicts`)."""
    base = int(Path(f"/proc/{pid}/uid_map").read_text().split()[1])
    return {
        "namespaces": _namespaces(pid),
        "status": _status(pid, base),
        "limits": _limits(pid),
        "mounts": _mounts(pid),
        "dev": _devices(pid, base),
        "proc": _proc(pid),
    }


def _namespaces(pid: int) -> dict[str, str]:
    found = {}
    own = os.stat(f"/proc/{pid}/ns/user").st_ino
    for name in NAMESPACES:
        path = f"/proc/{pid}/ns/{name}"
        if not os.path.exists(path):
            continue
        shared = os.stat(path).st_ino == os.stat(f"/proc/self/ns/{name}").st_ino
        owner = ""
        if not shared and name != "user":
            fd = os.open(path, os.O_RDONLY)
            owners = fcntl.ioctl(fd, _NS_GET_USERNS)
            owner = ", governed by " + ("its own root" if os.fstat(owners).st_ino == own else "the node")
            os.close(owners)
            os.close(fd)
        found[name] = "the node's" if shared else f"its own{owner}"
    return found


def _status(pid: int, base: int) -> dict[str, str]:
    lines = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    found = {name: lines[name].strip() for name in (*STATUS, *MORE) if name in lines}
    for name in ("Uid", "Gid", "Groups"):
        found[name] = " ".join(str(int(word) - base) for word in found[name].split())
    return found


def _limits(pid: int) -> dict[str, str]:
    rows = Path(f"/proc/{pid}/limits").read_text().splitlines()[1:]
    # How many processes the id may have is a share of the node's memory; the cgroup's limit is what holds.
    return {row[:25].strip(): " ".join(row[26:67].split()) for row in rows if not row.startswith("Max pending")}


def _mounts(pid: int) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
        left, right = line.split(" - ", 1)
        words, (kind, _, options) = left.split(), right.split(" ", 2)
        shown = "" if kind in ("overlay", "devtmpfs", "mqueue", "sysfs", "cgroup", "cgroup2", "ext4") else f" ({_plain(options)})"
        peers = " propagated" if any(word.startswith(("shared:", "master:")) for word in words[6:]) else ""
        found[words[4]] = f"{kind} {','.join(sorted(words[5].split(',')))}{shown}{peers}"
    return found


def _plain(options: str) -> str:
    """Options without what differs from one sandbox to the next."""
    return re.sub(r"\b(gid|uid)=\d+", r"\1=…", ",".join(sorted(options.split(","))))


def _devices(pid: int, base: int) -> dict[str, str]:
    found = {}
    for entry in os.scandir(f"/proc/{pid}/root/dev"):
        info = entry.stat(follow_symlinks=False)
        if stat.S_ISLNK(info.st_mode):
            found[entry.name] = f"-> {os.readlink(entry.path)}"
            continue
        rdev = f" {os.major(info.st_rdev)}:{os.minor(info.st_rdev)}" if info.st_rdev else ""
        owner = "root" if info.st_uid == base else "the node's root" if info.st_uid == 0 else str(info.st_uid)
        found[entry.name] = f"{stat.filemode(info.st_mode)}{rdev} {owner}"
    return found


def _proc(pid: int) -> dict[str, str]:
    groups = [line.split(":", 2)[1] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if line.split(":", 2)[2] != "/"]
    return {
        "oom_score_adj": Path(f"/proc/{pid}/oom_score_adj").read_text().strip(),
        "cgroups of its own": " ".join(sorted(set(groups) & {"cpu", "cpuacct", "cpu,cpuacct", "freezer", "memory", "pids"})),
        "coredump_filter": Path(f"/proc/{pid}/coredump_filter").read_text().strip(),
        "kernel files that can be read": " ".join(sorted(name for name in _READ if _readable(pid, name))),
    }


_READ = ("kcore", "keys", "timer_list", "interrupts", "sysrq-trigger", "acpi", "scsi", "sched_debug", "latency_stats", "asound")


def _readable(pid: int, name: str) -> bool:
    """Whether there is something behind the name, for one who may look: masked files are empty."""
    path = f"/proc/{pid}/root/proc/{name}"
    try:
        if os.path.isdir(path):
            return bool(os.listdir(path))
        with open(path, "rb") as file:
            return bool(file.read(1))
    except OSError:
        return False


# --- filters ---------------------------------------------------------------------------------------------------------


def filters(pid: int) -> list[bytes]:
    """The programs of a process as the kernel has them. Raises `OSError`."""
    programs: list[bytes] = []
    if _libc.ptrace(_SEIZE, pid, None, None) < 0:
        raise OSError(ctypes.get_errno(), f"ptrace {pid}")
    try:
        _libc.ptrace(_INTERRUPT, pid, None, None)
        os.waitpid(pid, 0x40000000)
        while (count := _libc.ptrace(_GET_FILTER, pid, len(programs), None)) > 0:
            room = ctypes.create_string_buffer(count * 8)
            _libc.ptrace(_GET_FILTER, pid, len(programs), room)
            programs.append(room.raw)
    finally:
        _libc.ptrace(_DETACH, pid, None, None)
    return programs


def evaluate(program: bytes, arch: int, number: int, args: tuple[int, ...] = (0,) * 6) -> int:
    """What a classic BPF program answers for a call; every instruction that libseccomp and this project use."""
    data = struct.pack("<iIQ6Q", number if number < 2**31 else number - 2**32, arch, 0, *args)
    at = accumulator = 0
    memory = [0] * 16
    while True:
        op, yes, no, k = struct.unpack_from("=HBBI", program, at * 8)
        at += 1
        match op:
            case 0x20:
                accumulator = int(struct.unpack_from("<I", data, k)[0])
            case 0x54:
                accumulator &= k
            case 0x60:
                accumulator = memory[k]
            case 0x02:
                memory[k] = accumulator
            case 0x05:
                at += k
            case 0x06:
                return int(k)
            case 0x15:
                at += yes if accumulator == k else no
            case 0x25:
                at += yes if accumulator > k else no
            case 0x35:
                at += yes if accumulator >= k else no
            case 0x45:
                at += yes if accumulator & k else no
            case _:
                raise ValueError(f"instruction {op:#x}")


def verdicts(programs: list[bytes], machine: str) -> dict[str, str]:
    """For every call of every ABI of the machine, and every number up to 100 above the last: "arch name" -> action. All arguments are 0;
    where several programs are loaded, the strictest answers."""
    found = {}
    for arch in MACHINES[machine]:
        column = {"x86_64": 0, "i386": 1, "x32": 0}.get(arch, 2 if machine == "aarch64" else 0)
        names = {row[column]: name for name, row in seccomp.numbers().items() if row[column] >= 0}
        for number in range(max(names) + 100):
            asked = number | X32_BIT if arch == "x32" else number
            answers = [evaluate(program, _ARCHES[arch], asked) for program in programs]
            value = min(answers, key=_strictness) if answers else 0x7FFF0000
            found[f"{arch} {names.get(number, number)}"] = ACTIONS.get(value, hex(value))
    return found


def _strictness(answer: int) -> int:
    action = answer & 0xFFFF0000
    return action - (1 << 32) if action & 0x80000000 else action


def differences(views: dict[str, View]) -> dict[tuple[str, str], dict[str, str]]:
    """(section, what) -> how each has it, for what is not the same in all."""
    found = {}
    for section in next(iter(views.values())):
        for what in sorted({key for view in views.values() for key in view[section]}):
            each = {name: view[section].get(what, "absent") for name, view in views.items()}
            if len(set(each.values())) > 1:
                found[section, what] = each
    return found
