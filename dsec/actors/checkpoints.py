"""The checkpoints of one node: made of its sandboxes, stood on by others, and gone when nothing can reach them.

A checkpoint is a layer (what its sandbox had changed) and a record that names the layers below. The layer has a name in the node's store as
long as the record is there, so that no `gc` takes it or what it was made on. The layer comes first and the record second; on the way
out the record goes first. A name without a record is what a crash left, and is freed at the next start.
"""

from __future__ import annotations

import asyncio
import functools
import time
from typing import TYPE_CHECKING

import msgspec
import structlog

from dsec import faults
from dsec.actors.host import Resolved
from dsec.backends.base import PackOrder
from dsec.bus.messages import CheckpointRequest
from dsec.bus.subjects import owns
from dsec.errors import Busy, Conflict, DsecError, InvalidRequest, NodeError, NotFound, Unsupported
from dsec.layers.index import PASSING
from dsec.model import Checkpoint, LayerRef, SandboxId, SandboxSpec

if TYPE_CHECKING:
    from dsec.actors.edge import Edge
    from dsec.actors.host import Planner
    from dsec.actors.sandbox import Sandbox

log = structlog.get_logger("dsec.checkpoints")
MOST = 20_000  # on one node
FREE_PAUSE = 1.0  # seconds before a layer that is still mounted is tried again
_decode = msgspec.msgpack.Decoder(Checkpoint).decode


class Checkpoints:
    """Part of an Edge. ``known`` holds them by id."""

    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self.known: dict[str, Checkpoint] = {}
        self._until: dict[str, float] = {}  # monotonic: when one that is not kept may go
        self._making: dict[str, tuple[str, asyncio.Task[Checkpoint]]] = {}
        self._freeing: dict[str, Planner] = {}  # names of layers whose record is gone
        self._free_at = 0.0  # monotonic; when what could not be freed is tried again
        self._sweeping = asyncio.Lock()

    @property
    def _prefix(self) -> str:
        return f"{PASSING}{self.edge.name}/"

    async def recover(self) -> None:
        """Take up what is recorded, and find what has no record."""
        unreadable = set()
        for ulid, entry in (await self.edge.store.checkpoints()).items():
            try:
                checkpoint = _decode(entry)
            except msgspec.MsgspecError as error:  # another version's; its layer stays, for that one may come back
                log.error("checkpoint.unreadable", checkpoint=ulid, error=str(error))
                unreadable.add(ulid)
                continue
            self.known[checkpoint.id] = checkpoint
            if checkpoint.until_ts:  # the machine's clock may have been set meanwhile: at most what it was given, again
                left = min(checkpoint.until_ts - time.time(), checkpoint.until_ts - checkpoint.created_ts)
                self._until[checkpoint.id] = time.monotonic() + left
        names = {self._prefix + ulid for ulid in unreadable.union(SandboxId.parse(each).ulid for each in self.known)}
        for planner in self.edge.host.planners.values():
            self._freeing |= {name: planner for name in await planner.named(self._prefix) if name not in names}

    # ------------------------------------------------------------------ making
    async def make(self, sandbox: Sandbox, request: CheckpointRequest, deadline: float | None) -> Checkpoint:
        """The same ``ulid`` again answers with what was made first. It goes on when the caller is cancelled.

        Raises `Unsupported`, `SandboxGone`, `Busy`, `InvalidRequest`, `NodeError` (the sandbox is as before, and nothing was made)."""
        sid = str(SandboxId.parse(f"{self.edge.name}-{request.ulid}"))
        able = sandbox.backend.capabilities
        worker = sandbox.record.spec.worker is not None
        if request.kind == "memory" and (worker or not able.snapshot):
            why = "those of a worker speak for its job" if worker else able.missing.get("snapshot", "this backend cannot")
            raise Unsupported(
                f"its node cannot keep processes: {why}",
                field="kind",
                value="memory",
                sandbox=sandbox.id,
                reason="snapshot",
                fix='use "disk"',
            )
        if request.kind not in ("disk", "memory"):
            raise InvalidRequest("not a kind of checkpoint", field="kind", value=request.kind, fix='use "disk" or "memory"')
        if not able.fork:
            why = able.missing.get("fork", "this backend cannot")
            raise Unsupported(f"cannot keep its state: {why}", field="backend", value=able.name, sandbox=sandbox.id, reason="fork")
        of = sandbox.id
        if (known := self.known.get(sid)) is not None:
            of = known.sandbox
        elif (making := self._making.get(sid)) is not None:
            of = making[0]
        if of != sandbox.id:
            raise Conflict("this id is another sandbox's checkpoint", field="ulid", value=request.ulid, reason="request_id_conflict")
        if known is not None:
            return known
        if sid not in self._making:
            if len(self.known) + len(self._making) >= MOST:
                raise Busy(f"{self.edge.name} keeps {MOST} checkpoints", reason="checkpoints", fix="drop some: `dsec tree --drop`")
            task = asyncio.ensure_future(self._make(sandbox, sid, request, deadline))
            self._making[sid] = (sandbox.id, task)
            task.add_done_callback(functools.partial(self._made, sid))
        return await asyncio.shield(self._making[sid][1])

    def _made(self, sid: str, task: asyncio.Task[Checkpoint]) -> None:
        self._making.pop(sid, None)
        if not task.cancelled():
            task.exception()  # the caller may have left

    async def _make(self, sandbox: Sandbox, sid: str, request: CheckpointRequest, deadline: float | None) -> Checkpoint:
        record = sandbox.record
        name = self._prefix + request.ulid
        spec = record.spec
        await self._free(name)
        processes = self.edge.host.planner(spec).processes(name) if request.kind == "memory" else ""
        order = PackOrder(name=name, whole=True, max_entries=request.max_entries, max_bytes=request.max_bytes, processes=processes)
        try:
            layer = await sandbox.pack_diff(request.ulid, order, deadline)
        except BaseException:
            self._freeing[name] = self.edge.host.planner(spec)  # its layer may have its name already
            raise
        checkpoint = Checkpoint(
            id=sid,
            kind=request.kind,
            name=request.name,
            sandbox=sandbox.id,
            parent=spec.checkpoint,
            project=record.project,
            principal=record.principal,
            spec=spec,
            layers=(LayerRef(name=name, digest=layer.digest), *record.layers),
            size=layer.size,
            processes=layer.processes,
            entries=layer.entries,
            frozen_ms=layer.frozen_ms,
            created_ts=time.time(),
            kept=not request.keep_ms,
            until_ts=time.time() + request.keep_ms / 1000 if request.keep_ms else 0.0,
        )
        detail: dict[str, object] = {"checkpoint": sid, "name": request.name, "digest": layer.digest, "size": layer.size}
        told = self.edge.outbox.make("checkpointed", record, detail)
        try:
            await self.edge.store.put_checkpoint(request.ulid, msgspec.msgpack.encode(checkpoint), [self.edge.outbox.row(told)])
        except BaseException:
            self.edge.outbox.drop(told)
            self._freeing[name] = self.edge.host.planner(spec)
            raise
        faults.reached("capture.kept")
        self.known[sid] = checkpoint
        if request.keep_ms:
            self._until[sid] = time.monotonic() + request.keep_ms / 1000
        self.edge.outbox.send(told)
        return checkpoint

    async def _free(self, name: str) -> None:
        """What an earlier try left that a crash ended: no sweep may take the next one for it. Raises `Busy` where that cannot be yet."""
        if name in self._freeing:
            async with self._sweeping:
                if (planner := self._freeing.get(name)) is None:
                    return
                if not await planner.forget(name, self._prefix):  # and stays known, for the sweeps to free
                    raise Busy("what an earlier try left is still in use", field="name", value=name, reason="checkpoints")
                self._freeing.pop(name, None)

    # ------------------------------------------------------------------ standing on one
    async def resolve(self, spec: SandboxSpec, principal: str, project: str) -> Resolved:
        """The layers of a sandbox that begins from one. Raises `NotFound`."""
        checkpoint = self.known.get(spec.checkpoint)
        if checkpoint is None or checkpoint.project != project or not owns(principal, checkpoint.principal):
            raise NotFound("no such checkpoint", field="checkpoint", value=spec.checkpoint, fix="see `dsec tree`")
        if spec.backend != checkpoint.spec.backend:
            raise InvalidRequest("the checkpoint is another backend's", field="backend", value=spec.backend, fix=checkpoint.spec.backend)
        planner = self.edge.host.planner(spec)
        resolved = await planner.stand(spec, checkpoint.layers)
        if checkpoint.kind == "memory":
            name = self._prefix + SandboxId.parse(checkpoint.id).ulid
            return msgspec.structs.replace(resolved, processes=planner.processes(name))
        return resolved

    # ------------------------------------------------------------------ going
    async def drop(self, checkpoint: Checkpoint) -> None:
        """Let go: it stays while a sandbox or a kept checkpoint stands on it."""
        loose = msgspec.structs.replace(checkpoint, kept=False, until_ts=0.0)
        await self.edge.store.put_checkpoint(SandboxId.parse(loose.id).ulid, msgspec.msgpack.encode(loose))
        if loose.id in self.known:
            self.known[loose.id] = loose
            self._until.pop(loose.id, None)

    def _unreachable(self) -> list[Checkpoint]:
        now = time.monotonic()
        roots = {sandbox.record.spec.checkpoint for sandbox in self.edge.sandboxes.values()}
        roots |= {each.id for each in self.known.values() if each.kept or self._until.get(each.id, 0.0) > now}
        reached: set[str] = set()
        while roots:
            sid = roots.pop()
            checkpoint = self.known.get(sid)
            if checkpoint is not None and sid not in reached:
                reached.add(sid)
                roots.add(checkpoint.parent)
        return [each for sid, each in self.known.items() if sid not in reached]

    def sweep_soon(self) -> None:
        """`sweep` in a task of its own, unless one is at it."""
        if (self.known or self._freeing) and not self._sweeping.locked():
            self.edge.spawn(self.sweep())

    async def sweep(self, *, last: bool = False) -> None:
        """Forget what nothing reaches and free its layers; what is still mounted is tried again in a later sweep. ``last``: this Edge ends,
        and may never start again."""
        async with self._sweeping:
            gone = self._unreachable() if self.known else []
            if gone:
                for each in gone:  # at once: nobody may begin from them any more
                    del self.known[each.id]
                    self._until.pop(each.id, None)
                try:
                    await self.edge.store.drop_checkpoints([SandboxId.parse(each.id).ulid for each in gone])
                except NodeError as error:
                    log.error("checkpoint.not_dropped", error=str(error))
                    self.known |= {each.id: each for each in gone}
                    return
                faults.reached("capture.dropped")
                for each in gone:
                    if (planner := self.edge.host.planners.get(each.spec.backend)) is not None:
                        self._freeing[self._prefix + SandboxId.parse(each.id).ulid] = planner
            if time.monotonic() < self._free_at and not last:
                return
            for name, planner in sorted(self._freeing.items(), reverse=True):  # the newest first: those below it wait for it
                try:
                    if await planner.forget(name, self._prefix):
                        del self._freeing[name]
                except (DsecError, OSError) as error:
                    log.warning("checkpoint.not_freed", layer=name, error=str(error))
            self._free_at = time.monotonic() + FREE_PAUSE if self._freeing and not gone else 0.0
