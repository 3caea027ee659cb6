"""The load of a campaign: clients that make, use, pause, fork and end sandboxes all the time, and tell the oracle what was acknowledged.

Every call must be answered, with a result or a typed error, within a bound; an error that is typed and not the caller's own fault is no
contradiction. A step is asked for again until its result is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import Awaitable, Callable
from typing import Self, TypeVar

import libdsec
from dsec.errors import Denied, DsecError, InvalidRequest, SandboxGone, Unsupported
from dsec.model import SandboxSpec, State
from tests.chaos.model import Oracle

T = TypeVar("T")
Worker = Callable[[libdsec.Client, random.Random], Awaitable[None]]

BOUND = 100.0  # seconds in which any call must be answered, whatever dies
LEASE = 3.0  # seconds; what nobody has named goes after them, and actors live for longer while nothing is under way
OUR_FAULT = (InvalidRequest, Denied, Unsupported)  # nothing that dies may lead to these
EFFECTS = "/effects"


def command(key: str) -> str:
    """A step that leaves a line behind and answers with one."""
    return f"echo {key} >>{EFFECTS}; echo result {key}"


class Load:
    """``async with Load(…) as load:``, then ``go`` and ``rest``. ``spec`` is of every sandbox."""

    def __init__(self, url: str, oracle: Oracle, seed: int, spec: SandboxSpec) -> None:
        self.url, self.oracle, self.seed, self.spec = url, oracle, seed, spec
        self.steppers: list[str] = []  # sandboxes whose steps are counted
        self.slow: list[tuple[float, str]] = []
        self._busy = asyncio.Event()
        self._resting: list[asyncio.Event] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._over = False

    async def __aenter__(self) -> Self:
        workers = [self.steps, self.steps, self.lives, self.bursts, self.pauses, self.pauses, self.captures, self.captures]
        for number, worker in enumerate(workers):
            resting = asyncio.Event()
            self._resting.append(resting)
            self._tasks.append(asyncio.ensure_future(self._work(number, worker, resting)))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over = True
        self._busy.set()
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    def go(self) -> None:
        for resting in self._resting:
            resting.clear()
        self._busy.set()

    async def rest(self) -> None:
        """Returns when no call is under way."""
        self._busy.clear()
        waiting = [asyncio.ensure_future(resting.wait()) for resting in self._resting]
        try:
            while not all(each.done() for each in waiting):
                await asyncio.wait([*(each for each in waiting if not each.done()), *self._tasks], return_when=asyncio.FIRST_COMPLETED)
                for task in self._tasks:
                    if task.done():
                        task.result()  # a worker ends by a fault of its own
        finally:
            for each in waiting:
                each.cancel()

    # ------------------------------------------------------------------ calls
    async def ask(self, what: str, call: Awaitable[T]) -> T | None:
        """A call's result; None after a typed error, which is counted."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(BOUND) as bound:
                result = await call
        except TimeoutError as error:
            if bound.expired():
                self.oracle.say("answer", f"{what}: no answer within {BOUND:g} s")
            elif not isinstance(error, DsecError):
                raise
            self.oracle.counts[f"{what}: {type(error).__name__}"] += 1
            return None
        except DsecError as error:
            self.oracle.counts[f"{what}: {type(error).__name__} {error.reason}".rstrip()] += 1
            if isinstance(error, OUR_FAULT):
                self.oracle.say("answer", f"{what}: {type(error).__name__}: {error}")
            if isinstance(error, SandboxGone):
                raise
            return None
        finally:
            self.slow = sorted([*self.slow, (round(loop.time() - began, 1), what)], reverse=True)[:5]
        self.oracle.counts[what] += 1
        return result

    async def _work(self, number: int, worker: Worker, resting: asyncio.Event) -> None:
        """One client of its own; ``worker`` is one piece of work with it."""
        dice = random.Random(f"{self.seed} load {number}")
        async with libdsec.connect(self.url, lease_ttl=LEASE, connect_timeout=BOUND) as client:
            while not self._over:
                if not self._busy.is_set():
                    resting.set()
                    await self._busy.wait()
                    continue
                with contextlib.suppress(SandboxGone):  # the oracle has heard of it
                    await worker(client, dice)
                await asyncio.sleep(dice.uniform(0.0, 0.1))

    async def _create(self, client: libdsec.Client) -> libdsec.Sandbox | None:
        sandbox = await self.ask("create", client.create(self.spec, timeout=60.0))
        if sandbox is not None:
            self.oracle.ready(sandbox.id)
        return sandbox

    async def use(self, what: str, sandbox: libdsec.Sandbox, call: Awaitable[T]) -> T | None:
        """`ask` of one sandbox. Raises `SandboxGone`, told to the oracle, when that has ended."""
        try:
            return await self.ask(what, call)
        except SandboxGone as error:
            self.oracle.gone(sandbox.id, error.reason)
            raise

    async def _stop(self, sandbox: libdsec.Sandbox) -> None:
        self.oracle.stopping(sandbox.id)
        with contextlib.suppress(SandboxGone):
            if not await self._surely("stop", sandbox.stop):
                return
        self.oracle.stopped(sandbox.id, "stopped")

    async def _surely(self, what: str, call: Callable[[], Awaitable[object]]) -> bool:
        async def again() -> bool:
            await call()
            return True

        return bool(await self.ask(what, again()) or await self.ask(what, again()))

    # ------------------------------------------------------------------ workers
    async def steps(self, client: libdsec.Client, dice: random.Random) -> None:
        """A sandbox that gets steps, some of them twice, until it has 40; then another."""
        sandbox = await self._create(client)
        if sandbox is None:
            return
        self.steppers.append(sandbox.id)
        for number in range(40):
            await self._step(sandbox, f"s{number}")
            if dice.random() < 0.2:
                old = f"s{dice.randrange(number + 1)}"
                again = await self.use("step again", sandbox, sandbox.exec(command(old), step=old, timeout=30.0))
                if again is not None:
                    self.oracle.answered(sandbox.id, old, again.stdout)
            if not self._busy.is_set():
                await self._pause_work()
        await self._stop(sandbox)
        self.steppers.remove(sandbox.id)

    async def _step(self, sandbox: libdsec.Sandbox, key: str) -> None:
        """Asked for until its result is there."""
        self.oracle.asks(sandbox.id, key)
        while True:
            result = await self.use("step", sandbox, sandbox.exec(command(key), step=key, timeout=30.0))
            if result is not None:
                self.oracle.answered(sandbox.id, key, result.stdout)
                return
            await asyncio.sleep(0.1)

    async def _pause_work(self) -> None:
        """In the middle of a piece of work: nothing is under way."""
        mine = self._resting[[task is asyncio.current_task() for task in self._tasks].index(True)]
        mine.set()
        await self._busy.wait()

    async def lives(self, client: libdsec.Client, dice: random.Random) -> None:
        """Create, exec, stop."""
        sandbox = await self._create(client)
        if sandbox is None:
            return
        try:
            for _ in range(dice.randint(1, 3)):
                word = secrets.token_hex(4)
                result = await self.use("exec", sandbox, sandbox.exec(f"echo {word}", timeout=30.0))
                if result is not None and result.stdout != f"{word}\n".encode():
                    self.oracle.say("lost result", f"{sandbox.id}: exec of echo {word} answered {result.stdout!r}")
        finally:
            await self._stop(sandbox)

    async def bursts(self, client: libdsec.Client, dice: random.Random) -> None:
        """A few at once, of which some may fail."""

        async def burst() -> None:
            async with client.burst(self.spec, dice.randint(2, 5), min_ready=0, deadline=40.0) as made:
                async for sandbox in made:
                    self.oracle.ready(sandbox.id)
                    self.oracle.stopping(sandbox.id)
                    with contextlib.suppress(DsecError):
                        await sandbox.exec("true", timeout=20.0)

        await self.ask("burst", burst())
        if dice.random() < 0.5:  # one that is given up while it is made
            task = asyncio.ensure_future(client.create(self.spec, timeout=30.0))
            await asyncio.sleep(dice.uniform(0.0, 0.05))
            task.cancel()
            made = (await asyncio.gather(task, return_exceptions=True))[0]
            if isinstance(made, libdsec.Sandbox):
                self.oracle.ready(made.id)
                await self._stop(made)

    async def pauses(self, client: libdsec.Client, dice: random.Random) -> None:
        """Pause and resume, with something written in between that must be there afterwards."""
        sandbox = await self._create(client)
        if sandbox is None:
            return
        for _ in range(dice.randint(3, 8)):
            await self._step(sandbox, f"w{secrets.token_hex(4)}")
            paused = await self.use("pause", sandbox, sandbox.pause())
            if paused is not None and dice.random() < 0.3:
                info = await self.use("info", sandbox, sandbox.info())
                if info is not None and info.state is not State.PAUSED:
                    self.oracle.say("state", f"{sandbox.id}: paused, and nobody has used it since, and it is {info.state}")
            if dice.random() < 0.5:
                await self.use("resume", sandbox, sandbox.resume())
            data = await self.use("read", sandbox, sandbox.files.read(EFFECTS))
            if data is not None:
                lines = data.decode().split()
                self.oracle.effects(sandbox.id, lines)
            if not self._busy.is_set():
                await self._pause_work()
        await self._stop(sandbox)

    async def captures(self, client: libdsec.Client, dice: random.Random) -> None:
        """A checkpoint, and a sandbox that begins from it with the files of that moment."""
        sandbox = await self._create(client)
        if sandbox is None:
            return
        word = secrets.token_hex(4)
        if await self.use("exec", sandbox, sandbox.exec(f"echo {word} >/word", check=True, timeout=30.0)) is not None:
            checkpoint = await self.use("checkpoint", sandbox, sandbox.checkpoint())
            if checkpoint is not None:
                await self._restored(client, checkpoint.id, word)
                await self._surely("drop", lambda: client.drop_checkpoints([checkpoint.id]))
        await self._stop(sandbox)

    async def _restored(self, client: libdsec.Client, checkpoint: str, word: str) -> None:
        restored = await self.ask("restore", client.restore(checkpoint, on_client_loss="keep", timeout=60.0))
        for child in restored.sandboxes if restored is not None else ():
            self.oracle.ready(child.id)
            try:
                data = await self.use("read", child, child.files.read("/word"))
                if data is not None and data.decode().strip() != word:
                    self.oracle.say("state", f"{child.id}: restored with {data!r} in place of {word!r}")
            finally:
                await self._stop(child)
