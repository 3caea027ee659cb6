"""`dsec layer build`: carry a Dockerfile out in sandboxes, one for each step, and pack what each changes into a layer.

A step's layer is named after all that it depends on (``build/<hash>``: the base's content, every instruction up to it, the bytes of what it
copies), so a step that was carried out before is found again. The cache is the cluster's own: its layers are ordinary ones.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import posixpath
import re
import stat
import tarfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsec.commands.common import Settings, common, emit, pairs, run
from dsec.errors import InvalidRequest, NotFound, SandboxError

if TYPE_CHECKING:
    from dsec.layers.dockerfile import Recipe, Step
    from libdsec import Client, ImageConfig, PackedLayer, Sandbox

Tell = Callable[[str], None]
_RECIPE = 1  # raised when the steps are carried out in another way
_PIECE = 128 * 1024
# Prints number:more of a user and of a group, each by name or number, with nothing but a shell.
_NUMBERS = """
n() { case $2 in *[!0-9]*) ;; *) echo "$2:$2"; return;; esac
while IFS=: read -r a b c d; do [ "$a" = "$2" ] && echo "$c:$d" && return; done <$1; echo "$2" >&2; exit 1; }
n /etc/passwd "$1"; n /etc/group "$2"
"""
_OUTPUT = 4000  # characters of a failed command's output that are shown


@click.command("build")
@click.argument("context", type=click.Path(exists=True, file_okay=False))
@click.option("-t", "--tag", "name", required=True, help="Name of the image.")
@click.option("-f", "--file", "dockerfile", default="", help="The Dockerfile. [default: CONTEXT/Dockerfile]")
@click.option("--build-arg", multiple=True, metavar="KEY=VALUE", help="Value of an ARG.")
@click.option("--network", type=click.Choice(["none", "open"]), default="none", show_default=True, help="Network of RUN.")
@click.option("-m", "--memory", default="2GiB", show_default=True, help="Memory of a step.")
@click.option("--disk", default="8GiB", show_default=True, help="What a step may write.")
@click.option("--cpus", default=2.0, show_default=True)
@click.option("--timeout", default=3600.0, show_default=True, help="Seconds for one RUN.")
@click.option("--no-cache", is_flag=True, help="Carry out every step.")
@common
def build(settings: Settings, context: str, name: str, dockerfile: str, build_arg: tuple[str, ...], no_cache: bool, **options: Any) -> None:
    """Build an image from a Dockerfile (FROM, RUN, COPY, ENV, ARG, WORKDIR, USER, ENTRYPOINT, CMD) by running its steps in sandboxes."""
    from dsec.layers import dockerfile as reader

    path = Path(dockerfile or Path(context, "Dockerfile"))
    if not path.is_file():
        raise NotFound("no such Dockerfile", field="file", value=str(path), fix="give one with -f")
    recipe = reader.parse(path.read_text(), pairs(build_arg, "--build-arg"))
    tell: Tell = (lambda _: None) if settings.json else (lambda line: click.echo(line, err=True))
    for note in recipe.notes:
        tell(note)
    timeout = options.pop("timeout")

    async def work() -> PackedLayer:
        async with settings.connect() as client:
            return await Builder(client, recipe, Path(context), options, timeout, tell, cache=not no_cache).build(name)

    layer = run(work())
    emit(layer) if settings.json else click.echo(f"{layer.name}  {layer.digest}")


class Builder:
    """One build. ``options``: of the sandboxes that the steps run in."""

    def __init__(
        self, client: Client, recipe: Recipe, context: Path, options: dict[str, Any], timeout: float, tell: Tell, *, cache: bool = True
    ) -> None:
        self.client, self.recipe, self.context, self.tell = client, recipe, context, tell
        self.options = options | {"user": "root", "workdir": "/", "ttl": timeout + 600.0}
        self.timeout = timeout
        self.cache = cache
        self.ignored = ignore_rules(context)

    async def build(self, name: str) -> PackedLayer:
        """The image, packed under ``name``. Raises `NotFound` (no base, nothing to copy), `SandboxError` (a RUN that fails), and what
        creating and packing raise."""
        sandbox = await self.client.create(self.recipe.base, **self.options)
        try:
            self.tell(f"FROM {self.recipe.base}")
            base = [layer.digest for layer in sandbox.layers]
            keys = self._keys(base)
            begin = len(keys)
            while self.cache and begin:
                # The last step that was carried out before; what stands before it is in its image.
                try:
                    found = await self.client.create(f"build/{keys[begin - 1]}", **self.options)
                except NotFound:
                    begin -= 1
                    continue
                await sandbox.stop()
                sandbox = found
                break
            begin = begin if self.cache else 0
            for number, step in enumerate(self.recipe.steps):
                self.tell(f"[{number + 1}/{len(keys)}] {step.text}{' (cached)' if number < begin else ''}")
                if number < begin:
                    continue
                await self._carry_out(sandbox, step)
                layer = await sandbox.pack_diff(f"build/{keys[number]}", image=self._config(step.env), timeout=self.timeout)
                await sandbox.stop()
                sandbox = await self.client.create(layer.digest, **self.options)
            return await sandbox.pack_diff(name, image=self._config(self.recipe.env, final=True), timeout=self.timeout)
        finally:
            await sandbox.stop()

    def _config(self, env: dict[str, str], *, final: bool = False) -> ImageConfig:
        """What the image's own layer says; what it does not say, the layers below it do."""
        from libdsec import ImageConfig

        recipe = self.recipe
        if not final:
            return ImageConfig(env=env)
        return ImageConfig(
            env=env, user=recipe.user or "", workdir=recipe.workdir or "", entrypoint=recipe.entrypoint or (), cmd=recipe.cmd or ()
        )

    def _keys(self, base: list[str]) -> list[str]:
        """A name for the state after each step."""
        keys = []
        so_far = hashlib.sha256(json.dumps([_RECIPE, base, self.options["network"]]).encode())
        for step in self.recipe.steps:
            row = [step.kind, step.argv, step.sources, step.target, step.chown, step.chmod, step.env, step.args, step.user, step.workdir]
            so_far.update(json.dumps(row, sort_keys=True).encode())
            if step.kind == "copy":
                for _, path, where in self._chosen(step):
                    so_far.update(f"{where}\0{_fingerprint(path)}\0".encode(errors="surrogateescape"))
            keys.append(so_far.hexdigest()[:40])
        return keys

    async def _carry_out(self, sandbox: Sandbox, step: Step) -> None:
        if step.kind == "copy":
            await self._copy(sandbox, step)
            return
        if step.kind == "workdir":
            result = await sandbox.exec(["/bin/mkdir", "-p", step.target], check=False)
        else:
            environment = step.args | step.env
            user, workdir = step.user or None, step.workdir or None
            result = await sandbox.exec(list(step.argv), env=environment, user=user, cwd=workdir, timeout=self.timeout)
        for line in (result.stdout.text + result.stderr.text).splitlines():
            self.tell(f"    {line}")
        if not result.ok:
            how = "ran out of time" if result.timed_out else "ran out of memory" if result.oom_killed else f"exit code {result.exit_code}"
            said = (result.stdout.text + result.stderr.text)[-_OUTPUT:]
            raise SandboxError(f"line {step.line}: {step.text}: {how}\n{said}".rstrip(), reason="build")

    async def _copy(self, sandbox: Sandbox, step: Step) -> None:
        chosen = self._chosen(step)
        target = step.target if step.target.startswith("/") else f"{(step.workdir or '').rstrip('/')}/{step.target}"
        several = len({source for source, _, _ in chosen}) > 1 or len(step.sources) > 1
        single = len(chosen) == 1 and not chosen[0][1].is_dir() and not several and not target.endswith("/")
        if single:
            is_directory = (await sandbox.exec(["/bin/sh", "-c", 'test -d "$1"', "sh", target])).ok
            folder, leaf = (target, chosen[0][2]) if is_directory else posixpath.split(target)
            rows = [(chosen[0][1], leaf)]
        else:
            folder, rows = target, [(path, where) for _, path, where in chosen]
        owner = await self._owner(sandbox, step.chown)
        if step.chown:  # a directory that COPY makes is the owner's as well
            make = 'test -d "$1" || { mkdir -p "$1" && chown "$2" "$1"; }'
            await sandbox.exec(["/bin/sh", "-c", make, "sh", folder or "/", f"{owner[0]}:{owner[1]}"], check=True)
        await sandbox.files.as_user("root").upload_tar(_tar(rows, owner, int(step.chmod or "0", 8)), folder or "/", owners=True)

    async def _owner(self, sandbox: Sandbox, chown: str) -> tuple[int, int]:
        """Numbers of a --chown, by the image's own files."""
        user, _, group = chown.partition(":")
        if not chown:
            return 0, 0
        result = await sandbox.exec(["/bin/sh", "-c", _NUMBERS, "sh", user, group or "0"])
        if not result.ok:
            raise NotFound(f"the image has no such owner: {result.stderr.text.strip()}", field="dockerfile", value=chown)
        first, second = result.stdout.text.splitlines()[:2]
        uid, own_group = first.split(":")[:2]
        return int(uid), int(second.split(":")[0] if group else own_group)

    def _chosen(self, step: Step) -> list[tuple[str, Path, str]]:
        """(source as written, local path, name below the target) of each entry that a COPY takes, in order."""
        found: list[tuple[str, Path, str]] = []
        top = self.context.resolve()
        for source in step.sources:
            relative = posixpath.normpath(source.lstrip("/"))
            if relative.startswith(".."):
                raise InvalidRequest(f"line {step.line}: a source outside of the context", field="dockerfile", value=source)
            matches = sorted(top.glob(relative)) if any(letter in relative for letter in "*?[") else [top / relative]
            matches = [path for path in matches if os.path.lexists(path) and not self.ignored(path.relative_to(top).as_posix())]
            if not matches:
                raise NotFound(f"line {step.line}: nothing to copy", field="dockerfile", value=source, fix="it must be in the context")
            for match in matches:
                if not match.resolve().is_relative_to(top):
                    raise InvalidRequest(f"line {step.line}: a link out of the context", field="dockerfile", value=source)
                if match.is_dir():
                    found += [(source, path, path.relative_to(match).as_posix()) for path in _below(match, top, self.ignored)]
                else:
                    found.append((source, match, match.name))
        return found


def ignore_rules(context: Path) -> Callable[[str], bool]:
    """What .dockerignore leaves out: patterns of paths below the context, ``!`` takes back, the last that fits decides."""
    rules: list[tuple[re.Pattern[str], bool]] = []
    file = context / ".dockerignore"
    for line in file.read_text().splitlines() if file.is_file() else ():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        keep = pattern.startswith("!")
        pattern = pattern.lstrip("!").strip("/")
        body = "".join(
            {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(token, re.escape(token))
            for token in re.findall(r"\*\*/|\*\*|\*|\?|.", pattern)
        )
        rules.append((re.compile(f"{body}(?:/.*)?"), not keep))

    def ignored(path: str) -> bool:
        verdict = False
        for pattern, leaves_out in rules:
            if pattern.fullmatch(path):
                verdict = leaves_out
        return verdict

    return ignored


def _below(directory: Path, top: Path, ignored: Callable[[str], bool]) -> list[Path]:
    found: list[Path] = []
    for parent, directories, files in os.walk(directory):
        directories.sort()
        links = [name for name in directories if Path(parent, name).is_symlink()]
        for name in sorted((*directories, *files)):
            path = Path(parent, name)
            if not ignored(path.relative_to(top).as_posix()):
                found.append(path)
        directories[:] = [name for name in directories if name not in links]
    return found


def _fingerprint(path: Path) -> str:
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        return f"link {os.readlink(path)}"
    if not stat.S_ISREG(status.st_mode):
        return f"{stat.S_IFMT(status.st_mode)} {stat.S_IMODE(status.st_mode)}"
    with open(path, "rb") as file:
        return f"file {stat.S_IMODE(status.st_mode)} {hashlib.file_digest(file, 'sha256').hexdigest()}"


async def _tar(rows: list[tuple[Path, str]], owner: tuple[int, int], mode: int) -> AsyncIterator[bytes]:
    """The chosen entries as a tar, piece by piece; times are left as they are."""
    for path, name in rows:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            info = archive.gettarinfo(path, arcname=name)
            if info is None or not (info.isreg() or info.isdir() or info.issym() or info.islnk()):
                continue
            if info.islnk():  # each file on its own: the archive is made entry by entry
                info.type, info.size = tarfile.REGTYPE, path.stat().st_size
            info.uid, info.gid = owner
            info.uname = info.gname = ""
            if mode and not info.issym():
                info.mode = mode
        yield info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        if info.isreg():
            left = info.size
            with open(path, "rb") as file:  # noqa: ASYNC230 - a local file, a piece at a time
                while left:
                    piece = file.read(min(_PIECE, left))
                    if not piece:
                        raise InvalidRequest("a file became shorter while it was copied", field="source", value=str(path))
                    left -= len(piece)
                    yield piece
            yield bytes(-info.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)
