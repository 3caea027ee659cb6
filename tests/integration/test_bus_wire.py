"""What travels: NATS's text protocol spoken by hand, msgpack read by another package, the micro protocol asked as `nats` does."""

from __future__ import annotations

import asyncio
import json

import msgpack
import pytest

from dsec import errors
from dsec.bus import Bus, Context, Route, Verb, codec, subjects
from dsec.bus.call import raise_error
from dsec.bus.messages import Empty, LeaseAck, LeaseRenew
from dsec.bus.server import NatsServer
from tests.fixtures_bus import Opener


async def renew(context: Context, request: LeaseRenew) -> LeaseAck:
    if request.end:
        raise errors.NotFound("no such lease", field="lease", value=request.lease)
    return LeaseAck(seq=request.seq, held=len(request.claims))


async def serve(bus: Bus) -> None:
    verb = Verb(name="renew", request=LeaseRenew, reply=LeaseAck, handler=renew)
    await bus.serve(
        "dsec-edge",
        Route(subject=subjects.edge_all("main", "n1"), verbs=(verb,), verb_of=subjects.edge_verb),
        description="one node",
        metadata={"edge": "n1"},
    )


class Telnet:
    """A person with a TCP connection and the protocol's page: nothing of ours is used."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, server: NatsServer) -> Telnet:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        assert (await reader.readline()).startswith(b"INFO ")
        writer.write(b'CONNECT {"verbose":false,"headers":true}\r\n')
        return cls(reader, writer)

    async def ask(self, subject: str, payload: bytes) -> tuple[bytes, bytes]:
        """(headers, payload) of the answer."""
        self.writer.write(b"SUB my.inbox 1\r\nPUB %s my.inbox %d\r\n%s\r\n" % (subject.encode(), len(payload), payload))
        line = (await asyncio.wait_for(self.reader.readline(), 5)).split()
        while line[0] not in {b"MSG", b"HMSG"}:
            line = (await asyncio.wait_for(self.reader.readline(), 5)).split()
        head = int(line[-2]) if line[0] == b"HMSG" else 0
        body = (await self.reader.readexactly(int(line[-1]) + 2))[:-2]
        self.writer.write(b"UNSUB 1\r\n")
        return body[:head], body[head:]


async def test_json_over_plain_tcp_is_answered_in_json(nats_server: NatsServer, open_bus: Opener) -> None:
    """A PUB typed into a TCP connection with a JSON payload gets a JSON answer; an error too, with NATS's service headers."""
    await serve(await open_bus())
    person = await Telnet.open(nats_server)
    subject = subjects.edge("main", "n1", "renew")
    headers, answer = await person.ask(subject, b'{"lease": "l", "seq": 3, "claims": ["a"]}')
    assert (headers, json.loads(answer)) == (b"", {"seq": 3, "held": 1})
    headers, answer = await person.ask(subject, b'{"lease": "l", "seq": "three"}')
    assert b"Nats-Service-Error-Code: 400" in headers
    assert json.loads(answer)["field"] == "seq"
    headers, answer = await person.ask(subject, b"")
    assert json.loads(answer)["field"] == "lease"
    headers, answer = await person.ask(subject, b"\xff\xfe not a message")
    assert b"Nats-Service-Error-Code: 400" in headers
    headers, answer = await person.ask(subject, msgpack.packb({"lease": "l", "seq": 4}))
    assert msgpack.unpackb(answer) == {"seq": 4}
    person.writer.close()


async def test_msgpack_is_what_the_msgpack_package_reads(nats_server: NatsServer, open_bus: Opener) -> None:
    """Requests and answers are plain maps: another implementation writes the one and reads the other."""
    await serve(await open_bus())
    client = await open_bus()
    data = msgpack.packb({"lease": "l", "claims": ["a", "b"], "seq": 2**40, "field_of_a_newer_peer": {"x": [1.5, None, b"z"]}})
    msg = await client.transport.request(subjects.edge("main", "n1", "renew"), data, timeout=5)
    assert codec.decode_untyped(msg.data) == {"seq": 2**40, "held": 2}
    assert msgpack.unpackb(msg.data) == {"seq": 2**40, "held": 2}


async def test_it_shows_as_a_nats_micro_service(nats_server: NatsServer, open_bus: Opener) -> None:
    """$SRV.PING, INFO and STATS answer as ADR-32 says, by name and by id, with counts and the last error."""
    await serve(await open_bus())
    client = await open_bus()
    subject = subjects.edge("main", "n1", "renew")
    await client.call(subject, LeaseRenew(lease="l"), LeaseAck, timeout=5)
    with pytest.raises(errors.NotFound):
        await client.call(subject, LeaseRenew(lease="l", end=True), LeaseAck, timeout=5)

    async def srv(what: str) -> dict[str, object]:
        return dict(json.loads((await client.transport.request(f"$SRV.{what}", b"", timeout=5)).data))

    ping = await srv("PING")
    assert (ping["type"], ping["name"], ping["metadata"]) == ("io.nats.micro.v1.ping_response", "dsec-edge", {"edge": "n1"})
    info = await srv("INFO.dsec-edge")
    assert info["endpoints"][0]["metadata"] == {"request": "LeaseRenew", "reply": "LeaseAck"}  # type: ignore[index]
    stats = await srv(f"STATS.dsec-edge.{ping['id']}")
    row = stats["endpoints"][0]  # type: ignore[index]
    assert (row["name"], row["num_requests"], row["num_errors"]) == ("edge-renew", 2, 1)
    assert row["last_error"].startswith("404:no such lease")
    assert row["average_processing_time"] > 0


async def test_a_deadline_that_has_passed_is_not_run(nats_server: NatsServer, open_bus: Opener) -> None:
    """Remaining time travels as milliseconds; nonsense in the header is no deadline."""
    bus, client = await open_bus(), await open_bus()
    seen: list[float | None] = []

    async def note(context: Context, request: Empty) -> Empty:
        seen.append(context.remaining())
        return Empty()

    await bus.serve(
        "e",
        Route(subject=subjects.edge_all("main", "n1"), verbs=(Verb(name="v", request=Empty, handler=note),), verb_of=subjects.edge_verb),
    )
    for text in ("250", "-5", "x", "9" * 40):
        await client.transport.request(subjects.edge("main", "n1", "v"), b"\x80", timeout=5, headers={"Dsec-Deadline-Ms": text})
    assert seen[0] is not None
    assert 0.1 < seen[0] <= 0.25
    assert seen[1:] == [None, None, None]
    late = await client.transport.request(subjects.edge("main", "n1", "v"), b"\x80", timeout=5, headers={"Dsec-Deadline-Ms": "0"})
    with pytest.raises(errors.DeadlineExceeded):
        raise_error(late)
    assert len(seen) == 4
