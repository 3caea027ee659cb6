"""The node's resolver for open sandboxes: a forwarder in a process of its own.

It listens on the gateway's address, which only sandboxes reach, and forwards whatever is asked to the node's own resolvers: those of
/etc/resolv.conf (looked at again when the file changes), reached from the node and not from inside, or those that are configured. A flood
of queries costs this process its time and nobody else's: not the Edge's, and each sandbox has a bound of its own.

    python -m dsec.security.resolver --listen ADDRESS --net NETWORK --control SOCKET --links PREFIX [--upstream ADDRESS[@PORT]]…

It outlives its Edge as the holder does, so that sandboxes resolve names while an Edge restarts: it ends when an Edge says so, or when no
Edge has been connected for a while and no interface begins with PREFIX. One line on the control socket is one request (`hello`, `quit`).
Rules by name will be a `Gate`: it sees each question before any upstream does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable
from ipaddress import ip_address, ip_network
from typing import cast

import aiofiles
import uvloop

from dsec import syscalls
from dsec.security import dns

RESOLV_CONF = "/etc/resolv.conf"
PORT = 53
LOOPBACK = ("127.0.0.1", PORT)
NOBODY = 65_534
IN_FLIGHT, IN_FLIGHT_EACH = 2_048, 128  # queries, and of one sandbox
CONNECTIONS, CONNECTIONS_EACH = 256, 16  # TCP
TRY_TIMEOUT = 2.0  # seconds an upstream has
TRIES = 3
IDLE = 10.0  # of a TCP connection
LOOK = 1.0  # seconds between two looks at resolv.conf and at what is left to serve

Upstream = tuple[str, int]
Gate = Callable[[str, dns.Question], bool]


def every_name(_source: str, _question: dns.Question) -> bool:
    """The gate of ``network="open"``."""
    return True


class Upstreams:
    """Where queries go: the configured servers, or those of resolv.conf as it is now."""

    def __init__(self, configured: list[str], listen: str, path: str = RESOLV_CONF) -> None:
        self._fixed = [parse_upstream(text) for text in configured]
        self._listen = listen
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._servers: list[Upstream] = self._fixed or [LOOPBACK]

    async def look(self) -> None:
        """Reads resolv.conf where it has changed; at first it has."""
        if self._fixed:
            return
        try:
            stat = os.stat(self._path)
            if (now := (stat.st_mtime_ns, stat.st_ino)) == self._seen:
                return
            self._seen = now
            async with aiofiles.open(self._path, errors="replace") as file:
                names = dns.nameservers(await file.read())
        except OSError:
            names = []
        # glibc asks this machine where the file names nobody.
        self._servers = [(name, PORT) for name in names if name != self._listen] or [LOOPBACK]

    def order(self) -> list[Upstream]:
        """The servers to try, first to last."""
        return list(itertools.islice(itertools.cycle(self._servers), TRIES))


def parse_upstream(text: str) -> Upstream:
    """``ADDRESS`` or ``ADDRESS@PORT``. Raises `ValueError`."""
    host, _, port = text.partition("@")
    ip_address(host.partition("%")[0])
    return host, int(port or PORT)


class _Ask(asyncio.DatagramProtocol):
    """One query on a socket of its own: its port is unpredictable, and only its upstream can answer."""

    def __init__(self, query: bytes, asked: dns.Question) -> None:
        self.query, self.asked = query, asked
        self.reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.DatagramTransport", transport).sendto(self.query)

    def datagram_received(self, data: bytes, _addr: object) -> None:
        if not self.reply.done() and dns.answers(data, self.query, self.asked):
            self.reply.set_result(data)

    def error_received(self, exc: Exception) -> None:
        if not self.reply.done():
            self.reply.set_exception(exc)


class Resolver(asyncio.DatagramProtocol):
    """Serves UDP itself (it is the protocol of the listening socket) and TCP by `serve`."""

    def __init__(self, upstreams: Upstreams, net: str, gate: Gate = every_name) -> None:
        self.upstreams, self.gate = upstreams, gate
        self.net = ip_network(net)
        self.counts: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._busy: Counter[str] = Counter()
        self._connected: Counter[str] = Counter()
        self._transport: asyncio.DatagramTransport
        self._random = random.SystemRandom()

    # --- UDP -------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        source = addr[0]
        if ip_address(source) not in self.net:
            self.counts["foreign"] += 1
        elif len(self._tasks) >= IN_FLIGHT or self._busy[source] >= IN_FLIGHT_EACH:
            self.counts["dropped"] += 1  # it asks again: that is DNS's own back-pressure
        else:
            self._busy[source] += 1
            task = asyncio.get_running_loop().create_task(self._udp(data, addr))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _udp(self, data: bytes, addr: tuple[str, int]) -> None:
        try:
            reply = await self.answer(data, addr[0], self._over_udp)
            if reply is not None:
                self._transport.sendto(reply, addr)
        finally:
            self._less(self._busy, addr[0])

    async def answer(self, query: bytes, source: str, ask: Callable[[Upstream, bytes, dns.Question], object]) -> bytes | None:
        """The reply to one query: an upstream's, under the query's own id, or a refusal; None for what is no query."""
        self.counts["queries"] += 1
        if len(query) < dns.HEADER.size or query[2] & 0x80:
            return None
        asked = dns.question(query)
        if asked is None:
            return dns.refusal(query, dns.FORMERR)
        if not self.gate(source, asked):
            self.counts["refused"] += 1
            return dns.refusal(query, dns.REFUSED, asked)
        for upstream in self.upstreams.order():
            mine = dns.with_id(query, self._random.getrandbits(16))
            try:
                async with asyncio.timeout(TRY_TIMEOUT):
                    reply = await ask(upstream, mine, asked)  # type: ignore[misc]
            except (OSError, TimeoutError, asyncio.IncompleteReadError):
                self.counts["upstream_failed"] += 1
                continue
            return dns.with_id(reply, int.from_bytes(query[:2], "big"))
        return dns.refusal(query, dns.SERVFAIL, asked)

    async def _over_udp(self, upstream: Upstream, query: bytes, asked: dns.Question) -> bytes:
        loop = asyncio.get_running_loop()
        transport, ask = await loop.create_datagram_endpoint(lambda: _Ask(query, asked), remote_addr=upstream)
        try:
            return await ask.reply
        finally:
            ask.reply.cancel()
            transport.close()

    # --- TCP -------------------------------------------------------------------------------------------------------

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client's connection: its queries one after another."""
        source = writer.get_extra_info("peername")[0]
        full = self._connected.total() >= CONNECTIONS or self._connected[source] >= CONNECTIONS_EACH
        if full or ip_address(source) not in self.net:
            self.counts["dropped"] += 1
            writer.close()
            return
        self._connected[source] += 1
        try:
            while True:
                async with asyncio.timeout(IDLE):
                    size = int.from_bytes(await reader.readexactly(2), "big")
                    query = await reader.readexactly(size)
                reply = await self.answer(query, source, self._over_tcp)
                if reply is None:
                    return
                async with asyncio.timeout(IDLE):
                    writer.write(len(reply).to_bytes(2, "big") + reply)
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            return
        finally:
            self._less(self._connected, source)
            writer.close()

    async def _over_tcp(self, upstream: Upstream, query: bytes, asked: dns.Question) -> bytes:
        reader, writer = await asyncio.open_connection(*upstream)
        try:
            writer.write(len(query).to_bytes(2, "big") + query)
            reply = await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))
        finally:
            writer.close()
        if not dns.answers(reply, query, asked):
            raise ConnectionError("the upstream answered something else")
        return reply

    @staticmethod
    def _less(counter: Counter[str], source: str) -> None:
        counter[source] -= 1
        if counter[source] <= 0:
            del counter[source]


class Control:
    """The Edge's connections: while there is one, or an interface to serve, the resolver stays."""

    def __init__(self, resolver: Resolver, about: dict[str, object]) -> None:
        self.resolver, self.about = resolver, about
        self.edges = 0
        self.over = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.edges += 1
        try:
            while line := await reader.readline():
                if line.strip() == b"quit":
                    self.over.set()
                writer.write(json.dumps({**self.about, "pid": os.getpid(), "counts": dict(self.resolver.counts)}).encode() + b"\n")
                await writer.drain()
        except (OSError, ValueError):
            return
        finally:
            self.edges -= 1
            writer.close()

    async def stay(self, links: str, linger: float) -> None:
        """Until it is told to end or is of no use any more."""
        loop = asyncio.get_running_loop()
        useful = loop.time()
        while not self.over.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.over.wait(), LOOK)
            await self.resolver.upstreams.look()
            if self.edges or any(name.startswith(links) for _, name in socket.if_nameindex()):
                useful = loop.time()
            elif loop.time() - useful > linger:
                return


async def run(options: argparse.Namespace) -> None:
    """Binds, says so by one line on standard output, and serves."""
    loop = asyncio.get_running_loop()
    resolver = Resolver(Upstreams(options.upstream, options.listen), options.net)
    await loop.create_datagram_endpoint(lambda: resolver, local_addr=(options.listen, options.port))
    server = await asyncio.start_server(resolver.serve, options.listen, options.port, backlog=128)
    about = {"listen": options.listen, "net": options.net, "upstream": options.upstream, "loop": type(loop).__module__.partition(".")[0]}
    control = Control(resolver, about)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(options.control)
    mask = os.umask(0o177)
    try:
        door = await asyncio.start_unix_server(control.serve, options.control, limit=4096)
    finally:
        os.umask(mask)
    _drop_root()
    await resolver.upstreams.look()  # only now: the thread that reads has nobody's rights as well
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(signum, lambda: None)  # what ends an Edge must not end its sandboxes' resolver
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.close(null)
    try:
        await control.stay(options.links, options.linger)
    finally:
        door.close()
        server.close()


def _drop_root() -> None:
    """Everything is bound: what is read from sandboxes is read by nobody."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def main() -> None:
    parser = argparse.ArgumentParser(prog="dsec.security.resolver")
    parser.add_argument("--listen", required=True)
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--net", required=True)
    parser.add_argument("--control", required=True)
    parser.add_argument("--links", required=True, help="names of the interfaces that it serves begin with this")
    parser.add_argument("--linger", type=float, default=30.0)
    parser.add_argument("--upstream", action="append", default=[])
    syscalls.set_no_new_privs()  # before the loop has threads: they inherit it, and keep what they have when it comes later
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
