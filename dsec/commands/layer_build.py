"""`dsec layer build`: carry a Dockerfile out in sandboxes, one for each step, and pack what each changes into a layer.

A step's layer is named after all that it depends on (``build/<hash>``: the base's content, every instruction up to it, the bytes of what it
copies), so a step that was carried out before is found again. The cache is the cluster's own: its layers are ordinary ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import posixpath
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsec.commands import layer_copy
from dsec.commands.common import Settings, common, emit, pairs, run
from dsec.errors import NotFound, SandboxError

if TYPE_CHECKING:
    from dsec.layers.dockerfile import Recipe, Step
    from libdsec import Client, ImageConfig, PackedLayer, Sandbox

Tell = Callable[[str], None]
_RECIPE = 2  # raised when the steps are carried out in another way
# Prints number:more of a user and of a group, each by name or number, with nothing but a shell.
_NUMBERS = """
n() { case $2 in *[!0-9]*) ;; *) echo "$2:$2"; return;; esac
while IFS=: read -r a b c d; do [ "$a" = "$2" ] && echo "$c:$d" && return; done <$1; echo "$2" >&2; exit 1; }
n /etc/passwd "$1"; n /etc/group "$2"
"""
_READER = {"memory": "256MiB", "disk": "64MiB"}  # of a sandbox that is only read: where disks are memory, limits are room on the node
_OUTPUT = 4000  # characters of a failed command's output that are shown


@click.command("build")
@click.argument("context", type=click.Path(exists=True, file_okay=False))
@click.option("-t", "--tag", "name", required=True, help="Name of the image.")
@click.option("-f", "--file", "dockerfile", default="", help="The Dockerfile. [default: CONTEXT/Dockerfile]")
@click.option("--target", default="", metavar="STAGE", help="Build this stage. [default: the last]")
@click.option("--build-arg", multiple=True, metavar="KEY=VALUE", help="Value of an ARG.")
@click.option("--network", type=click.Choice(["none", "open"]), default="none", show_default=True, help="Network of RUN.")
@click.option("-m", "--memory", default="2GiB", show_default=True, help="Memory of a step; one runs at a time.")
@click.option("--disk", default="8GiB", show_default=True, help="What it may write. Where disks are memory, a node needs room for both.")
@click.option("--cpus", default=2.0, show_default=True)
@click.option("--timeout", default=3600.0, show_default=True, help="Seconds for one RUN.")
@click.option("--no-cache", is_flag=True, help="Carry out every step.")
@common
def build(
    settings: Settings, context: str, name: str, dockerfile: str, target: str, build_arg: tuple[str, ...], no_cache: bool, **options: Any
) -> None:
    """Build an image from a Dockerfile (FROM, RUN, COPY, ENV, ARG, WORKDIR, USER, ENTRYPOINT, CMD) by running its steps in sandboxes.

    Of several stages those are built that the last one, or --target, needs.
    """
    from dsec.layers import dockerfile as reader

    path = Path(dockerfile or Path(context, "Dockerfile"))
    if not path.is_file():
        raise NotFound("no such Dockerfile", field="file", value=str(path), fix="give one with -f")
    recipe = reader.parse(path.read_text(), pairs(build_arg, "--build-arg"), target)
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
        self._reader = self.options | _READER
        self.timeout = timeout
        self.cache = cache
        self.ignored = layer_copy.ignore_rules(context)
        self._known_keys: dict[str, list[str]] = {}  # of a stage, by its number; of an image, what its layers are
        self._done: dict[int, str] = {}  # stages that were built: what to create a sandbox on
        self._open: dict[str, Sandbox] = {}  # stages and images that a COPY reads

    async def build(self, name: str) -> PackedLayer:
        """The image, packed under ``name``. Raises `NotFound` (no base, nothing to copy), `SandboxError` (a RUN that fails), and what
        creating and packing raise."""
        async with contextlib.AsyncExitStack() as stack:
            sandbox = await self._run(self.recipe, stack)
            image = self._config(self.recipe, self.recipe.env, final=True)
            return await sandbox.pack_diff(name, image=image, timeout=self.timeout)

    async def _run(self, recipe: Recipe, stack: contextlib.AsyncExitStack) -> Sandbox:
        """A sandbox in the state behind the recipe's last step; it ends with ``stack``."""
        keys = await self._keys(recipe)
        begin = len(keys) if self.cache else 0
        sandbox: Sandbox | None = None
        while begin and sandbox is None:
            # The last step that was carried out before; what stands before it is in its image.
            try:
                sandbox = await self.client.create(name := f"build/{keys[begin - 1]}", **self.options)
            except NotFound:
                begin -= 1
        if sandbox is None:
            sandbox = await self.client.create(name := await self._base(recipe), **self.options)
        wanted = [step.stage for step in recipe.steps[begin:] if step.kind == "copy" and step.stage >= 0 and step.stage not in self._done]
        if wanted:  # they are built before this one holds its room on the node: there may be none for two
            await sandbox.stop()
            for stage in wanted:
                await self._built(stage)
            sandbox = await self.client.create(name, **self.options)
        running = [sandbox]

        async def end() -> None:  # the one that runs then
            await running[0].stop()

        stack.push_async_callback(end)
        label = f"{recipe.name or len(recipe.before)} " if self.recipe.before else ""
        self.tell(f"FROM {recipe.base}{f' AS {recipe.name}' if recipe.name else ''}")
        for number, step in enumerate(recipe.steps):
            self.tell(f"[{label}{number + 1}/{len(keys)}] {step.text}{' (cached)' if number < begin else ''}")
            if number < begin:
                continue
            await self._carry_out(running[0], step, stack)
            layer = await running[0].pack_diff(f"build/{keys[number]}", image=self._config(recipe, step.env), timeout=self.timeout)
            await running[0].stop()
            running[0] = await self.client.create(layer.digest, **self.options)
        return running[0]

    async def _base(self, recipe: Recipe) -> str:
        """What the recipe's first step stands on; a stage is built for it."""
        if recipe.parent < 0:
            return recipe.base
        return await self._built(recipe.parent)

    async def _built(self, stage: int) -> str:
        """A name for the state behind a stage's last step."""
        if stage not in self._done:
            recipe = self._of(stage)
            async with contextlib.AsyncExitStack() as stack:
                sandbox = await self._run(recipe, stack)
                self._done[stage] = sandbox.layers[0].digest
        return self._done[stage]

    def _of(self, stage: int) -> Recipe:
        import msgspec

        return msgspec.structs.replace(self.recipe.before[stage], before=self.recipe.before[:stage])

    async def _origin(self, step: Step, stack: contextlib.AsyncExitStack) -> Sandbox:
        """A sandbox that holds what a COPY --from reads."""
        name = step.image or str(step.stage)
        if name not in self._open:
            self._open[name] = await self.client.create(step.image or await self._built(step.stage), **self._reader)
            stack.push_async_callback(self._shut, name)
        return self._open[name]

    async def _shut(self, name: str) -> None:
        await self._open.pop(name).stop()

    def _config(self, recipe: Recipe, env: dict[str, str], *, final: bool = False) -> ImageConfig:
        """What the image's own layer says; what it does not say, the layers below it do."""
        from libdsec import ImageConfig

        if not final:
            return ImageConfig(env=env)
        return ImageConfig(
            env=env, user=recipe.user or "", workdir=recipe.workdir or "", entrypoint=recipe.entrypoint or (), cmd=recipe.cmd or ()
        )

    async def _keys(self, recipe: Recipe) -> list[str]:
        """A name for the state after each step: it depends on all that the step does."""
        number = str(len(recipe.before))
        if number in self._known_keys:
            return self._known_keys[number]
        base = await self._state(recipe.parent, recipe.base)
        so_far = hashlib.sha256(json.dumps([_RECIPE, base, self.options["network"]]).encode())
        keys = []
        for step in recipe.steps:
            row = [step.kind, step.argv, step.sources, step.target, step.chown, step.chmod, step.env, step.args, step.user, step.workdir]
            so_far.update(json.dumps(row, sort_keys=True).encode())
            if step.kind == "copy" and (step.image or step.stage >= 0):
                so_far.update(json.dumps(await self._state(step.stage, step.image)).encode())
            elif step.kind == "copy":
                for _, path, where in layer_copy.chosen(self.context, self.ignored, step):
                    so_far.update(f"{where}\0{layer_copy.fingerprint(path)}\0".encode(errors="surrogateescape"))
            keys.append(so_far.hexdigest()[:40])
        self._known_keys[number] = keys
        return keys

    async def _state(self, stage: int, image: str) -> list[str]:
        """What names the end of a stage, or an image's content."""
        if stage >= 0:
            recipe = self._of(stage)
            return (await self._keys(recipe))[-1:] or await self._state(recipe.parent, recipe.base)
        if image not in self._known_keys:
            async with self.client.sandbox(image, **self._reader) as sandbox:
                self._known_keys[image] = [layer.digest for layer in sandbox.layers]
        return self._known_keys[image]

    async def _carry_out(self, sandbox: Sandbox, step: Step, stack: contextlib.AsyncExitStack) -> None:
        if step.kind == "copy":
            if step.image or step.stage >= 0:
                await self._copy_from(await self._origin(step, stack), sandbox, step)
            else:
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
        found = layer_copy.chosen(self.context, self.ignored, step)
        target = _target(step)
        several = len({source for source, _, _ in found}) > 1 or len(step.sources) > 1
        single = len(found) == 1 and not found[0][1].is_dir() and not several and not target.endswith("/")
        if single:
            folder, leaf = await self._place(sandbox, target, found[0][2])
            rows = [(found[0][1], leaf)]
        else:
            folder, rows = target, [(path, where) for _, path, where in found]
        owner = await self._owner(sandbox, step.chown)
        if step.chown:  # a directory that COPY makes is the owner's as well
            await self._make(sandbox, folder, owner)
        await sandbox.files.as_user("root").upload_tar(
            layer_copy.tar_of(rows, owner, int(step.chmod or "0", 8)), folder or "/", owners=True
        )

    async def _copy_from(self, origin: Sandbox, sandbox: Sandbox, step: Step) -> None:
        """From one sandbox into the other, piece by piece. What is copied keeps its owner unless the step names one."""
        target = _target(step)
        paths: list[str] = []
        for source in step.sources:
            whole = source if source.startswith("/") else f"/{source}"
            matches = await origin.files.glob(whole) if any(letter in source for letter in "*?[") else [whole]
            if not matches or not await origin.files.exists(matches[0]):
                raise NotFound(f"line {step.line}: nothing to copy", field="dockerfile", value=source, fix="see what the stage has made")
            paths += matches
        owner = await self._owner(sandbox, step.chown) if step.chown else None
        into = sandbox.files.as_user("root")
        for path in paths:
            if (await origin.files.stat(path, follow=True)).kind == "dir":
                folder, name = target, "."
            elif len(paths) == 1 and not target.endswith("/"):
                folder, name = await self._place(sandbox, target, posixpath.basename(path))
            else:
                folder, name = target, posixpath.basename(path)
            if owner is not None:
                await self._make(sandbox, folder, owner)
            stream = origin.files.as_user("root").download_tar(path, name=name, follow=True)
            if owner is not None or step.chmod:
                stream = layer_copy.owned(stream, owner, int(step.chmod or "0", 8))
            await into.upload_tar(stream, folder or "/", owners=True)

    async def _place(self, sandbox: Sandbox, target: str, name: str) -> tuple[str, str]:
        """Where a single file goes: below ``target`` when that is a directory, else by that very name."""
        files = sandbox.files.as_user("root")
        if await files.exists(target) and (await files.stat(target, follow=True)).kind == "dir":
            return target, name
        return posixpath.split(target)

    async def _make(self, sandbox: Sandbox, folder: str, owner: tuple[int, int]) -> None:
        """The directory, and the owner's when it was not there."""
        make = 'test -d "$1" || { mkdir -p "$1" && chown "$2" "$1"; }'
        await sandbox.exec(["/bin/sh", "-c", make, "sh", folder or "/", f"{owner[0]}:{owner[1]}"], check=True)

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


def _target(step: Step) -> str:
    return step.target if step.target.startswith("/") else f"{(step.workdir or '').rstrip('/')}/{step.target}"
