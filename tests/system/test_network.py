"""Open sandboxes on a node in a network namespace of the test's own: what they reach, what they do not, and what is left of them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsec.config import NetworkConfig
from dsec.errors import NodeError, Unsupported
from dsec.model import NetworkPolicy
from dsec.security import nft
from tests.fixtures_backend import MakeYard, Yard, sh
from tests.system.net_world import World, world  # noqa: F401 - a fixture
from tests.system.outside import FAR4, FAR6, METADATA, NODE4, NODE6, OUTSIDE4

pytestmark = [pytest.mark.needs("root", "oci", "cgroup", "nft"), pytest.mark.timeout(120)]
OPEN = {"network": NetworkPolicy(mode="open")}
CONFIG = NetworkConfig(upstreams=(OUTSIDE4,))

# What a sandbox runs: one connection; prints what it read, or the error's name.
GET = """
import socket, sys
host, port = sys.argv[1], int(sys.argv[2])
try:
    s = socket.create_connection((host, port), 2)
    s.sendall(b"GET " + sys.argv[3].encode() + b" HTTP/1.0\\r\\n\\r\\n")
    data = b""
    while piece := s.recv(65536): data += piece
    print(data.split(b"\\r\\n\\r\\n", 1)[-1].decode())
except OSError as error:
    print("failed:", type(error).__name__, error.errno)
"""
# A server that greets whoever comes, on all of its addresses.
GREET = """
import socket, sys
server = socket.create_server(("::", int(sys.argv[1])), family=socket.AF_INET6, dualstack_ipv6=True)
print("ready", flush=True)
while True:
    peer, _ = server.accept()
    peer.recv(1000); peer.sendall(b"\\r\\n\\r\\nhello"); peer.close()
"""
RELAY = f"""
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(("127.0.0.53", 53))
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.connect(("{OUTSIDE4}", 53))
print("ready", flush=True)
while True:
    query, peer = s.recvfrom(4096); u.send(query); s.sendto(u.recv(4096), peer)
"""
# Asks for the TXT of a name over UDP and over TCP; argv: resolver, name.
ASK = """
import socket, struct, sys
name = b"".join(bytes([len(part)]) + part.encode() for part in sys.argv[2].split("."))
query = b"\\x12\\x34\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0" + name + b"\\0\\0\\x10\\0\\1"
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.settimeout(5)
udp.sendto(query, (sys.argv[1], 53))
reply = udp.recv(4096)
print(len(reply), bool(reply[2] & 2), reply[3] & 15)
tcp = socket.create_connection((sys.argv[1], 53), 5)
tcp.sendall(struct.pack(">H", len(query)) + query)
stream = tcp.makefile("rb")
reply = stream.read(struct.unpack(">H", stream.read(2))[0])
print(len(reply), reply[:2].hex(), reply[3] & 15)
"""
# A datagram from another's address; argv: source, destination.
SPOOF = """
import socket, struct, sys
src, dst = (socket.inet_aton(a) for a in sys.argv[1:3])
data = b"spoofed by " + sys.argv[1].encode()
udp = struct.pack(">HHHH", 4000, 5353, 8 + len(data), 0) + data
head = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 20 + len(udp), 7, 0, 64, 17, 0, src, dst)
s = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
s.sendto(head + udp, (sys.argv[2], 0)); print("sent")
"""

# ARP requests from made-up senders; argv: whom they ask for, how many.
FLOOD = """
import socket, struct, sys
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW); s.bind(("eth0", 0x806))
for n in range(int(sys.argv[2])):
    sender = bytes([2, 0]) + struct.pack(">I", n) + struct.pack(">I", 0xC6120100 + n)
    head = bytes([255] * 6) + sender[:6] + bytes([8, 6, 0, 1, 8, 0, 6, 4, 0, 1])
    s.send(head + sender + bytes(6) + socket.inet_aton(sys.argv[1]))
print("sent")
"""


def program(text: str, *arguments: str) -> subprocess.Popen[str]:
    """A program on the node, once it has said that it is ready."""
    started = subprocess.Popen([sys.executable, "-c", text, *arguments], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    assert started.stdout.readline() == "ready\n"
    return started


def end(started: subprocess.Popen[str]) -> None:
    started.kill()
    started.communicate()


@pytest.fixture
def node(world: World, make_yard: MakeYard) -> Yard:  # noqa: F811
    """A node with the world around it."""
    return make_yard("container")


@pytest.fixture
def relay(world: World) -> Iterator[None]:  # noqa: F811
    """A resolver of the node's own on 127.0.0.53, as systemd has it."""
    started = program(RELAY)
    yield
    end(started)


@pytest.fixture
def greeter(world: World) -> Iterator[int]:  # noqa: F811
    """The port of a server on the node, the bus for example."""
    started = program(GREET, "4222")
    yield 4222
    end(started)


async def start(yard: Yard, backend: Any, **fields: Any) -> Any:
    return await backend.launch(yard.plan(backend.node, **{**OPEN, **fields}))


async def get(box: Any, host: str, port: int = 80, path: str = "/whoami") -> str:
    _, out, err = await sh(box, f"python3 -c '{GET}' {host} {port} {path}")
    return (out + err).strip()


async def greet(box: Any, port: int) -> None:
    """Starts a server inside."""
    code, _, err = await sh(
        box, f"setsid python3 -c '{GREET}' {port} >/tmp/said 2>&1 & while ! grep -q ready /tmp/said; do sleep 0.01; done"
    )
    assert code == 0, err


async def eventually(what: Any, seconds: float = 5.0) -> bool:
    until = time.monotonic() + seconds
    while not what():
        if time.monotonic() > until:
            return False
        await asyncio.sleep(0.01)
    return True


def is_running(pid: int) -> bool:
    """False for one that has ended and whose parent, this process, has not asked yet."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def links(prefix: str) -> list[str]:
    return [name for _, name in socket.if_nameindex() if name.startswith(prefix)]


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def flush(table: str) -> None:
    """The rules are gone and the chains stay: what is then possible was kept back by the rules."""
    output("nft", "flush", "table", "inet", table)


@pytest.mark.guest
async def test_open_reaches_the_outside_by_address_and_by_name(node: Yard) -> None:
    """An open sandbox fetches from a server outside over IPv4 and IPv6, by address and by name, and the server sees the node."""
    backend = await node.backend(network=CONFIG)
    box = await start(node, backend)
    assert await get(box, FAR4) == NODE4
    assert await get(box, FAR6) == NODE6
    assert await get(box, "www.outside.test") in (NODE4, NODE6)


@pytest.mark.usefixtures("relay")
async def test_c51_resolver_works_though_the_nodes_own_is_on_loopback(node: Yard) -> None:
    """c51: names resolve inside although the node's resolver listens on 127.0.0.53, which nothing inside can reach."""
    backend = await node.backend(network=NetworkConfig(upstreams=("127.0.0.53",)))
    box = await start(node, backend)
    _, conf, _ = await sh(box, "cat /etc/resolv.conf")
    assert f"nameserver {backend.node.net.gateway4}" in conf
    assert "127.0.0" not in conf
    assert await get(box, "www.outside.test") in (NODE4, NODE6)
    assert (await get(box, "127.0.0.53", 53)).startswith("failed")


async def test_resolver_passes_every_type_and_large_answers(node: Yard) -> None:
    """An answer that is too large for a datagram comes over TCP; a name that is not there is said not to be."""
    backend = await node.backend(network=CONFIG)
    box = await start(node, backend)
    _, out, err = await sh(box, f"python3 -c '{ASK}' {backend.node.net.gateway4} large.outside.test")
    assert out.splitlines() == ["36 True 0", "2056 1234 0"], err
    _, out, err = await sh(box, f"python3 -c '{ASK}' {backend.node.net.gateway4} nowhere.outside.test")
    assert [line.split()[-1] for line in out.splitlines()] == ["3", "3"], err
    about = await backend.network.resolver()
    assert about["loop"] == "uvloop"
    assert about["counts"]["queries"] == 4


@pytest.mark.guest
async def test_node_bus_metadata_and_other_sandboxes_are_out_of_reach(node: Yard, greeter: int) -> None:
    """Not the node on any address, not the bus where it is elsewhere, not metadata, not what the configuration denies, not another
    sandbox; and each of the local ones is reached as soon as the rules are gone."""
    config = NetworkConfig(upstreams=(OUTSIDE4,), deny=(f"{FAR6}/128",))
    backend = await node.backend(network=config, bus=((FAR4, 80),))
    box, other = await start(node, backend), await start(node, backend)
    theirs = other.plan.wiring
    await greet(other, 9000)
    gateway = backend.node.net.gateway4
    assert await get(box, OUTSIDE4) == NODE4  # the control: only what is denied is
    denied = [
        *((NODE4, greeter), (NODE6, greeter), (gateway, greeter)),
        *((FAR4, 80), (FAR6, 80), (METADATA, 80)),
        *((theirs.address4, 9000), (theirs.address6, 9000)),
    ]
    begun = time.monotonic()
    for host, port in denied:
        answer = await get(box, host, port)
        assert answer.startswith("failed"), (host, port, answer)
    assert time.monotonic() - begun < 8, "a refusal is told at once"
    flush(backend.node.net.table)
    for host, port in [(NODE4, greeter), (NODE6, greeter), (theirs.address4, 9000), (theirs.address6, 9000)]:
        assert await get(box, host, port) == "hello", (host, port)


async def test_nobody_reaches_a_sandbox_from_outside(node: Yard, world: World) -> None:  # noqa: F811
    """A connection from outside to a sandbox's address is dropped, though the route is known; without the rules it arrives."""
    backend = await node.backend(network=CONFIG)
    box = await start(node, backend)
    await greet(box, 9000)
    address = box.plan.wiring.address4
    inside = ["nsenter", "--net", "-t", str(world.pid)]
    output(*inside, "ip", "route", "add", f"{address}/32", "via", NODE4)
    probe = [*inside, sys.executable, "-c", GET, address, "9000", "/"]
    assert (await asyncio.to_thread(output, *probe)).startswith("failed")
    flush(backend.node.net.table)
    assert (await asyncio.to_thread(output, *probe)).strip() == "hello"


async def test_spoofed_sources_are_dropped(node: Yard) -> None:
    """What a sandbox sends from another's address does not leave the node; without the rules it does."""
    backend = await node.backend(network=CONFIG)
    box, other = await start(node, backend), await start(node, backend)
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0003)) as sniffer:
        sniffer.bind(("up0", 0))

        async def seen(source: str) -> bool:
            code, out, err = await sh(box, f"python3 -c '{SPOOF}' {source} {FAR4}")
            assert (code, out) == (0, "sent\n"), err
            sniffer.settimeout(0.5)
            try:
                while b"spoofed by " + source.encode() not in sniffer.recv(2048):
                    pass
            except TimeoutError:
                return False
            return True

        assert await seen(box.plan.wiring.address4), "its own address passes"
        for source in (other.plan.wiring.address4, "192.0.2.77"):
            assert not await seen(source)
        flush(backend.node.net.table)
        assert await seen(other.plan.wiring.address4)


async def test_none_reaches_nothing_and_costs_the_node_nothing(node: Yard) -> None:
    """Without a network there is only loopback, and the node has no table, no route and no resolver of ours."""
    backend = await node.backend(network=CONFIG)
    box = await backend.launch(node.plan(backend.node))
    for host in (FAR4, NODE4, backend.node.net.gateway4, FAR6):
        assert (await get(box, host)).startswith("failed: OSError 101")
    _, out, _ = await sh(box, "cat /proc/net/dev")
    assert [line.split(":")[0].strip() for line in out.splitlines()[2:]] == ["lo"]
    assert output("nft", "list", "tables") == ""
    assert await backend.network.resolver() is None


async def test_files_of_the_network_leave_the_upper_clean(node: Yard) -> None:
    """resolv.conf, hosts and hostname are root's inside, can be replaced, and the writable layer holds only what was changed."""
    backend = await node.backend(network=CONFIG)
    box = await start(node, backend, disk_mode="dir", best_effort=True, hostname="worker-1.example")
    upper = f"{box.plan.state_dir}/disk/u"
    as_layer = "dir" in backend.site.mappable  # else the agent writes them into the upper
    assert as_layer is not os.path.exists(f"{upper}/etc")
    _, out, _ = await sh(box, "stat -c '%u:%g %a' /etc /etc/hosts /etc/resolv.conf /etc/hostname; cat /etc/hostname")
    assert out.split() == ["0:0", "755", *["0:0", "644"] * 3, "worker-1.example"]
    _, out, err = await sh(
        box, "python3 -c 'import socket; print(socket.gethostbyname(socket.gethostname()), socket.gethostbyname(\"worker-1\"))'"
    )
    assert out.split() == [box.plan.wiring.address4] * 2, err
    code, _, err = await sh(box, "echo 192.0.2.9 mine >/etc/new && mv /etc/new /etc/hosts && echo x >>/etc/hostname")
    assert code == 0, err
    assert sorted(os.listdir(f"{upper}/etc")) == ["hostname", "hosts"] or not as_layer


@pytest.mark.guest
async def test_undone_whole_with_the_sandbox_and_with_the_edge(node: Yard) -> None:
    """A sandbox's interface, routes and rules go with it; the table, the gateway and the resolver with the last of the Edge."""
    backend = await node.backend(network=CONFIG)
    net = backend.node.net
    box, other = await start(node, backend), await start(node, backend)
    assert len(nft.keys(net.table, "sources4")) == 2
    assert len(links(net.prefix)) == 2
    await box.stop()
    assert await eventually(lambda: links(net.prefix) == [other.plan.wiring.link])
    assert len(nft.keys(net.table, "sources4")) == len(nft.keys(net.table, "answers")) == len(nft.keys(net.table, "marks")) == 1
    assert box.plan.wiring.address4 not in output("ip", "route")
    resolver = (await backend.network.resolver())["pid"]
    await other.stop()
    await backend.shutdown()
    assert await eventually(lambda: not links("ds"))
    assert output("nft", "list", "tables") == ""
    assert "proto 213" not in output("ip", "route", "show", "table", "all")
    assert not os.path.exists(f"/proc/{resolver}")


async def test_network_outlives_the_edge_and_is_adopted(node: Yard) -> None:
    """While no Edge runs an open sandbox goes on resolving and fetching; the next Edge adopts it and takes all of it away at its end."""
    first = await node.backend(network=CONFIG)
    box = await start(node, first)
    lost = await start(node, first)
    script = f"while :; do python3 -c '{GET}' www.outside.test 80 /whoami; sleep 0.05; done >/tmp/log 2>&1 &"
    await sh(box, f'setsid sh -c "{script}"' if '"' not in script else f"cat >/tmp/s <<'X'\n{script}\nX\nsetsid sh /tmp/s")
    await first.close()
    await asyncio.sleep(1.0)
    second = await node.backend(network=CONFIG)
    assert second.node.net == first.node.net
    again = await second.adopt(box.plan)
    assert again is not None
    _, out, _ = await sh(again, "cat /tmp/log")
    assert len(out.split()) > 5
    assert "failed" not in out
    assert await get(again, "www.outside.test") in (NODE4, NODE6)
    assert lost.plan.ulid in await second.reap(frozenset({box.plan.ulid}))
    assert await eventually(lambda: links("ds") == [box.plan.wiring.link])
    assert len(nft.keys(second.node.net.table, "sources4")) == 1
    await again.stop()
    await second.shutdown()
    assert await eventually(lambda: not links("ds"))
    assert output("nft", "list", "tables") == ""


async def test_every_thread_of_the_resolver_is_nobody(node: Yard) -> None:
    """No thread of it has an id, a group or a capability of root's, or may gain one: not those of its loop either."""
    backend = await node.backend(network=CONFIG)
    await start(node, backend)
    pid = (await backend.network.resolver())["pid"]
    for task in Path(f"/proc/{pid}/task").iterdir():
        said = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines() if ":" in line)
        assert said["Uid"].split() == said["Gid"].split() == ["65534"] * 4
        assert said["Groups"].split() == []
        assert int(said["CapEff"], 16) == int(said["CapPrm"], 16) == 0
        assert said["NoNewPrivs"].strip() == "1"


async def test_resolver_that_dies_is_started_again(node: Yard) -> None:
    """Killed, it is back within a second or two, and names resolve again."""
    backend = await node.backend(network=CONFIG)
    box = await start(node, backend)
    pid = (await backend.network.resolver())["pid"]
    os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + 10
    while (about := await backend.network.resolver()) is None or about["pid"] == pid:
        assert time.monotonic() < until
        await asyncio.sleep(0.05)
    assert await get(box, "www.outside.test") in (NODE4, NODE6)


async def test_a_node_that_does_not_forward_says_so(node: Yard, world: World) -> None:  # noqa: F811
    """Without IPv4 forwarding open is refused with the command that helps; without IPv6 forwarding there is IPv4, and it is said."""
    world.forward(True, False)
    backend = await node.backend(network=CONFIG)
    plan = node.plan(backend.node, **OPEN)
    assert any("net.ipv6.conf.all.forwarding=1" in note for note in plan.degraded)
    box = await backend.launch(plan)
    assert await get(box, FAR4) == NODE4
    assert (await get(box, FAR6)).startswith("failed: OSError 101")
    world.forward(False, False)
    await backend.close()
    other = await node.backend(network=CONFIG)
    with pytest.raises(Unsupported, match=r"net\.ipv4\.ip_forward=1"):
        node.plan(other.node, **OPEN)
    adopted = await other.adopt(plan)
    assert adopted is not None
    await (await other.launch(node.plan(other.node))).stop()
    await adopted.stop()
    await other.shutdown()
    assert output("nft", "list", "tables") == ""
    assert "proto 213" not in output("ip", "route", "show", "table", "all")


async def test_two_edges_of_a_node_take_different_addresses(node: Yard, make_yard: MakeYard, edge_name: str) -> None:
    """Each has a block, a table and a resolver of its own, and the sandboxes of one do not reach those of the other. One that had chosen
    what another then took is told so, takes another block, and leaves the other's alone."""
    config = NetworkConfig(upstreams=(OUTSIDE4,), ipv4_range="10.222.0.0/20", ipv4_block=21)
    ours = await node.backend(network=config)
    second = make_yard("container")
    second.state = node.state / "second"
    for number in range(64):
        second.edge = f"{edge_name}-{number}"
        theirs = await second.backend(network=config)
        if theirs.node.net.net4 == ours.node.net.net4:
            break
        await theirs.shutdown()
    box = await start(node, ours)
    with pytest.raises(NodeError, match="another has taken"):
        await start(second, theirs)
    other = await start(second, theirs)
    assert ours.node.net.net4 != theirs.node.net.net4
    await greet(other, 9000)
    assert (await get(box, other.plan.wiring.address4, 9000)).startswith("failed")
    for each in (box, other):
        assert await get(each, "www.outside.test") in (NODE4, NODE6)


async def test_addresses_that_the_node_uses_are_avoided(node: Yard) -> None:
    """Before the first open sandbox is planned the node's routes are looked at; where all addresses are in use that is said."""
    config = NetworkConfig(upstreams=(OUTSIDE4,), ipv4_range="10.222.0.0/20", ipv4_block=21)
    backend = await node.backend(network=config)
    first = backend.node.net.net4
    output("ip", "route", "add", "blackhole", first)
    try:
        await backend.settle_network()
        second = backend.node.net.net4
        assert second != first
        output("ip", "route", "add", "blackhole", second)
        try:
            other = await node.backend(network=config)
            await other.settle_network()
            assert "overlaps a route" in other.capabilities.missing["network"]
            with pytest.raises(Unsupported, match="overlaps a route"):
                node.plan(other.node, **OPEN)
            await other.shutdown()
        finally:
            output("ip", "route", "del", "blackhole", second)
    finally:
        output("ip", "route", "del", "blackhole", first)
    await backend.settle_network()
    assert backend.node.net.net4 == second, "looked at once"
    await backend.shutdown()


async def test_a_hundred_sandboxes_cost_the_hundredth_what_the_first_did(node: Yard) -> None:
    """The network's part of a create stays flat and small, and the end of all of them leaves nothing."""
    backend = await node.backend(network=CONFIG)
    times: list[float] = []
    wire = nft.wire

    def timed(*arguments: Any, **named: Any) -> None:
        begin = time.thread_time()
        wire(*arguments, **named)
        times.append((time.thread_time() - begin) * 1000)

    nft.wire = timed
    try:
        boxes = []
        for _ in range(25):
            boxes += await asyncio.gather(*(start(node, backend) for _ in range(4)))
    finally:
        nft.wire = wire
    early, late = statistics.median(times[:25]), statistics.median(times[-25:])
    print(f"network of one of 100 sandboxes: {early:.2f} ms of CPU at first, {late:.2f} ms at last")
    assert late < 5
    assert late < 3 * early + 0.5
    for box in (boxes[0], boxes[-1]):
        assert await get(box, FAR4) == NODE4
    await asyncio.gather(*(box.stop() for box in boxes))
    assert await eventually(lambda: not links(backend.node.net.prefix))
    assert nft.keys(backend.node.net.table, "sources4") == []


async def test_a_flushed_ruleset_is_put_back(node: Yard) -> None:
    """A node's firewall that is loaded again flushes every table: within seconds ours is there again, with the rules of what lives."""
    backend = await node.backend(network=CONFIG)
    box, other = await start(node, backend), await start(node, backend)
    await greet(other, 9000)
    output("nft", "flush", "ruleset")
    assert await eventually(lambda: len(nft.keys(backend.node.net.table, "answers")) == 2)
    assert (await get(box, other.plan.wiring.address4, 9000)).startswith("failed")
    assert await get(box, FAR4) == NODE4
    output("nft", "add", "table", "ip", "strict")
    output("nft", "add", "chain", "ip", "strict", "f", "{ type filter hook forward priority 0; policy drop; }")
    assert "chain ip strict f drops what is forwarded" in nft.firewall_trouble()


async def test_connections_of_a_sandbox_are_bounded(node: Yard) -> None:
    """Beyond its bound a sandbox opens no connection, its neighbour does, and so does itself when others have ended."""
    backend = await node.backend(network=NetworkConfig(upstreams=(OUTSIDE4,), connections=5))
    box, other = await start(node, backend), await start(node, backend)
    many = (
        "import socket\nopen_ = []\n"
        f'try:\n while len(open_) < 20: open_.append(socket.create_connection(("{FAR4}", 80), 2))\n'
        "except OSError: pass\n"
        "print(len(open_), flush=True)\nimport time; time.sleep(1)\n"
    )
    held = asyncio.ensure_future(sh(box, f"python3 -c '{many}'"))
    await asyncio.sleep(0.7)
    assert (await get(box, FAR4)).startswith("failed")
    assert await get(other, FAR4) == NODE4
    assert (await held)[1] == "5\n"


async def test_a_sandbox_cannot_fill_the_nodes_neighbours(node: Yard) -> None:
    """No raw frames from inside; and were there any, thousands of ARP requests from made-up senders leave no entry in the node's table,
    which all its interfaces share."""
    backend = await node.backend(network=CONFIG)
    box = await start(node, backend)
    link, gateway = box.plan.wiring.link, backend.node.net.gateway4
    _, _, err = await sh(box, f"python3 -c '{FLOOD}' {gateway} 1")
    assert "PermissionError" in err
    outside_of_the_filter = ["nsenter", "--net", "-t", str(box.pid), sys.executable, "-c", FLOOD, gateway]
    assert await asyncio.to_thread(output, *outside_of_the_filter, "2000") == "sent\n"
    assert len(output("ip", "neigh", "show", "dev", link).splitlines()) <= 2
    output("ip", "link", "set", link, "arp", "on")  # the control
    assert await asyncio.to_thread(output, *outside_of_the_filter, "20") == "sent\n"
    assert await eventually(lambda: len(output("ip", "neigh", "show", "dev", link).splitlines()) > 2)


async def test_kernel_has_what_the_messages_said(node: Yard) -> None:
    """Read back by another netlink library: host routes, permanent neighbours, names and MTU are as planned, on both ends."""
    from pyroute2 import IPRoute

    backend = await node.backend(network=NetworkConfig(upstreams=(OUTSIDE4,), mtu=1380))
    box = await start(node, backend)
    wiring = box.plan.wiring

    def look() -> None:  # in a thread: the library brings an event loop of its own
        with IPRoute() as kernel:
            link = next(iter(kernel.get_links(ifname=wiring.link)))
            assert link.get_attr("IFLA_IFALIAS") == f"dsec {node.edge} {box.plan.ulid}"
            assert link.get_attr("IFLA_MTU") == 1380
            routes = {route.get_attr("RTA_DST") for route in kernel.get_routes(oif=link["index"])}
            assert {wiring.address4, wiring.address6} <= routes
            neighbours = {entry.get_attr("NDA_DST"): entry for entry in kernel.get_neighbours(ifindex=link["index"])}
            for address in (wiring.address4, wiring.address6):
                assert neighbours[address]["state"] == 0x80
                assert neighbours[address].get_attr("NDA_LLADDR") == wiring.mac.hex(":")

    await asyncio.to_thread(look)


async def test_orphans_take_their_network_along(node: Yard) -> None:
    """When no Edge returns to an open sandbox in time, interface, rules, gateway and resolver go with it."""
    from tests.system.test_holder import holder_pid
    from tests.system.test_orphans import until_gone

    backend = await node.backend(network=CONFIG, orphan_grace=0.5, holder_linger=0.2)
    box = await start(node, backend)
    assert await get(box, "www.outside.test") in (NODE4, NODE6)
    holder = holder_pid(backend)
    resolver = (await backend.network.resolver())["pid"]
    await backend.close()
    await until_gone(holder, box.pid)
    assert await eventually(lambda: not links("ds"))
    assert await eventually(lambda: not is_running(resolver))
    assert output("nft", "list", "tables") == ""
    assert "proto 213" not in output("ip", "route", "show", "table", "all")
