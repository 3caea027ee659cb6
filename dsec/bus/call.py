"""Requests: typed messages out, typed messages or typed errors back, with the remaining time and the request's id in headers.

An error answer carries NATS's service headers (``Nats-Service-Error-Code``, ``Nats-Service-Error``; ADR-32), so that `nats req` and
`nats service stats` understand it, and an `ErrorBody` as payload, which becomes the same `DsecError` at the caller.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from dsec.bus import codec
from dsec.bus.transport import Headers, Msg, Transport
from dsec.errors import Busy, DeadlineExceeded, Denied, DsecError, ErrorBody, InvalidRequest, Unavailable, from_body
from dsec.model import new_ulid

T = TypeVar("T")

REQUEST_ID = "Dsec-Request-Id"
DEADLINE = "Dsec-Deadline-Ms"  # remaining milliseconds when it was sent
TRACE = "traceparent"
ERROR_CODE = "Nats-Service-Error-Code"
ERROR_TEXT = "Nats-Service-Error"

# What HTTP would say: `nats` shows it, our own callers read ErrorBody.code.
STATUS = {
    "invalid": "400", "denied": "403", "not_found": "404", "conflict": "409", "gone": "410", "sandbox": "422", "burst": "424",
    "busy": "429", "error": "500", "node": "500", "unsupported": "501", "unavailable": "503", "deadline": "504",
}  # fmt: skip

FIRST_WAIT, LONGEST_WAIT = 0.05, 1.0  # seconds between attempts, before full jitter


def request_headers(
    *, request_id: str | None, timeout: float | None, traceparent: str | None, extra: Headers | None = None
) -> dict[str, str]:
    headers = dict(extra) if extra else {}
    if request_id:
        headers[REQUEST_ID] = request_id
    if timeout is not None:
        headers[DEADLINE] = str(max(1, int(timeout * 1000)))
    if traceparent:
        headers[TRACE] = traceparent
    return headers


def error_headers(body: ErrorBody) -> dict[str, str]:
    text = " ".join(body.message.split())
    return {ERROR_CODE: STATUS.get(body.code, "500"), ERROR_TEXT: text[:300]}


def read_reply(msg: Msg, reply_type: type[T]) -> T:
    """The answer's message; raises the peer's error, or `InvalidRequest` for an answer that is not of ``reply_type``."""
    raise_error(msg)
    if msg.status == "503" and not msg.data:
        fix = "see that the cluster runs: `dsec node ls`, `dsec bus ls`"
        raise Unavailable("nobody serves this subject", field="subject", value=msg.subject, reason="no_responders", fix=fix)
    return codec.decode(msg.data, reply_type)


def raise_error(msg: Msg) -> None:
    """Raises the error that an answer carries, if it carries one."""
    headers = msg.headers
    code = headers.get(ERROR_CODE)
    if code is None:
        return
    try:
        body = codec.decode(msg.data, ErrorBody)
    except InvalidRequest:  # a foreign service: all there is, is in the headers
        body = ErrorBody(code="error", message=headers.get(ERROR_TEXT, "") or f"error {code}", reason=code)
    raise from_body(body)


def may_repeat(error: DsecError) -> bool:
    """Whether the same request may be sent again under the same id: it was refused, never arrived, or its outcome is unknown."""
    return isinstance(error, Unavailable | Busy | DeadlineExceeded) and error.retryable


class Asked(Generic[T]):
    """As `call` of one attempt, and the request is on its way as soon as this is made; await it for the answer. Raises at once what keeps
    it from being sent."""

    __slots__ = ("_future", "_reply_type", "_subject", "_timeout")

    def __init__(self, transport: Transport, subject: str, message: Any, reply_type: type[T], *, timeout: float) -> None:
        data = codec.encode(message, limit=transport.max_payload)
        headers = request_headers(request_id=None, timeout=timeout, traceparent=None)
        self._future = transport.request_nowait(subject, data, headers=headers)
        self._subject, self._reply_type, self._timeout = subject, reply_type, timeout

    def __await__(self) -> Generator[Any, None, T]:
        return read_reply((yield from within(self._future, self._timeout, self._subject).__await__()), self._reply_type)


async def within(future: asyncio.Future[Msg], timeout: float, subject: str) -> Msg:
    """The future's result, or `DeadlineExceeded`. A plain timer: `asyncio.wait_for` costs three times as much here."""
    loop = asyncio.get_running_loop()

    def late() -> None:
        if not future.done():
            future.set_exception(DeadlineExceeded(f"no answer within {timeout:.3f} s", field="subject", value=subject))

    handle = loop.call_later(max(0.0, timeout), late)
    try:
        return await future
    finally:
        handle.cancel()


async def call(
    transport: Transport,
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
    """Send ``message``, return the answer.

    Args:
        timeout: seconds for everything, waiting for a connection and retries included; the peer is told what remains.
        request_id: the idempotency key. Made here when ``retries`` is above 0.
        retries: how often to repeat, under the same id, after `Unavailable`, `Busy` or an attempt's time-out. Leave it 0 unless the
            server side is idempotent by request id (or by nature): after a broken connection the first attempt may have been done.
        attempt_timeout: seconds that one attempt may take before it is repeated.

    Raises: the peer's error; `Unavailable` (nobody serves it, or the bus is away), `DeadlineExceeded` (outcome unknown).
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout
    data = codec.encode(message, limit=transport.max_payload)
    if retries and request_id is None:
        request_id = new_ulid()
    attempt = 0
    while True:
        left = end - loop.time()
        if left <= 0:
            fix = "it may have happened: look before it is asked for anew"
            raise DeadlineExceeded(f"no answer within {timeout:.3f} s", field="subject", value=subject, fix=fix)
        wait = left if attempt_timeout is None or attempt >= retries else min(left, attempt_timeout)
        sent = request_headers(request_id=request_id, timeout=left, traceparent=traceparent, extra=headers)
        try:
            return read_reply(await transport.request(subject, data, timeout=wait, headers=sent), reply_type)
        except DsecError as error:
            attempt += 1
            if attempt > retries or not may_repeat(error):
                raise
            pause = random.uniform(0, min(LONGEST_WAIT, FIRST_WAIT * 2**attempt))
            if loop.time() + pause >= end:
                raise
        await asyncio.sleep(pause)


async def scatter(
    transport: Transport,
    subject: str,
    message: Any,
    reply_type: type[T],
    *,
    timeout: float,
    expect: int | Callable[[T], bool] | None = None,
    request_id: str | None = None,
    traceparent: str | None = None,
    headers: Headers | None = None,
    again: float = 0.0,
) -> tuple[list[T], list[DsecError]]:
    """One request to everyone who subscribes; the answers and the errors that came within ``timeout`` seconds.

    Args:
        expect: stop early after this many answers, or when this says True of an answer; None waits for the whole time.
        again: ask once more after so many seconds, after twice as many, and so on: who was away for a moment has not heard it and answers
            then; others may answer twice. 0 = never.

    Without ``again``, nobody subscribing gives two empty lists at once; a server that forbids it one `Denied`. Who stayed silent is for the
    caller to say (it knows whom it expected).
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout
    await transport.wait_connected(timeout)
    answers: list[T] = []
    errors: list[DsecError] = []
    done = loop.create_future()

    def finish() -> None:
        if not done.done():
            done.set_result(None)

    def on_answer(msg: Msg) -> None:
        if done.done():
            return
        if msg.status == "503" and not msg.data:
            if not again:
                finish()
            return
        try:
            answer = read_reply(msg, reply_type)
        except DsecError as error:
            errors.append(error)
        else:
            answers.append(answer)
            if callable(expect) and expect(answer):
                finish()
        if isinstance(expect, int) and len(answers) + len(errors) >= expect:
            finish()

    def on_event(what: str, detail: str) -> None:
        if what == "denied" and f'"{subject.lower()}"' in detail.lower():
            errors.append(Denied("the server forbids publishing to this subject", field="subject", value=subject))
            finish()

    inbox = transport.new_inbox()
    subscription = await transport.subscribe_raw(inbox, on_answer)
    timer = loop.call_later(max(0.0, end - loop.time()), finish)
    transport.events.listeners.append(on_event)
    data = codec.encode(message, limit=transport.max_payload)
    pause = again
    try:
        while not done.done():
            sent = request_headers(request_id=request_id, timeout=end - loop.time(), traceparent=traceparent, extra=headers)
            transport.post(subject, data, reply=inbox, headers=sent)
            await asyncio.wait((done,), timeout=pause or None)
            pause *= 2
    finally:
        timer.cancel()
        transport.events.listeners.remove(on_event)
        await subscription.unsubscribe()
    return answers, errors
