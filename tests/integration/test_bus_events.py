"""DSEC_EVENTS and key-value buckets on a real nats-server, through outages."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import uvloop

from dsec import errors
from dsec.bus import Bus, EventPublisher, EventReader, EventsConfig, ensure_events_stream, kv_bucket
from dsec.bus.events import events as read_events
from dsec.bus.messages import Event
from dsec.bus.server import NatsServer, sync_always
from dsec.bus.streams import ask
from dsec.model import SandboxId, new_ulid
from tests.fixtures_bus import Opener

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy")


@pytest.fixture(scope="module")
def event_loop_policy() -> uvloop.EventLoopPolicy:
    """Actors run on uvloop, so these tests do; the contract suite runs on asyncio's own loop."""
    return uvloop.EventLoopPolicy()


class Source:
    """Numbered events of one Edge's incarnation, each of a sandbox of its own unless told."""

    def __init__(self, edge: str = "n1") -> None:
        self.edge = edge
        self.incarnation = f"{new_ulid()}:1"
        self.n = 0

    def event(self, kind: str = "created", sb: str = "", project: str = "acme/rl", **labels: str) -> Event:
        self.n += 1
        return Event(
            kind=kind, sb=sb or str(SandboxId(self.edge, new_ulid())), edge=self.edge, project=project, incarnation=self.incarnation,
            n=self.n, wall_ts=time.time(), labels=labels,
        )  # fmt: skip


async def collect(reader: EventReader, count: int, timeout: float = 20) -> list[Event]:
    got: list[Event] = []
    async with asyncio.timeout(timeout):
        async for event in reader:
            got.append(event)
            if len(got) == count:
                break
    return got


async def test_events_are_published_in_batches_and_read_back(nats_server: NatsServer, open_bus: Opener, tmp_path: Path) -> None:
    """A thousand events posted at once arrive in few messages, once each, in the sandbox's order."""
    bus, other = await open_bus(), await open_bus()
    await ensure_events_stream(bus)
    source = Source()
    sb = str(SandboxId("n1", new_ulid()))
    async with EventReader(other) as reader, EventPublisher(bus, "n1", tmp_path) as publisher:
        posted = [source.event() for _ in range(1000)] + [
            source.event(kind, sb) for kind in ("created", "running", "paused", "running", "stopped")
        ]
        publisher.post(*posted)
        got = await collect(reader, len(posted))
        await publisher.drained(5)
        assert publisher.acknowledged < 20
    assert {(event.sb, event.n) for event in got} == {(event.sb, event.n) for event in posted}
    assert [event.kind for event in got if event.sb == sb] == ["created", "running", "paused", "running", "stopped"]
    assert not any(tmp_path.glob("*.seg"))


async def test_readers_filter(nats_server: NatsServer, open_bus: Opener, tmp_path: Path) -> None:
    """Kinds, labels, sandboxes, project and start time select; without follow the reader ends after what exists."""
    bus = await open_bus()
    await ensure_events_stream(bus)
    source = Source()
    one = source.event("stopped", job="j1")
    rest = [
        source.event("created", job="j1"),
        source.event("created", job="j2"),
        source.event("created", project="acme"),
        source.event("created", project="acme2/rl"),
    ]
    async with EventPublisher(bus, "n1", tmp_path) as publisher:
        publisher.post(one, *rest)
        await publisher.drained(5)

    async def read(**filters: object) -> set[int]:
        return {event.n async for event in read_events(bus, follow=False, **filters)}

    assert await read(since="all") == {1, 2, 3, 4, 5}
    assert await read(since="-10m", kinds=("stopped",)) == {1}
    assert await read(since="all", labels={"job": "j1"}) == {1, 2}
    assert await read(since="all", labels={"job": "j1"}, kinds=("created", "running")) == {2}
    assert await read(since="all", project="acme") == {1, 2, 3, 4}
    assert await read(since="all", project="acme/rl") == {1, 2, 3}
    assert await read(since="all", sandboxes=(one.sb,)) == {1}
    assert await read(since=time.time() + 60) == set()
    assert await read() == set()
    with pytest.raises(errors.InvalidRequest) as caught:
        await read(since="yesterday")
    assert caught.value.field == "since"


async def test_an_outage_loses_no_event(nats_server: NatsServer, open_bus: Opener, tmp_path: Path) -> None:
    """Events posted before, during and after an outage all arrive once; the reader resumes by itself; the spool ends empty."""
    bus, other = await open_bus(), await open_bus()
    await ensure_events_stream(bus)
    source = Source()
    async with EventReader(other) as reader, EventPublisher(bus, "n1", tmp_path, ack_timeout=1.0) as publisher:
        publisher.post(*(source.event() for _ in range(100)))
        await asyncio.sleep(0.02)
        nats_server.kill()
        for _ in range(10):
            publisher.post(*(source.event() for _ in range(30)))
            await asyncio.sleep(0.03)
        assert publisher.spooled > 0
        await nats_server.start()
        publisher.post(*(source.event() for _ in range(50)))
        got = await collect(reader, 450)
        await publisher.drained(10)
        assert publisher.spooled == 0
        assert publisher.lost == 0
    assert sorted(event.n for event in got) == list(range(1, 451))


async def test_the_spool_outlives_its_process(nats_server: NatsServer, open_bus: Opener, tmp_path: Path) -> None:
    """What could not be delivered by one publisher is delivered by the next one on the same directory."""
    bus = await open_bus()
    await ensure_events_stream(bus)
    source = Source()
    nats_server.kill()
    await asyncio.sleep(0.1)
    async with EventPublisher(bus, "n1", tmp_path) as publisher:
        publisher.post(*(source.event() for _ in range(40)))
        await asyncio.sleep(0.1)
        publisher.post(source.event())
    assert any(tmp_path.glob("*.seg"))
    await nats_server.start()
    await bus.transport.wait_connected(5)
    async with EventPublisher(bus, "n1", tmp_path) as publisher:
        publisher.post(source.event())
        await publisher.drained(10)
    assert sorted([event.n async for event in read_events(bus, since="all", follow=False)]) == list(range(1, 43))


async def test_without_a_stream_events_wait_on_disk(nats_server: NatsServer, open_bus: Opener, tmp_path: Path) -> None:
    """While the stream does not exist events are kept; they go out when it does."""
    bus = await open_bus()
    source = Source()
    async with EventPublisher(bus, "n1", tmp_path, ack_timeout=0.5) as publisher:
        publisher.post(*(source.event() for _ in range(5)))
        await asyncio.sleep(0.3)
        assert publisher.spooled > 0
        with pytest.raises(errors.NotFound):
            async with EventReader(bus):
                pass
        await ensure_events_stream(bus)
        await publisher.drained(10)
    assert len([event async for event in read_events(bus, since="all", follow=False)]) == 5


async def test_a_stream_configured_otherwise_is_refused(nats_server: NatsServer, open_bus: Opener) -> None:
    """The same configuration is accepted again, another is refused naming the difference, and changed only when told."""
    bus = await open_bus()
    await ensure_events_stream(bus)
    await ensure_events_stream(bus)
    other = EventsConfig(max_age=3600)
    with pytest.raises(errors.Conflict, match="max_age") as caught:
        await ensure_events_stream(bus, other)
    assert caught.value.reason == "stream_config"
    await ensure_events_stream(bus, other, update=True)
    await ensure_events_stream(bus, other)


async def test_jetstream_off_is_said(state_dir: Path) -> None:
    """Without JetStream the stream's set-up is Unavailable with the fix."""
    async with NatsServer(state_dir / "nats", jetstream=False) as server, Bus.connect(server.url) as bus:
        with pytest.raises(errors.Unavailable, match="JetStream"):
            await ensure_events_stream(bus)


async def test_a_message_that_can_never_be_stored_does_not_hold_up_the_rest(
    nats_server: NatsServer, open_bus: Opener, tmp_path: Path
) -> None:
    """An event above the server's limit is dropped and counted; the others arrive."""
    bus = await open_bus()
    await ensure_events_stream(bus)
    source = Source()
    async with EventPublisher(bus, "n1", tmp_path) as publisher:
        publisher.post(source.event("policy", note="x" * (2 << 20)), source.event())
        await publisher.drained(5)
        assert publisher.lost == 1
    assert bus.events.counts["events_lost"] == 1
    assert [event.n async for event in read_events(bus, since="all", follow=False)] == [2]


async def test_the_embedded_server_syncs_each_write(nats_server: NatsServer, state_dir: Path) -> None:
    """Our server acknowledges an event only after fsync; one started otherwise is told apart."""
    assert await sync_always(nats_server.monitor) is True
    assert await sync_always("http://127.0.0.1:1") is None
    async with NatsServer(state_dir / "other", jetstream=False, extra=f'jetstream {{ store_dir: "{state_dir}/js" }}') as other:
        assert await sync_always(other.monitor) is False


async def test_key_value_compares_and_sets(nats_server: NatsServer, open_bus: Opener) -> None:
    """create writes only what is absent, update only what is unchanged, and a deleted key can be created again."""
    bus = await open_bus()
    bucket = await kv_bucket(bus, "fence")
    assert await bucket.get("n1") is None
    first = await bucket.create("n1", b"a")
    with pytest.raises(errors.Conflict) as caught:
        await bucket.create("n1", b"b")
    assert caught.value.reason == "exists"
    second = await bucket.update("n1", b"b", first)
    with pytest.raises(errors.Conflict):
        await bucket.update("n1", b"c", first)
    entry = await bucket.get("n1")
    assert entry is not None
    assert (entry.value, entry.revision) == (b"b", second)
    results = await asyncio.gather(*(bucket.update("n1", b"%d" % index, second) for index in range(8)), return_exceptions=True)
    assert sum(isinstance(result, int) for result in results) == 1
    await bucket.put("n2.x", b"")
    assert await bucket.keys() == ["n1", "n2.x"]
    await bucket.delete("n1")
    assert await bucket.get("n1") is None
    assert await bucket.keys() == ["n2.x"]
    assert await bucket.keys("n2") == ["n2.x"]
    assert await bucket.create("n1", b"again") > second
    for key in ("", "a b", "a.*", ">", ".a"):
        with pytest.raises(errors.InvalidRequest):
            await bucket.put(key, b"")


async def test_a_key_under_an_expiry_marker_is_absent(nats_server: NatsServer, open_bus: Opener) -> None:
    """After a key's time is up the server leaves a marker: get says None and create works at once."""
    bus = await open_bus()
    await ask(bus, "STREAM.CREATE.KV_lease", {
        "name": "KV_lease", "subjects": ["$KV.lease.>"], "max_msgs_per_subject": 1, "allow_rollup_hdrs": True, "allow_msg_ttl": True,
        "subject_delete_marker_ttl": 30_000_000_000, "storage": "memory", "deny_delete": True, "discard": "new",
    })  # fmt: skip
    from dsec.bus.streams import KvBucket

    bucket = KvBucket(bus, "lease")
    await bucket._write("leader", b"A", {"Nats-TTL": "1s"})
    await asyncio.sleep(1.6)
    raw, live = await bucket._last("leader")
    assert raw is not None
    assert not live
    assert await bucket.get("leader") is None
    await bucket.create("leader", b"B")
    entry = await bucket.get("leader")
    assert entry is not None
    assert entry.value == b"B"
