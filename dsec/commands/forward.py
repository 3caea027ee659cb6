"""`dsec port-forward`."""

from __future__ import annotations

import contextlib

import click

from dsec.commands.common import Settings, common, emit, run


def parse(word: str) -> tuple[int, int | str]:
    """``[LOCAL:]REMOTE``: (local port, 0 = a free one; port or absolute path inside). REMOTE alone is both; a path takes a free one."""
    local, colon, remote = word.partition(":")
    if not colon:
        local, remote = "" if word.startswith("/") else word, word
    try:
        port = int(local) if local else 0
        inside: int | str = remote if remote.startswith("/") else int(remote)
    except ValueError:
        raise click.UsageError(f"{word!r} is not [LOCAL:]REMOTE, ports or (REMOTE) the path of a Unix socket") from None
    if not 0 <= port < 65_536 or (isinstance(inside, int) and not 1 <= inside < 65_536):
        raise click.UsageError(f"{word!r}: ports are 1 to 65535")
    return port, inside


@click.command("port-forward")
@click.argument("sandbox_id", metavar="ID")
@click.argument("ports", metavar="[LOCAL:]REMOTE…", nargs=-1, required=True)
@click.option("--address", default="127.0.0.1", show_default=True, metavar="HOST", help="Where to listen on this machine.")
@common
def port_forward_command(settings: Settings, sandbox_id: str, ports: tuple[str, ...], address: str) -> None:
    """Local ports whose connections end inside a sandbox, until Ctrl+C or the sandbox's end.

    \b
    dsec port-forward n1-01k… 8000            http://127.0.0.1:8000 is port 8000 inside
    dsec port-forward n1-01k… 9000:80 :5432   9000 is 80, and a free port is 5432
    dsec port-forward n1-01k… 2375:/run/docker.sock
    It reaches what listens on the sandbox's loopback or on all its addresses; its network may be closed (the default).
    """
    wanted = [parse(word) for word in ports]

    async def work() -> None:
        async with settings.connect() as client, contextlib.AsyncExitStack() as stack:
            sandbox = await client.attach(sandbox_id)
            for local, inside in wanted:
                bound = await stack.enter_async_context(sandbox.expose(inside, local, host=address))
                if settings.json:
                    emit({"host": bound.host, "port": bound.port, "remote": inside, "url": bound.url})
                else:
                    click.echo(f"{bound.host}:{bound.port} -> {sandbox_id}:{inside}")
            ended = await sandbox.wait()
            click.echo(f"the sandbox has ended ({ended.reason})", err=True)
        raise SystemExit(3)

    run(work())
