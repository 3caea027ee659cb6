"""What the doctor asks about what keeps sandboxes apart, and about their networks."""

from __future__ import annotations

from pathlib import Path

from dsec import doctor_probes as probes
from dsec import syscalls
from dsec.config import NetworkConfig
from dsec.doctor_rules import Answer, Rules
from dsec.errors import Unsupported
from dsec.security import network, nft, rtnl

rules = Rules()


@rules.check("seccomp", "system calls cannot be filtered", "use a kernel with SECCOMP_FILTER")
def _seccomp() -> Answer:
    actions = Path("/proc/sys/kernel/seccomp/actions_avail").read_text().split()
    return ("ok", " ".join(actions)) if "errno" in actions else ("missing", "no errno action")


@rules.check("landlock", "nothing yet: there is no policy of files that would need it", "boot with lsm=landlock,…")
def _landlock() -> Answer:
    abi = syscalls.landlock_abi()
    return ("ok", f"ABI {abi}") if abi else ("missing", "not active")


@rules.check("bpf", "nothing yet: networks are kept by nftables", "run as root on a kernel with CONFIG_BPF_SYSCALL and CONFIG_CGROUP_BPF")
def _bpf() -> Answer:
    refused = probes.bpf_refused()
    if refused:
        return "missing", "; ".join(f"{name}: {words}" for name, words in refused.items())
    return "ok", ", ".join(probes.BPF_TYPES)


@rules.check("nft", 'network="open" is refused', "apt-get install nftables")
def _nft() -> Answer:
    path, version = probes.version_of("nft", "--version")
    return ("ok", version or path) if path else ("missing", "not installed")


@rules.check("network", 'network="open" is refused', "sysctl -w net.ipv4.ip_forward=1")
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


@rules.check("ipv6", "open sandboxes have IPv4 only", "sysctl -w net.ipv6.conf.all.forwarding=1")
def _ipv6() -> Answer:
    why = nft.trouble6()
    return ("fallback", why) if why else ("ok", "IPv6 is forwarded")


rules.tried(
    "bpf_lsm",
    "LSM programs load",
    probes.try_bpf_lsm,
    "nothing yet: there is no policy of files that would need it",
    "boot with lsm=…,bpf",
    "fallback",
)


@rules.check("apparmor", "nothing yet: there is no policy of files that would need it", "boot with lsm=…,apparmor")
def _apparmor() -> Answer:
    try:
        enabled = Path("/sys/module/apparmor/parameters/enabled").read_text().strip()
    except OSError:
        return "fallback", "not built into this kernel"
    return ("ok", "enabled") if enabled == "Y" else ("fallback", "built, not enabled")


rules.tried(
    "core_sched",
    "PR_SCHED_CORE",
    probes.try_core_sched,
    "nothing yet: no sandbox is kept off shared cores",
    "use a kernel with SCHED_CORE and SMT",
    "fallback",
)
