"""Every message on the bus: frozen Structs, msgpack maps on the wire, additive only (new fields have defaults).

Requests that change something carry their request id, remaining time and traceparent in headers (dsec/bus/call.py); a
message that a person types as JSON is answered in JSON.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from dsec.errors import ErrorBody
from dsec.model import Checkpoint, Command, ExecSpec, ImageConfig, LayerRef, OpStatus, PackedLayer, Paused, SandboxInfo, SandboxSpec, State

Index = Annotated[int, Meta(ge=0, lt=1 << 31)]  # of a sandbox in its burst
Offset = Annotated[int, Meta(ge=0, le=1 << 62)]  # bytes
Name = Annotated[str, Meta(min_length=1, max_length=128)]  # an id that its caller made
Patience = Annotated[int, Meta(ge=1, le=600_000)]  # milliseconds
Life = Annotated[int, Meta(ge=1, lt=1 << 43)]  # milliseconds; 278 years at most


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all: a map by field name, unknown fields ignored (a newer peer may send more)."""


# ------------------------------------------------------------------ create (a single create is a burst of one)
class Lease(Message, frozen=True, kw_only=True):
    """A client's claim on its job: renewed every ttl/3, listing what it holds. Its id outlives a connection."""

    id: Name
    ttl_ms: Life = 30_000


class CreateItem(Message, frozen=True, kw_only=True):
    """``count`` sandboxes of ``specs[spec]`` with the burst's indices first…first+count-1."""

    spec: int
    first: Index
    count: int = 1


class CreateRequest(Message, frozen=True, kw_only=True):
    """client -> api.create. One slice (< 512 KiB) of a burst; every slice repeats the burst's id and names its own specs.

    The Scheduler acknowledges within 500 ms with `CreateAck`; all else arrives at ``inbox`` as `BurstNews`.
    """

    burst: Name  # ULID made by the client: with the index it is the idempotency key of each sandbox
    slice: int = 0
    specs: tuple[SandboxSpec, ...]
    items: tuple[CreateItem, ...]
    inbox: str
    deadline_ms: int  # remaining, for the whole create until ready
    lease: Lease | None = None


class CreateEnvelope(Message, frozen=True, kw_only=True):
    """`CreateRequest` as a Scheduler reads it: specs stay the bytes that they came as, and go on to the Edge so."""

    burst: Name
    slice: int = 0
    specs: tuple[msgspec.Raw, ...]
    items: tuple[CreateItem, ...]
    inbox: str
    deadline_ms: int
    lease: Lease | None = None


class CreateAck(Message, frozen=True, kw_only=True):
    scheduler: str
    known: bool = False  # this burst slice was already taken


class LaunchItem(Message, frozen=True, kw_only=True):
    index: Index
    spec: int


class LaunchRequest(Message, frozen=True, kw_only=True):
    """Scheduler -> edge.<edge>.launch: one batch. Answered with `LaunchReply` after admission and the fsynced record."""

    burst: Name
    principal: str
    project: str
    specs: tuple[SandboxSpec, ...]
    items: tuple[LaunchItem, ...]
    inbox: str
    deadline_ms: int
    lease: Lease | None = None


class LaunchEnvelope(Message, frozen=True, kw_only=True):
    """`LaunchRequest` as a Scheduler writes it; see `CreateEnvelope`."""

    burst: Name
    principal: str
    project: str
    specs: tuple[msgspec.Raw, ...]
    items: tuple[LaunchItem, ...]
    inbox: str
    deadline_ms: int
    lease: Lease | None = None


class Refusal(Message, frozen=True, kw_only=True):
    """``filter`` names what refused (memory, slots, pids, backend, arch, …).

    Final errors (`final`) are the caller's fault and not re-placed.
    """

    index: int
    error: ErrorBody
    filter: str = ""
    final: bool = False


class LaunchReply(Message, frozen=True, kw_only=True):
    edge: str
    accepted: tuple[int, ...] = ()
    refused: tuple[Refusal, ...] = ()
    load: NodeLoad | None = None


class CancelRequest(Message, frozen=True, kw_only=True):
    """To every Edge, without an answer: these indices of a create are not wanted, whether they are here already or still to come."""

    burst: Annotated[str, Meta(max_length=64)]
    ranges: Annotated[tuple[tuple[int, int], ...], Meta(max_length=20_000)]  # (first index, how many)


class EndsWith(Message, frozen=True, kw_only=True):
    """To every Edge, without an answer: this worker has ended, and with it what its job made (`SandboxSpec.ends_with`)."""

    worker: str


class LivesRequest(Message, frozen=True, kw_only=True):
    """edge.<edge>.lives: which of these sandboxes have ended there?"""

    ids: Annotated[tuple[str, ...], Meta(max_length=20_000)] = ()


class LivesReply(Message, frozen=True, kw_only=True):
    gone: tuple[str, ...] = ()


class Placed(Message, frozen=True, kw_only=True):
    index: int
    ulid: str


class Failed(Message, frozen=True, kw_only=True):
    index: int
    ulid: str = ""
    error: ErrorBody


class ReadyItem(Message, frozen=True, kw_only=True):
    index: int
    ulid: str
    layers: tuple[LayerRef, ...] = ()
    degraded: tuple[str, ...] = ()


class BurstNews(Message, frozen=True, kw_only=True):
    """Edge (accepted, ready, failed) or Scheduler (failed, waiting) -> the caller's inbox, batched.

    ``waiting`` of a slice found no room for a while, for the reason ``why``; it is told now and then, and places nothing on record.
    """

    burst: str
    edge: str = ""
    accepted: tuple[Placed, ...] = ()
    ready: tuple[ReadyItem, ...] = ()
    failed: tuple[Failed, ...] = ()
    waiting: int = 0
    why: ErrorBody | None = None


class LeaseRenew(Message, frozen=True, kw_only=True):
    """client -> lease.<edge>: "I live, and hold exactly these of ``burst``es I asked for".

    ``claims`` and ``drops`` are deltas since the last renewal (repeated until acknowledged); ``end`` ends the lease at once."""

    lease: Name
    ttl_ms: Life = 30_000
    seq: int = 0
    claims: tuple[str, ...] = ()  # ulids
    drops: tuple[str, ...] = ()  # ulids to stop: a second answer for an index, or a cancelled straggler
    end: bool = False


class LeaseAck(Message, frozen=True, kw_only=True):
    seq: int = 0
    held: int = 0
    unknown: tuple[str, ...] = ()  # claimed ulids that this Edge does not have


# ------------------------------------------------------------------ one sandbox
class Empty(Message, frozen=True, kw_only=True):
    """A request or reply without content."""


class ExecRequest(Message, frozen=True, kw_only=True):
    """sb.exec: start ``op`` unless it is known, then wait up to ``wait_ms`` for its end. Repeating it is harmless."""

    op: str
    spec: ExecSpec | None = None  # None: only wait (sb.query does the same)
    wait_ms: int = 0
    step: str = ""  # its result is kept under this key: the same key again answers with it, under whatever op, and runs nothing


class ExecReply(Message, frozen=True, kw_only=True):
    """``stood_ms``: how long the sandbox has stood still in its life so far, as its Edge knows: time-outs stand still with it."""

    status: OpStatus
    seq: int = 0  # number of the command among all of its sandbox; 0 = not known
    stood_ms: int = 0


class OutputRequest(Message, frozen=True, kw_only=True):
    """sb.output: publish both streams from these offsets to subjects.output(...) until they end or credit runs out.

    ``reader`` tells readers apart: the newest holds the stream, those before it and those with ``view`` look on."""

    op: str
    reader: Name
    replaces: tuple[str, ...] = ()  # this client's readers before, one of which may be here: it is let go without an end
    acks: bool = False  # its credit messages say what has arrived: until then it may be asked for again
    view: bool = False  # only look on: the command does not wait for this reader
    rows: int = 0  # the size that this reader's terminal has; 0 = it has none
    cols: int = 0
    stdout: Offset = 0
    stderr: Offset = 0
    credit: int = 4 * 1024 * 1024  # absolute: bytes of both streams together that may be sent since the request
    prompt: bool = False  # small pieces are not gathered: their far side waits for an answer
    patience_ms: Patience = 60_000  # a reader from whom nothing was heard for so long (it repeats its credit each second) has left


class CreditRequest(Message, frozen=True, kw_only=True):
    """sb.credit (published, no reply): absolute credit, resent each second; loss delays, never deadlocks. ``close``: the reader leaves."""

    op: str
    reader: str
    credit: int
    received: int = 0  # bytes that have arrived since the request
    close: bool = False


class OutputChunk(Message, frozen=True, kw_only=True):
    """On subjects.output: at most 128 KiB. ``end`` on the last message of the op, with its status."""

    reader: str
    stream: int = 1
    offset: int = 0
    data: bytes = b""
    eof: bool = False  # both streams have ended and the operation goes on; `offset` is stdout's total
    end: bool = False
    status: OpStatus | None = None
    error: ErrorBody | None = None


class InputRequest(Message, frozen=True, kw_only=True):
    op: str
    offset: int
    data: bytes = b""
    eof: bool = False


class InputReply(Message, frozen=True, kw_only=True):
    accepted: int  # absolute offset; resend from here
    read: bool = True  # somebody is given its output by this Edge; one that was started anew knows of no reader until it is asked again


class SignalRequest(Message, frozen=True, kw_only=True):
    op: str
    signal: int
    tree: bool = True


class ResizeRequest(Message, frozen=True, kw_only=True):
    op: str
    rows: int
    cols: int
    reader: str = ""  # whose size it is: it decides as long as that reader is there


class PauseReply(Message, frozen=True, kw_only=True):
    """sb.pause: what it gave back."""

    paused: Paused = Paused()


class PackRequest(Message, frozen=True, kw_only=True):
    """sb.pack_diff: what the sandbox changed becomes the layer ``name``. Repeating it with the same ``op`` packs once."""

    op: str
    name: str
    scrub: tuple[str, ...] = ()
    max_entries: int = 1_000_000
    max_bytes: int = 16 << 30
    image: ImageConfig | None = None  # an image of its own: with the layers below it, and this configuration


class PackReply(Message, frozen=True, kw_only=True):
    layer: PackedLayer


class CheckpointRequest(Message, frozen=True, kw_only=True):
    """sb.checkpoint: keep the sandbox's state as the checkpoint ``ulid``. Repeating it with the same ``ulid`` captures once."""

    ulid: Annotated[str, Meta(min_length=26, max_length=26)]  # made by the client
    name: Annotated[str, Meta(max_length=128)] = ""
    kind: str = "disk"
    keep_ms: Annotated[int, Meta(ge=0, le=86_400_000)] = (
        0  # 0: until it is dropped; else at least so long, then while something stands on it
    )
    max_entries: int = 1_000_000
    max_bytes: int = 16 << 30


class CheckpointReply(Message, frozen=True, kw_only=True):
    checkpoint: Checkpoint


class CheckpointSelector(Message, frozen=True, kw_only=True):
    """all.checkpoints (list; no ids = all) and all.uncheckpoint (drop these). ``edge`` and ``after`` ask for one Edge's next page."""

    ids: Annotated[tuple[str, ...], Meta(max_length=10_000)] = ()
    edge: str = ""
    after: str = ""


class CheckpointsReply(Message, frozen=True, kw_only=True):
    edge: str
    checkpoints: tuple[Checkpoint, ...] = ()
    more: bool = False


class OpsReply(Message, frozen=True, kw_only=True):
    ops: tuple[OpStatus, ...] = ()


class StopRequest(Message, frozen=True, kw_only=True):
    grace_ms: int = 0


class LabelRequest(Message, frozen=True, kw_only=True):
    """sb.label: labels to set, then names to take away; answered with the sandbox as it is then."""

    set: dict[str, str] = {}
    remove: tuple[str, ...] = ()


class InfoReply(Message, frozen=True, kw_only=True):
    info: SandboxInfo


class CommandsRequest(Message, frozen=True, kw_only=True):
    """sb.commands: what was run in it, by number; at most ``limit``."""

    after: int = 0
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 500


class CommandsReply(Message, frozen=True, kw_only=True):
    commands: tuple[Command, ...] = ()
    more: bool = False


class LogReply(Message, frozen=True, kw_only=True):
    """sb.log: the lifecycle's story of one sandbox, as lines."""

    lines: tuple[str, ...] = ()


# ------------------------------------------------------------------ many sandboxes (scatter-gather)
class Selector(Message, frozen=True, kw_only=True):
    """all.list / all.stop / all.pause / all.resume: labels (all must match), ids, states."""

    labels: dict[str, str] = {}
    ids: tuple[str, ...] = ()
    states: tuple[State, ...] = ()
    stuck: bool = False
    stopped: bool = False  # list: also those that ended and are still remembered
    limit: int = 10_000
    edge: str = ""  # list: only this Edge has something to say; with `after` it goes on with ids behind that one
    after: str = ""


class ListReply(Message, frozen=True, kw_only=True):
    edge: str
    sandboxes: tuple[SandboxInfo, ...] = ()
    more: bool = False


class ItemResult(Message, frozen=True, kw_only=True):
    id: str
    error: ErrorBody | None = None
    paused: Paused | None = None  # all.pause: what it gave back


class ManyReply(Message, frozen=True, kw_only=True):
    edge: str
    results: tuple[ItemResult, ...] = ()


# ------------------------------------------------------------------ nodes and the cluster
class NodeLoad(Message, frozen=True, kw_only=True):
    """The admission ledger in numbers; memory and disk in bytes."""

    memory_free: int = 0
    memory_total: int = 0
    cpus_total: float = 0.0
    cpus_reserved: float = 0.0
    slots_free: int = 0
    slots_total: int = 0
    pids_free: int = 0
    disk_free: int = 0
    disk_total: int = 0  # 0: not known, and not admitted by
    starting: int = 0
    starting_max: int = 0
    admitted: int = -1  # sandboxes admitted since the Edge started, ended ones too: which of two ledgers is newer; -1: not counted


class Heartbeat(Message, frozen=True, kw_only=True):
    """1 Hz on hb.<edge>. ``incarnation`` = state directory's UUID + start counter."""

    edge: str
    incarnation: str
    n: int
    arch: str = ""
    backends: tuple[str, ...] = ()
    drivers: dict[str, str] = {}  # what starts the sandboxes of a backend: {"container": "native"}
    # Launches of a backend since the Edge started: with namespaces made ahead, and all; "<backend> groups": with groups made ahead.
    pools: dict[str, tuple[int, int]] = {}
    devices: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    load: NodeLoad
    states: dict[str, int] = {}
    principals: dict[str, int] = {}  # live sandboxes by user, for isolation="user"
    exclusive: str = ""  # user who has this node for itself
    draining: bool = False
    layers: int = 0  # distinct ones that its live sandboxes stand on
    loop_lag_ms: float = 0.0
    leaving: bool = False  # the last one: it stopped in order and holds nothing
    tmpfs_upper: bool = False  # disk_mode "auto" means tmpfs here: admission adds the upper's bytes to memory


class ClusterView(Message, frozen=True, kw_only=True):
    """view: what the Watcher knows; Schedulers place from it."""

    watcher: str
    n: int
    nodes: tuple[Heartbeat, ...] = ()
    ages_ms: dict[str, int] = {}
    lost: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()  # by their records they are there, and this Watcher, begun a moment ago, has not heard them yet


class DrainRequest(Message, frozen=True, kw_only=True):
    mode: str = "wait"  # wait | stop | pause
    undo: bool = False
    again: bool = False  # no new order: how this one stands; `conflict` where it was undone meanwhile


class EdgeInfo(Message, frozen=True, kw_only=True):
    heartbeat: Heartbeat
    capabilities: tuple[dict[str, object], ...] = ()
    degraded: tuple[str, ...] = ()
    trouble: tuple[str, ...] = ()  # of a drain: sandboxes that could not be paused, and why
    drained: bool = False  # of a drain: all is done that was ordered, as far as it could be


# ------------------------------------------------------------------ events
class Event(Message, frozen=True, kw_only=True):
    """One line of a sandbox's or a node's life. Order is (incarnation, n); consumers dedupe by (sb, incarnation, n)."""

    v: int = 1
    kind: str  # docs/events.md lists them
    sb: str = ""
    edge: str = ""
    project: str = ""
    principal: str = ""
    incarnation: str = ""
    n: int = 0
    wall_ts: float = 0.0
    mono_ns: int = 0
    labels: dict[str, str] = {}
    detail: dict[str, object] = {}


class EventBatch(Message, frozen=True, kw_only=True):
    """Several events in one message of DSEC_EVENTS (one per burst slice)."""

    events: tuple[Event, ...]
