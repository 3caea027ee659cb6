"""What `dsec doctor` finds out by trying: mounts, namespaces, BPF, sockets. Nothing that is tried here stays.

Mounts are detached (their descriptor is the only thing that holds them), user namespaces end with theirs, files live in a temporary
directory. Everything may sleep for a few milliseconds: call it from a thread where an event loop runs.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsec import syscalls
from dsec.errors import Unsupported
from dsec.layers import erofs
from dsec.layers import probe as stacking
from dsec.layers.mounts import LayerMount, open_layer

# linux/bpf.h: program types that the network policy stands on
BPF_TYPES = {"sched_cls": (3, 0), "xdp": (6, 0), "cgroup_skb": (8, 0), "cgroup_sock_addr": (18, 10)}
_BPF_LSM = (29, 27)  # BPF_PROG_TYPE_LSM, BPF_LSM_MAC
_FAN_CLASS_PRE_CONTENT = 0x8
_FAN_CLOEXEC = 0x1
_FAN_MARK_ADD = 0x1
_FAN_PRE_ACCESS = 0x100000
_KVM_GET_API_VERSION = 0xAE00
_PR_SCHED_CORE = 62
_ID_BASE = 1 << 20  # of the throw-away user namespace


def version_of(command: str, *arguments: str, pattern: str = r"(\d+(?:\.\d+)+)") -> tuple[str, str]:
    """(path, version) of a command; both empty when it is not there, version empty when it says none within 5 s."""
    path = shutil.which(command, path=os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin")
    if path is None:
        return "", ""
    try:
        done = subprocess.run(
            [path, *(arguments or ("--version",))], capture_output=True, text=True, timeout=5, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return path, ""
    found = re.search(pattern, done.stdout + done.stderr)
    return path, found.group(1) if found else ""


def at_least(version: str, *wanted: int) -> bool:
    """True when ``version`` ("2.15.1") is `wanted` (2, 12) or newer; False when it is empty."""
    return bool(version) and tuple(int(part) for part in re.findall(r"\d+", version)) >= wanted


def try_native() -> None:
    """What the native launcher stands on: its architecture, and an overlay of copies of detached mounts. Raises `OSError`."""
    if (machine := platform.machine()) not in ("x86_64", "aarch64"):
        raise OSError(errno.ENOEXEC, f"not built for {machine}")
    if syscalls.disabled("overlay_fd"):
        raise OSError(errno.ENOSYS, "overlay_fd is disabled by DSEC_DISABLE")
    stacking.by_descriptor()


def cgroup_mounts() -> dict[str, str]:
    """Where each controller is mounted: ``{"memory": "/sys/fs/cgroup/memory", …, "2": "/sys/fs/cgroup/unified"}``; "2" is cgroup v2."""
    found: dict[str, str] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        point = left.split()[4]
        if kind == "cgroup2":
            found.setdefault("2", point)
        elif kind == "cgroup":
            for option in options.split(","):
                found.setdefault(option, point)
    return found


def v2_controllers(mounts: dict[str, str]) -> set[str]:
    """Controllers of the cgroup v2 hierarchy."""
    if "2" not in mounts:
        return set()
    return set(Path(mounts["2"], "cgroup.controllers").read_text().split())


def mkfs_erofs() -> tuple[str, str]:
    """Path and version of what makes layers; both empty without it."""
    try:
        return version_of(erofs.program(), "-V")
    except Unsupported:
        return "", ""


@contextlib.contextmanager
def erofs_image() -> Iterator[str]:
    """A tiny EROFS image made by this node's mkfs.erofs. Raises `OSError` where that cannot be done."""
    path, _ = mkfs_erofs()
    if not path:
        raise FileNotFoundError(errno.ENOENT, "mkfs.erofs is not installed, so it could not be tried")
    with tempfile.TemporaryDirectory(prefix="dsec-doctor-") as folder:
        tree = Path(folder, "tree")
        tree.mkdir()
        (tree / "hello").write_text("hello\n")
        image = os.path.join(folder, "image.erofs")
        done = subprocess.run([path, "--quiet", image, str(tree)], capture_output=True, text=True, timeout=10, check=False)
        if done.returncode:
            raise OSError(errno.EIO, f"mkfs.erofs failed: {done.stderr.strip()[:200]}")
        yield image


def try_erofs(kind: str) -> None:
    """Mounts a tiny image detached and reads from it. ``kind``: erofs_file or erofs_loop. Raises `OSError`."""
    with erofs_image() as image:
        fd = open_layer(LayerMount(kind="erofs_file" if kind == "erofs_file" else "erofs_loop", source=image))
        try:
            if _read(fd, "hello") != b"hello\n":
                raise OSError(errno.EIO, "an EROFS mount gave other bytes than were written")
        finally:
            os.close(fd)


def _read(directory: int, name: str) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def try_userns() -> None:
    """Makes a user namespace with a map and lets it go. Raises `OSError`."""
    os.close(syscalls.make_userns(_ID_BASE))


def try_pre_content() -> None:
    """A fanotify pre-content mark, which loading on demand stands on. Raises `OSError`."""
    fd = syscalls.fanotify_init(_FAN_CLASS_PRE_CONTENT | _FAN_CLOEXEC)
    try:
        with tempfile.NamedTemporaryFile(prefix="dsec-doctor-") as file:
            syscalls.fanotify_mark(fd, _FAN_MARK_ADD, _FAN_PRE_ACCESS, file.name)
    finally:
        os.close(fd)


def bpf_refused() -> dict[str, str]:
    """Program types that the kernel refuses, with its words."""
    refused = {}
    for name, (kind, attach) in BPF_TYPES.items():
        try:
            os.close(syscalls.bpf_prog_load(kind, attach))
        except OSError as error:
            refused[name] = error.strerror or str(error)
    return refused


def try_bpf_lsm() -> None:
    """Raises `OSError` where BPF LSM programs cannot be loaded.

    The program names no hook, so a kernel that takes the type says EINVAL; EPERM and ENOTSUP are a refusal of the type itself.
    """
    try:
        os.close(syscalls.bpf_prog_load(*_BPF_LSM))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    lsm = lsm_list()
    if lsm and "bpf" not in lsm:
        raise OSError(errno.EOPNOTSUPP, f"bpf is not among the active security modules ({','.join(lsm)}): boot with lsm=…,bpf")


def lsm_list() -> list[str]:
    """Active security modules, [] where securityfs is not mounted."""
    try:
        return Path("/sys/kernel/security/lsm").read_text().strip().split(",")
    except OSError:
        return []


def try_core_sched() -> None:
    """Raises `OSError` where PR_SCHED_CORE cannot be used (not built in, or one thread a core)."""
    cookie = array.array("Q", [0])
    syscalls.prctl(_PR_SCHED_CORE, 0, 0, 0, cookie.buffer_info()[0])


def kvm_api() -> int:
    """KVM's API version. Raises `OSError` where /dev/kvm cannot be opened."""
    fd = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
    try:
        return fcntl.ioctl(fd, _KVM_GET_API_VERSION)
    finally:
        os.close(fd)


def docker(address: str) -> tuple[str, dict[str, str]]:
    """Version of the Docker Engine that listens on a Unix socket, and its runtimes: name -> program. Raises `OSError`."""

    def ask(path: str) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(5)
            sock.connect(address)
            sock.sendall(f"GET {path} HTTP/1.0\r\nHost: docker\r\n\r\n".encode())
            answer = b""
            while len(answer) < 1 << 20 and (piece := sock.recv(65_536)):
                answer += piece
        try:
            found: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])
        except ValueError as error:
            raise OSError(f"{path} is not answered as a Docker Engine does") from error
        return found

    runtimes = ask("/info").get("Runtimes") or {}
    return str(ask("/version").get("Version", "unknown")), {name: str(each.get("path", "")) for name, each in runtimes.items()}


def number(path: str) -> int | None:
    """A sysctl's number (its last word), None where the file is missing or says ``max``."""
    try:
        return int(Path(path).read_text().split()[-1])
    except (OSError, ValueError, IndexError):
        return None
