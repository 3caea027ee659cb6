"""libdsec's pure parts: what is refused before anything is sent, and what a burst's news mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import libdsec
from dsec.bus import codec
from dsec.bus.messages import BurstNews, Failed, Placed, ReadyItem
from dsec.errors import Busy, DeadlineExceeded, InvalidRequest, NodeError, NotFound
from dsec.model import Captured, OpStatus, SandboxId
from libdsec import files
from libdsec.burst import summary
from libdsec.plan import Ledger, expand, slices
from libdsec.results import ExecResult
from libdsec.spec import ALIASES, Options, argv, exec_spec, size, spec

A, B = "0" * 26, "1" * 26


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("512MiB", 512 << 20),
        ("2GiB", 2 << 30),
        ("512m", 512 << 20),
        ("10MB", 10_000_000),
        ("1.5k", 1536),
        (7, 7),
        ("7", 7),
        (" 1 gib ", 1 << 30),
    ],
)
def test_sizes(value: int | str, expected: int) -> None:
    """Sizes are bytes or texts with binary or decimal units."""
    assert size(value) == expected


@pytest.mark.parametrize("value", ["", "x", "-1", "1XiB", "1 2", -1, True, None, 1.5, "1e99TiB", "9" * 40])
def test_wrong_sizes(value: Any) -> None:
    """What is not a size is refused with its field."""
    with pytest.raises(InvalidRequest) as caught:
        size(value, "memory")
    assert caught.value.field == "memory"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"memory": "1KiB"}, "memory"),
        ({"memory": "lots"}, "memory"),
        ({"cpus": 0}, "cpus"),
        ({"cpus": math.nan}, "cpus"),
        ({"cpus": True}, "cpus"),
        ({"pids": 1}, "pids"),
        ({"disk": 3}, "disk"),
        ({"qos": "fast"}, "qos"),
        ({"backend": ""}, "backend"),
        ({"network": "some"}, "network"),
        ({"idle_timeout": -1}, "idle_timeout"),
        ({"idle_timeout": math.inf}, "idle_timeout"),
        ({"on_idle": "die"}, "on_idle"),
        ({"on_client_loss": "hope"}, "on_client_loss"),
        ({"labels": {"a b": "c"}}, "labels key"),
        ({"labels": {"a": 1}}, "labels.a"),
        ({"env": {"A=B": "c"}}, "env key"),
        ({"env": {"A": "x\0y"}}, "env.A"),
        ({"env": {"A": "x" * 200_000}}, "env.A"),
        ({"workdir": "relative"}, "workdir"),
        ({"user": "a b"}, "user"),
        ({"workspace": "../x"}, "workspace"),
        ({"toolkits": ["ok", "bad name"]}, "toolkits[1]"),
        ({"hostname": "-x"}, "hostname"),
        ({"memroy": "1GiB"}, "memroy"),
    ],
)
def test_wrong_options_name_their_field(options: dict[str, Any], field: str) -> None:
    """Every argument is checked, and the error names the field."""
    with pytest.raises(InvalidRequest) as caught:
        spec("debian-12", **options)
    assert caught.value.field == field


@pytest.mark.parametrize("image", ["", "a b", "../x", "/etc", "-x", "a\0b", "x" * 600, None, 5, "\ud800"])
def test_wrong_images(image: Any) -> None:
    """A name that cannot be a layer's is refused."""
    with pytest.raises(InvalidRequest) as caught:
        spec(image)
    assert caught.value.field == "image"


@given(st.text(max_size=30))
def test_any_text_is_a_spec_or_a_typed_error(text: str) -> None:
    """No text makes the builder fail in another way, and what it accepts can be encoded."""
    for options in (
        {"labels": {"k": text}},
        {"env": {"K": text}},
        {"user": text},
        {"workdir": text},
        {"memory": text},
        {"workspace": text},
    ):
        try:
            codec.encode(spec("debian-12", **options))
        except InvalidRequest as error:
            assert error.field  # noqa: PT017 - not every combination is refused


def test_commands() -> None:
    """A string goes to the shell, a list is the argv; NUL bytes, long arguments and empty lists are refused."""
    assert argv("echo hi") == ("/bin/sh", "-c", "echo hi")
    assert argv(["a", ""]) == ("a", "")
    for bad in ([], ["a\0"], "x\0y", "x" * (1 << 20), ["x"] * 600_000, b"bytes", ["a", 5], [""]):
        with pytest.raises(InvalidRequest) as caught:
            argv(bad)  # type: ignore[arg-type]
        assert caught.value.field.startswith("cmd")
    with pytest.raises(InvalidRequest):
        exec_spec("true", env={f"K{n}": "x" * 100_000 for n in range(9)})
    assert exec_spec("true").timeout_ms is None
    assert exec_spec("true", timeout=0.5).timeout_ms == 500


def test_results() -> None:
    """Bytes always, text with replacement; a signal is 128 + n; a gap is shown."""
    status = OpStatus(
        op="0", running=False, signal=9, oom_killed=True, stdout=Captured(head=b"a\xff", tail=b"z", total=10), duration_ms=1500
    )
    result = ExecResult.of(status)
    assert (result.exit_code, result.signal, result.oom_killed, result.duration) == (137, 9, True, 1.5)
    assert result.stdout == b"a\xffz"
    assert result.stdout.text == "a\ufffd\n[... 7 bytes not kept ...]\nz"
    assert result.truncated
    assert not result.stderr.truncated
    with pytest.raises(libdsec.ExecFailed) as caught:
        result.check("make")
    assert caught.value.result is result


# ---------------------------------------------------------------------- bursts
def test_slices_cover_every_index_once_and_stay_small() -> None:
    """Specs travel once a slice, runs are counted, and no slice is above the limit."""
    specs = [spec("debian-12", env={"N": str(n // 3)}) for n in range(3000)]
    parts = list(slices(specs, limit=20_000))
    seen = [(index, part.specs[item.spec]) for part in parts for item in part.items for index in range(item.first, item.first + item.count)]
    assert [index for index, _ in seen] == list(range(3000))
    assert all(found == specs[index] for index, found in seen)
    assert all(len(codec.encode((part.specs, part.items))) < 22_000 for part in parts)
    one = spec("debian-12")
    (only,) = slices([one] * 100_000)
    assert (len(only.specs), len(only.items)) == (1, 1)


def test_expand() -> None:
    """One spec is repeated; a list stands for itself."""
    one = spec("debian-12")
    assert expand(one, 3) == [one] * 3
    assert expand([one, one], None) == [one, one]
    for bad, n in ((one, 0), (one, True), ([one], 2), ([], None), ([1], None)):
        with pytest.raises(InvalidRequest):
            expand(bad, n)  # type: ignore[arg-type]


def news(kind: str, index: int, edge: str, ulid: str) -> BurstNews:
    if kind == "accepted":
        return BurstNews(burst="b", edge=edge, accepted=(Placed(index=index, ulid=ulid),))
    if kind == "ready":
        return BurstNews(burst="b", edge=edge, ready=(ReadyItem(index=index, ulid=ulid),))
    return BurstNews(burst="b", edge=edge, failed=(Failed(index=index, ulid=ulid, error=NodeError("broke").body()),))


def test_first_answer_wins_and_the_other_is_dropped() -> None:
    """Two Edges that took the same index: the first is claimed, the other is dropped, also when it is ready first."""
    ledger = Ledger(1)
    first = ledger.take(news("accepted", 0, "n1", A))
    assert first.claims == [SandboxId("n1", A)]
    second = ledger.take(news("accepted", 0, "n2", B))
    assert second.drops == [SandboxId("n2", B)]
    assert ledger.take(news("ready", 0, "n2", B)).drops == [SandboxId("n2", B)]
    assert not ledger.settled
    assert [ready.id for ready in ledger.take(news("ready", 0, "n1", A)).ready] == [SandboxId("n1", A)]
    assert ledger.settled
    assert ledger.take(news("ready", 0, "n1", A)).ready == []


def test_a_competitors_failure_says_nothing() -> None:
    """A refusal, or the failure of the one that was not chosen, does not fail the index."""
    ledger = Ledger(1)
    ledger.take(news("accepted", 0, "n1", A))
    ledger.take(news("failed", 0, "n2", B))
    ledger.take(BurstNews(burst="b", failed=(Failed(index=0, error=Busy("full").body()),)))
    assert not ledger.settled
    assert ledger.take(news("failed", 0, "n1", A)).failed == [0]
    assert isinstance(ledger.errors[0], NodeError)
    assert ledger.errors[0].sandbox == f"n1-{A}"


def test_after_the_end_everything_is_dropped() -> None:
    """A closed burst claims nothing more."""
    ledger = Ledger(3)
    ledger.take(news("accepted", 0, "n1", A))
    assert ledger.close(DeadlineExceeded("late")) == [SandboxId("n1", A)]
    assert ledger.take(news("accepted", 1, "n1", B)).drops == [SandboxId("n1", B)]
    assert ledger.take(news("ready", 2, "n1", B)).drops == [SandboxId("n1", B)]
    assert ledger.take(news("accepted", 99, "n1", B)).drops == [SandboxId("n1", B)]
    assert ledger.settled


def test_a_reopened_index_hears_no_more_of_what_failed() -> None:
    """An index that is placed again takes the next sandbox, whatever late news say of the first."""
    ledger = Ledger(1)
    ledger.take(news("accepted", 0, "n1", A))
    assert ledger.take(news("failed", 0, "n1", A)).failed == [0]
    assert ledger.reopen(0) == SandboxId("n1", A)
    assert ledger.take(news("failed", 0, "n1", A)).failed == []
    assert ledger.take(news("accepted", 0, "n1", A)).claims == []
    assert ledger.take(news("accepted", 0, "n2", B)).claims == [SandboxId("n2", B)]
    assert [ready.id for ready in ledger.take(news("ready", 0, "n2", B)).ready] == [SandboxId("n2", B)]


@given(st.lists(st.tuples(st.sampled_from(["accepted", "ready", "failed"]), st.integers(0, 2), st.sampled_from("ab")), max_size=30))
def test_every_sandbox_is_claimed_or_dropped_never_both(story: list[tuple[str, int, str]]) -> None:
    """Whatever order the news come in, each sandbox that was heard of is the claimed one of its index or is dropped."""
    ledger = Ledger(3)
    claims: set[SandboxId] = set()
    drops: set[SandboxId] = set()
    for kind, index, edge in story:
        meaning = ledger.take(news(kind, index, edge, str(index) * 26))
        claims |= set(meaning.claims)
        drops |= set(meaning.drops)
        assert len({ready.index for ready in meaning.ready}) == len(meaning.ready)
    for ready in ledger.ready.values():
        assert ready.id in claims
    heard = {SandboxId(edge, str(index) * 26) for kind, index, edge in story if kind != "failed"}
    assert heard <= claims | drops
    assert not set(ledger.ready) & set(ledger.errors)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("mem_limit", "memory"),
        ("envs", "env"),
        ("cpu", "cpus"),
        ("cwd", "workdir"),
        ("metadata", "labels"),
        ("memroy", "memory"),
        ("timout", "timeout"),
    ],
)
def test_an_option_of_another_sdk_is_told_by_our_name(name: str, meant: str) -> None:
    """What E2B, Modal or Docker call it, and what is misspelt, is answered with the name here."""
    with pytest.raises(InvalidRequest) as caught:
        spec("x", **{name: 1})  # type: ignore[arg-type]
    assert (caught.value.field, caught.value.fix) == (name, f"did you mean {meant}?")


def test_the_names_behind_other_names_are_options() -> None:
    """No hint leads to an option that there is not."""
    assert set(ALIASES.values()) <= set(Options.__annotations__)
    assert not set(ALIASES) & set(Options.__annotations__)


@pytest.mark.parametrize(
    ("work", "field"),
    [
        (lambda: spec("x", network=False), "network"),  # type: ignore[arg-type]
        (lambda: spec("x", devices=1), "devices"),  # type: ignore[arg-type]
        (lambda: spec("x", toolkits=7), "toolkits"),  # type: ignore[arg-type]
        (lambda: spec("x", cpus="1"), "cpus"),  # type: ignore[arg-type]
        (lambda: spec("x", pids=2.5), "pids"),  # type: ignore[arg-type]
        (lambda: expand(spec("x"), "8"), "n"),  # type: ignore[arg-type]
        (lambda: argv(None), "cmd"),  # type: ignore[arg-type]
        (lambda: argv(3), "cmd"),  # type: ignore[arg-type]
        (lambda: files._content(None), "data"),  # type: ignore[arg-type]
        (lambda: files._content({}), "data"),  # type: ignore[arg-type]
        (lambda: files._path(None), "path"),  # type: ignore[arg-type]
        (lambda: libdsec.connect(3), "url"),  # type: ignore[arg-type]
    ],
)
def test_what_is_of_another_type_is_refused_by_field(work: Callable[[], object], field: str) -> None:
    """A bool, None or number where a text, bytes or a list belongs is a typed error with a fix, never Python's own."""
    with pytest.raises(InvalidRequest) as caught:
        work()
    assert caught.value.field == field
    assert caught.value.fix


async def test_a_burst_takes_the_options_of_a_sandbox() -> None:
    """`burst(image, n, memory=…)` and `sandbox(image, memory=…)` read alike; beside a whole spec options are refused."""
    client = libdsec.connect()
    assert client.burst("x", 2, memory="64MiB", labels={"a": "b"})._specs == [spec("x", memory="64MiB", labels={"a": "b"})] * 2
    for made in (spec("x"), [spec("x")]):
        with pytest.raises(InvalidRequest, match="beside a whole spec"):
            client.burst(made, memory="64MiB")


def test_a_failed_burst_names_field_value_and_fix() -> None:
    """What all sandboxes failed of is told as for one: field and value, counted without the ids."""
    errors = [NotFound("no such layer", field="image", value="debian-13", sandbox=str(at), fix="f") for at in range(4)]
    assert summary(errors) == "4 x image='debian-13': no such layer"
