"""Requests that an Edge took along when it died: the client hears of the next one and asks again at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import libdsec
from dsec.bus import Bus, codec, subjects
from dsec.bus.messages import ClusterView, ExecReply, Heartbeat, ListReply, NodeLoad, PauseReply, Selector
from dsec.bus.server import NatsServer
from dsec.bus.subjects import Caller
from dsec.bus.transport import Msg
from dsec.model import OpStatus, Paused, SandboxId, new_ulid

ME = Caller("local", "default")


@contextlib.asynccontextmanager
async def views(bus: Bus) -> AsyncIterator[list[str]]:
    """A Watcher that tells the incarnation in the list, a few times a second."""
    incarnation = ["u.1"]

    async def tell() -> None:
        while True:
            beat = Heartbeat(edge="n1", incarnation=incarnation[0], n=1, load=NodeLoad())
            bus.post(subjects.view("main"), ClusterView(watcher="w", n=1, nodes=(beat,)))
            await asyncio.sleep(0.05)

    telling = asyncio.create_task(tell())
    try:
        yield incarnation
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


async def test_what_an_edge_took_along_is_asked_again_when_the_next_is_seen(nats_server: NatsServer) -> None:
    """A pause and a command that waits, whose own time-outs are far longer; asked twice each, the second time after the restart."""
    sandbox_id = SandboxId("n1", new_ulid())
    asked: dict[str, list[str]] = {"pause": [], "exec": []}
    async with Bus.connect(nats_server.url) as bus, libdsec.connect(nats_server.url) as client, views(bus) as incarnation:

        def edge(msg: Msg) -> None:
            verb = msg.subject.split(".")[4]
            asked[verb].append(incarnation[0])
            if incarnation[0] == "u.2":
                reply = (
                    PauseReply(paused=Paused(released=1))
                    if verb == "pause"
                    else ExecReply(status=OpStatus(op="o", running=False, exit_code=0))
                )
                bus.transport.post(msg.reply, codec.encode(reply))

        for verb in asked:
            await bus.subscribe_raw(subjects.sandbox(bus.unit, verb, ME, sandbox_id), edge)
        await bus.flush()
        sandbox = libdsec.Sandbox(client, sandbox_id)
        pausing = asyncio.create_task(sandbox.pause())
        running = asyncio.create_task(sandbox._run("o", None))
        while not all(asked.values()):  # noqa: ASYNC110 - it sets no event
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.6)  # the views are heard meanwhile
        incarnation[0] = "u.2"
        async with asyncio.timeout(30):  # the pause alone would wait for 45 s
            assert (await pausing).released == 1
            assert (await running).exit_code == 0
    assert asked["pause"] == ["u.1", "u.2"]


async def test_a_request_that_is_answered_is_asked_once(nats_server: NatsServer) -> None:
    """However many views of the same incarnation come while it lasts."""
    sandbox_id = SandboxId("n1", new_ulid())
    asked: list[str] = []
    async with Bus.connect(nats_server.url) as bus, libdsec.connect(nats_server.url) as client, views(bus):

        def edge(msg: Msg) -> None:
            asked.append(msg.reply)
            asyncio.get_running_loop().call_later(1.0, bus.transport.post, msg.reply, codec.encode(PauseReply(paused=Paused())))

        await bus.subscribe_raw(subjects.sandbox(bus.unit, "pause", ME, sandbox_id), edge)
        await bus.flush()
        await libdsec.Sandbox(client, sandbox_id).pause()
    assert len(asked) == 1


async def test_a_question_to_all_is_put_again(nats_server: NatsServer) -> None:
    """An Edge that was away when a list was asked for is asked again, long before the question's own time is over; who answers twice is
    counted once."""
    asked: list[int] = []
    async with Bus.connect(nats_server.url) as bus, libdsec.connect(nats_server.url) as client, views(bus):

        def edge(msg: Msg) -> None:
            asked.append(len(asked))
            for _ in asked[1:] * 2:
                bus.transport.post(msg.reply, codec.encode(ListReply(edge="n1", sandboxes=())))

        loop = asyncio.get_running_loop()
        began = loop.time()
        listing = asyncio.create_task(client._wire.everyone("list", Selector(), ListReply, timeout=100.0))
        await asyncio.sleep(0.5)  # nobody is there
        await bus.subscribe_raw(subjects.everyone(bus.unit, "list", ME), edge)
        replies, silent = await listing
        assert loop.time() - began < 50
    assert [reply.edge for reply in replies] == ["n1"]
    assert not silent
    assert len(asked) == 2
