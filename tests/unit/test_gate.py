"""What a job may say on the bus: its table, and the gate that reads the protocol as a stranger's."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from dsec.actors.workers import Way
from dsec.bus import codec, subjects
from dsec.bus.gate import LINE, SPECS, Bucket, Gate
from dsec.bus.grants import DEEPEST, LABEL, Grant, narrow, within
from dsec.bus.messages import CreateItem, CreateRequest
from dsec.errors import Denied, ErrorBody
from dsec.model import NetworkPolicy, SandboxSpec, Worker
from libdsec import plan

WORKER = "n1-01j8z7q0000000000000000000"
JOB = subjects.job("local", WORKER)
GRANT = Grant(unit="main", worker=WORKER, principal=JOB, project="acme/rl")
INBOX = f"_INBOX.{JOB}.abc"
MINE = f"dsec.v1.main.sb.exec.{JOB}.n2.01j8z7q1111111111111111111.acme.rl"
HEADED = f"HPUB {MINE} 28 30\r\nNATS/1.0\r\ntraceparent: a\r\n\r\nhi\r\n"
CONNECT = b'CONNECT {"verbose":true,"user":"admin","pass":"x","jwt":"y","protocol":1,"echo":true}\r\n'


def gate(grant: Grant = GRANT) -> Gate:
    made = Gate(grant, version="2.15.1", max_payload=1 << 20, connect={"name": "worker"})
    made.down.clear()
    made.client(CONNECT)
    made.up.clear()
    return made


def request(spec: SandboxSpec, inbox: str = INBOX) -> CreateRequest:
    return CreateRequest(burst="b", specs=(spec,), items=(CreateItem(spec=0, first=0),), inbox=inbox, deadline_ms=1000)


@pytest.mark.parametrize(
    ("pattern", "subject", "inside"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.b", "a.b.c", False),
        ("a.b", "a", False),
        ("a.*", "a.b", True),
        ("a.*", "a.*", True),
        ("a.*", "a.>", False),
        ("a.b", "a.*", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a.>", True),
        ("a.>", "a.*.c", True),
        ("a.>", "a", False),
        ("a.>", ">", False),
        ("a.*.c", "*.b.c", False),
        ("a.>", "a..b", False),
        ("a.>", "a.", False),
    ],
)
def test_what_a_pattern_means_is_within(pattern: str, subject: str, inside: bool) -> None:
    """A subject is within a pattern when all that it means is meant by the pattern."""
    assert within((pattern,), subject) is inside


def test_a_job_says_what_is_its_own_and_nothing_else() -> None:
    """Its creates, its sandboxes, its leases, its lists; not another principal's, another project's, an actor's or the server's own."""
    ulid = "01j8z7q1111111111111111111"
    may = [
        f"dsec.v1.main.api.create.{JOB}.acme.rl",
        f"dsec.v1.main.sb.files.{JOB}.n2.{ulid}.acme.rl",
        f"dsec.v1.main.all.list.{JOB}.acme.rl",
        f"dsec.v1.main.all.stop.{JOB}.acme.rl.~",
        f"dsec.v1.main.lease.n1.{JOB}.acme.rl",
    ]
    may_not = [
        "dsec.v1.main.api.create.local.acme.rl",
        f"dsec.v1.main.api.view.{JOB}.acme.rl",
        f"dsec.v1.main.api.create.{JOB}.acme",
        f"dsec.v1.main.api.create.{JOB}.acme.rl.below",
        f"dsec.v1.other.api.create.{JOB}.acme.rl",
        f"dsec.v1.main.sb.stop.local.n1.{ulid}.acme.rl",
        f"dsec.v1.main.sb.stop.{JOB}~n1-{ulid}.n1.{ulid}.acme.rl",
        f"dsec.v1.main.all.beat.{JOB}.acme.rl",
        f"dsec.v1.main.all.ended.{JOB}.acme.rl",
        "dsec.v1.main.edge.n1.launch",
        "dsec.v1.main.edge.n1.drain",
        "dsec.v1.main.hb.n1",
        "dsec.v1.main.view",
        "dsec.v1.main.evt.stopped.n1.-.acme.rl",
        "$JS.API.STREAM.DELETE.DSEC_EVENTS",
        "$KV.x.y",
        f"_INBOX.{JOB}.abc",
        "_INBOX.local.abc",
    ]
    assert [each for each in may if not within(GRANT.publish, each)] == []
    assert [each for each in may_not if within(GRANT.publish, each)] == []
    hear = [f"_INBOX.{JOB}.>", f"_INBOX.{JOB}.x.*", f"dsec.v1.main.out.n1.{ulid}.{'0' * 32}.{JOB}.acme.rl", "dsec.v1.main.view"]
    hear_not = [
        ">", "_INBOX.>", "_INBOX.*.>", "_INBOX.local.>", "dsec.>", "dsec.v1.main.hb.*", "dsec.v1.main.out.>", "$SYS.>", "$SRV.>",
        f"dsec.v1.main.out.n1.{ulid}.{'0' * 32}.*.acme.rl", f"dsec.v1.main.api.create.{JOB}.acme.rl", "dsec.v1.main.edge.*.launch",
    ]  # fmt: skip
    assert [each for each in hear if not within(GRANT.subscribe, each)] == []
    assert [each for each in hear_not if within(GRANT.subscribe, each)] == []


def test_who_the_client_says_that_it_is_does_not_count() -> None:
    """Of its CONNECT nothing goes on but whether it wants its own messages."""
    made = Gate(GRANT, version="2.15.1", max_payload=1 << 20, connect={"name": "worker", "jwt": "the job's"})
    assert json.loads(bytes(made.down)[5:])["max_payload"] == 1 << 20
    made.client(CONNECT)
    said = json.loads(bytes(made.up)[8:])
    assert (said["name"], said["jwt"], said["protocol"], said["verbose"]) == ("worker", "the job's", 0, False)
    assert "user" not in said
    made.client(CONNECT)
    assert made.over


def test_nothing_is_said_before_connect() -> None:
    """A client that begins with anything else is turned away."""
    made = Gate(GRANT, version="2.15.1", max_payload=1 << 20, connect={})
    made.client(f"PUB {MINE} 0\r\n\r\n".encode())
    assert made.over == "Authorization Violation"
    assert not made.up


def test_messages_go_on_as_they_are() -> None:
    """PUB, HPUB, SUB, UNSUB and PING reach the server; the server's PING is answered here, its INFO goes no further."""
    made = gate()
    said = f"SUB {INBOX}.* 1\r\nPUB {MINE} {INBOX}.1 5\r\nhello\r\n{HEADED}PING\r\nUNSUB 1 5\r\n".encode()
    made.client(said)
    assert bytes(made.up) == said
    made.up.clear()
    made.server(b"INFO {}\r\nPING\r\nMSG a.b 1 6\r\nPING\r\n\r\nPONG\r\n")
    assert bytes(made.down) == b"MSG a.b 1 6\r\nPING\r\n\r\nPONG\r\n"
    assert bytes(made.up) == b"PONG\r\n"


def test_headers_that_mean_something_to_the_server_are_left_out() -> None:
    """Of a message's headers those of a request go on, and no other: one of them would have the server tell its trace to any subject."""
    made = gate()
    for name in ("Nats-Trace-Dest", "Nats-Msg-Id", "Nats-Rollup", "X"):
        head = f"NATS/1.0\r\nDsec-Deadline-Ms: 5\r\n{name}: dsec.v1.main.edge.n1.drain\r\n\r\n"
        made.client(f"HPUB {MINE} {INBOX}.1 {len(head)} {len(head) + 2}\r\n{head}hi\r\n".encode())
        kept = "NATS/1.0\r\nDsec-Deadline-Ms: 5\r\n\r\n"
        assert bytes(made.up) == f"HPUB {MINE} {INBOX}.1 {len(kept)} {len(kept) + 2}\r\n{kept}hi\r\n".encode()
        made.up.clear()
    made.client(f"HPUB {MINE} 14 16\r\nNATS/1.0\r\nXXhi\r\n".encode())
    assert made.over
    assert b"PUB" not in made.up


def test_the_servers_ping_is_not_answered_into_a_message() -> None:
    """While half of a payload has gone on, the answer waits for the rest."""
    made = gate()
    made.client(f"PUB {MINE} 6\r\nabc".encode())
    made.server(b"PING\r\n")
    made.client(b"def\r\n")
    assert bytes(made.up) == f"PUB {MINE} 6\r\nabcdef\r\nPONG\r\n".encode()


def test_a_refusal_is_not_put_into_a_message() -> None:
    """While half of a message has come to the client, what it is told waits for the rest."""
    made = gate()
    made.server(b"MSG a 1 4\r\nab")
    made.client(b"PUB forbidden 2\r\nhi\r\n")
    made.server(b"cd\r\n")
    assert bytes(made.down).startswith(b"MSG a 1 4\r\nabcd\r\n-ERR 'Permissions Violation for Publish to \"forbidden\"'\r\n")


@pytest.mark.parametrize("subject", ["dsec.v1.main.sb.stop.local.n1.01j8z7q1111111111111111111.acme.rl", "dsec.v1.main.hb.n1", "dsec.v1.*"])
def test_a_forged_subject_goes_nowhere(subject: str) -> None:
    """A publish to what is not the job's is refused, its payload is dropped, and the connection goes on; who waits hears a typed error."""
    made = gate()
    made.client(f"SUB {INBOX}.* 7\r\n".encode())
    made.up.clear()
    payload = f"PUB {MINE} 0\r\n\r\n"  # in the payload it is no command
    made.client(f"PUB {subject} {INBOX}.1 {len(payload)}\r\n{payload}\r\n".encode())
    assert not made.up
    head, _, rest = bytes(made.down).partition(b"\r\n")
    words = head.decode().split()
    assert words[:3] == ["HMSG", f"{INBOX}.1", "7"]
    assert rest[: int(words[3])].startswith(b"NATS/1.0\r\nNats-Service-Error-Code: 403\r\n")
    body = codec.decode(rest[int(words[3]) : int(words[4])], ErrorBody)
    assert (body.code, body.reason) == ("denied", "job")
    made.client(b"PING\r\n")
    assert bytes(made.up) == b"PING\r\n"
    assert made.refused == 1


@pytest.mark.parametrize("subject", ["$JS.API.INFO", "$SYS.REQ.SERVER.PING", "_INBOX.victim.1", "a.*", ">"])
def test_what_is_no_actors_is_refused_as_the_server_does(subject: str) -> None:
    """The server's own subjects and others' inboxes: a permissions violation, and nothing goes on."""
    made = gate()
    made.client(f"SUB {INBOX}.* 7\r\n".encode())
    made.up.clear()
    made.client(f"PUB {subject} {INBOX}.1 0\r\n\r\n".encode())
    assert not made.up
    assert bytes(made.down) == f"-ERR 'Permissions Violation for Publish to \"{subject}\"'\r\n".encode()


def test_an_answer_goes_to_nobody_elses_inbox() -> None:
    """Neither a reply subject nor a create's inbox may be another's: an actor that answers may publish more than the job may."""
    made = gate()
    made.client(f"PUB {MINE} _INBOX.victim.1 0\r\n\r\n".encode())
    assert not made.up
    with pytest.raises(Denied) as caught:
        narrow(GRANT, request(SandboxSpec(image="i"), inbox="_INBOX.victim.1"))
    assert caught.value.field == "inbox"


def test_a_create_bears_the_jobs_mark() -> None:
    """Whatever the worker writes there: its sandboxes end with it and have its label, and JSON stays JSON."""
    made = gate()
    spec = SandboxSpec(image="i", labels={LABEL: "another", "a": "b"}, ends_with="n9-01j8z7q1111111111111111111")
    for json_ in (False, True):
        body = codec.encode(request(spec), json=json_)
        made.client(f"PUB {GRANT.create} {INBOX}.1 {len(body)}\r\n".encode() + body + b"\r\n")
        head, _, rest = bytes(made.up).partition(b"\r\n")
        sent = codec.decode(rest[:-2], CreateRequest)
        assert int(head.split()[-1]) == len(rest) - 2
        assert codec.is_json(rest) is json_
        assert (sent.specs[0].ends_with, sent.specs[0].labels) == (WORKER, {LABEL: WORKER, "a": "b"})
        made.up.clear()
    keep = Grant(unit="main", worker=WORKER, principal=JOB, project="acme/rl", limits=Worker(on_end="keep"))
    assert narrow(keep, request(spec)).specs[0].ends_with == ""


def test_a_create_asks_for_no_more_than_the_job_may_have() -> None:
    """No network that its worker was not given to give, no worker that may more, no endless nesting, no field that is not understood."""
    wide = Grant(unit="main", worker=WORKER, principal=JOB, project="acme/rl", limits=Worker(networks=("none", "open")))
    open_ = SandboxSpec(image="i", network=NetworkPolicy(mode="open"))
    assert narrow(wide, request(open_)).specs[0].network.mode == "open"
    refused = {
        "specs[0].network": open_,
        "specs[0].worker.networks": SandboxSpec(image="i", worker=Worker(networks=("open",))),
    }
    for field, spec in refused.items():
        with pytest.raises(Denied) as caught:
            narrow(GRANT, request(spec))
        assert caught.value.field == field
    deep = Grant(unit="main", worker=WORKER, principal="local" + f"~{WORKER}" * DEEPEST, project="acme/rl")
    with pytest.raises(Denied):
        narrow(deep, request(SandboxSpec(image="i", worker=Worker()), inbox=f"{deep.inbox}x"))
    made = gate()
    made.client(f"SUB {INBOX}.* 7\r\nPUB {GRANT.create} {INBOX}.1 3\r\nabc\r\n".encode())
    assert b"Nats-Service-Error-Code: 400" in made.down
    assert b"PUB" not in made.up


@pytest.mark.parametrize(
    "said",
    [
        b"A" * (LINE + 1),
        b"PUB " + b"a" * LINE + b" 0\r\n",
        b"PUB a 99999999999\r\n",
        f"PUB {MINE} {(1 << 20) + 1}\r\n".encode(),
        f"PUB {MINE} -1\r\n".encode(),
        f"PUB {MINE} 1e3\r\n".encode(),
        f"PUB {MINE} 2\r\nabXX".encode(),
        f"HPUB {MINE} 9 3\r\n".encode(),
        b"SUB a.b \xff\r\n",
        b"SUB _INBOX.x 1;2\r\n",
        b"SUB\r\n",
        b"INFO {}\r\n",
        b"MSG a 1 0\r\n\r\n",
        b"CONNECT [1]\r\n",
        b"CONNECT " + b"[" * 4000 + b"\r\n",
        b"\x00\x01\x02\r\n",
    ],
)
def test_what_is_no_protocol_ends_the_connection(said: bytes) -> None:
    """Oversized lines and payloads, broken numbers, other commands: told, and over; no half of it goes on as a command."""
    made = gate()
    made.client(said)
    made.client(f"PUB {MINE} 0\r\n\r\n".encode())
    assert made.over
    assert bytes(made.down).startswith(b"-ERR '")
    assert bytes(made.up).count(b"PUB ") <= said.count(b"\r\nab")


def test_subscriptions_are_counted() -> None:
    """A thousand on one connection, and then it ends."""
    made = gate()
    for number in range(1001):
        made.client(f"SUB {INBOX}.{number} {number}\r\n".encode())
    assert made.over == "Maximum Subscriptions Exceeded"


def test_what_is_said_once_is_heard_few_times() -> None:
    """nats-server would keep what a thousand subscriptions to one subject hear, for each of them, while the client reads nothing: so few
    are alike, and few beside one another hear the same inbox. One that has ended makes room for another."""
    made = gate()
    for number in range(4000):
        made.client(f"SUB {INBOX} {number}\r\nUNSUB {number}\r\n".encode())
    for number in range(4):
        made.client(f"SUB {INBOX} {number}\r\nSUB {INBOX} {number}\r\n".encode())
    made.up.clear()
    for odd in (f"_INBOX.{JOB}.*.x", f"_INBOX.{JOB}.*.>", f"_INBOX.{JOB}.a.b.c.d.e", f"_INBOX.{JOB}.a.b.c.d.>"):
        made.client(f"SUB {odd} odd\r\nPUB {MINE} {odd} 0\r\n\r\n".encode())
    assert (bytes(made.up), made.refused, made.over) == (b"", 8, "")
    made.client(f"SUB {INBOX} 5\r\n".encode())
    assert made.over == "Maximum Subscriptions Exceeded"


def test_what_is_refused_fills_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many connections a worker makes to be refused something, the log has a line of it now and then, with all of them counted."""
    monkeypatch.setattr("dsec.actors.workers.QUIET", 1e9)
    sandbox = SimpleNamespace(id=WORKER, record=SimpleNamespace(ulid=WORKER[3:]))
    way = Way(cast(Any, None), cast(Any, sandbox), GRANT, cast(Any, None))
    with capture_logs() as told:
        for _ in range(1000):
            way._note(2, "")
        way._quiet_until = 0.0
        way._note(0, "")
    assert [(line["event"], line["count"]) for line in told] == [("workers.refused", 2), ("workers.refused", 1998)]


def test_a_subscription_that_ends_by_itself_counts_no_longer() -> None:
    """A client that makes one for every question, and lets the server end it with the answer, goes on for ever; what has had fewer messages
    than it may is still one, also for a client that only says that it will end."""
    made = gate()
    for number in range(3000):
        made.client(f"SUB {INBOX}.{number} {number}\r\nUNSUB {number} 1\r\n".encode())
        made.server(f"MSG {INBOX}.{number} {number} 2\r\nok\r\n".encode())
    assert not made.over
    made = gate()
    for number in range(1001):
        made.client(f"SUB {INBOX}.{number} {number}\r\nUNSUB {number} 2\r\n".encode())
        made.server(f"MSG {INBOX}.{number} {number} 2\r\nok\r\n".encode())
    assert made.over == "Maximum Subscriptions Exceeded"


def test_a_refusal_costs_the_same_with_a_thousand_subscriptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who listens for the answer is looked up: not every subscription is compared for each message that goes nowhere."""
    made = gate()
    for number in range(1000):
        made.client(f"SUB {INBOX}.a.{number}.* {number}\r\n".encode())
    looked = 0

    def counting(patterns: tuple[str, ...], subject: str) -> bool:
        nonlocal looked
        looked += 1
        return within(patterns, subject)

    monkeypatch.setattr("dsec.bus.gate.within", counting)
    for reply, sid in ((f"{INBOX}.a.7.x", "7"), (f"{INBOX}.b.7.x", "")):
        made.down.clear()
        made.client(f"PUB dsec.v1.main.api.view.{JOB}.acme.rl {reply} 0\r\n\r\n".encode())
        assert made.down.startswith(f"HMSG {reply} {sid} ".encode() if sid else b"-ERR ")
    assert looked < 20


@pytest.mark.parametrize("labels", [0, 200])
def test_a_create_does_not_multiply(labels: int) -> None:
    """Many small specs in one create would hold up all others, and each of them with a worker's many labels would fill the memory."""
    made = gate(msgspec.structs.replace(GRANT, labels={f"l{number}": "v" for number in range(labels)}))
    made.client(f"SUB {INBOX}.1 9\r\n".encode())
    made.up.clear()
    specs = (SandboxSpec(image="i"),) * (1000 if labels else 50_000)
    body = codec.encode(CreateRequest(burst="b", specs=specs, items=(), inbox=INBOX, deadline_ms=1000))
    before = made.messages
    made.client(f"PUB {GRANT.create} {INBOX}.1 {len(body)}\r\n".encode() + body + b"\r\n")
    assert not made.up
    assert made.messages - before > len(specs) // 16
    told = codec.decode(bytes(made.down).split(b"\r\n\r\n", 1)[1][:-2], ErrorBody)
    assert (told.code, told.field) == ("invalid", "specs")


def test_a_worker_creates_thousands_of_different_sandboxes() -> None:
    """The client's slices are none too many for the gate."""
    specs = [SandboxSpec(image="i", hostname=f"h{number}") for number in range(SPECS + 1000)]
    parts = list(plan.slices(specs))
    assert sum(len(part.specs) for part in parts) == len(specs)
    for part in parts:
        made = gate()
        body = codec.encode(CreateRequest(burst="b", specs=part.specs, items=part.items, inbox=INBOX, deadline_ms=1000))
        made.client(f"PUB {GRANT.create} {len(body)}\r\n".encode() + body + b"\r\n")
        assert made.up


@given(st.binary(max_size=600))
def test_no_bytes_of_a_client_raise_or_reach_the_server_whole(data: bytes) -> None:
    """Whatever comes, nothing is raised, and what goes on is made of commands about the job's own."""
    made = gate()
    made.client(data)
    for line in bytes(made.up).split(b"\r\n"):
        assert not line.startswith((b"PUB ", b"HPUB ")) or JOB.encode() in line


@given(st.lists(st.integers(1, 40), max_size=30))
def test_how_it_is_cut_does_not_matter(cuts: list[int]) -> None:
    """The same bytes in any pieces have the same outcome."""
    said = (f"SUB {INBOX}.* 1\r\nPUB {MINE} {INBOX}.1 5\r\nhello\r\nPUB no.where 4\r\nabcd\r\nPING\r\n{HEADED}").encode()
    heard = b"MSG a 1 5\r\nPING\r\r\n+OK\r\nPING\r\nHMSG b 2 4 9\r\nabcdefghi\r\n"
    whole, cut = gate(), gate()
    whole.client(said)
    whole.server(heard)
    at = 0
    for size in (*cuts, len(said)):
        cut.client(said[at : at + size])
        at += size
    at = 0
    for size in (*cuts, len(heard)):
        cut.server(heard[at : at + size])
        at += size
    assert (bytes(cut.up), bytes(cut.down)) == (bytes(whole.up), bytes(whole.down))


def test_a_bucket_lets_through_what_its_rate_allows() -> None:
    """A burst at once, then so many a second; bytes count as well."""
    bucket = Bucket(10.0, 20.0, 0.0)
    assert bucket.take(20, 0, 0.0) == 0.0
    assert bucket.take(10, 0, 0.0) == pytest.approx(1.0)
    assert bucket.take(0, 0, 2.0) == 0.0
    assert bucket.take(0, 65_536 * 30, 4.0) == pytest.approx(0.0, abs=1.0)


def test_what_costs_the_node_is_counted() -> None:
    """Empty lines are messages, and a create, which is looked into, is as many as it is long."""
    made = gate()
    before = made.messages
    made.client(b"\r\n" * 50)
    assert made.messages == before + 50
    body = codec.encode(request(SandboxSpec(image="i", env={"A": "x" * 100_000})))
    made.client(f"PUB {GRANT.create} {len(body)}\r\n".encode() + body + b"\r\n")
    assert made.messages > before + 70


def test_whose_a_principal_is() -> None:
    """A job's is its user's and its worker's; a user's is nobody else's, however it is spelled."""
    inner = subjects.job(JOB, "n2-01j8z7q2222222222222222222")
    assert subjects.owns("local", JOB)
    assert subjects.owns("local", inner)
    assert subjects.owns(JOB, inner)
    assert not subjects.owns(inner, JOB)
    assert not subjects.owns("loc", JOB)
    assert not subjects.owns(JOB, "local")
    assert (subjects.user_of(inner), subjects.worker_of(JOB), subjects.worker_of("local")) == ("local", WORKER, "")
