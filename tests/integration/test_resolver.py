"""The resolver of open sandboxes over real sockets on loopback: what it forwards, what it bounds, what it never asks."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dsec.security import dns, resolver
from dsec.security.resolver import Resolver, Upstreams, parse_upstream

ANSWER = b"\xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x05\x00\x04\xc0\x00\x02\x01"


def query(name: str = "a.example", number: int = 0x1234) -> bytes:
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    return dns.HEADER.pack(number, dns.RD, 1, 0, 0, 0) + labels + b"\0\0\1\0\1"


def reply(asked: bytes) -> bytes:
    return asked[:2] + struct.pack(">HHHHH", 0x8180, 1, 1, 0, 0) + asked[12:] + ANSWER


class Upstream(asyncio.DatagramProtocol):
    """Answers over UDP and TCP, unless it is told to keep silent or to lie first."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.silent = False
        self.lies = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.asked.append(data)
        if self.lies:
            self.transport.sendto(reply(dns.with_id(data, 0)), addr)
            self.transport.sendto(reply(data[:2] + query("b.example")[2:]), addr)
        if not self.silent:
            self.transport.sendto(reply(data), addr)

    async def tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))
        self.asked.append(data)
        answer = reply(data) + bytes(3000)
        writer.write(len(answer).to_bytes(2, "big") + answer)
        writer.close()


class Served:
    def __init__(self, port: int, upstream: Upstream, made: Resolver) -> None:
        self.port, self.upstream, self.resolver = port, upstream, made

    async def ask(self, data: bytes, timeout: float = 3.0) -> bytes:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.connect(("127.0.0.1", self.port))
            sock.send(data)
            return await asyncio.wait_for(loop.sock_recv(sock, 65_535), timeout)


async def both(protocol: Any, serve: Any) -> tuple[Any, Any, asyncio.Server]:
    """Listens over UDP and TCP on one port that is free for both."""
    while True:
        transport, made = await asyncio.get_running_loop().create_datagram_endpoint(protocol, local_addr=("127.0.0.1", 0))
        try:
            return transport, made, await asyncio.start_server(serve(made), "127.0.0.1", transport.get_extra_info("sockname")[1])
        except OSError:  # another program has it
            transport.close()


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    transport, upstream, tcp = await both(Upstream, lambda made: made.tcp)
    where = transport.get_extra_info("sockname")[1]
    made = Resolver(Upstreams([f"127.0.0.1@{where}"], "127.0.0.1"), "127.0.0.0/8")
    listening, _, server = await both(lambda: made, lambda made: made.serve)
    port = listening.get_extra_info("sockname")[1]
    yield Served(port, upstream, made)
    for each in (transport, listening, tcp, server):
        each.close()


async def test_forwards_under_an_id_of_its_own(served: Served) -> None:
    """The answer has the client's id; the upstream saw another one, on a socket of that query's own."""
    for _ in range(8):
        assert await served.ask(query()) == reply(query())
    ids = {asked[:2] for asked in served.upstream.asked}
    assert len(ids) > 4, "ids are not to be guessed"


async def test_false_answers_are_not_taken(served: Served) -> None:
    """A reply with another id or another question is passed over, and the true one that follows is given."""
    served.upstream.lies = True
    assert await served.ask(query()) == reply(query())


async def test_a_silent_upstream_is_servfail(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tries spent, the client is told so, and does not wait for nothing."""
    monkeypatch.setattr(resolver, "TRY_TIMEOUT", 0.05)
    served.upstream.silent = True
    answer = await served.ask(query())
    assert answer[3] & 15 == dns.SERVFAIL
    assert len(served.upstream.asked) == resolver.TRIES


async def test_the_gate_is_asked_before_any_upstream(served: Served) -> None:
    """A name that the gate does not let through is refused, and no upstream ever hears of it."""
    served.resolver.gate = lambda _source, asked: asked.name == "good.example"
    assert (await served.ask(query("bad.example")))[3] & 15 == dns.REFUSED
    assert served.upstream.asked == []
    assert await served.ask(query("good.example")) == reply(query("good.example"))


async def test_queries_in_flight_are_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """One client's flood fills its own bound and is dropped beyond it; when it ebbs the client is served again."""
    monkeypatch.setattr(resolver, "TRY_TIMEOUT", 0.2)
    monkeypatch.setattr(resolver, "IN_FLIGHT_EACH", 5)
    served.upstream.silent = True
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("127.0.0.1", served.port))
        for number in range(50):
            sock.send(query(number=number))
        await asyncio.sleep(0.1)
    assert served.resolver.counts["dropped"] == 45
    served.upstream.silent = False
    await asyncio.sleep(0.7)
    assert await served.ask(query()) == reply(query())


async def test_strangers_and_rubbish_get_nothing_or_formerr(served: Served) -> None:
    """Who is outside the network gets no answer, a reply is not answered, a broken query gets FORMERR."""
    assert (await served.ask(query()[:20]))[3] & 15 == dns.FORMERR
    with pytest.raises(TimeoutError):
        await served.ask(reply(query()), 0.2)
    served.resolver.net = ip_network("192.0.2.0/24")
    with pytest.raises(TimeoutError):
        await served.ask(query(), 0.2)


async def test_tcp_carries_what_is_large(served: Served) -> None:
    """Several queries on one connection, each forwarded over TCP and answered whole."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    for number in (1, 2, 3):
        data = query(number=number)
        writer.write(len(data).to_bytes(2, "big") + data)
        answer = await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))
        assert answer == reply(data) + bytes(3000)
    writer.close()


async def test_upstreams_follow_resolv_conf_and_never_ask_themselves(tmp_path: Path) -> None:
    """A changed file is read again; the resolver's own address is left out; without a server the node itself is asked."""
    path = tmp_path / "resolv.conf"
    path.write_text("nameserver 192.0.2.1\nnameserver 10.208.0.1\n")
    made = Upstreams([], "10.208.0.1", str(path))
    await made.look()
    assert set(made.order()) == {("192.0.2.1", 53)}
    (tmp_path / "new").write_text("nameserver 192.0.2.2\nnameserver 192.0.2.3\n")
    (tmp_path / "new").rename(path)
    await made.look()
    assert made.order() == [("192.0.2.2", 53), ("192.0.2.3", 53), ("192.0.2.2", 53)]
    path.unlink()
    await made.look()
    assert set(made.order()) == {("127.0.0.1", 53)}
    assert parse_upstream("192.0.2.1@5353") == ("192.0.2.1", 5353)
    with pytest.raises(ValueError, match="not-an-address"):
        parse_upstream("not-an-address")
