"""Output to its reader: credit, the newest reader, a reader that left, an Edge that restarts, and what no bus may lose."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from dsec.actors import pump
from dsec.backends.base import Chunk
from dsec.bus import codec, subjects
from dsec.bus.bus import Bus
from dsec.bus.messages import CreditRequest, Empty, ExecReply, ExecRequest, OutputChunk, OutputRequest
from dsec.bus.server import NatsServer
from dsec.bus.subjects import Caller
from dsec.errors import DsecError, NotFound
from dsec.model import Captured, ExecSpec, OpStatus, SandboxId, new_ulid
from tests.integration.actors_box import ME, Asker, Box, eventually

OP = "0" * 31 + "1"


@pytest_asyncio.fixture
async def box(nats_server: NatsServer) -> AsyncIterator[Box]:
    made = Box(nats_server.url, nats_server.dir.parent)
    yield made
    await made.close()


class Reader:
    """Keeps what is published for one reader, in order."""

    def __init__(self, bus: Bus, sandbox: SandboxId, name: str) -> None:
        self.bus, self.sandbox, self.name = bus, sandbox, name
        self.data = b""
        self.end: OutputChunk | None = None

    async def open(self) -> Reader:
        await self.bus.subscribe(subjects.output("main", self.sandbox, OP, Caller("local", "default")), OutputChunk, self._take)
        await self.bus.flush()
        return self

    def _take(self, chunk: OutputChunk, _msg: object) -> None:
        if chunk.reader != self.name:
            return
        if chunk.end:
            self.end = chunk
        else:
            assert chunk.offset == len(self.data)
            assert len(chunk.data) <= codec.CHUNK
            self.data += chunk.data

    async def ask(self, credit: int, start: int = 0) -> None:
        request = OutputRequest(op=OP, reader=self.name, credit=credit, stdout=start)
        await self.bus.call(subjects.sandbox("main", "output", ME, self.sandbox), request, Empty, timeout=5)

    def credit(self, upto: int, close: bool = False) -> None:
        message = CreditRequest(op=OP, reader=self.name, credit=upto, close=close)
        self.bus.post(subjects.sandbox("main", "credit", ME, self.sandbox), message)


async def _running(box: Box, command: str) -> tuple[Bus, SandboxId]:
    await box.edge()
    await box.watcher()
    await box.scheduler()
    bus = await box.bus()
    asker = await Asker(bus).open()
    await asker.create(1)
    await asker.until(lambda a: len(a.ready) == 1)
    sandbox = SandboxId.parse(asker.ready[0][0])
    spec = ExecSpec(argv=("/bin/sh", "-c", command), stream=True)
    await bus.call(subjects.sandbox("main", "exec", ME, sandbox), ExecRequest(op=OP, spec=spec), ExecReply, timeout=5)
    return bus, sandbox


async def test_no_more_is_sent_than_there_is_credit_for(box: Box) -> None:
    """Absolute credit: what it allows comes, the rest waits, and the last message has the status."""
    bus, sandbox = await _running(box, "echo 0123456789; echo abcdefghij")
    reader = await Reader(bus, sandbox, "r").open()
    await reader.ask(credit=0)
    await asyncio.sleep(0.2)
    assert reader.data == b""
    reader.credit(11)
    await eventually(lambda: len(reader.data) >= 11)
    await asyncio.sleep(0.1)
    assert reader.data == b"0123456789\n"
    reader.credit(1 << 20)
    await eventually(lambda: reader.end is not None)
    assert reader.data == b"0123456789\nabcdefghij\n"
    assert reader.end is not None
    assert reader.end.status is not None
    assert reader.end.status.exit_code == 0


async def test_the_newest_reader_holds_the_stream_and_starts_where_it_likes(box: Box) -> None:
    """The older one looks on beside it; the newer one may begin at an offset."""
    bus, sandbox = await _running(box, "echo 0123456789")
    first, second = await Reader(bus, sandbox, "first").open(), await Reader(bus, sandbox, "second").open()
    await first.ask(credit=0)
    second.data = b"01234"  # as it would have after a reconnection
    await second.ask(credit=1 << 20, start=5)
    await eventually(lambda: second.end is not None)
    assert second.data == b"0123456789\n"
    assert first.data == b""
    first.credit(1 << 20)
    await eventually(lambda: first.end is not None)
    assert first.data == b"0123456789\n"


async def test_a_reader_that_left_lets_go(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """By saying so, or by ten silent seconds (accelerated) while it owes credit."""
    monkeypatch.setattr(pump, "SILENT", 0.3)
    bus, sandbox = await _running(box, "echo hello")
    edge = box.edges["n1"]
    live = edge.sandboxes[sandbox.ulid]
    for leaves_by_word in (True, False):
        reader = await Reader(bus, sandbox, f"r{leaves_by_word}").open()
        await reader.ask(credit=0)
        await eventually(lambda: live.clocks.busy == 1)
        if leaves_by_word:
            reader.credit(0, close=True)
        await eventually(lambda: live.clocks.busy == 0, timeout=2)


async def test_an_unknown_operation_is_told_to_who_asks(box: Box) -> None:
    """Not to the stream."""
    bus, sandbox = await _running(box, "echo hello")
    request = OutputRequest(op="f" * 32, reader="r")
    with pytest.raises(NotFound):
        await bus.call(subjects.sandbox("main", "output", ME, sandbox), request, Empty, timeout=5)


async def test_exec_is_idempotent_by_its_operation(box: Box) -> None:
    """The same op twice runs once and answers the same."""
    bus, sandbox = await _running(box, "echo other")
    subject = subjects.sandbox("main", "exec", ME, sandbox)
    order = ExecRequest(op=f"{2:032x}", spec=ExecSpec(argv=("/bin/sh", "-c", "echo once")), wait_ms=2000)
    replies = [await bus.call(subject, order, ExecReply, timeout=5) for _ in range(2)]
    assert replies[0].status.stdout.data() == replies[1].status.stdout.data() == b"once\n"
    assert len(box.nodes["n1"].guests[sandbox.ulid].ops) == 2


async def test_a_person_may_type_json(box: Box) -> None:
    """JSON in, JSON out: create by hand, exec by hand, an error with its code."""
    await box.edge()
    await box.watcher()
    await box.scheduler()
    bus = await box.bus()
    asker = await Asker(bus).open()
    wanted = {
        "burst": new_ulid(),
        "specs": [{"image": "debian", "backend": "fake", "resources": {"cpus": 0.1, "memory": 64 << 20, "disk": 1 << 20}}],
        "items": [{"spec": 0, "first": 0}],
        "inbox": asker.inbox,
        "deadline_ms": 5000,
    }
    answer = await bus.transport.request(subjects.api("main", "create", ME), json.dumps(wanted).encode(), timeout=5)
    assert json.loads(answer.data)["scheduler"].startswith("scheduler-")
    await asker.until(lambda a: len(a.ready) == 1)
    sandbox = SandboxId.parse(asker.ready[0][0])
    typed = json.dumps({"op": OP, "spec": {"argv": ["echo", "hi"]}, "wait_ms": 1000}).encode()
    answer = await bus.transport.request(subjects.sandbox("main", "exec", ME, sandbox), typed, timeout=5)
    assert json.loads(answer.data)["status"]["exit_code"] == 0
    wanted["specs"] = [{"image": "debian", "resources": {"memory": "lots"}}]
    wanted["burst"] = new_ulid()
    answer = await bus.transport.request(subjects.api("main", "create", ME), json.dumps(wanted).encode(), timeout=5)
    assert json.loads(answer.data)["code"] == "invalid"
    assert json.loads(answer.data)["field"] == "specs[0].resources.memory"


class SlowLink:
    """A guest link with one operation of known output, and nothing else."""

    async def output(self, op: str, offsets: tuple[int, int], view: bool) -> AsyncIterator[Chunk]:
        for at in range(offsets[0], 1_000_000, 300_000):
            yield Chunk(1, at, bytes(min(300_000, 1_000_000 - at)))

    async def wait(self, op: str, timeout: float) -> OpStatus:
        return OpStatus(op=op, running=False, exit_code=0, stdout=Captured(head=b"h" * 600_000, tail=b"t" * 600_000, total=5_000_000))


async def test_what_was_not_acknowledged_is_sent_again(box: Box) -> None:
    """A client that asks again in the name of its former reader gets from its offset what the sandbox has given away already."""
    bus = await box.bus()
    sandbox = SandboxId("n1", new_ulid())
    first, second = await Reader(bus, sandbox, "first").open(), await Reader(bus, sandbox, "second").open()
    subject = subjects.output("main", sandbox, OP, Caller("local", "default"))
    request = OutputRequest(op=OP, reader="first", credit=700_000, acks=True)
    sending = pump.Pump(bus, subject, SlowLink(), request)  # type: ignore[arg-type]
    running = asyncio.ensure_future(sending.run())
    await eventually(lambda: len(first.data) == 700_000)
    sending.credit(700_000, received=262_144)  # two of its pieces have arrived
    assert not sending.restart(OutputRequest(op=OP, reader="third", acks=True))  # they are not kept any more
    second.data = first.data[:300_000]
    assert sending.restart(OutputRequest(op=OP, reader="second", replaces=("first",), stdout=300_000, credit=1 << 30, acks=True))
    await eventually(lambda: second.end is not None)
    assert (len(first.data), len(second.data)) == (700_000, 1_000_000)
    assert not running.done()
    sending.credit(1 << 30, received=700_000)
    await asyncio.wait_for(running, 2)


async def test_chunks_and_status_fit_their_messages(box: Box) -> None:
    """Large pieces are cut to 128 KiB; a status whose captured output is too large is cut and still says how much there was."""
    bus = await box.bus()
    sandbox = SandboxId("n1", new_ulid())
    reader = await Reader(bus, sandbox, "r").open()
    subject = subjects.output("main", sandbox, OP, Caller("local", "default"))
    await pump.Pump(bus, subject, SlowLink(), OutputRequest(op=OP, reader="r", credit=1 << 30)).run()  # type: ignore[arg-type]
    await eventually(lambda: reader.end is not None)
    assert len(reader.data) == 1_000_000
    assert reader.end is not None
    status = reader.end.status
    assert status is not None
    assert status.stdout.total == 5_000_000
    assert status.stdout.truncated


async def test_events_survive_an_outage_of_the_bus(box: Box, nats_server: NatsServer) -> None:
    """Sandboxes end while nats-server is away: their events are in the stream afterwards, each once, in order."""
    from dsec.bus.events import EventPublisher, EventReader
    from dsec.bus.streams import ensure_events_stream

    bus = await box.bus()
    await ensure_events_stream(bus)
    publisher = await EventPublisher(bus, "n1", box.dir / "spool").start()
    edge = await box.edge(sink=publisher)
    await box.watcher()
    await box.scheduler()
    asker = await Asker(await box.bus()).open()
    await asker.create(5)
    await asker.until(lambda a: len(a.ready) == 5)
    nats_server.kill()
    await asyncio.gather(*(sandbox.stop() for sandbox in list(edge.sandboxes.values())))
    await asyncio.sleep(0.2)
    await nats_server.start()
    await publisher.drained(20)
    seen: list[tuple[str, str, int]] = []  # (sandbox, kind, number)
    async with EventReader(await box.bus(), since="all", follow=False) as reader:
        seen.extend([(event.sb, event.kind, event.n) async for event in reader])
    assert sorted({kind for _, kind, _ in seen}) == ["created", "running", "stopped"]
    assert len(seen) == len(set(seen)) == 15
    for sandbox in {sb for sb, _, _ in seen}:
        assert [kind for sb, kind, _ in seen if sb == sandbox] == ["created", "running", "stopped"]


async def test_verbs_that_do_not_exist_are_told(box: Box) -> None:
    """A verb of an Edge that nobody knows: NotFound with the ones there are."""
    await box.edge()
    bus = await box.bus()
    with pytest.raises(DsecError) as caught:
        await bus.call(subjects.edge("main", "n1", "explode"), Empty(), Empty, timeout=2)
    assert caught.value.code == "not_found"
    assert "launch" in caught.value.fix
