"""Many simulated Edges in one process, for placement at scale: real admission ledger and messages, no launch and no disk.

    python -m dsec.actors.simulate --url nats://… --edges 80 --first 0

Each answers `launch` as an Edge does (idempotent by burst and index, refusals that name their filter, news to the caller's inbox) and
heartbeats. Prints {"ready": "simulate", …} when all of them serve.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import random
import signal
import sys
import time
import uuid
from collections import deque

import msgspec

from dsec.actors import capacity
from dsec.bus import codec, subjects
from dsec.bus.bus import Bus, loop_name, run
from dsec.bus.messages import BurstNews, Heartbeat, LaunchReply, LaunchRequest, Placed, ReadyItem, Refusal
from dsec.bus.transport import Msg
from dsec.errors import Busy, DsecError, InvalidRequest, to_body
from dsec.model import GIB, new_ulid


class SimulatedEdge:
    """One Edge without sandboxes.

    Args:
        ready: it also says that each is ready, at once.
        lifetime: seconds after which each ends by itself; 0 = never.
        refuse: share of creates that it refuses although it has room, as a node does that is short of something unforeseen.
    """

    def __init__(
        self,
        bus: Bus,
        name: str,
        limits: capacity.Limits,
        *,
        backend: str = "fake",
        ready: bool = False,
        lifetime: float = 0.0,
        refuse: float = 0.0,
    ) -> None:
        self.bus = bus
        self.name = name
        self.backend = backend
        self.ready = ready
        self.ledger = capacity.Ledger(limits)
        self.incarnation = f"{uuid.uuid4().hex}.1"
        self.known: dict[tuple[str, str, str, int], str] = {}
        self.refused = 0
        self._lifetime, self._refuse = lifetime, refuse
        self._ends: deque[tuple[float, tuple[str, str, str, int], str]] = deque()
        self._random = random.Random(name)
        self._beats = 0

    async def start(self) -> None:
        await self.bus.subscribe_raw(subjects.edge(self.bus.unit, self.name, "launch"), self._on_launch)

    def _on_launch(self, msg: Msg) -> None:
        try:
            reply = self.launch(codec.decode(msg.data, LaunchRequest))
        except DsecError as error:
            self.bus.post(msg.reply, to_body(error))
            return
        self.bus.post(msg.reply, reply)

    def launch(self, request: LaunchRequest) -> LaunchReply:
        accepted: list[int] = []
        placed: list[Placed] = []
        refused: list[Refusal] = []
        demands = [capacity.demand(spec.resources, "tmpfs" if spec.disk_mode == "auto" else spec.disk_mode) for spec in request.specs]
        backends = [spec.backend for spec in request.specs]
        owner = (request.principal, request.project, request.burst)
        for item in request.items:
            key = (*owner, item.index)
            ulid = self.known.get(key)
            if ulid is None:
                if backends[item.spec] != self.backend:
                    error: DsecError = InvalidRequest("this node has no such backend", field="backend", value=backends[item.spec])
                    refused.append(Refusal(index=item.index, error=error.body(), filter="backend", final=True))
                    continue
                ulid = new_ulid()
                spared = not self._refuse or self._random.random() >= self._refuse
                refused_by = self.ledger.reserve(ulid, demands[item.spec]) if spared else "memory"
                if refused_by:
                    self.refused += 1
                    error = Busy(f"no room on {self.name}: {refused_by}", reason=refused_by)
                    refused.append(Refusal(index=item.index, error=error.body(), filter=refused_by))
                    continue
                self.known[key] = ulid
                if self._lifetime:
                    self._ends.append((time.monotonic() + self._lifetime, key, ulid))
            accepted.append(item.index)
            placed.append(Placed(index=item.index, ulid=ulid))
        if placed:
            news = tuple(ReadyItem(index=each.index, ulid=each.ulid) for each in placed) if self.ready else ()
            self.bus.post(request.inbox, BurstNews(burst=request.burst, edge=self.name, accepted=tuple(placed), ready=news))
        return LaunchReply(edge=self.name, accepted=tuple(accepted), refused=tuple(refused), load=self.ledger.load(0))

    def age(self) -> None:
        """End those whose time has come."""
        now = time.monotonic()
        while self._ends and self._ends[0][0] <= now:
            _, key, ulid = self._ends.popleft()
            self.ledger.release(ulid)
            self.ledger.free_disk(ulid)
            self.known.pop(key, None)

    def beat(self) -> None:
        self.age()
        self._beats += 1
        beat = Heartbeat(
            edge=self.name,
            incarnation=self.incarnation,
            n=self._beats,
            arch=platform.machine(),
            backends=(self.backend,),
            load=self.ledger.load(0),
            states={"running": len(self.ledger.held)},
            tmpfs_upper=True,
        )
        self.bus.post(subjects.heartbeat(self.bus.unit, self.name), beat)


async def simulate(args: argparse.Namespace) -> None:
    """Serve until SIGTERM."""
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, over.set)
    limits = capacity.Limits(memory=args.memory, cpus=args.cpus, slots=args.slots, pids=args.slots * 1024, starting=8)
    async with Bus.connect(args.url, name=f"simulate {args.first}", unit=args.unit) as bus:
        edges = [
            SimulatedEdge(bus, f"sim{n:04d}", limits, ready=args.ready, lifetime=args.lifetime, refuse=args.refuse)
            for n in range(args.first, args.first + args.edges)
        ]
        for edge in edges:
            await edge.start()
        await bus.flush()
        for edge in edges:
            edge.beat()
        await bus.flush()
        sys.stdout.write(msgspec.json.encode({"ready": "simulate", "edges": len(edges), "loop": loop_name()}).decode() + "\n")
        sys.stdout.flush()
        while not over.is_set():
            try:
                async with asyncio.timeout(1.0):
                    await over.wait()
            except TimeoutError:
                for edge in edges:
                    edge.beat()
    sys.stdout.write(msgspec.json.encode({"refused": sum(edge.refused for edge in edges)}).decode() + "\n")
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dsec.actors.simulate", description="simulated Edges for placement at scale")
    parser.add_argument("--url", required=True)
    parser.add_argument("--unit", default="main")
    parser.add_argument("--edges", type=int, default=80)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--slots", type=int, default=1_000)
    parser.add_argument("--memory", type=int, default=4096 * GIB)
    parser.add_argument("--cpus", type=float, default=4096.0)
    parser.add_argument("--lifetime", type=float, default=0.0, help="seconds after which each sandbox ends by itself; 0 = never")
    parser.add_argument("--refuse", type=float, default=0.0, help="share of creates that are refused although there is room")
    parser.add_argument("--ready", action="store_true", help="also say that each is ready, at once")
    run(simulate(parser.parse_args(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
