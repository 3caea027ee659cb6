"""`dsec …`: parses and prints. What a user does goes through libdsec, what a node does is imported when it is asked for.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not found or gone, 4 busy, unavailable or too late, 130 interrupted; `run` and `exec`
give the command's own, 125 when dsec failed, 126 when the command cannot be run and 127 when there is none, as Docker does.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from dsec import __version__

# name -> (module below dsec.commands, one line). The lines are here so that `dsec --help` imports no command.
COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("node", "Run a whole cluster on this machine until stopped."),
    "serve": ("node", "Run one actor: scheduler, watcher or edge."),
    "doctor": ("node", "What this machine can do, and what it lacks."),
    "run": ("run", "Run a command in a new sandbox; its exit code is ours."),
    "create": ("run", "Make a sandbox that stays; prints its id."),
    "burst": ("run", "Run a command in many sandboxes at once."),
    "exec": ("run", "Run a command in a sandbox; its exit code is ours."),
    "shell": ("terminal", "A terminal in a sandbox, as with ssh."),
    "attach": ("terminal", "Take up a command that runs in a sandbox."),
    "cp": ("files", "Copy files into or out of a sandbox."),
    "port-forward": ("forward", "Local ports whose connections end inside a sandbox."),
    "ls": ("many", "List sandboxes."),
    "info": ("many", "Everything about one sandbox."),
    "stop": ("many", "End sandboxes."),
    "pause": ("many", "Freeze sandboxes."),
    "resume": ("many", "Thaw sandboxes."),
    "checkpoint": ("checkpoint", "Keep a sandbox's files as a state to begin from."),
    "restore": ("checkpoint", "Sandboxes that begin from a checkpoint."),
    "fork": ("checkpoint", "Sandboxes that begin as another one is now."),
    "tree": ("checkpoint", "How states have branched; drop checkpoints."),
    "events": ("many", "What happens, as it happens."),
    "logs": ("look", "The story of one sandbox's life, or an operation's output."),
    "log": ("look", "The commands that were run in a sandbox, by number."),
    "ops": ("look", "What runs in a sandbox."),
    "top": ("look", "What the running sandboxes use, live."),
    "wait": ("look", "Wait until sandboxes have ended."),
    "label": ("look", "Change a sandbox's labels."),
    "prune": ("look", "Forget sandboxes that have ended."),
    "inspect": ("node", "What would be made of a spec on this node."),
    "layer": ("layer", "Layers of this node: make, import, list, remove."),
    "node": ("many", "Nodes of the cluster: list, drain."),
    "bus": ("bus", "Speak to the bus directly: req, sub."),
    "decode": ("bus", "Show a msgpack payload as JSON."),
    "version": ("bus", "Versions of DSec and of what it stands on."),
    "completion": ("bus", "Print a completion script for a shell."),
}

OF_OTHERS = {  # what Docker and others call it
    "ps": "ls",
    "list": "ls",
    "rm": "stop",
    "kill": "stop",
    "ssh": "shell",
    "connect": "shell",
    "start": "create",
    "unpause": "resume",
    "stats": "top",
    "images": "layer list",
    "build": "layer build",
    "pull": "layer pull",
}


class Lazy(click.Group):
    """A group whose commands are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module = importlib.import_module(f"dsec.commands.{entry[0]}")
        command: click.Command = getattr(module, f"{cmd_name.replace('-', '_')}_command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            import difflib

            ours = OF_OTHERS.get(args[0]) if args else None
            near = [ours] if ours else difflib.get_close_matches(args[0], COMMANDS, n=1) if args else []
            hint = f"; did you mean {near[0]}?" if near else ""
            raise click.UsageError(f"no such command: {args[0]}{hint}", ctx) from None


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "DSEC"})
@click.option("--url", default=None, metavar="NATS", help="NATS server(s). [env: DSEC_URL; default: nats://127.0.0.1:4222]")
@click.option("--project", default=None, metavar="PATH", help="Project, such as acme/rl. [env: DSEC_PROJECT; default: default]")
@click.option("--principal", default=None, metavar="NAME", help="Who asks. [env: DSEC_PRINCIPAL; default: local]")
@click.option("--unit", default=None, metavar="NAME", help="Scale unit. [env: DSEC_UNIT; default: main]")
@click.option("--json", "as_json", is_flag=True, help="JSON on standard output and nothing else there.")
@click.option("-v", "--verbose", is_flag=True, help="Log to standard error.")
@click.version_option(__version__, "--version", message="%(prog)s %(version)s")
@click.pass_context
def dsec(ctx: click.Context, /, **options: Any) -> None:
    """Sandboxes for agents, over NATS. Start a cluster here with `dsec up`, then `dsec run IMAGE -- CMD`."""
    ctx.obj = dict(options)


def main() -> None:
    """The program. Never shows a traceback for what a user or a cluster can do wrong."""
    sys.exit(invoke(sys.argv[1:]))


def invoke(arguments: list[str]) -> int:
    """Run with these arguments; the exit code."""
    from dsec.commands import outcome

    try:
        result = dsec.main(arguments, prog_name="dsec", standalone_mode=False)
        code = result if isinstance(result, int) else 0
        sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 - here errors become words; unknown ones are raised again
        return outcome.report(error, arguments)
    return code


if __name__ == "__main__":
    main()
