"""Puts a network on the node: the nftables table, the veths, the routes. Everything blocks: call it in a thread.

The table is loaded by ``nft`` once a start; what is done for each sandbox are netlink messages (dsec/security/netlink.py), and no process
is started. What the node has already is read in dsec/security/rtnl.py. All of it happens in the network namespace of the calling thread,
which is the Edge's.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

from dsec import syscalls
from dsec.errors import NodeError, Unsupported
from dsec.security import netlink, rtnl
from dsec.security.netlink import NETLINK_NETFILTER, NETLINK_ROUTE, Message, Netlink
from dsec.security.network import ANSWERS, GATEWAY6, HOST_MAC, INTERFACE, MARKS, SOURCES4, SOURCES6, Ruleset, Wiring

FORWARD4 = "/proc/sys/net/ipv4/ip_forward"
FORWARD6 = "/proc/sys/net/ipv6/conf/all/forwarding"
ELEMENTS_A_MESSAGE = 512  # an attribute holds 64 KiB at most


def trouble() -> str:
    """Why ``network="open"`` cannot be given on this node, with the command that helps; empty when it can."""
    if syscalls.disabled("network"):
        return "disabled by DSEC_DISABLE"
    if shutil.which("nft") is None:
        return "nft is not installed: apt-get install nftables"
    if importlib.util.find_spec("pyroute2") is None:
        return "pyroute2 is not installed: pip install 'dsec[node]'"
    if _read(FORWARD4) != "1":
        return "IPv4 forwarding is off: sysctl -w net.ipv4.ip_forward=1 (and restart the Edge)"
    return ""


def trouble6() -> str:
    """Why open sandboxes have no IPv6 here; empty when they have it."""
    if syscalls.disabled("ipv6"):
        return "disabled by DSEC_DISABLE"
    forwards = _read(FORWARD6)
    if not forwards:
        return "the node has none"
    return "" if forwards == "1" else "its forwarding is off: sysctl -w net.ipv6.conf.all.forwarding=1 (and restart the Edge)"


def firewall_trouble() -> str:
    """Another table's base chain that drops by default what sandboxes send (Docker's drops what is forwarded). It may have rules that let
    them pass, which is not looked at. The commands are for a person: this project changes no table but its own."""
    for chain in _base_chains():
        if chain.get("policy") != "drop":
            continue
        name = f"{chain['family']} {chain['table']} {chain['name']}"
        if chain.get("hook") == "forward":
            both = f"nft insert rule {name} iifname 'ds*' accept; nft insert rule {name} oifname 'ds*' accept"
            return f"chain {name} drops what is forwarded, unless a rule accepts it: {both}"
        if chain.get("hook") == "input":
            return f"chain {name} drops what comes in, names are then not resolved: nft insert rule {name} iifname 'ds*' th dport 53 accept"
    return ""


def _base_chains() -> list[dict[str, str]]:
    done = _nft("-j", "list", "chains")
    if done.returncode:
        return []
    return [entry["chain"] for entry in json.loads(done.stdout)["nftables"] if "chain" in entry]


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return ""


def _nft(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["nft", *arguments], input=text, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unsupported(f"nft: {error}", reason="network", fix="apt-get install nftables") from error


@contextlib.contextmanager
def choosing() -> Iterator[None]:
    """One Edge at a time chooses its block: abstract socket names are a network namespace's own, and go with their process."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
        for _ in range(500):
            try:
                lock.bind("\0dsec-network")
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                time.sleep(0.01)
        else:
            raise NodeError("another Edge has been choosing its addresses for 5 s", reason="network")
        yield


# --- the Edge's part -----------------------------------------------------------------------------------------------------


def load(ruleset: Ruleset) -> None:
    """Makes or renews the Edge's table in one transaction. Elements of sandboxes that live stay. Raises `NodeError`."""
    done = _nft("-f", "-", text=ruleset.text())
    if done.returncode:
        raise NodeError(f"nft: {done.stderr.strip()[:600]}", reason="network", retryable=False)


def there(table: str) -> bool:
    """Whether the table still exists: a node's firewall may flush the whole ruleset when it is loaded again. Raises `OSError`."""
    with Netlink(NETLINK_NETFILTER) as filters:
        code = filters.send([netlink.get_table(table)])[0]
    if code not in (0, errno.ENOENT):
        raise OSError(code, f"table {table}: {os.strerror(code)}")
    return code == 0


def unload(table: str) -> None:
    """Removes the table. Nothing happens where there is none."""
    with Netlink(NETLINK_NETFILTER) as filters:
        try:
            filters.transaction([netlink.del_table(table)], "delete the table")
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise


# --- a sandbox's part ----------------------------------------------------------------------------------------------------


def wire(wiring: Wiring, *, table: str, alias: str, pid: int, cgroup: str, mtu: int) -> None:
    """Gives the sandbox whose init is ``pid`` its network. Its rules are there before its interface is. On failure nothing stays.

    ``cgroup`` ends what /proc/<pid>/cgroup says while the number is still its. Raises `OSError`, and `FileExistsError` when the
    interface's name is taken.
    """
    inside = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if cgroup not in Path(f"/proc/{pid}/cgroup").read_text():
            raise ProcessLookupError(errno.ESRCH, f"process {pid} is not the sandbox's")
        with Netlink(NETLINK_ROUTE) as route:
            allow([wiring], table)
            try:
                route.run([netlink.new_veth(wiring.link, HOST_MAC, mtu, INTERFACE, wiring.mac, inside)], f"veth {wiring.link}")
            except BaseException:
                unwire({wiring.link: wiring}, table=table)
                raise
            try:
                route.run(_outside(wiring, socket.if_nametoindex(wiring.link), alias), f"routes to {wiring.link}")
                with _enter(inside) as (guest, index):
                    guest.run(_inside(wiring, index), f"{INTERFACE} inside")
            except BaseException:
                rtnl.delete_links([wiring.link])
                unwire({wiring.link: wiring}, table=table)
                raise
    finally:
        os.close(inside)


def _outside(wiring: Wiring, index: int, alias: str) -> list[Message]:
    address4 = IPv4Address(wiring.address4)
    messages = [
        netlink.set_link(index, alias=alias, no_link_local=bool(_read(FORWARD6))),
        netlink.set_link(index, up=True, no_arp=True),
        netlink.new_route(index, address4),
        netlink.new_neighbour(index, address4, wiring.mac),
    ]
    if wiring.address6:
        address6 = IPv6Address(wiring.address6)
        messages += [netlink.new_route(index, address6), netlink.new_neighbour(index, address6, wiring.mac)]
    return messages


def _inside(wiring: Wiring, index: int) -> list[Message]:
    gateway4 = IPv4Address(wiring.gateway4)
    messages = [
        netlink.set_link(index, no_link_local=bool(_read(FORWARD6))),
        netlink.new_address(index, IPv4Address(wiring.address4)),
        netlink.set_link(index, up=True),
        netlink.new_neighbour(index, gateway4, HOST_MAC),
        netlink.new_route(index, gateway4),
        netlink.new_route(index, None, via=gateway4),
    ]
    if wiring.address6:
        messages += [
            netlink.new_address(index, IPv6Address(wiring.address6)),
            netlink.new_neighbour(index, GATEWAY6, HOST_MAC),
            netlink.new_route(index, None, via=GATEWAY6),
        ]
    return messages


@contextlib.contextmanager
def _enter(netns: int) -> Iterator[tuple[Netlink, int]]:
    """A socket in another network namespace and the index of the interface there; this thread is back at once."""
    back = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        syscalls.setns(netns, syscalls.CLONE_NEWNET)
        try:
            guest = Netlink(NETLINK_ROUTE)
            index = socket.if_nametoindex(INTERFACE)
        finally:
            syscalls.setns(back, syscalls.CLONE_NEWNET)
    finally:
        os.close(back)
    with guest:
        yield guest, index


def unwire(links: Mapping[str, Wiring | None], *, table: str) -> None:
    """Takes the rules of sandboxes away, by the names of their interfaces; idempotent. All in one transaction, for each waits 16 ms for
    all CPUs. Where it is not known what they had, it is looked for. Their interfaces go with the last process of their namespaces."""
    known = [wiring for wiring in links.values() if wiring is not None]
    if len(known) < len(links) or not _deleted(deletions(table, [element for wiring in known for element in wiring.elements()])):
        forget(table, lambda name: name in links)


def deletions(table: str, elements: Iterable[tuple[str, bytes, bytes]]) -> list[Message]:
    """One message for each set (and `ELEMENTS_A_MESSAGE`): each has an answer, and a socket's buffer is small."""
    by_set: dict[str, list[tuple[bytes, bytes]]] = {}
    for name, key, _ in elements:
        by_set.setdefault(name, []).append((key, b""))
    return [
        netlink.set_elements(table, name, listed[at : at + ELEMENTS_A_MESSAGE], delete=True)
        for name, listed in by_set.items()
        for at in range(0, len(listed), ELEMENTS_A_MESSAGE)
    ]


def allow(wirings: Iterable[Wiring], table: str) -> None:
    """The sandboxes' rules, where they may be there already. Raises `OSError`."""
    for wiring in wirings:
        _elements(wiring.messages(table), "elements")


def _elements(messages: list[Message], what: str) -> None:
    with Netlink(NETLINK_NETFILTER) as filters:
        filters.transaction(messages, what)


def _deleted(messages: list[Message]) -> bool:
    """Deletes elements; False, and nothing is deleted, where one of them is not there."""
    if messages:
        try:
            _elements(messages, "delete elements")
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise
            return False
    return True


def forget(table: str, unwanted: Callable[[str], bool]) -> None:
    """Deletes the elements of every interface whose name is ``unwanted``."""
    for _ in range(8):  # another may delete one of them at the same time
        found = [element for element in _all_elements(table) if unwanted(element[1][:16].rstrip(b"\0").decode(errors="replace"))]
        if _deleted(deletions(table, found)):
            return
    raise OSError(errno.EBUSY, f"elements of {table} change all the time")


def _all_elements(table: str) -> Iterator[tuple[str, bytes, bytes]]:
    """Every element of the sandboxes' sets: (set, key, no data). Each key begins with the interface's name."""
    for name in (SOURCES4, SOURCES6, MARKS, ANSWERS):
        for key in keys(table, name):
            yield name, key, b""


def keys(table: str, name: str) -> list[bytes]:
    """The keys of a set; none where the table is not there."""
    with Netlink(NETLINK_NETFILTER) as filters:
        try:
            return [key for payload in filters.dump(netlink.get_elements(table, name)) for key in netlink.keys_of(payload)]
        except OSError as error:
            if error.errno == errno.ENOENT:
                return []
            raise
