"""The Scheduler's bookkeeping of a burst."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.actors import burst
from dsec.actors.burst import Batch, Slice
from dsec.actors.placement import Unplaced, requirement
from dsec.bus.messages import CreateItem, LaunchEnvelope, LaunchItem, Refusal
from dsec.errors import Busy, DeadlineExceeded, InvalidRequest, NodeError, NotFound, Unavailable
from dsec.model import Resources, SandboxSpec


def raw(spec: SandboxSpec) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(spec))


def a_slice(count: int = 4, **more: Any) -> Slice:
    spec = SandboxSpec(image="x")
    fields: dict[str, Any] = {
        "principal": "me", "project": "p", "specs": [raw(spec)], "needs": [requirement(spec)],
        "items": [CreateItem(spec=0, first=0, count=count)], "inbox": "i", "deadline": 10.0, "lease": None,
    }  # fmt: skip
    return Slice("B", 0, **(fields | more))


def sent(s: Slice, edge: str = "e", indices: tuple[int, ...] = (0, 1, 2, 3)) -> Batch:
    s.groups()
    batch = Batch(edge, (), tuple(LaunchItem(index=i, spec=0) for i in indices), tuple((i, 0) for i in indices))
    s.sent(batch)
    return batch


@given(st.integers(1, 200), st.integers(1, 40), st.integers(600, 5_000))
def test_batches_stay_below_their_limit_and_lose_nothing(count: int, specs: int, limit: int) -> None:
    """Every (index, spec) arrives once, under its own spec's bytes, in messages below the limit."""
    raws = [raw(SandboxSpec(image=f"image-{n}", labels={"n": "x" * (n % 50)})) for n in range(specs)]
    pairs = [(index, index % specs) for index in range(count)]
    seen = []
    for batch in burst.batches("e", pairs, raws, limit):
        message = LaunchEnvelope(burst="B", principal="me", project="p", specs=batch.specs, items=batch.items, inbox="i", deadline_ms=1)
        assert len(msgspec.msgpack.encode(message)) <= limit + 200
        seen += [(item.index, bytes(batch.specs[item.spec])) for item in batch.items]
    assert seen == [(index, bytes(raws[spec])) for index, spec in pairs]


def test_items_must_make_sense() -> None:
    """Spec numbers, counts and totals are checked."""
    assert burst.check_items(2, [CreateItem(spec=1, first=0, count=5)]) == 5
    for items in ([CreateItem(spec=2, first=0)], [CreateItem(spec=0, first=0, count=0)], [], [CreateItem(spec=0, first=0, count=10**6)]):
        with pytest.raises(InvalidRequest):
            burst.check_items(2, items)


def test_a_refusal_is_placed_again_and_a_final_one_fails() -> None:
    """Busy leads elsewhere; the caller's fault comes back to the caller."""
    s = a_slice()
    batch = sent(s)
    s.accepted(batch, (0, 1))
    busy = Refusal(index=2, error=Busy("full", reason="memory").body(), filter="memory")
    bad = Refusal(index=3, error=InvalidRequest("bad", field="user").body(), filter="spec", final=True)
    failed = s.refused(batch, (busy, bad))
    assert [f.index for f in failed] == [3]
    assert [item.first for item in s.waiting] == [2]
    assert s.where == {"e": [(0, 0), (1, 0)]}
    assert not s.settled


def test_a_node_without_the_layer_is_not_asked_again_and_its_words_reach_the_caller() -> None:
    """When every node lacks it the caller hears NotFound with the names that may have been meant."""
    s = a_slice(1)
    batch = sent(s, "a", (0,))
    s.refused(batch, (Refusal(index=0, error=NotFound("no such layer", field="image").body(), filter="layers"),))
    groups = s.groups()
    assert list(groups) == [frozenset({"a"})]
    failed = s.unplaced([Unplaced(0, 0, "layers", False)])
    assert failed[0].error.code == "not_found"
    assert s.settled


def test_the_deadline_tells_the_last_refusal() -> None:
    """What waits fails as DeadlineExceeded with the reason; what an Edge has not answered is unknown."""
    s = a_slice(2)
    batch = sent(s, "a", (0, 1))
    s.refused(batch, (Refusal(index=0, error=Busy("64 MiB wanted, 3 MiB free", reason="memory").body(), filter="memory"),))
    failed = {f.index: f.error for f in s.expire()}
    assert failed[0].code == DeadlineExceeded.code
    assert failed[0].reason == "memory"
    assert "3 MiB free" in failed[0].message
    assert failed[1].reason == "unknown"
    assert s.settled


def test_nobody_listening_is_as_if_never_sent() -> None:
    """The whole batch waits again."""
    s = a_slice()
    batch = sent(s)
    s.returned(batch, Unavailable("gone", reason="no_responders"))
    assert len(s.waiting) == 4
    assert not s.out


def test_a_nodes_own_words_outlive_the_last_try() -> None:
    """One that was sent again just before the deadline fails with what the node said of the try before, as one that waits does."""
    s = a_slice()
    batch = sent(s)
    s.returned(batch, NodeError("record not written: no space left", reason="store"))
    sent(s)
    assert all("no space left" in failed.error.message for failed in s.expire())


def test_static_filters_fail_at_once_and_capacity_waits() -> None:
    """No node can ever take it: told now. No room now: placed again."""
    s = a_slice(2)
    s.groups()
    failed = s.unplaced([Unplaced(0, 0, "backend", True), Unplaced(1, 0, "slots", False)])
    assert [(f.index, f.error.code) for f in failed] == [(0, "unsupported")]
    assert [item.first for item in s.waiting] == [1]


def test_a_final_refusal_names_what_was_asked() -> None:
    """The value stands beside the field, also where it is one level down; a default that the wire leaves out is not made up."""
    spec = SandboxSpec(image="x", backend="none-such", resources=Resources(memory=1 << 45))
    for name, field, value in (
        ("backend", "backend", "none-such"),
        ("memory", "resources.memory", str(1 << 45)),
        ("cpus", "resources.cpus", ""),
    ):
        error = burst.refusal_error(name, True, raw(spec))
        assert (error.field, error.value, bool(error.fix)) == (field, value, True)
    assert "32768 GiB of memory" in burst.refusal_error("memory", True, raw(spec)).message


def test_the_same_request_is_known_again() -> None:
    """Specs and items make it, whatever became of them meanwhile; nothing else does."""
    specs, items = [raw(SandboxSpec(image="x"))], [CreateItem(spec=0, first=0)]
    s = a_slice(specs=specs, items=items)
    s.groups()
    assert s.is_same(tuple(specs), tuple(items))
    assert not s.is_same(specs, [CreateItem(spec=0, first=1)])
    assert not s.is_same([raw(SandboxSpec(image="y"))], items)


def test_c38_retries_are_spread() -> None:
    """Pauses grow, are bounded and differ."""
    rng = random.Random(1)
    pauses = [burst.pause_before(n, 0.05, 2.0, rng) for n in range(20)]
    assert pauses[0] <= 0.05
    assert all(1.0 <= pause <= 2.0 for pause in pauses[8:])
    assert len(set(pauses)) == 20
