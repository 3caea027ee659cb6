"""The demo's recording and the judgement of answers, without any sandbox."""

from __future__ import annotations

import msgspec
import pytest

from examples import rollout_worker
from examples.demo import AGENT, Member, role_of, rows
from examples.misbehave import COMMANDS, Verdict
from examples.trajectory import Answer, Edit, Expect, Outcome, Trajectory, complaints


def test_recording_is_whole() -> None:
    """The recording names a pinned source with a licence, fails its tests before the edit and passes them after it."""
    trajectory = Trajectory.load()
    assert len(trajectory.workspace.sha256) == 64
    assert trajectory.workspace.license
    tests = [step.expect.exit_code for step in trajectory.steps if "pytest" in step.command]
    assert tests == [1, 0]
    assert {step.tool for step in trajectory.steps} == {"shell", "read", "replace"}
    assert all("==" in wheel for wheel in trajectory.toolkit.wheels)


def test_the_edit_undoes_the_seeded_bug() -> None:
    """The recorded edit turns the seeded bug back into the original text."""
    trajectory = Trajectory.load()
    original = f"{trajectory.seeded_bug.old}        except KeyError:\n"
    edit = next(step for step in trajectory.steps if step.tool == "replace")
    assert Edit(edit.path, edit.old, edit.new).apply(trajectory.seeded_bug.apply(original)) == original


def test_unknown_keys_of_a_recording_are_refused() -> None:
    """A misspelt key of a recording is an error, not a step that checks nothing."""
    raw = msgspec.to_builtins(Trajectory.load())
    raw["steps"][0]["expects"] = {}
    with pytest.raises(msgspec.ValidationError, match="expects"):
        msgspec.convert(raw, Trajectory)


@pytest.mark.parametrize(
    ("answer", "count"),
    [
        (Answer("it says abc", 0, 0.1), 0),
        (Answer("it says abc", 1, 0.1), 1),
        (Answer("it says nothing", 0, 0.1), 1),
        (Answer("abc but bad", 0, 0.1), 1),
        (Answer("abc", 0, 0.1, truncated=True), 1),
    ],
)
def test_complaints_name_every_difference(answer: Answer, count: int) -> None:
    """Exit code, missing text, forbidden text and truncation are each a complaint."""
    assert len(complaints(Expect(0, ("{nonce}",), ("bad",)), answer, "abc")) == count


def test_an_edit_wants_exactly_one_place() -> None:
    """An edit whose text stands twice or nowhere is refused."""
    for text in ("", "x x"):
        with pytest.raises(ValueError, match="stands there"):
            Edit("f", "x", "y").apply(text)


def test_eight_of_sixty_four_misbehave() -> None:
    """Two sandboxes misbehave in each of the four ways, and the rest are agents."""
    roles = [role_of(order) for order in range(64)]
    assert {kind: roles.count(kind) for kind in COMMANDS} == dict.fromkeys(COMMANDS, 2)
    assert roles.count(AGENT) == 56


def test_table_counts_only_what_passed() -> None:
    """A member with a problem is in its group's count and not among those as expected."""
    good = Member(AGENT, 10.0, outcome=Outcome(problems=[], probes=[(1.0, 1.0), (2.0, 2.0)]), problems=[])
    bad = Member(AGENT, 30.0, outcome=Outcome(problems=["wrong"], probes=[(1.0, 3.0)]), problems=[])
    yes = Member("yes", 20.0, verdict=Verdict("yes", "output truncated", problems=[]), problems=[])
    table = {row.group: row for row in rows([good, bad, yes])}
    assert (table[AGENT].count, table[AGENT].passed, table[AGENT].create_p50_ms) == (2, 1, 20.0)
    assert table["yes"].became == "output truncated"


def test_an_advantage_is_what_is_above_the_group() -> None:
    """Rewards against their group's mean, in its deviations; a group that is all alike teaches nothing."""
    scores = rollout_worker.advantages([0.0, 1.0, 1.0, 0.0])
    assert [round(each, 3) for each in scores] == [-1.0, 1.0, 1.0, -1.0]
    assert rollout_worker.advantages([0.5, 0.5]) == [0.0, 0.0]


def test_what_did_better_becomes_likelier() -> None:
    """One step of the policy; the same key chooses the same, so that a second controller asks for the same commands."""
    policy = rollout_worker.learned([[0.0, 0.0], [0.0, 0.0]], [[0, 1], [1, 1]], [1.0, -1.0])
    assert policy[0][0] > policy[0][1]
    assert policy[1] == [0.0, 0.0]
    assert [rollout_worker.sample(policy[0], "a key") for _ in range(3)] == [rollout_worker.sample(policy[0], "a key")] * 3
