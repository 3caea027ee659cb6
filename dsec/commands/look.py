"""Commands that look at what runs, and small changes to it: ops, logs, top, wait, label, prune."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING

import click

from dsec.commands import stdio
from dsec.commands.common import Settings, common, emit, pairs, run, size_text, table
from dsec.commands.ids import SANDBOX
from dsec.commands.many import label_text

if TYPE_CHECKING:
    from dsec.model import Command, Exit, OpStatus, SandboxInfo
    from libdsec import Client, ItemOutcome

AT_ONCE = 64  # sandboxes asked at one time by top


@click.command("ops")
@click.argument("sandbox_id", metavar="ID", type=SANDBOX)
@common
def ops_command(settings: Settings, sandbox_id: str) -> None:
    """What runs in a sandbox and what has ended there lately: commands, terminals, sessions.

    \b
    dsec ops ID
    dsec logs ID OP -f        its output
    """

    async def work() -> list[OpStatus]:
        async with settings.connect() as client:
            return await (await client.attach(sandbox_id)).ops()

    found = run(work())
    if settings.json:
        emit(found)
        return
    rows = [
        (op.op, op.kind or "command", op_state(op), f"{op.duration_ms / 1000:.1f}s", size_text(op.stdout.total), size_text(op.stderr.total))
        for op in found
    ]
    table(["OP", "KIND", "STATE", "TIME", "STDOUT", "STDERR"], rows)


def op_state(op: OpStatus) -> str:
    if op.running:
        return "running"
    how = f"signal {op.signal}" if op.signal else f"exit {op.exit_code}"
    return f"{how} (timed out)" if op.timed_out else f"{how} (out of memory)" if op.oom_killed else how


@click.command("logs")
@click.argument("sandbox_id", metavar="ID", type=SANDBOX)
@click.argument("op", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on with what it writes.")
@click.option("--stdout", "stdout", default=0, metavar="OFFSET", help="Begin at this byte of its stdout.")
@click.option("--stderr", "stderr", default=0, metavar="OFFSET", help="Begin at this byte of its stderr.")
@common
def logs_command(settings: Settings, sandbox_id: str, op: str | None, follow: bool, stdout: int, stderr: int) -> None:
    """The story of one sandbox's life, as its node tells it; with OP what that operation has written, as far as it is kept.

    \b
    dsec logs ID
    dsec logs ID OP -f
    dsec logs ID OP --stdout 65536
    """

    async def story(client: Client) -> None:
        from dsec.bus.messages import Empty, LogReply
        from dsec.model import SandboxId

        lines = (await client._request(SandboxId.parse(sandbox_id), "log", Empty(), LogReply)).lines
        if settings.json:
            emit(lines)
        else:
            for line in lines:
                click.echo(line)

    async def output(client: Client, op: str) -> None:
        from dsec.errors import NotFound

        sandbox = await client.attach(sandbox_id)
        status = next((item for item in await sandbox.ops() if item.op == op), None)
        if status is None:
            raise NotFound("no such operation", field="op", value=op, fix=f"see `dsec ops {sandbox_id}`")
        left = [status.stdout.total - stdout, status.stderr.total - stderr]
        if not follow and max(left) <= 0:
            return
        async with sandbox.process(op, stdout=stdout, stderr=stderr, view=True).detach() as process:
            async for event in process:
                stream = 0 if event.stream == "stdout" else 1
                if settings.json:
                    emit({"stream": event.stream, "offset": event.offset, "gap": event.gap, "data": event.data})
                else:
                    if event.gap:
                        sys.stderr.write(f"dsec: {event.gap} bytes of {event.stream} are not kept\n")
                    await asyncio.to_thread(stdio.write_all, stream + 1, event.data)
                left[stream] -= event.gap + len(event.data)
                if not follow and max(left) <= 0:
                    return

    async def work() -> None:
        async with settings.connect() as client:
            await (story(client) if op is None else output(client, op))

    run(work())


@click.command("log")
@click.argument("sandbox_id", metavar="ID", type=SANDBOX)
@click.option("--after", default=0, metavar="SEQ", help="Only behind this number.")
@common
def log_command(settings: Settings, sandbox_id: str, after: int) -> None:
    """The commands that were run in a sandbox, by number, with the key of those whose result is kept (exec --step).

    \b
    dsec log ID
    dsec log ID --after 40 --json | jq -r '.[].step'
    """

    async def work() -> list[Command]:
        from dsec.model import SandboxId
        from libdsec import Sandbox

        async with settings.connect() as client:
            return await Sandbox(client, SandboxId.parse(sandbox_id)).commands(after)

    found = run(work())
    if settings.json:
        emit(found)
        return
    rows = [
        (str(item.seq), time.strftime("%H:%M:%S", time.localtime(item.started_ts)), item.step, command_state(item), one_line(item.argv))
        for item in found
    ]
    table(["SEQ", "TIME", "STEP", "STATE", "COMMAND"], rows)


def command_state(command: Command) -> str:
    if not command.ended_ts:
        return "begun"
    how = f"signal {command.signal}" if command.signal else f"exit {command.exit_code}"
    return f"{how} (timed out)" if command.timed_out else f"{how} (out of memory)" if command.oom_killed else how


def one_line(argv: tuple[str, ...]) -> str:
    """A command as a person reads it, cut."""
    words = argv[2:] if argv[:2] == ("/bin/sh", "-c") else argv
    text = " ".join(" ".join(words).split())
    return text if len(text) <= 80 else f"{text[:79]}…"


@click.command("top")
@click.option("-l", "--label", multiple=True, metavar="KEY=VALUE", help="Only with this label.")
@click.option("-n", "--interval", default=2.0, show_default=True, help="Seconds between looks.")
@click.option("--once/--watch", default=None, help="One table, or one after another. [default: --watch on a terminal, else --once]")
@common
def top_command(settings: Settings, label: tuple[str, ...], interval: float, once: bool | None) -> None:
    """What the running sandboxes use, the busiest first.

    \b
    dsec top
    dsec top --json | jq
    dsec top --watch -n 60 >> top.log
    """
    one_look = not sys.stdout.isatty() if once is None else once

    async def look(client: Client) -> list[SandboxInfo]:
        from dsec.bus.messages import Empty, InfoReply
        from dsec.errors import DsecError
        from dsec.model import SandboxId

        gate = asyncio.Semaphore(AT_ONCE)

        async def one(info: SandboxInfo) -> SandboxInfo:
            async with gate:
                try:
                    return (await client._request(SandboxId.parse(info.id), "info", Empty(), InfoReply, timeout=5.0)).info
                except DsecError:  # it has ended meanwhile
                    return info

        rows = await client.list(pairs(label, "--label"), states=("running",))
        return list(await asyncio.gather(*(one(info) for info in rows)))

    async def work() -> None:
        before: dict[str, int] = {}
        last = 0.0
        async with settings.connect() as client:
            while True:
                began = time.monotonic()
                rows = await look(client)
                shares = {
                    info.id: (info.usage.cpu_ms - before[info.id]) / 10 / (began - last)
                    for info in rows
                    if info.usage and info.id in before
                }
                before, last = {info.id: info.usage.cpu_ms for info in rows if info.usage}, began
                show_top(settings, rows, shares, clear=not one_look)
                if one_look:
                    return
                sys.stdout.flush()  # a pipe is to have each table as it comes
                await asyncio.sleep(max(0.1, interval))

    run(work())


def show_top(settings: Settings, rows: list[SandboxInfo], shares: dict[str, float], *, clear: bool) -> None:
    rows = sorted(rows, key=lambda info: (-shares.get(info.id, 0.0), -(info.usage.memory if info.usage else 0)))
    if settings.json:
        emit(rows)
        return
    if clear and sys.stdout.isatty():
        sys.stdout.write("\x1b[H\x1b[2J")
    cells = []
    for info in rows:
        usage, limits = info.usage, info.resources
        if usage is None:
            continue
        share = f"{shares[info.id]:.0f}%" if info.id in shares else ""
        memory = f"{size_text(usage.memory)}/{size_text(limits.memory)}"
        cells.append(
            (info.id, info.image, share, f"{usage.cpu_ms / 1000:.1f}s", memory, f"{usage.pids}/{limits.pids}", label_text(info.labels))
        )
    table(["ID", "IMAGE", "CPU", "TIME", "MEMORY", "PIDS", "LABELS"], cells)


@click.command("wait")
@click.argument("ids", nargs=-1, required=True, metavar="ID...", type=SANDBOX)
@click.option("--timeout", default=None, type=float, help="Seconds to wait at most.")
@common
def wait_command(settings: Settings, ids: tuple[str, ...], timeout: float | None) -> None:
    """Wait until sandboxes have ended; prints how each did.

    \b
    dsec wait ID && echo over
    dsec wait --timeout 60 ID ID
    """

    async def work() -> list[Exit]:
        async with settings.connect() as client:

            async def one(name: str) -> Exit:
                from dsec.model import SandboxId
                from libdsec import Sandbox

                return await Sandbox(client, SandboxId.parse(name)).wait(timeout)

            return list(await asyncio.gather(*(one(name) for name in ids)))

    ends = run(work())
    if settings.json:
        emit([{"id": name, "exit": end} for name, end in zip(ids, ends, strict=True)])
        return
    for name, end in zip(ids, ends, strict=True):
        code = "" if end.exit_code is None else f" (exit code {end.exit_code})"
        click.echo(f"{name} {end.reason}{code}: {end.detail}".rstrip(": "))


@click.command("label")
@click.argument("sandbox_id", metavar="ID", type=SANDBOX)
@click.argument("changes", nargs=-1, required=True, metavar="KEY=VALUE|KEY-...")
@common
def label_command(settings: Settings, sandbox_id: str, changes: tuple[str, ...]) -> None:
    """Set labels of a sandbox, and take them away (KEY-).

    \b
    dsec label ID job=42 owner=me
    dsec label ID job-
    """
    gone = tuple(word[:-1] for word in changes if word.endswith("-") and "=" not in word)
    given = pairs([word for word in changes if "=" in word or not word.endswith("-")], "label")

    async def work() -> dict[str, str]:
        async with settings.connect() as client:
            return await (await client.attach(sandbox_id)).set_labels(given, remove=gone)

    labels = run(work())
    emit(labels) if settings.json else click.echo(label_text(labels))


@click.command("prune")
@click.option("-l", "--label", multiple=True, metavar="KEY=VALUE", help="Only with this label.")
@common
def prune_command(settings: Settings, label: tuple[str, ...]) -> None:
    """Forget sandboxes that have ended: how they ended is then no longer known. What runs is left alone.

    Without it a node forgets them by itself after `edge.stopped_retention_ms` (an hour).
    """

    async def work() -> list[ItemOutcome]:
        async with settings.connect() as client:
            return await client.prune(pairs(label, "--label"))

    results = run(work())
    if settings.json:
        emit(results)
        return
    for result in results:
        click.echo(result.id)
