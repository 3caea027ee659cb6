"""Pause and resume of containers: freeze, send memory to swap, count what that gave; then the agent's pages, thaw, and the rest behind.

Swap is set up by the configuration (dsec/qos/swap.py). Where there is none a pause only freezes, and says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import structlog

from dsec import faults
from dsec.backends.base import Undone
from dsec.config import PauseConfig
from dsec.errors import NodeError
from dsec.model import Paused
from dsec.qos import pages
from dsec.qos.cgroup import Cgroups
from dsec.qos.swap import Swap, zram_share

log = structlog.get_logger("dsec.pause")
T = TypeVar("T")


class Pauser:
    """Of one backend. ``missing`` says why paused sandboxes keep their memory; "" when they do not."""

    def __init__(self, groups: Cgroups, config: PauseConfig, state_dir: str) -> None:
        self._groups = groups
        self._config = config
        self.swap = Swap(config.swap, config.swap_bytes, state_dir, config.swap_file)
        workers = config.parallel or os.cpu_count() or 1
        self._freezers = ThreadPoolExecutor(4, "dsec-freeze")
        self._pausers = ThreadPoolExecutor(workers + 2, "dsec-pause")  # each waits for what the pagers do for it
        self._pagers = ThreadPoolExecutor(workers, "dsec-page-out")
        self._fetchers = ThreadPoolExecutor(1, "dsec-prefetch")
        self._awake: dict[str, object] = {}  # sandboxes whose memory is being read back
        self._closed = False

    @property
    def missing(self) -> str:
        return self.swap.missing

    async def open(self) -> None:
        """Raises `Unsupported` when the swap that is configured cannot be had."""
        await asyncio.to_thread(self.swap.open)

    async def close(self) -> None:
        """Let go; the swap stays for the sandboxes that live on."""
        self._closed = True
        self._awake.clear()
        for pool in (self._freezers, self._pausers, self._pagers, self._fetchers):
            pool.shutdown(wait=False, cancel_futures=True)

    async def undo(self) -> None:
        """The node does not start: let go, and remove the swap that this start made. What was taken up stays for those that live on."""
        await self.close()
        if self.swap.made:
            await self.give_back()

    async def give_back(self) -> None:
        """Remove the swap that was made here. Only when no sandbox lives."""
        try:
            await asyncio.shield(asyncio.to_thread(self.swap.close))
        except NodeError as error:
            log.error("pause.swap_stays", error=str(error))

    async def pause(self, ulid: str, init: int, reclaim: bool) -> Paused:
        """See `Instance.pause`."""
        self._awake.pop(ulid, None)
        began = time.perf_counter()
        await self.freeze(ulid, True)
        faults.reached("pause.still")
        frozen = time.perf_counter()
        freeze_ms = round((frozen - began) * 1e3, 2)
        if not self.swap.active or not reclaim:
            return Paused(freeze_ms=freeze_ms, note=self.swap.missing)
        work = asyncio.ensure_future(self._in(self._pausers, self._page_out, ulid, init))
        try:
            paused = await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])  # a thread is not interrupted: nobody may thaw it meanwhile
            raise
        except OSError as error:
            # It is frozen, and that is a pause; its memory stays where it is.
            log.warning("pause.not_reclaimed", sandbox=ulid, error=str(error))
            return Paused(freeze_ms=freeze_ms, note=f"its memory stays: {error}")
        return Paused(
            released=paused[0],
            swapped=paused[1],
            freeze_ms=freeze_ms,
            reclaim_ms=round((time.perf_counter() - frozen) * 1e3, 2),
            note=paused[2],
        )

    async def resume(self, ulid: str, init: int) -> None:
        """See `Instance.resume`."""
        with _undone(ulid):
            swapped = await self._in(self._freezers, self._thaw, ulid, init)
        if swapped and self._config.prefetch:
            token = self._awake[ulid] = object()
            self._fetchers.submit(self._fetch, ulid, token)

    async def stands_still(self, ulid: str) -> bool:
        """See `Instance.stands_still`."""
        return await self._in(self._freezers, self._groups.freezing, ulid)

    # ------------------------------------------------------------------ inside, in threads
    def _thaw(self, ulid: str, init: int) -> bool:
        """Its limit and the agent's pages, then all may run; whether some of it lies in swap. One piece of work: each change of threads
        takes time."""
        pages.unsqueeze(self._groups, ulid)
        swapped = self.swap.active and bool(pages.held(self._groups, ulid).swap)
        if swapped:
            pages.prefetch(self._groups, ulid, (init,), _always)
        self._groups.freeze(ulid, False)
        return swapped

    def _page_out(self, ulid: str, init: int) -> tuple[int, int, str]:
        before = pages.held(self._groups, ulid)
        pages.page_out(self._groups, ulid, init, self._together)
        after = pages.held(self._groups, ulid)
        gone = max(0, after.swap - before.swap)
        released = max(0, before.total - after.total - round(gone * zram_share()))
        left = after.anon + after.shmem
        note = f"{left >> 20} MiB stay: the swap is full or they are locked" if left > max(8 << 20, after.swap // 8) else ""
        return released, after.swap, note

    def _together(self, work: list[Callable[[], None]]) -> None:
        if len(work) == 1:
            work[0]()
            return
        done, _ = wait([self._pagers.submit(each) for each in work])
        for each in done:
            each.result()

    def _fetch(self, ulid: str, token: object) -> None:
        try:
            pages.prefetch(self._groups, ulid, (), lambda: self._awake.get(ulid) is token)
        except OSError as error:
            log.info("pause.not_prefetched", sandbox=ulid, error=str(error))
        finally:
            if self._awake.get(ulid) is token:
                del self._awake[ulid]

    async def freeze(self, ulid: str, on: bool) -> None:
        """Only that. Raises `Undone`: it is as before."""
        with _undone(ulid):
            await self._in(self._freezers, self._groups.freeze, ulid, on)

    def place(self, ulid: str) -> str:
        """The directory of the group by which it is made to stand still."""
        return self._groups.path("freezer", ulid)

    async def _in(self, pool: ThreadPoolExecutor, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, functools.partial(function, *args))


@contextlib.contextmanager
def _undone(ulid: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Undone(f"freezer: {error}", sandbox=ulid) from error
    except NodeError as error:
        raise Undone(error.message, sandbox=ulid) from error


def _always() -> bool:
    return True
