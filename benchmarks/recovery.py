"""What deaths cost: an Edge with live sandboxes, nats-server, the leader of a stream; and what many at random lose or do twice."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from argparse import Namespace
from pathlib import Path

import libdsec
from benchmarks import harness
from dsec import trees
from dsec.bus.bus import Bus
from dsec.bus.events import EventPublisher
from dsec.bus.events import events as read_events
from dsec.bus.messages import Event
from dsec.bus.streams import EventsConfig, ensure_events_stream
from dsec.model import SandboxId, new_ulid
from tests.chaos.campaign import Campaign
from tests.three_servers import Three, chosen

ABOUT = "an Edge, nats-server and a JetStream leader killed under live sandboxes; then kills at random (make chaos)"
KEYS = ("edge_restart_s", "adopted", "nats_restart_s", "leader_loss_s", "lost_events", "lost_results", "doubled_results")
DEFAULTS = {"n": 200, "rounds": 3, "kills": 200, "seed": 1}
LIMITS: libdsec.Options = {"memory": 64 * harness.MIB, "disk": 16 * harness.MIB, "pids": 32, "cpus": 0.5}
PERIOD = 0.005  # seconds between two events while a leader dies


async def all_answer(sandboxes: list[libdsec.Sandbox]) -> None:
    await asyncio.gather(*(harness.answered(sandbox) for sandbox in sandboxes))


async def restarts(options: Namespace) -> dict[str, object]:
    """Seconds from the start of the next Edge, and from the death of nats-server that is started again at once, until all have answered."""
    edge_s: list[float] = []
    nats_s: list[float] = []
    async with harness.session(options) as session:
        sandboxes = await session.client.create_many(libdsec.spec(session.image, **LIMITS), options.n)
        features = await harness.features(session, sandboxes[0])
        await all_answer(sandboxes)
        for _ in range(options.rounds):
            await session.edge.kill()
            began = time.perf_counter()
            answers = asyncio.ensure_future(all_answer(sandboxes))
            await session.edge.start()
            await answers
            edge_s.append(time.perf_counter() - began)
        adopted = len(await session.client.list())
        for _ in range(options.rounds):
            began = time.perf_counter()
            session.cluster.nats.kill()
            answers = asyncio.ensure_future(all_answer(sandboxes))
            await session.cluster.nats.start()
            await answers
            nats_s.append(time.perf_counter() - began)
        await session.client.stop(everything=True)
        return {
            "edge_restart_s": harness.rounded(statistics.median(edge_s)),
            "adopted": adopted,
            "nats_restart_s": harness.rounded(statistics.median(nats_s)),
            "features": features,
            "driver": session.driver,
        }


async def leader_loss(folder: Path) -> tuple[float, int]:
    """Seconds from the death of the stream's leader, of three servers, until events are acknowledged again; how many are not there."""
    async with Three(folder) as three, Bus.connect(three.url, name="benchmark") as bus:
        await chosen(lambda: ensure_events_stream(bus, EventsConfig(replicas=3)))
        async with EventPublisher(bus, "n1", folder / "spool", ack_timeout=1.0) as publisher:
            posted = 0

            async def post(seconds: float) -> None:
                nonlocal posted
                until = time.perf_counter() + seconds
                while time.perf_counter() < until:
                    posted += 1
                    sandbox = str(SandboxId("n1", new_ulid()))
                    publisher.post(Event(kind="created", sb=sandbox, edge="n1", project="p", incarnation="i.1", n=posted))
                    await asyncio.sleep(PERIOD)

            await post(1.0)
            (await three.leader(bus)).kill()
            killed, known = time.perf_counter(), publisher.acknowledged
            posting = asyncio.ensure_future(post(3.0))
            await asyncio.sleep(0.1)
            while publisher.acknowledged <= known + 1:  # noqa: ASYNC110 - what was on its way when it died does not count
                await asyncio.sleep(0.01)
            took = time.perf_counter() - killed
            await posting
            await publisher.drained(60.0)
            found = {event.n async for event in read_events(bus, since="all", follow=False)}
            return took, posted - len(found)


async def kills(options: Namespace) -> dict[str, int]:
    """What deaths at random lose or do twice. Raises `WrongAnswer` for any other contradiction."""
    place = Path(tempfile.mkdtemp(prefix="dsec-bench-", dir="/tmp"))
    try:
        report = await Campaign(place, options.seed, container=True, deaths=options.kills, dense=True, told=harness.say).run()
    finally:
        await asyncio.to_thread(trees.clear, place)
    counts = {kind: sum(wrong.kind == kind for wrong in report.wrong) for kind in ("lost event", "lost result", "doubled result")}
    if other := [wrong.text for wrong in report.wrong if wrong.kind not in counts]:
        raise harness.WrongAnswer(f"seed {report.seed}: {other[:3]}")
    return counts | {"deaths": report.deaths, "steps": report.steps}


async def run(options: Namespace) -> dict[str, object]:
    result = await restarts(options)
    folder = Path(tempfile.mkdtemp(prefix="dsec-bench-"))
    try:
        took, missing = await leader_loss(folder)
    finally:
        await asyncio.to_thread(trees.clear, folder)
    counts = await kills(options)
    return result | {
        "n": options.n,
        "leader_loss_s": harness.rounded(took),
        "lost_events": missing + counts["lost event"],
        "lost_results": counts["lost result"],
        "doubled_results": counts["doubled result"],
        "kills": counts["deaths"],
        "steps": counts["steps"],
    }
