"""Creates that their caller has given up: what is still on its way is refused when it arrives. Pure; times are monotonic seconds."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable

Range = tuple[int, int]  # first index, count


class Cancelled:
    """Remembers ``limit`` bursts for ``keep`` seconds, longer than any Scheduler goes on placing; an Edge that restarts forgets them, and
    then the lease ends what nobody claims."""

    def __init__(self, keep: float = 600.0, limit: int = 4096) -> None:
        self._keep = keep
        self._limit = limit
        self._bursts: OrderedDict[tuple[str, str, str], tuple[float, list[list[Range]]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._bursts)

    def add(self, owner: tuple[str, str], burst: str, ranges: Iterable[Range], now: float) -> None:
        """These indices of ``owner``'s (principal, project) burst are not wanted any more."""
        key = (*owner, burst)
        _, known = self._bursts.pop(key, (0.0, []))
        group = sorted(ranges)
        self._bursts[key] = (now + self._keep, known if group in known else [*known, group])
        while self._bursts and (len(self._bursts) > self._limit or next(iter(self._bursts.values()))[0] <= now):
            self._bursts.popitem(last=False)

    def has(self, owner: tuple[str, str], burst: str, index: int) -> bool:
        _, groups = self._bursts.get((*owner, burst), (0.0, []))
        return any(_within(group, index) for group in groups)


def _within(group: list[Range], index: int) -> bool:
    at = bisect_right(group, index, key=lambda each: each[0]) - 1
    return at >= 0 and index < group[at][0] + group[at][1]
