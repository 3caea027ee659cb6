"""The connection below a link: opened when it is first used, closed when it has been idle, asked again where that is safe."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from typing import TypeVar
from weakref import WeakKeyDictionary

from dsec.backends.guest import wire
from dsec.backends.guest.answers import guest_error
from dsec.backends.guest.channel import Channel, ChannelLost, Expected, open_channel
from dsec.errors import DeadlineExceeded, DsecError, SandboxError, SandboxGone, Unavailable

T = TypeVar("T")
MOST_IDLE = 256  # connections that may stand open unused in one loop: each holds a descriptor and a buffer, and opening one takes 0.2 ms
CLOSED = (0.0, 0.02, 0.1, 0.3)  # seconds before it is called again after it has hung up: it may be ending, its listener a moment after that
SILENCE = 5.0  # seconds without a word from an agent that was asked, after which it is said not to answer


class _Reaper:
    """Closes idle connections of one loop; its timer exists only while connections are open."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.connections: set[Connection] = set()
        self.timer: asyncio.TimerHandle | None = None
        self.most = MOST_IDLE  # open ones at which it looks for unused ones

    def add(self, connection: Connection) -> None:
        self.connections.add(connection)
        if len(self.connections) > self.most:
            self.thin(connection)
        if self.timer is None:
            self.timer = self.loop.call_later(min(connection.idle_seconds, 5.0), self.look)

    def thin(self, newest: Connection) -> None:
        """Close the longest unused ones, down to half of what may stand open. Those in use are counted and left alone."""
        unused = sorted((each for each in self.connections if each is not newest and each.idle), key=lambda each: each._used)
        old = unused[: max(0, len(unused) - MOST_IDLE // 2)]
        self.most = MOST_IDLE + len(self.connections) - 1 - len(unused)
        for connection in old:
            connection.hang_up()

    def look(self) -> None:
        self.timer = None
        now = self.loop.time()
        for connection in [connection for connection in self.connections if connection.idle_since(now)]:
            connection.hang_up()
        if self.connections:
            soonest = min(connection.idle_seconds for connection in self.connections)
            self.timer = self.loop.call_later(min(soonest, 5.0), self.look)

    def drop(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if not self.connections and self.timer is not None:
            self.timer.cancel()
            self.timer = None


_reapers: WeakKeyDictionary[asyncio.AbstractEventLoop, _Reaper] = WeakKeyDictionary()


def in_touch(loop: asyncio.AbstractEventLoop) -> list[str]:
    """Paths of the guests to whom a connection of this loop is open, those with a request under way first. Callable in any thread."""
    reaper = _reapers.get(loop)
    return [each.path for each in sorted(reaper.connections, key=lambda each: each.idle)] if reaper is not None else []


class _Patience:
    """Waits for one answer: asks again whether the agent is there when it has been quiet, and gives up on one that stays silent.

    A command may take long to begin (its program is still on the way into the layer), the agent itself answers at once whatever runs.
    """

    __slots__ = ("asked", "channel", "connection", "future", "since", "step", "timer", "until")

    def __init__(self, connection: Connection, channel: Channel, future: asyncio.Future[object]) -> None:
        self.connection, self.channel, self.future = connection, channel, future
        self.since = channel.loop.time()  # nothing has come since then
        self.until = self.since + connection.request_timeout
        self.asked: float | None = None  # when it was asked whether it is there
        self.step = min(connection.silence / 2, connection.request_timeout)
        self.timer = channel.loop.call_later(self.step, self.look)

    def look(self) -> None:
        if self.future.done():
            return
        connection, now = self.connection, self.channel.loop.time()
        if now >= self.until:
            self.future.set_exception(DeadlineExceeded("the guest does not answer", sandbox=connection.sandbox_id))
        elif self.spoke() or self.asked is None:
            self.asked = now
            self.channel.send(wire.Type.OPS, b"", lambda _kind, _value: True)
            self.again()
        elif now - self.asked < connection.silence / 2:  # this loop was late, so may be what we hear
            self.again()
        else:
            self.channel.loop.create_task(self.judge())

    def spoke(self) -> bool:
        if self.channel.heard <= self.since:
            return False
        self.since = self.channel.heard
        return True

    async def judge(self) -> None:
        """It is silent; unless its sandbox is held still from here, or its answer lies in the socket already."""
        still = await self.connection._stands_still()
        await asyncio.sleep(0.01)
        if self.future.done():
            return
        if still or self.spoke():
            self.asked = None
            self.again()
        else:
            self.future.set_exception(self.connection._no_answer())

    def again(self) -> None:
        now = self.channel.loop.time()
        self.timer = self.channel.loop.call_later(max(0.0, min(self.step, self.until - now)), self.look)


class Connection:
    """One way into one sandbox, however many channels that takes in its life. For the arguments see `Link`."""

    def __init__(
        self,
        path: str,
        *,
        generation: int,
        expect_pid: Expected,
        idle_seconds: float,
        sandbox_id: str,
        request_timeout: float,
        defaults: Mapping[str, str] | None,
        frozen: Callable[[], bool] | None,
        silence: float,
    ) -> None:
        self.path = path
        self._defaults = defaults or {}  # what the guest takes for a field that an order leaves out: an error about it names the value
        self.generation = generation
        self.expect_pid: Expected = expect_pid
        self.idle_seconds = idle_seconds
        self.sandbox_id = sandbox_id
        self.requests = 0  # how many were made so far
        self.request_timeout = request_timeout
        self._channel: Channel | None = None
        self._connecting: asyncio.Task[Channel] | None = None
        self._used = 0.0
        self.silence = silence
        self._frozen = frozen
        self._known = False  # it has answered once: before that it may still be starting
        self._held: asyncio.Event | None = None

    async def reach(self) -> None:
        """Until the agent has answered; raises what any request would. For who has just started it: nobody else asks anything yet."""
        self.requests += 1
        await self._connect()

    async def close(self) -> None:
        """Close the connection; the link stays usable and opens a new one when asked again."""
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        self.hang_up()

    @property
    def connected(self) -> bool:
        return self._channel is not None

    @property
    def idle(self) -> bool:
        """Open, and nothing is under way."""
        return self._channel is not None and not self._channel.busy

    def idle_since(self, now: float) -> bool:
        """Whether it may be closed at loop time ``now``."""
        channel = self._channel
        return channel is not None and not channel.busy and now - self._used >= self.idle_seconds

    def hold(self) -> None:
        """Hang up, and let requests wait until `let_go`."""
        self._held = self._held or asyncio.Event()
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        self.hang_up()

    def let_go(self) -> None:
        if self._held is not None:
            self._held.set()
            self._held = None

    def hang_up(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    # ---- inside

    async def _open(self) -> Channel:
        self.requests += 1
        while self._held is not None:
            await self._held.wait()
        channel = self._channel
        if channel is not None and not channel.closed:
            return channel
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
        task = self._connecting
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if task.cancelled() and current is not None and not current.cancelling():
                if self._held is not None:
                    return await self._open()
                raise self._lost() from None  # closed while it was being opened
            raise
        finally:
            if task.done() and self._connecting is task:
                self._connecting = None

    async def _connect(self) -> Channel:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.silence if self._known and not await self._stands_still() else self.request_timeout):
                channel = await self._call()
        except TimeoutError:
            raise (self._no_answer() if self._known else DeadlineExceeded("the guest does not answer", sandbox=self.sandbox_id)) from None
        except wire.WireError as error:
            raise SandboxError(f"the guest answered against the protocol: {error}", sandbox=self.sandbox_id) from None
        except ChannelLost as lost:
            if lost.refusal is not None:
                raise self._error(lost.refusal, {"generation": str(self.generation)}) from None
            raise Unavailable("the guest closed the connection", sandbox=self.sandbox_id, reason="guest_closed") from None
        self._channel = channel
        self._known = True
        self._used = loop.time()
        reaper = _reapers.get(loop)
        if reaper is None:
            reaper = _reapers[loop] = _Reaper(loop)
        reaper.add(self)
        return channel

    async def _call(self) -> Channel:
        """Raises `SandboxGone` when nobody listens, and `ChannelLost` when whoever does hangs up again and again, or says why."""
        call = functools.partial(open_channel, self.path, self.generation, self.expect_pid, self.sandbox_id, self._on_lost)
        for pause in CLOSED:
            try:
                return await call()
            except ChannelLost as lost:
                if lost.refusal is not None:
                    raise
            await asyncio.sleep(pause)
        return await call()

    def _on_lost(self, channel: Channel) -> None:
        if self._channel is channel:
            self._channel = None
        reaper = _reapers.get(channel.loop)
        if reaper is not None and self._channel is None:
            reaper.drop(self)

    async def _request(self, kind: wire.Type, body: bytes, values: dict[str, str], *, repeat: bool = False) -> object:
        for attempt in range(3):
            channel = await self._open()
            future: asyncio.Future[object] = channel.loop.create_future()

            def feed(kind: int, value: object, future: asyncio.Future[object] = future) -> bool:
                if not future.done():
                    future.set_result(value if kind else ChannelLost)
                return True

            request = channel.send(kind, body, feed)
            try:
                value = await self._answer(channel, request, future)
            except ChannelLost:
                if not repeat or attempt == 2:
                    raise await self._broken() from None
                continue
            if isinstance(value, wire.Error):
                raise self._error(value, values)
            return value
        raise self._lost()

    async def _answer(self, channel: Channel, request: int, future: asyncio.Future[object]) -> object:
        patience = _Patience(self, channel, future)
        try:
            value = await future
        except (asyncio.CancelledError, DsecError):
            channel.forget(request)
            raise
        finally:
            patience.timer.cancel()
        self._used = channel.loop.time()
        if value is ChannelLost or (value is None and channel.closed):
            raise ChannelLost
        return value

    async def _stands_still(self) -> bool:
        try:
            return self._frozen is not None and await asyncio.to_thread(self._frozen)
        except OSError:  # its group is gone, and it with it
            return False

    def _no_answer(self) -> Unavailable:
        return Unavailable(
            f"the sandbox's agent has not answered for {self.silence:g} s",
            sandbox=self.sandbox_id,
            reason="agent_silent",
            fix="it may have been stopped from outside, or its node is short of memory or CPU; `dsec stop` ends the sandbox",
        )

    def _expect(self, value: object, cls: type[T], values: dict[str, str]) -> T:
        if isinstance(value, wire.Error):
            raise self._error(value, values)
        if not isinstance(value, cls):
            raise SandboxError("the guest answered with a frame of another kind", sandbox=self.sandbox_id)
        return value

    def _error(self, error: wire.Error, values: Mapping[str, str]) -> DsecError:
        return guest_error(error, {**self._defaults, **{key: value for key, value in values.items() if value}}, self.sandbox_id)

    async def _broken(self) -> DsecError:
        """What is told of a request whose connection broke and that must not be repeated: that the sandbox has ended, if it has."""
        try:
            await self._open()
        except SandboxGone as gone:
            return gone
        except DsecError:
            pass  # what keeps it from being called now is another's to tell
        return self._lost()

    def _lost(self) -> Unavailable:
        return Unavailable("the connection to the guest broke", sandbox=self.sandbox_id)
