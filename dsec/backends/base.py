"""What a backend is: the protocols that the Edge drives, and the LaunchPlan that it hands over.

The Edge turns a `SandboxSpec` into a runtime-neutral `LaunchPlan` (a pure function, printable before anything happens), a
backend renders the plan for its runtime (crun's config.json, a VM's arguments) and answers with an `Instance`. Everything
that enters a sandbox goes through the instance's `GuestLink`.

Errors: a method that fails raises `Undone` when everything is back where it was, or `Broken` when the instance must not be
used any more and only `stop` is allowed. Both are `NodeError`s. Bad requests raise `InvalidRequest`, `NotFound` or `Unsupported`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol, runtime_checkable

import msgspec

from dsec.errors import NodeError
from dsec.model import ExecSpec, Exit, FileReply, FileRequest, ImageConfig, LayerRef, OpStatus, PackedLayer, Paused, Qos, Resources, Usage
from dsec.security.network import Wiring


class Undone(NodeError):
    """The operation failed and everything is as before."""

    code = "node"


class Broken(NodeError):
    """The operation failed half-way; the instance can only be stopped."""

    code = "node"
    retryable = False


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend can do on this node; `missing` says why for each thing that it cannot."""

    name: str
    driver: str = ""  # what starts its sandboxes, where there is a choice: native | crun | runc
    pause: bool = False
    snapshot: bool = False
    fork: bool = False
    pack_diff: bool = False
    tty: bool = False
    userns: bool = False
    disk_limit: bool = False
    worker: bool = False  # its agent can listen for the node: `SandboxSpec.worker`
    missing: dict[str, str] = {}


class IdMap(msgspec.Struct, frozen=True):
    """Ids 0…count-1 inside are base…base+count-1 on the node."""

    base: int
    count: int = 65_536


class Mount(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A mount inside the sandbox besides its root."""

    target: str
    fstype: str
    source: str = ""
    options: tuple[str, ...] = ()


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything a runtime needs, with all names resolved. Every kernel name derives from `ulid`."""

    id: str  # <edge>-<ulid>
    ulid: str
    state_dir: str  # this sandbox's own directory on the node
    lowers: tuple[LayerRef, ...]  # topmost first: toolkits, workspaces, base
    resources: Resources
    disk_mode: str  # quota | btrfs | tmpfs | loop | dir, decided
    qos: Qos
    idmap: IdMap | None  # None: no user namespace (named in `degraded`)
    cgroup: str  # below each controller's mount, e.g. "dsec/<edge>/<ulid>"
    hostname: str
    env: dict[str, str] = {}
    workdir: str = ""
    user: str = ""
    command: tuple[str, ...] = ()  # what its image runs when nothing else is asked for: ENTRYPOINT and CMD
    network: str = "none"
    wiring: Wiring | None = None  # its interface and addresses, for network="open"
    mounts: tuple[Mount, ...] = ()
    capabilities: tuple[str, ...] = ()
    seccomp: str = "default"  # name of a profile in dsec/security/seccomp.py; "" = none
    masked: tuple[str, ...] = ()
    readonly: tuple[str, ...] = ()
    degraded: tuple[str, ...] = ()  # what this node cannot enforce of what was asked
    processes: str = ""  # a directory of images: what runs in it begins there, and not with a fresh agent


class PackOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What `Instance.pack_diff` is asked for. ``name``: the layer's; ``scrub``: globs of what is left out besides the project's own list
    (dsec/layers/diff.py). More than ``max_entries`` names or ``max_bytes`` in regular files are refused."""

    name: str
    scrub: tuple[str, ...] = ()
    max_entries: int = 1_000_000
    max_bytes: int = 16 << 30
    image: ImageConfig | None = None  # make it an image of its own: it brings the layers below along
    whole: bool = False  # for a checkpoint: nothing is left out but what the node itself put there
    processes: str = ""  # a directory that is made for images of its processes, of the same moment; where `Capabilities.snapshot`


class Chunk(msgspec.Struct, frozen=True):
    """A piece of output. ``offset`` is absolute; a jump means that bytes between were dropped (no reader held the stream)."""

    stream: int  # 1 stdout, 2 stderr
    offset: int
    data: bytes


@runtime_checkable
class GuestLink(Protocol):
    """The way into one sandbox: Aether's operations. Operation ids are 32 hex digits chosen by the caller.

    A link connects on demand and closes when idle; a lost channel is not a death. All methods raise `SandboxGone` when the
    sandbox has ended, `SandboxError` for what failed inside, `DeadlineExceeded` when ``timeout`` (seconds) passes.
    """

    async def start(self, op: str, spec: ExecSpec) -> OpStatus:
        """Start a command. The same ``op`` again starts nothing and answers where it stands.

        Raises `NotFound` (command, user or cwd) and `InvalidRequest`.
        """
        ...

    async def wait(self, op: str, timeout: float) -> OpStatus:
        """Until the operation ends (its status with captured output), or ``timeout`` passes (its status, running)."""
        ...

    def output(self, op: str, offsets: tuple[int, int] = (0, 0), view: bool = False) -> AsyncIterator[Chunk]:
        """Both streams from absolute offsets (stdout, stderr) until both end. While this iterator is held and is not read, the
        command blocks on its pipe (credit); once it is closed, output beyond the ring is dropped again. With ``view``, or once a newer
        reader has come, it only looks on: the command does not wait for it, and it may see jumps."""
        ...

    async def input(self, op: str, offset: int, data: bytes, eof: bool = False) -> int:
        """Write to stdin at an absolute offset (repeats are harmless). Returns the offset accepted so far; the caller resends from it."""
        ...

    async def signal(self, op: str, signum: int, tree: bool = True) -> None:
        """Signal the operation's process, or its whole session tree."""
        ...

    async def resize(self, op: str, rows: int, cols: int) -> None: ...

    async def files(self, request: FileRequest) -> FileReply: ...

    async def ops(self) -> tuple[OpStatus, ...]:
        """Every operation that the guest still remembers, without captured output."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Instance(Protocol):
    """One launched sandbox."""

    @property
    def id(self) -> str: ...

    @property
    def link(self) -> GuestLink: ...

    async def wait(self) -> Exit:
        """Returns when the sandbox's init is gone, however it went (exit code, signal, oom). May be awaited by several and cancelled."""
        ...

    def on_exit(self, call: Callable[[Exit], object]) -> None:
        """``call`` gets what `wait` returns, once, on this loop: so that an idle sandbox needs no task that waits for its end."""
        ...

    async def pause(self, reclaim: bool = True, /) -> Paused:
        """Stop every process; with ``reclaim`` its memory goes to the node's swap as far as there is some. Again: what is left of that.

        Raises `Undone` (it runs)."""
        ...

    async def resume(self) -> None:
        """Let it go on; again is fine. It answers as soon as this returns, and its memory comes back behind.

        Raises `Undone` (it stands still)."""
        ...

    async def stands_still(self) -> bool:
        """What the kernel shows, whatever anybody has recorded: paused, or half-way there."""
        ...

    async def usage(self) -> Usage: ...

    async def pack_diff(self, order: PackOrder, paused: bool, thawed: Callable[[], object], /) -> PackedLayer:
        """What it changed, as a layer of this node's store; where `Capabilities.pack_diff`. It stands still while it is read; then
        ``thawed`` is called, it runs on unless it was ``paused``, and the layer is completed.

        Raises `InvalidRequest`, `Undone` and `NodeError` (it is as before), or `Broken`."""
        ...

    async def stop(self, grace: float = 0.0) -> None:
        """End it and free everything that it holds: processes, mounts, cgroups, netns, files. Idempotent; raises `NodeError` while
        something is still there (the caller retries)."""
        ...


@runtime_checkable
class Backend(Protocol):
    """One way to run sandboxes on this node."""

    @property
    def capabilities(self) -> Capabilities: ...

    async def open(self) -> None:
        """Make the node ready (cgroup roots, holder process). Raises `Unsupported` with the reason when it cannot."""
        ...

    async def prepare(self, plan: LaunchPlan) -> None:
        """Bring the layers that the plan names onto the node; slow and idempotent. Raises `NotFound` for an unknown layer."""
        ...

    async def launch(self, plan: LaunchPlan) -> Instance:
        """Create and start; returns when the guest answers. Nothing is left after a failure (`Undone`) or a cancel."""
        ...

    async def adopt(self, plan: LaunchPlan) -> Instance | None:
        """Take over a sandbox that an earlier Edge launched; None when it does not live any more (its remains are then freed by `reap`)."""
        ...

    async def last_exit(self, ulid: str) -> Exit | None:
        """How a sandbox of an earlier Edge ended, where the node still knows; asked after `adopt` answered None, before `reap`."""
        ...

    async def reap(self, known: frozenset[str]) -> tuple[str, ...]:
        """Free what belongs to this Edge on this node but to no ulid in ``known``; answers the ulids that it freed."""
        ...

    async def close(self) -> None:
        """Let go without ending sandboxes (the holder keeps them)."""
        ...

    async def shutdown(self) -> None:
        """`close`, and end what served the node (holder process, empty groups). Only when no sandbox lives."""
        ...
