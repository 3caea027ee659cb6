"""The Edge's side of the holder: starts it, talks to it, hears of deaths."""

from __future__ import annotations

import array
import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiofiles
import msgspec

from dsec.backends.holder_parts import PROTO, PROTO_MIN
from dsec.errors import Conflict, DsecError, NodeError, Unavailable
from dsec.layers.mounts import LayerMount

START_TIMEOUT = 20.0
ANOTHER_SERVES = 3  # the exit code of a holder that found the socket served
MAX_MESSAGE = 128 * 1024
_POLL = 0.01


class HolderClient:
    """One connection. ``on_exit(ulid, status)`` is called for each sandbox that ends, ``on_lost()`` when the holder is gone,
    ``on_layer(news)`` for what becomes of layers that are loaded on demand."""

    def __init__(
        self,
        path: str,
        *,
        on_exit: Callable[[str, dict[str, Any]], None],
        on_lost: Callable[[], None],
        on_layer: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.path = path
        self.kits: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {}  # of layers loaded on demand: kept while the holder may die
        self._on_layer = on_layer
        self._on_exit = on_exit
        self._on_lost = on_lost
        self._sock: socket.socket | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._outbox: list[tuple[bytes, tuple[int, ...]]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def connected(self) -> bool:
        return self._sock is not None

    async def connect(self) -> bool:
        """True when a holder serves the socket."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            sock.connect(self.path)
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
            sock.close()
            return False
        except OSError as error:
            sock.close()
            raise NodeError(f"holder at {self.path}: {error}", reason="holder") from error
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self._readable)
        return True

    async def start(self, *, guest: str, launcher: str, log: str, keep: Sequence[str] = (), linger: float = 30.0) -> None:
        """Connect to the holder, after starting one where none serves. It gets a session of its own and outlives this process."""
        if await self.connect():
            return
        argv = [sys.executable, "-m", "dsec.backends.holder", "--socket", self.path, "--guest", guest, "--launcher", launcher]
        argv += [f"--linger={linger}", *(f"--keep={path}" for path in keep)]
        code = await asyncio.to_thread(_spawn, argv, log)
        if code not in (0, ANOTHER_SERVES):
            text = await _tail(log)
            raise NodeError(f"the holder ended with {code}: {text}", reason="holder")
        end = asyncio.get_running_loop().time() + START_TIMEOUT
        while not await self.connect():
            if asyncio.get_running_loop().time() > end:
                raise NodeError(f"the holder did not serve within {START_TIMEOUT} s", reason="holder")
            await asyncio.sleep(_POLL)

    async def hello(self) -> dict[str, Any]:
        """What the holder says of itself. Raises `Conflict` (reason ``version``) where it and this Edge have no protocol in common."""
        said = await self.request("hello")
        agree(int(said.get("proto", 1)), int(said.get("proto_min", 1)))
        return said

    async def request(self, op: str, fds: Sequence[int] = (), **fields: Any) -> dict[str, Any]:
        """Ask and wait for the answer. Raises `NodeError` with the holder's words, `Unavailable` when it is gone.

        ``fds`` must stay open until this returns.
        """
        if self._sock is None or self._loop is None:
            raise Unavailable("the holder is not there", reason="holder")
        number = next(self._numbers)
        future: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._waiting[number] = future
        try:
            self._send(msgspec.json.encode({"id": number, "op": op, **fields}), tuple(fds))
            answer = await future
        finally:
            self._waiting.pop(number, None)
        if "error" in answer:
            raise NodeError(str(answer["error"]), reason="holder")
        ok: dict[str, Any] = answer["ok"]
        return ok

    async def listing(self) -> dict[str, Any]:
        """Every sandbox that the holder knows: pid of its init (0 while it is launched), or a dict that says how it ended."""
        found: dict[str, Any] = {}
        after = ""
        while page := (await self.request("list", after=after))["page"]:
            found |= page
            after = max(page)
        return found

    def drop_kit(self, name: str) -> None:
        """Let go of what keeps a layer's readers waiting instead of reading zeros: it is whole, or mounted nowhere."""
        for fd in self.kits.pop(name, ({}, ()))[1]:
            os.close(fd)

    def settle_kit(self, name: str) -> None:
        """The layer is whole: of a FUSE kit the file is not to be mounted any more, so that its end is seen (`dsec.layers.fuse`)."""
        if name in self.kits:
            spec, fds = self.kits[name]
            for fd in fds[3:]:
                os.close(fd)
            self.kits[name] = (spec, fds[:3])

    async def serves(self, digest: str, plan: Callable[[str], Awaitable[LayerMount]]) -> bool:
        """False when the layer is partly filled here and nobody holds its mark: whoever stands on it may have read zeros for data."""
        try:
            mount = await plan(digest)
        except DsecError:  # it is not in the store any more, or cannot be completed now: then it says nothing of what was mounted
            return True
        if not mount.devices:
            return True
        return bool((await self.request("serves", key=digest, mount=msgspec.to_builtins(mount)))["served"])

    async def restore_kits(self) -> None:
        """Give a new holder the kits of the one before it."""
        for spec, fds in list(self.kits.values()):
            await self.request("restore", fds=fds, spec=spec)

    def close(self) -> None:
        """Let go; the holder stays. Kits stay too, for the next one."""
        if self._sock is not None and self._loop is not None:
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self._sock.close()
            self._sock = None
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(Unavailable("the holder is gone", reason="holder"))

    def _send(self, data: bytes, fds: tuple[int, ...]) -> None:
        if self._outbox or not self._try_send(data, fds):
            # The kernel's queue is full: the copies keep the descriptors alive until it is this message's turn.
            self._outbox.append((data, tuple(os.dup(fd) for fd in fds)))
            if self._sock is not None and self._loop is not None:
                self._loop.add_writer(self._sock.fileno(), self._writable)

    def _try_send(self, data: bytes, fds: tuple[int, ...]) -> bool:
        if self._sock is None:
            raise Unavailable("the holder is gone", reason="holder")
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._sock.sendmsg([data], rights)
        except BlockingIOError:
            return False
        except OSError as error:
            raise Unavailable(f"the holder is gone: {error}", reason="holder") from error
        return True

    def _writable(self) -> None:
        try:
            while self._outbox and self._try_send(*self._outbox[0]):
                for fd in self._outbox.pop(0)[1]:
                    os.close(fd)
        except Unavailable:
            self._lost()
            return
        if not self._outbox and self._sock is not None and self._loop is not None:
            self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        for _ in range(64):  # then let others run
            if self._sock is None:
                return
            try:
                data, ancillary, _, _ = self._sock.recvmsg(MAX_MESSAGE, socket.CMSG_SPACE(16), socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                data, ancillary = b"", []
            fds = array.array("i")
            for _, _, payload in ancillary:
                fds.frombytes(payload[: len(payload) - len(payload) % 4])
            if not data:
                self._lost()
                return
            message = msgspec.json.decode(data)
            if message.get("event") == "exit":
                self._on_exit(message["ulid"], message["exit"])
            elif message.get("event") == "kit":
                self.drop_kit(message["spec"]["name"])
                self.kits[message["spec"]["name"]] = (message["spec"], tuple(fds))
            elif message.get("event") == "layer":
                if message["what"] == "whole":
                    self.settle_kit(message["name"])
                if message["what"] == "released":
                    self.drop_kit(message["name"])
                elif self._on_layer is not None:
                    self._on_layer(message)
            elif (future := self._waiting.get(message.get("id"))) is not None and not future.done():
                future.set_result(message)

    def _lost(self) -> None:
        self.close()
        for _, fds in self._outbox:
            for fd in fds:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._outbox.clear()
        self._on_lost()


def agree(proto: int, proto_min: int) -> int:
    """The protocol to speak with a holder that speaks ``proto_min`` to ``proto``; raises as `HolderClient.hello`."""
    if proto < PROTO_MIN or proto_min > PROTO:
        whose = "an older" if proto < PROTO_MIN else "a newer"
        raise Conflict(
            f"this node's sandboxes are held by {whose} version: protocol {proto_min} to {proto}, this Edge speaks {PROTO_MIN} to {PROTO}",
            field="edge.state_dir",
            reason="version",
            fix="start the Edge of that version, end its sandboxes (`dsec node drain NODE --stop`), and then change versions",
        )
    return min(proto, PROTO)


def _spawn(argv: Sequence[str], log: str) -> int:
    """A process of its own session, with nothing of our environment but what it needs; returns when its child serves."""
    root = str(Path(__file__).resolve().parents[2])
    env = {name: os.environ[name] for name in ("PATH", "DSEC_DISABLE", "LD_LIBRARY_PATH") if name in os.environ}
    env |= {name: value for name, value in os.environ.items() if name.startswith("AWS_")}  # the loader reads from S3
    env["PYTHONPATH"] = root
    with open(log, "ab") as out:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            cwd="/",
            env=env,
            timeout=START_TIMEOUT,
            check=False,
        )
    return done.returncode


async def _tail(path: str) -> str:
    with contextlib.suppress(OSError):
        async with aiofiles.open(path, errors="replace") as file:
            return (await file.read()).strip()[-600:]
    return ""
