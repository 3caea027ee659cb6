"""From a `LaunchPlan` to what crun and runc read: config.json (OCI runtime-spec 1.0). Pure."""

from __future__ import annotations

import base64
from collections.abc import Collection, Sequence
from typing import Any

from dsec.backends.base import LaunchPlan

GUEST_PATH = "/.dsec/aether"
OOM_SCORE_ADJ = 500  # the node's own daemons cannot lower theirs everywhere, so sandboxes raise theirs
BLOB_ANNOTATION = "run.oci.seccomp_bpf_data"
NOFILE = (1024, 4096)
# What a filter does where the runtime wants names instead of a program (runc); see `seccomp.to_oci`.

USERNS_FD = 600  # where the launcher leaves it, above every layer's descriptor


def render(
    plan: LaunchPlan,
    *,
    root: str,
    args: Sequence[str] = (GUEST_PATH,),
    seccomp_blob: bytes = b"",
    seccomp_oci: dict[str, Any] | None = None,
    nofile: tuple[int, int] = NOFILE,
    empty: str = "",
    cgroups_path: str = "",
    masked_directories: Collection[str] = (),
    join_userns: bool = False,
) -> dict[str, Any]:
    """The runtime's config.

    ``root`` is where the launcher attaches the overlay in its private mount namespace. ``seccomp_blob`` is a compiled program
    (crun takes it as an annotation, 10 ms faster than the rules); ``seccomp_oci`` is the same profile as rules, for runc.
    ``cgroups_path`` is for runc, which joins groups by itself: it gets the ones that we made. ``empty`` is an empty directory to
    cover ``masked_directories`` with: crun would make a file system for each, and every superblock makes later launches slower.
    ``join_userns``: the runtime takes the user namespace that the launcher made, instead of making one that the node's root owns.
    Resources are not in it: the cgroups are ours and are joined before the runtime starts.
    """
    namespaces = ["pid", "mount", "ipc", "uts", "cgroup", "network"]
    linux: dict[str, Any] = {
        "namespaces": [{"type": name} for name in namespaces],
        "maskedPaths": [path for path in plan.masked if not empty or path not in masked_directories],
        "readonlyPaths": list(plan.readonly),
    }
    if cgroups_path:
        linux["cgroupsPath"] = cgroups_path
    if plan.idmap is not None:
        linux["namespaces"].append({"type": "user"} | ({"path": f"/proc/self/fd/{USERNS_FD}"} if join_userns else {}))
        mapping = [{"containerID": 0, "hostID": plan.idmap.base, "size": plan.idmap.count}]
        linux["uidMappings"] = mapping
        linux["gidMappings"] = mapping
    if seccomp_oci is not None:
        linux["seccomp"] = seccomp_oci
    capabilities = list(plan.capabilities)
    covers = [path for path in plan.masked if empty and path in masked_directories]
    return {
        "ociVersion": "1.0.0",
        "hostname": plan.hostname,
        "root": {"path": root, "readonly": False},
        "mounts": [
            {"destination": mount.target, "type": mount.fstype, "source": mount.source, "options": list(mount.options)}
            for mount in plan.mounts
        ]
        + [
            {"destination": path, "type": "bind", "source": empty, "options": ["bind", "ro", "nosuid", "nodev", "noexec"]}
            for path in covers
        ],
        "process": {
            "terminal": False,
            "args": list(args),
            "cwd": "/",
            "user": {"uid": 0, "gid": 0},
            "env": [f"{name}={value}" for name, value in plan.env.items()],
            "noNewPrivileges": True,
            "oomScoreAdj": OOM_SCORE_ADJ,
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
            "rlimits": [
                {"type": "RLIMIT_NOFILE", "soft": nofile[0], "hard": nofile[1]},
                {"type": "RLIMIT_CORE", "soft": 0, "hard": 0},
            ],
        },
        "linux": linux,
        "annotations": {BLOB_ANNOTATION: base64.b64encode(seccomp_blob).decode()} if seccomp_blob else {},
    }


def guest_options(plan: LaunchPlan) -> tuple[str, ...]:
    """Arguments of the guest: whom and where commands run as, and the limits of each, which it sets for them and not for itself."""
    options = {"--user": plan.user, "--workdir": plan.workdir or "/", "--nofile": plan.resources.nofile, "--fsize": plan.resources.fsize}
    return tuple(word for name, value in options.items() if value for word in (name, str(value)))
