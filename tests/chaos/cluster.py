"""The cluster under chaos: real processes, each of which can be found, killed, stopped for a while and started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self

from dsec import faults
from dsec.actors.up import Child, Cluster
from dsec.errors import NodeError
from dsec.layers.store import LayerStore
from tests.busybox_box import busybox
from tests.census import Census
from tests.chaos.kills import Kill, Points

ULID = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}")
HEALTHY = "scheduler-2"  # never has an order to die: creates go on
OVERDUE = 4.0  # seconds in which an actor must pass the point at which it is to die; else it is killed
START_AGAIN = 0.05  # seconds between the death of an actor by an order of its own and its next start


class Boxes:
    """``async with Boxes(…) as boxes``. ``told`` hears a line of each death. Actors that die by themselves are started again."""

    def __init__(
        self, place: Path, edges: tuple[str, ...], seed: int, *, container: bool, told: Callable[[str], None], dense: bool = False
    ) -> None:
        self.place, self.container, self.told = place, container, told
        overrides = {
            "edge": {"sweep_ms": 200, "unclaimed_ms": 2_000, "heartbeat_ms": 500},
            "watcher": {"lost_after_ms": 60_000},
        }
        self.cluster = Cluster(
            place / "up", backends=("container",) if container else ("fake",), edges=edges, schedulers=2, overrides=overrides
        )
        self.points = {kind: Points(seed, kind, container=container, dense=dense) for kind in ("edge", "scheduler")}
        self.census = Census(roots=[place], tokens=edges, keep=[place])
        self._before = self.census.snapshot()
        self._serving = set[str]()
        self._peace = False
        self.resting = False  # nobody is killed because its point is overdue, so that what is left over has time to go
        self._last: dict[str, str] = {}  # where an actor has died last
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._away: dict[str, asyncio.Future[None]] = {}  # actors that are to stay dead for a while
        self._nats = asyncio.Lock()  # held from its death until it serves again
        self.deaths = 0  # of processes of the cluster

    async def __aenter__(self) -> Self:
        if self.container:
            await busybox(LayerStore(self.cluster.layer_store))
        await self.cluster.start()
        try:
            for child in self.cluster.children:
                self._serving.add(child.name)
                self._keepers[child.name] = asyncio.ensure_future(self._keep(child))
        except BaseException:
            await self.cluster.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.calm()  # an Edge that is not there cannot end its sandboxes
        finally:
            for keeper in self._keepers.values():
                keeper.cancel()
            await asyncio.gather(*self._keepers.values(), return_exceptions=True)
            await self.cluster.stop()

    def check(self) -> None:
        """Raises what has ended the keeper of an actor: one that could not be started."""
        for keeper in self._keepers.values():
            if keeper.done():
                keeper.result()

    # ------------------------------------------------------------------ actors
    async def _keep(self, child: Child) -> None:
        """Start it again whenever it has died, with an order for its next death."""
        while True:
            if child.process is not None:
                try:
                    await asyncio.wait_for(child.process.wait(), OVERDUE if self._mortal(child) else None)
                except TimeoutError:  # nobody has led it past its point: another one's turn
                    await child.kill()
            self._serving.discard(child.name)
            self._note(child)
            waiting = self._away.pop(child.name, None)
            if waiting is not None:
                await waiting
            await asyncio.sleep(START_AGAIN)
            await self.start(child, armed=not self._peace)

    def _mortal(self, child: Child) -> bool:
        """Whether it has an order to die, or one is waiting for it."""
        if self._peace or self.resting or child.name == HEALTHY or child.kind not in self.points:
            return False
        return faults.VARIABLE in child.environment or bool(self.points[child.kind].missing)

    async def start(self, child: Child, *, armed: bool) -> None:
        """Until it serves. It may die on its way up, of its order or from outside: then again."""
        for attempt in range(12):
            child.environment.pop(faults.VARIABLE, None)
            if armed and attempt < 8 and child.name != HEALTHY and child.kind in self.points:
                order = self.points[child.kind].next(self._last.pop(child.name, ""))
            else:
                order = ""
            if order:
                child.environment[faults.VARIABLE] = f"{order} {self._file(child)}"
            try:
                await child.start()
            except NodeError as error:
                if not self._note(child):
                    self.told(f"{child.name} did not come up: {error}" if attempt > 4 else f"{child.name} did not come up")
                    await asyncio.sleep(0.3)
            else:
                self._serving.add(child.name)
                return
        raise NodeError(f"{child.name} does not start any more", field=child.kind, value=str(child.log_path))

    def _file(self, child: Child) -> Path:
        return self.place / f"{child.name}.died"

    def _note(self, child: Child) -> bool:
        """Whether it died of its order; and where."""
        self.deaths += 1
        file = self._file(child)
        if not file.exists():
            return False
        point = file.read_text().split()[-1]
        file.unlink()
        self._last[child.name] = point
        self.points[child.kind].died_at(point)
        self.told(f"{child.name} died at {point}")
        return True

    async def calm(self) -> None:
        """From now on all actors serve, and none has an order to die."""
        self._peace = True
        await self.cluster_nats()
        for child in self.cluster.children:
            keeper = self._keepers.pop(child.name)
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
            if child.name not in self._serving or not child.alive or faults.VARIABLE in child.environment:
                await child.kill()
                await self.start(child, armed=False)
            self._keepers[child.name] = asyncio.ensure_future(self._keep(child))

    async def cluster_nats(self) -> None:
        async with self._nats:
            if self.cluster.nats.process is None:
                await self.cluster.nats.start(30.0)

    async def _kill_nats(self, away: float) -> None:
        async with self._nats:
            self.deaths += 1
            self.cluster.nats.kill()
            await asyncio.sleep(away)
            await self.cluster.nats.start(30.0)

    # ------------------------------------------------------------------ from outside
    async def strike(self, kill: Kill) -> str:
        """Carry it out, and what comes after; who was hit, "" when there was nobody."""
        if kill.victim == "nats" and not kill.seconds:
            await self._kill_nats(kill.away)
            return "nats"
        if kill.victim == "everything":
            return await self._everything(kill)
        pid, name = self._victim(kill)
        if not pid:
            return ""
        if kill.seconds:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                try:
                    await asyncio.sleep(kill.seconds)
                finally:
                    os.kill(pid, signal.SIGCONT)
            return name
        wait = self._stay_away(name, kill.away)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.deaths += name not in self._keepers  # these are counted where they are started again
        await wait
        return name

    def _stay_away(self, name: str, seconds: float) -> Awaitable[None]:
        if name not in self._keepers or not seconds:
            return asyncio.sleep(0)
        until = self._away[name] = asyncio.get_running_loop().create_future()

        async def end() -> None:
            await asyncio.sleep(seconds)
            until.set_result(None)

        return end()

    async def _everything(self, kill: Kill) -> str:
        waits = [self._stay_away(child.name, kill.away) for child in self.cluster.children]
        others = [*self.holders(), *self.zygotes()]
        for pid in [*(child.pid for child in self.cluster.children if child.alive), *others]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.deaths += len(others)
        await self._kill_nats(kill.away)
        await asyncio.gather(*waits)
        return "everything"

    def _victim(self, kill: Kill) -> tuple[int, str]:
        found: list[tuple[int, str]] = []
        if kill.victim in ("edge", "scheduler", "watcher"):
            found = [(child.pid, child.name) for child in self.cluster.children if child.kind == kill.victim and child.alive]
        elif kill.victim == "nats":
            found = [(self.cluster.nats.pid, "nats")] if self.cluster.nats.pid else []
        elif kill.victim == "holder":
            found = [(pid, "a holder") for pid in self.holders()]
        elif kill.victim == "zygote":
            found = [(pid, "a zygote") for pid in self.zygotes()]
        return found[kill.which % len(found)] if found else (0, "")

    def holders(self) -> list[int]:
        mark = os.fsencode(self.place)
        return [pid for pid, words in _processes() if b"dsec.backends.holder" in words and any(mark in word for word in words)]

    def zygotes(self) -> list[int]:
        """Children of the holders that are no sandbox."""
        holders = set(self.holders())
        return [pid for pid, words in _processes() if _parent(pid) in holders and words and words[0].endswith(b"launcher")]

    def agent(self, ulid: str) -> int:
        """The init of a sandbox; 0 when there is none."""
        for pid, _ in _processes():
            with contextlib.suppress(OSError):
                if ulid in Path(f"/proc/{pid}/cgroup").read_text() and _inner(pid) == 1:
                    return pid
        return 0

    # ------------------------------------------------------------------ what is there
    def kernel(self) -> set[str]:
        """Ulids that appear in the names of what the kernel has of this cluster."""
        names = self.census.snapshot()
        return {ulid for kind in ("cgroups", "mounts", "netns", "loops") for name in names[kind] for ulid in ULID.findall(name)}

    async def left(self, seconds: float) -> dict[str, list[str]]:
        """What has not gone since before the cluster; to be asked after its end."""
        return await asyncio.to_thread(self.census.left_since, self._before, seconds)


def _processes() -> list[tuple[int, list[bytes]]]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                found.append((int(entry), Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")))
    return found


def _parent(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat[stat.rindex(")") + 2 :].split()[1])


def _inner(pid: int) -> int:
    """Its number in its own pid namespace."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1])
