"""The same questions to the native launcher, crun and Docker, and why the answers differ.

``python -m tests.system.differential`` (root; Docker's column needs docker.io) writes docs/isolation-differences.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsec.layers.mounts import LayerMount
from dsec.trees import clear
from tests.fixtures_backend import Yard, build_small_base, sh
from tests.system.views import View, differences, filters, look, verdicts

ROOT = Path(__file__).resolve().parents[2]
DOC = ROOT / "docs/isolation-differences.md"

# (section, pattern of the whole name) -> why native and crun are not the same.
DRIVERS: dict[tuple[str, str], str] = {
    (
        "namespaces",
        "cgroup|mnt|pid",
    ): "The native launcher joins the user namespace last: what it made before belongs to the node, so that even "
    "every capability of the sandbox's user namespace undoes no mount. crun makes it first; there only the missing CAP_SYS_ADMIN keeps "
    "root inside from it.",
    (
        "mounts",
        "/dev/(null|zero|full|random|urandom|tty)",
    ): "The same devices of the node, bound read-only by both; the flags beside it are those of the one who binds.",
    (
        "mounts",
        "/proc/acpi|/proc/asound|/proc/scsi",
    ): "Covered by an empty read-only directory: the zygote's in one, the holder's in the other.",
    ("mounts", "/proc/(interrupts|keys|kcore|timer_list|sched_debug|latency_stats|timer_stats)"): "Covered by /dev/null, which the native "
    "launcher binds without set-id and program execution as well.",
    ("mounts", "/proc/(bus|fs|irq|sys|sysrq-trigger)"): "Read-only in both; the native launcher sets nosuid, nodev and noexec again, crun "
    "leaves them to the mount that it was copied from.",
    ("dev", "pts"): "Its mounter is the node's root in one, root inside in the other; what is in it belongs to root inside in both.",
}

# The same for Docker's defaults beside the native launcher.
DOCKER: dict[tuple[str, str], str] = {
    (
        "namespaces",
        ".*",
    ): "Docker shares the node's user namespace unless the daemon is told otherwise, so the node's root governs all; with "
    "cgroup v1 it shares the cgroup namespace too.",
    ("status", "Cap.*"): "Docker gives CAP_MKNOD. Device nodes that are made inside cannot be opened here, so there is nothing to make.",
    ("status", "NoNewPrivs"): "Docker lets set-id programs gain privileges unless it is told otherwise.",
    ("status", "Seccomp_filters"): "One program each, or several that are loaded one after another.",
    ("status", "Groups"): "Docker keeps the groups that the image names for root.",
    ("status", "Speculation.*|THP.*"): "Docker's older runtime switches mitigations on with its filter.",
    ("limits", ".*"): "Docker hands on the daemon's limits; here each is set: core files are off, and descriptors as on any login.",
    ("mounts", "/"): "Both an overlay; here nodev, so that a device node of a layer cannot be opened.",
    (
        "mounts",
        "/dev.*",
    ): "Docker makes a tmpfs with nodes of its own, a shared memory of 64 MiB and a message queue; here /dev is a directory "
    "of the agent's layer, devices are bound, shared memory counts to the disk, and a superblock less makes a launch cheaper.",
    (
        "mounts",
        "/sys.*",
    ): "Docker shows a read-only /sys and the cgroups. Here there is neither: two superblocks less, and less of the node to see.",
    ("mounts", "/etc/.*"): "Docker binds three files from the node; here they are files of a layer, and only with a network.",
    ("mounts", "/proc.*"): "Covers and read-only paths: Docker's list, by its runtime's flags and with an empty tmpfs for each directory.",
    ("dev", ".*"): "Docker's nodes belong to root inside, and there is no user namespace; here they are the node's.",
    (
        "proc",
        ".*",
    ): "Sandboxes are the first to go when the node is out of memory (500); Docker's containers are not told apart from the node's "
    "processes. Masks are the same but for what Docker 20.10 did not know yet.",
    (
        "seccomp",
        ".*",
    ): "Docker 20.10's list is older and answers EPERM to what it does not know, where a C library expects ENOSYS to fall back; "
    "and this project's list denies what reaches shared tables, other ABIs and the kernel's less travelled parts.",
}


async def container(driver: str, mount: LayerMount) -> View:
    """A sandbox of the default plan, started by ``driver``."""
    place = Path(tempfile.mkdtemp(prefix="dsec-t-", dir="/tmp"))
    yard = Yard("container", f"t{secrets.token_hex(4)}", place, mount)
    yard.driver = driver
    try:
        backend = await yard.backend()
        if backend.driver.name != driver:
            raise RuntimeError(f"{driver} does not serve here: {backend.capabilities.missing}")
        box = await backend.launch(yard.plan(backend.node))
        assert (await sh(box, "true"))[0] == 0
        return await asyncio.to_thread(seen, box.pid)
    finally:
        await yard.close()
        clear(place)


def docker(daemon: Any, tree: Path) -> View:
    """A container of Docker's defaults, but for no network, from the same files."""
    with subprocess.Popen(["tar", "-C", str(tree), "-c", "."], stdout=subprocess.PIPE) as tar:
        subprocess.run(
            ["docker", "-H", f"unix://{daemon.socket}", "import", "-", "small"], stdin=tar.stdout, check=True, capture_output=True
        )
    name = daemon.docker("run", "-d", "--network", "none", "small", "/bin/sleep", "300").strip()
    if name.startswith("error"):
        raise RuntimeError(name)
    try:
        return seen(int(daemon.docker("inspect", "-f", "{{.State.Pid}}", name)))
    finally:
        daemon.docker("rm", "-f", name)


def seen(pid: int) -> View:
    view = look(pid)
    with contextlib.suppress(OSError):  # a kernel without CONFIG_CHECKPOINT_RESTORE does not show filters
        view["seccomp"] = verdicts(filters(pid), platform.machine())
    return view


def reason(table: Mapping[tuple[str, str], str], section: str, what: str) -> str:
    """Why this one differs; "" when nobody has said."""
    return next((text for (of, pattern), text in table.items() if of == section and re.fullmatch(pattern, what)), "")


def unexplained(views: dict[str, View], table: Mapping[tuple[str, str], str]) -> dict[tuple[str, str], dict[str, str]]:
    return {key: each for key, each in differences(views).items() if not reason(table, *key)}


def document(native: View, crun: View, docker: View | None) -> str:
    """docs/isolation-differences.md."""
    lines = [
        "# What a process inside sees: native launcher, crun, Docker's defaults",
        "",
        (
            f"Written by `python -m tests.system.differential` on Linux {platform.release().split('-')[0]}, {platform.machine()}; "
            "`tests/system/test_differential.py` compares again, and fails on a difference that has no reason here. Compared are "
            "namespaces and who governs them, ids, capabilities, no_new_privs, resource limits, mounts with their flags, /dev, what "
            "of /proc can be read, and the verdict of the seccomp filter, as the kernel holds it, on every number of every ABI."
        ),
        "",
        f"Compared: {sum(len(part) for part in native.values())} facts, of them {len(native.get('seccomp', {}))} verdicts.",
        "",
        "## Native launcher and crun",
        "",
        *_table({"native": native, "crun": crun}, DRIVERS),
    ]
    if docker is not None:
        lines += [
            "",
            "## Native launcher and Docker's defaults (20.10, runc, `--network none`)",
            "",
            *_table({"native": native, "docker": docker}, DOCKER),
        ]
    return "\n".join(lines) + "\n"


def _table(views: dict[str, View], table: Mapping[tuple[str, str], str]) -> list[str]:
    """Rows of the same section, answers and reason are one."""
    names = list(views)
    rows: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for (section, what), each in differences(views).items():
        rows[section, each[names[0]], each[names[1]], reason(table, section, what)].append(what)
    out = [f"| | what | {names[0]} | {names[1]} |", "|---|---|---|---|"]
    reasons: dict[str, str] = {}
    for (section, one, other, why), what in rows.items():
        number = reasons.setdefault(why, str(len(reasons) + 1))
        shown = ", ".join(what[:12]) + (f" and {len(what) - 12} more" if len(what) > 12 else "")
        out.append(f"| {section} ({number}) | {shown} | {one or '(none)'} | {other or '(none)'} |")
    return [*out, "", *(f"{number}. {why}" for why, number in reasons.items())]


async def main() -> None:
    place = Path(tempfile.mkdtemp(prefix="dsec-t-", dir="/tmp"))
    try:
        build_small_base(place / "tree")
        mount = LayerMount(kind="dir", source=str(place / "tree"))
        native, crun = [await container(driver, mount) for driver in ("native", "crun")]
        other = None
        if shutil.which("dockerd", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin"):
            from tests.fixtures_docker import Dockerd

            daemon = Dockerd(Path(tempfile.mkdtemp(prefix="dsec-d-", dir="/tmp")))
            try:
                await asyncio.to_thread(daemon.start, runtimes=())
                other = await asyncio.to_thread(docker, daemon, place / "tree")
            finally:
                await asyncio.to_thread(daemon.clean)
        DOC.write_text(document(native, crun, other))
        views = {"native": native, "crun": crun}
        left = unexplained(views, DRIVERS) | (unexplained({"native": native, "docker": other}, DOCKER) if other else {})
        for key, each in left.items():
            sys.stdout.write(f"no reason: {key} {json.dumps(each)}\n")
    finally:
        await asyncio.to_thread(clear, place)


if __name__ == "__main__":
    asyncio.run(main())
