"""The connection of a user: makes sandboxes, finds them again, speaks to many of them at once."""

from __future__ import annotations

import asyncio
import functools
import os
import socket
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, Unpack

from dsec.bus.messages import ClusterView, EdgeInfo, Event, Lease
from dsec.bus.subjects import OF_JOB, Caller, inbox
from dsec.bus.transport import Msg, Subscription
from dsec.errors import Denied, DsecError, InvalidRequest, Unavailable
from dsec.model import Checkpoint, SandboxId, SandboxSpec, State, check_project, new_ulid
from libdsec import names
from libdsec.burst import Burst, Gathering, create_one
from libdsec.lease import LeaseKeeper
from libdsec.many import Many, Outcomes, gone
from libdsec.names import Named
from libdsec.plan import expand
from libdsec.sandbox import Sandbox
from libdsec.spec import Options, labels_map, milliseconds, spec, text, wrong
from libdsec.wire import Wire

Handles = list[Sandbox]  # a method is called `list`
Checkpoints = list[Checkpoint]

if TYPE_CHECKING:
    from libdsec.checkpoint import Restored
    from libdsec.draining import DrainMode

URL_VARIABLE, PROJECT_VARIABLE = "DSEC_URL", "DSEC_PROJECT"
PRINCIPAL_VARIABLE, UNIT_VARIABLE = "DSEC_PRINCIPAL", "DSEC_UNIT"
DEFAULT_URL = "nats://127.0.0.1:4222"
STOP_PARALLEL = 64
AFTERTHOUGHT = 120.0  # seconds in which a create that ended may still be answered


def connect(
    url: str | None = None,
    *,
    project: str | None = None,
    principal: str | None = None,
    unit: str | None = None,
    name: str | None = None,
    lease: str | None = None,
    lease_ttl: float = 30.0,
    creds: str = "",
    token: str = "",
    user: str = "",
    password: str = "",
    tls_ca: str = "",
    connect_timeout: float = 5.0,
) -> Client:
    """A client, to be used as ``async with libdsec.connect() as dsec`` (or ``dsec = await libdsec.connect()`` and ``await dsec.close()``).

    Args:
        url: NATS server(s); None = ``DSEC_URL``, or nats://127.0.0.1:4222.
        project: path such as ``acme/rl``; None = ``DSEC_PROJECT``, or ``default``.
        principal: who asks; None = ``DSEC_PRINCIPAL``, or ``local``. unit: the scale unit; None = ``DSEC_UNIT``, or ``main``.
            In a worker these variables are set, and ``connect()`` is its job's.
        name: shown in nats-server's monitoring.
        lease: id of the job's lease, to be chosen when the job shall outlive this client: a restarted client that gives the
            same id takes its sandboxes up again. None = a lease that ends with this client.
        lease_ttl: seconds without a sign of life after which the nodes end what the lease holds (by ``on_client_loss``).
        creds, token, user, password, tls_ca: how to authenticate to nats-server.
        connect_timeout: seconds to keep trying.

    Raises (when it is entered): `Unavailable`, `Denied`, `Unsupported`; `InvalidRequest` at once.
    """
    if url is not None and not isinstance(url, str):
        raise wrong(f"must be a string, not {type(url).__name__}", "url", repr(url), "use nats://host:4222")
    chosen = url or os.environ.get(URL_VARIABLE) or DEFAULT_URL
    path = check_project(project or os.environ.get(PROJECT_VARIABLE) or "default")
    principal = principal or os.environ.get(PRINCIPAL_VARIABLE) or "local"
    unit = unit or os.environ.get(UNIT_VARIABLE) or "main"
    for field, token_text in (*(("principal", part) for part in principal.split(OF_JOB)), ("unit", unit)):
        if not text(token_text, field, limit=80).replace("-", "").replace("_", "").isalnum() or not token_text.isascii():
            raise wrong("is not a usable name", field, token_text, "use A-Z a-z 0-9 _ -")
    ttl = milliseconds(lease_ttl, "lease_ttl")
    if not 1_000 <= ttl <= 86_400_000:
        raise wrong("is out of range", "lease_ttl", lease_ttl, "use 1 to 86400 seconds")
    if lease is not None and not (0 < len(lease) <= 64 and lease.isascii() and lease.replace("-", "").replace("_", "").isalnum()):
        raise wrong("is not a usable id", "lease", lease, "use A-Z a-z 0-9 _ -, 64 at most")
    options = {
        "name": name or f"libdsec {socket.gethostname()} {os.getpid()}",
        "creds": creds,
        "token": token,
        "user": user,
        "password": password,
        "tls_ca": tls_ca,
        "connect_timeout": connect_timeout,
        # A dead connection is noticed, and the lease renewed on another, before it lapses.
        "ping_interval": min(10.0, max(0.5, ttl / 6000)),
        "inbox": inbox(principal) if OF_JOB in principal else "",  # a job hears nothing else
    }
    wire = Wire(chosen, options, unit, Caller(principal, path))
    return Client(wire, Lease(id=lease or new_ulid(), ttl_ms=ttl), named=lease is not None)


class Client(Many, Named):
    """Made by `connect`. Belongs to the event loop and the process in which it was entered.

    ``on_wait(count, why)`` is called now and then while ``count`` sandboxes of one create find no room; ``why`` is the last refusal.
    """

    on_wait: Callable[[int, DsecError | None], object] | None = None
    _meant = names.CLIENT

    def __init__(self, wire: Wire, lease: Lease, *, named: bool) -> None:
        super().__init__(wire)
        self._leases = LeaseKeeper(wire, lease, named=named)
        self._gatherings: dict[str, Gathering] = {}
        self._news: Subscription | None = None
        self._inbox = ""

    def __reduce__(self) -> NoReturn:
        fix = "call libdsec.connect() in the other process; send sandbox ids and attach there"
        raise InvalidRequest("a client cannot be pickled", fix=fix)

    # ------------------------------------------------------------------ open and close
    async def __aenter__(self) -> Self:
        await self._wire.open()
        try:
            transport = self._wire.guard()
            self._inbox = transport.new_inbox()
            self._news = await self._wire.listen(f"{self._inbox}.*", self._on_news)
            self._wire.on_reconnect.append(self._reconnected)
            if self._leases.named:
                await self._take_up()
        except BaseException:
            await self._wire.close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def __await__(self) -> Generator[Any, None, Client]:
        return self.__aenter__().__await__()

    async def close(self) -> None:
        """End what this client holds (unless it is kept, or the lease has a name of its own), and disconnect. Idempotent."""
        if self._wire.closed:
            return
        for gathering in list(self._gatherings.values()):
            gathering.close(Unavailable("this client was closed", reason="closed"))
        try:
            await self._leases.close()
        finally:
            await self._wire.close()

    @property
    def lease(self) -> str:
        """The id of this client's lease, for ``connect(lease=…)``."""
        return self._leases.lease.id

    # ------------------------------------------------------------------ making sandboxes
    def sandbox(self, image: str | SandboxSpec, *, timeout: float = 120.0, **options: Unpack[Options]) -> SandboxContext:
        """A sandbox for a block: ``async with client.sandbox("debian-12") as sandbox``. It is stopped when the block ends.

        Args:
            image: base layer, or a whole spec (then without options).
            timeout: seconds until it must be ready.
            workspace, toolkits: layers stacked above the image, in this order.
            backend: ``container`` (default) or another that a node offers.
            cpus: share of cores (1). memory ("512MiB"), disk ("1GiB"), pids (256), inodes: hard limits.
            qos: ``be`` (default) gets the CPU time that the ``ls`` sandboxes of its node leave; ``ls`` shares by ``cpus``.
            network: ``none`` (default), ``open`` or a list of rules.
            env, workdir, user, hostname, labels: as in any container; only what is declared here reaches the sandbox.
            idle_timeout: seconds without use (1800) until ``on_idle`` ("pause" or "stop"); None or 0 = never.
            on_client_loss: "stop" (default), "pause" or "keep", when this client's lease lapses.
            ttl: seconds of life; None = no bound. exec_timeout: default of `Sandbox.exec` (600).
            isolation, devices, node_labels, arch: which nodes may take it. best_effort: accept one that cannot enforce all of it.
            worker: True, or a `Worker` that says what it may: inside, ``libdsec.connect()`` makes and drives sandboxes of the job
                whose worker it is; they end with it. ends_with: the id of a sandbox with whose end this one ends.

        Raises: `InvalidRequest` at once; on entering `NotFound` (a layer), `Busy`, `Denied`, `Unsupported`, `Unavailable`,
        `DeadlineExceeded`.
        """
        return SandboxContext(self, _spec_of(image, options), milliseconds(timeout, "timeout") / 1000)

    async def create(self, image: str | SandboxSpec, *, timeout: float = 120.0, **options: Unpack[Options]) -> Sandbox:
        """A sandbox that outlives this client: of an image's name ``on_client_loss`` is "keep" here unless given; a whole spec says itself.
        Arguments and errors as `sandbox`."""
        self._wire.guard()
        return await create_one(self, _spec_of(image, _kept(image, options)), milliseconds(timeout, "timeout") / 1000)

    async def create_many(
        self,
        specs: str | SandboxSpec | Sequence[SandboxSpec],
        n: int | None = None,
        *,
        min_ready: int | None = None,
        timeout: float = 120.0,
        **options: Unpack[Options],
    ) -> Handles:
        """As `burst`, for sandboxes that outlive this client, by the same rule as `create`; those that became ready.

        Raises `BurstError` (and leaves nothing) when fewer than ``min_ready`` did.
        """
        burst = self.burst(specs, n, min_ready, timeout, **_kept(specs, options))
        made = False
        await burst.__aenter__()
        try:
            found = await burst.wait()
            made = True
            return found
        finally:
            burst._close("the burst was left")
            if not made:
                await self._stop_all(burst.sandboxes)

    def burst(
        self,
        specs: str | SandboxSpec | Sequence[SandboxSpec],
        n: int | None = None,
        min_ready: int | None = None,
        deadline: float = 120.0,
        keep_partial: bool = False,
        **options: Unpack[Options],
    ) -> Burst:
        """Many sandboxes: ``async with client.burst("debian-12", 64, memory="256MiB") as b: async for sandbox in b: …``.

        Args:
            specs: one spec (or an image's name, with ``options`` as for `sandbox`) for ``n`` sandboxes, or one for each.
            min_ready: fewer than these raise `BurstError`; None = all of them. What is not ready at the ``deadline`` (seconds) is
                cancelled and listed in ``failed``.
            keep_partial: leave those that are ready running when a `BurstError` is raised.
        """
        if isinstance(specs, str):
            expanded = expand(spec(specs, **options), n)
        elif options:
            raise _beside_a_spec(options)
        else:
            expanded = expand(specs, n)
        least = len(expanded) if min_ready is None else min_ready
        if isinstance(least, bool) or not isinstance(least, int) or not 0 <= least <= len(expanded):
            raise wrong("is out of range", "min_ready", min_ready, f"use a whole number from 0 to {len(expanded)}")
        seconds = milliseconds(deadline, "deadline") / 1000
        if seconds <= 0:
            raise wrong("is out of range", "deadline", deadline, "use a number of seconds above 0")
        return Burst(self, expanded, least, seconds, keep_partial)

    async def restore(
        self,
        checkpoint: Checkpoint | str,
        n: int = 1,
        *,
        labels: Mapping[str, str] | None = None,
        min_ready: int = 1,
        on_client_loss: str = "",
        timeout: float = 120.0,
    ) -> Restored:
        """``n`` sandboxes that begin from a checkpoint, on the node that keeps it: what became of each (`Restored.results`).

        They have the spec that the sandbox had, with ``labels`` besides, and begin as any sandbox does: with an id, host name and addresses
        of their own and no process. ``on_client_loss``: theirs, "" = what the sandbox had; with "keep" they outlive this client.

        Raises: `NotFound`; when fewer than ``min_ready`` are ready after ``timeout`` seconds `BurstError`, or the one's own error where
        ``n`` is 1, and then none is left.
        """
        from libdsec.checkpoint import restore

        self._wire.guard()
        return await restore(self, checkpoint, n, labels, min_ready, on_client_loss, timeout)

    async def checkpoints(self, ids: Iterable[str] = ()) -> Checkpoints:
        """Those of this project on all nodes, oldest first; with ``ids`` only these, as far as they are there."""
        from libdsec.checkpoint import find

        return await find(self, ids)

    async def drop_checkpoints(self, ids: Iterable[str]) -> Outcomes:
        """Let go of checkpoints; what became of each. Their files go when no sandbox and no kept checkpoint stands on them any more."""
        from libdsec.checkpoint import drop

        return await drop(self, ids)

    async def attach(self, sandbox_id: str) -> Sandbox:
        """A handle to a sandbox that exists. Raises `NotFound`, or `SandboxGone` with the reason of its end."""
        sid = SandboxId.parse(text(sandbox_id, "id", limit=128))
        sandbox = Sandbox(self, sid)
        try:
            info = await sandbox.info()
        except Unavailable as error:
            fix = "see `dsec node ls`"
            raise Unavailable(f"the node {sid.edge} does not answer", sandbox=sandbox_id, reason=error.reason, fix=fix) from error
        if info.state is State.STOPPED:
            raise gone(sandbox_id, info)
        sandbox.layers, sandbox.degraded = info.layers, info.degraded
        return sandbox

    # ------------------------------------------------------------------ the cluster
    async def nodes(self) -> ClusterView:
        """The Watcher's view: nodes with load and states, how old each is, and those lost. Raises `Unavailable` without a Watcher."""
        view = await self._wire.view(timeout=5.0)
        if view is None:
            fix = "start one with `dsec serve watcher` or `dsec up`"
            raise Unavailable("no Watcher publishes a view of the cluster", reason="silent", fix=fix)
        return view

    async def drain(
        self, node: str, mode: DrainMode = "mark", *, timeout: float | None = None, progress: Callable[[EdgeInfo], object] | None = None
    ) -> EdgeInfo:
        """Empty a node. The order is its Edge's: it outlives this client and the Edge's process, until ``mode="undo"``.

        Args:
            mode: "mark" (takes no more sandboxes) and "undo" return at once; "wait" when its last sandbox has ended; "stop" and "pause"
                when all have been stopped or paused. What could not be paused is in ``trouble``.
            timeout: seconds after which `DeadlineExceeded` is raised, and the node goes on draining; None or 0 = no limit.
            progress: called with how the node stands whenever it was asked.

        Raises: `NotFound` (no such node), `Unavailable`, `Conflict` (reason ``undone``) when somebody gives another order meanwhile.
        """
        from libdsec.draining import drain

        return await drain(self._wire, node, mode, timeout, progress)

    async def events(
        self,
        labels: Mapping[str, str] | None = None,
        *,
        since: str | float | None = None,
        follow: bool = True,
        kinds: Iterable[str] = (),
        ids: Iterable[str] = (),
    ) -> AsyncGenerator[Event]:
        """Events of this project as they happen, each once, through reconnections too.

        Args:
            since: None = from now on; ``"-10m"`` (s, m, h, d), Unix seconds or ``"all"`` begin in the past.
            follow: False ends with the events that exist now.
            labels, kinds, ids: which ones; all labels, any of the kinds, any of the sandboxes. A kind that does not exist is an error.
        """
        from dsec.bus.events import EventReader

        if OF_JOB in self._wire.caller.principal:
            fix = "watch your sandboxes: sandbox.wait(), client.list(labels)"
            raise Denied("a job hears no events: their stream is the whole cluster's", reason="job", fix=fix)
        chosen = labels_map(labels)
        reader = EventReader(self._wire.bus, labels=chosen, kinds=kinds, sandboxes=ids, project=self.project, since=since, follow=follow)
        async with reader:
            async for event in reader:
                yield event

    # ------------------------------------------------------------------ inside
    async def _stop_all(self, sandboxes: Sequence[Sandbox]) -> None:
        """Stop many, a bounded number at a time. Cancelled or failed, the lease drops what is left."""
        gate = asyncio.Semaphore(STOP_PARALLEL)

        async def one(sandbox: Sandbox) -> None:
            if sandbox._gone is not None or sandbox._stopped:
                return
            async with gate:
                try:
                    await sandbox.stop()
                except DsecError as error:
                    self._wire.log.warning("client.stop_left_to_lease", sandbox=sandbox.id, error=str(error))
                    self._leases.drop([sandbox._id])

        try:
            await asyncio.gather(*(one(sandbox) for sandbox in sandboxes))
        except asyncio.CancelledError:
            self._leases.drop([sandbox._id for sandbox in sandboxes if sandbox._gone is None and not sandbox._stopped])
            raise

    def _inbox_of(self, burst: str) -> str:
        return f"{self._inbox}.{burst}"

    def _on_news(self, msg: Msg) -> None:
        gathering = self._gatherings.get(msg.subject.rsplit(".", 1)[1])
        if gathering is not None:
            gathering.on_news(msg)

    def _retire(self, gathering: Gathering) -> None:
        """Late answers of a create that ended are still dropped for a while."""
        for burst in {part.burst for part in gathering.parts}:
            asyncio.get_running_loop().call_later(AFTERTHOUGHT, self._gatherings.pop, burst, None)

    def _reconnected(self) -> None:
        self._leases.renew_now()
        for gathering in list(self._gatherings.values()):
            gathering.reconnected()

    async def _take_up(self) -> None:
        """A named lease may hold sandboxes of an earlier client: find their Edges and renew there."""
        who = self._wire.caller.principal  # a lease of the same name in a job is another one
        mine = [SandboxId.parse(info.id) for info in await self.list() if (info.lease, info.principal) == (self.lease, who)]
        if mine:
            self._leases.claim(mine)


class SandboxContext(Named):
    """A sandbox that lives as long as its block."""

    _meant = names.CONTEXT

    def __init__(self, client: Client, made_of: SandboxSpec, timeout: float) -> None:
        self.spec = made_of
        self._client = client
        self._timeout = timeout
        self._sandbox: Sandbox | None = None

    async def __aenter__(self) -> Sandbox:
        if self._sandbox is not None:
            raise InvalidRequest("this sandbox was entered before", fix="call client.sandbox() for each block")
        self._client._wire.guard()
        self._sandbox = await create_one(self._client, self.spec, self._timeout)
        return self._sandbox

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> Literal[False]:
        if self._sandbox is not None:
            await self._client._stop_all([self._sandbox])
        return False


def _kept(of: object, options: Options) -> Options:
    """What is created outside a block stays, unless it is told otherwise."""
    if isinstance(of, str):
        options.setdefault("on_client_loss", "keep")
    return options


def _spec_of(image: str | SandboxSpec, options: Options) -> SandboxSpec:
    if isinstance(image, SandboxSpec):
        if options:
            raise _beside_a_spec(options)
        return image
    if all(isinstance(value, _PLAIN) for value in options.values()) and isinstance(image, str):
        plain: dict[str, Any] = {**options}
        return _asked_before(image, **plain)
    return spec(image, **options)


_PLAIN = (str, int, float, bool, type(None))
_asked_before = functools.lru_cache(64, typed=True)(spec)  # a job asks for the same a thousand times; ``typed``: True is no number


def _beside_a_spec(options: Options) -> InvalidRequest:
    return wrong("cannot be given beside a whole spec", next(iter(options)), "", "put it into libdsec.spec(…)")
