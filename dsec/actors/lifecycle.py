"""The life of one sandbox, decided without I/O: ``step(life, event) -> (life, effects)``.

One visible table says which event leads where. Effects are instructions for the shell (dsec/actors/sandbox.py), and what becomes
of an effect is the next event. There is one door out: everything that holds resources leaves through `stopping`, so that release is
one code path. An event that cannot happen raises `ImpossibleEvent` with the sandbox's story. (Idea of a pure state machine that
answers with instructions: dask.distributed's worker_state_machine.)

Clocks are monotonic seconds of the Edge. While a sandbox is paused its idle and absolute clocks stand still.
"""

from __future__ import annotations

import enum
import sys

import msgspec

from dsec.errors import DsecError
from dsec.model import Exit, ExitReason, State

STORY = 64  # lines of story kept for each sandbox


class On(enum.StrEnum):
    """Events."""

    PLACED = "placed"  # its turn to be launched has come
    READY = "ready"
    LAUNCH_FAILED = "launch_failed"
    PAUSE = "pause"
    PAUSED_OK = "paused_ok"
    PAUSE_UNDONE = "pause_undone"
    RESUME = "resume"
    RESUMED_OK = "resumed_ok"
    RESUME_UNDONE = "resume_undone"
    CAPTURE = "capture"
    CAPTURED = "captured"
    CAPTURE_UNDONE = "capture_undone"
    STOP = "stop"
    EXITED = "exited"
    DEADLINE = "deadline"
    IDLE = "idle"
    LEASE = "lease"
    BROKEN = "broken"
    RELEASED = "released"
    RELEASE_FAILED = "release_failed"
    ADOPTED = "adopted"  # after a restart of the Edge: it runs
    ADOPTED_PAUSED = "adopted_paused"  # … it is frozen
    ADOPTED_PARTIAL = "adopted_partial"  # … something of it is left, which must be freed


class Do(enum.StrEnum):
    """Effects."""

    LAUNCH = "launch"
    PAUSE = "pause"
    RESUME = "resume"
    CAPTURE = "capture"
    RELEASE = "release"
    RECORD = "record"  # write the row: state and exit
    ANNOUNCE_READY = "announce_ready"
    ANNOUNCE_FAILED = "announce_failed"
    ANNOUNCE_STOPPED = "announce_stopped"
    ANNOUNCE_PAUSED = "announce_paused"
    ANNOUNCE_RESUMED = "announce_resumed"
    FREE_RESERVATION = "free_reservation"  # pausing ended: the ledger gets it back
    WAKE_WAITERS = "wake_waiters"


S = State
ORIGIN = None  # in the table: back to where capturing began

TABLE: dict[tuple[State, On], State | None] = {
    (S.PENDING, On.PLACED): S.CREATING,
    (S.PENDING, On.ADOPTED): S.RUNNING,
    (S.PENDING, On.ADOPTED_PAUSED): S.PAUSED,
    (S.PENDING, On.ADOPTED_PARTIAL): S.STOPPING,
    (S.PENDING, On.STOP): S.STOPPED,
    (S.PENDING, On.DEADLINE): S.STOPPED,
    (S.PENDING, On.LEASE): S.STOPPED,
    (S.PENDING, On.LAUNCH_FAILED): S.STOPPED,
    (S.CREATING, On.READY): S.RUNNING,
    (S.CREATING, On.LAUNCH_FAILED): S.STOPPING,
    (S.RUNNING, On.PAUSE): S.PAUSING,
    (S.RUNNING, On.CAPTURE): S.CAPTURING,
    (S.PAUSING, On.PAUSED_OK): S.PAUSED,
    (S.PAUSING, On.PAUSE_UNDONE): S.RUNNING,
    (S.PAUSED, On.RESUME): S.RESUMING,
    (S.PAUSED, On.CAPTURE): S.CAPTURING,
    (S.RESUMING, On.RESUMED_OK): S.RUNNING,
    (S.RESUMING, On.RESUME_UNDONE): S.PAUSED,
    (S.CAPTURING, On.CAPTURED): ORIGIN,
    (S.CAPTURING, On.CAPTURE_UNDONE): ORIGIN,
    (S.STOPPING, On.RELEASED): S.STOPPED,
    (S.STOPPING, On.RELEASE_FAILED): S.STOPPING,
}
_LIVE = (S.CREATING, S.RUNNING, S.PAUSING, S.PAUSED, S.RESUMING, S.CAPTURING)
for _state in _LIVE:
    for _event in (On.STOP, On.EXITED, On.DEADLINE, On.LEASE, On.BROKEN):
        TABLE[_state, _event] = S.STOPPING
# `idle` ends a sandbox whose on_idle is "stop"; with "pause" the shell sends `pause` instead.
for _state in (S.RUNNING, S.PAUSED):
    TABLE[_state, On.IDLE] = S.STOPPING

# Harmless repeats: nothing happens. `stop` is never rejected; pause, resume and stop are idempotent; late outcomes of an effect that
# `stop` has overtaken are dropped; a clock that fires while a sandbox is on its way is asked again later.
LATE = (On.READY, On.LAUNCH_FAILED, On.PAUSED_OK, On.PAUSE_UNDONE, On.RESUMED_OK, On.RESUME_UNDONE, On.CAPTURED, On.CAPTURE_UNDONE)
IGNORED: frozenset[tuple[State, On]] = frozenset(
    [(S.STOPPING, event) for event in (On.STOP, On.EXITED, On.DEADLINE, On.LEASE, On.BROKEN, On.IDLE)]
    + [(S.STOPPED, event) for event in (On.STOP, On.EXITED, On.DEADLINE, On.LEASE, On.BROKEN, On.IDLE, On.PLACED)]
    + [(state, event) for state in (S.STOPPING, S.STOPPED) for event in LATE]  # what was going on may end after its sandbox is gone
    + [(S.PAUSING, On.PAUSE), (S.PAUSED, On.PAUSE), (S.RESUMING, On.RESUME), (S.RUNNING, On.RESUME)]
    + [(state, On.IDLE) for state in (S.PENDING, S.CREATING, S.PAUSING, S.RESUMING, S.CAPTURING)]
)

_REASON = {
    On.STOP: ExitReason.REQUESTED,
    On.EXITED: ExitReason.EXITED,
    On.DEADLINE: ExitReason.DEADLINE,
    On.IDLE: ExitReason.IDLE,
    On.LEASE: ExitReason.LEASE,
    On.BROKEN: ExitReason.BROKEN,
    On.LAUNCH_FAILED: ExitReason.LAUNCH_FAILED,
    On.ADOPTED_PARTIAL: ExitReason.BROKEN,
}

_ENTER: dict[State, tuple[Do, ...]] = {
    S.CREATING: (Do.LAUNCH,),
    S.PAUSING: (Do.PAUSE,),
    S.RESUMING: (Do.RESUME,),
    S.CAPTURING: (Do.CAPTURE,),
    S.STOPPING: (Do.RECORD, Do.RELEASE),
}


class ImpossibleEvent(DsecError):
    """An event that the sandbox's state does not allow; the message ends with its story."""

    code = "conflict"


class Story(msgspec.Struct):
    """What happened to a sandbox, newest last, bounded."""

    lines: list[str] = []

    def add(self, line: str) -> None:
        self.lines.append(line)
        if len(self.lines) > STORY:
            del self.lines[1 : len(self.lines) - STORY + 1]  # the first line stays: it says where the sandbox came from


class Life(msgspec.Struct, frozen=True):
    """Where a sandbox stands. ``origin`` is where capturing returns to; ``ready`` says that it was announced."""

    state: State = S.PENDING
    origin: State | None = None
    exit: Exit | None = None
    ready: bool = False
    release_error: str = ""


def step(life: Life, event: On, how: Exit | None = None, *, detail: str = "", story: Story | None = None) -> tuple[Life, tuple[Do, ...]]:
    """The next life and what the shell must do, in order.

    Args:
        how: how it ended, when the event knows (exited: code, signal, oom); else made from the event and ``detail``.
        story: gets one line for each event; quoted when the event is impossible.

    Raises:
        ImpossibleEvent: the table has no such move.
    """
    old = life.state
    if (old, event) in IGNORED:
        if story is not None:
            story.add(f"{old}: {event} (nothing to do)")
        return life, (Do.WAKE_WAITERS,)
    if (old, event) not in TABLE:
        lines = " | ".join(story.lines[-12:]) if story is not None else "no story"
        raise ImpossibleEvent(f"event {event} cannot happen in state {old}: {lines}", reason=str(old))
    new = TABLE[old, event] or life.origin or S.RUNNING
    if story is not None:
        story.add(f"{old} -> {new}: {event} ({detail})" if detail else sys.intern(f"{old} -> {new}: {event}"))  # of a thousand the same
    return _enter(life, old, event, new, how, detail)


def _enter(life: Life, old: State, event: On, new: State, how: Exit | None, detail: str) -> tuple[Life, tuple[Do, ...]]:
    if new is S.STOPPING and old is S.STOPPING:  # release_failed: stays, is retried, keeps its reservation
        return msgspec.structs.replace(life, release_error=detail or "release failed"), (Do.WAKE_WAITERS,)
    ended = life.exit
    if ended is None and event in _REASON:
        ended = how or Exit(reason=_REASON[event], detail=detail)
    origin = old if new is S.CAPTURING else None
    ready = life.ready or (new is S.RUNNING and event in (On.READY, On.ADOPTED)) or (new is S.PAUSED and event is On.ADOPTED_PAUSED)
    after = Life(state=new, origin=origin, exit=ended, ready=ready)
    effects = list(_ENTER.get(new, ()))
    if event is On.READY:
        effects.append(Do.ANNOUNCE_READY)  # its launch has recorded it already: durable before it is told
    elif event is On.PAUSED_OK:
        effects += [Do.ANNOUNCE_PAUSED, Do.RECORD, Do.FREE_RESERVATION]  # what is told is on disk with what tells it
    elif event is On.RESUMED_OK:
        effects += [Do.ANNOUNCE_RESUMED, Do.RECORD]
    elif event in (On.PAUSE, On.RESUME, On.ADOPTED, On.ADOPTED_PAUSED):
        effects.append(Do.RECORD)
    if new is S.STOPPED:
        # What was never announced as ready has failed in its caller's eyes, whatever ended it.
        effects += [Do.ANNOUNCE_STOPPED if after.ready else Do.ANNOUNCE_FAILED, Do.RECORD, Do.FREE_RESERVATION]
    effects.append(Do.WAKE_WAITERS)
    return after, tuple(effects)


def adoption(recorded: State, alive: bool, frozen: bool) -> On:
    """The event with which a recorded sandbox begins again, by what the kernel shows. It is fed to a fresh `Life` (pending).

    pausing -> paused or running, resuming -> paused or running, capturing -> origin, pending and creating -> running: that it runs is told
    before it is on disk, so what is found alive and whole may have been told (`Adoption._find` sees to both words).
    """
    if not alive or recorded in (S.STOPPING, S.STOPPED):
        return On.ADOPTED_PARTIAL
    return On.ADOPTED_PAUSED if frozen else On.ADOPTED


class Clocks(msgspec.Struct):
    """Deadlines of one sandbox in monotonic seconds; 0 = none. ``busy`` counts what keeps it from being idle."""

    idle_s: float = 0.0
    ttl_left_s: float = 0.0  # 0 = no absolute life
    paused_ttl_s: float = 0.0
    last_active: float = 0.0
    running_since: float = 0.0
    paused_since: float = 0.0
    busy: int = 0

    def start(self, now: float) -> None:
        """It runs (again): idle begins anew, the absolute clock goes on."""
        self.last_active = self.running_since = now
        self.paused_since = 0.0

    def pause(self, now: float) -> None:
        """It is paused: both clocks stand still."""
        if self.ttl_left_s and self.running_since:
            self.ttl_left_s = max(0.001, self.ttl_left_s - (now - self.running_since))
        self.running_since, self.paused_since = 0.0, now

    def next(self, state: State) -> float:
        """When the sweep must look at it again; 0 = never."""
        if state is S.PAUSED:
            return self.paused_since + self.paused_ttl_s if self.paused_ttl_s else 0.0
        if state is not S.RUNNING:
            return 0.0
        times = []
        if self.idle_s:
            times.append(self.last_active + self.idle_s)
        if self.ttl_left_s:
            times.append(self.running_since + self.ttl_left_s)
        return min(times) if times else 0.0

    def due(self, state: State, now: float) -> On | None:
        """Which clock has run out, if any."""
        if state is S.PAUSED:
            return On.DEADLINE if self.paused_ttl_s and now - self.paused_since >= self.paused_ttl_s else None
        if state is not S.RUNNING:
            return None
        if self.ttl_left_s and now - self.running_since >= self.ttl_left_s:
            return On.DEADLINE
        if self.idle_s and not self.busy and now - self.last_active >= self.idle_s:
            return On.IDLE
        return None
