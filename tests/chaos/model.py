"""What a cluster under chaos may say and do: a pure oracle that remembers what was acknowledged and names each contradiction.

It knows nothing of processes or of the bus. The load (load.py) tells it what was asked for and answered; the campaign tells it what was
killed and shows it, in between, what is there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec

from dsec.actors.lifecycle import ImpossibleEvent, Life, On, step
from dsec.bus.messages import Event
from dsec.model import State

# What an event tells of, as the lifecycle's events. A request's own event comes before its outcome's.
TOLD = {
    "running": (On.PLACED, On.READY),
    "paused": (On.PAUSE, On.PAUSED_OK),
    "resumed": (On.RESUME, On.RESUMED_OK),
    "packed": (On.CAPTURE, On.CAPTURED),
}
NEUTRAL = ("step", "checkpointed")
WATCHERS = ("node_up", "node_lost")  # these have a numbering of their own
# What a restarted Edge may find of a sandbox that was last told to be in a state (dsec.actors.lifecycle.adoption).
FOUND = {
    State.PENDING: (State.PENDING, State.RUNNING, State.PAUSED),
    State.RUNNING: (State.RUNNING, State.PAUSED),
    State.PAUSED: (State.PAUSED, State.RUNNING),
}


class Wrong(NamedTuple):
    """One contradiction."""

    kind: Literal["lost result", "doubled result", "lost event", "doubled event", "state", "answer"]
    text: str


class Steps(msgspec.Struct):
    """Of one sandbox: keys in the order in which they were first asked for, and the result of each that was answered."""

    asked: list[str] = []
    results: dict[str, bytes] = {}


class Oracle:
    """``wrong`` holds every contradiction so far. ``fragile``: a sandbox may end with its Edge (the fake backend's do)."""

    def __init__(self, *, fragile: bool = False) -> None:
        self.fragile = fragile
        self.wrong: list[Wrong] = []
        self.steps: dict[str, Steps] = defaultdict(Steps)
        self.made: set[str] = set()  # ready, as somebody was told
        self.ended: dict[str, str] = {}  # told to have ended, and why
        self.doubtful: set[str] = set()  # asked to stop, without an answer; or its agent was killed
        self.counts: Counter[str] = Counter()  # of operations by their outcome

    def say(self, kind: Literal["lost result", "doubled result", "state", "answer"], text: str) -> None:
        self.wrong.append(Wrong(kind, text))

    # ------------------------------------------------------------------ what was said
    def asks(self, sandbox: str, key: str) -> None:
        steps = self.steps[sandbox]
        if key not in steps.asked:
            steps.asked.append(key)

    def answered(self, sandbox: str, key: str, result: bytes) -> None:
        """A step's result reached somebody."""
        known = self.steps[sandbox].results.setdefault(key, result)
        if known != result:
            self.say("lost result", f"{sandbox}: step {key} was answered with {known!r} and then with {result!r}")

    def ready(self, sandbox: str) -> None:
        if sandbox in self.made:
            self.say("state", f"{sandbox}: made twice")
        self.made.add(sandbox)

    def stopping(self, sandbox: str) -> None:
        self.doubtful.add(sandbox)

    def stopped(self, sandbox: str, why: str) -> None:
        """Somebody was told that it has ended."""
        self.ended.setdefault(sandbox, why)

    def gone(self, sandbox: str, why: str) -> None:
        """A request found it ended, though nobody had asked for that."""
        if not self.fragile and sandbox not in self.ended and sandbox not in self.doubtful:
            self.say("state", f"{sandbox}: ended by itself ({why})")
        self.ended.setdefault(sandbox, why)

    @property
    def living(self) -> set[str]:
        """Those that must be there."""
        return set() if self.fragile else self.made - self.ended.keys() - self.doubtful

    # ------------------------------------------------------------------ what is there
    def effects(self, sandbox: str, lines: Iterable[str]) -> None:
        """The side effects of its steps, each a line with the step's key."""
        counts = Counter(lines)
        steps = self.steps[sandbox]
        for key, times in counts.items():
            if key not in steps.asked:
                self.say("state", f"{sandbox}: side effect {key!r} of nothing that was asked for")
            elif times > 1:
                self.say("doubled result", f"{sandbox}: step {key} was executed {times} times")
        for key in steps.results:
            if not counts[key]:
                self.say("lost result", f"{sandbox}: step {key} was answered and has left nothing")

    def listed(self, found: Mapping[str, State]) -> list[Wrong]:
        """What is wrong with the live sandboxes of the project, when nothing is under way."""
        wrong = [f"{sandbox}: it should live and is not listed" for sandbox in sorted(self.living - found.keys())]
        wrong += [f"{sandbox}: nobody was told of it, and it lives ({found[sandbox]})" for sandbox in sorted(found.keys() - self.made)]
        for sandbox in sorted(found.keys() & self.ended.keys()):
            wrong.append(f"{sandbox}: told to have ended ({self.ended[sandbox]}), and it lives ({found[sandbox]})")
        return [Wrong("state", text) for text in wrong]

    def stream(self, events: Iterable[Event]) -> list[Wrong]:
        """What is wrong with the whole stream of events."""
        seen = list(events)
        wrong = numbers(seen)
        by_sandbox: dict[str, list[Event]] = defaultdict(list)
        for event in seen:
            if event.sb:
                by_sandbox[event.sb].append(event)
        for sandbox, its in by_sandbox.items():
            wrong += [Wrong(each.kind, f"{sandbox}: {each.text}") for each in life(its)]
        for sandbox in sorted(self.made):
            kinds = {event.kind for event in by_sandbox[sandbox]}
            # An Edge tells that it runs a moment before that is on disk. When it dies just then, and the sandbox ends, nobody knows.
            apart = len({event.incarnation for event in by_sandbox[sandbox]}) > 1
            must = {"created"} if sandbox in self.doubtful and apart else {"created", "running"}
            missing = (must - kinds) | ({"stopped"} - kinds if sandbox in self.ended else set())
            wrong += [Wrong("lost event", f"{sandbox}: no event tells that it was {kind}") for kind in sorted(missing)]
        for sandbox, steps in self.steps.items():
            told = Counter(str(event.detail.get("step")) for event in by_sandbox[sandbox] if event.kind == "step")
            for key in steps.results:
                if told[key] != 1:
                    wrong.append(Wrong("doubled event" if told[key] else "lost event", f"{sandbox}: {told[key]} events tell of step {key}"))
        return wrong


def numbers(events: Iterable[Event]) -> list[Wrong]:
    """No number of an incarnation is two events. Gaps are none's loss: what was numbered and never written down has not happened."""
    wrong = []
    by_source: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        if event.kind not in WATCHERS:
            by_source[event.edge, event.incarnation].append(event)
    for (edge, incarnation), its in by_source.items():
        counted = [event.n for event in its]
        if twice := [number for number, times in Counter(counted).items() if times > 1]:
            wrong.append(Wrong("doubled event", f"events {_few(twice)} of {edge} ({incarnation}) came twice"))
    return wrong


def life(events: Iterable[Event]) -> list[Wrong]:
    """What the table of the lifecycle forbids in one sandbox's events, in their order."""
    ordered = sorted(events, key=lambda event: (int(event.incarnation.rpartition(".")[2] or 0), event.n))
    wrong: list[Wrong] = []
    now: Life | None = None
    incarnation = ""
    for event in ordered:
        if event.kind == "created":
            if now is not None:
                wrong.append(Wrong("doubled event", "created twice"))
            now = Life()
        elif now is None:
            wrong.append(Wrong("lost event", f"{event.kind} before it was created"))
            now = Life(state=State.RUNNING)
        if event.kind == "stopped":
            if now.state is State.STOPPED:
                wrong.append(Wrong("doubled event", "stopped twice"))
            now = Life(state=State.STOPPED)
        elif event.kind != "created" and event.kind not in NEUTRAL:
            now = _follow(now, event, incarnation, wrong)
        if event.kind not in NEUTRAL:
            incarnation = event.incarnation
    return wrong


def _follow(now: Life, event: Event, before: str, wrong: list[Wrong]) -> Life:
    if event.kind not in TOLD:
        wrong.append(Wrong("state", f"unknown event {event.kind}"))
        return now
    # An Edge that died may have done more than it told: the next one says what it found.
    starts = FOUND.get(now.state, (now.state,)) if event.incarnation != before else (now.state,)
    for start in starts:
        try:
            after = Life(state=start)
            for on in TOLD[event.kind]:
                after, _ = step(after, on)
        except ImpossibleEvent:
            continue
        return Life(state=after.state)
    wrong.append(Wrong("state", f"{event.kind} while it was {now.state} ({event.incarnation}, {event.n})"))
    return now


def _few(found: list[int]) -> str:
    return ", ".join(map(str, found[:5])) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
