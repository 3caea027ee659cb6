"""The oracle of `make chaos` finds each kind of contradiction, and the plan of its kills is the seed's."""

from __future__ import annotations

import pytest

from dsec import faults
from dsec.bus.messages import Event
from dsec.model import State
from tests.chaos import kills
from tests.chaos.model import Oracle, Wrong, life, numbers

SB = "n1-01ARZ3NDEKTSV4RRFFQ69G5FAV"


def events(*kinds: str, start: int = 1, incarnation: str = "u.1") -> list[Event]:
    return [Event(kind=kind, sb=SB, edge="n1", incarnation=incarnation, n=number) for number, kind in enumerate(kinds, start)]


def stepped(*lines: str) -> list[Wrong]:
    """What is wrong when these effects are found after two steps, of which the first was answered."""
    oracle = Oracle()
    oracle.asks(SB, "a")
    oracle.asks(SB, "b")
    oracle.answered(SB, "a", b"result a\n")
    oracle.effects(SB, lines)
    return oracle.wrong


def test_effects_of_steps() -> None:
    """Each once, an answered one at least, one without an answer perhaps; nothing else."""
    assert not stepped("a")
    assert not stepped("a", "b")
    assert "executed 2 times" in stepped("a", "a")[0].text
    assert "has left nothing" in stepped("b")[0].text
    assert "nothing that was asked for" in stepped("a", "c")[0].text


def test_a_step_has_one_result() -> None:
    """Whatever is answered later under the same key is the same."""
    oracle = Oracle()
    oracle.answered(SB, "a", b"1")
    oracle.answered(SB, "a", b"1")
    assert not oracle.wrong
    oracle.answered(SB, "a", b"2")
    assert "b'1' and then with b'2'" in oracle.wrong[0].text


def test_what_lives_and_what_does_not() -> None:
    """Made and not ended: listed; ended: not; nobody's: not; asked to end: either."""
    oracle = Oracle()
    oracle.ready(SB)
    assert oracle.listed({SB: State.PAUSED}) == []
    assert "should live" in oracle.listed({})[0].text
    assert "nobody was told of it" in oracle.listed({SB: State.RUNNING, "n1-x": State.RUNNING})[0].text
    oracle.stopping(SB)
    assert oracle.listed({}) == oracle.listed({SB: State.STOPPING}) == []
    oracle.stopped(SB, "stopped")
    assert "told to have ended" in oracle.listed({SB: State.RUNNING})[0].text
    oracle.ready("n1-y")
    oracle.gone("n1-y", "broken")
    assert "ended by itself (broken)" in oracle.wrong[0].text
    with_its_edge = Oracle(fragile=True)
    with_its_edge.ready(SB)
    with_its_edge.gone(SB, "broken")
    assert not with_its_edge.wrong


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        (("created", "running", "paused", "resumed", "packed", "step", "stopped"), ""),
        (("created", "running", "paused", "packed", "resumed"), ""),
        (("created", "stopped"), ""),
        (("created", "running", "running"), "running while it was running"),
        (("created", "paused"), "paused while it was pending"),
        (("created", "running", "resumed"), "resumed while it was running"),
        (("created", "created"), "created twice"),
        (("created", "stopped", "stopped"), "stopped twice"),
        (("created", "running", "stopped", "paused"), "paused while it was stopped"),
        (("running",), "before it was created"),
        (("created", "running", "exploded"), "unknown event"),
    ],
)
def test_what_the_table_forbids(kinds: tuple[str, ...], text: str) -> None:
    """A sandbox's events are those of a life that the lifecycle's table allows."""
    found = life(events(*kinds))
    assert (text in found[0].text) if text else not found


def test_a_restarted_edge_may_have_done_more_than_the_one_before_had_told() -> None:
    """It finds a sandbox paused whose pause nobody told; within one life of the Edge that is a contradiction."""
    first = events("created", "running")
    assert not life([*first, *events("resumed", incarnation="u.2")])
    assert not life([*first, *events("step", "resumed", incarnation="u.2")])
    assert life([*first, *events("resumed", start=3)])
    assert not life([*events("stopped", incarnation="u.10"), *first])  # in the order of the incarnations, not of arrival


def test_no_number_is_two_events() -> None:
    """Each incarnation counts for itself, and may leave numbers out."""
    assert not numbers([*events("created", "running"), *events("stopped", incarnation="u.2", start=7)])
    assert "came twice" in numbers([*events("created"), *events("created")])[0].text


def test_the_stream_tells_of_all_that_was_acknowledged() -> None:
    """A sandbox that somebody was told of was created, ran and, if that was told too, stopped; and each result has one event."""
    oracle = Oracle()
    oracle.ready(SB)
    oracle.answered(SB, "a", b"")
    told = [*events("created", "running"), Event(kind="step", sb=SB, edge="n1", incarnation="u.1", n=3, detail={"step": "a"})]
    assert oracle.stream(told) == []
    assert oracle.stream(told[:2]) == [Wrong("lost event", f"{SB}: 0 events tell of step a")]
    oracle.stopped(SB, "stopped")
    assert oracle.stream(told) == [Wrong("lost event", f"{SB}: no event tells that it was stopped")]


def test_a_first_moment_may_go_untold() -> None:
    """Told to be ready, asked to stop at once, and its Edge died: the next one knows only its beginning and its end."""
    oracle = Oracle()
    oracle.ready(SB)
    short = [*events("created"), *events("stopped", incarnation="u.2")]
    assert oracle.stream(short) == [Wrong("lost event", f"{SB}: no event tells that it was running")]
    oracle.stopping(SB)
    assert oracle.stream(short) == []
    assert oracle.stream(events("created", "stopped"))


def test_the_seed_decides() -> None:
    """The same seed kills the same at the same time; another one does not."""
    plans = [[kills.plan(seed, number, 4.0, container=True) for number in range(50)] for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]
    assert all(0 <= kill.after <= 4.0 for plan in plans[0] for kill in plan)
    assert {kill.victim for plan in plans[0] for kill in plan} == set(kills.WEIGHTS)
    without = {kill.victim for number in range(50) for kill in kills.plan(1, number, 4.0, container=False)}
    assert not without & set(kills.ONLY_CONTAINER)


@pytest.mark.parametrize("container", [True, False])
def test_each_point_has_its_turn(container: bool) -> None:
    """An actor that dies at each point it is told to reaches all of them, those too that come only after the death at another."""
    for kind in ("edge", "scheduler"):
        points, last = kills.Points(7, kind, container=container), ""
        for _ in range(400):
            last, _, passes = points.next(last).partition(":")
            assert int(passes) > 0
            points.died_at(last)
            if not points.missing:
                break
        assert not points.missing
    assert set(kills.AFTER) | set(kills.AFTER.values()) | set(kills.CONTAINER) | set(kills.SCHEDULERS) <= faults.POINTS.keys()


def test_a_dense_campaign_has_no_peace() -> None:
    """Its Edges have an order to die at each start, also when every point was reached; and as many die from outside as it says."""
    points = kills.Points(7, "edge", container=True, dense=True)
    for name in points.names:
        points.died_at(name)
    assert all(points.next() for _ in range(200))
    assert {len(kills.plan(1, number, 15.0, container=True, times=(16, 22))) for number in range(50)} <= set(range(16, 23))
