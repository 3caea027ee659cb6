"""The bus's pure and nearly pure parts: spool, idempotency, batching, wildcard matching."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.bus import Idempotency, Key
from dsec.bus.events import batches, start_time
from dsec.bus.memory import Broker, matches
from dsec.bus.messages import Event
from dsec.bus.spool import SEGMENT, Record, Spool
from dsec.errors import Busy, Conflict, DeadlineExceeded, InvalidRequest, NotFound, Unavailable


# ------------------------------------------------------------------ spool
def record(number: int, size: int = 10) -> Record:
    return Record(str(number), f"s.{number}", b"x" * size)


def ids(records: list[Record]) -> list[int]:
    return [int(one.id) for one in records]


async def test_a_spool_keeps_order_through_restarts(tmp_path: Path) -> None:
    """Records come back in order, by the same object or a later one, and leave no file when all are delivered."""
    spool = await Spool.open(tmp_path)
    assert not spool
    assert await spool.head() == []
    await spool.append([record(1), record(2)])
    await spool.append([record(3)])
    assert ids(await spool.head()) == [1, 2, 3]
    await spool.delivered(1)
    assert ids(await spool.head()) == [2, 3]
    await spool.append([record(4)])  # never into a segment that is being delivered
    again = await Spool.open(tmp_path)
    assert ids(await again.head()) == [1, 2, 3]  # delivered in part: repeated, and readers dedupe
    await again.delivered(3)
    assert ids(await again.head()) == [4]
    await again.delivered(1)
    assert await again.head() == []
    assert not list(tmp_path.iterdir())


async def test_a_torn_record_is_left_out(tmp_path: Path) -> None:
    """A crash in the middle of a write costs that record only, which nobody was told was safe."""
    spool = await Spool.open(tmp_path)
    await spool.append([record(1), record(2)])
    path = next(tmp_path.glob("*.seg"))
    path.write_bytes(path.read_bytes()[:-3])
    again = await Spool.open(tmp_path)
    await again.append([record(3)])
    assert ids(await again.head()) == [1]
    await again.delivered(1)
    assert ids(await again.head()) == [3]
    path = next(tmp_path.glob("*.seg"))
    path.write_bytes(path.read_bytes().replace(b"xxx", b"xyx"))
    assert await (await Spool.open(tmp_path)).head() == []


async def test_a_full_spool_drops_the_oldest_and_counts(tmp_path: Path) -> None:
    """At the bound the oldest segment goes; how many records that cost is counted, also for the next process."""
    spool = await Spool.open(tmp_path, limit=2 * SEGMENT)
    for number in range(40):
        await spool.append([record(number, 100_000)])
    assert spool.size <= 2 * SEGMENT
    assert spool.lost > 0
    again = await Spool.open(tmp_path, limit=2 * SEGMENT)
    assert again.lost == spool.lost
    left: list[int] = []
    while records := await again.head():
        left += ids(records)
        await again.delivered(len(records))
    assert left == list(range(spool.lost, 40))


# ------------------------------------------------------------------ idempotency
async def test_outcomes_are_kept_for_a_stated_time() -> None:
    """An outcome is remembered until its retention ends or the bound is hit; then the id may be used anew."""
    now = [0.0]
    memory = Idempotency(retention=10, limit=3, clock=lambda: now[0])
    runs: list[str] = []

    async def ask(id_: str, body: bytes = b"b") -> str:
        async def do() -> str:
            runs.append(id_)
            return id_

        return str(await memory.run(Key("p", "u", "v", id_), body, do))

    assert [await ask("1"), await ask("1")] == ["1", "1"]
    assert runs == ["1"]
    with pytest.raises(Conflict):
        await ask("1", b"other")
    now[0] = 11
    assert await ask("1", b"other") == "1"
    for id_ in "2345":
        await ask(id_)
    assert len(memory) <= 3


async def test_final_errors_are_kept_and_retryable_ones_are_not() -> None:
    """A retry after Busy runs again; a retry after NotFound gets the same answer; a bug is not remembered."""
    memory = Idempotency()
    runs = 0

    async def ask(id_: str, error: Exception) -> None:
        async def do() -> None:
            nonlocal runs
            runs += 1
            raise error

        with pytest.raises(type(error)):
            await memory.run(Key("p", "u", "v", id_), b"", do)

    for id_, error, expected in (("a", Busy(), 2), ("b", NotFound(), 1), ("c", RuntimeError(), 2)):
        runs = 0
        await ask(id_, error)
        await asyncio.sleep(0)
        await ask(id_, error)
        assert runs == expected


async def test_a_cancelled_caller_does_not_undo_shared_work() -> None:
    """The first caller goes away; the work ends and the second gets its outcome."""
    memory = Idempotency()

    async def do() -> int:
        await asyncio.sleep(0.05)
        return 7

    key = Key("p", "u", "v", "1")
    first = asyncio.create_task(memory.run(key, b"", do))
    await asyncio.sleep(0.01)
    first.cancel()
    assert await memory.run(key, b"", do) == 7
    with pytest.raises(asyncio.CancelledError):
        await first


# ------------------------------------------------------------------ events
_events = st.lists(
    st.builds(
        Event,
        kind=st.sampled_from(["created", "running", "stopped"]),
        sb=st.sampled_from(["a", "b", "c"]),
        project=st.sampled_from(["p", "q"]),
    ),
    max_size=60,
)


@given(_events)
def test_batches_keep_each_sandboxes_order(events: list[Event]) -> None:
    """Grouping by kind and project loses nothing and never puts one sandbox's events out of order."""
    numbered = [Event(kind=event.kind, sb=event.sb, project=event.project, n=index) for index, event in enumerate(events)]
    groups = batches(numbered)
    flat = [event for _, _, group in groups for event in group]
    assert sorted(event.n for event in flat) == list(range(len(events)))
    assert all((event.kind, event.project) == (kind, project) for kind, project, group in groups for event in group)
    for sb in "abc":
        mine = [event.n for event in flat if event.sb == sb]
        assert mine == sorted(mine)


def test_a_burst_is_one_batch() -> None:
    """The created events of one burst slice travel as one message."""
    assert len(batches([Event(kind="created", sb=str(number), project="p", n=number) for number in range(200)])) == 1


@pytest.mark.parametrize("text", ["", "10m", "-10", "-xm", "-10y", "now"])
def test_a_wrong_time_is_refused(text: str) -> None:
    """`since` that is no time is InvalidRequest."""
    with pytest.raises(InvalidRequest):
        start_time(text)


# ------------------------------------------------------------------ subjects
@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.>", "a", False),
        ("a.>", "a.b.c", True),
        ("*.b", "a.b", True),
        (">", "a", True),
        ("a.*.c", "a.b", False),
        ("a.b", "a.c", False),
    ],
)
def test_wildcards_match_as_in_nats(pattern: str, subject: str, expected: bool) -> None:
    """One star is one token, a last > is one or more."""
    assert matches(pattern, subject) is expected


# ------------------------------------------------------------------ the in-memory broker's faults
async def test_memory_outage_fails_requests_and_keeps_posts() -> None:
    """An outage of the broker fails requests in flight, holds what is posted, and delivers it afterwards."""
    broker = Broker(latency=0.005)
    a, b = broker.connect("a"), broker.connect("b")
    got: list[bytes] = []
    await a.subscribe_raw("t.x", lambda msg: got.append(msg.data))
    asked = b.request_nowait("t.x", b"1")
    broker.go_down()
    with pytest.raises(Unavailable):
        await asked
    b.post("t.x", b"2")
    with pytest.raises(Unavailable):
        await b.request("t.x", b"3", timeout=0.05)
    broker.come_up()
    await b.flush()
    await asyncio.sleep(0.02)
    assert got == [b"1", b"2"]
    broker.drop = lambda subject: subject == "t.x"
    with pytest.raises(DeadlineExceeded):
        await b.request("t.x", b"4", timeout=0.05)
    assert len(got) == 2
    await a.close()
    await b.close()
