"""Netlink messages as bytes and a socket that sends a batch of them: what is on the way of a create must not cost milliseconds.

Only what is done for each sandbox is here: veth pairs, addresses, routes and neighbours (rtnetlink), elements of nftables sets
(nfnetlink); the rest is pyroute2's (dsec/security/rtnl.py). A batch is one system call; the answers are read until each message has had
its own. Building is pure. Constants and layouts: include/uapi/linux/{netlink,rtnetlink,if_link,
nfnetlink}.h and netfilter/nf_tables.h.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address
from typing import Self

Address = IPv4Address | IPv6Address

NETLINK_ROUTE = 0
NETLINK_NETFILTER = 12

NLM_F_REQUEST = 0x1
NLM_F_ACK = 0x4
NLM_F_DUMP = 0x300
NLM_F_REPLACE = 0x100
NLM_F_EXCL = 0x200
NLM_F_CREATE = 0x400
NLMSG_ERROR = 2
NLMSG_DONE = 3
NLA_F_NESTED = 0x8000

RTM_NEWLINK, RTM_NEWADDR, RTM_NEWROUTE, RTM_NEWNEIGH = 16, 20, 24, 28
IFLA_ADDRESS, IFLA_IFNAME, IFLA_MTU, IFLA_LINKINFO, IFLA_IFALIAS, IFLA_AF_SPEC, IFLA_NET_NS_FD = 1, 3, 4, 18, 20, 26, 28
IFLA_INFO_KIND, IFLA_INFO_DATA, VETH_INFO_PEER = 1, 2, 1
IFLA_INET6_ADDR_GEN_MODE, ADDR_GEN_NONE = 8, 1
IFF_UP, IFF_NOARP = 0x1, 0x80
IFA_ADDRESS, IFA_LOCAL, IFA_F_NODAD = 1, 2, 0x02
RTA_DST, RTA_OIF, RTA_GATEWAY = 1, 4, 5
RT_TABLE_MAIN = 254
RT_SCOPE_UNIVERSE, RT_SCOPE_LINK = 0, 253
RTN_UNICAST = 1
RTPROT_DSEC = 0xD5  # not in use by anyone in iproute2's rt_protos: it marks our routes
NDA_DST, NDA_LLADDR, NUD_PERMANENT = 1, 2, 0x80

NFNL_SUBSYS_NFTABLES = 10 << 8
NFT_MSG_GETTABLE, NFT_MSG_DELTABLE, NFT_MSG_NEWSETELEM, NFT_MSG_GETSETELEM, NFT_MSG_DELSETELEM = 1, 2, 12, 13, 14
NFNL_MSG_BATCH_BEGIN, NFNL_MSG_BATCH_END = 16, 17
NFPROTO_INET = 1
NFTA_TABLE_NAME = 1
NFTA_LIST_TABLE, NFTA_LIST_SET, NFTA_LIST_ELEMENTS = 1, 2, 3
NFTA_LIST_ELEM, NFTA_SET_ELEM_KEY, NFTA_SET_ELEM_DATA, NFTA_DATA_VALUE = 1, 1, 2, 1

_HEADER = struct.Struct("=IHHII")


class Message:
    """One request: its type, flags beside REQUEST and ACK, and payload."""

    __slots__ = ("ack", "flags", "kind", "payload")

    def __init__(self, kind: int, flags: int, payload: bytes, *, ack: bool = True) -> None:
        self.kind, self.flags, self.payload, self.ack = kind, flags, payload, ack

    def encode(self, seq: int) -> bytes:
        flags = self.flags | NLM_F_REQUEST | (NLM_F_ACK if self.ack else 0)
        return _HEADER.pack(_HEADER.size + len(self.payload), self.kind, flags, seq, 0) + self.payload


def attribute(kind: int, value: bytes) -> bytes:
    """struct nlattr with its padding."""
    size = 4 + len(value)
    return struct.pack("=HH", size, kind) + value + bytes(-size % 4)


def nest(kind: int, *attributes: bytes) -> bytes:
    return attribute(kind | NLA_F_NESTED, b"".join(attributes))


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The attributes of a received payload; stops at the first that does not fit."""
    at = 0
    while at + 4 <= len(data):
        size, kind = struct.unpack_from("=HH", data, at)
        if size < 4 or at + size > len(data):
            return
        yield kind & 0x3FFF, data[at + 4 : at + size]
        at += (size + 3) & ~3


def _name(text: str) -> bytes:
    return text.encode() + b"\0"


def _family(address: Address) -> int:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


# --- interfaces, addresses, routes ---------------------------------------------------------------------------------------


def _ifinfo(index: int = 0, flags: int = 0, change: int = 0) -> bytes:
    return struct.pack("=BxHiII", socket.AF_UNSPEC, 0, index, flags, change)


def new_veth(name: str, mac: bytes, mtu: int, peer: str, peer_mac: bytes, peer_netns: int) -> Message:
    """A veth pair, both ends down; the peer is made inside the network namespace of the descriptor ``peer_netns``."""
    mtu_attribute = attribute(IFLA_MTU, struct.pack("=I", mtu))
    other = _ifinfo() + b"".join(
        (
            attribute(IFLA_IFNAME, _name(peer)),
            attribute(IFLA_ADDRESS, peer_mac),
            mtu_attribute,
            attribute(IFLA_NET_NS_FD, struct.pack("=I", peer_netns)),
        )
    )
    info = nest(IFLA_LINKINFO, attribute(IFLA_INFO_KIND, b"veth"), nest(IFLA_INFO_DATA, nest(VETH_INFO_PEER, other)))
    payload = _ifinfo() + attribute(IFLA_IFNAME, _name(name)) + attribute(IFLA_ADDRESS, mac) + mtu_attribute + info
    return Message(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, payload)


def set_link(index: int, *, alias: str = "", no_link_local: bool = False, up: bool = False, no_arp: bool = False) -> Message:
    """Change an interface. ``no_link_local`` must come before ``up``: then IPv6 makes no address of its own and sends nothing. With
    ``no_arp`` the other end cannot fill the node's table of neighbours either."""
    flags = (IFF_UP if up else 0) | (IFF_NOARP if no_arp else 0)
    payload = _ifinfo(index, flags, flags)
    if alias:
        payload += attribute(IFLA_IFALIAS, alias.encode())
    if no_link_local:
        mode = attribute(IFLA_INET6_ADDR_GEN_MODE, struct.pack("=B", ADDR_GEN_NONE))
        payload += nest(IFLA_AF_SPEC, nest(socket.AF_INET6, mode))
    return Message(RTM_NEWLINK, 0, payload)


def new_address(index: int, address: Address) -> Message:
    """The whole address and nothing around it (/32, /128), without duplicate address detection."""
    flags = IFA_F_NODAD if address.version == 6 else 0
    payload = struct.pack("=BBBBi", _family(address), address.max_prefixlen, flags, RT_SCOPE_UNIVERSE, index)
    payload += attribute(IFA_LOCAL, address.packed) + attribute(IFA_ADDRESS, address.packed)
    return Message(RTM_NEWADDR, NLM_F_CREATE | NLM_F_REPLACE, payload)


def new_route(index: int, to: Address | None, *, via: Address | None = None) -> Message:
    """A host route to ``to`` on the link, or with None the default route through ``via``. Replaces an older one."""
    about = to or via
    assert about is not None
    scope = RT_SCOPE_UNIVERSE if via is not None or about.version == 6 else RT_SCOPE_LINK
    length = to.max_prefixlen if to is not None else 0
    payload = struct.pack("=BBBBBBBBI", _family(about), length, 0, 0, RT_TABLE_MAIN, RTPROT_DSEC, scope, RTN_UNICAST, 0)
    if to is not None:
        payload += attribute(RTA_DST, to.packed)
    if via is not None:
        payload += attribute(RTA_GATEWAY, via.packed)
    payload += attribute(RTA_OIF, struct.pack("=i", index))
    return Message(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_REPLACE, payload)


def new_neighbour(index: int, address: Address, mac: bytes) -> Message:
    """A permanent neighbour: nothing is asked and nothing expires."""
    payload = struct.pack("=BxxxiHBB", _family(address), index, NUD_PERMANENT, 0, 0)
    payload += attribute(NDA_DST, address.packed) + attribute(NDA_LLADDR, mac)
    return Message(RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_REPLACE, payload)


# --- nftables ------------------------------------------------------------------------------------------------------------


def _nfgen(family: int, resource: int = 0) -> bytes:
    return struct.pack("=BB", family, 0) + struct.pack(">H", resource)


def ifname(name: str) -> bytes:
    """An interface's name as a field of a set's key."""
    return name.encode().ljust(16, b"\0")


def set_elements(table: str, name: str, elements: Sequence[tuple[bytes, bytes]], *, delete: bool = False) -> Message:
    """Add or delete elements: (key, data) with the fields of a concatenation joined; empty data for a set that is no map."""
    listed = []
    for key, data in elements:
        parts = [nest(NFTA_SET_ELEM_KEY, attribute(NFTA_DATA_VALUE, key))]
        if data:
            parts.append(nest(NFTA_SET_ELEM_DATA, attribute(NFTA_DATA_VALUE, data)))
        listed.append(nest(NFTA_LIST_ELEM, *parts))
    payload = _nfgen(NFPROTO_INET) + attribute(NFTA_LIST_TABLE, _name(table)) + attribute(NFTA_LIST_SET, _name(name))
    payload += nest(NFTA_LIST_ELEMENTS, *listed)
    kind = NFT_MSG_DELSETELEM if delete else NFT_MSG_NEWSETELEM
    return Message(NFNL_SUBSYS_NFTABLES | kind, 0 if delete else NLM_F_CREATE, payload)


def get_elements(table: str, name: str) -> Message:
    payload = _nfgen(NFPROTO_INET) + attribute(NFTA_LIST_TABLE, _name(table)) + attribute(NFTA_LIST_SET, _name(name))
    return Message(NFNL_SUBSYS_NFTABLES | NFT_MSG_GETSETELEM, NLM_F_DUMP, payload, ack=False)


def get_table(table: str) -> Message:
    return Message(NFNL_SUBSYS_NFTABLES | NFT_MSG_GETTABLE, 0, _nfgen(NFPROTO_INET) + attribute(NFTA_TABLE_NAME, _name(table)))


def del_table(table: str) -> Message:
    return Message(NFNL_SUBSYS_NFTABLES | NFT_MSG_DELTABLE, 0, _nfgen(NFPROTO_INET) + attribute(NFTA_TABLE_NAME, _name(table)))


def keys_of(payload: bytes) -> Iterator[bytes]:
    """The keys in one message of a dump of elements."""
    for kind, elements in attributes(payload[4:]):
        if kind != NFTA_LIST_ELEMENTS:
            continue
        for _, element in attributes(elements):
            for part, value in attributes(element):
                if part == NFTA_SET_ELEM_KEY:
                    yield from (data for field, data in attributes(value) if field == NFTA_DATA_VALUE)


# --- the socket ----------------------------------------------------------------------------------------------------------


class Netlink:
    """A blocking socket of the network namespace that the calling thread is in when it is made."""

    def __init__(self, protocol: int) -> None:
        self._sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
        self._seq = 0
        self._sock.settimeout(10.0)
        self._sock.bind((0, 0))

    def close(self) -> None:
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, messages: Sequence[Message]) -> list[int]:
        """All of them in one system call; the errno of each (0 = done). A later one is tried although an earlier one failed."""
        first = self._seq + 1
        self._send(b"".join(message.encode(first + at) for at, message in enumerate(messages)), len(messages))
        codes: dict[int, int] = {}
        while len(codes) < len(messages):
            for kind, seq, payload in self._receive():
                if kind == NLMSG_ERROR and first <= seq < first + len(messages):
                    codes[seq - first] = -struct.unpack_from("=i", payload)[0]
        return [codes[at] for at in range(len(messages))]

    def run(self, messages: Sequence[Message], what: str) -> None:
        """As `send`; raises `OSError` for the first that failed."""
        for at, code in enumerate(self.send(messages)):
            if code:
                raise OSError(code, f"{what} ({at + 1} of {len(messages)}): {os.strerror(code)}")

    def transaction(self, messages: Sequence[Message], what: str) -> None:
        """nftables: all of them or none. Raises `OSError`."""
        first = self._seq + 1
        begin = Message(NFNL_MSG_BATCH_BEGIN, 0, _nfgen(socket.AF_UNSPEC, 10), ack=False)
        end = Message(NFNL_MSG_BATCH_END, 0, _nfgen(socket.AF_UNSPEC, 10), ack=False)
        batch = [begin, *messages, end]
        self._send(b"".join(message.encode(first + at) for at, message in enumerate(batch)), len(batch))
        waiting = set(range(first + 1, first + 1 + len(messages)))
        while waiting:
            for kind, seq, payload in self._receive():
                if kind != NLMSG_ERROR or seq < first:
                    continue
                code = -struct.unpack_from("=i", payload)[0]
                if code:
                    self._drain()
                    raise OSError(code, f"{what}: {os.strerror(code)}")
                waiting.discard(seq)

    def dump(self, message: Message) -> list[bytes]:
        """The payloads of a multi-part answer. Raises `OSError`."""
        self._send(message.encode(self._seq + 1), 1)
        found: list[bytes] = []
        while True:
            for kind, seq, payload in self._receive():
                if seq != self._seq:
                    continue
                if kind == NLMSG_DONE:
                    return found
                if kind == NLMSG_ERROR:
                    code = -struct.unpack_from("=i", payload)[0]
                    raise OSError(code, os.strerror(code))
                found.append(payload)

    def _send(self, data: bytes, count: int) -> None:
        self._seq += count
        self._sock.sendto(data, (0, 0))

    def _receive(self) -> Iterator[tuple[int, int, bytes]]:
        data = self._sock.recv(1 << 17)
        at = 0
        while at + _HEADER.size <= len(data):
            size, kind, _, seq, _ = _HEADER.unpack_from(data, at)
            if size < _HEADER.size:
                return
            yield kind, seq, data[at + _HEADER.size : at + size]
            at += (size + 3) & ~3

    def _drain(self) -> None:
        """Later messages of a failed batch have answers too."""
        while True:
            try:
                self._sock.recv(1 << 17, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
