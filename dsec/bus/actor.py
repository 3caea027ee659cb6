"""Actors on the bus: services whose verbs are typed handlers, and mailboxes.

Each request runs in a task of its own (nats-py would run one subscription's handlers one after another); the number of
running ones is bounded, and the request above the bound is answered `Busy` at once instead of queueing without an end.
"""

from __future__ import annotations

import asyncio
import functools
import re
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from dsec import __version__
from dsec.bus import call, codec
from dsec.bus.idempotency import Idempotency, Key
from dsec.bus.subjects import Caller, head_job, is_reply
from dsec.bus.transport import Msg, Subscription, log
from dsec.errors import Busy, DeadlineExceeded, Denied, DsecError, InvalidRequest, NotFound, to_body

if TYPE_CHECKING:
    from dsec.bus.bus import Bus

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9_-]+")  # ADR-32
JOBS, JOB = 2, 8  # parts of what may run at one time: a half for jobs together, an eighth for each; the rest is for whoever made them


class Context:
    """What a handler knows of its request besides the message.

    ``deadline`` is on the loop's clock, None when the caller stated none; ``json`` says that a person asked.
    """

    __slots__ = ("caller", "deadline", "json", "msg", "request_id", "traceparent", "verb")

    def __init__(
        self, msg: Msg, verb: str, caller: Caller | None, deadline: float | None, json: bool, request_id: str, traceparent: str
    ) -> None:
        self.msg = msg
        self.verb = verb
        self.caller = caller
        self.deadline = deadline
        self.json = json
        self.request_id = request_id
        self.traceparent = traceparent

    @property
    def subject(self) -> str:
        return self.msg.subject

    @property
    def reply(self) -> str:
        return self.msg.reply

    @property
    def headers(self) -> Mapping[str, str]:
        return self.msg.headers

    def remaining(self, default: float | None = None) -> float | None:
        """Seconds until the deadline (never below 0); ``default`` when there is none."""
        if self.deadline is None:
            return default
        return max(0.0, self.deadline - asyncio.get_running_loop().time())


Handler = Callable[[Context, Any], Any]  # async def or def; a plain def runs in the reader and must be quick


class Verb(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that can be asked. ``handler(context, request) -> reply``; a reply of None answers an empty map.

    ``idempotent`` runs it once per request id; `Idempotency` states for how long.
    """

    name: str
    request: Any
    handler: Handler
    reply: Any = None
    idempotent: bool = False


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """A subscription and the verbs behind it.

    ``verb_of(subject)`` names the verb; ``caller_of(subject)`` says who asks. ``queue`` "" = every instance gets each request.
    """

    subject: str
    verbs: tuple[Verb, ...]
    verb_of: Callable[[str], str]
    caller_of: Callable[[str], Caller] | None = None
    queue: str = ""


class Stats:
    """Of one verb, as the micro protocol reports them; times in nanoseconds."""

    __slots__ = ("errors", "last_error", "nanos", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.errors = 0
        self.nanos = 0
        self.last_error = ""


class Service:
    """Routes with their running requests. Made by `Bus.serve`; also shown by ``nats service ls|info|stats`` (see `micro`)."""

    def __init__(
        self,
        bus: Bus,
        name: str,
        routes: tuple[Route, ...],
        *,
        version: str = __version__,
        description: str = "",
        metadata: Mapping[str, str] | None = None,
        limit: int = 4096,
        idempotency: Idempotency | None = None,
    ) -> None:
        if not _NAME.fullmatch(name):
            raise InvalidRequest("not a usable service name", field="name", value=name, fix="use A-Z a-z 0-9 _ -")
        for verb in (verb for route in routes for verb in route.verbs):
            if verb.idempotent and not asyncio.iscoroutinefunction(verb.handler):
                raise InvalidRequest("an idempotent verb needs an async handler", field=f"verbs.{verb.name}")
        self.bus = bus
        self.name = name
        self.version = version
        self.description = description
        self.metadata = dict(metadata or {})
        self.routes = routes
        self.limit = limit
        self.idempotency = idempotency or Idempotency()
        self.stats: dict[tuple[str, str], Stats] = {(route.subject, verb.name): Stats() for route in routes for verb in route.verbs}
        self.running: set[asyncio.Task[None]] = set()
        self._jobs: Counter[str] = Counter()  # of those, the jobs'
        self._subscriptions: list[Subscription] = []
        self._stopping = False

    async def start(self) -> None:
        """Subscribe. Raises `Denied` when the server's permissions forbid one of the subjects."""
        from dsec.bus.micro import micro_routes

        transport = self.bus.transport
        try:
            for route in self.routes:
                self._subscriptions.append(await transport.subscribe_raw(route.subject, self._receiver(route), queue=route.queue))
            for subject, callback in micro_routes(self):
                self._subscriptions.append(await transport.subscribe_raw(subject, callback))
            await transport.flush()
            for subscription in self._subscriptions:
                denied = getattr(subscription, "denied", "")
                if denied and not subscription.subject.startswith("$SRV"):
                    raise Denied(
                        "the server forbids subscribing",
                        field="subject",
                        value=subscription.subject,
                        fix="see the permissions of this user",
                    )
        except BaseException:
            await self.stop(grace=0)
            raise

    async def stop(self, grace: float = 10.0) -> int:
        """Stop accepting, wait up to ``grace`` seconds for running requests, cancel the rest. Returns how many were cancelled."""
        self._stopping = True
        subscriptions, self._subscriptions = self._subscriptions, []
        await asyncio.gather(*(subscription.drain() for subscription in subscriptions), return_exceptions=True)
        running = self.running - {asyncio.current_task()}
        if running and grace > 0:
            await asyncio.wait(running, timeout=grace)
        late = [task for task in running if not task.done()]
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        return len(late)

    # ------------------------------------------------------------------ one request
    def _receiver(self, route: Route) -> Callable[[Msg], None]:
        table = {verb.name: (verb, asyncio.iscoroutinefunction(verb.handler), self.stats[route.subject, verb.name]) for verb in route.verbs}

        def receive(msg: Msg) -> None:
            self._receive(route, table, msg)

        return receive

    def _receive(self, route: Route, table: Mapping[str, tuple[Verb, bool, Stats]], msg: Msg) -> None:
        if msg.reply and not is_reply(msg.reply):
            log.warning("bus.reply_refused", service=self.name, subject=msg.subject, reply=msg.reply[:200])
            return
        started = time.perf_counter_ns()
        json = codec.is_json(msg.data)
        stats: Stats | None = None
        try:
            name = route.verb_of(msg.subject)
            found = table.get(name)
            if found is None:
                raise NotFound("no such verb", field="verb", value=name, fix="one of: " + " ".join(sorted(table)))
            verb, takes_time, stats = found
            stats.requests += 1
            context = self._context(route, name, msg, json)
            if context.deadline is not None and context.deadline <= asyncio.get_running_loop().time():
                raise DeadlineExceeded("the deadline had passed on arrival")
            request = codec.decode(msg.data, verb.request)
            if takes_time:
                job = head_job(context.caller.principal) if context.caller is not None else ""
                self._check_room(job)
                task = asyncio.get_running_loop().create_task(self._run(verb, context, request, stats, started))
                self.running.add(task)
                self._jobs.update((job,) if job else ())
                task.add_done_callback(functools.partial(self._ended, job) if job else self.running.discard)
            else:
                self._answer(msg, verb.handler(context, request), json)
                stats.nanos += time.perf_counter_ns() - started
        except Exception as error:  # noqa: BLE001 - a handler may raise anything; it becomes an answer, a count and a log line
            self._fail(msg, error, json, stats, started)

    def _check_room(self, job: str) -> None:
        """Jobs, which strangers may control, can wait for as much as they like and take nobody else's place. Raises `Busy`."""
        if len(self.running) >= self.limit:
            raise Busy(f"{self.limit} requests are running", reason="concurrency", fix="try again a little later")
        if job and (self._jobs[job] >= self.limit // JOB or self._jobs.total() >= self.limit // JOBS):
            raise Busy(f"{self._jobs[job]} requests of this job are running", reason="concurrency", fix="wait for some of them")

    def _ended(self, job: str, task: asyncio.Task[None]) -> None:
        self.running.discard(task)
        self._jobs[job] -= 1
        if not self._jobs[job]:
            del self._jobs[job]

    def _context(self, route: Route, verb: str, msg: Msg, json: bool) -> Context:
        headers = msg.headers
        left = headers.get(call.DEADLINE, "")
        deadline = asyncio.get_running_loop().time() + int(left) / 1000 if left.isascii() and left.isdigit() and len(left) < 16 else None
        caller = route.caller_of(msg.subject) if route.caller_of else None
        return Context(msg, verb, caller, deadline, json, headers.get(call.REQUEST_ID, ""), headers.get(call.TRACE, ""))

    async def _run(self, verb: Verb, context: Context, request: Any, stats: Stats, started: int) -> None:
        msg = context.msg
        try:
            if verb.idempotent and context.request_id:
                caller = context.caller or Caller("", "")
                key = Key(caller.project, caller.principal, verb.name, context.request_id)
                body = msg.subject.encode() + b"\0" + msg.data
                reply = await self.idempotency.run(key, body, lambda: verb.handler(context, request))
            else:
                reply = await verb.handler(context, request)
            self._answer(msg, reply, context.json)
            stats.nanos += time.perf_counter_ns() - started
        except asyncio.CancelledError:
            self._fail(msg, Busy("this actor is stopping", reason="stopping", retryable=True), context.json, stats, started)
            raise
        except Exception as error:  # noqa: BLE001 - a handler may raise anything; it becomes an answer, a count and a log line
            self._fail(msg, error, context.json, stats, started)

    def _answer(self, msg: Msg, reply: Any, json: bool) -> None:
        if msg.reply:
            data = codec.encode({} if reply is None else reply, json=json, limit=self.bus.transport.max_payload)
            self.bus.transport.post(msg.reply, data)

    def _fail(self, msg: Msg, error: BaseException, json: bool, stats: Stats | None, started: int) -> None:
        body = to_body(error)
        if stats is not None:
            stats.errors += 1
            stats.nanos += time.perf_counter_ns() - started
            stats.last_error = f"{call.STATUS.get(body.code, '500')}:{body.message}"[:300]
        if not isinstance(error, DsecError):
            log.error("bus.handler_failed", service=self.name, subject=msg.subject, error=repr(error), exc_info=error)
        if not msg.reply:
            return
        try:
            self.bus.transport.post(msg.reply, codec.encode(body, json=json), headers=call.error_headers(body))
        except DsecError as failure:  # the bus is away as well: the caller's time-out will tell it
            log.warning("bus.answer_lost", service=self.name, subject=msg.subject, error=str(failure))


class Mailbox:
    """Runs what is put in, one after another, in order. Holds a task only while it is not empty, so idle ones cost no loop time."""

    __slots__ = ("_queue", "_task")

    def __init__(self) -> None:
        self._queue: deque[tuple[Callable[[], Awaitable[Any]], asyncio.Future[Any]]] = deque()
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def idle(self) -> bool:
        return self._task is None

    def put(self, do: Callable[[], Awaitable[T]]) -> asyncio.Future[T]:
        """Queue ``do``; the future is its outcome. Cancelling the future before its turn takes it out; later it runs to its end."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._queue.append((do, future))
        if self._task is None:
            self._task = loop.create_task(self._drain())
        return future

    async def run(self, do: Callable[[], Awaitable[T]]) -> T:
        return await self.put(do)

    async def _drain(self) -> None:
        try:
            while self._queue:
                do, future = self._queue.popleft()
                if future.done():
                    continue
                try:
                    result = await do()
                except asyncio.CancelledError:
                    future.cancel()
                    task = asyncio.current_task()
                    if task is None or task.cancelling():  # else it was the work that was cancelled, not the mailbox
                        raise
                except Exception as error:  # noqa: BLE001 - a handler may raise anything; it becomes an answer, a count and a log line
                    if not future.done():
                        future.set_exception(error)
                else:
                    if not future.done():
                        future.set_result(result)
        finally:
            self._task = None
            if self._queue:  # cancelled from outside: nobody will run the rest
                for _, future in self._queue:
                    future.cancel()
                self._queue.clear()
