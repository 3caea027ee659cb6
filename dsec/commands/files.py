"""`dsec cp`."""

from __future__ import annotations

import os
import posixpath
import re
from typing import TYPE_CHECKING

import click

from dsec.commands.common import Progress, Settings, common, emit, run

if TYPE_CHECKING:
    from libdsec import Client

_REMOTE = re.compile(r"([a-z0-9-]+-[0-9a-z]{26}):(.*)", re.DOTALL)


def split(word: str) -> tuple[str, str]:
    """(sandbox id, path); the id is "" for a local path."""
    match = _REMOTE.fullmatch(word)
    return (match[1], match[2] or "/") if match else ("", word)


@click.command("cp")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@common
def cp_command(settings: Settings, source: str, target: str) -> None:
    """Copy a file or a directory. One side is ID:PATH, the other a local path.

    \b
    dsec cp ./src n1-01k…:/work        dsec cp n1-01k…:/work/report.xml .
    As with `docker cp`, a DST that is a directory gets SRC into it.
    """
    (here_id, here), (there_id, there) = split(source), split(target)
    if bool(here_id) == bool(there_id):
        raise click.UsageError("one of SRC and DST must be ID:PATH, and only one")

    async def work() -> int:
        async with settings.connect() as client:
            if there_id:
                return await upload(settings, client, here, there_id, there)
            return await download(settings, client, here_id, here, there)

    copied = run(work())
    if settings.json:
        emit({"source": source, "target": target, "bytes": copied})


async def upload(settings: Settings, client: Client, local: str, sandbox_id: str, path: str) -> int:
    from libdsec import NotFound

    sandbox = await client.attach(sandbox_id)
    try:
        into = path.endswith("/") or (await sandbox.files.stat(path, follow=True)).kind == "dir"
    except NotFound:
        into = path.endswith("/")
    if into:
        path = posixpath.join(path, os.path.basename(os.path.abspath(local)))
    with Progress(os.path.basename(local), None, bytes_=True, enabled=not settings.json) as bar:
        return await sandbox.files.upload(local, path, progress=bar)


async def download(settings: Settings, client: Client, sandbox_id: str, path: str, local: str) -> int:
    sandbox = await client.attach(sandbox_id)
    if os.path.isdir(local) or local.endswith("/"):
        local = os.path.join(local, posixpath.basename(path.rstrip("/")) or sandbox_id)
    with Progress(posixpath.basename(path), None, bytes_=True, enabled=not settings.json) as bar:
        return await sandbox.files.download(path, local, progress=bar)
