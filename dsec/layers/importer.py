"""Make a layer from a directory, a tar or a git revision.

Each import stages a private tree in the store, puts it where `at` says, gives it its owner, and packs it: as an EROFS image, or as a
plain directory where mkfs.erofs is missing. The same input gives the same digest on any node with the same erofs-utils.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

from dsec.errors import InvalidRequest, NodeError, NotFound, Unsupported
from dsec.layers import erofs, tools, untar
from dsec.layers.index import check_name
from dsec.layers.store import LayerConfig, LayerInfo, LayerStore
from dsec.layers.tools import Progress, silent
from dsec.model import LayerRef

Owner = tuple[int, int]
_REV = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,254}")
_USERINFO = re.compile(r"(?<=://)[^/@]*@")


async def import_dir(
    store: LayerStore,
    path: str | os.PathLike[str],
    name: str,
    *,
    at: str = "/",
    owner: Owner | None = None,
    config: LayerConfig | None = None,
    progress: Progress = silent,
) -> LayerRef:
    """A layer with the content of a directory at ``at`` inside it; sockets are left out.

    ``owner``: (uid, gid) of everything imported; by default what it is on disk, or root:root when the importer is not root.
    Re-owning drops file capabilities. Raises `NotFound` (no such directory), `InvalidRequest` (not a directory, device nodes,
    unusable ``name`` or ``at``), `Unsupported`, `NodeError`.
    """
    check_name(name)
    where = check_at(at)
    source = os.path.abspath(path)
    if not os.path.exists(source):
        raise NotFound("no such directory", field="path", value=source, fix="give a directory of this node")
    if not os.path.isdir(source):
        raise InvalidRequest("not a directory", field="path", value=source, fix="give a directory, a tar or a git repository")
    _check_owner(owner)
    meta = LayerInfo(digest="", stored="erofs", size=0, source=f"dir {source}", at=at, config=config or LayerConfig())
    found = await tools.in_thread(erofs.survey, source)
    progress(f"{found.entries} entries, {found.bytes / 1e6:.1f} MB")
    if where == "." and owner is None and found.sockets == 0 and erofs.available() and _is_plain_root(source):
        async with store.staging() as stage:  # nothing to change, so nothing to copy
            return await _pack_image(store, Path(source), stage, name, meta, found, progress)
    async with store.staging() as stage:
        target = await tools.in_thread(_make_parents, stage / "tree", where)
        await tools.run([tools.find("cp", "coreutils"), "-a", "--reflink=auto", "--", source + "/.", str(target)])
        return await pack(store, stage, name, meta, where=where, owner=owner, progress=progress)


async def import_tar(
    store: LayerStore,
    tar: str | os.PathLike[str] | BinaryIO,
    name: str,
    *,
    at: str = "/",
    owner: Owner | None = None,
    config: LayerConfig | None = None,
    limits: untar.Limits | None = None,
    progress: Progress = silent,
) -> LayerRef:
    """A layer from a tar file or stream: plain, gzip, bzip2, xz, or zstd where the zstd program is installed.

    Members are checked and extracted so that nothing lands outside (see `untar`). Owners, modes, times, links, user.* attributes
    and file capabilities are kept. Raises as `import_dir`, and `InvalidRequest` naming the member that is refused.
    """
    check_name(name)
    where = check_at(at)
    _check_owner(owner)
    source: str | BinaryIO = os.path.abspath(tar) if isinstance(tar, (str, os.PathLike)) else tar
    label = source if isinstance(source, str) else "stream"
    if isinstance(source, str) and not os.path.isfile(source):
        raise NotFound("no such tar file", field="path", value=source, fix="give a file of this node")
    meta = LayerInfo(digest="", stored="erofs", size=0, source=f"tar {label}", at=at, config=config or LayerConfig())
    async with store.staging() as stage:
        target = await tools.in_thread(_make_parents, stage / "tree", where)
        stop = untar.Stop()
        work = asyncio.create_task(tools.in_thread(untar.extract, source, target, limits or untar.Limits(), stop, owner is None))
        try:
            done = await asyncio.shield(work)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait([work])
            raise
        progress(f"{done.members} members, {done.bytes / 1e6:.1f} MB")
        for note in done.notes:
            progress(note)
        return await pack(store, stage, name, meta, where=where, owner=owner, progress=progress)


async def import_git(
    store: LayerStore,
    url: str,
    rev: str = "HEAD",
    name: str = "",
    *,
    at: str = "",
    owner: Owner | None = None,
    config: LayerConfig | None = None,
    progress: Progress = silent,
) -> LayerRef:
    """A layer with a git work tree at one revision (branch, tag or commit) and a ``.git`` that holds that commit alone.

    ``name``: default ``<repo>@<rev>``. ``at``: default ``/workspace/<repo>``, which also becomes the layer's workdir. All mtimes are
    the commit's time and the index holds no stat data, so the digest depends on the commit only. No hook, remote, reflog or
    credential gets into the layer. Submodules and LFS files are not fetched. Raises as `import_dir`; `NotFound` for the repository
    or the revision.
    """
    if not _REV.fullmatch(rev) or ".." in rev:
        raise InvalidRequest("not a usable revision", field="rev", value=rev, fix="give a branch, a tag or a commit")
    repo = _repo_name(url)
    name = check_name(name or f"{repo}@{rev.replace('/', '-')}")
    at = at or f"/workspace/{repo}"
    where = check_at(at)
    _check_owner(owner)
    if url.startswith("-"):
        raise InvalidRequest("not a repository address", field="url", value=url, fix="give a URL or a path")
    if os.path.isdir(url):
        url = os.path.abspath(url)
    base = config or LayerConfig()
    if not base.workdir:
        base = LayerConfig(env=base.env, workdir=at, user=base.user)
    shown = _USERINFO.sub("", url)
    async with store.staging() as stage:
        target = await tools.in_thread(_make_parents, stage / "tree", where)
        commit = await _checkout(url, rev, str(target), str(stage / "fetched"), progress)
        meta = LayerInfo(digest="", stored="erofs", size=0, source=f"git {shown} {commit}", at=at, config=base)
        return await pack(store, stage, name, meta, where=where, owner=owner or (0, 0), progress=progress)


def _repo_name(url: str) -> str:
    """The last part of an address or path, as git names a clone's directory."""
    last = url.rstrip("/").rpartition("/")[2].rpartition(":")[2].removesuffix(".git")
    return re.sub(r"[^A-Za-z0-9._-]", "-", last).strip(".-_") or "repo"


async def _checkout(url: str, rev: str, target: str, scratch: str, progress: Progress) -> str:
    git = tools.find("git", "git")
    secrets = [found.rstrip("@") for found in _USERINFO.findall(url) if found != "@"]
    # No configuration of this machine's, no prompts, no hooks, no helper protocols; one packing thread, so that packs do not vary.
    env = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "GIT_TERMINAL_PROMPT": "0"}
    env["GIT_ALLOW_PROTOCOL"] = "file:git:http:https:ssh"
    base = [git, "-c", "safe.directory=*", "-c", "core.logAllRefUpdates=false", "-c", "pack.threads=1", "-c", "gc.auto=0"]
    base += ["-c", "advice.detachedHead=false", "-c", "core.hooksPath=/dev/null"]

    async def run(*argv: str, where: str = target) -> str:
        return await tools.run([*base, "-C", where, *argv], env=env, secrets=secrets)

    await run("init", "--quiet", "--template=", "--initial-branch=main", ".")
    try:
        await run("fetch", "--quiet", "--depth=1", "--no-tags", "--", url, rev)
    except NodeError as first:
        # A server may refuse to serve an unadvertised or abbreviated commit: take everything elsewhere and look for it there.
        progress("shallow fetch refused, fetching the whole history")
        try:
            await run("init", "--quiet", "--bare", "--template=", scratch)
            await run("fetch", "--quiet", "--", url, "+refs/*:refs/*", where=scratch)
            found = (await run("rev-parse", "--verify", "--quiet", f"{rev}^{{commit}}", where=scratch)).strip()
        except NodeError:
            shown = _USERINFO.sub("", url)
            raise NotFound(f"no such repository or revision: {first}", field="url", value=shown, fix="check address and rev") from None
        await run("config", "uploadpack.allowAnySHA1InWant", "true", where=scratch)
        await run("fetch", "--quiet", "--depth=1", "--no-tags", "--", f"file://{scratch}", found)
    await run("checkout", "--quiet", "-B", "main", "FETCH_HEAD")
    commit, when = (await run("log", "-1", "--format=%H %ct")).split()
    await run("read-tree", "HEAD")
    await tools.in_thread(_settle_git, target, int(when))
    progress(f"commit {commit[:12]}")
    return commit


def _settle_git(target: str, when: int) -> None:
    """Nothing of this run stays: no record of the fetch, and one mtime for all."""
    for leftover in ("FETCH_HEAD", "ORIG_HEAD", "COMMIT_EDITMSG"):
        (Path(target) / ".git" / leftover).unlink(missing_ok=True)
    for parent, dirs, files in os.walk(target):
        for entry in (*dirs, *files):
            os.utime(os.path.join(parent, entry), (when, when), follow_symlinks=False)
    os.utime(target, (when, when))


async def pack(
    store: LayerStore, stage: Path, name: str, meta: LayerInfo, *, where: str = ".", owner: Owner | None = None, progress: Progress = silent
) -> LayerRef:
    """Turn ``<stage>/tree`` into a layer and put it into the store."""
    tree = stage / "tree"
    found = await tools.in_thread(_settle, tree, where, owner)
    if erofs.available():
        return await _pack_image(store, tree, stage, name, meta, found, progress)
    progress("mkfs.erofs is not installed: stored as a plain directory")
    return await store.put_tree(tree, name, meta)


async def _pack_image(
    store: LayerStore, tree: Path, stage: Path, name: str, meta: LayerInfo, found: erofs.Survey, progress: Progress
) -> LayerRef:
    image = stage / "image"
    await erofs.build(str(tree), str(image), found, all_root=os.geteuid() != 0, progress=progress)
    ref = await store.put_image(image, name, meta)
    progress(f"{name} {ref.digest[:19]}")
    return ref


def check_at(at: str) -> str:
    """Where the tree is put, relative to the layer's root ("." for the root itself). Raises `InvalidRequest`."""
    parts = [part for part in at.split("/") if part not in ("", ".")]
    if not at.startswith("/") or ".." in parts or "\0" in at or len(at) > 4000 or any(len(part) > 255 for part in parts):
        raise InvalidRequest("not a usable place in a layer", field="at", value=at, fix="give an absolute path without ..")
    return "/".join(parts) or "."


def _check_owner(owner: Owner | None) -> None:
    if owner is None:
        return
    if not all(0 <= part < 65_534 for part in owner):
        raise InvalidRequest("ids in a layer are 0 to 65533", field="owner", value=f"{owner[0]}:{owner[1]}", fix="sandboxes map 65,536 ids")
    if owner != (0, 0) and os.geteuid() != 0:
        raise Unsupported("only root can make a layer that belongs to another user", field="owner", reason="not root", fix="run as root")


def _is_plain_root(path: str) -> bool:
    status = os.stat(path)
    return stat.S_IMODE(status.st_mode) == 0o755 and (status.st_uid, status.st_gid) == (0, 0)


def _make_parents(tree: Path, where: str) -> Path:
    chain = _chain(tree, where)
    for directory in chain:
        directory.mkdir(exist_ok=True)
        directory.chmod(0o755)
    return chain[-1]


def _chain(tree: Path, where: str) -> list[Path]:
    """The tree's root and each directory down to ``where``."""
    found = [tree]
    for part in where.split("/"):
        if part != ".":
            found.append(found[-1] / part)
    return found


def _settle(tree: Path, where: str, owner: Owner | None) -> erofs.Survey:
    """Give the imported part its owner, and the directories above it one that every layer agrees on; count it all.

    The root and the parents are merged with other layers', and the topmost layer's attributes win: a private directory of the
    importer must not close ``/`` to everyone else in the sandbox.
    """
    chain = _chain(tree, where)
    root = os.geteuid() == 0
    if root and owner is not None:
        _chown_tree(chain[-1], owner)
    imported = erofs.survey(str(chain[-1]), prune=True)
    top = chain if where == "." else chain[:-1]
    for directory in reversed(top):
        directory.chmod(0o755)
        if root:
            os.chown(directory, 0, 0)
    newest = max((int(os.lstat(entry).st_mtime) for entry in chain[-1].iterdir()), default=0) if where == "." else imported.newest
    for directory in reversed(top):
        os.utime(directory, (newest, newest))
    return erofs.survey(str(tree))


def _chown_tree(top: Path, owner: Owner) -> None:
    for parent, dirs, files in os.walk(top):
        for entry in (*dirs, *files):
            _chown(os.path.join(parent, entry), owner)
    _chown(str(top), owner)


def _chown(path: str, owner: Owner) -> None:
    mode = os.lstat(path).st_mode
    os.chown(path, *owner, follow_symlinks=False)
    if mode & (stat.S_ISUID | stat.S_ISGID) and stat.S_ISREG(mode):  # chown clears them
        os.chmod(path, stat.S_IMODE(mode))
