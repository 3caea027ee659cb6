"""Bulk data under credit, and the rates that the bus is expected to reach."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time

import pytest
import uvloop

from dsec.bus import CHUNK, Context, Msg, ReceiveWindow, Route, SendWindow, Verb, codec, subjects
from dsec.bus.messages import CreditRequest, Empty, LeaseAck, OutputChunk
from dsec.bus.server import NatsServer
from tests.fixtures_bus import Opener

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy")


@pytest.fixture(scope="module")
def event_loop_policy() -> uvloop.EventLoopPolicy:
    """Actors run on uvloop, so these tests do; the contract suite runs on asyncio's own loop."""
    return uvloop.EventLoopPolicy()


async def test_64_mib_go_through_credit_whole(nats_server: NatsServer, open_bus: Opener) -> None:
    """64 MiB in chunks arrive whole and in order; the writer never sends past its credit, although a grant is lost."""
    writer, reader = await open_bus(bulk=True), await open_bus(bulk=True)
    block = os.urandom(1 << 20)
    total = 64 << 20
    expected, received = hashlib.blake2b(), hashlib.blake2b()
    for _ in range(total // len(block)):
        expected.update(block)
    send, take = SendWindow(), ReceiveWindow()
    opened, done = asyncio.Event(), asyncio.Event()
    grants = 0

    def on_credit(message: CreditRequest, msg: Msg) -> None:
        nonlocal grants
        grants += 1
        if grants != 5 and send.grant(message.credit):
            opened.set()

    def on_chunk(msg: Msg) -> None:
        chunk = codec.decode(msg.data, OutputChunk)
        fresh = take.accept(chunk.offset, len(chunk.data))
        if fresh is not None:
            received.update(memoryview(chunk.data)[fresh])
            take.consume(len(chunk.data))
        grant()
        if take.received == total:
            done.set()

    def grant() -> None:
        limit = take.due(asyncio.get_running_loop().time())
        if limit is not None:
            reader.post("t.credit", CreditRequest(op="o", reader="r", credit=limit))

    async def regrant() -> None:
        while not done.is_set():
            grant()
            await asyncio.sleep(0.05)

    await writer.subscribe("t.credit", CreditRequest, on_credit)
    await reader.subscribe_raw("t.out", on_chunk)
    await reader.flush()
    await writer.flush()
    background = asyncio.create_task(regrant())
    started = time.perf_counter()
    async with asyncio.timeout(60):
        while send.sent < total:
            offset = send.sent
            size = send.take(min(CHUNK, total - offset, len(block) - offset % len(block)))
            if not size:
                opened.clear()
                if not send.room:
                    await opened.wait()
                continue
            at = offset % len(block)
            await writer.publish("t.out", OutputChunk(reader="r", offset=offset, data=block[at : at + size]))
            assert send.sent <= send.limit
        await done.wait()
    await background
    print(f"\n{total / (1 << 20) / (time.perf_counter() - started):.0f} MiB/s under credit")
    assert received.digest() == expected.digest()


async def test_requests_are_pipelined(nats_server: NatsServer, open_bus: Opener) -> None:
    """Many calls in flight share the connection: thousands a second even on a busy machine."""
    served, client = await open_bus(), await open_bus()

    async def handler(context: Context, request: Empty) -> LeaseAck:
        return LeaseAck(seq=1)

    verb = Verb(name="v", request=Empty, handler=handler)
    await served.serve("e", Route(subject=subjects.edge_all("main", "n1"), verbs=(verb,), verb_of=subjects.edge_verb))

    async def worker() -> None:
        for _ in range(40):
            await client.call(subjects.edge("main", "n1", "v"), Empty(), LeaseAck, timeout=10)

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(128)))
    rate = 40 * 128 / (time.perf_counter() - started)
    print(f"\n{rate:.0f} calls/s")
    assert rate > 2000
