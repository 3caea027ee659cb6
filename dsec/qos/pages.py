"""Pages of a group of processes: out to swap while it stands still, in again before and behind its thaw.

Out: on v2 `memory.reclaim`, with swap allowed for that moment only; on v1 `process_madvise(MADV_PAGEOUT)` by pidfd for what processes
hold, the agent's few pages but for, so that it answers without a disk. What no process maps then (files of a tmpfs, and pages that are
written to a disk and lie in the swap cache still) goes by a limit below it, for that moment: `memory.force_empty` would try 16 times more
when nothing is left to take, and would drop the cached files of layers that all share.
In: `MADV_WILLNEED`, a few MiB a call. (The paper's way is cgroup.freeze, memory.swap.max and memory.reclaim; and back by prefetching.)

Blocking: call from threads. A range that went away meanwhile is no error.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Iterator

import msgspec

from dsec import syscalls
from dsec.qos.cgroup import Cgroups

VECTOR = 1024  # ranges a call (UIO_MAXIOV)
PIECE = 16 << 20  # bytes of one call at most, so that several threads share a large process and a prefetch can be given up
SMALL = 1 << 20  # bytes that no process maps and that are left where they are
SQUEEZES = 4  # attempts: each may find cached files before what it is meant for
SWAPPINESS = "200"  # memory that can be swapped goes first
GENTLE = 4 << 20  # bytes of one prefetching call
Range = tuple[int, int]  # address, bytes


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What a group holds, in bytes: all of its memory, anonymous memory, files of tmpfs and shared memory, what lies in swap,
    and what of that is in memory too (written, or being written)."""

    total: int = 0
    anon: int = 0
    shmem: int = 0
    swap: int = 0
    cached: int = 0


def held(groups: Cgroups, name: str) -> Held:
    """Zeros when the group is gone."""
    v2 = groups.version == 2
    stat: dict[str, int] = {}
    total = swap = 0
    with contextlib.suppress(OSError):
        for line in _read(groups, name, "memory.stat").splitlines():
            key, _, value = line.partition(" ")
            stat[key] = int(value)
        total = int(_read(groups, name, "memory.current" if v2 else "memory.usage_in_bytes"))
        swap = int(_read(groups, name, "memory.swap.current")) if v2 else stat.get("swap", 0)
    anon = stat.get("anon" if v2 else "rss", 0)
    return Held(total=total, anon=anon, shmem=stat.get("shmem", 0), swap=swap, cached=stat.get("swapcached", 0))


def page_out(groups: Cgroups, name: str, agent: int, run: Callable[[list[Callable[[], None]]], None]) -> None:
    """Send the anonymous memory and the tmpfs files of a frozen group to swap, as far as there is room; on v1 without what runs the program
    of the process ``agent``. ``run`` carries out several pieces of work, at one time if it can. Raises `OSError` of the control files."""
    if groups.version == 2:
        with _swap_allowed(groups, name):
            if not _reclaim(groups, name):
                _advise_all(groups, name, agent, run)
        return
    _advise_all(groups, name, agent, run)
    _squeeze(groups, name)


def _squeeze(groups: Cgroups, name: str) -> None:
    """Have what no process maps taken (v1): a limit that the group keeps only without it. The kernel leaves the limit as it was when it
    cannot be kept, and when the writer is killed meanwhile."""
    if not _limit(groups, name):  # nothing would tell the limit to who comes after a death
        if held(groups, name).shmem >= SMALL:
            _write(groups, name, "memory.force_empty", "0")
        return
    for _ in range(SQUEEZES):
        now = held(groups, name)
        if now.shmem + now.cached < SMALL:
            return
        order = _read(groups, name, "memory.swappiness")
        try:
            with contextlib.suppress(OSError):  # Linux < 5.8: 100 at most
                _write(groups, name, "memory.swappiness", SWAPPINESS)
            _write(groups, name, "memory.limit_in_bytes", str(max(0, now.total - now.shmem - now.cached)))
        except OSError as error:
            if error.errno != errno.EBUSY:  # swap is full, or it is locked
                raise
            return
        finally:
            _write(groups, name, "memory.swappiness", order)
            unsqueeze(groups, name)


def unsqueeze(groups: Cgroups, name: str) -> None:
    """Give a group its limit back, also when an Edge died between two writes of `page_out`. Harmless when it has it, or is gone."""
    if groups.version == 1 and (whole := _limit(groups, name)) and _read(groups, name, "memory.limit_in_bytes") != whole:
        _write(groups, name, "memory.limit_in_bytes", whole)


def _limit(groups: Cgroups, name: str) -> str:
    """A v1 group's limit, from that for memory and swap, which is the same; "" where the kernel does not count swap."""
    try:
        return _read(groups, name, "memory.memsw.limit_in_bytes")
    except FileNotFoundError:
        return ""


def _advise_all(groups: Cgroups, name: str, agent: int, run: Callable[[list[Callable[[], None]]], None]) -> None:
    work = []
    for fd, ranges in _members(groups, name, but=_program(agent)):
        pieces = [_advise(fd, chunk, syscalls.MADV_PAGEOUT) for chunk in chunks(ranges, PIECE)]
        work.append((fd, pieces))
    try:
        run([piece for _, pieces in work for piece in pieces])
    finally:
        for fd, _ in work:
            os.close(fd)


@contextlib.contextmanager
def _swap_allowed(groups: Cgroups, name: str) -> Iterator[None]:
    """A group has no swap but while its memory is sent there. A kernel that does not count swap has no such file, and no such limit."""
    with contextlib.suppress(FileNotFoundError):
        _write(groups, name, "memory.swap.max", "max")
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            _write(groups, name, "memory.swap.max", "0")


def _reclaim(groups: Cgroups, name: str) -> bool:
    """By memory.reclaim; False where there is none (Linux < 5.19)."""
    before = held(groups, name)
    want = before.anon + before.shmem
    if not want:
        return True
    for order in (f"{want} swappiness=200", str(want)):  # without the word (Linux < 6.10) cached files go first
        try:
            _write(groups, name, "memory.reclaim", order)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno == errno.EINVAL:
                continue
            if error.errno != errno.EAGAIN:  # not all of it could be reclaimed; what was, was
                raise
        return True
    return True


def prefetch(groups: Cgroups, name: str, pids: Iterable[int], go_on: Callable[[], bool]) -> None:
    """Ask for the pages of these processes (all of the group when there are none), a few MiB at a time while ``go_on()``."""
    for fd, ranges in _members(groups, name, pids):
        try:
            for chunk in chunks(ranges, GENTLE):
                if not go_on():
                    return
                _advise(fd, chunk, syscalls.MADV_WILLNEED)()
        finally:
            os.close(fd)


def chunks(ranges: Iterable[Range], most: int) -> Iterator[list[Range]]:
    """The same ranges, cut and gathered into lists of at most ``most`` bytes and `VECTOR` ranges (pure)."""
    chunk: list[Range] = []
    room = most
    for start, size in ranges:
        while size:
            part = min(size, room)
            chunk.append((start, part))
            start, size, room = start + part, size - part, room - part
            if not room or len(chunk) == VECTOR:
                yield chunk
                chunk, room = [], most
    if chunk:
        yield chunk


def worthwhile(maps: str) -> list[Range]:
    """Of /proc/PID/maps, what may hold memory of the process's own: private and writable, or anonymous, or shared without a file of a
    disk. Text and data of programs stay where all who use the layer read them (pure)."""
    found = []
    for line in maps.splitlines():
        words = line.split(None, 5)
        address, rights, inode = words[0], words[1], words[4]
        path = words[5] if len(words) > 5 else ""
        if path in ("[vdso]", "[vvar]", "[vvar_vclock]", "[vsyscall]"):
            continue
        shared_memory = rights[3] == "s" and path.startswith(("/dev/zero", "/memfd:", "/SYSV", "/dev/shm/"))
        if inode == "0" or shared_memory or (rights[3] == "p" and "w" in rights):
            start, _, end = address.partition("-")
            found.append((int(start, 16), int(end, 16) - int(start, 16)))
    return found


def _program(pid: int) -> tuple[int, int]:
    """What names the file that a process runs; zeros when it has ended."""
    try:
        found = os.stat(f"/proc/{pid}/exe")
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino


def _members(groups: Cgroups, name: str, pids: Iterable[int] = (), but: tuple[int, int] = (0, 0)) -> Iterator[tuple[int, list[Range]]]:
    """A pidfd and the ranges of each process that does not run the program ``but``; the descriptor is the caller's to close."""
    group = f"/{groups.parent}/{name}\n"
    for pid in tuple(pids) or groups.pids(name):
        try:
            fd = syscalls.pidfd_open(pid)
        except OSError:  # it has ended
            continue
        try:
            with open(f"/proc/{pid}/cgroup") as file:
                ours = group in file.read()
            with open(f"/proc/{pid}/maps") as file:
                ranges = worthwhile(file.read()) if ours and (not but[1] or _program(pid) != but) else []
        except OSError:
            ranges = []
        if not ranges:
            os.close(fd)
            continue
        yield fd, ranges


def _advise(fd: int, ranges: list[Range], advice: int) -> Callable[[], None]:
    def advise() -> None:
        rest = ranges
        while rest:
            try:
                done = syscalls.process_madvise(fd, rest, advice)
            except OSError as error:
                if error.errno in (errno.ESRCH, errno.EPERM):
                    return
                done = 0
            rest = _after(rest, done)

    return advise


def _after(ranges: list[Range], done: int) -> list[Range]:
    """What is left when ``done`` bytes were advised and the call stopped before the end: without the range that stopped it."""
    for at, (_, size) in enumerate(ranges):
        if done < size:
            return ranges[at + 1 :]
        done -= size
    return []


def _read(groups: Cgroups, name: str, file: str) -> str:
    with open(f"{groups.path('memory', name)}/{file}") as text:
        return text.read()


def _write(groups: Cgroups, name: str, file: str, text: str) -> None:
    fd = os.open(f"{groups.path('memory', name)}/{file}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
