"""The nouns: ids, what makes a sandbox, what became of it. Frozen msgspec Structs, no behaviour beyond checks.

Sizes are bytes, times are milliseconds, wall-clock times are Unix seconds as float and only for people.
"""

from __future__ import annotations

import enum
import os
import re
import time
from typing import Annotated

import msgspec
from msgspec import Meta

from dsec.errors import InvalidRequest

MIB = 1 << 20
GIB = 1 << 30

_CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz"
_EDGE = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
_ULID = re.compile(r"[0-7][0-9a-hjkmnp-tv-z]{25}")
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")


def new_ulid() -> str:
    """26 lower-case characters: 48 bits of milliseconds, 80 of randomness (ulid spec, Crockford's base 32)."""
    number = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10), "big")
    return "".join(_CROCKFORD[number >> shift & 31] for shift in range(125, -5, -5))


class SandboxId(msgspec.Struct, frozen=True, order=True):
    """``<edge>-<ulid>``: the id names the node that owns the sandbox, so requests route by it alone."""

    edge: str
    ulid: str

    def __str__(self) -> str:
        return f"{self.edge}-{self.ulid}"

    @classmethod
    def parse(cls, text: str) -> SandboxId:
        """Raises `InvalidRequest` for anything that is not an id."""
        edge, _, ulid = text.rpartition("-")
        if not _EDGE.fullmatch(edge) or not _ULID.fullmatch(ulid):
            raise InvalidRequest(
                "not a sandbox id", field="id", value=text, fix="ids look like <edge>-<26 characters>; `dsec ls` lists them"
            )
        return cls(edge, ulid)


def check_edge_name(name: str) -> str:
    """An Edge's name is part of ids, cgroups and subjects: lower-case letters, digits and inner dashes, 40 at most."""
    if not _EDGE.fullmatch(name):
        raise InvalidRequest("not a usable node name", field="edge.name", value=name, fix="use a-z, 0-9 and inner dashes, 40 at most")
    return name


def check_project(path: str) -> str:
    """A project is a path such as ``acme/rl``; each part is a NATS token."""
    parts = path.split("/")
    if len(parts) > 8 or not all(_TOKEN.fullmatch(part) for part in parts):
        raise InvalidRequest("not a project path", field="project", value=path, fix="use parts of A-Z a-z 0-9 _ - joined by /")
    return path


class Qos(enum.StrEnum):
    """CPU class (paper, section on QoS). Latency-sensitive: cores by weight, ``cpus`` each. Best-effort: what the latency-sensitive ones of
    its node leave, shared evenly, and those that compute now and then before those that always do (dsec/qos/hogs.py); against all else
    on the node a sandbox of either class weighs the same."""

    LS = "ls"
    BE = "be"


class State(enum.StrEnum):
    """States of the lifecycle; the table is in dsec/actors/lifecycle.py."""

    PENDING = "pending"
    CREATING = "creating"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    CAPTURING = "capturing"
    STOPPING = "stopping"
    STOPPED = "stopped"


class ExitReason(enum.StrEnum):
    """Why a sandbox ended. A sandbox that died is never restarted silently."""

    REQUESTED = "requested"
    EXITED = "exited"
    DEADLINE = "deadline"
    IDLE = "idle"
    OOM = "oom"
    LAUNCH_FAILED = "launch_failed"
    LEASE = "lease"
    BROKEN = "broken"
    DRAINED = "drained"
    NODE_LOST = "node_lost"


class Exit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a sandbox ended."""

    reason: ExitReason
    detail: str = ""
    exit_code: int | None = None  # of the sandbox's init, when it exited by itself
    signal: int | None = None
    wall_ts: float = 0.0


class Resources(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a sandbox may use. ``cpus`` is a share of cores that may be overcommitted; the rest are hard limits."""

    cpus: Annotated[float, Meta(gt=0, le=1024)] = 1.0
    memory: Annotated[int, Meta(ge=16 * MIB)] = 512 * MIB
    disk: Annotated[int, Meta(ge=MIB)] = GIB  # writable upper
    inodes: Annotated[int, Meta(ge=64)] = 262_144
    pids: Annotated[int, Meta(ge=4, le=1_000_000)] = 256
    nofile: Annotated[int, Meta(ge=0, le=1 << 20)] = 0  # open files of one process; 0 = what the node gives
    fsize: Annotated[int, Meta(ge=0)] = 0  # bytes of one file that a command writes; 0 = as the disk allows


class NetworkPolicy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``none``: loopback only (the default). ``open``: everything but the node, other sandboxes, the bus and metadata services
    (dsec/security/network.py). ``rules`` are named here and refused until they are enforced."""

    mode: str = "none"
    rules: tuple[str, ...] = ()


class LayerRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One read-only layer: the name that was asked for and the content it resolved to (``sha256:…``)."""

    name: str
    digest: str


class ImageConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an image says about how its files want to be run: ENV, WORKDIR, USER, ENTRYPOINT and CMD."""

    env: dict[str, str] = {}
    workdir: str = ""
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()


class PackedLayer(LayerRef, frozen=True, kw_only=True, omit_defaults=True):
    """A layer that `pack_diff` made. It means what it should above ``parents`` (digests, topmost first: the layers of its sandbox)."""

    parents: tuple[str, ...] = ()
    size: int = 0  # bytes of the image
    entries: int = 0
    bytes: int = 0  # in regular files
    scrubbed: int = 0  # names left out, each with all that was in it
    frozen_ms: float = 0.0  # how long the sandbox stood still
    processes: int = 0  # bytes on disk of the images of its processes, where they were asked for


class Worker(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a sandbox may do that makes and drives others (`SandboxSpec.worker`): the job that it is the worker of.

    This is the place where a job is narrowed. A worker's own workers never have more than it has."""

    project: str = ""  # of the sandboxes that it makes: its own, or one below it
    networks: tuple[str, ...] = ("none",)  # network modes that they may have
    on_end: str = "stop"  # what becomes of them when it ends: stop | keep


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that makes a sandbox. ``image`` is the base layer; workspaces and toolkits stack above it, in order."""

    image: str
    workspaces: tuple[str, ...] = ()
    toolkits: tuple[str, ...] = ()
    backend: str = "container"
    arch: str = ""  # "" = whatever the node is; else "x86_64" or "aarch64"
    resources: Resources = Resources()
    disk_mode: str = "auto"  # auto | quota | btrfs | tmpfs | loop | dir: what the upper lives on
    qos: Qos = Qos.BE
    env: dict[str, str] = {}
    workdir: str = ""
    user: str = ""  # "" = root; name, uid, or either with :group
    hostname: str = ""
    labels: dict[str, str] = {}
    devices: tuple[str, ...] = ()
    node_labels: dict[str, str] = {}
    isolation: str = "shared"  # "user": a node only with sandboxes of the same principal
    network: NetworkPolicy = NetworkPolicy()
    idle_timeout_ms: int = 1_800_000  # 0 = never
    on_idle: str = "pause"  # pause | stop
    on_client_loss: str = "stop"  # stop | pause | keep
    ttl_ms: int = 0  # absolute life; 0 = none
    exec_timeout_ms: int = 600_000  # default time-out of an exec; 0 = none
    best_effort: bool = False  # accept a node that cannot enforce all of it (it is named in the sandbox's info)
    checkpoint: str = ""  # id of the checkpoint that it begins from: its layers, and not what image, workspaces and toolkits mean now
    worker: Worker | None = None  # it has a way to the bus, as the worker of a job
    ends_with: str = ""  # id of a sandbox with whose end it ends


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A state of a sandbox from which others begin. Its id is shaped as a sandbox's, and names the node that keeps it."""

    id: str
    kind: str = "disk"  # its files; "memory": its processes as well
    name: str = ""  # for people
    sandbox: str  # that it was taken of
    parent: str = ""  # the checkpoint that its sandbox had begun from
    project: str
    principal: str
    spec: SandboxSpec  # of the sandbox when it was taken
    layers: tuple[LayerRef, ...] = ()  # topmost first: what the sandbox had changed, then what it stood on
    size: int = 0  # bytes of the topmost: what this checkpoint takes on disk; the others are shared
    processes: int = 0  # bytes on disk of what its processes were; shared by all that begin from it
    entries: int = 0
    frozen_ms: float = 0.0  # how long the sandbox stood still
    created_ts: float = 0.0
    kept: bool = True  # False: it goes when no sandbox and no kept checkpoint stands on it
    until_ts: float = 0.0  # one that is not kept does not go before this wall-clock time


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a sandbox has used, read from its cgroup."""

    cpu_ms: int = 0
    memory: int = 0
    memory_peak: int = 0
    pids: int = 0
    oom_kills: int = 0
    disk: int = 0


class Paused(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a pause gave back. ``released``: bytes of memory that the node has more, what compressed swap takes for them subtracted;
    0 where a pause only freezes, and then ``note`` says why."""

    released: int = 0
    swapped: int = 0  # bytes of the sandbox that lie in swap
    freeze_ms: float = 0.0
    reclaim_ms: float = 0.0
    note: str = ""


class SandboxInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sandbox as `list` and `info` show it."""

    id: str
    state: State
    image: str
    project: str
    principal: str
    labels: dict[str, str] = {}
    backend: str = "container"
    layers: tuple[LayerRef, ...] = ()
    created_ts: float = 0.0
    last_active_ts: float = 0.0
    idle_timeout_ms: int = 0
    resources: Resources = Resources()
    usage: Usage | None = None
    exit: Exit | None = None
    stuck: str = ""  # why stopping does not end
    degraded: tuple[str, ...] = ()  # what this node does not enforce for it
    command: tuple[str, ...] = ()  # what its image runs when nothing else is asked for: ENTRYPOINT and CMD
    addresses: tuple[str, ...] = ()  # its own, with network="open"; nobody reaches it there
    lease: str = ""
    paused: Paused | None = None  # of one that is paused: what that gave back
    checkpoint: str = ""  # that it began from


class Stat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file inside a sandbox. ``kind``: file dir link fifo socket char block."""

    name: str
    kind: str
    size: int = 0
    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime: float = 0.0
    target: str = ""  # of a link


class ExecSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One command. ``argv`` is run as it is; a shell command is ``("/bin/sh", "-c", text)`` made by the client."""

    argv: tuple[str, ...]
    cwd: str = ""  # "" = the sandbox's workdir
    env: dict[str, str] = {}  # added to the sandbox's
    user: str = ""  # "" = the sandbox's user
    timeout_ms: int | None = None  # None = the sandbox's default; 0 = no limit
    wall_timeout: bool = False  # the time-out goes on while the sandbox is paused
    background: bool = False  # no default time-out; outlives the client that started it
    stdin: bool = False  # keep stdin open for `input`; else /dev/null
    tty: bool = False
    rows: int = 24
    cols: int = 80
    head: int = 64 * 1024  # bytes kept of the beginning of each stream
    tail: int = 256 * 1024  # and of its end
    stream: bool = False  # a reader will follow: back-pressure instead of dropping while it holds the stream
    service: bool = False  # argv names a service of the guest itself (dsec:connect, listen, pack, unpack, watch), not a program
    session: bool = False  # a shell that is kept: runs go into it
    run_in: str = ""  # the op of a session: argv[0] is a text for its shell; cwd, env and user are the session's


class Captured(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was kept of one output stream: its first bytes, its last bytes and how many there were in all."""

    head: bytes = b""
    tail: bytes = b""
    total: int = 0

    @property
    def truncated(self) -> bool:
        return self.total > len(self.head) + len(self.tail)

    def data(self) -> bytes:
        """Head and tail; between them a gap of ``total - len(head) - len(tail)`` bytes where truncated."""
        return self.head + self.tail


class OpStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where an operation stands. ``exit_code`` is None while it runs, and when a signal ended it."""

    op: str  # 32 hex digits, chosen by the caller
    running: bool
    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    oom_killed: bool = False
    duration_ms: float = 0.0
    stdout: Captured = Captured()
    stderr: Captured = Captured()
    pid: int = 0
    kind: str = ""  # session, terminal, run (in a session); else a plain command
    detail: str = ""  # which limit ended it


class Command(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a sandbox's command log. Numbers grow; there may be gaps where a node died."""

    seq: int
    op: str
    step: str = ""  # the key under which its result is kept
    argv: tuple[str, ...] = ()  # cut to what a person wants to see
    user: str = ""
    started_ts: float = 0.0
    ended_ts: float = 0.0  # 0 = it runs, or nobody has asked for its end yet
    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    oom_killed: bool = False
    duration_ms: float = 0.0
    stdout: int = 0  # bytes
    stderr: int = 0


class FileRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One bounded file operation, resolved inside the sandbox's root (openat2 RESOLVE_IN_ROOT), as `user`.

    ``verb``: read (offset, length <= 256 KiB), write (offset, data <= 256 KiB; create, truncate), stat, list (cursor in
    `offset`, at most `length` entries), mkdir (parents when `create`), remove (recursive when `recursive`), rename (`path` -> `target`),
    chmod (`mode`), chown (`target` = user or user:group; not through a link), symlink (`path` is the new link, `target` what it says), link
    (`target` is the new name), touch (`offset` = nanoseconds since 1970).
    """

    verb: str
    path: str
    offset: int = 0
    length: int = 0
    data: bytes = b""
    create: bool = False
    truncate: bool = False
    recursive: bool = False
    target: str = ""
    mode: int = 0o644
    user: str = ""


class FileReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a file operation answers; ``eof`` for reads and listings that reached the end."""

    data: bytes = b""
    stat: Stat | None = None
    entries: tuple[Stat, ...] = ()
    eof: bool = False
    written: int = 0
