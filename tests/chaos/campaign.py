"""A campaign: rounds of load while processes die, and after each round the oracle is shown what is there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

import libdsec
from dsec.bus.messages import ListReply, Selector
from dsec.errors import DsecError, SandboxGone
from dsec.model import SandboxId, SandboxSpec
from tests.chaos import kills
from tests.chaos.cluster import Boxes
from tests.chaos.load import BOUND, EFFECTS, LEASE, Load, command
from tests.chaos.model import Oracle, Wrong

PATIENCE = 60.0  # seconds until what is not under way any more must be as it should
REPLAYED = 4  # recorded results that are asked for again, of each sandbox and round
STEPS = 30  # of a job
ROUND = (3.0, 9.0)  # seconds
DENSE_ROUND, DENSE = (14.0, 16.0), (16, 22)  # seconds, and deaths from outside


class Report(msgspec.Struct):
    """What a campaign found."""

    seed: int
    rounds: int = 0
    deaths: int = 0  # of actors, nats-servers, holders, zygotes, agents and clients
    wrong: list[Wrong] = []
    reached: dict[str, int] = {}
    missing: list[str] = []
    counts: dict[str, int] = {}
    slowest: list[tuple[float, str]] = []
    steps: int = 0  # results that were acknowledged


class Job:
    """A client in a process of its own, and the sandbox that it works in; begun anew when it is done."""

    def __init__(self, load: Load, oracle: Oracle, client: libdsec.Client, log: Path) -> None:
        self.load, self.oracle, self.client, self.log = load, oracle, client, log
        self.sandbox: libdsec.Sandbox | None = None
        self.process: asyncio.subprocess.Process | None = None
        self.away = 0.0
        self._may = asyncio.Event()
        self._resting = asyncio.Event()

    def go(self) -> None:
        self._resting.clear()
        self._may.set()

    async def rest(self) -> None:
        """Returns when nothing of it is under way."""
        self._may.clear()
        self.kill()
        await self._resting.wait()

    async def run(self) -> None:
        while True:
            if not self._may.is_set():
                self._resting.set()
                await self._may.wait()
            with contextlib.suppress(DsecError):
                if self.sandbox is None:
                    self.sandbox = await self.client.create(self.load.spec, timeout=60.0)
                    self.oracle.ready(self.sandbox.id)
                if await self._once(self.sandbox):
                    self.oracle.stopping(self.sandbox.id)
                    done, self.sandbox = self.sandbox, None
                    await done.stop()
                    self.oracle.stopped(done.id, "stopped")
            await asyncio.sleep(self.away)
            self.away = 0.1

    async def _once(self, sandbox: libdsec.Sandbox) -> bool:
        """One life of the client; whether its work is over."""
        words = (sys.executable, "-m", "tests.chaos.job", self.load.url, sandbox.id, str(STEPS))
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE, stderr=log)
        try:
            assert self.process.stdout is not None
            async for line in self.process.stdout:
                match line.decode().rstrip("\n").split(" ", 2):
                    case ["asks", key]:
                        self.oracle.asks(sandbox.id, key)
                    case ["got", key, result]:
                        self.oracle.answered(sandbox.id, key, f"{result}\n".encode())
                    case ["done"]:
                        return True
            return await self.process.wait() == 0
        finally:
            self.kill()
            await self.process.wait()

    def kill(self, away: float = 0.1) -> bool:
        """Whether there was one."""
        self.away = away
        if self.process is None or self.process.returncode is not None:
            return False
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        return True


class Campaign:
    """``first`` is the number of the first round; ``rounds``, ``seconds`` and ``deaths`` bound it (0 = no bound). It ends with the first
    contradiction. ``dense``: many deaths in longer rounds, in place of every point once."""

    def __init__(
        self,
        place: Path,
        seed: int,
        *,
        container: bool,
        seconds: float = 0.0,
        rounds: int = 0,
        deaths: int = 0,
        first: int = 0,
        dense: bool = False,
        told: Callable[[str], None] = print,
    ) -> None:
        self.seed, self.seconds, self.rounds, self.deaths, self.number = seed, seconds, rounds, deaths, first
        self.container, self.told, self.dense = container, told, dense
        self.oracle = Oracle(fragile=not container)
        mark = secrets.token_hex(3)
        self.boxes = Boxes(place, (f"ca{mark}", f"cb{mark}"), seed, container=container, told=self.say, dense=dense)
        self.dice = random.Random(f"{seed} checks")
        self.report = Report(seed)

    def say(self, text: str) -> None:
        self.told(f"{time.strftime('%H:%M:%S')}  {text}")

    async def run(self) -> Report:
        report, boxes = self.report, self.boxes
        began = time.monotonic()
        try:
            async with boxes:
                await self._rounds(began)
        finally:
            report.reached = dict(sum((points.reached for points in boxes.points.values()), start=type(boxes.points["edge"].reached)()))
            report.missing = [name for points in boxes.points.values() for name in points.missing]
            report.wrong, report.counts = self.oracle.wrong, dict(self.oracle.counts.most_common())
            report.deaths = boxes.deaths
            report.steps = sum(len(steps.results) for steps in self.oracle.steps.values())
        left = await boxes.left(20.0)
        if left:
            report.wrong.append(Wrong("state", f"left behind: {left}"))
        return report

    async def _rounds(self, began: float) -> None:
        url = self.boxes.cluster.url
        spec = libdsec.spec(
            "busybox", backend="container" if self.container else "fake", cpus=0.25, memory="48MiB", disk="8MiB", pids=32,
            on_client_loss="keep", exec_timeout=60.0,
        )  # fmt: skip
        async with libdsec.connect(url, lease_ttl=LEASE, connect_timeout=BOUND) as client, Load(url, self.oracle, self.seed, spec) as load:
            job = Job(load, self.oracle, client, self.boxes.place / "job.log")
            running = asyncio.ensure_future(job.run())
            try:
                while not self.oracle.wrong:
                    over = self.seconds and time.monotonic() - began >= self.seconds
                    enough = self.deaths and self.boxes.deaths >= self.deaths
                    if over or enough or (self.rounds and self.report.rounds >= self.rounds):
                        break
                    await self._round(load, job, client)
                    self.number += 1
                    self.report.rounds += 1
            finally:
                self.report.slowest = load.slow
                job.kill()
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
        if not self.oracle.wrong:
            await self._end(url, spec)

    async def _round(self, load: Load, job: Job, client: libdsec.Client) -> None:
        dice = random.Random(f"{self.seed} {self.number} seconds")
        seconds = dice.uniform(*(DENSE_ROUND if self.dense else ROUND))
        times = DENSE if self.dense else (1, 3)
        planned = kills.plan(self.seed, self.number, seconds, container=self.container, times=times)
        self.say(f"round {self.number} of {seconds:.1f} s: " + ("; ".join(map(str, planned)) or "nothing from outside"))
        load.go()
        job.go()
        strikes = [asyncio.ensure_future(self._strike(kill, job)) for kill in planned]
        await asyncio.sleep(seconds)
        await asyncio.gather(*strikes)
        async with asyncio.timeout(3 * BOUND):
            await asyncio.gather(load.rest(), job.rest())
        self.boxes.check()
        self.boxes.resting = True
        await self._check(client)
        self.boxes.resting = False

    async def _strike(self, kill: kills.Kill, job: Job) -> None:
        await asyncio.sleep(kill.after)
        if kill.victim == "client":
            self.boxes.deaths += job.kill(kill.away + 0.1)
        elif kill.victim == "agent":
            living = sorted(self.oracle.living)
            if living and (pid := self.boxes.agent(SandboxId.parse(chosen := living[kill.which % len(living)]).ulid)):
                self.oracle.stopping(chosen)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.boxes.deaths += 1
        else:
            await self.boxes.strike(kill)

    # ------------------------------------------------------------------ looking
    async def _check(self, client: libdsec.Client) -> None:
        oracle = self.oracle
        for sandbox_id in sorted(oracle.steps):
            if sandbox_id in oracle.living:
                await self._look_inside(client, sandbox_id)
        ended = sorted(oracle.steps.keys() & oracle.ended.keys())
        for sandbox_id in self.dice.sample(ended, k=min(2, len(ended))):  # recorded results need no sandbox
            await self._replay(client, sandbox_id)
        wrong: list[Wrong] = []
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            wrong = await self._look(client)
            if not wrong:
                break
            await asyncio.sleep(0.5)
        if wrong:
            await self._explain(client)
        oracle.wrong += wrong
        if not oracle.wrong:
            calls, deaths = sum(oracle.counts.values()), self.boxes.deaths
            self.say(f"          fine: {len(oracle.living)} live, {len(oracle.made)} made, {calls} calls, {deaths} deaths")

    def _handle(self, client: libdsec.Client, sandbox_id: str) -> libdsec.Sandbox:
        return libdsec.Sandbox(client, SandboxId.parse(sandbox_id))

    async def _surely(self, what: str, sandbox: libdsec.Sandbox, call: object) -> object:
        """An answer that must come, for the sandbox lives: through restarts that go on."""
        until = time.monotonic() + BOUND
        while True:
            try:
                return await call()  # type: ignore[operator]
            except SandboxGone as error:
                self.oracle.gone(sandbox.id, error.reason)
                return None
            except DsecError as error:
                if time.monotonic() > until:
                    self.oracle.say("answer", f"{sandbox.id}: {what}: {error}")
                    return None
            await asyncio.sleep(0.2)

    async def _look_inside(self, client: libdsec.Client, sandbox_id: str) -> None:
        sandbox = self._handle(client, sandbox_id)
        await self._replay(client, sandbox_id)
        if not self.oracle.steps[sandbox_id].results:
            return
        data = await self._surely("read", sandbox, lambda: sandbox.files.read(EFFECTS))
        if isinstance(data, bytes):
            self.oracle.effects(sandbox_id, data.decode().split())

    async def _replay(self, client: libdsec.Client, sandbox_id: str) -> None:
        sandbox = self._handle(client, sandbox_id)
        known = sorted(self.oracle.steps[sandbox_id].results)
        for key in self.dice.sample(known, k=min(REPLAYED, len(known))):
            result = await self._surely("step", sandbox, lambda key=key: sandbox.exec(command(key), step=key, timeout=30.0))
            if isinstance(result, libdsec.ExecResult):
                self.oracle.answered(sandbox_id, key, result.stdout)

    async def _look(self, client: libdsec.Client) -> list[Wrong]:
        oracle = self.oracle
        try:
            listed = {info.id: info.state for info in await client.list()}
            events = [event async for event in client.events(since="all", follow=False)]
        except DsecError as error:
            return [Wrong("answer", f"cannot be looked at: {error}")]
        wrong = oracle.listed(listed) + oracle.stream(events)
        known = {SandboxId.parse(sandbox_id).ulid for sandbox_id in listed}
        strays = await asyncio.to_thread(self.boxes.kernel) - known
        wrong += [Wrong("state", f"{ulid}: not listed, and the kernel has something of it") for ulid in sorted(strays)]
        return wrong

    async def _explain(self, client: libdsec.Client) -> None:
        """What the cluster says of itself, for who looks for the reason."""
        try:
            view = await client.nodes()
            replies, silent = await client._wire.everyone("list", Selector(), ListReply, timeout=10.0)
        except DsecError as error:
            self.say(f"no view: {error}")
            return
        self.say(f"nodes {[(node.edge, node.incarnation, view.ages_ms.get(node.edge)) for node in view.nodes]}, {view.watcher}")
        self.say(f"expected {view.expected}, lost {view.lost}, silent {silent}")
        self.say(f"lists {[(reply.edge, len(reply.sandboxes), reply.more) for reply in replies]}")

    async def _end(self, url: str, spec: SandboxSpec) -> None:
        """No more deaths: all can be stopped, a new one works, and nothing is left."""
        await self.boxes.calm()
        async with libdsec.connect(url) as client:
            async with client.sandbox(spec, timeout=60.0) as sandbox:
                await sandbox.exec("true", check=True)
                self.oracle.ready(sandbox.id)
                self.oracle.stopping(sandbox.id)
            for outcome in await client.stop(everything=True):
                if outcome.error is not None:
                    self.oracle.say("answer", f"{outcome.id}: cannot be stopped: {outcome.error}")
            for sandbox_id in self.oracle.living:
                self.oracle.stopped(sandbox_id, "stopped at the end")
            await self._check(client)
