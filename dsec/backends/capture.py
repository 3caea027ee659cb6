"""The processes of a container as images of CRIU, taken while it stands still.

The agent is in the images too, with its table of operations: what was started goes on in a restored sandbox under the same id, and its
output is there. Before that it moves house: its listening socket was made in the node's network namespace, where CRIU does not look for
sockets of a sandbox, so it gets one that was made in its own; and all its connections are closed, whose other ends are the node's.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from dsec import syscalls, trees
from dsec.backends import criu
from dsec.backends.base import Undone
from dsec.backends.guest import wire
from dsec.errors import DsecError, NodeError, Unsupported
from dsec.layers import tools

T = TypeVar("T")
PATIENCE = 5.0  # seconds for the agent's answer
TRIES = 40  # to catch a sandbox in which nobody is in the middle of a vfork: less than a second of it running on
DEVICES = frozenset(("null", "zero", "full", "random", "urandom", "tty"))


class Tools(msgspec.Struct, frozen=True):
    """Programs of a capture."""

    criu: str
    version: str
    launcher: str
    shim: str


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """Whose processes are captured."""

    sandbox: str
    init: int
    owner: int  # the id on the node of its root
    socket_path: str
    generation: int
    freezer: str
    freeze: Callable[[bool], Awaitable[None]]
    pids: Callable[[], tuple[int, ...]]  # of all its processes (blocking)


class Capture:
    """One dump of one sandbox into ``place``, a directory that is made anew."""

    def __init__(self, programs: Tools, place: str, subject: Subject) -> None:
        self.programs, self.place, self.subject = programs, place, subject
        self.sandbox, self.init = subject.sandbox, subject.init
        self._listener = 0
        self._image: criu.Image
        self.size = 0  # bytes on disk, once it is there

    async def prepare(self) -> None:
        """While it runs and nobody calls it. Raises `Undone`."""
        await tools.in_thread(self._prepare)

    async def dump(self) -> None:
        """While it stands still; it does so again afterwards. Raises `Unsupported` for what these processes hold, and `Undone`."""
        await self._between_forks()
        image = await tools.in_thread(self._look)
        programs, subject = self.programs, self.subject
        argv = criu.dump_command(programs.criu, self.init, self.place, subject.freezer, image.upper, image.outside)
        argv = [programs.launcher, "owner", str(subject.owner), str(self.init), str(os.getpid()), *argv]
        try:
            async with asyncio.timeout(criu.TIMEOUT):
                await tools.run(argv, env={"LD_PRELOAD": programs.shim})
        except TimeoutError as error:
            raise Undone(f"criu did not end within {criu.TIMEOUT:.0f} s", sandbox=self.sandbox, reason="snapshot") from error
        except NodeError as error:
            raise await tools.in_thread(self._refusal) from error
        self._image = image

    async def keep(self) -> None:
        """Once it may run again: what was written is there after a power cut too."""
        self.size = await tools.in_thread(self._keep, self._image)

    async def _between_forks(self) -> None:
        """A process in vfork waits for its child, and the child cannot go on while it is dumped: let them, and try again."""
        for attempt in range(TRIES):
            if not await tools.in_thread(self._forking):
                return
            await self.subject.freeze(False)
            await asyncio.sleep(0.001 * attempt)
            await self.subject.freeze(True)
        text = "its processes cannot be kept: one runs in the memory of another"
        raise Unsupported(text, sandbox=self.sandbox, reason="snapshot", fix="end what has called vfork or clone(CLONE_VM)")

    async def discard(self) -> None:
        await tools.in_thread(_discard, self.place)

    # ------------------------------------------------------------------ in threads
    def _prepare(self) -> None:
        if in_namespace_of(self.init, "ipc", syscalls.CLONE_NEWIPC, _objects):
            text = "its processes cannot be kept: it has System V shared memory, semaphores or message queues"
            raise Unsupported(text, sandbox=self.sandbox, reason="snapshot", fix="remove them (ipcrm)")
        self._check_each()  # before it stands still, when all of them show whether they are stopped
        _discard(self.place)  # of an Edge that died in the middle
        os.makedirs(self.place, mode=0o700)
        try:
            self._listener = move_house(self.init, self.subject.socket_path, self.subject.generation)
        except (OSError, wire.WireError) as error:
            raise Undone(f"its agent does not take another socket: {error}", sandbox=self.sandbox, reason="snapshot") from error

    def _forking(self) -> bool:
        pids = self.subject.pids()
        for pid in pids:
            with contextlib.suppress(OSError):
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                if parent in pids and syscalls.same_memory(pid, parent):
                    return True
        return False

    def _check_each(self) -> None:
        for pid in self.subject.pids():
            if refused := criu.untraceable(_told(pid, "status"), _told(pid, "wchan")):
                why, fix = refused
                raise Unsupported(f"its processes cannot be kept: {why}", sandbox=self.sandbox, reason="snapshot", fix=fix)

    def _look(self) -> criu.Image:
        for table in ("tcp", "tcp6"):
            path = Path(f"/proc/{self.init}/net/{table}")
            if path.exists() and criu.far_connections(path.read_text()):
                text = "its processes cannot be kept: one holds an open TCP connection that leaves the sandbox"
                raise Unsupported(text, sandbox=self.sandbox, reason="snapshot", fix="close it")
        self._check_each()
        upper = os.stat(f"/proc/{self.init}/fd/{criu.UPPER_FD}")
        about = Path(f"/proc/{self.init}/fdinfo/{criu.UPPER_FD}").read_text().split()
        name = f"file[{int(about[about.index('mnt_id:') + 1]):x}:{upper.st_ino:x}]"
        outside = {}
        for place, root in criu.outside_mounts(Path(f"/proc/{self.init}/mountinfo").read_text()):
            outside[place] = self._kind(place, os.path.basename(root))
        return criu.Image(listener=self._listener, upper=name, outside=outside, version=self.programs.version)

    def _kind(self, place: str, name: str) -> str:
        if name in DEVICES and place == f"/dev/{name}":
            return criu.NODE
        if place.startswith("/proc/"):
            return criu.NOTHING if name == "null" else criu.EMPTY
        raise Unsupported(f"it has a mount at {place} that a restored sandbox cannot have", sandbox=self.sandbox, reason="snapshot")

    def _refusal(self) -> DsecError:
        log = Path(self.place, criu.DUMP_LOG)
        why, fix = criu.explain(log.read_text(errors="replace") if log.exists() else "")
        kind = Unsupported if fix else Undone
        return kind(f"its processes cannot be kept: {why}", sandbox=self.sandbox, reason="snapshot", fix=fix)

    def _keep(self, image: criu.Image) -> int:
        total, sizes = 0, {}
        for path in sorted(Path(self.place).glob("*.img")):
            with _synced(path, os.O_RDONLY) as fd:
                os.fchown(fd, 0, 0)
                os.fchmod(fd, 0o444)  # nobody reaches them here; the root of what is restored opens them, whatever its id
                total += os.fstat(fd).st_blocks * 512
                sizes[path.name] = os.fstat(fd).st_size
        record = Path(self.place, criu.RECORD)
        record.write_bytes(msgspec.json.encode(msgspec.structs.replace(image, sizes=sizes)))
        for path, flags in ((record, os.O_RDONLY), (record.parent, os.O_DIRECTORY), (record.parent.parent, os.O_DIRECTORY)):
            with _synced(path, flags):
                pass
        return total


@contextlib.contextmanager
def _synced(path: Path, flags: int) -> Iterator[int]:
    """A descriptor of it, and then it is on the disk."""
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield fd
        os.fsync(fd)
    finally:
        os.close(fd)


def _told(pid: int, what: str) -> str:
    """A file of /proc; "" of one that has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{what}").read_text(errors="replace")
    return ""


def _discard(place: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        trees.remove(place)


def in_namespace_of(pid: int, name: str, kind: int, work: Callable[[], T]) -> T:
    """What ``work`` answers in a namespace of ``pid``; in a thread that ends, so that no other work of ours is ever in there."""
    made: list[T] = []
    failed: list[BaseException] = []

    def inside() -> None:
        try:
            fd = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                syscalls.setns(fd, kind)
            finally:
                os.close(fd)
            made.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again by who waits
            failed.append(error)

    thread = threading.Thread(target=inside, name=f"dsec-{name}")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


def _objects() -> bool:
    """Whether this namespace has any object of System V; each table begins with a line of titles."""
    return any(len(Path(f"/proc/sysvipc/{kind}").read_text().splitlines()) > 1 for kind in ("shm", "sem", "msg"))


def _next(path: str) -> str:
    """Where the socket that replaces the one at ``path`` is bound at first: a name of the same length, which the kernel limits."""
    return f"{os.path.dirname(path)}/{os.path.basename(path).upper()}"


def _former(path: str) -> str:
    return f"{path}.former"


def forget_sockets(path: str) -> None:
    """Take the agent's socket away."""
    for each in (path, _next(path), _former(path)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(each)


def move_house(init: int, path: str, generation: int) -> int:
    """The agent listens at a new socket under the same path, made in the sandbox's own network namespace, and has no connection any more.
    The socket's inode. Raises `OSError`."""
    fresh = _next(path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(fresh)

    def listen() -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            made.bind(fresh)
            os.chmod(fresh, 0o600)
            made.listen(64)
        except BaseException:
            made.close()
            raise
        return made

    try:
        with (
            in_namespace_of(init, "net", syscalls.CLONE_NEWNET, listen) as listener,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as call,
        ):
            call.settimeout(PATIENCE)
            call.connect(path)
            call.sendall(wire.frame(wire.Type.HELLO, 0, wire.hello(generation)))
            _expect(call, wire.Type.HELLO)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [listener.fileno()]))]
            former = _former(path)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(former)
            os.link(path, former)
            os.rename(fresh, path)  # first: an agent that is slow to take it does so later, and who calls meanwhile waits in its queue
            try:
                call.sendmsg([wire.frame(wire.Type.LISTEN, 1, b"")], rights)
                _expect(call, wire.Type.OK)
            except TimeoutError:
                raise
            except OSError:  # it will not
                os.rename(former, path)
                raise
            os.unlink(former)
            if call.recv(1):
                raise OSError("it goes on talking")
            return os.fstat(listener.fileno()).st_ino
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)
        raise


def _expect(call: socket.socket, wanted: int) -> None:
    head = _read(call, wire.HEADER.size)
    length, kind, _ = wire.header(head)
    body = _read(call, min(length, wire.MAX_FRAME))
    if kind != wanted:
        said = wire.decode(kind, body)
        raise OSError(said.message if isinstance(said, wire.Error) else f"it answered with frame {kind}")


def _read(call: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = call.recv(size - len(data))
        if not part:
            raise OSError("it closed the connection")
        data += part
    return data
