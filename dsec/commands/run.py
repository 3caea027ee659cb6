"""Commands that run commands: run, create, burst, exec."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from dsec.commands import outcome, stdio
from dsec.commands.common import Progress, Settings, common, emit, pairs, run, table
from dsec.commands.ids import SANDBOX

if TYPE_CHECKING:
    from libdsec import ExecResult, Sandbox, SandboxSpec

COMMAND = {"allow_interspersed_args": False}


class Runner(click.Command):
    """``IMAGE [OPTIONS] -- COMMAND`` beside Docker's ``[OPTIONS] IMAGE COMMAND``: options may stand on both sides of the image as long as
    ``--`` follows or no command does; else everything after the image is the command's own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        unread: click.UsageError | None = None
        try:
            moved = self._options_first(ctx, args[:at])
        except click.UsageError as error:
            moved, unread = None, error
        unread = unread or click.UsageError("options stand before IMAGE or ID, or -- after them: what follows is the command", ctx)
        try:
            left = super().parse_args(ctx, args if moved is None else [*moved, *args[at:]])
        except click.MissingParameter as error:
            raise (unread if error.param and set(error.param.opts) & set(args[:at]) else error) from None
        command = ctx.params.get("command") or ("",)
        if command[0].startswith("-") and command[0] != "--":  # an option that was not read as one is no program's name
            raise unread
        return left

    def _options_first(self, ctx: click.Context, head: list[str]) -> list[str] | None:
        """``head`` with its one argument at the end; None when it holds more than one: then the ``--`` belongs to the command.

        Raises UsageError for what cannot be read as options.
        """
        options = [param for param in self.params if isinstance(param, click.Option)]
        parser = click.Command(self.name, params=list(options)).make_parser(ctx)
        parser.allow_interspersed_args = True
        _, words, _ = parser.parse_args(list(head))
        if len(words) != 1:
            return None
        at = len(head) - 1 - head[::-1].index(words[0])
        if words[0] in head[:at]:  # also the value of an option: leave it to the plain way
            return None
        return [*head[:at], *head[at + 1 :], words[0]]


def spec_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a sandbox, named as `docker run` names its own where both have them."""
    options = [
        click.option("-e", "--env", multiple=True, metavar="KEY[=VALUE]", help="Variable; a bare KEY is taken from here."),
        click.option("-w", "--workdir", default=None, help="Working directory."),
        click.option("-u", "--user", default=None, metavar="USER[:GROUP]", help="User name or id."),
        click.option("-m", "--memory", default="512MiB", show_default=True, help="Memory limit."),
        click.option("--cpus", default=1.0, show_default=True, help="Share of cores."),
        click.option("--disk", default="1GiB", show_default=True, help="Limit of what it writes."),
        click.option(
            "--disk-mode",
            type=click.Choice(["auto", "quota", "btrfs", "tmpfs", "loop", "dir"]),
            default="auto",
            show_default=True,
            help="What holds it: tmpfs shares the memory limit; quota, btrfs and loop are apart from it; dir has no limit.",
        ),
        click.option("--pids-limit", "--pids", "pids", default=256, show_default=True, help="Processes at most."),
        click.option("--nofile", default=0, help="Open files of one process at most."),
        click.option("--fsize", default="0", help="Size of one file at most."),
        click.option("-l", "--label", multiple=True, metavar="KEY=VALUE", help="Label."),
        click.option("--workspace", multiple=True, metavar="LAYER", help="Layer above the image."),
        click.option("--toolkit", multiple=True, metavar="LAYER", help="Layer above the workspaces."),
        click.option("--backend", default="container", show_default=True),
        click.option("--network", multiple=True, metavar="none|open|RULE", help="Network; none unless given."),
        click.option("--hostname", default=""),
        click.option("--qos", type=click.Choice(["be", "ls"]), default="be", show_default=True, help="CPU class: be gets what ls leaves."),
        click.option("--idle-timeout", default=1800.0, show_default=True, help="Seconds unused until --on-idle; 0 = never."),
        click.option("--on-idle", type=click.Choice(["pause", "stop"]), default="pause", show_default=True),
        click.option("--ttl", default=None, type=float, help="Seconds of life."),
        click.option("--worker", is_flag=True, help="It may make and drive others, which end with it (docs/client.md)."),
        click.option("--best-effort", is_flag=True, help="Accept a node that cannot enforce all of it."),
        click.option("--ready-timeout", default=120.0, show_default=True, help="Seconds until it must be ready."),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def make_spec(image: str, given: dict[str, Any], **more: Any) -> SandboxSpec:
    import libdsec

    network = given["network"]
    return libdsec.spec(
        image,
        env=pairs(given["env"], "-e", lookup=dict(os.environ)),
        workdir=given["workdir"],
        user=given["user"],
        memory=given["memory"],
        cpus=given["cpus"],
        disk=given["disk"],
        disk_mode=given["disk_mode"],
        pids=given["pids"],
        nofile=given["nofile"],
        fsize=given["fsize"],
        labels=pairs(given["label"], "--label"),
        workspace=given["workspace"],
        toolkits=given["toolkit"],
        backend=given["backend"],
        network=(network[0] if network else "none") if len(network) < 2 and network[:1] in ((), ("none",), ("open",)) else network,
        hostname=given["hostname"],
        qos=given["qos"],
        idle_timeout=given["idle_timeout"],
        on_idle=given["on_idle"],
        ttl=given["ttl"],
        best_effort=given["best_effort"],
        worker=given["worker"],
        **more,
    )


def failure(error: BaseException) -> int:
    """The exit code of `run` and `exec` when dsec itself failed, as Docker has it."""
    from dsec.errors import Denied, NotFound

    if isinstance(error, NotFound) and error.field in ("argv", "cmd", "command"):
        return outcome.NO_COMMAND
    if isinstance(error, Denied) and error.field in ("argv", "cmd", "command"):
        return outcome.CANNOT
    return outcome.OWN


def own_failures(work: Callable[[], int], arguments_json: bool) -> int:
    from dsec.errors import DsecError

    try:
        return work()
    except DsecError as error:
        outcome.report(error, ["--json"] if arguments_json else [])
        return failure(error)


def result_map(sandbox: str, result: ExecResult) -> dict[str, Any]:
    """An ExecResult as JSON: text decoded with replacement; what was cut is told."""
    return {
        "sandbox": sandbox,
        "exit_code": result.exit_code,
        "stdout": result.stdout.text,
        "stderr": result.stderr.text,
        "duration": round(result.duration, 6),
        "truncated": result.truncated,
        "timed_out": result.timed_out,
        "oom_killed": result.oom_killed,
        "signal": result.signal,
    }


async def terminal(
    sandbox: Sandbox,
    argv: tuple[str, ...],
    *,
    env: dict[str, str] | None = None,
    workdir: str | None = None,
    user: str | None = None,
    timeout: float | None = None,
) -> int:
    """Run it on a terminal that is ours; its exit code."""
    from dsec.commands.terminal import need_terminal, on_terminal, size

    need_terminal()
    rows, cols = size()
    variables = {"TERM": os.environ.get("TERM", "xterm")} | (env or {})
    process = sandbox.start(list(argv), env=variables, cwd=workdir, user=user, timeout=timeout or 0, tty=True, rows=rows, cols=cols)
    return await on_terminal(sandbox, [process])


async def follow(
    settings: Settings,
    sandbox: Sandbox,
    argv: tuple[str, ...],
    *,
    env: dict[str, str] | None = None,
    workdir: str | None = None,
    user: str | None = None,
    timeout: float | None = None,
    feed: bool = True,
) -> int:
    """Run it with our own standard streams; its exit code."""
    if settings.json:
        data = await stdio.read_all() if feed else None
        result = await sandbox.exec(list(argv), env=env, cwd=workdir, user=user, stdin=data, timeout=timeout or 0)  # as without --json
        emit(result_map(sandbox.id, result))
        return result.exit_code & 0xFF
    async with sandbox.start(list(argv), env=env, cwd=workdir, user=user, stdin=feed, timeout=timeout or 0) as process:
        result = await stdio.attach(process, feed=feed)
    if result.timed_out:
        click.echo(f"dsec: the command was killed after {timeout:g} s", err=True)
    elif result.oom_killed:
        click.echo("dsec: the command was killed: the sandbox's memory limit was reached", err=True)
    return result.exit_code & 0xFF


async def own_command(sandbox: Sandbox) -> tuple[str, ...]:
    """What its image runs: ENTRYPOINT and CMD. Raises `InvalidRequest` where it says nothing; the sandbox is then ended."""
    from dsec.errors import InvalidRequest

    command = (await sandbox.info()).command
    if not command:
        await sandbox.stop()
        raise InvalidRequest("the image names no command", field="command", fix="dsec run IMAGE -- COMMAND")
    return command


@click.command("run", cls=Runner, context_settings=COMMAND)
@click.argument("image")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@spec_options
@click.option("--rm/--no-rm", "remove", default=True, help="End the sandbox with the command (default), or leave it and print its id.")
@click.option("-d", "--detach", is_flag=True, help="Start the command, print the sandbox's id and leave.")
@click.option("-i", "--interactive/--no-stdin", "feed", default=None, help="Pass standard input on. [default: if it is a pipe or a file]")
@click.option("-t", "--tty", is_flag=True, help="Give it a terminal, ours: -it as with Docker.")
@click.option("--timeout", default=None, type=float, help="Seconds until the command is killed. [default: no limit]")
@common
def run_command(
    settings: Settings,
    image: str,
    command: tuple[str, ...],
    remove: bool,
    detach: bool,
    feed: bool | None,
    tty: bool,
    timeout: float | None,
    ready_timeout: float,
    **given: Any,
) -> int:
    """Run COMMAND (else what the image runs by itself) in a new sandbox made from IMAGE, a layer's name. The exit code is the command's.

    \b
    dsec run debian-12 -- python3 -c 'print(1)'
    tar c src | dsec run debian-12 -- tar x -C /tmp
    dsec run -it debian-12 bash
    """
    given_command = strip_dashes(command)
    keep = detach or not remove

    async def work(made_of: SandboxSpec) -> int:
        async with settings.connect() as client:
            if keep:
                sandbox = await client.create(made_of, timeout=ready_timeout)
                command = given_command or await own_command(sandbox)
                if detach:
                    async with sandbox.start(list(command), stdin=False, timeout=timeout or 0) as process:
                        process.detach()
                    emit({"sandbox": sandbox.id, "op": process.op}) if settings.json else click.echo(sandbox.id)
                    return 0
                if not settings.json:
                    click.echo(sandbox.id, err=True)
                if tty:
                    return await terminal(sandbox, command, timeout=timeout)
                return await follow(settings, sandbox, command, timeout=timeout, feed=stdio.has_input() if feed is None else feed)
            async with client.sandbox(made_of, timeout=ready_timeout) as sandbox:
                command = given_command or await own_command(sandbox)
                if tty:
                    return await terminal(sandbox, command, timeout=timeout)
                return await follow(settings, sandbox, command, timeout=timeout, feed=stdio.has_input() if feed is None else feed)

    return own_failures(lambda: run(work(make_spec(image, given, on_client_loss="keep" if keep else "stop"))), settings.json)


@click.command("create")
@click.argument("image")
@spec_options
@click.option("-n", "--count", default=1, show_default=True, help="How many.")
@common
def create_command(settings: Settings, image: str, ready_timeout: float, count: int, **given: Any) -> None:
    """Make a sandbox that stays until it is stopped, and print its id.

    \b
    id=$(dsec create debian-12 -m 1GiB --label job=j1)
    """

    made_of = make_spec(image, given, on_client_loss="keep")

    async def work() -> list[Sandbox]:
        async with settings.connect() as client:
            if count == 1:
                return [await client.create(made_of, timeout=ready_timeout)]
            return await client.create_many(made_of, count, timeout=ready_timeout)

    made = run(work())
    if settings.json:
        shown = [{"id": sandbox.id, "degraded": sandbox.degraded, "layers": sandbox.layers} for sandbox in made]
        emit(shown[0] if count == 1 else shown)
        return
    for sandbox in made:
        click.echo(sandbox.id)
    for note in dict.fromkeys(note for sandbox in made for note in sandbox.degraded):  # once, however many it is true of
        click.echo(f"dsec: not enforced: {note}", err=True)


@click.command("burst", cls=Runner, context_settings=COMMAND)
@click.argument("image")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@spec_options
@click.option("-n", "--count", required=True, type=click.IntRange(1, 1_000_000), help="How many sandboxes.")
@click.option("--min-ready", default=None, type=int, help="Fewer than these are a failure. [default: all]")
@click.option("--timeout", default=600.0, show_default=True, help="Seconds for the command; 0 = no limit.")
@common
def burst_command(
    settings: Settings,
    image: str,
    command: tuple[str, ...],
    count: int,
    min_ready: int | None,
    timeout: float,
    ready_timeout: float,
    **given: Any,
) -> int:
    """Run COMMAND (`true` unless given) in COUNT sandboxes at once, each as soon as it is ready. Exit code 0 when all of them gave 0.

    \b
    dsec burst debian-12 -n 64 --min-ready 60 -- sh -c 'echo $RANDOM'
    """
    command = strip_dashes(command) or ("true",)

    made_of = make_spec(image, given)

    async def work() -> int:
        rows: list[dict[str, Any]] = []
        began = time.monotonic()
        async with settings.connect() as client, client.burst(made_of, count, min_ready, ready_timeout) as burst:
            with Progress("sandboxes", count, enabled=not settings.json) as bar:

                async def one(sandbox: Sandbox, ready: float) -> None:
                    from dsec.errors import DsecError

                    row: dict[str, Any] = {"index": burst.index(sandbox), "ready_s": round(ready, 4)}
                    try:
                        rows.append(row | result_map(sandbox.id, await sandbox.exec(list(command), timeout=timeout)))
                    except DsecError as error:
                        rows.append(row | {"sandbox": sandbox.id, "exit_code": None, "error": error})
                    bar(len(rows))

                async with asyncio.TaskGroup() as group:
                    async for sandbox in burst:
                        group.create_task(one(sandbox, time.monotonic() - began))
            failed = [{"index": index, "exit_code": None, "error": error} for index, error in burst.failed]
        rows.sort(key=lambda row: row["index"])
        show_burst(settings, rows, failed, time.monotonic() - began)
        return 0 if not failed and all(row["exit_code"] == 0 for row in rows) else 1

    return run(work())


def show_burst(settings: Settings, rows: list[dict[str, Any]], failed: list[dict[str, Any]], seconds: float) -> None:
    if settings.json:
        emit({"n": len(rows) + len(failed), "seconds": round(seconds, 3), "results": rows, "failed": failed})
        return
    outcomes: dict[tuple[str, str], int] = {}
    for row in [*rows, *failed]:
        error = row.get("error")
        code = "timed out" if row.get("timed_out") else "out of memory" if row.get("oom_killed") else str(row["exit_code"])
        # Without the sandbox's id: what failed alike counts as one row.
        last = (
            str(error).removeprefix(f"sandbox {error.sandbox}: ")
            if error is not None
            else (row["stdout"].strip() or row["stderr"].strip()).rsplit("\n", 1)[-1]
        )
        key = ("error" if error is not None else code, last[:100])
        outcomes[key] = outcomes.get(key, 0) + 1
    ranked = sorted(outcomes.items(), key=lambda item: -item[1])
    table(["COUNT", "EXIT", "LAST LINE"], [(str(count), code, last) for (code, last), count in ranked[:20]])
    click.echo(f"{len(rows)} of {len(rows) + len(failed)} ready, {seconds:.2f} s")


@click.command("exec", cls=Runner, context_settings=COMMAND)
@click.argument("sandbox_id", metavar="ID", shell_complete=SANDBOX.shell_complete)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("-e", "--env", multiple=True, metavar="KEY[=VALUE]")
@click.option("-w", "--workdir", default=None)
@click.option("-u", "--user", default=None)
@click.option("-d", "--detach", is_flag=True, help="Start it and leave; prints the operation's id.")
@click.option("-i", "--interactive/--no-stdin", "feed", default=None, help="Pass standard input on. [default: if it is a pipe or a file]")
@click.option("-t", "--tty", is_flag=True, help="Give it a terminal, ours: -it as with Docker.")
@click.option("--timeout", default=None, type=float, help="Seconds until the command is killed. [default: no limit]")
@click.option("--step", default="", metavar="KEY", help="Keep its result under this key; the same key again runs nothing.")
@common
def exec_command(
    settings: Settings,
    sandbox_id: str,
    command: tuple[str, ...],
    env: tuple[str, ...],
    workdir: str | None,
    user: str | None,
    detach: bool,
    feed: bool | None,
    tty: bool,
    timeout: float | None,
    step: str,
) -> int:
    """Run COMMAND in the sandbox ID. The exit code is the command's.

    \b
    dsec exec ID -- pytest -q
    dsec exec -it ID bash
    dsec exec --step train-7 ID -- ./train
    dsec exec -d ID -- ./server        prints the operation's id, for `dsec logs ID OP`
    """
    command = strip_dashes(command)
    if not command:
        raise click.UsageError("which command? dsec exec ID -- COMMAND")
    if step and (detach or tty or feed):
        raise click.UsageError("--step goes with none of -d, -t and -i")
    variables = pairs(env, "-e", lookup=dict(os.environ))

    async def work() -> int:
        from dsec.model import SandboxId

        SandboxId.parse(sandbox_id)
        async with settings.connect() as client:
            sandbox = await client.attach(sandbox_id)
            if step:
                result = await sandbox.exec(list(command), env=variables, cwd=workdir, user=user, timeout=timeout or 0, step=step)
                if settings.json:
                    emit(result_map(sandbox.id, result))
                else:
                    await asyncio.to_thread(stdio.write_all, 1, bytes(result.stdout))
                    await asyncio.to_thread(stdio.write_all, 2, bytes(result.stderr))
                return result.exit_code & 0xFF
            if detach:
                async with sandbox.start(
                    list(command), env=variables, cwd=workdir, user=user, stdin=False, timeout=timeout or 0
                ) as process:
                    process.detach()
                emit({"sandbox": sandbox.id, "op": process.op}) if settings.json else click.echo(process.op)
                return 0
            if tty:
                return await terminal(sandbox, command, env=variables, workdir=workdir, user=user, timeout=timeout)
            wanted = stdio.has_input() if feed is None else feed
            return await follow(settings, sandbox, command, env=variables, workdir=workdir, user=user, timeout=timeout, feed=wanted)

    return own_failures(lambda: run(work()), settings.json)


def strip_dashes(command: tuple[str, ...]) -> tuple[str, ...]:
    return command[1:] if command[:1] == ("--",) else command
