"""Make base layers: a Debian with what a software-engineering agent needs, and a 2 MB one of busybox for tests and benchmarks.

Neither touches the machine's state: packages come through the machine's own apt configuration into private directories, and
mmdebstrap runs in mount and pid namespaces of its own, so whatever way it ends nothing stays mounted or running.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Sequence
from pathlib import Path

from dsec import trees
from dsec.errors import InvalidRequest, NodeError, NotFound, Unsupported
from dsec.layers import aptsources, importer, tools
from dsec.layers.store import LayerConfig, LayerInfo, LayerStore
from dsec.layers.tools import Progress, silent
from dsec.model import LayerRef

DEBIAN_PACKAGES = ("python3", "git", "ca-certificates", "procps", "patch", "make", "curl")
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_RECIPE = 1  # raised when the steps below change, so that cached bases are made again
# Left out as Debian's slim images do; licences stay.
_EXCLUDE = ("/usr/share/man/*", "/usr/share/info/*", "/usr/share/lintian/*", "/usr/share/locale/*", "/usr/share/doc/*")
_INCLUDE = ("/usr/share/doc/*/copyright", "/usr/share/locale/locale.alias")
_HOSTS = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
_PASSWD = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\nagent:x:1000:1000::/home/agent:/bin/sh\n"
_GROUP = "root:x:0:\ntty:x:5:\nnogroup:x:65534:\nagent:x:1000:\n"
# What an installation leaves behind.
_EMPTY = ("var/lib/apt/lists", "var/cache/apt", "var/cache/debconf", "var/cache/ldconfig", "var/log", "tmp", "var/tmp", "run", "dev")


_RELEASES = {"bullseye": "debian-11", "bookworm": "debian-12", "trixie": "debian-13"}


def debian_name(suite: str) -> str:
    """What a base of that suite is called."""
    return _RELEASES.get(suite, f"debian-{suite}")


async def bootstrap_debian(
    store: LayerStore,
    suite: str = "bookworm",
    variant: str = "minbase",
    packages: Sequence[str] = DEBIAN_PACKAGES,
    name: str = "",
    *,
    refresh: bool = False,
    progress: Progress = silent,
) -> LayerRef:
    """A Debian base with mmdebstrap; needs root. The same inputs again do no work unless ``refresh`` (then today's packages).

    Without a ``name`` it is called as `debian_name` says. It has root and a user ``agent`` (1000), an empty resolv.conf and machine-id, no
    package lists, and the mirrors that it was made from (without credentials). Takes some 20 s and 200 MB with a near mirror. Raises
    `Unsupported` (not root, no mmdebstrap), `InvalidRequest`, and `NodeError` with mmdebstrap's words.
    """
    for word, field in ((suite, "suite"), (variant, "variant"), *((package, "packages") for package in packages)):
        if not word or not all(character.isalnum() or character in "+-./:~" for character in word) or word.startswith("-"):
            raise InvalidRequest("not a usable word for apt", field=field, value=word, fix="use a name that apt knows")
    name = name or debian_name(suite)
    if os.geteuid() != 0:
        raise Unsupported("a Debian base can be made by root only", reason="not root", fix="run as root")
    sources = aptsources.for_suite(await tools.in_thread(aptsources.of_machine), suite)
    shown = aptsources.render(sources, credentials=False)
    recipe = _recipe("debian", suite, variant, sorted(packages), shown)
    if not refresh and (ready := await cached(store, name, recipe)):
        progress(f"{name} is up to date")
        return ready
    program = tools.find("mmdebstrap", "mmdebstrap")
    if not sources and not os.path.exists(_KEYRING):
        raise Unsupported(
            "this machine has no key for Debian's archive", reason=f"no {_KEYRING}", fix="apt-get install debian-archive-keyring"
        )
    meta = LayerInfo(
        digest="",
        stored="erofs",
        size=0,
        source=f"debian {suite} {variant}",
        recipe=recipe,
        at="/",
        config=LayerConfig(env={"LANG": "C.UTF-8"}),
    )
    async with store.staging() as stage:
        tree = stage / "tree"
        mirrors: list[str] = []
        if sources:
            mirrors = [str(stage / "machine.sources")]
            await tools.write(mirrors[0], aptsources.render(sources, credentials=True).encode())
        os.chmod(stage, 0o711)  # apt's own user has to reach the tree
        await tools.run(
            [
                *("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"),
                *(program, "--mode=root", "--format=directory", f"--variant={variant}", f"--include={','.join(packages)}"),
                *(f"--aptopt={line}" for line in await aptsources.download_options()),
                *(f"--dpkgopt=path-exclude={pattern}" for pattern in _EXCLUDE),
                *(f"--dpkgopt=path-include={pattern}" for pattern in _INCLUDE),
                '--customize-hook=chroot "$1" useradd --create-home --uid 1000 --shell /bin/bash agent',
                *(suite, str(tree), *mirrors),
            ],
            env={"TMPDIR": str(stage), **_proxies()},
            progress=_only_messages(progress),
        )
        await tools.in_thread(_clean_debian, tree, shown)
        return await importer.pack(store, stage, name, meta, progress=progress)


async def bootstrap_tiny(store: LayerStore, name: str = "busybox", *, refresh: bool = False, progress: Progress = silent) -> LayerRef:
    """A 2 MB base of Debian's static busybox: /bin/sh, 270 applets, users root, nobody and agent (1000), /tmp 1777.

    Takes a second. The same busybox gives the same digest on every node. Raises `NodeError` when apt cannot fetch the package.
    """
    recipe = _recipe("busybox")
    if not refresh and (ready := await cached(store, name, recipe)):
        progress(f"{name} is up to date")
        return ready
    meta = LayerInfo(digest="", stored="erofs", size=0, source="debian busybox-static", recipe=recipe, at="/")
    async with store.staging() as stage:
        busybox = await _fetch_busybox(stage / "fetch", progress)
        applets = (await tools.run([str(busybox), "--list-full"])).split()
        await tools.in_thread(_lay_out_tiny, stage / "tree", busybox, applets)
        await tools.in_thread(trees.remove, stage / "fetch")
        return await importer.pack(store, stage, name, meta, progress=progress)


def _recipe(*inputs: object) -> str:
    text = json.dumps([_RECIPE, platform.machine(), *inputs])
    return hashlib.sha256(text.encode()).hexdigest()


async def cached(store: LayerStore, name: str, recipe: str) -> LayerRef | None:
    """The layer of that name, where it was made by this recipe and is whole."""
    try:
        info = await store.info(name)
        await store.check(info.digest)
    except (NotFound, NodeError):
        return None
    return LayerRef(name=name, digest=info.digest) if info.recipe == recipe else None


def _proxies() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key.lower() in ("http_proxy", "https_proxy", "no_proxy")}


def _only_messages(progress: Progress) -> Progress:
    """mmdebstrap's own lines, without apt's and dpkg's hundreds."""

    def show(line: str) -> None:
        if line[:3] in ("I: ", "W: ", "E: "):
            progress(line[3:])

    return show


def _clean_debian(tree: Path, sources: str) -> None:
    """Take out what belongs to this machine or to this run. Blocking."""
    for relative in _EMPTY:
        trees.empty(tree / relative)
    (tree / "var/cache/apt/archives/partial").mkdir(parents=True)
    (tree / "var/lib/apt/lists/partial").mkdir()
    (tree / "var/log/apt").mkdir()
    (tree / "etc/apt/apt.conf.d/99mmdebstrap").unlink(missing_ok=True)  # proxies and certificates
    if sources:
        trees.empty(tree / "etc/apt/sources.list.d")
        (tree / "etc/apt/sources.list").unlink(missing_ok=True)
        (tree / "etc/apt/sources.list.d/debian.sources").write_text(sources)
    for relative, text in (("resolv.conf", ""), ("machine-id", ""), ("hostname", "localhost\n"), ("hosts", _HOSTS)):
        path = tree / "etc" / relative
        path.unlink(missing_ok=True)  # it may be a link that leads out
        path.write_text(text)
        path.chmod(0o644)
    for leftover in ("var/lib/dbus/machine-id", "etc/.pwd.lock", "etc/passwd-", "etc/group-", "etc/shadow-", "etc/gshadow-"):
        (tree / leftover).unlink(missing_ok=True)


async def _fetch_busybox(work: Path, progress: Progress) -> Path:
    """A static busybox in ``work``: by the machine's package lists, else by lists fetched into ``work``."""
    lists = work / "lists"
    (lists / "partial").mkdir(parents=True)
    config = work / "apt.conf"
    # The last word over the machine's configuration: no hook of it may run, and caches are ours.
    text = (
        "#clear APT::Update::Pre-Invoke;\n#clear APT::Update::Post-Invoke;\n#clear APT::Update::Post-Invoke-Success;\n"
        f'Dir::Cache "{work}/cache";\nAPT::Sandbox::User "root";\n'
    )
    await tools.write(config, text.encode())
    (work / "cache/archives/partial").mkdir(parents=True)
    apt = [tools.find("apt-get", "apt"), "-c", str(config), "-qq"]
    try:
        await tools.run([*apt, "download", "busybox-static"], cwd=str(work), env=_proxies())
    except NodeError:
        progress("the machine has no package lists: fetching some")
        private = [*apt, "-o", f"Dir::State::lists={lists}"]
        await tools.run([*private, "update"], cwd=str(work), env=_proxies())
        await tools.run([*private, "download", "busybox-static"], cwd=str(work), env=_proxies())
    package = next(work.glob("busybox-static_*.deb"))
    await tools.run([tools.find("dpkg-deb", "dpkg"), "--extract", str(package), str(work / "package")])
    for relative in ("bin/busybox", "usr/bin/busybox"):  # before and after Debian's merge of /bin into /usr/bin
        if (work / "package" / relative).is_file():
            return work / "package" / relative
    raise NodeError("the package busybox-static holds no busybox", retryable=False)


def _lay_out_tiny(tree: Path, busybox: Path, applets: Sequence[str]) -> None:
    for relative in ("bin", "sbin", "usr/bin", "usr/sbin", "etc", "dev", "proc", "sys", "run", "var/tmp", "tmp", "root", "home/agent"):
        (tree / relative).mkdir(parents=True)
    shutil.copy2(busybox, tree / "bin/busybox")
    os.chmod(tree / "bin/busybox", 0o755)
    for applet in applets:
        path = tree / applet
        if path.parent.is_dir() and not path.exists():
            path.symlink_to("/bin/busybox")
    files = (
        ("passwd", _PASSWD),
        ("group", _GROUP),
        ("hosts", _HOSTS),
        ("hostname", "localhost\n"),
        ("resolv.conf", ""),
        ("machine-id", ""),
    )
    for name, text in files:
        (tree / "etc" / name).write_text(text)
        (tree / "etc" / name).chmod(0o644)
    when = int(busybox.stat().st_mtime)
    for parent, dirs, names in os.walk(tree, topdown=False):
        for entry in (*dirs, *names):
            path = Path(parent, entry)
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)
            os.utime(path, (when, when), follow_symlinks=False)
    (tree / "root").chmod(0o700)
    for shared in ("tmp", "var/tmp"):
        (tree / shared).chmod(0o1777)
    if os.geteuid() == 0:
        os.chown(tree / "home/agent", 1000, 1000)
