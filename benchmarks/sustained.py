"""Creates at a steady rate for minutes, with refusals and with nodes that die: the production Scheduler over simulated Edges.

Each sandbox is asked for once and counts once: its id arrived at the client, or an error did. What had neither within its deadline is
lost. Sandboxes end by themselves after ``lifetime`` seconds, so the Watcher comes to know rate x lifetime live ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import tempfile
import time
from argparse import Namespace
from collections import Counter, deque
from pathlib import Path

import msgspec

from benchmarks import harness, machine
from benchmarks.placement import CALLER, make_specs, seen, simulated
from dsec import trees
from dsec.actors.up import Cluster
from dsec.bus import subjects
from dsec.bus.bus import Bus
from dsec.bus.messages import BurstNews, ClusterView, CreateAck, CreateRequest
from dsec.errors import DsecError
from dsec.model import SandboxSpec, new_ulid
from libdsec.plan import Ledger, slices

ABOUT = "5,000 placements a second for minutes, with refusals and dying nodes; lost must be 0"
KEYS = ("per_s", "minutes", "refused", "lost")
DEFAULTS = {"rate": 5_000, "minutes": 2.0, "edges": 160, "dying": 4, "refuse": 0.01, "lifetime": 76.0, "schedulers": 1}
PART = 250  # sandboxes of one burst
DEADLINE = 30.0
SLOTS = 5_000


class Asked(msgspec.Struct):
    """One burst on its way."""

    ledger: Ledger
    started: float


class Driver:
    """Asks for bursts at a rate and counts what comes back."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.inbox = bus.new_inbox()
        self.open: dict[str, Asked] = {}
        self.placed = self.failed = 0
        self.errors: Counter[str] = Counter()
        self.times: deque[float] = deque(maxlen=100_000)  # milliseconds from asking for a burst until all of it had ids
        self.live_most = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def open_up(self) -> None:
        await self.bus.subscribe(self.inbox, BurstNews, self.take)
        await self.bus.subscribe(subjects.view(self.bus.unit), ClusterView, self.look)
        await self.bus.flush()

    def look(self, view: ClusterView, _: object) -> None:
        self.live_most = max(self.live_most, sum(sum(beat.states.values()) for beat in view.nodes))

    def take(self, news: BurstNews, _: object) -> None:
        asked = self.open.get(news.burst)
        if asked is None:
            return
        meaning = asked.ledger.take(news)
        self.placed += len(meaning.claims)
        self.failed += len(meaning.failed)
        self.errors.update(str(asked.ledger.errors[index].message)[:80] for index in meaning.failed)
        if len(asked.ledger.errors) + sum(owner is not None for owner in asked.ledger.owner) >= asked.ledger.n:
            del self.open[news.burst]
            self.times.append((time.perf_counter() - asked.started) * 1e3)

    def ask(self, specs: list[SandboxSpec]) -> None:
        task = asyncio.create_task(self._ask(specs))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, specs: list[SandboxSpec]) -> None:
        burst = new_ulid()
        self.open[burst] = Asked(Ledger(len(specs)), time.perf_counter())
        subject = subjects.api(self.bus.unit, "create", CALLER)
        for number, part in enumerate(slices(specs)):
            request = CreateRequest(
                burst=burst, slice=number, specs=part.specs, items=part.items, inbox=self.inbox, deadline_ms=int(DEADLINE * 1000)
            )
            end, pause = time.perf_counter() + DEADLINE, 0.05
            while True:  # as libdsec: again under the same id while nobody acknowledges
                try:
                    await self.bus.call(subject, request, CreateAck, timeout=2.0, request_id=f"{burst}-{number}")
                    break
                except DsecError as error:
                    self.errors[f"asked again: {error.code} {error.reason}"] += 1
                if time.perf_counter() > end:
                    self._refused(burst)
                    break
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, 1.0)

    def _refused(self, burst: str) -> None:
        """Never acknowledged: its caller is told so."""
        asked = self.open.pop(burst, None)
        if asked is not None:
            count = sum(owner is None and index not in asked.ledger.errors for index, owner in enumerate(asked.ledger.owner))
            self.failed += count
            self.errors["never acknowledged"] += count

    async def run(self, specs: list[SandboxSpec], rate: float, seconds: float) -> float:
        """Asks until the time is over; how far behind it fell at most, in seconds."""
        began, asked, behind = time.perf_counter(), 0, 0.0
        while (now := time.perf_counter() - began) < seconds:
            due = int(now * rate) // PART * PART
            while asked < due:
                at = asked % max(1, len(specs) - PART)
                self.ask(specs[at : at + PART])
                asked += PART
            behind = max(behind, now - asked / rate)
            await asyncio.sleep(max(0.0, (asked + PART) / rate - (time.perf_counter() - began)))
        return behind

    async def settled(self, timeout: float) -> int:
        """Until everything has an id or an error; how many have neither when the time is over."""
        end = time.perf_counter() + timeout
        while self.open and time.perf_counter() < end:  # noqa: ASYNC110 - an event for each burst would cost more than it tells
            await asyncio.sleep(0.1)
        return sum(
            sum(owner is None and index not in asked.ledger.errors for index, owner in enumerate(asked.ledger.owner))
            for asked in self.open.values()
        )


async def refused_by(children: list[asyncio.subprocess.Process]) -> int:
    """Refusals that simulated Edges counted, once they are told to end."""
    count = 0
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        assert child.stdout is not None
        with contextlib.suppress(ValueError, TimeoutError):
            count += int(json.loads(await asyncio.wait_for(child.stdout.readline(), 10) or b"{}").get("refused", 0))
    return count


async def run(options: Namespace) -> dict[str, object]:
    specs = make_specs(20 * PART, 5 * PART)
    seconds = options.minutes * 60
    more = ("--lifetime", str(options.lifetime), "--refuse", str(options.refuse), "--slots", str(SLOTS))
    state = Path(tempfile.mkdtemp(prefix="dsec-bench-sustained-"))
    stay = options.edges - options.dying
    try:
        async with (
            Cluster(state, edges=(), schedulers=options.schedulers) as cluster,
            Bus.connect(cluster.url, name="benchmark") as bus,
            simulated(cluster.url, stay, more=more) as children,
            simulated(cluster.url, options.dying, processes=options.dying, first=stay, more=more) as mortals,
        ):
            await seen(bus, options.edges)
            driver = Driver(bus)
            await driver.open_up()
            gc.collect()
            gc.freeze()

            async def die() -> None:
                for mortal in mortals:  # without a word, one after another over the whole time
                    await asyncio.sleep(seconds / (len(mortals) + 1))
                    mortal.kill()

            deaths = asyncio.create_task(die())
            rss = {child.name: harness.rss(child.pid) for child in cluster.children}
            pids = {child.name: [child.pid] for child in cluster.children} | {"edges": [child.pid for child in children]}
            cpu = {name: machine.cpu_ms(group) for name, group in pids.items()} | {"client": time.process_time() * 1e3}
            started = time.perf_counter()
            behind = await driver.run(specs, options.rate, seconds)
            lost = await driver.settled(DEADLINE + 10)
            took = time.perf_counter() - started
            used = {name: machine.cpu_ms(group) - cpu[name] for name, group in pids.items()}
            used["client"] = time.process_time() * 1e3 - cpu["client"]
            grown = {child.name: harness.rounded((harness.rss(child.pid) - rss[child.name]) / harness.MIB, 1) for child in cluster.children}
            await deaths
            refused = await refused_by(children)
    finally:
        await asyncio.to_thread(trees.clear, state)
    times = list(driver.times)
    return {
        "per_s": harness.rounded(driver.placed / took, 0),
        "minutes": options.minutes,
        "refused": refused,
        "lost": lost,
        "placed": driver.placed,
        "failed": driver.failed,
        "errors": dict(driver.errors.most_common(6)),
        "nodes_died": options.dying,
        "live_most": driver.live_most,
        "burst_ms_p50": harness.rounded(harness.percentile(times, 50)),
        "burst_ms_p99": harness.rounded(harness.percentile(times, 99)),
        "behind_s": harness.rounded(behind, 3),
        "grown_mib": grown,
        "cores": {name: harness.rounded(spent / 1e3 / took) for name, spent in used.items()},
        "features": {"admission_ledger": True, "launch": False, "disk": False, "schedulers": options.schedulers, "edges": options.edges},
        "driver": "libdsec's slices over nats-server to the production Scheduler; simulated Edges",
    }
