"""Named points at which a process can be made to die: around each step of a sandbox's life that waits or is written down.

`make chaos` visits them all (tests/chaos). Off, which is always but there, a point looks at one empty dict. With
``DSEC_KILL_AT="NAME:N FILE"`` the process kills itself (SIGKILL) when it passes that point for the N-th time, and appends the name to FILE
before. An unknown name ends the process at its start.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "DSEC_KILL_AT"

# Name: what has happened by then. The part before the dot is what is asked for; each is passed at one place in the code.
POINTS = {
    "create.asked": "the Scheduler has taken a slice on and not said so",
    "create.sent": "the Scheduler is about to hand a batch to an Edge",
    "create.answered": "the Scheduler has the Edge's answer and has not noted it",
    "create.admitted": "reserved in memory, not on disk",
    "create.recorded": "on disk, nobody told",
    "create.announced": "told that it is accepted; the Scheduler has no answer",
    "create.placed": "its turn to be launched has come; on disk perhaps",
    "create.prepared": "layers are mounted, nothing of its own exists",
    "create.made": "its directory and disk exist where it has them, no process",
    "create.started": "its init runs, its agent has not answered",
    "create.launched": "its agent has answered; on disk it is pending, or not yet",
    "create.opened": "a worker's way is open; on disk it is pending, or not yet",
    "create.running": "it is on disk, pending perhaps; nobody told",
    "create.ready": "its caller is told",
    "exec.awake": "the sandbox runs, the command does not",
    "exec.started": "the command runs, without a number",
    "exec.numbered": "it has its number in the log, nobody told",
    "exec.ended": "its end is known here, not to its caller",
    "step.begun": "a step has its number, nothing is on disk",
    "step.recorded": "its beginning is on disk, it does not run",
    "step.started": "it runs, nobody waits for it",
    "step.asked": "begun by an Edge that died; its sandbox does not know it",
    "step.again": "so it was started once more",
    "step.ended": "its end is known, and not on disk",
    "step.kept": "its result is on disk, nobody told",
    "step.told": "whoever waits is told",
    "pause.asked": "it is pausing, requests are still being served",
    "pause.quiet": "nothing is being served",
    "pause.still": "it is frozen, its memory is where it was",
    "pause.frozen": "it is frozen, its memory gone where it goes",
    "pause.told": "it is paused; its caller has no answer",
    "pause.found": "found frozen in the middle of a pause by the next Edge",
    "pause.given": "its memory is gone where it goes; on disk nothing says so",
    "pause.completed": "that pause was completed, and is on disk",
    "resume.reserved": "it has its room again and is frozen",
    "resume.asked": "it is resuming, and frozen",
    "resume.thawed": "it runs; in memory it is still resuming",
    "resume.told": "it is resumed; its caller has no answer",
    "capture.asked": "it is capturing, and runs",
    "capture.recorded": "on disk it is capturing, and runs",
    "capture.frozen": "it is frozen, to be drawn",
    "capture.drawn": "its files are drawn into an image, it runs on",
    "capture.put": "the layer has its name, and no record",
    "capture.packed": "the layer is there; on disk it is still capturing",
    "capture.settled": "on disk it runs, and the layer is nobody's",
    "capture.kept": "the checkpoint is on disk; its caller has no answer",
    "capture.dropped": "a checkpoint's record is gone, its layer is not",
    "stop.asked": "it is stopping; nothing is freed",
    "stop.begun": "its launch, if any, is cut off",
    "stop.killed": "no process of it lives, its files and cgroups are there",
    "stop.removed": "nothing of it is left but its status in the holder",
    "stop.released": "nothing of it is left; on disk it is stopping",
    "stop.recorded": "on disk it is stopped, nobody told",
    "stop.told": "it is known as stopped; its caller may have no answer",
    "store.commit": "written to the journal, not committed",
    "store.committed": "on disk; who waits for it does not know",
    "adopt.found": "a restarted Edge knows what lives",
    "adopt.reaped": "what nobody knows is gone",
    "adopt.taken": "all live ones have been taken up",
    "adopt.recovered": "their open steps are waited for; it serves nobody yet",
}

_left: dict[str, int] = {}  # passes that are left until it dies
_told = ""


def reached(name: str) -> None:
    """The process passes this point."""
    if _left:
        _pass(name)


def arm(order: str) -> None:
    """``NAME:N FILE``; "" = none. Raises `ValueError` for what is no order."""
    global _told
    _left.clear()
    if not order:
        return
    what, _, _told = order.partition(" ")
    name, _, passes = what.partition(":")
    if name not in POINTS or not passes.isdecimal() or not int(passes) or not _told:
        raise ValueError(f"{VARIABLE}={order!r} is not NAME:N FILE with a name of dsec.faults.POINTS")
    _left[name] = int(passes)


def _pass(name: str) -> None:
    left = _left.get(name)
    if left is None:
        return
    if left > 1:
        _left[name] = left - 1
        return
    out = os.open(_told, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.write(out, f"{name}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)
    while True:  # the signal is for the process: this thread may go on for a moment, and must not
        signal.pause()


arm(os.environ.get(VARIABLE, ""))
