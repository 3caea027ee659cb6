"""Output of commands: what is kept, what a reader gets, what it costs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.backends.base import Chunk
from dsec.backends.guest.link import Link
from dsec.errors import InvalidRequest, NotFound
from dsec.model import ExecSpec
from tests.system.aether_box import Box, new_op, run, shell

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="pid namespaces need root")

MIB = 1 << 20
COUNT = "import os\nfor i in range({n}): os.write(1, b'%07d\\n' % i)"


@pytest.fixture
async def box(state_dir: Path) -> AsyncIterator[Box]:
    box = Box(state_dir)
    yield box
    await box.close()


@pytest.fixture
def link(box: Box) -> Link:
    return box.link()


async def collect(stream: AsyncIterator[Chunk], parts: dict[int, bytearray]) -> None:
    async for chunk in stream:
        assert chunk.offset == len(parts[chunk.stream]), "a gap in a held stream"
        parts[chunk.stream] += chunk.data


async def test_c15_binary_output_is_bytes(link: Link) -> None:
    """Any byte comes back as it was written."""
    done = await shell(link, r"printf '\377\376\000\200'")
    assert done.stdout.data() == b"\xff\xfe\0\x80"


async def test_c17_head_and_tail_are_kept_per_stream(link: Link) -> None:
    """The first and the last bytes; what lies between is counted and named as truncated."""
    done = await shell(link, "seq 1 100000; seq 1 5 >&2", head=1000, tail=2000)
    whole = b"".join(b"%d\n" % i for i in range(1, 100001))
    assert (done.stdout.head, done.stdout.tail) == (whole[:1000], whole[-2000:])
    assert (done.stdout.total, done.stdout.truncated, done.stderr.truncated) == (len(whole), True, False)
    done = await shell(link, "seq 1 1000", head=0, tail=0)
    assert (done.stdout.head, done.stdout.tail, done.stdout.total) == (b"", b"", 3893)
    done = await shell(link, "seq 1 1000", head=10, tail=0)
    assert (done.stdout.head, done.stdout.tail, done.stdout.total) == (b"1\n2\n3\n4\n5\n", b"", 3893)


@pytest.mark.parametrize("size", [0, 1, 65_536, 65_537, 327_680, 327_681, 3 * MIB])
async def test_every_size_is_captured_exactly(link: Link, size: int) -> None:
    """Around the borders of head, ring and frames."""
    done = await shell(link, f"head -c {size} /dev/urandom | tee /dev/stderr", head=MIB, tail=MIB)
    assert done.stdout.total == done.stderr.total == size
    assert done.stdout.truncated == (size > 2 * MIB)
    assert (done.stdout.head, done.stdout.tail) == (done.stderr.head, done.stderr.tail)
    assert len(done.stdout.data()) == min(size, 2 * MIB)


async def test_c16_a_flood_stays_bounded_and_known(box: Box, link: Link) -> None:
    """``yes`` for two seconds: the agent's memory does not grow, the operation is known all the time, and ends when it is told to."""
    op = new_op()
    await link.start(op, ExecSpec(argv=("yes",), background=True))
    for _ in range(4):
        await asyncio.sleep(0.5)
        assert [item.running for item in await link.ops() if item.op == op] == [True]
        assert box.rss() < 2 * MIB
    await link.signal(op, 15)
    done = await link.wait(op, 5)
    assert done.signal == 15
    assert done.stdout.total > 100 * MIB
    assert len(done.stdout.data()) == (64 + 256) * 1024


async def test_retention_is_bounded(box: Box, link: Link) -> None:
    """Three hundred finished operations with a megabyte each: 256 are remembered, their text only as far as 8 MiB reach."""
    first = new_op()
    await link.start(first, ExecSpec(argv=("head", "-c", "1000000", "/dev/zero")))
    await link.wait(first, 5)
    for _ in range(30):
        await asyncio.gather(*(run(link, "head", "-c", "1000000", "/dev/zero") for _ in range(10)))
    assert len(await link.ops()) == 256
    assert box.rss() < 16 * MIB
    with pytest.raises(NotFound):
        await link.wait(first, 1)


async def test_a_held_stream_loses_nothing(link: Link) -> None:
    """A follower gets every byte of a long output in order, and both streams."""
    op, parts = new_op(), {1: bytearray(), 2: bytearray()}
    text = "seq 1 300000; seq 1 200000 >&2; seq 1 100000"
    await link.start(op, ExecSpec(argv=("sh", "-c", text), stream=True))
    await collect(link.output(op), parts)
    assert parts[1] == b"".join(b"%d\n" % i for n in (300_000, 100_000) for i in range(1, n + 1))
    assert parts[2] == b"".join(b"%d\n" % i for i in range(1, 200_001))
    assert (await link.wait(op, 5)).exit_code == 0


async def test_a_slow_reader_blocks_the_command(link: Link) -> None:
    """Back-pressure: while the reader does not read, the command stands still on its pipe; afterwards nothing is missing."""
    op = new_op()
    await link.start(op, ExecSpec(argv=("sh", "-c", "head -c 30000000 /dev/zero"), stream=True))
    stream = link.output(op)
    first = await anext(stream)
    await asyncio.sleep(0.3)
    total = next(item.stdout.total for item in await link.ops() if item.op == op)
    assert total < 4 * MIB
    got = len(first.data)
    async for chunk in stream:
        assert chunk.offset == got
        got += len(chunk.data)
    assert got == 30_000_000


async def test_a_reader_that_leaves_lets_the_command_run(link: Link) -> None:
    """Once the iterator is closed the ring drops again, and a later reader sees the gap as a jump of the offset."""
    op = new_op()
    await link.start(op, ExecSpec(argv=("head", "-c", "30000000", "/dev/zero"), stream=True))
    stream = link.output(op)
    first = await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    done = await link.wait(op, 10)
    assert done.stdout.total == 30_000_000
    chunks = [chunk async for chunk in link.output(op, (len(first.data), 0))]
    assert chunks[-1].offset + len(chunks[-1].data) == 30_000_000
    assert any(b.offset > a.offset + len(a.data) for a, b in zip([first, *chunks], chunks, strict=False))


async def test_c19_output_is_replayed_from_a_cursor(link: Link) -> None:
    """The connection breaks in the middle of a held stream: the reader goes on where it was and misses nothing."""
    op, parts = new_op(), {1: bytearray(), 2: bytearray()}
    await link.start(op, ExecSpec(argv=("sh", "-c", "for i in $(seq 1 40); do seq 1 3000; sleep 0.01; done"), stream=True))
    task = asyncio.create_task(collect(link.output(op), parts))
    for _ in range(3):
        await asyncio.sleep(0.1)
        link.hang_up()
    await asyncio.wait_for(task, 10)
    assert parts[1] == b"".join(b"%d\n" % i for i in range(1, 3001)) * 40


async def test_c19_a_finished_operation_is_read_again(box: Box) -> None:
    """Another Edge generation reads the result and the output of an operation that it did not start."""
    op = new_op()
    old = box.link(1)
    await old.start(op, ExecSpec(argv=("sh", "-c", "sleep 0.2; seq 1 1000; exit 7")))
    new = box.link(2)
    done = await new.wait(op, 5)
    assert (done.exit_code, done.stdout.total) == (7, 3893)
    data = b"".join([chunk.data async for chunk in new.output(op, (3000, 0))])
    assert data == b"".join(b"%d\n" % i for i in range(1, 1001))[3000:]


async def test_a_newer_reader_takes_the_stream_over(link: Link) -> None:
    """One reader holds a stream; the older looks on beside it."""
    op = new_op()
    await link.start(op, ExecSpec(argv=("sh", "-c", "while :; do echo x; sleep 0.02; done"), stream=True, background=True))
    older = link.output(op)
    await anext(older)
    newer = link.output(op)
    await anext(newer)
    await anext(older)
    await link.signal(op, 9)
    async with asyncio.timeout(5):
        for reader in (older, newer):
            async for _ in reader:
                pass


async def test_offsets_beyond_the_end_and_unknown_operations_are_refused(link: Link) -> None:
    """A cursor that cannot be is an error and no silence."""
    done = await shell(link, "echo hello")
    with pytest.raises(InvalidRequest):
        [chunk async for chunk in link.output(done.op, (100, 0))]
    for call in (link.wait(new_op(), 1), anext(link.output(new_op())), link.signal(new_op(), 9), link.input(new_op(), 0, b"")):
        with pytest.raises(NotFound):
            await call


async def test_a_background_flood_does_not_hold_the_end_of_a_stream(link: Link) -> None:
    """A followed command that leaves ``yes`` behind: the stream ends with the command."""
    op = new_op()
    await link.start(op, ExecSpec(argv=("sh", "-c", "yes & echo hi"), stream=True))
    begun = time.monotonic()
    async for _ in link.output(op):
        assert time.monotonic() - begun < 5
    assert (await link.wait(op, 5)).exit_code == 0


async def test_a_followed_command_is_fast(link: Link) -> None:
    """Hundreds of MiB a second through the wire and asyncio (the floor here allows for a busy machine)."""
    op, size = new_op(), 300_000_000
    await link.start(op, ExecSpec(argv=("head", "-c", str(size), "/dev/zero"), stream=True))
    begun, got = time.perf_counter(), 0
    async for chunk in link.output(op):
        got += len(chunk.data)
    rate = got / MIB / (time.perf_counter() - begun)
    print(f"{rate:.0f} MiB/s")
    assert got == size
    assert rate > 150


async def test_many_small_writes_wake_the_agent_seldom(box: Box) -> None:
    """A command that writes line by line is read in pieces: each wake-up of the agent disturbs the sandbox's neighbours (c22)."""

    def switches() -> int:
        lines = Path(f"/proc/{box.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))

    before = switches()
    done = await run(box.link(), "python3", "-c", COUNT.format(n=50_000), head=MIB)
    assert done.stdout.data() == b"".join(b"%07d\n" % i for i in range(50_000))
    assert switches() - before < 2_500, "the agent woke for single lines"
