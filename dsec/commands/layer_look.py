"""`dsec layer pack|tree|diff|lineage`: make a layer of a sandbox, look into layers, and see what stands on what."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dsec.commands.common import Settings, common, emit, run, size_text, table
from dsec.commands.layer_common import open_store, stored

if TYPE_CHECKING:
    from dsec.layers.diff import Entry
    from dsec.layers.store import LayerInfo, LayerStore
    from libdsec import PackedLayer


@click.command("pack")
@click.argument("sandbox")
@click.argument("name", default="")
@click.option("--scrub", multiple=True, metavar="GLOB", help="What is left out besides /tmp, /var/tmp, /run and apt's caches.")
@click.option("--max-entries", default=1_000_000, show_default=True, help="Refuse more entries.")
@click.option("--max-bytes", default="16GiB", show_default=True, help="Refuse more bytes.")
@click.option("--timeout", default=600.0, show_default=True, help="Seconds.")
@common
def pack(settings: Settings, sandbox: str, name: str, scrub: tuple[str, ...], max_entries: int, max_bytes: str, timeout: float) -> None:
    """Make the layer NAME of all that SANDBOX changed, on its node. [default NAME: packed/ and the sandbox's ulid]"""

    async def work() -> PackedLayer:
        async with settings.connect() as client:
            handle = await client.attach(sandbox)
            return await handle.pack_diff(name, scrub=scrub, max_entries=max_entries, max_bytes=max_bytes, timeout=timeout)

    layer = run(work())
    if settings.json:
        emit(layer)
        return
    click.echo(f"{layer.name}  {layer.digest}")
    click.echo(
        f"{layer.entries} entries, {size_text(layer.size)}; {layer.scrubbed} scrubbed; it stood still for {layer.frozen_ms:.0f} ms",
        err=True,
    )


@click.command("tree")
@click.argument("name")
@stored
@common
def tree(settings: Settings, name: str, config: str | None, store: str | None) -> None:
    """Every entry of a layer. A whiteout takes a name of the layers below away, an opaque directory all of theirs that were in it."""
    found = run(_entries(open_store(config, store), name))
    if settings.json:
        emit(found)
        return
    rows = [(entry.kind, f"{entry.mode:o}", f"{entry.uid}:{entry.gid}", size_text(entry.size), _printable(entry.path)) for entry in found]
    table(["KIND", "MODE", "OWNER", "SIZE", "PATH"], rows)


@click.command("diff")
@click.argument("name")
@click.argument("other", required=False)
@stored
@common
def diff(settings: Settings, name: str, other: str | None, config: str | None, store: str | None) -> None:
    """What NAME changes in the layers that it was made on, or how OTHER differs from NAME: A added, C changed, D deleted."""
    from dsec.layers import diff as layers_diff

    async def work() -> list[tuple[str, str]]:
        opened = open_store(config, store)
        if other is not None:
            return layers_diff.compare(await _entries(opened, name), await _entries(opened, other))
        info = await opened.info(name)
        below = [await _entries(opened, parent) for parent in info.parents]
        return layers_diff.changes(await _entries(opened, name), below)

    found = run(work())
    if settings.json:
        emit([{"change": change, "path": _printable(path)} for change, path in found])
        return
    for change, path in found:
        click.echo(f"{change} {_printable(path)}")


@click.command("lineage")
@click.argument("name")
@stored
@common
def lineage(settings: Settings, name: str, config: str | None, store: str | None) -> None:
    """The layers that NAME was made on, and those that were made on it: what a new version of NAME touches."""

    async def work() -> tuple[LayerInfo, list[LayerInfo]]:
        opened = open_store(config, store)
        return await opened.info(name), list(await opened.list())

    info, known = run(work())
    by_digest = {layer.digest: layer for layer in known}
    children = [layer for layer in known if info.digest in layer.parents]
    if settings.json:
        emit({"layer": info, "parents": [by_digest.get(digest, digest) for digest in info.parents], "children": children})
        return
    click.echo(_line(info.digest, info))
    for digest in info.parents:
        click.echo("  on       " + _line(digest, by_digest.get(digest)))
    for layer in children:
        click.echo("  under    " + _line(layer.digest, layer))
    click.echo(f"{len(info.parents)} below, {len(children)} made on it")


def _line(digest: str, info: LayerInfo | None) -> str:
    if info is None:
        return f"{digest[:19]}  not in this store"
    return f"{digest[:19]}  {', '.join(info.names) or '-'}  {info.source}"


async def _entries(store: LayerStore, name: str) -> list[Entry]:
    from dsec.layers import diff as layers_diff
    from dsec.layers import tools

    path = await store.content(name)
    return await tools.in_thread(lambda: list(layers_diff.entries(str(path))))


def _printable(path: str) -> str:
    """A path as text that a terminal and JSON can show: bytes that are no UTF-8, and control characters, escaped."""
    text = path.encode(errors="surrogateescape").decode(errors="backslashreplace")
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
