"""Commands about sandboxes and nodes that exist: ls, info, stop, pause, resume, events, node."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from dsec.commands import outcome
from dsec.commands.common import Settings, age, common, emit, pairs, run, size_text, table
from dsec.commands.ids import SANDBOX

if TYPE_CHECKING:
    from dsec.bus.messages import ClusterView, EdgeInfo, Event
    from dsec.model import SandboxInfo
    from libdsec import ItemOutcome
    from libdsec.draining import DrainMode


def label_text(labels: dict[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


@click.command("ls")
@click.option("-a", "--all", "stopped", is_flag=True, help="Also those that have ended and are remembered.")
@click.option("--stuck", is_flag=True, help="Only those whose resources could not be freed.")
@click.option("-l", "--label", multiple=True, metavar="KEY=VALUE", help="Only with this label.")
@click.option("--state", multiple=True, help="Only in this state.")
@click.option("--below", is_flag=True, help="Also of the projects below this one.")
@click.option("-q", "--quiet", is_flag=True, help="Ids only.")
@common
def ls_command(
    settings: Settings, stopped: bool, stuck: bool, label: tuple[str, ...], state: tuple[str, ...], below: bool, quiet: bool
) -> None:
    """List the sandboxes of the project, oldest first.

    \b
    dsec ls -l job=j1 --state running
    dsec stop $(dsec ls -q -l job=j1)
    """

    async def work() -> list[SandboxInfo]:
        async with settings.connect() as client:
            return await client.list(pairs(label, "--label"), states=state, stopped=stopped, stuck=stuck, below=below)

    found = run(work())
    if settings.json:
        emit(found)
    elif quiet:
        for info in found:
            click.echo(info.id)
    else:
        table(
            ["ID", "IMAGE", "STATE", "AGE", "LABELS"],
            [(i.id, i.image, state_text(i), age(i.created_ts), label_text(i.labels)) for i in found],
        )


def state_text(info: SandboxInfo) -> str:
    if info.stuck:
        return f"{info.state} (stuck: {info.stuck})"
    if info.exit is not None:
        return f"{info.state} ({info.exit.reason})"
    return str(info.state)


@click.command("info")
@click.argument("sandbox_id", metavar="ID", shell_complete=SANDBOX.shell_complete)
@common
def info_command(settings: Settings, sandbox_id: str) -> None:
    """Everything about one sandbox: state, layers, limits, use; of one that has ended how it did, as long as its node remembers it.

    \b
    dsec info ID
    dsec info ID --json | jq .exit
    """

    async def work() -> SandboxInfo:
        from dsec.bus.messages import Empty, InfoReply
        from dsec.model import SandboxId

        sid = SandboxId.parse(sandbox_id)
        async with settings.connect() as client:
            return (await client._request(sid, "info", Empty(), InfoReply)).info

    info = run(work())
    if settings.json:
        emit(info)
        return
    usage, limits = info.usage, info.resources
    rows: list[tuple[str, str]] = [
        ("id", info.id),
        ("state", state_text(info)),
        ("image", info.image),
        ("layers", ", ".join(f"{layer.name} ({layer.digest[:19]})" for layer in info.layers)),
        ("backend", info.backend),
        ("project", f"{info.project} (as {info.principal})"),
        ("labels", label_text(info.labels)),
        ("created", f"{age(info.created_ts)} ago"),
        ("last used", f"{age(info.last_active_ts)} ago" if info.last_active_ts else ""),
        ("memory", f"{size_text(usage.memory) if usage else '?'} of {size_text(limits.memory)}"),
        ("cpu", f"{usage.cpu_ms / 1000:.2f} s used; share of {limits.cpus:g}" if usage else f"share of {limits.cpus:g}"),
        ("processes", f"{usage.pids if usage else '?'} of {limits.pids}"),
        ("disk", f"{size_text(usage.disk) if usage else '?'} of {size_text(limits.disk)}"),
        ("addresses", ", ".join(info.addresses)),
        ("began from", info.checkpoint),
        ("paused", paused_line(info)),
        ("not enforced", ", ".join(info.degraded)),
        ("exit", f"{info.exit.reason}: {info.exit.detail}".rstrip(": ") if info.exit else ""),
        ("ended", f"{age(info.exit.wall_ts)} ago" if info.exit and info.exit.wall_ts else ""),
    ]
    for name, value in rows:
        if value:
            click.echo(f"{name + ':':<14}{value}")


def paused_line(info: SandboxInfo) -> str:
    """What its pause gave back; nothing for one that is not paused."""
    if info.paused is None:
        return ""
    note = f" ({info.paused.note})" if info.paused.note else ""
    return f"{size_text(info.paused.released)} given back, {size_text(info.paused.swapped)} in swap{note}"


def many(verb: str, help_: str) -> click.Command:
    @click.command(verb, help=help_)
    @click.argument("ids", nargs=-1, metavar="[ID]...", shell_complete=SANDBOX.shell_complete)
    @click.option("-l", "--label", multiple=True, metavar="KEY=VALUE", help="All with this label.")
    @click.option("--all", "everything", is_flag=True, help="All of the project.")
    @click.option("--below", is_flag=True, help="Also in the projects below this one.")
    @common
    def command(settings: Settings, ids: tuple[str, ...], label: tuple[str, ...], everything: bool, below: bool) -> int:
        if not ids and not label and not everything:
            raise click.UsageError("name ids, or give --label or --all")

        async def work() -> list[ItemOutcome]:
            async with settings.connect() as client:
                chosen = pairs(label, "--label")
                if verb == "stop":
                    return await client.stop(chosen, ids=ids, everything=everything, below=below)
                method = client.pause if verb == "pause" else client.resume
                return await method(chosen, ids=ids, everything=everything, below=below, progress=progress_of(verb))

        results = run(work())
        if settings.json:
            emit([{"id": item.id, "error": item.error} | ({"paused": item.paused} if verb == "pause" else {}) for item in results])
        if not results and (label or everything):
            click.echo("dsec: no sandbox matches", err=True)
        for result in results:
            if result.error is not None:
                click.echo(f"dsec: {result.id}: {result.error.message}", err=True)
            elif not settings.json:
                click.echo(f"{result.id}{paused_text(result)}")
        return next((outcome.code_of(result.error) for result in results if result.error is not None), 0)

    return command


def paused_text(result: ItemOutcome) -> str:
    """What a pause gave back; said to people only, an id alone is easier to go on with."""
    if result.paused is None or not sys.stdout.isatty():
        return ""
    note = f" ({result.paused.note})" if result.paused.note else ""
    return f"  {size_text(result.paused.released)} given back{note}"


def progress_of(verb: str) -> Callable[[int, int], None] | None:
    """A line that counts, on a terminal, for more than a few."""
    if not sys.stderr.isatty():
        return None

    def told(done: int, total: int) -> None:
        if total > 4:
            click.echo(f"\r{verb}: {done} of {total}", err=True, nl=done == total)

    return told


stop_command = many("stop", "End sandboxes and release all that they hold. Stopping one that has ended is fine.")
pause_command = many(
    "pause",
    """Freeze sandboxes and send their memory to swap: no CPU, no reservation. Any request resumes them.

    With --json each result says what was given back; a node without swap only freezes, and says so (see `dsec doctor`).

    \b
    dsec pause --label job=j1
    dsec pause ID --json | jq .[].paused
    """,
)
resume_command = many("resume", "Let paused sandboxes go on. They come before creates where a node is full.")


@click.command("events")
@click.option("-f", "--follow", is_flag=True, help="Go on with what happens from now on.")
@click.option("--since", default=None, metavar="-10m|UNIX|all", help="Where to begin. [default: all there is; with -f: now]")
@click.option("-l", "--label", multiple=True, metavar="KEY=VALUE")
@click.option("--kind", multiple=True, help="Only events of this kind: stopped, paused, … (docs/events.md).")
@click.option("--id", "ids", multiple=True, metavar="ID", help="Only of this sandbox.")
@common
def events_command(
    settings: Settings, follow: bool, since: str | None, label: tuple[str, ...], kind: tuple[str, ...], ids: tuple[str, ...]
) -> None:
    """Events of the project; with --json one object a line.

    \b
    dsec events -f --kind stopped
    dsec events --since -10m --id ID
    """

    from dsec.bus.events import known_kinds

    known_kinds(kind)

    async def work() -> None:
        start = since if since is not None or follow else "all"
        async with settings.connect() as client:
            async for event in client.events(pairs(label, "--label"), since=start, follow=follow, kinds=kind, ids=ids):
                if settings.json:
                    emit(event)
                else:
                    click.echo(event_line(event))

    run(work())


def event_line(event: Event) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.wall_ts))
    detail = " ".join(f"{key}={value}" for key, value in event.detail.items())
    return f"{when}  {event.kind:<10} {event.sb or event.edge}  {detail}".rstrip()


@click.group("node")
def node_command() -> None:
    """Nodes of the cluster."""


@node_command.command("ls")
@common
def node_ls(settings: Settings) -> None:
    """Nodes with their load, as the Watcher sees them: SLOTS, MEMORY, CPUS and DISK are what sandboxes have reserved of what may be.

    More than the machine has may be reserved, by `edge.memory_overcommit`, `edge.cpu_overcommit` and `edge.disk_overcommit`.
    """

    async def work() -> ClusterView:
        async with settings.connect() as client:
            return await client.nodes()

    view = run(work())
    if settings.json:
        emit(view)
        return
    rows = []
    for node in sorted(view.nodes, key=lambda node: node.edge):
        load = node.load
        silent = view.ages_ms.get(node.edge, 0)
        state = "lost" if node.edge in view.lost else "draining" if node.draining else "silent" if silent > 5_000 else "up"
        rows.append(
            (
                node.edge,
                state,
                ",".join(node.backends),
                " ".join(f"{count} {name}" for name, count in sorted(node.states.items()) if count),
                f"{load.slots_total - load.slots_free}/{load.slots_total}",
                f"{size_text(load.memory_total - load.memory_free)}/{size_text(load.memory_total)}",
                f"{load.cpus_reserved:g}/{load.cpus_total:g}",
                f"{size_text(load.disk_total - load.disk_free)}/{size_text(load.disk_total)}" if load.disk_total else "",
            )
        )
    rows += [(name, "lost", "", "", "", "", "", "") for name in sorted(view.lost) if all(node.edge != name for node in view.nodes)]
    table(["NODE", "STATE", "BACKENDS", "SANDBOXES", "SLOTS", "MEMORY", "CPUS", "DISK"], rows)


@node_command.command("drain")
@click.argument("node")
@click.option("--wait", "mode", flag_value="wait", help="Return when its last sandbox has ended.")
@click.option("--stop", "mode", flag_value="stop", help="Stop its sandboxes.")
@click.option("--pause", "mode", flag_value="pause", help="Pause its sandboxes.")
@click.option("--undo", "mode", flag_value="undo", help="Take sandboxes again.")
@click.option("--timeout", type=click.FloatRange(min=0.1), default=None, metavar="SECONDS", help="Give up waiting. [default: never]")
@common
def node_drain(settings: Settings, node: str, mode: DrainMode | None, timeout: float | None) -> int:
    """Give NODE no new sandboxes. Without an option those that it has go on.

    The order outlives this command and the node's daemon. Exit code 4 when SECONDS pass first, 1 when a sandbox could not be paused; the
    node goes on draining either way. Exit code 1 also when somebody takes the order back meanwhile.
    """

    last = ""

    def told(info: EdgeInfo) -> None:
        nonlocal last
        line = ", ".join(f"{count} {state}" for state, count in sorted(info.heartbeat.states.items()) if count) or "no sandboxes"
        if mode in ("wait", "stop", "pause") and line != last:
            click.echo(f"{node}: {line}", err=True)
        last = line

    async def work() -> EdgeInfo:
        async with settings.connect() as client:
            return await client.drain(node, mode or "mark", timeout=timeout, progress=told)

    info = run(work())
    if settings.json:
        emit({"node": node, "draining": mode != "undo", "states": info.heartbeat.states, "trouble": info.trouble})
    else:
        click.echo(f"{node}: {'takes sandboxes again' if mode == 'undo' else 'takes no new sandboxes'}")
        for line in info.trouble:
            click.echo(f"{node}: not paused: {line}", err=True)
    return outcome.FAILED if info.trouble else 0
