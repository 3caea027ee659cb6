"""How libdsec speaks: typed requests over the bus, repeated with jitter while nobody answers, and scatter-gather."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol, TypeVar

import structlog

from dsec.bus import call, codec, subjects
from dsec.bus.bus import Bus
from dsec.bus.incarnations import Incarnations
from dsec.bus.messages import ClusterView
from dsec.bus.subjects import Caller
from dsec.bus.transport import Msg, Subscription, Transport
from dsec.errors import Busy, DeadlineExceeded, DsecError, InvalidRequest, Unavailable
from libdsec.logs import use_logging

T = TypeVar("T")


class FromEdge(Protocol):
    """An answer that names the Edge it is from."""

    @property
    def edge(self) -> str: ...


E = TypeVar("E", bound=FromEdge)

SILENCE = 10.0  # seconds that a request whose own time is longer still waits for somebody to be there
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
LATE_MS = 3_000  # a node beats once a second
AGAIN = 1.0  # seconds after which nodes that have not answered are asked once more: they may have been away for a moment
AGAIN_ALL = 0.2  # seconds between two questions to all of them
SOON = 0.3  # seconds after which a request without an answer looks whether its Edge is still the one that was asked


class Views:
    """The newest of the views that the Watcher publishes a few times a second."""

    STALE = 3.0  # seconds after which a view is no news any more

    def __init__(self, incarnations: Incarnations) -> None:
        self._incarnations = incarnations
        self._newest: ClusterView | None = None
        self._came = float("-inf")
        self._complained = float("-inf")
        self._news = asyncio.Event()

    def take(self, msg: Msg) -> None:
        try:
            self._newest = codec.decode(msg.data, ClusterView)
        except DsecError as error:
            now = asyncio.get_running_loop().time()
            if now - self._complained > self.STALE:  # a flood of them is told once in a while
                self._complained = now
                structlog.get_logger("libdsec").error("client.bad_view", error=str(error))
            return
        self._came = asyncio.get_running_loop().time()
        self._news.set()
        for node in self._newest.nodes:
            self._incarnations.hear(node.edge, node.incarnation)

    async def latest(self, timeout: float) -> ClusterView | None:
        if asyncio.get_running_loop().time() - self._came > self.STALE:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), timeout)
            except TimeoutError:
                return None
        return self._newest


class Wire:
    """A control connection, a bulk connection made when it is first needed, and who we are.

    Belongs to the loop and the process that opened it; `guard` says so clearly when it is used elsewhere.
    """

    def __init__(self, url: str, options: Mapping[str, Any], unit: str, caller: Caller) -> None:
        self.url = url
        self.options = dict(options)
        self.unit = unit
        self.caller = caller
        self.log = structlog.get_logger("libdsec")
        self.on_reconnect: list[Callable[[], None]] = []
        self._transport: Transport | None = None
        self._bus: Bus | None = None
        self._views: Views | None = None
        self._following: asyncio.Future[Subscription] | None = None
        self._incarnations = Incarnations()
        self._bulk: Transport | None = None
        self._opening: asyncio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._closed = False

    # ------------------------------------------------------------------ connection
    async def open(self) -> None:
        if self._transport is not None:
            raise InvalidRequest("this client is open already", fix="use one `async with libdsec.connect(…)` a client")
        use_logging()
        self._loop, self._pid, self._closed = asyncio.get_running_loop(), os.getpid(), False
        self._opening = asyncio.Lock()
        self._bus = await Bus.connect(self.url, unit=self.unit, **self.options)
        self._transport = self._bus.transport
        self._transport.events.listeners.append(self._on_event)

    async def close(self, timeout: float = 5.0) -> None:
        self._closed = True
        transports, self._transport, self._bulk, self._views = [self._bulk, self._transport], None, None, None
        for transport in transports:
            if transport is not None:
                await transport.close(timeout)

    @property
    def closed(self) -> bool:
        return self._closed or self._transport is None

    def _on_event(self, what: str, _detail: str) -> None:
        if what == "reconnected":
            for listener in list(self.on_reconnect):
                listener()

    def guard(self) -> Transport:
        """The control connection; raises `InvalidRequest` that names the fix when this is not its process or its loop."""
        if self._pid and self._pid != os.getpid():
            fix = "call libdsec.connect() again in the new process; attach(id) takes sandboxes up there"
            raise InvalidRequest("this client was opened before a fork", fix=fix)
        if self._transport is None:
            state = "closed" if self._closed else "not open"
            raise InvalidRequest(f"this client is {state}", fix="use it inside `async with libdsec.connect(…) as client`")
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is not self._loop:
            raise InvalidRequest(
                "this client belongs to another event loop",
                fix="connect() once in each loop, or use libdsec.blocking from plain threads",
            )
        return self._transport

    @property
    def bus(self) -> Bus:
        """The control connection, as dsec.bus speaks of it."""
        self.guard()
        assert self._bus is not None
        return self._bus

    async def bulk(self) -> Transport:
        """The connection for output and files, so that they never delay control."""
        self.guard()
        assert self._opening is not None
        async with self._opening:
            if self._bulk is None:
                self._bulk = (await Bus.connect(self.url, unit=self.unit, bulk=True, **self.options)).transport
                self._bulk.events.listeners.append(self._on_event)
            return self._bulk

    # ------------------------------------------------------------------ requests
    async def ask(self, subject: str, message: Any, type_: type[T], *, timeout: float, transport: Transport | None = None) -> T:
        """One request, one answer. Raises what the peer raised, `Unavailable` or `DeadlineExceeded`."""
        return await call.call(transport or self.guard(), subject, message, type_, timeout=timeout)

    async def ask_edge(
        self, edge: str, subject: str, message: Any, type_: type[T], *, timeout: float, transport: Transport | None = None
    ) -> T:
        """`ask` of that Edge. When it dies and is started again meanwhile its answer never comes: then the request ends as soon as the
        Watcher has seen the new one, with `Unavailable` (reason ``restarted``), and may be repeated if it may be repeated at all."""
        timer = asyncio.get_running_loop().call_later(SOON, self._watch_nodes) if self._views is None else None
        try:
            return await self._incarnations.ask((edge,), self.ask(subject, message, type_, timeout=timeout, transport=transport))
        finally:
            if timer is not None:
                timer.cancel()

    def _watch_nodes(self) -> None:
        """A request takes longer: from now on the views are heard."""
        if not self.closed:
            self._follow()

    async def ask_again(
        self,
        subject: str,
        message: Any,
        type_: type[T],
        *,
        timeout: float,
        each: float = 5.0,
        silence: float | None = None,
        transport: Transport | None = None,
        what: str = "",
        edge: str = "",
    ) -> T:
        """`ask`, repeated with jitter while nobody answers or all are busy. Only for requests that may be repeated.

        Args:
            timeout: seconds for all attempts together.
            each: seconds for one attempt.
            silence: seconds without any answer after which `Unavailable` is raised; None = `timeout`.
            what: what does not answer, for the error's text.
            edge: the Edge that is asked, if it is one: see `ask_edge`.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + min(timeout, timeout if silence is None else silence)
        pause = FIRST_PAUSE
        while True:
            wait = max(0.05, min(each, end - loop.time()))
            try:
                if edge:
                    return await self.ask_edge(edge, subject, message, type_, timeout=wait, transport=transport)
                return await self.ask(subject, message, type_, timeout=wait, transport=transport)
            except Busy:
                if loop.time() + pause >= end:
                    raise
            except (Unavailable, DeadlineExceeded) as error:
                if not is_silence(error):
                    raise
                if loop.time() + pause >= end:
                    raise unanswered(error, what) from error
            pause = await self.rest(edge, pause)

    async def rest(self, edge: str, pause: float) -> float:
        """Wait before a request is repeated, with jitter; the next pause, in seconds. As soon as an Edge that starts anew shows up, pauses
        are short again."""
        spread = asyncio.sleep(pause * random.uniform(0.5, 1.0))
        if not edge:
            await spread
        else:
            self._watch_nodes()
            try:
                await self._incarnations.ask((edge,), spread)
            except Unavailable:
                await asyncio.sleep(FIRST_PAUSE * random.random())
                return FIRST_PAUSE
        return min(pause * 2, LONGEST_PAUSE)

    def post(self, subject: str, message: Any, *, transport: Transport | None = None) -> None:
        (transport or self.guard()).post(subject, codec.encode(message))

    async def listen(self, subject: str, callback: Callable[[Msg], None], *, transport: Transport | None = None) -> Subscription:
        return await (transport or self.guard()).subscribe_raw(subject, callback)

    async def view(self, timeout: float = 1.5) -> ClusterView | None:
        """The Watcher's latest view of the cluster; None when none came in time. The first call waits for one, later ones do not."""
        return await self._follow().latest(timeout)

    def _follow(self) -> Views:
        self.guard()
        if self._views is None:
            self._views = Views(self._incarnations)
            self._following = asyncio.ensure_future(self.listen(subjects.view(self.unit), self._views.take))
        return self._views

    async def everyone(self, verb: str, message: Any, type_: type[E], *, timeout: float, below: bool = False) -> tuple[list[E], list[str]]:
        """Every Edge's answer, and the names of those that the Watcher knows and that stayed silent for ``timeout`` seconds.

        Raises the first error when nobody answered with anything else.
        """
        view = await self.view()
        known = {node.edge for node in view.nodes}.union(view.expected) - set(view.lost) if view is not None else None
        # Nobody waits for a node that has not been heard of for a while: it is named as silent, and its answer is still taken.
        late = {name for name, age in view.ages_ms.items() if age > LATE_MS} if view is not None else set()
        if known is not None and not known:
            return [], []
        heard: dict[str, E] = {}

        def complete(answer: E) -> bool:
            heard.setdefault(answer.edge, answer)
            return known is not None and heard.keys() >= known - late

        subject = subjects.everyone(self.unit, verb, self.caller, below=below)
        # Without a Watcher nobody knows how many there are: two seconds are enough for those that are well.
        wait = min(timeout, 2.0) if known is None or not known - late else timeout
        _, errors = await call.scatter(self.guard(), subject, message, type_, timeout=wait, expect=complete, again=AGAIN)
        if errors and not heard:
            raise errors[0]
        return list(heard.values()), sorted((known or set()) - heard.keys())

    async def until_all(
        self, verb: str, message: Any, type_: type[E], *, timeout: float, patience: float, below: bool = False
    ) -> AsyncIterator[tuple[list[E], list[str]]]:
        """`everyone`, asked again while a node stays silent, for ``patience`` seconds: it may be restarting."""
        loop = asyncio.get_running_loop()
        end = loop.time() + patience
        while True:
            replies, silent = await self.everyone(verb, message, type_, timeout=timeout, below=below)
            yield replies, silent
            if not silent or loop.time() > end:
                return
            await asyncio.sleep(AGAIN_ALL)


def is_silence(error: DsecError) -> bool:
    """Whether nobody answered, as opposed to somebody who answered with an error."""
    if isinstance(error, DeadlineExceeded):
        return error.field == "subject" or error.reason == "flush"
    return error.reason in ("no_responders", "disconnected", "restarted")


def unanswered(error: DsecError, what: str) -> Unavailable:
    who = what or "the service"
    if error.reason == "disconnected":
        return Unavailable(f"{who} cannot be reached: no connection to nats-server", reason="disconnected", fix="see that nats-server runs")
    fix = "see that the cluster runs: `dsec node ls`, or start one with `dsec up`"
    return Unavailable(f"{who} does not answer", reason=error.reason or "silent", fix=fix)
