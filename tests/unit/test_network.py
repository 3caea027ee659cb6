"""The plan of an open sandbox's network: addresses, names, rules and files; and the bytes that netlink is given."""

from __future__ import annotations

import struct
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.actors.host import bus_endpoints
from dsec.backends.plan import Node, make_plan
from dsec.errors import Busy, InvalidRequest, Unsupported
from dsec.model import LayerRef, NetworkPolicy, SandboxId, SandboxSpec, new_ulid
from dsec.security import dns, netlink, network
from dsec.security.network import Block, Denied, Ruleset

BLOCK = Block(net4="10.208.64.0/18", net6="fd12:3456::/64", prefix="dsabcd")
REFS = [LayerRef(name="base", digest="sha256:" + "1" * 64)]


def plan(**node: object) -> object:
    spec = SandboxSpec(image="base", network=NetworkPolicy(mode="open"))
    return make_plan(spec, id=SandboxId("n1", new_ulid()), slot=7, refs=REFS, node=Node(edge="n1", state_dir="/x", **node))


# ---------------------------------------------------------------------- addresses and names
@given(st.integers(0, 16_380), st.integers(0, 2**80 - 1))
def test_addresses_are_inside_the_block_and_never_the_gateways(slot: int, number: int) -> None:
    """Every slot has an address of its own that is neither the network, the gateway nor the broadcast address."""
    ulid = f"01{number:024x}"
    wiring = BLOCK.wiring(slot, ulid)
    net = IPv4Network(BLOCK.net4)
    assert IPv4Address(wiring.address4) in net
    assert wiring.address4 not in (str(net[0]), BLOCK.gateway4, str(net[-1]))
    assert IPv6Address(wiring.address6) in IPv6Network(BLOCK.net6)
    assert len(wiring.link) == network.NAME_LENGTH
    assert wiring.link.startswith(BLOCK.prefix)
    assert 0 < wiring.mark < 2**32


def test_addresses_differ_by_slot_and_all_else_by_ulid() -> None:
    """Two sandboxes of one slot, one after the other, share the IPv4 address and nothing else, the mark of their flows least of all."""
    first, second = BLOCK.wiring(3, new_ulid()), BLOCK.wiring(3, new_ulid())
    assert first.address4 == second.address4
    assert first.address4 != BLOCK.wiring(4, new_ulid()).address4
    assert {first.link, first.address6, first.mark}.isdisjoint({second.link, second.address6, second.mark})


def test_a_full_block_is_busy() -> None:
    """A slot beyond the block is refused and may be tried again elsewhere."""
    assert Block(net4="10.0.0.0/29", net6="", prefix="dsabcd").wiring(4, new_ulid()).address4 == "10.0.0.6"
    with pytest.raises(Busy, match="no address"):
        Block(net4="10.0.0.0/29", net6="", prefix="dsabcd").wiring(5, new_ulid())


def test_a_block_is_chosen_around_what_the_node_uses() -> None:
    """Routes of the node are avoided, the default route is not one of them, and a node without room says what is in the way."""
    candidates = network.blocks("10.208.0.0/16", 18)
    assert [str(net) for net in candidates] == ["10.208.0.0/18", "10.208.64.0/18", "10.208.128.0/18", "10.208.192.0/18"]
    used = [(ip_network("0.0.0.0/0"), "dev eth0"), (ip_network("10.208.0.0/17"), "dev docker0"), (ip_network("10.208.200.7/32"), "dev x")]
    assert str(network.choose_block(candidates, used)) == "10.208.128.0/18"
    assert str(network.choose_block(candidates, [], first=candidates[3])) == "10.208.192.0/18"
    with pytest.raises(Unsupported, match=r"10\.0\.0\.0/8 \(dev vpn0\)"):
        network.choose_block(candidates, [(ip_network("10.0.0.0/8"), "dev vpn0")])


def test_edges_seldom_want_the_same_block() -> None:
    """The walk over the blocks begins at a place of the Edge's own, the same at each start."""
    candidates = network.blocks("10.208.0.0/12", 18)
    chosen = [network.choose_block(candidates, [], f"edge-{n}") for n in range(64)]
    assert len(set(chosen)) > 30
    assert chosen[0] == network.choose_block(candidates, [], "edge-0")


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: network.blocks("10.208.0.0", 33), "network.ipv4_block"),
        (lambda: network.blocks("10.208.0.1/12", 18), "network.ipv4_range"),
        (lambda: network.blocks("10.0.0.0/8", 29), "network.ipv4_block"),
        (lambda: network.prefix6("fd00::/80", "e", "/s"), "network.ipv6_prefix"),
        (lambda: network.check_deny(["index.example.org"]), "network.deny"),
    ],
)
def test_wrong_configuration_names_the_key(call: object, field: str) -> None:
    """What cannot be is refused before anything is made."""
    with pytest.raises(InvalidRequest) as caught:
        call()  # type: ignore[operator]
    assert caught.value.field == field


def test_ipv6_prefix_is_local_and_the_edges_own() -> None:
    """Without configuration an Edge has a /64 of fd00::/8 that differs between Edges and not between starts."""
    made = network.prefix6("", "n1", "/var/lib/dsec")
    assert made.prefixlen == 64
    assert made.subnet_of(IPv6Network("fd00::/8"))
    assert made == network.prefix6("", "n1", "/var/lib/dsec")
    assert made != network.prefix6("", "n2", "/var/lib/dsec")


# ---------------------------------------------------------------------- the ruleset and the files
def test_ruleset_denies_what_it_must_by_itself() -> None:
    """Metadata, loopback, the sandboxes' own networks and the configured ones are denied; the bus by address and port."""
    text = Ruleset(
        block=BLOCK, denied=Denied(nets=("192.168.0.0/16", "fd99::/16"), endpoints=(("192.0.2.4", 4222), ("2001:db8::5", 4222)))
    ).text()
    listed = {line.split()[4]: line for line in text.splitlines() if line.startswith("add element")}
    for net in ("127.0.0.0/8", "169.254.0.0/16", BLOCK.net4, "192.168.0.0/16"):
        assert net in listed["denied4"]
    for net in ("fe80::/10", "::/127", BLOCK.net6, "fd99::/16"):
        assert net in listed["denied6"]
    assert "192.0.2.4 . 4222" in listed["endpoints4"]
    assert "2001:db8::5 . 4222" in listed["endpoints6"]
    assert f"flush table inet {BLOCK.table}" in text
    assert "flush set inet dsec_dsabcd sources4" not in text, "what lives keeps its rules when the table is loaded again"


def test_ruleset_without_ipv6_has_no_ipv6_nat() -> None:
    """A node that does not forward IPv6 gets no rule that stands on it."""
    assert "ip6 saddr" in Ruleset(block=BLOCK).text()
    assert "masquerade\n    # no IPv6" in Ruleset(block=Block(net4=BLOCK.net4, net6="", prefix="dsabcd")).text()


def test_files_name_the_gateway_as_the_only_resolver() -> None:
    """The resolver is the gateway whatever the node's own file says, and the sandbox knows its own name."""
    wiring = BLOCK.wiring(0, new_ulid())
    made = network.files(wiring, "web.example.org")
    assert made["resolv.conf"].startswith(f"nameserver {BLOCK.gateway4}\n")
    assert made["resolv.conf"].count("nameserver") == 1
    assert f"{wiring.address4} web.example.org web\n" in made["hosts"]
    assert made["hostname"] == "web.example.org\n"


def test_plan_has_the_wiring_or_is_refused_with_the_reason() -> None:
    """``open`` where the node has addresses: the wiring is in the plan and what the node lacks in `degraded`; else the node's reason."""
    block = Block(net4=BLOCK.net4, net6="", prefix="dsabcd", notes=("network: no IPv6: off",))
    made = plan(net=block)
    assert made.network == "open"  # type: ignore[attr-defined]
    assert made.wiring.address4 == "10.208.64.9"  # type: ignore[attr-defined]
    assert made.degraded[-1] == "network: no IPv6: off"  # type: ignore[attr-defined]
    with pytest.raises(Unsupported, match="IPv4 forwarding is off") as caught:
        plan(net_missing="IPv4 forwarding is off: sysctl -w net.ipv4.ip_forward=1")
    assert (caught.value.field, caught.value.reason) == ("network", "network")


def test_rules_are_refused_though_open_is_given() -> None:
    """No rule is silently taken for ``open``."""
    node = Node(edge="n1", state_dir="/x", net=BLOCK)
    for policy in (
        NetworkPolicy(mode="rules", rules=("index.example.org:443",)),
        NetworkPolicy(mode="open", rules=("x",)),
        NetworkPolicy(mode="all"),
    ):
        with pytest.raises(Unsupported, match="rules are not enforced yet"):
            make_plan(SandboxSpec(image="base", network=policy), id=SandboxId("n1", new_ulid()), slot=0, refs=REFS, node=node)


# ---------------------------------------------------------------------- netlink
def test_set_element_is_what_nft_sends() -> None:
    """The bytes of one element of a set of interface and address, as nft 1.0.6 sends them (but for the ACK that is asked for)."""
    message = netlink.set_elements("dsec_x", "guests4", [(netlink.ifname("dsabc") + IPv4Address("10.0.0.2").packed, b"")])
    message.ack = False
    nft = (
        "580000000c0a01040100000000000000"  # nlmsghdr: 88 bytes, NFT_MSG_NEWSETELEM, REQUEST|CREATE, seq 1
        "01000000"  # nfgenmsg: NFPROTO_INET
        "0b000100647365635f780000"  # table
        "0c0002006775657374733400"  # set
        "24000380200001801c00018018000100"
        "647361626300000000000000000000000a000002"
    )
    mine = message.encode(1)
    theirs = bytearray.fromhex(nft)
    assert struct.unpack_from("=I", mine)[0] == len(mine)
    # nft also names the set by the number that it has in its own transaction; all else is the same.
    assert mine[4:8] == theirs[4:8]
    assert mine[16:] == bytes(theirs[16:])


@given(st.lists(st.tuples(st.integers(0, 0x3FFF), st.binary(max_size=40))))
def test_attributes_come_back(items: list[tuple[int, bytes]]) -> None:
    """What `attribute` packs `attributes` reads, whatever the lengths."""
    assert list(netlink.attributes(b"".join(netlink.attribute(kind, value) for kind, value in items))) == items


@given(st.binary(max_size=200))
def test_attributes_of_rubbish_end(data: bytes) -> None:
    """Nothing that comes in makes the reader loop or fail."""
    assert sum(len(value) for _, value in netlink.attributes(data)) <= len(data)


# ---------------------------------------------------------------------- DNS
def query(name: str, kind: int = 1, number: int = 0x1234) -> bytes:
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    return dns.HEADER.pack(number, dns.RD, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", kind, 1)


def test_question_is_read_and_refusals_repeat_it() -> None:
    """The name is lower-cased; a refusal has the query's id, question and recursion bit, and the code."""
    asked = dns.question(query("WWW.Example.org", 28))
    assert asked is not None
    assert (asked.name, asked.kind) == ("www.example.org", 28)
    refused = dns.refusal(query("www.example.org"), dns.REFUSED, dns.question(query("www.example.org")))
    assert refused[:2] == b"\x12\x34"
    assert refused[3] & 15 == dns.REFUSED
    assert dns.answers(refused, query("WWW.example.org"), dns.question(query("www.example.org")) or asked)


def test_only_the_reply_to_the_query_is_one() -> None:
    """Another id, another question or a query is no answer."""
    asked = dns.question(query("a.example"))
    assert asked is not None
    good = dns.refusal(query("a.example"), 0, asked)
    assert dns.answers(good, query("a.example"), asked)
    assert not dns.answers(dns.with_id(good, 7), query("a.example"), asked)
    assert not dns.answers(dns.refusal(query("b.example"), 0, asked), query("a.example"), asked)
    assert not dns.answers(query("a.example"), query("a.example"), asked)


@given(st.binary(max_size=600))
def test_any_bytes_are_a_question_or_none(data: bytes) -> None:
    """No query from inside makes the parser fail or read past its end."""
    asked = dns.question(data)
    if asked is not None:
        assert asked.end <= len(data)
        assert len(asked.name) <= dns.MAX_NAME


def test_nameservers_of_a_resolv_conf() -> None:
    """Comments and other words are left out, a zone index stays."""
    text = (
        "# made by x\nsearch example.org\nnameserver 127.0.0.53 # stub\nnameserver fe80::1%eth0\n;nameserver 192.0.2.1\noptions ndots:2\n"
    )
    assert dns.nameservers(text) == ["127.0.0.53", "fe80::1%eth0"]


async def test_every_server_of_the_bus_is_known_by_address_and_port() -> None:
    """Whatever way the configuration writes it, with or without scheme, user and port."""
    found = await bus_endpoints("nats://user:secret@127.0.0.1:4222, tls://[::1]:5222,192.0.2.1")
    assert found == (("127.0.0.1", 4222), ("192.0.2.1", 4222), ("::1", 5222))
