"""Clients of the cluster with the fake backend."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from libdsec import Client

FAKE: Any = {"backend": "fake", "memory": "32MiB", "cpus": 0.01, "disk": "1MiB", "pids": 16}


async def eventually(what: Callable[[], Awaitable[Any]], timeout: float = 8.0) -> None:
    """Until it is true (or raises nothing)."""
    until = time.monotonic() + timeout
    while not await what():
        assert time.monotonic() < until, what
        await asyncio.sleep(0.05)


async def none_left(client: Client) -> bool:
    return not await client.list()
