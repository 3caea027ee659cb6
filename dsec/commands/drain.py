"""Empty a node: it takes no new sandboxes, and those that it has end by themselves, are stopped, or are paused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dsec.errors import DeadlineExceeded
from dsec.model import State

if TYPE_CHECKING:
    from dsec.bus.messages import EdgeInfo
    from libdsec import Client

LOOK = 0.5  # seconds between two looks at a node that is being drained
SILENCE = 30.0  # seconds for which it may be away meanwhile: its Edge may be started anew


def left(mode: str, states: Mapping[str, int]) -> int:
    """How many sandboxes the node still has to see to."""
    return sum(count for state, count in states.items() if mode != "pause" or state != State.PAUSED)


def words(states: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(states.items()) if count) or "no sandboxes"


async def drain(
    client: Client, node: str, mode: str, *, timeout: float = 0.0, told: Callable[[EdgeInfo], object] = lambda _: None
) -> EdgeInfo:
    """Returns when it is done.

    Args:
        mode: "mark" (takes no more, returns at once), "wait" (until the last sandbox has ended), "stop", "pause", "undo".
        timeout: seconds, after which `DeadlineExceeded` is raised and the node goes on draining; 0 = no limit.
        told: called with how the node stands whenever it was asked. ``trouble`` names what could not be paused.

    The order is repeated with each look, so an Edge that is started anew meanwhile goes on draining.
    """
    from dsec.bus import subjects
    from dsec.bus.messages import DrainRequest, EdgeInfo
    from dsec.model import check_edge_name

    wire, loop = client._wire, asyncio.get_running_loop()
    subject = subjects.edge(wire.unit, check_edge_name(node), "drain")
    order = DrainRequest(mode=mode if mode in ("stop", "pause") else "wait", undo=mode == "undo")
    began = loop.time()
    silence = 5.0
    while True:
        info = await wire.ask_again(subject, order, EdgeInfo, timeout=silence, what=f"the node {node}")
        told(info)
        count = left(mode, info.heartbeat.states)
        if mode in ("mark", "undo") or not count or (mode == "pause" and info.trouble):
            return info
        if timeout and loop.time() - began >= timeout:
            raise DeadlineExceeded(f"{node} still has {words(info.heartbeat.states)}; it goes on draining", reason="drain")
        silence = SILENCE
        await asyncio.sleep(LOOK)
