"""`dsec cp`."""

from __future__ import annotations

import asyncio
import os
import posixpath
import re
import sys
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import click

from dsec.commands.common import Progress, Settings, common, emit, run

if TYPE_CHECKING:
    from libdsec import Sandbox
    from libdsec.files import Files

_REMOTE = re.compile(r"([a-z0-9-]+-[0-9a-z]{26}):(.*)", re.DOTALL)
PIECE = 256 * 1024


def split(word: str) -> tuple[str, str]:
    """(sandbox id, path); the id is "" for a local path."""
    match = _REMOTE.fullmatch(word)
    return (match[1], match[2] or "/") if match else ("", word)


@click.command("cp")
@click.argument("sources", metavar="SRC…", nargs=-1, required=True)
@click.argument("target", metavar="DST")
@click.option("-a", "--archive", is_flag=True, help="Owners, set-id bits and file capabilities too, where the receiver may set them.")
@click.option("-u", "--user", default="", metavar="USER", help="Whose rights are used inside. [default: the sandbox's user]")
@common
def cp_command(settings: Settings, sources: tuple[str, ...], target: str, archive: bool, user: str) -> None:
    """Copy files and directories. One side is ID:PATH, the other a local path.

    \b
    dsec cp ./src n1-01k…:/work            dsec cp n1-01k…:/work/report.xml .
    dsec cp a.py b.py n1-01k…:/work/       dsec cp 'n1-01k…:/work/*.xml' reports/
    tar c src | dsec cp - n1-01k…:/work    dsec cp n1-01k…:/work - | tar t
    As with `docker cp`, a DST that is a directory gets SRC into it, and SRC/. means what is in SRC. `-` is a tar on standard
    input or output. Links stay links; nothing is written outside of DST.
    """
    there = split(target)
    here = [split(source) for source in sources]
    ids = {sandbox for sandbox, _ in here}
    if len(ids) != 1 or bool(there[0]) == bool(next(iter(ids))):
        raise click.UsageError("one of SRC and DST must be ID:PATH, and only one")
    if "-" in [path for sandbox, path in [*here, there] if not sandbox] and len(sources) > 1 and there[0]:
        raise click.UsageError("`-` is the only SRC")

    async def work() -> int:
        async with settings.connect() as client:
            sandbox = await client.attach(there[0] or here[0][0])
            files = sandbox.files.as_user(user) if user else sandbox.files
            if there[0]:
                return await _upload(settings, files, [path for _, path in here], there[1], archive)
            return await _download(settings, sandbox, files, [path for _, path in here], target, archive)

    copied = run(work())
    if settings.json and target != "-":
        emit({"source": sources[0] if len(sources) == 1 else list(sources), "target": target, "bytes": copied})


async def _upload(settings: Settings, files: Files, sources: list[str], path: str, archive: bool) -> int:
    from libdsec import NotFound

    if sources == ["-"]:
        return (await files.upload_tar(_stdin(), path, owners=True)).bytes
    try:
        into = path.endswith("/") or (await files.stat(path, follow=True)).kind == "dir"
    except NotFound:
        into = path.endswith("/")
    if len(sources) > 1 and not into:
        raise click.UsageError(f"{path} is not a directory: several SRC need one (end it with / to make it)")
    copied = 0
    for source in sources:
        inside = posixpath.join(path, os.path.basename(os.path.abspath(source))) if into and not _content_only(source) else path
        with Progress(os.path.basename(source), None, bytes_=True, enabled=not settings.json) as bar:
            copied += await files.upload(source, inside, owners=archive, progress=_counting(bar))
    return copied


async def _download(settings: Settings, sandbox: Sandbox, files: Files, patterns: list[str], local: str, archive: bool) -> int:
    from libdsec import NotFound

    paths: list[str] = []
    for pattern in patterns:
        found = await files.glob(pattern) if any(sign in pattern for sign in "*?[") else [pattern]
        if not found:
            raise NotFound(
                "nothing matches", field="path", value=pattern, sandbox=sandbox.id, fix="see what is there: `dsec exec ID -- ls`"
            )
        paths += found
    if local == "-":
        return await _stdout(files.download_tar(*paths))
    into = os.path.isdir(local) or local.endswith("/")
    if len(paths) > 1 and not into:
        raise click.UsageError(f"{local} is not a directory: several files need one (end it with / to make it)")
    copied = 0
    for path in paths:
        name = posixpath.basename(path.rstrip("/")) or sandbox.id
        outside = os.path.join(local, name) if into and not _content_only(path) else local
        with Progress(name, None, bytes_=True, enabled=not settings.json) as bar:
            if into:
                await asyncio.to_thread(os.makedirs, local, exist_ok=True)
            copied += await files.download(path, outside, owners=archive, progress=_counting(bar))
    return copied


def _counting(bar: Progress) -> Callable[[int, int], None]:
    return lambda done, total: bar(done, total or None)


def _content_only(path: str) -> bool:
    return path == "." or path.endswith("/.")


async def _stdin() -> AsyncIterator[bytes]:
    while data := await asyncio.to_thread(os.read, 0, PIECE):
        yield data


async def _stdout(pieces: AsyncIterator[bytes]) -> int:
    if sys.stdout.isatty():
        raise click.UsageError("a tar is not written to a terminal")
    written = 0
    async for piece in pieces:
        await asyncio.to_thread(sys.stdout.buffer.write, piece)
        written += len(piece)
    await asyncio.to_thread(sys.stdout.buffer.flush)
    return written
