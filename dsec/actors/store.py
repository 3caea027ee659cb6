"""The Edge's durable records: SQLite, WAL, synchronous=FULL, one writer thread with group commit.

The truth about a sandbox lives here and is on disk before anybody is told. All writes that arrive while one commit is on its way go
into the next one, so a burst costs few fsyncs. The event loop only appends to a queue and awaits a future.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import queue
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast
from urllib.parse import quote

import msgspec
import structlog

from dsec import faults
from dsec.errors import Conflict, NodeError
from dsec.model import Exit, ExitReason, LayerRef, Paused, SandboxSpec, State

log = structlog.get_logger("dsec.store")

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

# Statements by version: a database of version n gets MIGRATIONS[n:] in one transaction. Never edit an entry; append.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
        """CREATE TABLE sandbox (
            ulid TEXT PRIMARY KEY, burst TEXT NOT NULL, idx INTEGER NOT NULL, principal TEXT NOT NULL, project TEXT NOT NULL,
            state TEXT NOT NULL, record BLOB NOT NULL, plan BLOB NOT NULL, ended REAL NOT NULL DEFAULT 0
        ) WITHOUT ROWID""",
        "CREATE UNIQUE INDEX sandbox_request ON sandbox (principal, project, burst, idx)",
        "CREATE INDEX sandbox_ended ON sandbox (ended) WHERE ended > 0",
    ),
    (
        """CREATE TABLE command (
            ulid TEXT NOT NULL, seq INTEGER NOT NULL, step TEXT NOT NULL, done INTEGER NOT NULL, entry BLOB NOT NULL, result BLOB NOT NULL,
            PRIMARY KEY (ulid, seq)
        ) WITHOUT ROWID""",
        "CREATE UNIQUE INDEX command_step ON command (ulid, step) WHERE step != ''",
        "CREATE INDEX command_open ON command (ulid) WHERE step != '' AND done = 0",
        "CREATE TRIGGER command_forgotten AFTER DELETE ON sandbox BEGIN DELETE FROM command WHERE ulid = old.ulid; END",
    ),
    ("CREATE TABLE checkpoint (ulid TEXT PRIMARY KEY, entry BLOB NOT NULL) WITHOUT ROWID",),
    ("CREATE TABLE event (number INTEGER PRIMARY KEY, body BLOB NOT NULL)",),
)
Told = tuple[int, bytes]  # an event that goes with a change: its number and itself, opaque here (dsec/actors/outbox.py)


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One sandbox as it stands on disk. ``plan`` is the LaunchPlan as msgpack, opaque here: written once, and then let go from memory."""

    ulid: str
    burst: str
    index: int
    principal: str
    project: str
    spec: SandboxSpec
    state: State = State.PENDING
    lease: str = ""
    lease_ttl_ms: int = 0
    unclaimed: bool = False  # its lease has not named it yet
    slot: int = 0  # number that no other live sandbox of the node has
    layers: tuple[LayerRef, ...] = ()
    degraded: tuple[str, ...] = ()
    plan: bytes = b""
    created_ts: float = 0.0
    ttl_left_ms: int = 0
    exit: Exit | None = None
    ended_ts: float = 0.0
    paused: Paused | None = None  # of one that is paused: what that gave back
    stood_ms: int = 0  # how long it stood still in pauses that have ended
    still_at: float = 0.0  # when the one that has not began: the machine's monotonic clock, as it does not outlive the machine


class CommandRow(msgspec.Struct, kw_only=True):
    """One command of a sandbox. ``entry`` and ``result`` are msgpack, opaque here (dsec/actors/commands.py)."""

    ulid: str
    seq: int
    step: str = ""  # the key under which its result is kept
    done: bool = False
    entry: bytes = b""
    result: bytes = b""


class Store(Protocol):
    """What an Edge asks of its records. Writes are durable when the awaited call returns."""

    incarnation: str
    rebooted: bool  # the machine has been started anew since the last time
    drain: str  # what was last given to `put_drain`, when it was opened

    async def settle(self) -> None:
        """What was recorded before the machine was started anew has been seen to."""
        ...

    async def renew(self) -> str:
        """Count as a start what is none; answers the new incarnation, which ``incarnation`` is not yet."""
        ...

    async def open(self) -> list[Record]:
        """Open, migrate, count this start; answers every record."""
        ...

    async def insert(self, records: Iterable[Record], told: Sequence[Told] = ()) -> None:
        """``told``: events that are written with the change, all or nothing; so below."""
        ...

    async def update(self, record: Record, told: Sequence[Told] = ()) -> None: ...

    def post(self, record: Record, told: Sequence[Told] = ()) -> asyncio.Future[None]:
        """As `update`, for changes that a restart would find out anyway, so that nobody need wait for the answer. It goes with the next
        commit, within `COMPANY` seconds."""
        ...

    def keep(self, told: Sequence[Told]) -> asyncio.Future[None]:
        """Events alone, as `post`."""
        ...

    async def untold(self) -> list[Told]:
        """All events that are kept, in the order of their numbers."""
        ...

    def forget_told(self, upto: int) -> None:
        """Remove events up to this number."""
        ...

    async def prune(self, ulids: Sequence[str]) -> None:
        """Remove the records of these sandboxes, of those that have ended."""
        ...

    async def put_commands(self, rows: Sequence[CommandRow], told: Sequence[Told] = ()) -> None:
        """Insert, or replace those of the same number."""
        ...

    async def drop_commands(self, ulid: str, seqs: Sequence[int]) -> None: ...

    async def trim_commands(self, upto: Sequence[tuple[str, int]]) -> None:
        """Remove of these sandboxes those without a step whose number is not above the one given."""
        ...

    async def commands(self, ulid: str) -> list[CommandRow]:
        """All of a sandbox in their order, without their results."""
        ...

    async def result(self, ulid: str, seq: int) -> bytes: ...

    async def open_steps(self) -> list[CommandRow]:
        """Of every sandbox, those with a step whose result is not known yet."""
        ...

    async def put_checkpoint(self, ulid: str, entry: bytes, told: Sequence[Told] = ()) -> None:
        """Insert or replace; ``entry`` is msgpack, opaque here (dsec/actors/checkpoints.py)."""
        ...

    async def drop_checkpoints(self, ulids: Sequence[str]) -> None: ...

    async def checkpoints(self) -> dict[str, bytes]: ...

    async def put_drain(self, order: str) -> None:
        """How the node is being emptied, "" = it is not; opaque here (dsec/actors/drain.py)."""
        ...

    async def close(self) -> None: ...


LATER = 0.01  # seconds until the writer hears of a change that nobody waits for: it would take the interpreter from who is served
COMPANY = 0.02  # seconds that a change which nobody waits for waits for others: one commit is one sync of the disk
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode
_ALL = "SELECT ulid, record, plan, burst, idx, principal, project, ended FROM sandbox ORDER BY ulid"
_INSERT = "INSERT INTO sandbox (ulid, burst, idx, principal, project, state, record, plan, ended) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
_UPDATE = "UPDATE sandbox SET state = ?, record = ?, ended = ? WHERE ulid = ?"
_PUT_COMMAND = "INSERT OR REPLACE INTO command (ulid, seq, step, done, entry, result) VALUES (?, ?, ?, ?, ?, ?)"
_COMMANDS = "SELECT ulid, seq, step, done, entry FROM command"
_KEEP = "INSERT OR REPLACE INTO event (number, body) VALUES (?, ?)"
_Write = tuple[str, Sequence[tuple[Any, ...]]]
_Job = tuple[tuple[_Write, ...], "asyncio.Future[None]", bool]  # the last: somebody waits for it


class SqliteStore:
    """`Store` on a directory; one Edge at a time may hold it (flock)."""

    def __init__(self, state_dir: str | os.PathLike[str]) -> None:
        self._dir = Path(state_dir)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._held: list[_Job] = []  # of which the writer has not heard yet, nor of any after them
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = -1
        self._broken: BaseException | None = None
        self.incarnation = ""
        self.rebooted = False
        self.drain = ""
        self._starts = 0

    async def open(self) -> list[Record]:
        """Raises `Conflict` when another Edge holds the directory or a newer version wrote it (reason ``version``)."""
        self._loop = asyncio.get_running_loop()
        opened: asyncio.Future[list[Record]] = self._loop.create_future()
        self._thread = threading.Thread(target=self._write, args=(opened,), name="dsec-store", daemon=True)
        self._thread.start()
        return await opened

    async def settle(self) -> None:
        await self._do(("UPDATE meta SET value = ? WHERE key = 'boot'", [(_boot_id(),)]))

    async def renew(self) -> str:
        await self._do(("UPDATE meta SET value = value + 1 WHERE key = 'starts'", [()]))
        self._starts += 1
        return f"{self.incarnation.partition('.')[0]}.{self._starts}"

    async def insert(self, records: Iterable[Record], told: Sequence[Told] = ()) -> None:
        rows = []
        for r in records:
            plan, r.plan = r.plan, b""
            rows.append((r.ulid, r.burst, r.index, r.principal, r.project, r.state, _encode(r), plan, r.ended_ts))
        await self._do((_INSERT, rows), (_KEEP, told))

    async def update(self, record: Record, told: Sequence[Told] = ()) -> None:
        await self._do((_UPDATE, [_row(record)]), (_KEEP, told))

    def post(self, record: Record, told: Sequence[Told] = ()) -> asyncio.Future[None]:
        return self._soon((_UPDATE, [_row(record)]), (_KEEP, told))

    def keep(self, told: Sequence[Told]) -> asyncio.Future[None]:
        return self._soon((_KEEP, told))

    async def untold(self) -> list[Told]:
        return [(row[0], bytes(row[1])) for row in await self._read("SELECT number, body FROM event ORDER BY number")]

    def forget_told(self, upto: int) -> None:
        self._soon(("DELETE FROM event WHERE number <= ?", [(upto,)]))

    async def prune(self, ulids: Sequence[str]) -> None:
        await self._do(("DELETE FROM sandbox WHERE ended > 0 AND ulid = ?", [(ulid,) for ulid in ulids]))

    async def put_commands(self, rows: Sequence[CommandRow], told: Sequence[Told] = ()) -> None:
        await self._do((_PUT_COMMAND, [(row.ulid, row.seq, row.step, row.done, row.entry, row.result) for row in rows]), (_KEEP, told))

    async def drop_commands(self, ulid: str, seqs: Sequence[int]) -> None:
        await self._do(("DELETE FROM command WHERE ulid = ? AND seq = ?", [(ulid, seq) for seq in seqs]))

    async def trim_commands(self, upto: Sequence[tuple[str, int]]) -> None:
        await self._do(("DELETE FROM command WHERE ulid = ? AND step = '' AND seq <= ?", list(upto)))

    async def commands(self, ulid: str) -> list[CommandRow]:
        found = await self._read(f"{_COMMANDS} WHERE ulid = ? ORDER BY seq", ulid)
        return [CommandRow(ulid=row[0], seq=row[1], step=row[2], done=bool(row[3]), entry=row[4]) for row in found]

    async def result(self, ulid: str, seq: int) -> bytes:
        found = await self._read("SELECT result FROM command WHERE ulid = ? AND seq = ?", ulid, seq)
        return bytes(found[0][0]) if found else b""

    async def open_steps(self) -> list[CommandRow]:
        found = await self._read(f"{_COMMANDS} WHERE step != '' AND done = 0 ORDER BY ulid, seq")
        return [CommandRow(ulid=row[0], seq=row[1], step=row[2], entry=row[4]) for row in found]

    async def put_checkpoint(self, ulid: str, entry: bytes, told: Sequence[Told] = ()) -> None:
        await self._do(("INSERT OR REPLACE INTO checkpoint (ulid, entry) VALUES (?, ?)", [(ulid, entry)]), (_KEEP, told))

    async def drop_checkpoints(self, ulids: Sequence[str]) -> None:
        await self._do(("DELETE FROM checkpoint WHERE ulid = ?", [(ulid,) for ulid in ulids]))

    async def checkpoints(self) -> dict[str, bytes]:
        return {row[0]: bytes(row[1]) for row in await self._read("SELECT ulid, entry FROM checkpoint")}

    async def put_drain(self, order: str) -> None:
        await self._do(("INSERT OR REPLACE INTO meta (key, value) VALUES ('drain', ?)", [(order,)]))

    async def _read(self, sql: str, *args: object) -> list[tuple[Any, ...]]:
        """On a connection of its own: a reader waits for no writer (WAL)."""

        def read() -> list[tuple[Any, ...]]:
            db = sqlite3.connect(f"file:{quote(str(self._dir / 'edge.db'))}?mode=ro", uri=True)
            try:
                return db.execute(sql, args).fetchall()
            finally:
                db.close()

        try:
            return await asyncio.to_thread(read)
        except sqlite3.Error as error:
            raise self._wrong("the Edge's records cannot be read", error) from error

    async def close(self) -> None:
        """Everything posted before is written."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._hand_over()
            self._jobs.put(None)
            await asyncio.get_running_loop().run_in_executor(None, thread.join)

    async def _do(self, *writes: _Write) -> None:
        """All of them or none; on disk when it returns."""
        if any(rows for _, rows in writes):
            await self._put(writes, waited_for=True)

    def _soon(self, *writes: _Write) -> asyncio.Future[None]:
        written = self._put(writes, waited_for=False)
        written.add_done_callback(lambda done: None if done.cancelled() else done.exception())  # told in the log
        return written

    def _put(self, writes: tuple[_Write, ...], *, waited_for: bool) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._thread is None or self._broken is not None:
            text = str(self._broken or "closed")
            future.set_exception(NodeError("the Edge's records cannot be written", reason="store", value=text))
        else:
            self._held.append((writes, future, waited_for))
            if waited_for:
                self._hand_over()
            elif len(self._held) == 1:
                asyncio.get_running_loop().call_later(LATER, self._hand_over)
        return future

    def _hand_over(self) -> None:
        held, self._held = self._held, []
        for job in held:
            if self._broken is None:
                self._jobs.put(job)
            elif not job[1].done():
                job[1].set_exception(NodeError("the Edge's records cannot be written", reason="store", value=str(self._broken)))

    # ------------------------------------------------------------------ the writer thread
    def _write(self, opened: asyncio.Future[list[Record]]) -> None:
        loop = cast(asyncio.AbstractEventLoop, self._loop)
        try:
            db = self._connect()
            records = []
            for ulid, blob, plan, *of in db.execute(_ALL):
                try:
                    record = _decode(blob)
                    record.plan = plan
                except msgspec.MsgspecError as error:  # one that cannot be read must not keep the whole node from serving
                    log.error("store.unreadable_record", ulid=ulid, error=str(error))
                    record = _remains(ulid, *of)
                records.append(record)
        except (Conflict, NodeError, OSError, sqlite3.Error, msgspec.MsgspecError) as error:
            self._unlock()
            ours = isinstance(error, Conflict | NodeError)
            _tell(loop, opened, error=error if ours else self._wrong("cannot open the Edge's records", error))
            return
        _tell(loop, opened, records)
        batch: list[_Job] = []
        try:
            while (job := self._jobs.get()) is not None:
                batch = [job]
                last = self._gather(batch)
                self._commit(db, loop, batch)
                if last:
                    break
        except BaseException as error:
            self._give_up(loop, batch, error)
            raise
        finally:
            with contextlib.suppress(sqlite3.Error):
                db.close()
            self._unlock()

    def _gather(self, batch: list[_Job]) -> bool:
        """Add to a commit what has come meanwhile; whether that was the end."""
        until = time.monotonic() + COMPANY
        waited_for = batch[0][2]
        with contextlib.suppress(queue.Empty):
            while len(batch) < 10_000:
                job = self._jobs.get_nowait() if waited_for else self._jobs.get(timeout=max(0.0, until - time.monotonic()))
                if job is None:
                    return True
                batch.append(job)
                waited_for = waited_for or job[2]
        return False

    def _give_up(self, loop: asyncio.AbstractEventLoop, jobs: list[_Job], error: BaseException) -> None:
        """The writer ends by a fault of its own: who waits is told, and so is who comes later."""
        self._broken = error
        with contextlib.suppress(queue.Empty):
            while True:
                if (job := self._jobs.get_nowait()) is not None:
                    jobs.append(job)
        for _, future, _ in jobs:
            _tell(loop, future, error=NodeError("the Edge's records cannot be written", reason="store", value=str(error)))

    def _commit(self, db: sqlite3.Connection, loop: asyncio.AbstractEventLoop, batch: list[_Job]) -> None:
        """One transaction for all; should it fail, each job alone, so that one bad row does not take the others with it."""
        try:
            with _transaction(db):
                for writes, _, _ in batch:
                    for sql, rows in writes:
                        db.executemany(sql, rows)
        except Exception as error:  # noqa: BLE001 - whatever a row raises (a number too large for SQLite) is that row's: the writer outlives it
            if len(batch) > 1:
                for job in batch:
                    self._commit(db, loop, [job])
                return
            if not isinstance(error, sqlite3.IntegrityError):
                log.error("store.write_failed", error=str(error))
            _tell(loop, batch[0][1], error=self._wrong("record not written", error))
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_settle, [future for _, future, _ in batch])

    def _wrong(self, text: str, error: Exception) -> NodeError:
        return NodeError(f"{text} in {self._dir}: {error}", reason="store")

    def _connect(self) -> sqlite3.Connection:
        self._dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(self._dir / "edge.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict("another Edge holds this state directory", field="edge.state_dir", value=str(self._dir)) from None
        db = sqlite3.connect(self._dir / "edge.db", isolation_level=None, cached_statements=16)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.execute("PRAGMA wal_autocheckpoint=4000")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > len(MIGRATIONS):
            raise Conflict(
                f"the records were written by a newer version (format {version}, this one reads up to {len(MIGRATIONS)})",
                field="edge.state_dir",
                value=str(self._dir),
                reason="version",
                fix="start the newer version, or give this one a state directory of its own",
            )
        with _transaction(db):
            for statements in MIGRATIONS[version:]:
                for statement in statements:
                    db.execute(statement)
            db.execute(f"PRAGMA user_version={len(MIGRATIONS)}")
            db.execute("INSERT OR IGNORE INTO meta VALUES ('uuid', ?), ('boot', ?), ('starts', '0')", (uuid.uuid4().hex, _boot_id()))
            db.execute("UPDATE meta SET value = value + 1 WHERE key = 'starts'")
        meta = dict(db.execute("SELECT key, value FROM meta"))
        self._starts = int(meta["starts"])
        self.incarnation = f"{meta['uuid']}.{self._starts}"
        self.rebooted = meta["boot"] != _boot_id()
        self.drain = meta.get("drain", "")
        return db

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class MemoryStore:
    """`Store` without a disk: it promises nothing after the process ends."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self._commands: dict[tuple[str, int], CommandRow] = {}
        self._checkpoints: dict[str, bytes] = {}
        self._events: dict[int, bytes] = {}
        self.incarnation = f"{uuid.uuid4().hex}.1"
        self.rebooted = False
        self.drain = ""

    async def settle(self) -> None:
        return None

    async def renew(self) -> str:
        uid, _, starts = self.incarnation.partition(".")
        return f"{uid}.{int(starts) + 1}"

    async def open(self) -> list[Record]:
        return list(self.records.values())

    async def insert(self, records: Iterable[Record], told: Sequence[Told] = ()) -> None:
        for record in records:
            self.records[record.ulid] = record
        self._events |= dict(told)

    async def update(self, record: Record, told: Sequence[Told] = ()) -> None:
        self.records[record.ulid] = record
        self._events |= dict(told)

    def post(self, record: Record, told: Sequence[Told] = ()) -> asyncio.Future[None]:
        self.records[record.ulid] = record
        return self.keep(told)

    def keep(self, told: Sequence[Told]) -> asyncio.Future[None]:
        self._events |= dict(told)
        kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        kept.set_result(None)
        return kept

    async def untold(self) -> list[Told]:
        return sorted(self._events.items())

    def forget_told(self, upto: int) -> None:
        self._events = {number: body for number, body in self._events.items() if number > upto}

    def _forget_commands(self, ulid: str) -> None:
        for key in [key for key in self._commands if key[0] == ulid]:
            del self._commands[key]

    async def put_commands(self, rows: Sequence[CommandRow], told: Sequence[Told] = ()) -> None:
        self._events |= dict(told)
        self._commands |= {(row.ulid, row.seq): row for row in rows}

    async def drop_commands(self, ulid: str, seqs: Sequence[int]) -> None:
        for seq in seqs:
            self._commands.pop((ulid, seq), None)

    async def trim_commands(self, upto: Sequence[tuple[str, int]]) -> None:
        for ulid, seq in upto:
            for key in [key for key, row in self._commands.items() if key[0] == ulid and key[1] <= seq and not row.step]:
                del self._commands[key]

    async def commands(self, ulid: str) -> list[CommandRow]:
        return [row for key, row in sorted(self._commands.items()) if key[0] == ulid]

    async def result(self, ulid: str, seq: int) -> bytes:
        row = self._commands.get((ulid, seq))
        return row.result if row is not None else b""

    async def open_steps(self) -> list[CommandRow]:
        return [row for _, row in sorted(self._commands.items()) if row.step and not row.done]

    async def put_checkpoint(self, ulid: str, entry: bytes, told: Sequence[Told] = ()) -> None:
        self._events |= dict(told)
        self._checkpoints[ulid] = entry

    async def drop_checkpoints(self, ulids: Sequence[str]) -> None:
        for ulid in ulids:
            self._checkpoints.pop(ulid, None)

    async def checkpoints(self) -> dict[str, bytes]:
        return dict(self._checkpoints)

    async def put_drain(self, order: str) -> None:
        self.drain = order

    async def prune(self, ulids: Sequence[str]) -> None:
        for ulid in ulids:
            if ulid in self.records and self.records[ulid].ended_ts > 0:
                del self.records[ulid]
                self._forget_commands(ulid)

    async def close(self) -> None:
        return None


def _remains(ulid: str, burst: str, index: int, principal: str, project: str, ended: float) -> Record:
    """What is known of a sandbox whose record cannot be read: whose it was, and whether it had ended. It has no plan."""
    state, how = State.STOPPING, None
    if ended:
        state, how = State.STOPPED, Exit(reason=ExitReason.BROKEN, detail="what was recorded of it cannot be read", wall_ts=ended)
    spec = SandboxSpec(image="unknown")
    return Record(
        ulid=ulid, burst=burst, index=index, principal=principal, project=project, spec=spec, state=state, exit=how, ended_ts=ended
    )


def _boot_id() -> str:
    return BOOT_ID.read_text().strip()


def _row(record: Record) -> tuple[Any, ...]:
    return record.state, _encode(record), record.ended_ts, record.ulid


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection) -> Any:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise
    faults.reached("store.commit")
    db.execute("COMMIT")
    faults.reached("store.committed")


def _settle(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def _tell(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], result: Any = None, error: BaseException | None = None) -> None:
    def tell() -> None:
        if not future.done():
            future.set_result(result) if error is None else future.set_exception(error)

    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(tell)
