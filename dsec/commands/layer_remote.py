"""`dsec layer push | fetch | ahead | remote …`: layers in a store that many nodes share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from dsec.commands.common import Settings, age, common, emit, run, size_text, table
from dsec.commands.layer_common import open_store, show_ref, stored, told

if TYPE_CHECKING:
    from dsec.layers.remote import RemoteStore


def remote_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --remote."""
    return click.option("--remote", default=None, metavar="URL", help="Directory, s3://… or https://… [default: layers.remote]")(function)


def configured(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --config."""
    return click.option("--config", default=None, metavar="FILE", help="Configuration file. [env: DSEC_CONFIG]")(function)


def open_remote(config: str | None, remote: str | None, *, make: bool = False) -> RemoteStore:
    """The store that is named, or the configured one. Raises `InvalidRequest` when there is none."""
    from dsec.commands.local import node_config
    from dsec.errors import InvalidRequest
    from dsec.layers.remote import RemoteStore

    url = remote or node_config(config).layers.remote
    if not url:
        raise InvalidRequest("no remote layer store is named", field="layers.remote", fix="give --remote, or set layers.remote")
    return RemoteStore(url, timeout=30.0, make=make)


@click.command("push")
@click.argument("name")
@click.option("--as", "tag", default="", metavar="NAME", help="Its name there. [default: the same]")
@remote_option
@stored
@common
def push(settings: Settings, name: str, tag: str, remote: str | None, config: str | None, store: str | None) -> None:
    """Upload a layer, and let its name mean it in the remote store."""
    from dsec.layers import fetch as made

    opened, there = open_store(config, store), open_remote(config, remote, make=True)
    ref = told(settings, lambda say: made.push(opened, there, name, tag, say))
    show_ref(settings, ref.name, ref.digest)


@click.command("fetch")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--whole", is_flag=True, help="All data now, not when it is read.")
@remote_option
@stored
@common
def fetch(settings: Settings, names: tuple[str, ...], whole: bool, remote: str | None, config: str | None, store: str | None) -> None:
    """Bring layers of the remote store to this node: their metadata, and their data when it is read."""
    from dsec.layers.fetch import NodeLayers

    async def work(say: Callable[[str], None]) -> list[dict[str, str]]:
        layers = NodeLayers(open_store(config, store), open_remote(config, remote))
        found = []
        for name in names:
            ref = await layers.fetch(name, say)
            if whole and layers.partial(ref.digest):
                await layers.pull(ref.digest, say)
            found.append({"name": ref.name, "digest": ref.digest})
        return found

    rows = told(settings, work)
    if settings.json:
        emit(rows)
    else:
        click.echo("\n".join(f"{row['name']}  {row['digest']}" for row in rows))


@click.command("ahead")
@click.argument("name")
@remote_option
@stored
@common
def ahead(settings: Settings, name: str, remote: str | None, config: str | None, store: str | None) -> None:
    """Upload the order in which this node's sandboxes first read a layer: other nodes then fetch those parts ahead."""
    from dsec.layers import fetch as made

    async def work() -> dict[str, object]:
        opened = open_store(config, store)
        ref = await opened.resolve(name)
        return {"digest": ref.digest, "chunks": await made.push_touched(opened, open_remote(config, remote), ref.digest)}

    done = run(work())
    none = "" if done["chunks"] else ": nothing was uploaded, for this node has not filled it while sandboxes read it"
    emit(done) if settings.json else click.echo(f"{done['chunks']} chunks of {str(done['digest'])[:19]}{none}")


@click.group("remote")
def remote_group() -> None:
    """The remote store itself: list, history, tag, pin, gc."""


@remote_group.command("ls")
@remote_option
@configured
@common
def ls(settings: Settings, remote: str | None, config: str | None) -> None:
    """Every layer there."""
    infos = run(open_remote(config, remote).list())
    if settings.json:
        emit(infos)
        return
    rows = [(", ".join(info.names) or "-", info.digest[:19], size_text(info.size), age(info.created_ts)) for info in infos]
    table(("NAME", "DIGEST", "SIZE", "AGE"), rows)


@remote_group.command("history")
@click.argument("name")
@remote_option
@configured
@common
def history(settings: Settings, name: str, remote: str | None, config: str | None) -> None:
    """What a name has meant there, oldest first."""
    entries = run(open_remote(config, remote).history(name))
    if settings.json:
        emit(entries)
    else:
        table(("AGE", "CHANGE", "DIGEST"), [(age(entry.ts), entry.op, entry.digest[:19] or "-") for entry in entries])


@remote_group.command("tag")
@click.argument("name")
@click.argument("target", required=False)
@click.option("--remove", is_flag=True, help="Take NAME away; the layer stays.")
@remote_option
@configured
@common
def tag(settings: Settings, name: str, target: str | None, remove: bool, remote: str | None, config: str | None) -> None:
    """Let NAME stand for TARGET (a name or a digest) there."""
    opened = open_remote(config, remote)
    if remove == (target is not None):
        raise click.UsageError("give a TARGET, or --remove")
    if target is None:
        run(opened.untag(name))
        show_ref(settings, name, "")
        return

    async def work(target: str) -> str:
        return (await opened.tag(name, (await opened.resolve(target)).digest)).digest

    show_ref(settings, name, run(work(target)))


@remote_group.command("pin")
@click.argument("name")
@click.option("--for", "who", required=True, help="Who needs it; for people, and to take the pin away.")
@click.option("--remove", is_flag=True)
@remote_option
@configured
@common
def pin(settings: Settings, name: str, who: str, remove: bool, remote: str | None, config: str | None) -> None:
    """Keep a layer there whatever its names say."""

    async def work() -> str:
        opened = open_remote(config, remote)
        digest = (await opened.resolve(name)).digest
        await (opened.unpin(digest, who) if remove else opened.pin(digest, who))
        return digest

    show_ref(settings, name, run(work()))


@remote_group.command("gc")
@remote_option
@configured
@common
def gc(settings: Settings, remote: str | None, config: str | None) -> None:
    """Remove what has no name, no pin and no descendant there, and is older than a day."""
    removed = run(open_remote(config, remote).gc())
    if settings.json:
        emit(removed)
    else:
        click.echo(f"{len(removed.digests)} layers, {size_text(removed.bytes)} freed; {len(removed.in_use)} are younger than a day")
