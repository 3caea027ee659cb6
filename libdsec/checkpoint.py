"""Checkpoints as their user sees them: states of sandboxes from which others begin, and what became of each that was asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec

from dsec.bus.grants import LABEL
from dsec.bus.messages import CheckpointReply, CheckpointRequest, CheckpointSelector, CheckpointsReply, ManyReply
from dsec.errors import BurstError, DsecError, InvalidRequest, NotFound, Unavailable, from_body
from dsec.model import Checkpoint, SandboxId, new_ulid
from libdsec.burst import summary
from libdsec.results import ItemOutcome
from libdsec.spec import labels_map, milliseconds, size, text, whole, wrong

if TYPE_CHECKING:
    from libdsec.client import Client
    from libdsec.sandbox import Sandbox

ASK = 10.0  # seconds for a question to every Edge
AWAY = 30.0  # seconds for which the node that keeps a checkpoint may be away
MOST = 10_000  # sandboxes of one restore
SPARE = 60.0  # seconds beyond its time-out that a fork's capture is kept for those that still begin


class Restored:
    """What became of a restore or a fork: ``sandboxes`` that are ready, ``failed`` as (index, error). As a context manager (``async with
    await sandbox.fork(4) as children``) it stops the sandboxes when the block ends."""

    def __init__(self, client: Client, checkpoint: Checkpoint, results: list[Sandbox | DsecError]) -> None:
        self._client = client
        self.checkpoint = checkpoint
        self.results = results  # by index: a sandbox, or the error of the one that was not made

    @property
    def sandboxes(self) -> list[Sandbox]:
        return [each for each in self.results if not isinstance(each, DsecError)]

    @property
    def failed(self) -> list[tuple[int, DsecError]]:
        return [(index, each) for index, each in enumerate(self.results) if isinstance(each, DsecError)]

    def __iter__(self) -> Iterator[Sandbox]:
        return iter(self.sandboxes)

    def __len__(self) -> int:
        return len(self.sandboxes)

    def __repr__(self) -> str:
        return f"<{len(self)} sandboxes from {self.checkpoint.id}, {len(self.failed)} failed>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._client._stop_all(self.sandboxes)


async def capture(sandbox: Sandbox, name: str, kind: str, max_bytes: int | str, timeout: float, keep: float = 0.0) -> Checkpoint:
    """See `Sandbox.checkpoint`. ``keep``: seconds for which it stays in any case, and then only while something stands on it; 0 = kept."""
    request = CheckpointRequest(
        ulid=new_ulid(),
        name=text(name, "name", limit=128) if name else "",
        kind=text(kind, "kind", limit=16),
        keep_ms=round(keep * 1000),
        max_bytes=size(max_bytes, "max_bytes"),
    )
    limit = milliseconds(timeout, "timeout") / 1000
    # Repeated under the same id: an Edge that died took the first request along.
    return (await sandbox._request("checkpoint", request, CheckpointReply, timeout=limit, each=5.0)).checkpoint


async def find(client: Client, ids: Iterable[str] = ()) -> list[Checkpoint]:
    """See `Client.checkpoints`."""
    chosen = CheckpointSelector(ids=tuple(checked(each) for each in ids))
    replies, silent = await client._wire.everyone("checkpoints", chosen, CheckpointsReply, timeout=ASK)
    if silent:
        client._wire.log.warning("client.nodes_silent", nodes=silent, verb="checkpoints")
    found = [row for reply in replies for row in reply.checkpoints]
    todo = [reply for reply in replies if reply.more and reply.checkpoints]
    while todo:
        page = todo.pop()
        rest = msgspec.structs.replace(chosen, edge=page.edge, after=page.checkpoints[-1].id)
        for reply in (await client._wire.everyone("checkpoints", rest, CheckpointsReply, timeout=ASK))[0]:
            if reply.edge == page.edge:
                found += reply.checkpoints
                todo += [reply] if reply.more and reply.checkpoints else []
    return sorted(found, key=lambda row: (row.created_ts, row.id))


async def _known(client: Client, checkpoint: str) -> Checkpoint:
    """One checkpoint. A node that does not answer is asked again for a while: it may be restarting."""
    request = CheckpointSelector(ids=(checked(checkpoint),))
    edge = SandboxId.parse(checkpoint).edge
    silent: list[str] = []
    async for replies, silent in client._wire.until_all("checkpoints", request, CheckpointsReply, timeout=ASK, patience=AWAY):
        for row in (row for reply in replies for row in reply.checkpoints):
            return row
        if edge not in silent:
            break
    if edge in silent:
        raise Unavailable(
            "the node that keeps it does not answer", field="checkpoint", value=checkpoint, reason="silent", fix="see `dsec node ls`"
        )
    raise NotFound("no such checkpoint, or its node is away", field="checkpoint", value=checkpoint, fix="see `dsec tree`")


async def drop(client: Client, ids: Iterable[str]) -> list[ItemOutcome]:
    """See `Client.drop_checkpoints`."""
    chosen = tuple(checked(each) for each in ids)
    if not chosen:
        return []
    replies, silent = await client._wire.everyone("uncheckpoint", CheckpointSelector(ids=chosen), ManyReply, timeout=ASK * 3)
    told = {row.id: row.error for reply in replies for row in reply.results}
    outcomes = []
    for each in chosen:
        error: DsecError | None = None
        if each in told:
            body = told[each]
            error = from_body(body) if body is not None else None
        elif SandboxId.parse(each).edge in silent:
            error = Unavailable("the node that keeps it does not answer", field="id", value=each, reason="silent")
        else:
            error = NotFound("no such checkpoint", field="id", value=each, fix="see `dsec tree`")
        outcomes.append(ItemOutcome(id=each, error=error))
    return outcomes


async def restore(
    client: Client, checkpoint: Checkpoint | str, n: int, labels: Mapping[str, str] | None, min_ready: int, loss: str, timeout: float
) -> Restored:
    """See `Client.restore`."""
    count = whole(n, "n", 1, MOST)
    least = whole(min_ready, "min_ready", 0, count)
    more = labels_map(labels)
    _check_loss(loss)
    if isinstance(checkpoint, str):
        checkpoint = await _known(client, checkpoint)
    loss = loss or checkpoint.spec.on_client_loss
    # A host name that was asked for is one sandbox's: each of these gets its own. So is the worker that it ended with.
    labels = {name: value for name, value in checkpoint.spec.labels.items() if name != LABEL} | more
    spec = msgspec.structs.replace(checkpoint.spec, checkpoint=checkpoint.id, hostname="", on_client_loss=loss, labels=labels, ends_with="")
    burst = client.burst(spec, count, 0, timeout)
    await burst.__aenter__()
    whole_ = False
    try:
        await burst.wait()
        results: list[Sandbox | DsecError] = [NotFound("was not made") for _ in range(count)]
        for index, error in burst.failed:
            results[index] = error
        for sandbox in burst.sandboxes:
            results[burst.index(sandbox)] = sandbox
        whole_ = len(burst.sandboxes) >= least
    finally:
        burst._close("the restore was left")
        if not whole_:
            await client._stop_all(burst.sandboxes)
    made = Restored(client, checkpoint, results)
    if whole_:
        return made
    errors = [error for _, error in made.failed]
    if count == 1:
        raise errors[0]
    fixes = {error.fix for error in errors}
    raise BurstError(
        f"{len(made)} of {count} sandboxes began from the checkpoint, {least} were wanted: {summary(errors)}",
        reason="min_ready",
        fix=fixes.pop() if len(fixes) == 1 else "",
    )


async def fork(
    sandbox: Sandbox, n: int, kind: str, labels: Mapping[str, str] | None, min_ready: int, loss: str, max_bytes: int | str, timeout: float
) -> Restored:
    """See `Sandbox.fork`."""
    client = sandbox._client
    count = whole(n, "n", 1, MOST)
    whole(min_ready, "min_ready", 0, count)
    labels_map(labels)
    _check_loss(loss)
    limit = milliseconds(timeout, "timeout") / 1000
    until = asyncio.get_running_loop().time() + limit
    checkpoint = await capture(sandbox, "", kind, max_bytes, limit, keep=limit + SPARE)
    try:
        left = max(0.001, until - asyncio.get_running_loop().time())
        return await restore(client, checkpoint, count, labels, min_ready, loss, left)
    finally:
        # From here on it stays for as long as somebody stands on it. Should this be lost, it expires.
        try:
            await drop(client, [checkpoint.id])
        except DsecError as error:
            client._wire.log.warning("client.fork_left_to_expire", checkpoint=checkpoint.id, error=str(error))


def checked(checkpoint: str) -> str:
    """An id of a checkpoint. Raises `InvalidRequest`."""
    try:
        return str(SandboxId.parse(text(checkpoint, "checkpoint", limit=128)))
    except InvalidRequest:
        raise wrong("is not a checkpoint's id", "checkpoint", checkpoint, "see `dsec tree`") from None


def _check_loss(loss: str) -> None:
    if loss not in ("", "stop", "pause", "keep"):
        raise wrong("is not a choice", "on_client_loss", loss, "use stop, pause or keep")
