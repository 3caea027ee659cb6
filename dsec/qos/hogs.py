"""Best-effort sandboxes that compute of their own accord give way to those that do what they are asked for.

A group that was asleep wakes behind every group of its weight that has had less than its share or whose slice ends sooner: with ten
fork bombs on two cores each wake-up waited for five slices of 4 ms (tick of 250 Hz), and a command has several. The kernel lets a group
in at once when what runs is ``cpu.idle``; so whoever takes the most gets that, and has its weight again when it has calmed down. It costs
a hog nothing while nobody else wants the core: its limit is its limit, and hogs share evenly what is left to them. (The idea is the
multilevel feedback queue: Corbató et al., An Experimental Time-Sharing System, 1962.) A client that sends one short command after the
other uses more than ten bombs have each, and would be one of them; so each request from outside pays for `ALLOWANCE` of its sandbox's
CPU time. What runs inside cannot make any.

What it costs: one read of the node's group a look, every `PERIOD`. Sandboxes are looked at one by one only while all together use
`WORTH` cores and the known hogs do not explain it, a `PART` of them a look: those that are in touch first, then all in turn. `Hogs.look`
touches the kernel's files: call it in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import structlog

log = structlog.get_logger("dsec.qos")

PERIOD = 0.5  # seconds between two looks
SOON = 0.2  # and while somebody is suspected
WORTH = 0.25  # cores: less than this, of all sandboxes together, is in nobody's way
PART = 100  # groups read or written in one look, of each kind (suspects, likely ones, all): 10,000 take 20 to 50 s
NOTABLE = 1_000_000  # nanoseconds of CPU since a group was last read that make it a suspect
UNREAD = 250_000_000  # and since it began, for one that was not read before
ALLOWANCE = 0.005  # seconds of CPU that a request may take before it counts: a short command takes 1 ms
LOOKS = 2  # how many looks in a row must find a hog: a start or a short command is none
CALM = 5.0  # seconds of using little after which a hog has its weight again


class Groups(Protocol):
    """What `dsec.qos.cgroup.Cgroups` does for this. "" is the group of all sandboxes. All raise OSError when the group is gone."""

    def cpu_ns(self, name: str) -> int:
        """CPU time used so far, in nanoseconds."""
        ...

    def yields(self, name: str) -> bool:
        """Whether the group gives way, as `give_way` sets it."""
        ...

    def give_way(self, name: str, on: bool) -> None:
        """On: only CPU time that no other group wants. Off: the weight of its class."""
        ...


class _Watched:
    """One suspect or hog: what its last reading said, and how it has fared since."""

    __slots__ = ("asked", "at", "calm_since", "fresh", "hog", "own", "rate", "seen", "used")

    def __init__(self, at: float, used: int, asked: int, *, hog: bool = False) -> None:
        self.at, self.used, self.asked, self.hog = at, used, asked, hog
        self.rate = self.own = 0.0  # cores: all, and beyond what requests pay for
        self.fresh = True  # not read a second time
        self.seen = 0  # looks in a row that found it above the level
        self.calm_since: float | None = at if hog else None


class Hogs:
    """The best-effort hogs among a node's sandboxes. All functions are called in the thread of `look`.

    Args:
        groups: where CPU time is read and who gives way is written.
        names: every sandbox.
        likely: those in which something runs that was asked for, and what others were told to do something of late; few of them.
        asked: how many requests came to a sandbox so far; None: it keeps its weight whatever it uses (it is latency-sensitive, or gone).
    """

    def __init__(
        self, groups: Groups, names: Callable[[], Iterable[str]], likely: Callable[[], Iterable[str]], asked: Callable[[str], int | None]
    ) -> None:
        self._groups, self._asked = groups, asked
        self._names, self._likely = names, likely
        self._turns: tuple[deque[str], deque[str]] = deque(), deque()  # who of the likely ones and of all is read next
        self._last: tuple[float, int] | None = None  # when, and what all had used
        self._watched: dict[str, _Watched] = {}  # least recently read first
        self._used: dict[str, int] = {}  # what the others had used when they were read; empty in quiet times
        self._adopted: deque[str] = deque()
        self._suspects = False

    def demoted(self) -> frozenset[str]:
        """Who gives way now."""
        return frozenset(name for name, each in list(self._watched.items()) if each.hog)

    def adopted(self, name: str) -> None:
        """A sandbox of an earlier Edge, which may have left it giving way."""
        self._adopted.append(name)

    async def watch(self) -> None:
        """Look for ever."""
        loop, told = asyncio.get_running_loop(), ""
        while True:
            await asyncio.sleep(SOON if self._suspects else PERIOD)
            try:
                await asyncio.to_thread(self.look, loop.time())
            except OSError as error:  # of the group of all: one sandbox's that is gone is no error
                if str(error) != told:
                    told = str(error)
                    log.warning("qos.not_looked", error=told)

    def look(self, now: float) -> None:
        """One look, ``now`` in seconds of any steady clock."""
        self._take_up(now)
        total, last = self._groups.cpu_ns(""), self._last
        self._last = now, total
        if last is None or now <= last[0]:
            return
        cores = (total - last[1]) / 1e9 / (now - last[0])
        if cores < WORTH:
            self._quiet(now)
            return
        for name in list(self._watched)[:PART]:
            self._read(name, now)
        explained = sum(each.rate for each in self._watched.values())
        self._judge(now)
        if cores - explained >= WORTH / 2:
            self._search(now)
        self._suspects = any(each.fresh or each.seen for each in self._watched.values() if not each.hog)

    def _take_up(self, now: float) -> None:
        for _ in range(min(PART, len(self._adopted))):
            name = self._adopted.popleft()
            with contextlib.suppress(OSError):  # it was stopped
                if (asked := self._asked(name)) is not None and self._groups.yields(name):
                    self._watched[name] = _Watched(now, self._groups.cpu_ns(name), asked, hog=True)

    def _quiet(self, now: float) -> None:
        """All together use little, so nobody needs to be read to be known for calm."""
        self._used.clear()
        self._suspects = False
        for turn in self._turns:
            turn.clear()
        for name, each in list(self._watched.items()):
            each.rate = each.own = 0.0
            if not each.hog:
                del self._watched[name]
        for name, each in list(self._watched.items())[:PART]:
            self._watched[name] = self._watched.pop(name)
            self._calm(name, each, now)

    def _read(self, name: str, now: float) -> None:
        """What a watched one has used since it was last read; it goes to the end of the line."""
        each = self._watched.pop(name)
        try:
            used = self._groups.cpu_ns(name)
        except OSError:  # it was stopped
            return
        asked = self._asked(name) or 0
        each.rate = (used - each.used) / 1e9 / (now - each.at)
        each.own = max(0.0, each.rate - ALLOWANCE * (asked - each.asked) / (now - each.at))
        each.at, each.used, each.asked, each.fresh = now, used, asked, False
        self._watched[name] = each

    def _search(self, now: float) -> None:
        """Read the next ones of each turn; who has used something is watched from now on."""
        likely, others = self._turns
        if not likely:
            likely.extend(self._likely())
        if not others:
            others.extend(self._names())
            self._used = {name: self._used[name] for name in others if name in self._used}
        for turn in self._turns:
            for _ in range(min(PART, len(turn))):
                name = turn.popleft()
                if name in self._watched:
                    continue
                try:
                    used = self._groups.cpu_ns(name)
                except OSError:  # it was stopped
                    continue
                before, most = (self._used[name], NOTABLE) if name in self._used else (0, NOTABLE if turn is likely else UNREAD)
                if used - before >= most:
                    self._watched[name] = _Watched(now, used, self._asked(name) or 0)
                self._used[name] = used

    def _judge(self, now: float) -> None:
        spared = {name for name in self._watched if self._asked(name) is None}
        level = hog_level(each.own for name, each in self._watched.items() if name not in spared)
        for name, each in list(self._watched.items()):
            if each.at != now:  # not read this time
                continue
            if each.hog:
                if each.own >= level / 2:
                    each.calm_since = None
                else:
                    self._calm(name, each, now)
            elif each.own < level or not level or name in spared:
                each.seen = 0
                if each.rate * 1e9 * PERIOD < NOTABLE:
                    self._let_go(name, each)
            else:
                each.seen += 1
                if each.seen >= LOOKS:
                    each.seen = 0
                    self._set(name, each, True)

    def _calm(self, name: str, each: _Watched, now: float) -> None:
        if each.calm_since is None:
            each.calm_since = now
        elif now - each.calm_since >= CALM:
            self._set(name, each, False)
            self._let_go(name, each)

    def _let_go(self, name: str, each: _Watched) -> None:
        self._watched.pop(name, None)
        self._used[name] = each.used

    def _set(self, name: str, each: _Watched, hog: bool) -> None:
        try:
            self._groups.give_way(name, hog)
        except OSError as error:
            self._watched.pop(name, None)
            if not isinstance(error, FileNotFoundError):
                log.warning("qos.not_set", sandbox=name, error=str(error))
            return
        each.hog, each.calm_since = hog, None
        log.debug("qos.gives_way" if hog else "qos.has_its_weight", sandbox=name, cores=round(each.rate, 3))


def hog_level(rates: Iterable[float]) -> float:
    """From how many cores on a sandbox is a hog beside the others (pure): half of what the user of an average millisecond of CPU takes.

    However many sleep or do a little, it stays the hogs' level: ten that take 0.2 cores each make it 0.1, with or without a thousand
    that take 0.001. A thousand that compute alike are hogs all.
    """
    found = [rate for rate in rates if rate > 0]
    return sum(rate * rate for rate in found) / sum(found) / 2 if found else 0.0
