"""What is asked of many sandboxes at once: every Edge answers for its own, and one that stays silent is named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar, Unpack

import msgspec

from dsec.bus import subjects
from dsec.bus.grants import DEEPEST, LABEL
from dsec.bus.messages import Empty, InfoReply, ListReply, ManyReply, PauseReply, Selector
from dsec.bus.subjects import OF_JOB, Caller
from dsec.errors import DeadlineExceeded, DsecError, NotFound, SandboxGone, Unavailable, from_body
from dsec.model import ExitReason, SandboxId, SandboxInfo, State
from libdsec.results import ItemOutcome
from libdsec.spec import labels_map, whole, wrong
from libdsec.wire import Wire

T = TypeVar("T")
Progress = Callable[[int, int], object]  # how many are done, of how many
Outcomes = list[ItemOutcome]  # a method is called `list` below
Ids = list[str]
MANY_TIMEOUT = 30.0  # seconds for a request to every Edge


class EachOf(TypedDict, total=False):
    """The keywords of `Client.pause` and `Client.resume`."""

    ids: Iterable[str]  # beside, or instead of, labels
    everything: bool  # of the project, where neither is given
    below: bool  # also in the projects below
    progress: Progress | None  # called with (done, all) as they come
    parallel: int  # asked at one time, 64


class Many:
    """The part of a `Client` that speaks to many sandboxes, and to one by its id. ``below``: also in the projects below this client's."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    @property
    def project(self) -> str:
        return self._wire.caller.project

    async def list(
        self,
        labels: Mapping[str, str] | None = None,
        *,
        ids: Iterable[str] = (),
        states: Iterable[str] = (),
        stopped: bool = False,
        stuck: bool = False,
        below: bool = False,
    ) -> list[SandboxInfo]:
        """Sandboxes of this project on all nodes, oldest first; ``stopped``: also those that ended and are remembered; ``below``: also
        those of the projects below it (of ``acme/rl`` for ``acme``).

        Nodes that did not answer are named in a warning of the log; `nodes` shows them.
        """
        selector = _selector(labels, ids, states, stopped=stopped, stuck=stuck)
        replies, silent = await self._wire.everyone("list", selector, ListReply, timeout=MANY_TIMEOUT / 3, below=below)
        if silent:
            self._wire.log.warning("client.nodes_silent", nodes=silent, verb="list")
        found = [info for reply in replies for info in reply.sandboxes]
        todo = [reply for reply in replies if reply.more and reply.sandboxes]
        while todo:  # an answer is one message: the rest of a node's list is asked for page by page
            page = todo.pop()
            rest = msgspec.structs.replace(selector, edge=page.edge, after=page.sandboxes[-1].id)
            for reply in (await self._wire.everyone("list", rest, ListReply, timeout=MANY_TIMEOUT / 3, below=below))[0]:
                if reply.edge == page.edge:
                    found += reply.sandboxes
                    todo += [reply] if reply.more and reply.sandboxes else []
        return sorted(found, key=lambda info: (info.created_ts, info.id))

    async def stop(
        self, labels: Mapping[str, str] | None = None, *, ids: Iterable[str] = (), everything: bool = False, below: bool = False
    ) -> Outcomes:
        """End all that carry these labels (or have these ids, or all of the project); what became of each. ``below`` as for `list`."""
        return await self._many("stop", labels, ids, everything, below)

    async def pause(self, labels: Mapping[str, str] | None = None, **how: Unpack[EachOf]) -> Outcomes:
        """Freeze a job and give its memory back: what became of each sandbox, and what its pause gave (`ItemOutcome.paused`). Workers stand
        still before what they drive, and go on after it.

        Commands that run stand still, and their time-outs with them; who waits for one goes on waiting. Any other request resumes its
        sandbox. One that fails runs on.
        """
        return await self._one_by_one("pause", labels, **how)

    async def resume(self, labels: Mapping[str, str] | None = None, **how: Unpack[EachOf]) -> Outcomes:
        """Thaw a job; what became of each sandbox. On a full node they come before anybody's creates, and `Busy` is the outcome of those
        for which there was no room in time."""
        return await self._one_by_one("resume", labels, **how)

    async def prune(self, labels: Mapping[str, str] | None = None, *, ids: Iterable[str] = (), below: bool = False) -> Outcomes:
        """Forget sandboxes that have ended; those that it named. How they ended is then no longer known. ``below`` as for `list`."""
        return await self._many("prune", labels, ids, everything=True, below=below)

    async def _many(self, verb: str, labels: Mapping[str, str] | None, ids: Iterable[str], everything: bool, below: bool) -> Outcomes:
        chosen = _selector(labels, ids, ())
        if not chosen.labels and not chosen.ids and not everything:
            raise wrong(f"would {verb} every sandbox of the project", "labels", "", "give labels or ids, or everything=True")
        replies, silent = await self._wire.everyone(verb, chosen, ManyReply, timeout=MANY_TIMEOUT, below=below)
        if silent and not replies:
            raise Unavailable(f"no node answers: {', '.join(silent[:5])}", reason="silent", fix="see `dsec node ls`")
        results = [
            ItemOutcome(id=item.id, error=None if item.error is None else from_body(item.error))
            for reply in replies
            for item in reply.results
        ]
        seen = {result.id for result in results}
        missing = [sandbox_id for sandbox_id in chosen.ids if sandbox_id not in seen]
        results += await asyncio.gather(*(self._absent(verb, sandbox_id, silent) for sandbox_id in missing))
        return results

    async def _named(self, selector: Selector, below: bool) -> dict[str, tuple[str, int]]:
        """All that are chosen, with their projects and turns. A node that does not answer is asked again for a while: it may be restarting.

        Raises `Unavailable` when one stays silent and nothing was found elsewhere."""
        found: dict[str, tuple[str, int]] = {}
        silent: Ids = []
        asking = self._wire.until_all("list", selector, ListReply, timeout=MANY_TIMEOUT / 6, patience=MANY_TIMEOUT * 2, below=below)
        async for replies, silent in asking:
            found |= {info.id: (info.project, _turn(info)) for reply in replies for info in reply.sandboxes}
            if any(reply.more for reply in replies):
                found |= {info.id: (info.project, _turn(info)) for info in await self.list(selector.labels, ids=selector.ids, below=below)}
            if not silent:
                return found
        if not found:
            raise Unavailable(f"nodes do not answer: {', '.join(silent[:5])}", reason="silent", fix="see `dsec node ls`")
        self._wire.log.warning("client.nodes_silent", nodes=silent, verb="list")
        return found

    async def _one_by_one(
        self,
        verb: Literal["pause", "resume"],
        labels: Mapping[str, str] | None,
        *,
        ids: Iterable[str] = (),
        everything: bool = False,
        below: bool = False,
        progress: Progress | None = None,
        parallel: int = 64,
    ) -> Outcomes:
        """A request for each, which is repeated while its node is away: an Edge that restarts in between is asked again."""
        chosen = _selector(labels, ids, ())
        if not chosen.labels and not chosen.ids and not everything:
            raise wrong(f"would {verb} every sandbox of the project", "labels", "", "give labels or ids, or everything=True")
        whole(parallel, "parallel", 1, 10_000)
        known = bool(chosen.ids) and not chosen.labels and not below
        todo = dict.fromkeys(chosen.ids, (self.project, 0)) if known else await self._named(chosen, below)
        view = await self._wire.view(timeout=2.0)
        nodes = {node.edge for node in view.nodes}.union(view.expected) if view is not None else set()
        gate = asyncio.Semaphore(parallel)
        done = 0

        async def one(sandbox_id: str) -> ItemOutcome:
            nonlocal done
            sid = SandboxId.parse(sandbox_id)
            patience = MANY_TIMEOUT * 2 if sid.edge in nodes else MANY_TIMEOUT / 6  # a node that nobody knows need not be waited for
            async with gate:
                try:
                    reply: PauseReply | Empty = await self._request(
                        sid,
                        verb,
                        Empty(),
                        PauseReply if verb == "pause" else Empty,
                        timeout=patience,
                        each=45.0,
                        project=todo[sandbox_id][0],
                    )
                    result = ItemOutcome(id=sandbox_id, paused=reply.paused if isinstance(reply, PauseReply) else None)
                except DsecError as error:
                    result = ItemOutcome(id=sandbox_id, error=error)
            done += 1
            if progress is not None:
                progress(done, len(todo))
            return result

        results: list[ItemOutcome] = []
        turns = sorted({turn for _, turn in todo.values()}, reverse=verb == "resume")
        for now in turns:
            results += await asyncio.gather(*(one(sandbox_id) for sandbox_id, (_, turn) in todo.items() if turn == now))
        return results

    async def _absent(self, verb: str, sandbox_id: str, silent: Sequence[str]) -> ItemOutcome:
        """What to say of an id that no Edge has among the living. Stopping what has ended is fine."""
        error: DsecError
        if SandboxId.parse(sandbox_id).edge in silent:
            error = Unavailable("its node does not answer", sandbox=sandbox_id, reason="silent")
            return ItemOutcome(id=sandbox_id, error=error)
        try:
            info = (await self._request(SandboxId.parse(sandbox_id), "info", Empty(), InfoReply, timeout=5.0, repeat=False)).info
        except (Unavailable, DeadlineExceeded):
            error = NotFound("no such sandbox, or its node is away", sandbox=sandbox_id, fix="see `dsec ls --all` and `dsec node ls`")
        except DsecError as problem:
            error = problem
        else:
            if verb == "stop":
                return ItemOutcome(id=sandbox_id)
            error = gone(sandbox_id, info)
        return ItemOutcome(id=sandbox_id, error=error)

    # ------------------------------------------------------------------ inside
    async def _request(
        self,
        sandbox: SandboxId,
        verb: str,
        message: Any,
        type_: type[T],
        *,
        timeout: float = 30.0,
        each: float = 10.0,
        repeat: bool = True,
        bulk: bool = False,
        project: str = "",
    ) -> T:
        """A request to a sandbox's Edge; with ``repeat``, again while nobody answers. ``project``: where it is, "" = this client's."""
        caller = self._wire.caller
        if project and project != caller.project:
            caller = Caller(caller.principal, project)
        subject = subjects.sandbox(self._wire.unit, verb, caller, sandbox)
        transport = await self._wire.bulk() if bulk else None
        if not repeat:
            return await self._wire.ask_edge(sandbox.edge, subject, message, type_, timeout=timeout, transport=transport)
        what = f"the node of sandbox {sandbox}"
        try:
            return await self._wire.ask_again(
                subject, message, type_, timeout=timeout, each=each, transport=transport, what=what, edge=sandbox.edge
            )
        except Unavailable:
            await self._raise_if_lost(sandbox)
            raise

    async def _raise_if_lost(self, sandbox: SandboxId) -> None:
        """A node that the Watcher has declared lost does not come back with its sandboxes: they are gone."""
        view = await self._wire.view(timeout=0.5)
        if view is not None and sandbox.edge in view.lost:
            raise SandboxGone(f"has ended: its node {sandbox.edge} is lost", sandbox=str(sandbox), reason=ExitReason.NODE_LOST.value)


def gone(sandbox_id: str, info: SandboxInfo) -> SandboxGone:
    """The error for a handle to one that has ended: when and why is in ``info.exit``."""
    if info.exit is None:
        return SandboxGone("has ended", sandbox=sandbox_id)
    return SandboxGone(f"has ended ({info.exit.reason}): {info.exit.detail}".rstrip(": "), sandbox=sandbox_id, reason=str(info.exit.reason))


def _turn(info: SandboxInfo) -> int:
    """Whose pause comes first: that of workers, which would wake what they drive, and of a worker's workers after it."""
    return info.principal.count(OF_JOB) if info.labels.get(LABEL) == info.id else DEEPEST + 1


def _selector(
    labels: Mapping[str, str] | None, ids: Iterable[str], states: Iterable[str], *, stopped: bool = False, stuck: bool = False
) -> Selector:
    chosen = tuple(str(SandboxId.parse(item)) for item in ids)
    try:
        wanted = tuple(State(state) for state in states)
    except ValueError as error:
        raise wrong(str(error), "states", "", f"use {', '.join(State)}") from error
    return Selector(labels=labels_map(labels), ids=chosen, states=wanted, stopped=stopped or State.STOPPED in wanted, stuck=stuck)
