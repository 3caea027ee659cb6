"""What every store of an Edge's records owes; and what SQLite's owes beyond: a kill -9 at any moment loses nothing acknowledged."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TextIO, cast

import msgspec
import pytest
import pytest_asyncio
import structlog

from dsec.actors import run
from dsec.actors.store import MIGRATIONS, CommandRow, MemoryStore, Record, SqliteStore, Store
from dsec.errors import Conflict, NodeError
from dsec.model import Exit, ExitReason, SandboxSpec, State, new_ulid


def record(index: int = 0, burst: str = "b", **more: object) -> Record:
    return Record(
        ulid=new_ulid(),
        burst=burst,
        index=index,
        principal="me",
        project="p",
        spec=SandboxSpec(image="x"),
        **more,  # type: ignore[arg-type]
    )


@pytest_asyncio.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    made: Store = MemoryStore() if request.param == "memory" else SqliteStore(tmp_path)
    await made.open()
    yield made
    await made.close()


async def _again(store: Store, tmp_path: Path) -> list[Record]:
    """What a restarted Edge would read."""
    if isinstance(store, MemoryStore):
        return await store.open()
    await store.close()
    again = SqliteStore(tmp_path)
    try:
        return await again.open()
    finally:
        await again.close()


async def test_what_is_written_is_read_again(store: Store, tmp_path: Path) -> None:
    """Insert, update, post and prune, as a restart sees them."""
    rows = [record(n) for n in range(5)]
    await store.insert(rows)
    rows[0].state = State.RUNNING
    await store.update(rows[0])
    rows[1].state, rows[1].exit, rows[1].ended_ts = State.STOPPED, Exit(reason=ExitReason.OOM, signal=9), 10.0
    await store.update(rows[1])
    rows[2].state, rows[2].ended_ts = State.STOPPED, 99.0
    store.post(rows[2])
    await store.prune([rows[1].ulid, rows[3].ulid])  # of those, one has ended
    found = {row.ulid: row for row in await _again(store, tmp_path)}
    assert set(found) == {row.ulid for row in rows if row is not rows[1]}
    assert found[rows[0].ulid].state is State.RUNNING
    assert found[rows[2].ulid].ended_ts == 99.0


async def test_changes_are_written_in_their_order(store: Store, tmp_path: Path) -> None:
    """Those that nobody waits for, which the writer hears of a little later, before the next one that somebody waits for."""
    row = record()
    await store.insert([row])
    for state in (State.CREATING, State.RUNNING):
        row.state = state
        posted = store.post(row)
    row.state = State.STOPPING
    await store.update(row)
    assert posted.done()
    row.state = State.STOPPED
    store.post(row)
    assert [again.state for again in await _again(store, tmp_path)] == [State.STOPPED]


async def test_an_incarnation_is_uuid_and_start(store: Store) -> None:
    """It names the directory and counts the starts."""
    uuid, _, start = store.incarnation.partition(".")
    assert len(uuid) == 32
    assert start == "1"


async def test_the_same_request_cannot_be_recorded_twice(tmp_path: Path) -> None:
    """(principal, project, burst, index) is unique on disk too, and one bad row does not take others of its commit with it."""
    store = SqliteStore(tmp_path)
    await store.open()
    await store.insert([record(1)])
    results = await asyncio.gather(store.insert([record(2)]), store.insert([record(1)]), store.insert([record(3)]), return_exceptions=True)
    assert [type(result) for result in results] == [type(None), NodeError, type(None)]
    await store.close()


async def test_what_sqlite_cannot_hold_ends_one_write_only(tmp_path: Path) -> None:
    """A number beyond SQLite's is refused to who wrote it; others of its commit and later writes go on."""
    store = SqliteStore(tmp_path)
    await store.open()
    huge = msgspec.structs.replace(record(1), index=1 << 63)
    results = await asyncio.gather(store.insert([record(2)]), store.insert([huge]), store.insert([record(3)]), return_exceptions=True)
    assert [type(result) for result in results] == [type(None), NodeError, type(None)]
    async with asyncio.timeout(5):
        await store.insert([record(4)])
        await store.close()


class Full:
    """A file on a full disk."""

    def write(self, _text: str = "") -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    flush = write


async def test_a_full_disk_ends_neither_the_writer_nor_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes fail with the reason while it is full, though the log cannot be written either, and succeed when there is room again."""
    printer = structlog.PrintLogger(cast(TextIO, run.Lossy(cast(TextIO, Full()))))
    lines = structlog.wrap_logger(printer, processors=[structlog.processors.KeyValueRenderer()])
    monkeypatch.setattr("dsec.actors.store.log", lines)
    store = SqliteStore(tmp_path)
    await store.open()
    await store.insert([record(1)])
    with sqlite3.connect(tmp_path / "edge.db") as db:
        db.execute("ALTER TABLE sandbox RENAME TO away")  # an operational error, as a full disk's
    db.close()
    async with asyncio.timeout(5):
        for n in (2, 3):
            with pytest.raises(NodeError, match=f"in {tmp_path}: no such table"):
                await store.insert([record(n)])
        with sqlite3.connect(tmp_path / "edge.db") as db:
            db.execute("ALTER TABLE away RENAME TO sandbox")
        db.close()
        await store.insert([record(2)])
        await store.close()


async def test_an_unreadable_record_does_not_keep_the_others_from_being_read(tmp_path: Path) -> None:
    """Of one that is damaged it is known whose it was, so that its end can be told; the node serves."""
    store = SqliteStore(tmp_path)
    await store.open()
    rows = [record(1), record(2)]
    await store.insert(rows)
    await store.close()
    with sqlite3.connect(tmp_path / "edge.db") as db:
        db.execute("UPDATE sandbox SET record = x'00ff' WHERE ulid = ?", (rows[0].ulid,))
    db.close()
    again = SqliteStore(tmp_path)
    found = {row.ulid: row for row in await again.open()}
    assert set(found) == {rows[0].ulid, rows[1].ulid}
    assert (found[rows[0].ulid].plan, found[rows[0].ulid].project) == (b"", rows[0].project)
    await again.close()


async def test_each_start_is_a_new_incarnation_and_one_holds_the_directory(tmp_path: Path) -> None:
    """The counter grows; a second opener is refused while the first lives."""
    first = SqliteStore(tmp_path)
    await first.open()
    with pytest.raises(Conflict):
        await SqliteStore(tmp_path).open()
    await first.close()
    second = SqliteStore(tmp_path)
    await second.open()
    await second.close()
    assert first.incarnation.partition(".")[0] == second.incarnation.partition(".")[0]
    assert second.incarnation.endswith(".2")


async def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    """An older program does not touch records that it cannot read."""
    store = SqliteStore(tmp_path)
    await store.open()
    await store.close()
    with sqlite3.connect(tmp_path / "edge.db") as db:
        db.execute(f"PRAGMA user_version={len(MIGRATIONS) + 1}")
    db.close()
    with pytest.raises(Conflict, match="newer version"):
        await SqliteStore(tmp_path).open()


async def test_a_damaged_file_is_an_error_with_words(tmp_path: Path) -> None:
    """Not a traceback of sqlite."""
    (tmp_path / "edge.db").write_bytes(b"this is no database" * 100)
    with pytest.raises(NodeError, match=f"cannot open.* in {tmp_path}"):
        await SqliteStore(tmp_path).open()


async def test_a_thousand_inserts_share_their_commits(tmp_path: Path) -> None:
    """Group commit: a thousand single inserts at once take far less than a thousand fsyncs."""
    store = SqliteStore(tmp_path)
    await store.open()
    began = time.monotonic()
    await asyncio.gather(*(store.insert([record(n)]) for n in range(1000)))
    print(f"1000 inserts: {(time.monotonic() - began) * 1000:.0f} ms")
    await store.close()
    assert len(await _read(tmp_path)) == 1000


_WRITER = textwrap.dedent("""
    import asyncio, sys
    from dsec.actors.store import Record, SqliteStore
    from dsec.model import SandboxSpec, State, new_ulid
    async def main():
        store = SqliteStore(sys.argv[1])
        await store.open()
        n = 0
        async def one(n):
            row = Record(ulid=new_ulid(), burst=sys.argv[2], index=n, principal="me", project="p", spec=SandboxSpec(image="x"))
            await store.insert([row])
            sys.stdout.write(f"{row.ulid} pending\\n"); sys.stdout.flush()
            row.state = State.RUNNING
            await store.update(row)
            sys.stdout.write(f"{row.ulid} running\\n"); sys.stdout.flush()
        while True:
            await asyncio.gather(*(one(n + k) for k in range(8)))
            n += 8
    asyncio.run(main())
""")


def test_kill_9_at_any_moment_loses_nothing_acknowledged(tmp_path: Path) -> None:
    """Eight rounds of writing and killing: every row that was acknowledged is there, in a state not older than the acknowledged one."""
    rng = random.Random(3)
    told: dict[str, str] = {}
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    for n in range(8):
        said = tmp_path / f"said{n}"
        with said.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-c", _WRITER, str(tmp_path), f"b{n}"], stdout=out, stderr=subprocess.PIPE, text=True, env=env
            )
        while not said.stat().st_size and process.poll() is None:
            time.sleep(0.005)
        time.sleep(rng.uniform(0.0, 0.1))
        process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
        assert not errors, errors
        for line in said.read_text().splitlines():  # the last one may be cut off
            if len(parts := line.split()) == 2 and parts[1] in ("pending", "running"):
                told[parts[0]] = parts[1]
    found = {row.ulid: row for row in asyncio.run(_read(tmp_path))}
    assert len(told) > 50
    for ulid, state in told.items():
        assert ulid in found
        if state == "running":
            assert found[ulid].state is State.RUNNING


async def _read(directory: Path) -> list[Record]:
    store = SqliteStore(directory)
    try:
        return await store.open()
    finally:
        await store.close()


async def test_commands_are_kept_with_their_sandbox(store: Store, tmp_path: Path) -> None:
    """Rows by number, results apart; one number holds one row, a step one row of its sandbox; forgotten with it."""
    rows = [record(0), record(1)]
    await store.insert(rows)
    one, two = rows[0].ulid, rows[1].ulid
    await store.put_commands([CommandRow(ulid=one, seq=n, entry=bytes([n]), done=True) for n in (1, 2, 3)])
    await store.put_commands([CommandRow(ulid=one, seq=4, step="s", entry=b"begun"), CommandRow(ulid=two, seq=1, step="s")])
    assert {(row.ulid, row.seq) for row in await store.open_steps()} == {(one, 4), (two, 1)}
    await store.put_commands([CommandRow(ulid=one, seq=4, step="s", done=True, entry=b"ended", result=b"what it was")])
    await store.trim_commands([(one, 2)])
    await store.drop_commands(two, [1])
    assert [(row.seq, row.step, row.done, row.entry) for row in await store.commands(one)] == [
        (3, "", True, b"\x03"),
        (4, "s", True, b"ended"),
    ]
    assert await store.commands(two) == []
    assert await store.open_steps() == []
    assert (await store.result(one, 4), await store.result(one, 9)) == (b"what it was", b"")
    rows[0].state, rows[0].ended_ts = State.STOPPED, 10.0
    await store.update(rows[0])
    await store.prune([one])
    assert await store.commands(one) == []


async def test_records_of_an_earlier_version_get_their_commands(tmp_path: Path) -> None:
    """A database that was made before there were commands is brought up to date, and keeps what it has."""
    with sqlite3.connect(tmp_path / "edge.db") as db:
        for statement in MIGRATIONS[0]:
            db.execute(statement)
        db.execute("PRAGMA user_version=1")
    store = SqliteStore(tmp_path)
    assert await store.open() == []
    await store.put_commands([CommandRow(ulid="u", seq=1, step="s")])
    assert [row.step for row in await store.open_steps()] == ["s"]
    await store.close()


async def test_an_order_to_drain_is_there_after_a_restart(store: Store, tmp_path: Path) -> None:
    """The last one, until it is taken back."""
    assert store.drain == ""
    for order in ("wait", "stop", ""):
        await store.put_drain(order)
        await _again(store, tmp_path)
        if isinstance(store, SqliteStore):
            store = SqliteStore(tmp_path)
            await store.open()
        assert store.drain == order
    await store.close()
