"""Hostile and malformed requests to the actors, as anybody on the bus can send them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from dsec.bus import codec, subjects
from dsec.bus.actor import Context, Route, Verb
from dsec.bus.bus import Bus
from dsec.bus.messages import EdgeInfo, Empty
from dsec.bus.server import NatsServer
from dsec.bus.subjects import Caller
from dsec.errors import Busy
from dsec.model import SandboxId, new_ulid
from tests.integration.actors_box import ME, SPEC, Box, but, eventually, serving

REQUEST: dict[str, Any] = {"specs": [SPEC], "items": [{"spec": 0, "first": 0}], "deadline_ms": 5_000}


@pytest_asyncio.fixture
async def box(nats_server: NatsServer) -> AsyncIterator[Box]:
    async with serving(nats_server) as made:
        yield made


async def _create(box: Box, **changes: Any) -> dict[str, Any]:
    bus = await box.bus()
    body = {"burst": new_ulid(), "inbox": bus.new_inbox(), **REQUEST, **changes}
    answer = await bus.transport.request(subjects.api("main", "create", ME), msgspec.msgpack.encode(body), timeout=5.0)
    decoded = codec.decode_untyped(answer.data)
    assert isinstance(decoded, dict)
    return decoded


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("inbox", {"inbox": "dsec.v1.main.edge.n1.drain"}),
        ("inbox", {"inbox": "$JS.API.STREAM.PURGE.DSEC_EVENTS"}),
        ("inbox", {"inbox": "_INBOX.>"}),
        ("inbox", {"inbox": "_INBOX.x 2\r\n{}\r\nPUB y 0\r\n"}),
        ("inbox", {"inbox": ""}),
        ("items[0].first", {"items": [{"spec": 0, "first": 1 << 63}]}),
        ("items.first", {"items": [{"spec": 0, "first": (1 << 31) - 1, "count": 2}]}),
        ("items", {"items": [{"spec": 0, "first": 0, "count": 10**9}]}),
        ("specs[0]", {"specs": [msgspec.structs.replace(SPEC, labels={f"k{n}": "v" * 1000 for n in range(900)})]}),
        ("burst", {"burst": ""}),
        ("burst", {"burst": "b" * 100_000}),
        ("lease.ttl_ms", {"lease": {"id": "l", "ttl_ms": -1}}),
        ("lease.ttl_ms", {"lease": {"id": "l", "ttl_ms": 1 << 63}}),
    ],
)
async def test_a_hostile_create_is_refused_with_its_field(box: Box, field: str, changes: dict[str, Any]) -> None:
    """It is answered at once, and the next create is as good as ever."""
    refused = await _create(box, **changes)
    assert (refused["code"], refused["field"]) == ("invalid", field), refused
    async with box.client() as dsec, dsec.sandbox(SPEC) as sandbox:
        assert (await sandbox.exec("echo here")).stdout == b"here\n"


async def test_large_sandboxes_hide_no_others(box: Box) -> None:
    """The largest that are allowed are listed page by page, and the small ones behind them too."""
    large = but(labels={f"k{n}": "v" * 1000 for n in range(380)})
    async with box.client() as dsec:
        ids = {(await dsec.create(spec)).id for spec in (large, large, SPEC)}
        assert {info.id for info in await dsec.list()} == ids
        await dsec.stop(everything=True)


async def test_no_answer_goes_to_a_subject_of_the_system(box: Box) -> None:
    """A reply subject cannot make an actor ask another one for something: the drain that it names does not happen."""
    bus = await box.bus()
    for subject in (subjects.edge("main", "n1", "info"), subjects.api("main", "create", ME), "$SRV.PING"):
        bus.transport.post(subject, b"", reply=subjects.edge("main", "n1", "drain"))
    await bus.flush()
    await asyncio.sleep(0.2)
    info = await bus.call(subjects.edge("main", "n1", "info"), Empty(), EdgeInfo, timeout=5.0)
    assert not info.heartbeat.draining


async def test_a_reader_from_beyond_is_refused(box: Box) -> None:
    """Offsets and names that no stream can have are refused, and the stream goes on for others."""
    bus = await box.bus()
    async with box.client() as dsec, dsec.sandbox(SPEC) as sandbox, sandbox.start("echo here") as process:
        edge, _, ulid = sandbox.id.rpartition("-")
        subject = subjects.sandbox("main", "output", ME, SandboxId(edge, ulid))
        for field, value in (("stdout", -1), ("stdout", 1 << 63), ("reader", ""), ("reader", "r" * 1000), ("patience_ms", 10**9)):
            body = {"op": process.op, "reader": "r", field: value}
            answer = codec.decode_untyped((await bus.transport.request(subject, msgspec.msgpack.encode(body), timeout=5.0)).data)
            assert isinstance(answer, dict)
            assert (answer["code"], answer["field"]) == ("invalid", field)
        assert b"".join([data async for data in process.stdout]) == b"here\n"


async def test_a_job_that_waits_takes_nobody_elses_place(nats_server: NatsServer) -> None:
    """Requests without an end are refused beyond a job's part, its workers' workers counted with it, and beyond all jobs' part; others are
    served meanwhile, and it is again when some have ended."""
    over = asyncio.Event()

    async def wait(context: Context, _: Empty) -> Empty:
        if subjects.worker_of(context.caller.principal if context.caller else ""):
            await over.wait()
        return Empty()

    def caller(subject: str) -> Caller:
        return Caller(subject.partition(".")[2], "default")

    route = Route(
        subject="waits.*", verbs=(Verb(name="wait", request=Empty, reply=Empty, handler=wait),), verb_of=lambda _: "wait", caller_of=caller
    )
    async with Bus.connect(nats_server.url) as bus:
        service = await bus.serve("waits", route, limit=32)
        asked = [asyncio.ensure_future(bus.call("waits.local~a", Empty(), Empty, timeout=20)) for _ in range(3)]
        asked.append(asyncio.ensure_future(bus.call("waits.local~a~b", Empty(), Empty, timeout=20)))
        await eventually(lambda: len(service.running) == 4)
        for job in ("local~a", "local~a~c"):
            with pytest.raises(Busy, match="of this job"):
                await bus.call(f"waits.{job}", Empty(), Empty, timeout=5)
        for job in ("local~d", "local~e", "local~f"):
            asked += [asyncio.ensure_future(bus.call(f"waits.{job}", Empty(), Empty, timeout=20)) for _ in range(4)]
        await eventually(lambda: len(service.running) == 16)
        with pytest.raises(Busy):
            await bus.call("waits.local~g", Empty(), Empty, timeout=5)
        for _ in range(20):
            await bus.call("waits.local", Empty(), Empty, timeout=5)
        over.set()
        await asyncio.gather(*asked)
        await bus.call("waits.local~a", Empty(), Empty, timeout=5)
        await eventually(lambda: not service.running)
        assert not service._jobs
