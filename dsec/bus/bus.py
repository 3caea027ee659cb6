"""The facade that actors and clients hold: one connection with typed verbs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from dsec import __version__
from dsec.bus import call as calls
from dsec.bus import codec
from dsec.bus.actor import Route, Service
from dsec.bus.idempotency import Idempotency
from dsec.bus.transport import Events, Headers, Msg, RawCallback, Subscription, Transport
from dsec.errors import DsecError, InvalidRequest

T = TypeVar("T")


class Bus:
    """``async with Bus.connect(url, name="edge n1") as bus:`` or ``bus = await Bus.connect(url)``, then ``await bus.close()``.

    ``unit`` is the scale unit, the first token of every subject. An Edge holds two: control, and ``bulk=True`` for output and files,
    so that bulk never delays control.
    """

    def __init__(self, transport: Transport, *, unit: str = "main", bulk: bool = False) -> None:
        self.transport = transport
        self.unit = unit
        self.bulk = bulk
        self._services: list[Service] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    # ------------------------------------------------------------------ opening and closing
    @staticmethod
    def connect(
        url: str,
        *,
        name: str = "dsec",
        unit: str = "main",
        bulk: bool = False,
        creds: str = "",
        token: str = "",
        user: str = "",
        password: str = "",
        inbox: str = "",
        tls_ca: str = "",
        tls_cert: str = "",
        tls_key: str = "",
        tls_hostname: str = "",
        connect_timeout: float = 5.0,
        ping_interval: float = 10.0,
    ) -> Connecting:
        """Connect to nats-server.

        Args:
            url: ``nats://host:port``, several with commas; ``memory://name`` is the in-process broker (tests of logic only).
            name: shown in the server's monitoring; " bulk" is added to it for a bulk connection.
            creds: path or text of a .creds file.
            inbox: prefix of answer subjects; by default ``_INBOX.<user>``.
            connect_timeout: seconds to keep trying.
            ping_interval: seconds; a connection on which three in a row were not answered is dead, also when it seems open.

        Raises: `Unavailable`, `Denied`, `Unsupported` (server below 2.12), `InvalidRequest`.
        """

        async def open_() -> Bus:
            label = name + (" bulk" if bulk else "")
            if url.startswith("memory://"):
                from dsec.bus.memory import Broker

                return Bus(Broker.named(url[9:]).connect(label), unit=unit, bulk=bulk)
            from dsec.bus.nats_transport import NatsOptions, NatsTransport

            options = NatsOptions(
                name=label, creds=creds, token=token, user=user, password=password, inbox=inbox, tls_ca=tls_ca, tls_cert=tls_cert,
                tls_key=tls_key, tls_hostname=tls_hostname, connect_timeout=connect_timeout, ping_interval=ping_interval,
            )  # fmt: skip
            return Bus(await NatsTransport.connect(url, options), unit=unit, bulk=bulk)

        return Connecting(open_())

    async def close(self, timeout: float = 5.0) -> None:
        """Stop the services (up to ``timeout`` seconds for what runs), then drain the connection. Idempotent."""
        services, self._services = self._services, []
        await asyncio.gather(*(service.stop(timeout) for service in services))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.transport.close(timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    @property
    def events(self) -> Events:
        return self.transport.events

    @property
    def connected(self) -> bool:
        return self.transport.connected

    def new_inbox(self) -> str:
        return self.transport.new_inbox()

    async def flush(self, timeout: float = 10.0) -> None:
        await self.transport.flush(timeout)

    # ------------------------------------------------------------------ asking
    async def call(
        self,
        subject: str,
        message: Any,
        reply_type: type[T],
        *,
        timeout: float,
        request_id: str | None = None,
        traceparent: str | None = None,
        retries: int = 0,
        attempt_timeout: float | None = None,
        headers: Headers | None = None,
    ) -> T:
        """See `dsec.bus.call.call`."""
        return await calls.call(
            self.transport, subject, message, reply_type, timeout=timeout, request_id=request_id, traceparent=traceparent,
            retries=retries, attempt_timeout=attempt_timeout, headers=headers,
        )  # fmt: skip

    async def scatter(
        self,
        subject: str,
        message: Any,
        reply_type: type[T],
        *,
        timeout: float,
        expect: int | Callable[[T], bool] | None = None,
        request_id: str | None = None,
        headers: Headers | None = None,
    ) -> tuple[list[T], list[DsecError]]:
        """See `dsec.bus.call.scatter`."""
        return await calls.scatter(
            self.transport, subject, message, reply_type, timeout=timeout, expect=expect, request_id=request_id, headers=headers
        )

    def post(self, subject: str, message: Any, *, reply: str = "", headers: Headers | None = None) -> None:
        """Encode and append to the outgoing buffer, at once. Raises `InvalidRequest` (too large), `Unavailable` (long outage)."""
        self.transport.post(subject, codec.encode(message, limit=self.transport.max_payload), reply=reply, headers=headers)

    async def publish(self, subject: str, message: Any, *, reply: str = "", headers: Headers | None = None) -> None:
        """As `post`, but waits while much is unsent."""
        await self.transport.publish(subject, codec.encode(message, limit=self.transport.max_payload), reply=reply, headers=headers)

    # ------------------------------------------------------------------ serving
    async def subscribe_raw(self, subject: str, callback: RawCallback, *, queue: str = "") -> Subscription:
        """``callback(msg)`` from the reader, in order, without a task: quick and never blocking."""
        return await self.transport.subscribe_raw(subject, callback, queue=queue)

    async def subscribe(
        self,
        subject: str,
        type_: type[T],
        handler: Callable[[T, Msg], Any],
        *,
        queue: str = "",
        concurrency: int = 256,
    ) -> Subscription:
        """``handler(message, msg)`` for each message that decodes; what does not is counted (``error``) and left out.

        A plain function is called from the reader. A coroutine function runs in a task; with ``concurrency=1`` messages keep their
        order. Above ``concurrency`` running ones up to 64 Ki messages wait; beyond that they are dropped and counted (``slow_consumer``).
        """
        take: Callable[[T, Msg], None]
        if asyncio.iscoroutinefunction(handler):
            take = _Spawner(handler, concurrency, self._tasks, self.events, subject).take
        else:
            take = handler

        def receive(msg: Msg) -> None:
            try:
                message = codec.decode(msg.data, type_)
            except InvalidRequest as error:
                self.events.emit("error", f"{msg.subject}: {error}")
                return
            take(message, msg)

        return await self.transport.subscribe_raw(subject, receive, queue=queue)

    async def serve(
        self,
        name: str,
        *routes: Route,
        version: str = __version__,
        description: str = "",
        metadata: Mapping[str, str] | None = None,
        limit: int = 4096,
        idempotency: Idempotency | None = None,
    ) -> Service:
        """Serve ``routes`` as one NATS micro service; ``limit`` requests run at once. It stops with the bus, or by ``service.stop()``."""
        service = Service(
            self, name, routes, version=version, description=description, metadata=metadata, limit=limit, idempotency=idempotency
        )
        await service.start()
        self._services.append(service)
        return service


class Connecting:
    """Awaitable and async context manager over one connection."""

    def __init__(self, opening: Coroutine[Any, Any, Bus]) -> None:
        self._opening = opening
        self._bus: Bus | None = None

    def __await__(self) -> Generator[Any, None, Bus]:
        return self._opening.__await__()

    async def __aenter__(self) -> Bus:
        self._bus = await self._opening
        return self._bus

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bus is not None:
            await self._bus.close()


class _Spawner:
    """Bounded tasks for an async subscriber."""

    WAITING = 65_536

    def __init__(
        self, handler: Callable[[Any, Msg], Awaitable[Any]], concurrency: int, tasks: set[asyncio.Task[Any]], events: Events, subject: str
    ) -> None:
        self._handler = handler
        self._limit = concurrency
        self._tasks = tasks
        self._events = events
        self._subject = subject
        self._running = 0
        self._waiting: deque[tuple[Any, Msg]] = deque()

    def take(self, message: Any, msg: Msg) -> None:
        if self._running >= self._limit:
            if len(self._waiting) >= self.WAITING:
                self._events.emit("slow_consumer", f"{self._subject}: {self.WAITING} messages wait; one was dropped", level="error")
            else:
                self._waiting.append((message, msg))
            return
        self._running += 1
        task = asyncio.get_running_loop().create_task(self._work(message, msg))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, message: Any, msg: Msg) -> None:
        """One worker takes further messages while some wait: a burst costs ``concurrency`` tasks, not one per message."""
        try:
            while True:
                try:
                    await self._handler(message, msg)
                except Exception as error:  # noqa: BLE001 - a handler may raise anything; it becomes an answer, a count and a log line
                    self._events.emit("callback_error", f"{self._subject}: {error!r}", level="error")
                if not self._waiting:
                    return
                message, msg = self._waiting.popleft()
        finally:
            self._running -= 1


def loop_name() -> str:
    """The package of the loop that runs here: "uvloop", or "asyncio"."""
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` under uvloop; actors need it (half the CPU per message), a client without it gets asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
