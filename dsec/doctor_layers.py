"""What the doctor asks about layers, and about what sandboxes write on top of them."""

from __future__ import annotations

from dsec import doctor_probes as probes
from dsec import syscalls
from dsec.backends.disk import Disks
from dsec.backends.plan import DISK_MODES
from dsec.config import load
from dsec.doctor_rules import Answer, Rules
from dsec.errors import InvalidRequest, Unsupported
from dsec.layers import fuse
from dsec.layers import probe as stacking
from dsec.layers.fetch import way_to_load

rules = Rules()


rules.tried(
    "erofs_file",
    "mounted from the file",
    lambda: probes.try_erofs("erofs_file"),
    "layers are mounted through loop devices, or unpacked to directories where that fails too",
    "use a kernel >= 6.12 with EROFS_FS_BACKED_BY_FILE",
    "fallback",
)
rules.tried(
    "erofs_loop",
    "mounted through a loop device",
    lambda: probes.try_erofs("erofs_loop"),
    "where file-backed mounts fail too, layers are plain directories",
    "modprobe loop erofs",
    "fallback",
)


@rules.check("mkfs_erofs", "layers are kept as plain directories", "apt-get install erofs-utils")
def _mkfs_erofs() -> Answer:
    path, version = probes.mkfs_erofs()
    return ("ok", f"{version or 'unknown version'} at {path}") if path else ("missing", "not installed")


@rules.check(
    "mkfs_erofs_1_8",
    "files' holes are stored as zeros, and a tree gets another digest than on nodes with 1.8",
    "run .ci/setup, or use erofs-utils >= 1.8",
)
def _mkfs_erofs_1_8() -> Answer:
    path, version = probes.mkfs_erofs()
    if probes.at_least(version, 1, 8):
        return "ok", f"mkfs.erofs {version}"
    return "fallback", f"mkfs.erofs {version or 'of unknown version'}" if path else "mkfs.erofs is not installed"


rules.tried(
    "overlay_fd",
    "layers by descriptor",
    stacking.by_descriptor,
    "overlays are made by paths in a private mount namespace",
    "use a kernel >= 6.15",
    "fallback",
)
rules.tried(
    "userns",
    "user namespace with 65,536 ids",
    probes.try_userns,
    "root in a sandbox is root's id on the node",
    "sysctl -w user.max_user_namespaces=65536; inside a chroot they cannot be made at all",
)
rules.tried(
    "idmap",
    "idmapped layers under an overlay",
    stacking.idmapped,
    "user namespaces cannot be used for sandboxes, so root in one has root's id",
    "use a kernel >= 5.19",
)
rules.tried(
    "fanotify",
    "pre-content events",
    probes.try_pre_content,
    "layers that are filled as they are read are served through FUSE",
    "use a kernel >= 6.14",
    "fallback",
)
rules.tried("fuse", "/dev/fuse serves a file", fuse.attempt, "without fanotify too, layers are fetched whole", "modprobe fuse", "fallback")


@rules.check("on_demand", "what is read first of a layer passes through user space, or all of it is fetched before", "use a kernel >= 6.14")
def _on_demand() -> Answer:
    way, why = way_to_load()
    how = {"fanotify": "filled as read, under fanotify", "fuse": "filled as read, through FUSE", "whole": "fetched whole first"}[way]
    return ("fallback" if why else "ok"), how + (f" ({why})" if why else "")


@rules.check(
    "disk_limit",
    "the writable layer is a tmpfs: its bytes count as memory, and admission knows it",
    "set container.disk_store_bytes, or put edge.state_dir on xfs or ext4 mounted with prjquota, or on btrfs with quotas",
)
def _disk_limit() -> Answer:
    try:
        config = load()
        room = config.container
        disks = Disks.seen(config.edge.state_dir, room.disk, room.disk_store_bytes, userns=room.userns and not syscalls.disabled("userns"))
    except (InvalidRequest, Unsupported) as error:
        return "missing", str(error)
    used = disks.modes[0]
    better = [f"disk={mode}: {disks.missing[f'disk={mode}']}" for mode in DISK_MODES[: DISK_MODES.index(used)] if room.disk == "auto"]
    found = f"{used} at {disks.state}" + (f" ({'; '.join(better)})" if better else "")
    return ("fallback" if used == "tmpfs" else "ok"), found


@rules.check("mmdebstrap", "`dsec layer bootstrap` cannot make a Debian base", "apt-get install mmdebstrap")
def _mmdebstrap() -> Answer:
    path, version = probes.version_of("mmdebstrap")
    return ("ok", version or path) if path else ("missing", "not installed")
