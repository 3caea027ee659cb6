"""Commands about states that others begin from: checkpoint, restore, fork, tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from dsec.commands import outcome
from dsec.commands.common import Settings, age, common, emit, pairs, run, size_text
from dsec.commands.ids import SANDBOX

if TYPE_CHECKING:
    from dsec.model import Checkpoint, SandboxInfo
    from libdsec import Restored


@click.command("checkpoint")
@click.argument("sandbox_id", metavar="SANDBOX", type=SANDBOX)
@click.option("--name", default="", help="For people; shown by `dsec tree`.")
@click.option("--kind", type=click.Choice(["disk", "memory"]), default="disk", help="What is kept: files, or processes as well.")
@click.option("--timeout", type=float, default=600.0, metavar="SECONDS", help="[default: 600]")
@common
def checkpoint_command(settings: Settings, sandbox_id: str, name: str, kind: str, timeout: float) -> None:
    """Keep the files that a sandbox has now (--kind memory: and its processes), for others to begin from; prints the checkpoint's id.
    The sandbox goes on.

    \b
    CP=$(dsec checkpoint ID --name solved-part-1)
    dsec restore $CP -n 4
    dsec tree --drop $CP
    """

    async def work() -> Checkpoint:
        async with settings.connect() as client:
            return await (await client.attach(sandbox_id)).checkpoint(name, kind=kind, timeout=timeout)

    made = run(work())
    if settings.json:
        emit(made)
    else:
        click.echo(made.id)


def _shared(function: Any) -> Any:
    for option in (
        click.option("--timeout", type=float, default=120.0, metavar="SECONDS", help="[default: 120]"),
        click.option("-l", "--label", multiple=True, metavar="KEY=VALUE", help="A label besides those that the sandbox had."),
        click.option("-n", "count", type=int, default=1, help="How many. [default: 1]"),
    ):
        function = option(function)
    return function


@click.command("restore")
@click.argument("checkpoint", metavar="CHECKPOINT")
@_shared
@common
def restore_command(settings: Settings, checkpoint: str, count: int, label: tuple[str, ...], timeout: float) -> int:
    """Make sandboxes that begin from a checkpoint; prints their ids. They stay until they are stopped.

    Those that could not be made are named on standard error, and the exit code is 1.
    """

    async def work() -> Restored:
        async with settings.connect() as client:
            return await client.restore(checkpoint, count, labels=pairs(label, "--label"), timeout=timeout, on_client_loss="keep")

    return _show(settings, run(work()))


@click.command("fork")
@click.argument("sandbox_id", metavar="SANDBOX", type=SANDBOX)
@click.option("--kind", type=click.Choice(["disk", "memory"]), default="disk", help="What is kept: files, or processes as well.")
@_shared
@common
def fork_command(settings: Settings, sandbox_id: str, kind: str, count: int, label: tuple[str, ...], timeout: float) -> int:
    """Make sandboxes that begin with the files that this one has now (--kind memory: and with its processes); prints their ids. It goes on,
    and they stay until they are stopped.

    Those that could not be made are named on standard error, and the exit code is 1.
    """

    async def work() -> Restored:
        async with settings.connect() as client:
            sandbox = await client.attach(sandbox_id)
            return await sandbox.fork(count, kind=kind, labels=pairs(label, "--label"), timeout=timeout, on_client_loss="keep")

    return _show(settings, run(work()))


def _show(settings: Settings, made: Restored) -> int:
    failed = made.failed
    if settings.json:
        emit(
            {
                "checkpoint": made.checkpoint.id,
                "sandboxes": [each.id for each in made],
                "failed": [{"index": index, "error": error} for index, error in failed],
            }
        )
    else:
        for sandbox in made:
            click.echo(sandbox.id)
    for index, error in failed:
        click.echo(f"dsec: {index}: {error}", err=True)
    return outcome.FAILED if failed else 0


@click.command("tree")
@click.option("--drop", multiple=True, metavar="CHECKPOINT", help="Let go of this checkpoint; it goes when nothing stands on it.")
@click.option("-a", "--all", "stopped", is_flag=True, help="Also sandboxes that have ended and are remembered.")
@common
def tree_command(settings: Settings, drop: tuple[str, ...], stopped: bool) -> int:
    """How states have branched: checkpoints, the sandboxes that began from each, and the checkpoints of those.

    A checkpoint in brackets is not kept: it is there as long as something below it is. Its size is what it takes alone.

    \b
    dsec tree
    dsec tree --drop CHECKPOINT
    """

    async def work() -> tuple[list[Checkpoint], list[SandboxInfo], list[str]]:
        async with settings.connect() as client:
            wrong = [f"{each.id}: {each.error}" for each in await client.drop_checkpoints(drop) if each.error is not None]
            return await client.checkpoints(), await client.list(stopped=stopped), wrong

    checkpoints, sandboxes, wrong = run(work())
    if settings.json:
        emit({"checkpoints": checkpoints, "sandboxes": [info for info in sandboxes if info.checkpoint]})
    elif not drop:
        for line in draw(checkpoints, sandboxes):
            click.echo(line)
    for each in wrong:
        click.echo(f"dsec: {each}", err=True)
    return outcome.FAILED if wrong else 0


def draw(checkpoints: Sequence[Checkpoint], sandboxes: Sequence[SandboxInfo]) -> list[str]:
    """The tree as lines. A root is a checkpoint of a sandbox that began from none, or whose own beginning is not known any more."""
    known = {each.id for each in checkpoints}
    living = {info.id for info in sandboxes}
    children: dict[str, list[tuple[str, str]]] = {}
    roots = []
    for each in checkpoints:
        name = f' "{each.name}"' if each.name else ""
        size = size_text(each.size + each.processes)
        line = f"{each.id if each.kept else f'[{each.id}]'}{name} {each.kind} {size} {age(each.created_ts)}".rstrip()
        if each.parent not in known:
            roots.append((each.id, line))
        else:
            children.setdefault(each.sandbox if each.sandbox in living else each.parent, []).append((each.id, line))
    for info in sandboxes:
        if info.checkpoint in known:
            children.setdefault(info.checkpoint, []).append((info.id, f"{info.id} {info.state}"))
    lines: list[str] = []
    todo = [(key, line, "", "") for key, line in reversed(roots)]
    while todo:
        key, line, lead, below = todo.pop()
        lines.append(lead + line)
        rows = sorted(children.get(key, ()))
        last = len(rows) - 1
        todo += reversed(
            [(*row, below + ("└─ " if at == last else "├─ "), below + ("   " if at == last else "│  ")) for at, row in enumerate(rows)]
        )
    return lines
