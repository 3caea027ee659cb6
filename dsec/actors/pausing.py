"""Pause and resume of one sandbox, and waiting for what runs in it while it may stand still.

A paused sandbox holds no reservation and takes it again at resume, before anybody's create. Requests resume it, concurrent ones once;
only who waits for the end of an operation does not: a job that is paused stays so, though its clients wait for their commands.
dsec/actors/sandbox.py calls what is here, pause and resume in its mailbox.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dsec import faults
from dsec.actors.lifecycle import On
from dsec.backends.base import Broken, Undone
from dsec.errors import DeadlineExceeded, SandboxGone, Unsupported
from dsec.model import OpStatus, Paused, State

if TYPE_CHECKING:
    from dsec.actors.sandbox import Sandbox


async def pause(sandbox: Sandbox, deadline: float | None, idle: bool) -> Paused:
    """See `Sandbox.pause`."""
    await sandbox.settled(deadline)
    if sandbox.state is State.PAUSED:
        return sandbox.record.paused or Paused()
    if not sandbox.backend.capabilities.pause:
        missing = sandbox.backend.capabilities.missing.get("pause", "this backend cannot pause")
        raise Unsupported(f"cannot pause: {missing}", sandbox=sandbox.id, reason="pause")
    if idle and sandbox.clocks.busy:
        return Paused(note="it is in use")
    sandbox.feed(On.PAUSE)
    faults.reached("pause.asked")
    await quiet(sandbox)
    faults.reached("pause.quiet")
    if sandbox.within(State.STOPPING, State.STOPPED):
        raise sandbox.gone()
    await _move(sandbox, On.PAUSED_OK, On.PAUSE_UNDONE)
    faults.reached("pause.told")
    return sandbox.record.paused or Paused()


async def resume(sandbox: Sandbox, deadline: float | None) -> None:
    """See `Sandbox.resume`."""
    await sandbox.settled(deadline)
    if sandbox.state is State.RUNNING:
        return
    await sandbox.keeper.reserve(sandbox, deadline)
    faults.reached("resume.reserved")
    if sandbox.state is not State.PAUSED:
        # it was stopped while it waited for room; what was reserved meanwhile is given back where it ends
        if sandbox.within(State.STOPPED):
            sandbox.keeper.release(sandbox)
        raise sandbox.gone()
    sandbox.feed(On.RESUME)
    faults.reached("resume.asked")
    try:
        await _move(sandbox, On.RESUMED_OK, On.RESUME_UNDONE)
        faults.reached("resume.told")
    finally:
        if sandbox.state is State.PAUSED:
            sandbox.keeper.release(sandbox)


async def complete(sandbox: Sandbox) -> None:
    """An Edge died in the middle of this pause: it is frozen, and its memory may still be where it was."""
    instance = sandbox.instance
    if sandbox.state is State.PAUSED and instance is not None:
        faults.reached("pause.found")
        paused = await instance.pause()
        faults.reached("pause.given")
        if sandbox.within(State.PAUSED):
            sandbox.record.paused = paused
            await sandbox.keeper.store.update(sandbox.write())
            faults.reached("pause.completed")


async def outcome(sandbox: Sandbox, op: str, wait: float) -> OpStatus:
    """See `Sandbox.outcome`."""
    loop = asyncio.get_running_loop()
    end = loop.time() + wait
    async with sandbox.in_use():
        while True:
            if sandbox.state is State.RUNNING:
                instance = sandbox.instance
                assert instance is not None
                poll = asyncio.timeout(None)
                try:
                    async with poll:
                        sandbox.polls[poll] = None
                        try:
                            return await instance.link.wait(op, max(0.0, end - loop.time()))
                        finally:
                            sandbox.polls.pop(poll, None)
                            sandbox.polls = sandbox.polls or {}  # one that has been emptied keeps its table
                except TimeoutError:
                    if not poll.expired():
                        raise
            elif sandbox.within(State.STOPPING, State.STOPPED):
                raise sandbox.gone()
            else:
                try:
                    await sandbox.changed(end)
                except DeadlineExceeded:
                    return OpStatus(op=op, running=True)


async def quiet(sandbox: Sandbox) -> None:
    """Nobody waits for its agent: before it stands still, and before its connections are closed."""
    _wake_polls(sandbox)
    await _quiesce(sandbox)


def _wake_polls(sandbox: Sandbox) -> None:
    """Who waits for the end of an operation waits from now on for the resume: the guest answers nothing while it stands still."""
    now = asyncio.get_running_loop().time()
    for poll in sandbox.polls:
        if not poll.expired():
            poll.reschedule(now)


async def _quiesce(sandbox: Sandbox) -> None:
    """Let what is being answered be answered, for a moment."""
    if sandbox.serving:
        sandbox.served = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait([sandbox.served], timeout=sandbox.keeper.pausing.quiesce_ms / 1000)
        finally:
            sandbox.served = None


async def _move(sandbox: Sandbox, ok: On, undone: On) -> None:
    """Carry out pause or resume on the instance; its outcome is the next event."""
    assert sandbox.instance is not None
    try:
        if ok is On.PAUSED_OK:
            sandbox.record.paused = await sandbox.instance.pause()
            faults.reached("pause.frozen")
        else:
            await sandbox.instance.resume()
            faults.reached("resume.thawed")
            sandbox.record.paused = None
    except (Undone, Broken) as error:
        sandbox.feed(undone if isinstance(error, Undone) else On.BROKEN, detail=str(error))
        if sandbox.life.exit is not None and isinstance(error, Undone):  # it was stopped meanwhile: that is why
            raise sandbox.gone() from None
        raise
    except SandboxGone:
        await sandbox.settled(None)
        raise
    except Exception as error:
        if not sandbox.keeper.over:  # an Edge that has let go has no threads any more: the next one looks at the kernel
            sandbox.feed(On.BROKEN, detail=repr(error))
        raise
    sandbox.feed(ok)  # which writes it down. Nobody waits for the disk: what the kernel shows is the truth for the next Edge
    if sandbox.state in (State.STOPPING, State.STOPPED):
        raise sandbox.gone()
