"""The lifecycle table: what leads where, what is harmless, what is impossible."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.actors.lifecycle import IGNORED, TABLE, Clocks, Do, ImpossibleEvent, Life, On, Story, adoption, step
from dsec.model import Exit, ExitReason, State

LIVE = [State.CREATING, State.RUNNING, State.PAUSING, State.PAUSED, State.RESUMING, State.CAPTURING]


def walk(*events: On) -> Life:
    life = Life()
    for event in events:
        life, _ = step(life, event)
    return life


def test_a_whole_life() -> None:
    """Placed, ready, paused, resumed, stopped, released."""
    life = walk(On.PLACED, On.READY, On.PAUSE, On.PAUSED_OK, On.RESUME, On.RESUMED_OK, On.STOP, On.RELEASED)
    assert life.state is State.STOPPED
    assert life.exit is not None
    assert life.exit.reason is ExitReason.REQUESTED


@pytest.mark.parametrize("state", list(State))
def test_stop_is_never_rejected(state: State) -> None:
    """In every state `stop` leads to stopping or stopped, or changes nothing where it is on its way."""
    life, _ = step(Life(state=state), On.STOP)
    assert life.state in (State.STOPPING, State.STOPPED)


def test_pause_and_resume_are_idempotent() -> None:
    """A second pause or resume changes nothing."""
    for state, event in [(State.PAUSED, On.PAUSE), (State.PAUSING, On.PAUSE), (State.RUNNING, On.RESUME), (State.RESUMING, On.RESUME)]:
        life, effects = step(Life(state=state), event)
        assert life.state is state
        assert effects == (Do.WAKE_WAITERS,)


@pytest.mark.parametrize("late", [On.LAUNCH_FAILED, On.PAUSED_OK, On.PAUSE_UNDONE, On.RESUMED_OK, On.RESUME_UNDONE, On.CAPTURE_UNDONE])
@pytest.mark.parametrize("state", [State.STOPPING, State.STOPPED])
def test_what_ends_after_its_sandbox_changes_nothing(state: State, late: On) -> None:
    """A launch, a pause, a resume or a capture that a stop has overtaken may end when the sandbox has been freed already."""
    before = Life(state=state, exit=Exit(reason=ExitReason.REQUESTED))
    assert step(before, late) == (before, (Do.WAKE_WAITERS,))


def test_one_door_out() -> None:
    """What holds resources reaches stopped only through stopping."""
    for (old, _), new in TABLE.items():
        if new is State.STOPPED:
            assert old in (State.PENDING, State.STOPPING)


def test_capturing_returns_to_where_it_began() -> None:
    """A snapshot of a paused sandbox leaves it paused."""
    assert walk(On.PLACED, On.READY, On.PAUSE, On.PAUSED_OK, On.CAPTURE, On.CAPTURED).state is State.PAUSED
    assert walk(On.PLACED, On.READY, On.CAPTURE, On.CAPTURE_UNDONE).state is State.RUNNING


def test_an_impossible_event_tells_the_story() -> None:
    """The error names the event, the state and what happened before."""
    story = Story()
    life, _ = step(Life(), On.PLACED, story=story)
    with pytest.raises(ImpossibleEvent, match=r"resumed_ok cannot happen in state creating: pending -> creating: placed"):
        step(life, On.RESUMED_OK, story=story)


def test_the_first_reason_of_an_end_is_kept() -> None:
    """A stop that comes after an OOM does not hide it."""
    life, _ = step(Life(state=State.RUNNING), On.EXITED, Exit(reason=ExitReason.OOM))
    life, _ = step(life, On.STOP)
    life, _ = step(life, On.RELEASED)
    assert life.exit is not None
    assert life.exit.reason is ExitReason.OOM


def test_release_that_fails_stays_in_stopping_with_its_reservation() -> None:
    """A sandbox that cannot be freed is shown as stuck and gives nothing back."""
    life, effects = step(Life(state=State.STOPPING, ready=True), On.RELEASE_FAILED, detail="busy mount")
    assert life.state is State.STOPPING
    assert life.release_error == "busy mount"
    assert Do.FREE_RESERVATION not in effects
    life, effects = step(life, On.RELEASED)
    assert Do.FREE_RESERVATION in effects
    assert life.release_error == ""


def test_a_create_that_never_was_ready_is_told_as_failed() -> None:
    """Stopped before ready: the caller hears of a failure, not of an end."""
    _, effects = step(walk(On.PLACED, On.LAUNCH_FAILED), On.RELEASED)
    assert Do.ANNOUNCE_FAILED in effects
    _, effects = step(walk(On.PLACED, On.READY, On.STOP), On.RELEASED)
    assert Do.ANNOUNCE_STOPPED in effects
    _, effects = step(Life(), On.DEADLINE)
    assert Do.ANNOUNCE_FAILED in effects


@given(st.lists(st.sampled_from(list(On)), max_size=40))
def test_any_walk_keeps_the_rules(events: list[On]) -> None:
    """Whatever comes in whatever order: one release, one announcement of the end, nothing after stopped, an exit when it ends."""
    life, story = Life(), Story()
    freed = announced = released = 0
    for event in events:
        before = life
        try:
            life, effects = step(life, event, story=story)
        except ImpossibleEvent:
            assert (before.state, event) not in TABLE
            assert (before.state, event) not in IGNORED
            continue
        released += Do.RELEASE in effects and before.state is not State.STOPPING
        announced += (Do.ANNOUNCE_STOPPED in effects) + (Do.ANNOUNCE_FAILED in effects)
        freed += life.state is State.STOPPED and Do.FREE_RESERVATION in effects
        if life.state in (State.STOPPING, State.STOPPED):
            assert life.exit is not None
        if before.state is State.STOPPED:
            assert life is before
    assert released <= 1
    assert announced == freed == (life.state is State.STOPPED)
    assert len(story.lines) <= 64


@pytest.mark.parametrize(
    ("recorded", "alive", "frozen", "state"),
    [
        (State.RUNNING, True, False, State.RUNNING),
        (State.PAUSING, True, True, State.PAUSED),
        (State.PAUSING, True, False, State.RUNNING),
        (State.RESUMING, True, True, State.PAUSED),
        (State.RESUMING, True, False, State.RUNNING),
        (State.CAPTURING, True, True, State.PAUSED),
        (State.CREATING, True, False, State.RUNNING),
        (State.PENDING, True, True, State.PAUSED),
        (State.CREATING, False, False, State.STOPPING),
        (State.PENDING, False, False, State.STOPPING),
        (State.RUNNING, False, False, State.STOPPING),
        (State.STOPPING, True, False, State.STOPPING),
    ],
)
def test_adoption_follows_the_kernel(recorded: State, alive: bool, frozen: bool, state: State) -> None:
    """After a restart a sandbox is what the kernel shows, and what was half made is freed."""
    life, _ = step(Life(), adoption(recorded, alive, frozen))
    assert life.state is state


def test_clocks_stand_still_while_paused() -> None:
    """Neither the idle nor the absolute clock runs in a pause; the absolute one goes on afterwards."""
    clocks = Clocks(idle_s=10, ttl_left_s=30)
    clocks.start(100.0)
    assert clocks.due(State.RUNNING, 109.0) is None
    assert clocks.due(State.RUNNING, 110.0) is On.IDLE
    clocks.pause(110.0)
    assert clocks.due(State.PAUSED, 10_000.0) is None
    assert clocks.next(State.PAUSED) == 0.0
    clocks.start(10_000.0)
    assert clocks.ttl_left_s == pytest.approx(20.0)
    clocks.busy = 1
    assert clocks.due(State.RUNNING, 10_019.0) is None
    assert clocks.due(State.RUNNING, 10_020.0) is On.DEADLINE


def test_a_pause_may_have_an_end() -> None:
    """paused_ttl ends what nobody resumes."""
    clocks = Clocks(paused_ttl_s=60)
    clocks.pause(5.0)
    assert clocks.next(State.PAUSED) == 65.0
    assert clocks.due(State.PAUSED, 65.0) is On.DEADLINE
