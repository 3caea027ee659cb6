"""CRIU: whether this node has one that will do, what it is told, and what of its images is each restored sandbox's own.

It is called directly: for the whole tree of a sandbox's processes with the agent at its root, and their namespaces of pids, mounts and ids.
The network namespace is made anew and empty; cgroups, names and System V objects are left to us. Command lines and edits are pure functions
here; dsec/backends/capture.py and dsec/backends/restore.py call them.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from dsec import syscalls
from dsec.errors import Unsupported

NEEDED = (4, 0)
TIMEOUT = 300.0  # seconds of a dump, and of its restore: they move the same memory
RECORD = "dsec.json"
DUMP_LOG, RESTORE_LOG = "dump.log", "restore.log"
LISTENER_FD, UPPER_FD = 3, 4  # where the launcher leaves them
NODE, NOTHING, EMPTY = "node", "nothing", "empty"  # what lies at a mount from outside: a device of the node, /dev/null, an empty directory


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """What a restore must know of a dump, kept beside CRIU's own files."""

    listener: int  # inode of the agent's listening socket
    upper: str  # CRIU's name for the descriptor of the upper
    outside: dict[str, str]  # mounts that come from outside of the sandbox: by their place, what lies there
    version: str  # of the CRIU that made it
    sizes: dict[str, int] = {}  # of its files: with one that was cut off a restore may wait for ever


def find() -> tuple[str, str]:
    """Path and version of a CRIU that will do. Blocks for one start of the program. Raises `Unsupported`."""
    fix = "make setup brings it along on Debian 12; elsewhere: apt-get install criu"
    if syscalls.disabled("criu"):
        raise Unsupported("criu is disabled by DSEC_DISABLE", reason="snapshot")
    own = os.path.join(sys.prefix, "bin", "criu")
    path = own if os.access(own, os.X_OK) else shutil.which("criu", path=os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin")
    if path is None:
        raise Unsupported("criu is not installed", reason="snapshot", fix=fix)
    try:
        told = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=5, check=False, stdin=subprocess.DEVNULL).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unsupported(f"{path} cannot be asked: {error}", reason="snapshot") from error
    found = re.search(r"(\d+)\.(\d+)(?:\.\d+)?", told)
    if found is None or (int(found[1]), int(found[2])) < NEEDED:
        version = found[0] if found else "of an unknown version"
        raise Unsupported(f"criu at {path} is {version}, 4.0 is needed", reason="snapshot", fix=fix)
    return path, found[0]


def look() -> tuple[Literal["ok", "missing"], str]:
    """For doctor: what `find` finds, and whether this kernel has what CRIU needs by its own account. Blocks."""
    try:
        path, version = find()
    except Unsupported as error:
        return "missing", error.message
    if why := kernel_trouble(path):
        return "missing", f"criu {version}: {why}"
    return "ok", f"criu {version} at {path}"


def kernel_trouble(path: str, *guard: str) -> str:
    """Why this kernel or these capabilities will not do; "" when they will. Blocks. ``guard``: words before the command."""
    try:
        argv = [*guard, path, "check"]
        asked = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it cannot check this kernel: {error}"
    if asked.returncode == 0:
        return ""
    return f"this kernel will not do: {(asked.stderr + asked.stdout).strip()[-300:]}"


# --- command lines -----------------------------------------------------------------------------------------------------


def dump_command(path: str, init: int, place: str, freezer: str, upper: str, outside: Mapping[str, str]) -> list[str]:
    """Dump the tree below ``init`` into ``place``. Its freezer stands still before and after, and everything lives on."""
    argv = [path, "dump", "--unprivileged", "--tree", str(init), "--images-dir", place, "--log-file", DUMP_LOG, "-v1", "--leave-running"]
    argv += ["--freeze-cgroup", freezer, "--manage-cgroups=ignore", "--empty-ns", "net", "--external", upper]
    # Without --link-remap: the names that it makes in the sandbox are gone again when its files are captured.
    argv += ["--ghost-limit", str(64 << 20), "--file-locks", "--skip-in-flight"]
    argv += ["--tcp-established", "--network-lock", "skip"]  # those on loopback: both ends stand still
    for place_inside in sorted(outside):
        argv += ["--external", f"mnt[{place_inside}]:{place_inside}"]
    return argv


def restore_command(path: str, image: Image, place: str, box: str, root: str, empty: str, hook: str) -> list[str]:
    """Restore what is in ``place`` with ``root`` as its root; its init's pid goes to ``box``/pid. ``hook``: a program for
    CRIU to call at each step."""
    sources = {NOTHING: "/dev/null", EMPTY: empty}
    argv = [
        path,
        "restore",
        "--unprivileged",
        "--images-dir",
        place,
        "--work-dir",
        box,
        "--log-file",
        RESTORE_LOG,
        "-v1",
        "--restore-detached",
    ]
    argv += ["--pidfile", f"{box}/pid", "--root", root, "--manage-cgroups=ignore", "--empty-ns", "net", "--action-script", hook]
    argv += ["--inherit-fd", f"fd[{LISTENER_FD}]:socket:[{image.listener}]", "--inherit-fd", f"fd[{UPPER_FD}]:{image.upper}"]
    argv += ["--file-locks", "--skip-in-flight", "--skip-file-rwx-check", "--tcp-established"]
    for inside, what in sorted(image.outside.items()):
        argv += ["--external", f"mnt[{inside}]:{sources.get(what, inside)}"]
    return argv


def outside_mounts(mountinfo: str) -> Iterator[tuple[str, str]]:
    """Mounts that CRIU cannot make by itself, in the text of an init's mountinfo: all but the root, procfs and devpts. Where each is, and
    what of its file system it shows."""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        _, _, _, root, place = left.split()[:5]
        if place != "/" and right.split()[0] not in ("proc", "devpts"):
            yield place, root


_QUIET = frozenset(("06", "07", "0A"))  # of TCP's states: time-wait, closed, listening
_LOOPBACK = re.compile(r"[0-9A-F]{6}7F|0{24}01000000|0{16}0000FFFF[0-9A-F]{6}7F")  # 127/8, ::1, ::ffff:127/8 on a little-endian machine


def far_connections(table: str) -> list[str]:
    """Far ends of TCP connections that leave the sandbox, from its /proc/net/tcp or tcp6, as they are written there."""
    rows = [line.split() for line in table.splitlines()[1:]]
    return [row[2] for row in rows if row[3] not in _QUIET and not _LOOPBACK.fullmatch(row[2].partition(":")[0])]


def untraceable(status: str, where: str) -> tuple[str, str] | None:
    """Why CRIU cannot trace a process that stands still with its cgroup, from its /proc/PID/status and
    wchan, and what would help. In a frozen cgroup of the first version it is only the second that tells of one that is stopped."""
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    if fields.get("TracerPid", "0") != "0":  # it would be taken for dead
        return "a process is traced by another one", "end strace or the debugger"
    if fields.get("State", "").startswith("T") or where == "do_signal_stop":  # it would be waited for until it goes on, which it cannot
        return "a process is stopped (SIGSTOP, or Ctrl-Z in a terminal)", "let it go on (kill -CONT), or end it"
    return None


# --- images: two magic numbers, then messages of protobuf with their size before them ------------------------------------


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _replaced(image: bytes, message: bytes) -> bytes:
    """An image of one message with another message."""
    return image[:8] + struct.pack("<I", len(message)) + message


def with_ids(image: bytes, base: int, count: int) -> bytes:
    """The image of a user namespace, for another range of ids."""
    extent = _field(1, 0) + _field(2, base) + _field(3, count)
    return _replaced(image, _field(1, extent) + _field(2, extent))


# --- what it says -------------------------------------------------------------------------------------------------------

# By a part of CRIU's words: what that means for whoever asked, and what helps.
_WORDS: tuple[tuple[str, str, str], ...] = (
    ("External socket is used", "a process is connected to a socket outside of the sandbox", "close it"),
    ("fsnotify", "a process watches files (inotify)", "end it, or let it look from time to time"),
    ("io_uring", "a process uses io_uring", "end it"),
    ("Can't dump ghost file", "a process holds a large file open that is deleted", "close it, or keep the file's name"),
    ("Can't create link remap", "a process holds a file open under a name that is gone, and it has others", "close it"),
    ("is traced", "a process is traced by another one", "end strace or the debugger"),
    ("nested", "a process has made namespaces of its own", "end what unshare, bwrap or a browser's sandbox started"),
    ("unsupported", "a process holds a kind of descriptor that CRIU cannot keep", "close it"),
    ("No space left on device", "the node's disk is full", ""),
)


def explain(log: str) -> tuple[str, str]:
    """What went wrong, from the text of CRIU's log, and what would help."""
    errors = [line.partition(": ")[2] or line for line in log.splitlines() if "Error" in line]
    for words, meaning, fix in _WORDS:
        if any(words in line for line in errors):
            return meaning, fix
    return "; ".join(errors[:3])[:400] or "criu failed and did not say why", ""
