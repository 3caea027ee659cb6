"""Which process dies when: decided from the seed alone, so that a campaign can be run again.

Two kinds go on side by side. Each Edge and Scheduler is started with an order to kill itself at one named point of its code
(dsec.faults); when it has, it is started again with the next. And from outside anything is killed, or stopped for a while, at a random
moment of a round.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Literal

import msgspec

from dsec.faults import POINTS

SCHEDULERS = ("create.asked", "create.sent", "create.answered")
# Passed only by an Edge that comes after one which died at the point before.
AFTER = {
    "step.recorded": "step.asked",
    "step.asked": "step.again",
    "pause.still": "pause.found",
    "pause.frozen": "pause.found",
    "pause.found": "pause.given",
    "pause.given": "pause.completed",
}
# What only containers pass: the fake backend has no such steps.
CONTAINER = (
    *("create.made", "create.started", "pause.still", "capture.frozen", "capture.drawn", "capture.put", "stop.killed", "stop.removed"),
    *("step.asked", "step.again", "pause.found", "pause.given", "pause.completed"),  # a fake sandbox dies with its Edge
)
OFTEN = ("store.commit", "store.committed")  # passed all the time: let some go by

Victim = Literal["edge", "scheduler", "watcher", "nats", "holder", "zygote", "agent", "client", "everything"]
WEIGHTS: dict[Victim, int] = {
    "edge": 4, "scheduler": 2, "watcher": 2, "nats": 3, "holder": 3, "zygote": 2, "agent": 2, "client": 4, "everything": 1,
}  # fmt: skip
STOPPABLE: tuple[Victim, ...] = ("edge", "scheduler", "watcher", "nats", "holder", "zygote")
ONLY_CONTAINER: tuple[Victim, ...] = ("holder", "zygote", "agent")


class Kill(msgspec.Struct, frozen=True):
    """``seconds`` 0: SIGKILL, and it is started again after ``away`` seconds. Else SIGSTOP for that long: a half-open connection."""

    victim: Victim
    after: float
    which: int  # of several: by this number, modulo how many there are
    away: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        how = f"stopped for {self.seconds:.1f} s" if self.seconds else f"killed, back after {self.away:.1f} s"
        return f"{self.victim} {self.which} {how} at {self.after:.1f} s"


def plan(seed: int, number: int, seconds: float, *, container: bool, times: tuple[int, int] = (1, 3)) -> tuple[Kill, ...]:
    """What is done from outside in one round of so many seconds, in its order; ``times``: least and most."""
    dice = random.Random(f"{seed} {number}")
    victims = [victim for victim in WEIGHTS if container or victim not in ONLY_CONTAINER]
    weights = [WEIGHTS[victim] for victim in victims]
    kills = []
    for _ in range(dice.randint(*times)):
        victim = dice.choices(victims, weights)[0]
        after, which = dice.uniform(0.0, seconds), dice.randrange(1_000)
        if victim in STOPPABLE and dice.random() < 0.25:
            kills.append(Kill(victim, after, which, seconds=dice.uniform(0.3, 3.0)))
        else:
            kills.append(Kill(victim, after, which, away=dice.choice((0.0, 0.0, 0.3, 1.0))))
    return tuple(sorted(kills, key=lambda kill: kill.after))


class Points:
    """Hands out the points of one kind of actor: all in a random order, then those that were not reached, then all again. ``dense``: an
    Edge never goes without."""

    def __init__(self, seed: int, kind: str, *, container: bool, dense: bool = False) -> None:
        self._dice = random.Random(f"{seed} {kind}")
        self._peace = 0.9 if kind == "scheduler" else 0.0 if dense else 0.5  # creates that a Scheduler takes along wait for ten seconds
        names = [name for name in POINTS if (name in SCHEDULERS) == (kind == "scheduler") and (container or name not in CONTAINER)]
        self.names = tuple(names)
        self.reached: Counter[str] = Counter()
        self._todo: list[str] = []

    @property
    def missing(self) -> list[str]:
        return [name for name in self.names if not self.reached[name]]

    def next(self, last: str = "") -> str:
        """The next order, NAME:N; now and then none when all points were reached. ``last``: where this actor has just died, "" when it
        died otherwise."""
        if last in AFTER and AFTER[last] in self.names:
            return f"{AFTER[last]}:1"
        if not self.missing and self._dice.random() < self._peace:
            return ""
        if not self._todo:
            first = [name for name in self.missing if name not in AFTER.values()]
            self._todo = first or [name for name in self.names if name not in AFTER.values()]
            # What must come after another point is reached by way of that one.
            self._todo += [before for before, after in AFTER.items() if after in self.missing and before in self.names and first]
            self._dice.shuffle(self._todo)
        name = self._todo.pop()
        return f"{name}:{self._dice.randint(5, 60) if name in OFTEN else self._dice.choice((1, 1, 2, 3))}"

    def died_at(self, name: str) -> None:
        self.reached[name] += 1
