"""`dsec layer …`: the layer store of this node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dsec.commands import layer_build, layer_look, layer_pull, layer_remote
from dsec.commands.common import Settings, age, common, emit, pairs, run, size_text, table
from dsec.commands.layer_common import open_store, show_ref, stored, told

if TYPE_CHECKING:
    from dsec.layers.store import LayerInfo


@click.group("layer")
def layer_command() -> None:
    """Layers of this node's store: what sandboxes are composed of."""


for _command in (layer_build.build, layer_pull.pull, layer_look.pack, layer_look.tree, layer_look.diff, layer_look.lineage):
    layer_command.add_command(_command)
for _command in (layer_remote.push, layer_remote.fetch, layer_remote.ahead, layer_remote.remote_group):
    layer_command.add_command(_command)


@layer_command.command("bootstrap")
@click.argument("kind", metavar="debian|busybox|libdsec", type=click.Choice(["debian", "busybox", "tiny", "libdsec"]))
@click.option("--name", default="", help="Name of the layer. [default: debian-12 (of bookworm), busybox or libdsec]")
@click.option("--suite", default=None, help="Of Debian. [default: bookworm]")
@click.option("--package", multiple=True, help="One more package of Debian.")
@click.option("--refresh", is_flag=True, help="Make it anew even when it is there.")
@stored
@common
def bootstrap(
    settings: Settings,
    kind: str,
    name: str,
    suite: str | None,
    package: tuple[str, ...],
    refresh: bool,
    config: str | None,
    store: str | None,
) -> None:
    """Make a base layer: a small Debian (with Python, git and a user `agent`), or busybox alone (also called tiny); or libdsec, the toolkit
    of workers, with which a sandbox's Python imports the client."""
    from dsec.layers import bootstrap as made
    from dsec.layers.client import bootstrap_client

    if kind != "debian" and (suite or package):
        raise click.UsageError("--suite and --package are Debian's")
    target = open_store(config, store)
    if kind == "debian":
        packages = (*made.DEBIAN_PACKAGES, *package)
        ref = told(
            settings,
            lambda tell: made.bootstrap_debian(target, suite or "bookworm", packages=packages, name=name, refresh=refresh, progress=tell),
        )
    elif kind == "libdsec":
        ref = told(settings, lambda tell: bootstrap_client(target, name or "libdsec", refresh=refresh, progress=tell))
    else:
        ref = told(settings, lambda tell: made.bootstrap_tiny(target, name or "busybox", refresh=refresh, progress=tell))
    show_ref(settings, ref.name, ref.digest)


@layer_command.command("import")
@click.argument("source", metavar="DIR|TAR|GIT[@REV]")
@click.option("--name", default="", help="Name of the layer. [default: from SOURCE]")
@click.option("--at", default=None, metavar="PATH", help="Where it stands in the sandbox. [default: /, for git /workspace/REPO]")
@click.option("--owner", default=None, metavar="UID:GID", help="Who owns everything. [default: as in SOURCE]")
@click.option("-e", "--env", multiple=True, metavar="KEY=VALUE", help="Variable for sandboxes on this layer.")
@click.option("-w", "--workdir", default="", help="Working directory for sandboxes on this layer.")
@click.option("-u", "--user", default="", help="User for sandboxes on this layer.")
@stored
@common
def import_(
    settings: Settings,
    source: str,
    name: str,
    at: str | None,
    owner: str | None,
    env: tuple[str, ...],
    workdir: str,
    user: str,
    config: str | None,
    store: str | None,
) -> None:
    """Make a layer of a directory, a tar file (- reads one from standard input) or a git repository at one revision."""
    import os
    import sys

    from dsec.layers import importer
    from dsec.layers.store import LayerConfig

    target = open_store(config, store)
    options: dict[str, Any] = {"owner": _owner(owner), "config": LayerConfig(env=pairs(env, "-e"), workdir=workdir, user=user)}
    if at is not None:
        options["at"] = at
    plain = os.path.basename(os.path.abspath(source))
    if source == "-":
        if not name:
            raise click.UsageError("a tar from standard input needs --name")
        ref = told(settings, lambda tell: importer.import_tar(target, sys.stdin.buffer, name, progress=tell, **options))
    elif os.path.isdir(source) and not os.path.exists(os.path.join(source, "HEAD")):
        ref = told(settings, lambda tell: importer.import_dir(target, source, name or plain, progress=tell, **options))
    elif os.path.isfile(source):
        stem = plain.split(".tar")[0].removesuffix(".tgz")
        ref = told(settings, lambda tell: importer.import_tar(target, source, name or stem, progress=tell, **options))
    elif "://" in source or source.endswith(".git") or "@" in source or os.path.isdir(source):
        url, rev = split_revision(source)
        ref = told(settings, lambda tell: importer.import_git(target, url, rev, name, progress=tell, **options))
    else:
        from dsec.errors import NotFound

        raise NotFound("no such directory, file or repository", field="source", value=source, fix="give a path from here, or a git URL")
    show_ref(settings, ref.name, ref.digest)


def split_revision(source: str) -> tuple[str, str]:
    """``url@rev`` -> (url, rev). The @ of ``git@host:path`` is none of a revision; one behind a directory that is there is."""
    import os

    head, _, last = source.rpartition("@")
    if head and os.path.isdir(head) and not os.path.isdir(source):
        return head, last
    path_begins = "/" in head.partition("://")[2] if "://" in source else "/" in head or ":" in head
    return (head, last) if head and ":" not in last and path_begins else (source, "HEAD")


def _owner(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    try:
        uid, _, gid = text.partition(":")
        return int(uid), int(gid or uid)
    except ValueError:
        raise click.UsageError(f"--owner {text!r} is not UID:GID") from None


@layer_command.command("list")
@stored
@common
def list_(settings: Settings, config: str | None, store: str | None) -> None:
    """Layers with their names, oldest first."""
    found = run(open_store(config, store).list())
    if settings.json:
        emit(found)
        return
    rows = [(", ".join(i.names), i.digest[:19], size_text(i.size), str(i.stored), age(i.created_ts), i.source) for i in found]
    table(["NAMES", "DIGEST", "SIZE", "STORED", "AGE", "SOURCE"], rows)


layer_command.add_command(list_, "ls")


@layer_command.command("info")
@click.argument("name")
@stored
@common
def info(settings: Settings, name: str, config: str | None, store: str | None) -> None:
    """One layer's record."""
    _one(settings, run(open_store(config, store).info(name)))


@layer_command.command("verify")
@click.argument("name")
@stored
@common
def verify(settings: Settings, name: str, config: str | None, store: str | None) -> None:
    """Read a layer whole and compare it with its digest."""
    _one(settings, run(open_store(config, store).verify(name)), "verified:   its bytes give its digest")


@layer_command.command("rm")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@stored
@common
def rm(settings: Settings, names: tuple[str, ...], config: str | None, store: str | None) -> None:
    """Remove layers that no sandbox uses, and that no running node keeps mounted for its next sandboxes (docs/layers.md)."""

    async def work() -> list[LayerInfo]:
        opened = open_store(config, store)
        return [await opened.remove(name) for name in names]

    removed = run(work())
    if settings.json:
        emit(removed)
    else:
        click.echo("\n".join(info.digest for info in removed))


@layer_command.command("tag")
@click.argument("name")
@click.argument("target", required=False)
@click.option("--remove", is_flag=True, help="Take NAME away; the layer stays.")
@stored
@common
def tag(settings: Settings, name: str, target: str | None, remove: bool, config: str | None, store: str | None) -> None:
    """Let NAME stand for TARGET (a name or a digest)."""
    opened = open_store(config, store)
    if remove == (target is not None):
        raise click.UsageError("give a TARGET, or --remove")
    if target is None:
        run(opened.untag(name))
        emit({"name": name}) if settings.json else click.echo(name)
        return
    ref = run(opened.tag(name, target))
    show_ref(settings, ref.name, ref.digest)


@layer_command.command("gc")
@stored
@common
def gc(settings: Settings, config: str | None, store: str | None) -> None:
    """Remove what has no name and no user."""
    removed = run(open_store(config, store).gc())
    if settings.json:
        emit(removed)
    else:
        click.echo(f"{len(removed.digests)} layers, {size_text(removed.bytes)} freed; {len(removed.in_use)} in use")


def _one(settings: Settings, info_: LayerInfo, more: str = "") -> None:
    if settings.json:
        emit(info_)
        return
    for field, value in lines_of(info_):
        click.echo(f"{field + ':':<12}{value}")
    if more:
        click.echo(more)


def lines_of(info_: LayerInfo) -> list[tuple[str, str]]:
    """A record as people read it: what it sets for sandboxes by name, sizes and times in words, nothing that is empty."""
    lines: list[tuple[str, str]] = []
    for field in info_.__struct_fields__:
        value = getattr(info_, field)
        if field == "created_ts":
            lines.append(("created", f"{age(value)} ago"))
        elif field == "config":
            lines += [("env", f"{key}={text}") for key, text in sorted(value.env.items())]
            lines += [(name, text) for name, text in (("workdir", value.workdir), ("user", value.user)) if text]
        elif value not in ("", (), None, 0):
            shown = size_text(value) if field == "size" else ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            lines.append((field, shown))
    return lines
