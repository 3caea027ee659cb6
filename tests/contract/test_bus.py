"""What every transport owes, asked of the in-memory broker and of a real nats-server."""

from __future__ import annotations

import asyncio
import time

import pytest

from dsec import errors
from dsec.bus import Context, Mailbox, Msg, Route, Verb, subjects
from dsec.bus.messages import DrainRequest, Empty, LeaseAck, LeaseRenew, StopRequest
from dsec.bus.subjects import Caller
from dsec.model import SandboxId, new_ulid
from tests.fixtures_bus import Opener

CALLER = Caller("ann", "acme/rl")


def edge_route(*verbs: Verb, queue: str = "") -> Route:
    return Route(subject=subjects.edge_all("main", "n1"), verbs=verbs, verb_of=subjects.edge_verb, queue=queue)


def edge(verb: str) -> str:
    return subjects.edge("main", "n1", verb)


async def nothing(context: Context, request: object) -> Empty:
    return Empty()


async def test_a_call_carries_message_caller_deadline_and_ids(any_bus: Opener) -> None:
    """A handler sees the typed message, who asked by the subject, the remaining time and the ids."""
    served, client = await any_bus(), await any_bus()
    seen: list[tuple[Context, LeaseRenew]] = []

    async def renew(context: Context, request: LeaseRenew) -> LeaseAck:
        seen.append((context, request))
        return LeaseAck(seq=request.seq, held=len(request.claims))

    route = Route(
        subject=subjects.sandbox_all("main", "n1"),
        verbs=(Verb(name="renew", request=LeaseRenew, reply=LeaseAck, handler=renew),),
        verb_of=lambda subject: subjects.sandbox_parse(subject)[0],
        caller_of=lambda subject: subjects.sandbox_parse(subject)[1],
    )
    await served.serve("edge", route)
    subject = subjects.sandbox("main", "renew", CALLER, SandboxId("n1", new_ulid()))
    message = LeaseRenew(lease="l", seq=7, claims=("a", "b"))
    answer = await client.call(subject, message, LeaseAck, timeout=5, request_id="r1", traceparent="00-ab-cd-01")
    assert answer == LeaseAck(seq=7, held=2)
    context, request = seen[0]
    assert request == message
    assert context.caller == CALLER
    assert (context.verb, context.request_id, context.traceparent, context.json) == ("renew", "r1", "00-ab-cd-01", False)
    left = context.remaining()
    assert left is not None
    assert 4 < left <= 5


@pytest.mark.parametrize("code", sorted(errors.BY_CODE))
async def test_every_error_arrives_as_it_was_raised(any_bus: Opener, code: str) -> None:
    """A DsecError raised by a handler is the same error at the caller, with every field."""
    served, client = await any_bus(), await any_bus()
    cls = errors.BY_CODE[code]

    async def fail(context: Context, request: Empty) -> Empty:
        raise cls("it\r\nbroke", field="a.b", value="v", fix="do c", sandbox="n1-x", reason="why", retryable=False)

    await served.serve("edge", edge_route(Verb(name="stop", request=Empty, handler=fail)))
    with pytest.raises(cls) as caught:
        await client.call(edge("stop"), Empty(), Empty, timeout=5)
    assert type(caught.value) is cls
    assert (
        caught.value.body() == cls("it\r\nbroke", field="a.b", value="v", fix="do c", sandbox="n1-x", reason="why", retryable=False).body()
    )


async def test_a_foreign_exception_is_the_nodes_fault(any_bus: Opener) -> None:
    """A bug in a handler answers NodeError naming the exception, and the service goes on."""
    served, client = await any_bus(), await any_bus()

    async def broken(context: Context, request: Empty) -> Empty:
        raise KeyError("k")

    await served.serve(
        "edge", edge_route(Verb(name="stop", request=Empty, handler=broken), Verb(name="ok", request=Empty, handler=nothing))
    )
    with pytest.raises(errors.NodeError, match="KeyError"):
        await client.call(edge("stop"), Empty(), Empty, timeout=5)
    await client.call(edge("ok"), Empty(), Empty, timeout=5)


async def test_a_wrong_message_names_its_field(any_bus: Opener) -> None:
    """A request that is not of the verb's type is refused with the path of the bad field; an unknown verb lists the known ones."""
    served, client = await any_bus(), await any_bus()
    await served.serve("edge", edge_route(Verb(name="drain", request=DrainRequest, handler=nothing)))
    with pytest.raises(errors.InvalidRequest) as caught:
        await client.call(edge("drain"), {"mode": 3}, Empty, timeout=5)
    assert caught.value.field == "mode"
    with pytest.raises(errors.NotFound, match="no such verb") as unknown:
        await client.call(edge("dance"), Empty(), Empty, timeout=5)
    assert unknown.value.fix == "one of: drain"


async def test_nobody_there_is_unavailable_at_once(any_bus: Opener) -> None:
    """A subject without a subscriber fails at once, not at the deadline."""
    client = await any_bus()
    started = time.monotonic()
    with pytest.raises(errors.Unavailable) as caught:
        await client.call(edge("stop"), Empty(), Empty, timeout=10)
    assert caught.value.reason == "no_responders"
    assert time.monotonic() - started < 2


async def test_silence_is_deadline_exceeded(any_bus: Opener) -> None:
    """A handler that does not answer in time raises DeadlineExceeded, which is also a TimeoutError."""
    served, client = await any_bus(), await any_bus()

    async def slow(context: Context, request: Empty) -> Empty:
        await asyncio.sleep(5)
        return Empty()

    service = await served.serve("edge", edge_route(Verb(name="stop", request=Empty, handler=slow)))
    with pytest.raises(errors.DeadlineExceeded) as caught:
        await client.call(edge("stop"), Empty(), Empty, timeout=0.2)
    assert isinstance(caught.value, TimeoutError)
    assert await service.stop(grace=0) == 1


async def test_handlers_run_side_by_side(any_bus: Opener) -> None:
    """Ten handlers of 0.1 s on one subject take 0.1 s together, not one."""
    served, client = await any_bus(), await any_bus()

    async def slow(context: Context, request: Empty) -> Empty:
        await asyncio.sleep(0.1)
        return Empty()

    await served.serve("edge", edge_route(Verb(name="stop", request=Empty, handler=slow)))
    started = time.monotonic()
    await asyncio.gather(*(client.call(edge("stop"), Empty(), Empty, timeout=5) for _ in range(10)))
    assert time.monotonic() - started < 0.3


async def test_above_the_limit_is_busy(any_bus: Opener) -> None:
    """The request above the service's limit is answered Busy at once; a caller that retries gets its turn."""
    served, client = await any_bus(), await any_bus()

    async def slow(context: Context, request: Empty) -> Empty:
        await asyncio.sleep(0.15)
        return Empty()

    await served.serve("edge", edge_route(Verb(name="stop", request=Empty, handler=slow)), limit=4)
    results = await asyncio.gather(*(client.call(edge("stop"), Empty(), Empty, timeout=5) for _ in range(6)), return_exceptions=True)
    assert sum(isinstance(result, errors.Busy) for result in results) == 2
    again = await asyncio.gather(*(client.call(edge("stop"), Empty(), Empty, timeout=10, retries=50) for _ in range(8)))
    assert again == [Empty()] * 8


async def test_a_request_id_gives_one_outcome(any_bus: Opener) -> None:
    """Repeats under one id, also while the first still runs, run once; the id with another body is a conflict."""
    served, client = await any_bus(), await any_bus()
    runs = 0

    async def stop(context: Context, request: StopRequest) -> LeaseAck:
        nonlocal runs
        runs += 1
        await asyncio.sleep(0.05)
        return LeaseAck(seq=runs)

    await served.serve("edge", edge_route(Verb(name="stop", request=StopRequest, reply=LeaseAck, handler=stop, idempotent=True)))
    ask = [client.call(edge("stop"), StopRequest(grace_ms=5), LeaseAck, timeout=5, request_id="id-1") for _ in range(3)]
    assert await asyncio.gather(*ask) == [LeaseAck(seq=1)] * 3
    assert await client.call(edge("stop"), StopRequest(grace_ms=5), LeaseAck, timeout=5, request_id="id-1") == LeaseAck(seq=1)
    with pytest.raises(errors.Conflict) as caught:
        await client.call(edge("stop"), StopRequest(grace_ms=6), LeaseAck, timeout=5, request_id="id-1")
    assert caught.value.reason == "request_id_conflict"
    assert await client.call(edge("stop"), StopRequest(grace_ms=5), LeaseAck, timeout=5, request_id="id-2") == LeaseAck(seq=2)


async def test_a_queue_group_shares_and_plain_subscribers_all_get_it(any_bus: Opener) -> None:
    """Each message goes to one member of a queue group and to every plain subscriber."""
    a, b, client = await any_bus(), await any_bus(), await any_bus()
    shared, plain = [0, 0], [0, 0]

    def count(numbers: list[int], index: int) -> None:
        numbers[index] += 1

    for index, bus in enumerate((a, b)):
        await bus.subscribe("t.shared", Empty, lambda message, msg, i=index: count(shared, i), queue="q")
        await bus.subscribe("t.plain", Empty, lambda message, msg, i=index: count(plain, i))
        await bus.flush()
    for _ in range(200):
        client.post("t.shared", Empty())
        client.post("t.plain", Empty())
    await client.flush()
    await asyncio.sleep(0.1)
    assert sum(shared) == 200
    assert min(shared) > 20
    assert plain == [200, 200]


async def test_scatter_gathers_answers_and_errors(any_bus: Opener) -> None:
    """One request to all subscribers returns what came in time, stops when as many as expected came, and is empty when nobody is there."""
    edges = [await any_bus() for _ in range(3)]
    client = await any_bus()
    subject = subjects.everyone("main", "list", CALLER)
    assert await client.scatter(subject, Empty(), LeaseAck, timeout=3) == ([], [])
    for number, bus in enumerate(edges):

        async def answer(context: Context, request: Empty, number: int = number) -> LeaseAck:
            if number == 2:
                raise errors.NodeError("ill")
            return LeaseAck(seq=number)

        route = Route(
            subject=subjects.everyone_all("main"),
            verbs=(Verb(name="list", request=Empty, handler=answer),),
            verb_of=lambda subject: subjects.everyone_parse(subject)[0],
        )
        await bus.serve("edge", route)
    answers, faults = await client.scatter(subject, Empty(), LeaseAck, timeout=5, expect=3)
    assert sorted(answer.seq for answer in answers) == [0, 1]
    assert [fault.message for fault in faults] == ["ill"]


async def test_a_message_above_the_limit_never_leaves(any_bus: Opener) -> None:
    """More than max_payload is refused here, naming the size, and the connection lives on."""
    client = await any_bus()
    with pytest.raises(errors.InvalidRequest, match="above"):
        client.post("t.big", b"x" * (client.transport.max_payload + 10))
    with pytest.raises(errors.InvalidRequest, match="above"):
        client.transport.post("t.big", b"x" * (client.transport.max_payload + 1))
    await client.flush()


@pytest.mark.parametrize("subject", ["", "a b", "a\r\nPUB x 0", "a..b", ".a", "a."])
async def test_a_bad_subject_is_refused(any_bus: Opener, subject: str) -> None:
    """A subject that could break the protocol or matches nothing is refused before it is sent."""
    client = await any_bus()
    with pytest.raises(errors.InvalidRequest):
        client.post(subject, Empty())


async def test_flush_means_taken(any_bus: Opener) -> None:
    """After flush, everything posted before has been taken: another connection that asks then sees all of it."""
    a, b = await any_bus(), await any_bus()
    got: list[bytes] = []
    await a.subscribe_raw("t.f", lambda msg: got.append(msg.data))
    await a.flush()
    for number in range(5000):
        b.transport.post("t.f", b"%06d" % number + b"x" * 200)
    await b.flush()
    await a.flush()
    assert [int(data[:6]) for data in got] == list(range(5000))


async def test_a_broken_callback_does_not_stop_the_reader(any_bus: Opener) -> None:
    """What a callback raises is counted and later messages still come."""
    a = await any_bus()
    got: list[bytes] = []

    def callback(msg: Msg) -> None:
        got.append(msg.data)
        if msg.data == b"1":
            raise RuntimeError("boom")

    await a.subscribe_raw("t.c", callback)
    for data in (b"1", b"2"):
        a.transport.post("t.c", data)
    await a.flush()
    await asyncio.sleep(0.05)
    assert got == [b"1", b"2"]
    assert a.events.counts["callback_error"] == 1


async def test_stop_finishes_what_runs(any_bus: Opener) -> None:
    """A stopping service answers what it has begun and takes nothing new."""
    served, client = await any_bus(), await any_bus()

    async def slow(context: Context, request: Empty) -> LeaseAck:
        await asyncio.sleep(0.2)
        return LeaseAck(seq=1)

    service = await served.serve("edge", edge_route(Verb(name="stop", request=Empty, handler=slow)))
    running = asyncio.create_task(client.call(edge("stop"), Empty(), LeaseAck, timeout=5))
    await asyncio.sleep(0.1)
    assert await service.stop(grace=5) == 0
    assert await running == LeaseAck(seq=1)
    with pytest.raises(errors.Unavailable):
        await client.call(edge("stop"), Empty(), LeaseAck, timeout=5)


async def test_the_order_of_one_subscriber_is_kept(any_bus: Opener) -> None:
    """With concurrency=1 an async subscriber sees messages one at a time and in order; with more, side by side."""
    a, b = await any_bus(), await any_bus()
    order: list[int] = []

    async def take(message: LeaseAck, msg: Msg) -> None:
        await asyncio.sleep(0.001 if message.seq % 2 else 0)
        order.append(message.seq)
        if len(order) == 100:
            done.set()

    done = asyncio.Event()
    await a.subscribe("t.o", LeaseAck, take, concurrency=1)
    await a.flush()
    for number in range(100):
        b.post("t.o", LeaseAck(seq=number))
    await b.flush()
    await asyncio.wait_for(done.wait(), 5)
    assert order == list(range(100))


async def test_a_mailbox_is_serial_and_idle_without_a_task() -> None:
    """A mailbox runs its work in order, one at a time, passes errors on, and holds no task when empty."""
    box = Mailbox()
    log: list[str] = []

    async def work(name: str) -> str:
        log.append(f"{name} begins")
        await asyncio.sleep(0.01)
        if name == "b":
            raise errors.Busy("b")
        log.append(f"{name} ends")
        return name

    assert box.idle
    results = await asyncio.gather(*(box.run(lambda n=name: work(n)) for name in "abc"), return_exceptions=True)
    assert [results[0], results[2]] == ["a", "c"]
    assert isinstance(results[1], errors.Busy)
    assert log == ["a begins", "a ends", "b begins", "c begins", "c ends"]
    await asyncio.sleep(0)
    assert box.idle
