"""What a sandbox with ``network="open"`` gets, decided before anything is made: addresses, names, the nftables ruleset, its resolver.

A sandbox has a routed veth: one IPv4 address of the Edge's block (/32) and one IPv6 address of a prefix of its own (/128), its only
neighbour is its end of the veth on the node, and the node has one route to it. There is no bridge, so there is no broadcast between
sandboxes. One nftables table an Edge holds the policy; what differs between sandboxes are elements of its sets.

By default a sandbox reaches everything that the node can reach, through NAT, except: the node itself on any of its addresses (save the
resolver), other sandboxes, link-local addresses with the clouds' metadata services, the bus, and what `network.deny` names. Private
networks beyond the node are open unless they are denied. Nobody reaches a sandbox: only answers come back.

Pure: it can be printed (`Ruleset.text`) and tested without a kernel. Rules by name (``network=["index.example.org:443"]``) are not
enforced yet and are refused; their place is `Wiring` (one more set of elements) and the resolver's `Gate`.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network

import msgspec

from dsec.errors import Busy, InvalidRequest, Unsupported
from dsec.security.netlink import Message, ifname, set_elements

INTERFACE = "eth0"  # its name inside
GATEWAY6 = IPv6Address("fe80::1")  # needs not be anybody's address: a permanent neighbour leads to the node's end
HOST_MAC = bytes.fromhex("020000000001")  # every pair is a link of its own
NAME_LENGTH = 15  # IFNAMSIZ less the closing NUL
_PREFIX = "ds"
_TAG, _OWN = 4, 9  # of a name: the Edge's part and the sandbox's

# Never reached, whatever the configuration says: what is no unicast address, and the clouds' metadata services (most are link-local; the
# others are Alibaba's, Azure's, Amazon's and Google's, and 169.254/16 through NAT64).
NEVER4 = ("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/3", "100.100.100.200/32", "168.63.129.16/32")
NEVER6 = ("::/127", "::ffff:0:0/96", "64:ff9b::a9fe:0/112", "fe80::/10", "fec0::/10", "ff00::/8", "fd00:ec2::254/128", "fd20:ce::254/128")

SOURCES4, SOURCES6, MARKS, ANSWERS = "sources4", "sources6", "marks", "answers"
Network = IPv4Network | IPv6Network


class Wiring(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sandbox's network, part of its `LaunchPlan`. Addresses are texts; an empty one is not given."""

    link: str  # the node's end of the veth
    address4: str
    gateway4: str  # also its resolver
    address6: str = ""
    mark: int = 0  # of its flows in conntrack: an answer to an earlier holder of the address is not delivered

    @property
    def mac(self) -> bytes:
        """Of the sandbox's end: locally administered, from its address."""
        return b"\x02\xd5" + IPv4Address(self.address4).packed

    def elements(self) -> list[tuple[str, bytes, bytes]]:
        """What it adds to the table's sets: (set, key, data)."""
        name, mark = ifname(self.link), struct.pack("=I", self.mark)
        found = [
            (SOURCES4, name + IPv4Address(self.address4).packed, b""),
            (MARKS, name, mark),
            (ANSWERS, name + mark, b""),
        ]
        if self.address6:
            found.append((SOURCES6, name + IPv6Address(self.address6).packed, b""))
        return found

    def messages(self, table: str) -> list[Message]:
        """What adds them."""
        return [set_elements(table, name, [(key, data)]) for name, key, data in self.elements()]


class Block(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The addresses of one Edge on one node. ``net6`` is empty where IPv6 is not forwarded."""

    net4: str
    net6: str
    prefix: str  # of its interfaces' names
    notes: tuple[str, ...] = ()  # what open sandboxes do not get here

    @property
    def gateway4(self) -> str:
        return str(IPv4Network(self.net4)[1])

    @property
    def table(self) -> str:
        """Its nftables table, in the family inet."""
        return f"dsec_{self.prefix}"

    def wiring(self, slot: int, ulid: str) -> Wiring:
        """The network of the sandbox in ``slot``. Raises `Busy` when the block has no address for it."""
        net = IPv4Network(self.net4)
        if slot + 2 >= net.num_addresses - 1:
            raise Busy(f"{self.net4} has no address for another sandbox", reason="address")
        address6 = ""
        if self.net6:
            # 64 bits of the ulid's random part: unlike an IPv4 address it is never used again.
            address6 = str(IPv6Network(self.net6)[int.from_bytes(_digest(ulid)[:8], "big") | 1 << 63])
        mark = int.from_bytes(_digest(ulid)[8:12], "big") | 1
        return Wiring(link=link_name(self.prefix, ulid), address4=str(net[slot + 2]), gateway4=self.gateway4, address6=address6, mark=mark)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def link_prefix(edge: str, state_dir: str) -> str:
    """How the names of an Edge's interfaces begin. Two Edges of a node that share one are told apart by the interfaces' aliases."""
    return _PREFIX + base64.b32encode(_digest(f"{edge}\0{state_dir}"))[:_TAG].decode().lower()


def link_name(prefix: str, ulid: str) -> str:
    """The node's end of a sandbox's veth: 15 characters, 45 random bits of the ulid among them."""
    name = prefix + ulid[-_OWN:]
    assert len(name) <= NAME_LENGTH
    return name


def alias(edge: str, ulid: str) -> str:
    """What the kernel remembers an interface by: whose it is, whole."""
    return f"dsec {edge} {ulid}"


def blocks(range4: str, size: int) -> list[IPv4Network]:
    """The blocks that the configured range is cut into. Raises `InvalidRequest`."""
    try:
        whole = IPv4Network(range4)
    except ValueError as error:
        raise InvalidRequest(str(error), field="network.ipv4_range", value=range4, fix="use a network such as 10.208.0.0/12") from error
    if not whole.prefixlen <= size <= 29:
        raise InvalidRequest(f"does not fit into {range4}", field="network.ipv4_block", value=size, fix=f"use {whole.prefixlen} to 29")
    if size - whole.prefixlen > 12:
        raise InvalidRequest(
            f"cuts {range4} into more than 4096 blocks", field="network.ipv4_block", value=size, fix="use a smaller range or larger blocks"
        )
    return list(whole.subnets(new_prefix=size))


def choose_block(
    candidates: Sequence[IPv4Network], taken: Iterable[tuple[Network, str]], seed: str = "", first: IPv4Network | None = None
) -> IPv4Network:
    """The first block that overlaps nothing in ``taken`` (network, who uses it). The walk begins at a place that ``seed`` decides, so
    that Edges of one node seldom want the same; ``first`` is preferred where it is one of the candidates. Default routes do not count.

    Raises `Unsupported` that names what is in the way."""
    used = [(net, who) for net, who in taken if isinstance(net, IPv4Network) and net.prefixlen > 0]
    begin = int.from_bytes(_digest(seed)[:4], "big") % len(candidates) if seed else 0
    blockers: set[str] = set()
    preferred = [first] if first is not None and first in candidates else []
    walk = [*preferred, *candidates[begin:], *candidates[:begin]]
    for block in walk:
        found = [f"{net} ({who})" for net, who in used if net.overlaps(block)]
        if not found:
            return block
        blockers.update(found)
    raise Unsupported(
        f"every block of sandbox addresses overlaps a route of this node: {', '.join(sorted(blockers)[:4])}",
        field="network.ipv4_range",
        fix="set network.ipv4_range to a network that this node does not use",
        reason="network",
    )


def prefix6(configured: str, edge: str, state_dir: str) -> IPv6Network:
    """The Edge's /64: configured, or a unique local one (RFC 4193) derived from its name. Raises `InvalidRequest`."""
    if not configured:
        return IPv6Network((b"\xfd" + _digest(f"{edge}\0{state_dir}")[:7] + bytes(8), 64))
    try:
        net = IPv6Network(configured)
    except ValueError as error:
        raise InvalidRequest(str(error), field="network.ipv6_prefix", value=configured, fix="use a /64") from error
    if net.prefixlen > 64:
        raise InvalidRequest("is longer than a /64", field="network.ipv6_prefix", value=configured, fix="use a /64")
    return net


class Denied(msgspec.Struct, frozen=True, kw_only=True):
    """What no sandbox reaches: networks, and single ports of an address (the bus)."""

    nets: tuple[str, ...] = ()
    endpoints: tuple[tuple[str, int], ...] = ()


def check_deny(entries: Iterable[str]) -> tuple[str, ...]:
    """The networks of `network.deny`. Raises `InvalidRequest`."""
    found = []
    for entry in entries:
        try:
            found.append(str(ip_network(entry, strict=False)))
        except ValueError as error:
            raise InvalidRequest(
                str(error), field="network.deny", value=entry, fix="use addresses and networks in CIDR notation"
            ) from error
    return tuple(found)


class Ruleset(msgspec.Struct, frozen=True, kw_only=True):
    """The Edge's nftables table. `text` is what ``nft -f`` reads; loading it again keeps the sandboxes' elements."""

    block: Block
    denied: Denied = Denied()
    connections: int = 4096  # at once, a sandbox

    def text(self) -> str:
        block = self.block
        mine, gateway = f'"{block.prefix}*"', block.gateway4
        nets4 = [*NEVER4, block.net4, *(net for net in self.denied.nets if ":" not in net)]
        nets6 = [*NEVER6, *([block.net6] if block.net6 else []), *(net for net in self.denied.nets if ":" in net)]
        ends4 = [f"{host} . {port}" for host, port in self.denied.endpoints if ":" not in host]
        ends6 = [f"{host} . {port}" for host, port in self.denied.endpoints if ":" in host]
        nat6 = f"ip6 saddr {block.net6} oifname != {mine} masquerade" if block.net6 else "# no IPv6"
        refuse = "counter reject with icmpx type admin-prohibited"
        asked = "".join(
            f"    meta l4proto tcp ct original {'ip6' if ':' in host else 'ip'} daddr {host} ct original proto-dst {port} {refuse}\n"
            for host, port in self.denied.endpoints
        )
        return f"""\
table inet {block.table} {{
  set {SOURCES4} {{ type ifname . ipv4_addr; }}
  set {SOURCES6} {{ type ifname . ipv6_addr; }}
  map {MARKS} {{ type ifname : mark; }}
  set {ANSWERS} {{ type ifname . mark; }}
  set denied4 {{ type ipv4_addr; flags interval; auto-merge; }}
  set denied6 {{ type ipv6_addr; flags interval; auto-merge; }}
  set endpoints4 {{ type ipv4_addr . inet_service; }}
  set endpoints6 {{ type ipv6_addr . inet_service; }}
  set flows {{ type ifname; size 65536; flags dynamic; }}
  chain arrive {{ type filter hook prerouting priority raw; policy accept; }}
  chain answer {{ type filter hook output priority raw; policy accept; }}
  chain paint {{ type filter hook prerouting priority mangle; policy accept; }}
  chain input {{ type filter hook input priority filter - 5; policy accept; }}
  chain forward {{ type filter hook forward priority filter - 5; policy accept; }}
  chain leave {{ type nat hook postrouting priority srcnat; policy accept; }}
  chain outbound {{ }}
}}
flush table inet {block.table}
flush set inet {block.table} denied4
flush set inet {block.table} denied6
flush set inet {block.table} endpoints4
flush set inet {block.table} endpoints6
{_elements(block.table, "denied4", nets4)}{_elements(block.table, "denied6", nets6)}\
{_elements(block.table, "endpoints4", ends4)}{_elements(block.table, "endpoints6", ends6)}\
table inet {block.table} {{
  # Nobody sends with another's address. What is for the node is not tracked, so that no table's DNAT leads it anywhere else.
  chain arrive {{
    iifname != {mine} accept
    iifname . ip saddr != @{SOURCES4} counter drop
    iifname . ip6 saddr != @{SOURCES6} counter drop
    fib daddr type {{ broadcast, multicast, anycast }} counter drop
    fib daddr type local notrack
  }}
  chain answer {{
    oifname {mine} ip saddr {gateway} meta l4proto {{ tcp, udp }} th sport 53 notrack
  }}
  chain paint {{
    iifname {mine} ct state new ct mark set iifname map @{MARKS}
  }}
  # The node itself: its resolver and nothing else. Nobody but sandboxes asks the resolver.
  chain input {{
    iifname {mine} ip daddr {gateway} meta l4proto {{ tcp, udp }} th dport 53 accept
    iifname {mine} {refuse}
    iifname != "lo" ip daddr {gateway} counter drop
  }}
  chain forward {{
    iifname {mine} jump outbound
    oifname {mine} oifname . ct mark @{ANSWERS} ct state established,related accept
    oifname {mine} counter drop
  }}
  chain outbound {{
    ct state invalid counter drop
    oifname {mine} {refuse}
    ip daddr @denied4 {refuse}
    ip6 daddr @denied6 {refuse}
    ip daddr . th dport @endpoints4 {refuse}
    ip6 daddr . th dport @endpoints6 {refuse}
    # What was asked for, where another table's DNAT has led it elsewhere.
    ct original ip daddr @denied4 {refuse}
    ct original ip6 daddr @denied6 {refuse}
{asked}    ct state new add @flows {{ iifname ct count over {self.connections} }} {refuse}
    accept
  }}
  chain leave {{
    ip saddr {block.net4} oifname != {mine} masquerade
    {nat6}
  }}
}}
"""


def _elements(table: str, name: str, values: Sequence[str]) -> str:
    return f"add element inet {table} {name} {{ {', '.join(values)} }}\n" if values else ""


# --- files inside ----------------------------------------------------------------------------------------------------------


def files(wiring: Wiring, hostname: str) -> dict[str, str]:
    """/etc as an open sandbox has it, by name. The resolver is the node's own, an address that is there by construction: the node's list
    of resolvers may name what cannot be reached from inside (127.0.0.53)."""
    short = hostname.split(".", 1)[0]
    names = hostname if short == hostname else f"{hostname} {short}"
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback", f"{wiring.address4} {names}"]
    if wiring.address6:
        lines.append(f"{wiring.address6} {names}")
    return {
        "resolv.conf": f"nameserver {wiring.gateway4}\noptions timeout:3 attempts:3\n",
        "hosts": "\n".join(lines) + "\n",
        "hostname": f"{hostname}\n",
    }
