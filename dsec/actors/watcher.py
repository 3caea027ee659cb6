"""The Watcher: hears heartbeats, publishes the cluster view, declares silent nodes lost by a fence record. Holds nothing durable."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import structlog

from dsec.actors.cluster import Cluster
from dsec.actors.fence import Fences
from dsec.actors.outbox import EventSink
from dsec.bus import subjects
from dsec.bus.actor import Context, Route, Verb
from dsec.bus.bus import Bus
from dsec.bus.messages import ClusterView, Empty, Event, Heartbeat, Message
from dsec.bus.subjects import Caller
from dsec.bus.transport import Msg
from dsec.config import WatcherConfig
from dsec.errors import DsecError
from dsec.model import new_ulid

log = structlog.get_logger("dsec.watcher")
FIRST_ANSWERS = 0.5  # seconds for the Edges that live to say so when it begins
FIRST_BEATS = 2.0  # seconds in which every node that lives is heard (heartbeats come at 1 Hz)


class Watcher:
    """One instance; several may run, each publishes its own view and the first fence record wins. ``fences`` None: none is ever lost."""

    def __init__(self, bus: Bus, config: WatcherConfig, fences: Fences | None, events: EventSink) -> None:
        self.bus = bus
        self.config = config
        self.name = config.name or f"watcher-{new_ulid()[-8:]}"
        self.cluster = Cluster(lost_after=config.lost_after_ms / 1000, vanish_share=config.vanish_share, forget=config.forget_ms / 1000)
        self._fences = fences
        self._events = events
        self._soon: asyncio.Handle | None = None
        self._away = False
        self._vanished = False
        self._n = 0
        self._began = 0.0
        self._greeted = False
        self._tasks: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        now = self._began = asyncio.get_running_loop().time()
        if self._fences is not None:
            async for edge, incarnation in self._fences.nodes():
                self.cluster.expect(edge, incarnation, now)
        self.bus.events.listeners.append(self._on_bus)
        await self.bus.subscribe(subjects.heartbeat_all(self.bus.unit), Heartbeat, self._on_beat)
        view = Verb(name="view", request=Empty, reply=ClusterView, handler=self._on_request)
        await self.bus.serve(
            "dsec-watcher",
            Route(
                subject=subjects.api_all(self.bus.unit, "view"),
                verbs=(view,),
                verb_of=lambda subject: subject.split(".")[4],
                caller_of=subjects.api_caller,
                queue="watchers",
            ),
            description="knows the nodes and declares lost ones",
            metadata={"instance": self.name},
        )
        self._tasks = [asyncio.create_task(work) for work in (self._greet(), self._publish(), self._judge())]
        log.info("watcher.ready", name=self.name, expected=len(self.cluster.nodes))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._events.close()

    # ------------------------------------------------------------------ hearing and telling
    async def _greet(self) -> None:
        """Ask who is there. Heartbeats come once a second: a view told before all were heard would leave some nodes out."""
        try:
            subject = subjects.everyone(self.bus.unit, "beat", Caller("watcher", "default"))
            beats, _ = await self.bus.scatter(subject, Empty(), Heartbeat, timeout=FIRST_ANSWERS)
            for beat in beats:
                self._on_beat(beat, None)
        except DsecError as error:
            log.warning("watcher.not_greeted", error=str(error))  # heartbeats will tell
        finally:
            self._greeted = True
        self._tell()

    def _on_beat(self, beat: Heartbeat, _msg: Msg | None) -> None:
        loop = asyncio.get_running_loop()
        if self.cluster.behind_fence(beat):  # it may never have noticed that nobody heard it
            self._post(subjects.edge(self.bus.unit, beat.edge, "doubt"), Empty())
            return
        if beat.leaving:
            changed = self.cluster.leave(beat.edge, beat.incarnation)
        else:
            known = beat.edge in self.cluster.nodes and self.cluster.nodes[beat.edge].incarnation == beat.incarnation
            changed = self.cluster.hear(beat, loop.time())
            if changed and not known:
                self._emit("node_up", beat.edge, beat.incarnation)
        if changed and self._soon is None:
            self._soon = loop.call_soon(self._tell)

    def _on_request(self, _context: Context, _request: Empty) -> ClusterView:
        return self.cluster.view(self.name, asyncio.get_running_loop().time())

    def _on_bus(self, what: str, _detail: str) -> None:
        if what == "disconnected":
            self._away = True
        elif what == "reconnected":
            # Silence while we heard nothing proves nothing: all clocks begin anew.
            now = asyncio.get_running_loop().time()
            for seen in self.cluster.nodes.values():
                seen.at = now
            self._away = False

    def _tell(self) -> None:
        self._soon = None
        now = asyncio.get_running_loop().time()
        # One that has heard nobody yet knows nothing, which is not to know that there is nobody.
        if not self.bus.connected or not self._greeted or (not self.cluster.nodes and now < self._began + FIRST_BEATS):
            return
        self._post(subjects.view(self.bus.unit), self.cluster.view(self.name, now))

    def _post(self, subject: str, message: Message) -> None:
        try:
            self.bus.post(subject, message)
        except DsecError as error:
            log.warning("watcher.not_told", subject=subject, error=str(error))

    async def _publish(self) -> None:
        while True:
            self._tell()
            await asyncio.sleep(self.config.publish_ms / 1000)

    # ------------------------------------------------------------------ judging
    async def _judge(self) -> None:
        loop = asyncio.get_running_loop()
        period = min(1.0, self.config.lost_after_ms / 4000)
        while True:
            await asyncio.sleep(period)
            now = loop.time()
            self.cluster.forget_old(now)
            if self._away or self._fences is None:
                continue
            silent, vanished = self.cluster.silent(now)
            if vanished and not self._vanished:
                log.error("watcher.many_silent", nodes=len(self.cluster.nodes), text="too many fell silent together: none is declared lost")
            self._vanished = vanished
            for seen in silent:
                try:
                    outcome = await self._fences.lose(seen.edge, seen.incarnation)
                    if outcome == "won":
                        await self._fences.forget(seen.edge, seen.incarnation)
                except DsecError as error:
                    log.warning("watcher.fence_unwritten", edge=seen.edge, error=str(error))
                    break  # without the record it is not lost; asked again in the next round
                if outcome == "other":
                    self.cluster.leave(seen.edge, seen.incarnation)  # its successor will be heard
                elif self.cluster.lose(seen.edge, seen.incarnation, loop.time()):
                    log.error("watcher.node_lost", edge=seen.edge, incarnation=seen.incarnation)
                    if outcome == "won":
                        self._emit("node_lost", seen.edge, seen.incarnation)
                    self._tell()

    def _emit(self, kind: str, edge: str, incarnation: str) -> None:
        self._n += 1
        self._events.post(
            Event(
                kind=kind,
                edge=edge,
                # Its own order, not the node's: these events are the Watcher's.
                incarnation=f"{self.name}",
                n=self._n,
                wall_ts=time.time(),
                mono_ns=time.monotonic_ns(),
                detail={"incarnation": incarnation, "watcher": self.name},
            )
        )
