"""A node is emptied before it is taken away: the order is given to its Edge, which works on it, and is looked at until it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal, get_args

import msgspec

from dsec.bus import subjects
from dsec.bus.messages import DrainRequest, EdgeInfo
from dsec.errors import Busy, DeadlineExceeded, DsecError, NotFound
from dsec.model import check_edge_name
from libdsec.spec import milliseconds, wrong
from libdsec.wire import Wire, is_silence

DrainMode = Literal["mark", "wait", "stop", "pause", "undo"]
LOOK = 0.5  # seconds between two looks
FIRST = 5.0  # seconds for which a node may be silent when it is first asked
SILENCE = 30.0  # … and later: its Edge may be started anew


async def drain(wire: Wire, node: str, mode: str, timeout: float | None, progress: Callable[[EdgeInfo], object] | None) -> EdgeInfo:
    """See `Client.drain`."""
    if mode not in get_args(DrainMode):
        raise wrong("is not a choice", "mode", mode, f"use {', '.join(get_args(DrainMode))}")
    subject = subjects.edge(wire.unit, check_edge_name(node), "drain")
    order = DrainRequest(mode=mode if mode in ("stop", "pause") else "wait", undo=mode == "undo")
    seconds = 0.0 if timeout is None else milliseconds(timeout, "timeout") / 1000
    loop, what = asyncio.get_running_loop(), f"the node {node}"
    began = loop.time()
    info = await _first(wire, node, subject, order)
    while True:
        if progress is not None:
            progress(info)
        if mode in ("mark", "undo") or info.drained:
            return info
        if seconds and loop.time() - began >= seconds:
            left = sum(info.heartbeat.states.values())
            fix = "wait longer, or take the order back with `dsec node drain --undo`"
            raise DeadlineExceeded(f"{node} still has {left} sandboxes; it goes on draining", reason="drain", fix=fix)
        await asyncio.sleep(LOOK)
        again = msgspec.structs.replace(order, again=True)
        info = await wire.ask_again(subject, again, EdgeInfo, timeout=SILENCE, what=what)


async def _first(wire: Wire, node: str, subject: str, order: DrainRequest) -> EdgeInfo:
    """Give the order. Raises `NotFound` where the Watcher knows no such node."""
    try:
        return await wire.ask(subject, order, EdgeInfo, timeout=FIRST)
    except Busy:
        pass  # its Edge is being started anew
    except DsecError as error:
        if not is_silence(error):
            raise
    view = await wire.view()
    if view is not None and node not in {each.edge for each in view.nodes}.union(view.expected, view.lost):
        raise NotFound("no such node", field="node", value=node, fix="see `dsec node ls`")
    return await wire.ask_again(subject, order, EdgeInfo, timeout=FIRST, what=f"the node {node}")
