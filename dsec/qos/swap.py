"""Swap for paused sandboxes: a zram device or a file of this Edge's own, made when the configuration says so.

What the machine already swaps to is never touched. Ours bears a label that derives from the state directory, in the swap signature
itself, so an Edge that restarts finds its own again (the pages of paused sandboxes lie there) and no other one's. It is given back when
the Edge ends and holds no sandbox any more.

Blocking: call from a thread. Signature as mkswap(8) writes it (include/linux/swap.h, union swap_header).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import struct
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dsec import syscalls
from dsec.errors import InvalidRequest, NodeError, Unsupported

PAGE = os.sysconf("SC_PAGE_SIZE")
MAGIC = b"SWAPSPACE2"
SIGNATURE = struct.Struct("=1024xIII16s16s")  # version, last page, bad pages, uuid, label
PRIORITY = 16  # above what a distribution gives, so that paused sandboxes go to what was made for them
CONTROL = Path("/sys/class/zram-control")
BLOCK = Path("/sys/block")
FASTEST = ("lz4", "lzo-rle", "lzo")
KINDS = ("off", "node", "zram", "file")


class Area(NamedTuple):
    """One line of /proc/swaps; sizes in bytes."""

    path: str
    size: int
    used: int


def areas(text: str | None = None) -> tuple[Area, ...]:
    """What the machine swaps to now."""
    if text is None:
        try:
            text = Path("/proc/swaps").read_text()
        except FileNotFoundError:  # a kernel without swap
            return ()
    found = []
    for line in text.splitlines()[1:]:
        words = line.split()
        if len(words) >= 5:
            found.append(Area(words[0].replace("\\040", " "), int(words[2]) << 10, int(words[3]) << 10))
    return tuple(found)


def zram_share() -> float:
    """Bytes of memory that a swapped byte goes on taking, as a mean over all swap in use: a zram device holds its pages in memory."""
    used = taken = 0
    for area in areas():
        used += area.used
        if (numbers := _mm_stat(area.path)) is not None and numbers[0]:
            taken += round(area.used * numbers[2] / numbers[0])
    return min(1.0, taken / used) if used else 0.0


def _mm_stat(device: str) -> tuple[int, ...] | None:
    """Of a zram device: bytes stored, compressed, taken from memory…"""
    try:
        return tuple(int(word) for word in (BLOCK / os.path.basename(device) / "mm_stat").read_text().split())
    except OSError:
        return None


def signature(pages: int, label: str) -> bytes:
    """The first page of a swap area of so many pages. Raises `ValueError` for fewer than 10 or a label of more than 15 bytes."""
    name = label.encode()
    if pages < 10 or len(name) > 15:
        raise ValueError(f"{pages} pages, label {label!r}")
    head = SIGNATURE.pack(1, pages - 1, 0, uuid.uuid4().bytes, name)
    return head.ljust(PAGE - len(MAGIC), b"\0") + MAGIC


def label_of(first: bytes) -> str:
    """The label in a first page; "" when it is no swap area."""
    if len(first) < PAGE or first[PAGE - len(MAGIC) : PAGE] != MAGIC:
        return ""
    return bytes(SIGNATURE.unpack_from(first)[4]).rstrip(b"\0").decode("ascii", "replace")


class Swap:
    """This Edge's own swap. ``kind``: off, node (what the machine has), zram or file; ``size`` in bytes, 0 = as the node's memory.

    `missing` says after `open` why paused sandboxes keep their memory.
    """

    def __init__(self, kind: str, size: int, state_dir: str, file: str = "") -> None:
        if kind not in KINDS:
            raise InvalidRequest("not a choice", field="pause.swap", value=kind, fix=f"use {', '.join(KINDS)}")
        self.kind = kind
        self.size = (size or PAGE * os.sysconf("SC_PHYS_PAGES")) // PAGE * PAGE
        self.file = file or f"{state_dir}/swap"
        self.label = "dsec-" + hashlib.sha256(os.path.realpath(state_dir).encode()).hexdigest()[:10]
        self.path = ""  # what is swapped to, when it is ours
        self.made = False  # by this `open`: nothing of an earlier Edge lies there

    def open(self) -> None:
        """Take up what an earlier Edge left, or make it. Raises `Unsupported` with the reason when it cannot be had."""
        self._take_up()
        if not self.path and self.kind in ("zram", "file"):
            try:
                self.path = self._zram() if self.kind == "zram" else self._file()
                self.made = True
            except OSError as error:
                fix = f"use a file system of the node's own for {self.file}" if self.kind == "file" and error.errno == errno.EINVAL else ""
                raise Unsupported(f"no swap: {error}", field="pause.swap", value=self.kind, reason="swap", fix=fix) from error

    @property
    def missing(self) -> str:
        """Why paused sandboxes keep their memory; "" when they do not."""
        if self.kind == "off" and not self.path:
            return "paused sandboxes keep their memory: pause.swap is off"
        if not areas():
            return "paused sandboxes keep their memory: there is no swap (set pause.swap to zram or file)"
        return ""

    @property
    def active(self) -> bool:
        """Whether paused memory may be sent to swap: by the configuration, or because pages of an earlier Edge lie there."""
        return not self.missing

    def close(self) -> None:
        """Give it back; what lies there is read back first. Idempotent. Raises `NodeError` when the kernel keeps it (no memory)."""
        if not self.path:
            return
        try:
            self._off(self.path)
        except OSError as error:
            raise NodeError(f"swap {self.path} stays: {error}", reason="swap") from error
        self.path = ""

    # ------------------------------------------------------------------ inside
    def _take_up(self) -> None:
        """Ours that is in use is kept; ours that was half made is removed."""
        in_use = {os.path.basename(area.path) if area.path.startswith("/dev/") else os.path.realpath(area.path): area for area in areas()}
        for entry in sorted(BLOCK.glob("zram*")):
            with contextlib.suppress(OSError, ValueError):
                if int((entry / "disksize").read_text()) and self._read_label(entry.name) == self.label:
                    if entry.name in in_use and not self.path:
                        self.path, self.size = f"/dev/{entry.name}", in_use[entry.name].size
                    elif entry.name not in in_use:
                        self._remove_zram(entry.name)
        real = os.path.realpath(self.file)
        with contextlib.suppress(OSError):
            with open(real, "rb") as file:
                ours = label_of(file.read(PAGE)) == self.label
            if real in in_use and ours:
                self.path, self.size = self.path or real, in_use[real].size
            elif ours:
                os.unlink(real)

    def _read_label(self, name: str) -> str:
        with _node(name) as path, open(path, "rb", buffering=0) as device:
            return label_of(device.read(PAGE))

    def _zram(self) -> str:
        if syscalls.disabled("zram"):
            raise Unsupported("zram is disabled by DSEC_DISABLE", field="pause.swap", value="zram", reason="swap")
        try:
            name = f"zram{int((CONTROL / 'hot_add').read_text())}"
        except FileNotFoundError:
            raise Unsupported(
                "this kernel has no zram", field="pause.swap", value="zram", reason="swap", fix="modprobe zram, or use file"
            ) from None
        try:
            offered = (BLOCK / name / "comp_algorithm").read_text().replace("[", " ").replace("]", " ").split()
            if (fastest := next((each for each in FASTEST if each in offered), "")) and len(offered) > 1:
                (BLOCK / name / "comp_algorithm").write_text(fastest)
            (BLOCK / name / "disksize").write_text(str(self.size))
            with _node(name) as path:
                with open(path, "r+b", buffering=0) as device:
                    device.write(signature(self.size // PAGE, self.label))
                syscalls.swapon(path, PRIORITY)
        except BaseException:
            with contextlib.suppress(OSError):
                self._remove_zram(name)
            raise
        return f"/dev/{name}"

    def _file(self) -> str:
        path = os.path.realpath(self.file)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                os.posix_fallocate(fd, 0, self.size)
                os.pwrite(fd, signature(self.size // PAGE, self.label), 0)
                os.fsync(fd)
            finally:
                os.close(fd)
            syscalls.swapon(path, PRIORITY)
        except BaseException:
            os.unlink(path)
            raise
        return path

    def _off(self, path: str) -> None:
        name = os.path.basename(path)
        if path.startswith("/dev/"):
            with _node(name) as node:
                _swapoff(node)
            self._remove_zram(name)
        else:
            _swapoff(path)
            os.unlink(path)

    @staticmethod
    def _remove_zram(name: str) -> None:
        (BLOCK / name / "reset").write_text("1")
        (CONTROL / "hot_remove").write_text(name.removeprefix("zram"))


def _swapoff(path: str) -> None:
    try:
        syscalls.swapoff(path)
    except OSError as error:
        if error.errno != errno.EINVAL:  # it is no swap area any more
            raise


@contextlib.contextmanager
def _node(name: str) -> Iterator[str]:
    """A path of the block device; where nobody makes nodes in /dev, a short-lived one of our own."""
    path = f"/dev/{name}"
    number = (BLOCK / name / "dev").read_text().strip()
    major, _, minor = number.partition(":")
    wanted = os.makedev(int(major), int(minor))
    try:
        there = os.stat(path)
        if stat.S_ISBLK(there.st_mode) and there.st_rdev == wanted:
            yield path
            return
    except FileNotFoundError:
        pass
    own = f"/dev/.dsec-{name}-{os.getpid()}"
    os.mknod(own, 0o600 | stat.S_IFBLK, wanted)
    try:
        yield own
    finally:
        os.unlink(own)
