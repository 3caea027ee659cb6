"""The network of one Edge's open sandboxes: chosen when the backend opens, made when the first of them starts, undone with the last.

A node that never starts an open sandbox is not touched. What is made carries names that derive from the Edge's: the nftables table, the
interfaces (with the sandbox's id as alias), the resolver's control socket; so a restarted Edge finds all of it, and `strays` names what
belongs to no sandbox that it knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Network
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec
import structlog

from dsec import trees
from dsec.backends.base import Capabilities, GuestLink, LaunchPlan
from dsec.backends.plan import Node
from dsec.config import NetworkConfig
from dsec.errors import DsecError, NodeError, Unsupported
from dsec.model import FileRequest
from dsec.security import network, nft, rtnl
from dsec.security.network import Block, Denied, Ruleset, Wiring

log = structlog.get_logger("dsec.network")
T = TypeVar("T")
RESOLVER_TIMEOUT = 15.0  # seconds until it must serve
GUARD_PERIOD = 1.0  # seconds between two looks whether the table is there
TOP = "top"  # directory of a sandbox's state: a layer above all others with the files that the network needs


class OpenNetwork:
    """One Edge's. ``offer`` is known after `look`; None where open sandboxes cannot be had, and ``missing`` says why. `settle` makes sure,
    when an open sandbox is asked for, that nothing else on the node uses it. ``block`` is what is on the node or will be: an earlier start
    may have left something even where nothing can be had any more."""

    def __init__(
        self, config: NetworkConfig, edge: str, state_dir: str, run_dir: str, bus: tuple[tuple[str, int], ...], linger: float = 30.0
    ) -> None:
        self.config, self.edge, self._state, self._bus, self._linger = config, edge, state_dir, bus, linger
        self.block: Block | None = None
        self.offer: Block | None = None
        self.missing = ""
        self._record = f"{state_dir}/network.json"
        self._control = f"{run_dir}/resolver"
        self._log = f"{state_dir}/resolver.log"
        self._up: asyncio.Task[None] | None = None
        self._claimed = False
        self._settling: asyncio.Task[None] | None = None
        self._idmapped = True
        self._child: subprocess.Popen[bytes] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._wired: dict[str, Wiring] = {}  # by interface: what the table must hold
        self._guarding: asyncio.Task[None] | None = None
        self._ending: list[tuple[str, Wiring | None, asyncio.Future[None]]] = []
        self._unwiring: asyncio.Task[None] | None = None
        self._mtu = 1500
        self._pool = ThreadPoolExecutor(4, "dsec-network")
        self._closed = False

    @property
    def active(self) -> bool:
        """Whether there may be anything of it on the node."""
        return self.block is not None and (self._claimed or os.path.exists(self._record))

    # --- choosing --------------------------------------------------------------------------------------------------

    async def look(self, idmapped: bool | None = None, *, routes: bool = False) -> None:
        """Chooses the addresses. Changes nothing on the node. Raises `InvalidRequest` for a configuration that cannot be.

        ``idmapped``: directories of the state directory's file system can be layers of any sandbox. ``routes``: what the node uses is
        looked at; without, the choice is one that only `settle` and the claim find in use."""
        self._idmapped = self._idmapped if idmapped is None else idmapped
        denied = network.check_deny(self.config.deny)
        candidates = network.blocks(self.config.ipv4_range, self.config.ipv4_block)
        network.prefix6(self.config.ipv6_prefix, self.edge, self._state)
        self._denied = Denied(nets=denied, endpoints=self._bus)
        offer, missing = None, ""
        try:
            offer = await self._in(self._choose, candidates, routes)
        except Unsupported as error:
            missing = error.message
        except OSError as error:
            missing = f"the node's routes cannot be read: {error}"
        block = offer or await self._in(self._remembered)
        self.block, self.offer, self.missing = block, offer, missing

    async def settle(self) -> None:
        """Looks at the node's routes, once, before the first open sandbox is planned: an Edge that starts none needs no netlink library."""
        if self._settling is None and self.offer is not None and not self._claimed:
            self._settling = asyncio.get_running_loop().create_task(self.look(routes=True))
        if self._settling is not None:
            await asyncio.shield(self._settling)

    def told(self, node: Node, capabilities: Capabilities) -> tuple[Node, Capabilities]:
        """Both, with what is offered now."""
        missing = {name: why for name, why in capabilities.missing.items() if name != "network"}
        if self.missing:
            missing["network"] = self.missing
        node = msgspec.structs.replace(node, net=self.offer, net_missing=self.missing)
        return node, msgspec.structs.replace(capabilities, missing=missing)

    def _choose(self, candidates: list[IPv4Network], routes: bool) -> Block:
        if why := nft.trouble():
            raise Unsupported(why)
        prefix = network.link_prefix(self.edge, self._state)
        known = rtnl.links(prefix, self.edge)
        kept = self._remembered()
        if kept is not None and (known or nft.keys(kept.table, network.SOURCES4)):
            return kept  # sandboxes of an earlier start live in it
        taken: list[tuple[network.Network, str]] = []
        if routes:
            taken, self._mtu = rtnl.taken(prefix)
        if kept is not None:
            # Its own gateway, left by a killed Edge, is in nobody's way.
            taken = [(net, who) for net, who in taken if str(net) != f"{kept.gateway4}/32"]
        chosen = network.choose_block(candidates, taken, f"{self.edge}\0{self._state}", first=IPv4Network(kept.net4) if kept else None)
        notes = []
        why6 = nft.trouble6() if self.config.ipv6 else "switched off in the configuration"
        if why6:
            notes.append(f"network: no IPv6: {why6}")
        if blocked := nft.firewall_trouble():
            notes.append(f"network: {blocked}")
        net6 = "" if why6 else str(network.prefix6(self.config.ipv6_prefix, self.edge, self._state))
        return Block(net4=str(chosen), net6=net6, prefix=prefix, notes=tuple(notes))

    def _remembered(self) -> Block | None:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(Path(self._record).read_bytes(), type=Block)
        return None

    # --- the Edge's part -------------------------------------------------------------------------------------------

    async def up(self, wiring: Wiring) -> None:
        """Table, gateway and resolver for what was planned; once, however many ask. Raises `NodeError` and `Unsupported`."""
        if self.offer is None:
            raise Unsupported(f"network=open is not to be had on this node: {self.missing}", field="network", reason="network")
        if wiring.gateway4 != self.offer.gateway4:
            raise NodeError(f"{wiring.address4} was planned from addresses that this node has no more", reason="address")
        if self._up is None or (self._up.done() and (self._up.cancelled() or self._up.exception() is not None)):
            self._up = asyncio.get_running_loop().create_task(self._make(self.offer))
        await asyncio.shield(self._up)

    async def _make(self, block: Block) -> None:
        try:
            try:
                await self._in(self._claim, block)
            except Unsupported as error:
                await self.look(routes=True)
                raise NodeError(f"another has taken {block.net4} ({error.message}); a new try gets others", reason="address") from error
            await self._serve(block)
            if self._guarding is None or self._guarding.done():
                self._guarding = asyncio.get_running_loop().create_task(self._guard(block))
        except OSError as error:
            raise NodeError(f"network: {error}", reason="network") from error

    def _claim(self, block: Block) -> None:
        """Makes the block this Edge's, unless another took it since it was chosen."""
        with nft.choosing():
            kept = self._remembered()
            taken, self._mtu = rtnl.taken(block.prefix)
            ours = f"{block.gateway4}/32" if kept == block else ""
            network.choose_block([IPv4Network(block.net4)], [(net, who) for net, who in taken if str(net) != ours], "")
            self._claimed = True
            if kept is not None and kept.gateway4 != block.gateway4:
                rtnl.own_gateway(kept, delete=True)
            part = f"{self._record}.new"
            with open(part, "wb") as file:
                file.write(msgspec.json.encode(block))
                os.fsync(file.fileno())
            os.replace(part, self._record)
            nft.load(self._ruleset(block))
            rtnl.own_gateway(block)

    async def _guard(self, block: Block) -> None:
        """Puts the table back when somebody flushes the node's whole ruleset: without it sandboxes reach each other and the node."""
        while not self._closed:
            await asyncio.sleep(GUARD_PERIOD)
            try:
                if not await self._in(nft.there, block.table):
                    log.warning("network.table_removed", table=block.table, by="another program", then="it is made again")
                    await self._in(nft.load, self._ruleset(block))
                    await self._in(nft.allow, list(self._wired.values()), block.table)
            except (OSError, DsecError) as error:
                log.error("network.table", table=block.table, error=str(error))

    def _ruleset(self, block: Block) -> Ruleset:
        return Ruleset(block=block, denied=self._denied, connections=self.config.connections)

    async def _serve(self, block: Block) -> None:
        """Sees to it that the resolver serves, with this configuration. One of an earlier start is kept."""
        about = {"listen": block.gateway4, "net": block.net4, "upstream": list(self.config.upstreams)}
        found = await self.resolver()
        if found is not None and {name: found.get(name) for name in about} != about:
            await self._quit()
            found = None
        if found is None:
            await self._in(self._start, block)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.get_running_loop().create_task(self._watch(block))

    def _start(self, block: Block) -> None:
        argv = [sys.executable, "-m", "dsec.security.resolver", "--listen", block.gateway4, "--net", block.net4]
        argv += ["--control", self._control, "--links", block.prefix, f"--linger={self._linger}"]
        argv += [f"--upstream={upstream}" for upstream in self.config.upstreams]
        env = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        env["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
        self._wait_child()
        with open(self._log, "ab") as log:
            self._child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True, cwd="/", env=env
            )
        assert self._child.stdout is not None
        with self._child.stdout as said:
            if _line(said, RESOLVER_TIMEOUT) == b"ready\n":
                return
        self._child.kill()
        self._wait_child()
        text = Path(self._log).read_text(errors="replace").strip()[-300:]
        raise NodeError(f"the resolver did not start: {text}", reason="network")

    def _wait_child(self) -> None:
        """The resolver that this Edge started, once it has ended, leaves no zombie."""
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(5.0)

    async def resolver(self) -> dict[str, Any] | None:
        """The resolver's own account: listen, net, upstream, pid and counts of queries. None where none serves."""
        return await self._ask(b"hello\n")

    async def _ask(self, request: bytes) -> dict[str, Any] | None:
        try:
            async with asyncio.timeout(5.0):
                reader, writer = await asyncio.open_unix_connection(self._control)
                try:
                    writer.write(request)
                    found: dict[str, Any] = json.loads(await reader.readline())
                finally:
                    writer.close()
        except (OSError, ValueError, TimeoutError):
            return None
        return found

    async def _watch(self, block: Block) -> None:
        """Holds a connection, which says that there is an Edge, and starts another resolver when this one dies."""
        while not self._closed:
            try:
                reader, writer = await asyncio.open_unix_connection(self._control)
                try:
                    await reader.read()
                finally:
                    writer.close()
            except OSError as error:
                log.warning("network.resolver", error=str(error))
            if self._closed:
                return
            try:
                await self._in(self._start, block)
            except (OSError, DsecError, subprocess.SubprocessError) as error:
                log.error("network.no_resolver", error=str(error), then="trying again")
                await asyncio.sleep(1.0)

    # --- a sandbox's part ------------------------------------------------------------------------------------------

    async def ready(self, answers: Coroutine[Any, Any, None], plan: LaunchPlan, pid: int, link: GuestLink) -> None:
        """Until its guest answers (``answers``) and it has its network, if it is to have one. One after the other: its init enters its
        network namespace shortly before it becomes the agent."""
        await answers
        if plan.wiring is None:
            return
        await self.wire(plan, pid)
        if not self._idmapped:
            await self.write_inside(plan, link)

    async def wire(self, plan: LaunchPlan, pid: int) -> None:
        """Gives a sandbox its interface. Raises `NodeError`; then nothing of it is left."""
        assert plan.wiring is not None
        assert self.block is not None
        self._wired[plan.wiring.link] = plan.wiring
        try:
            await self._in(
                functools.partial(
                    nft.wire,
                    plan.wiring,
                    table=self.block.table,
                    alias=network.alias(self.edge, plan.ulid),
                    pid=pid,
                    cgroup=plan.cgroup,
                    mtu=self.config.mtu or self._mtu,
                )
            )
        except OSError as error:
            raise NodeError(f"network: {error}", sandbox=plan.id, reason="network") from error

    def unwiring(self, ulid: str, plan: LaunchPlan | None) -> asyncio.Task[None] | None:
        """`unwire` beside the kill, for it takes as long; None where there is no network to take away. ``plan`` is None where it is not
        known."""
        if not self.active or (plan is not None and plan.wiring is None):
            return None
        return asyncio.get_running_loop().create_task(self.unwire(ulid, plan.wiring if plan is not None else None))

    async def unwire(self, ulid: str, wiring: Wiring | None) -> None:
        """Takes away what a sandbox has of the network, whether it is known how much or not. Its interface goes with its last process.
        Those that end at the same time are done together. Raises `NodeError`."""
        assert self.block is not None
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        link = network.link_name(self.block.prefix, ulid)
        self._wired.pop(link, None)
        self._ending.append((link, wiring, done))
        if self._unwiring is None or self._unwiring.done():
            self._unwiring = asyncio.get_running_loop().create_task(self._unwire(self.block.table))
        try:
            await done
        except OSError as error:
            raise NodeError(f"network: {error}", sandbox=ulid, reason="network") from error

    async def _unwire(self, table: str) -> None:
        while self._ending:
            batch, self._ending = self._ending, []
            failed: OSError | None = None
            try:
                await self._in(functools.partial(nft.unwire, {name: wiring for name, wiring, _ in batch}, table=table))
            except OSError as error:
                failed = error
            for _, _, done in batch:
                if not done.done():
                    done.set_exception(failed) if failed is not None else done.set_result(None)

    async def adopt(self, plan: LaunchPlan) -> None:
        """A sandbox of an earlier start: its rules are made sure of, and that the resolver serves. What fails is logged:
        the sandbox lives on without a network rather than not at all."""
        try:
            assert plan.wiring is not None
            await self.up(plan.wiring)
            assert self.block is not None
            await self._in(nft.allow, [plan.wiring], self.block.table)
            self._wired[plan.wiring.link] = plan.wiring
        except (DsecError, OSError) as error:
            log.error("network.not_adopted", sandbox=plan.id, error=str(error))

    async def strays(self, known: Iterable[str]) -> set[str]:
        """Deletes what belongs to no known sandbox: interfaces, elements. Answers the ulids whose interface was one."""
        if not self.active:
            return set()
        assert self.block is not None
        block = self.block
        names = {network.link_name(block.prefix, ulid) for ulid in known}

        def sweep() -> set[str]:
            found = {name: ulid for name, ulid in rtnl.links(block.prefix, self.edge).items() if name not in names}
            rtnl.delete_links(found)
            nft.forget(block.table, lambda name: name not in names)
            return {ulid for ulid in found.values() if ulid}

        try:
            return await self._in(sweep)
        except OSError as error:
            raise NodeError(f"network: {error}", reason="network") from error

    def as_layer(self, plan: LaunchPlan) -> bool:
        """Whether the sandbox has a topmost layer of its own, for the files that its network needs."""
        return plan.wiring is not None and self._idmapped

    def write_layer(self, plan: LaunchPlan) -> None:
        """Fills that layer with /etc/resolv.conf, hosts and hostname, which its id map gives to root inside. So its upper stays clean, and
        the files can be changed and replaced like any other."""
        if plan.wiring is None or not self._idmapped:
            return
        place = f"{plan.state_dir}/{TOP}"
        with contextlib.suppress(FileNotFoundError):
            trees.remove(place)
        os.makedirs(f"{place}/etc")
        for path in (place, f"{place}/etc"):
            os.chmod(path, 0o755)
        for name, text in network.files(plan.wiring, plan.hostname).items():
            path = f"{place}/etc/{name}"
            Path(path).write_text(text)
            os.chmod(path, 0o644)

    async def write_inside(self, plan: LaunchPlan, link: GuestLink) -> None:
        """The same files, written by the agent into the upper: where the state directory's file system cannot be id-mapped."""
        assert plan.wiring is not None
        for name, text in network.files(plan.wiring, plan.hostname).items():
            await link.files(
                FileRequest(verb="write", path=f"/etc/{name}", data=text.encode(), create=True, truncate=True, mode=0o644, user="0")
            )

    # --- the end ---------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Lets go: table, interfaces and resolver stay for the sandboxes that live."""
        self._closed = True
        if pending := [task for task in (self._up, self._unwiring) if task is not None]:
            await asyncio.wait(pending)
        for task in (self._watching, self._guarding):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        self._pool.shutdown(wait=False)

    async def shutdown(self) -> None:
        """Undoes everything; only when no sandbox lives."""
        self._closed = True
        if self.active:
            assert self.block is not None
            if self._guarding is not None:
                self._guarding.cancel()
                await asyncio.wait([self._guarding])
            await self._quit()
            block = self.block

            def undo() -> None:
                rtnl.delete_links(rtnl.links(block.prefix, self.edge))
                rtnl.own_gateway(block, delete=True)
                nft.unload(block.table)
                Path(self._record).unlink(missing_ok=True)
                Path(self._control).unlink(missing_ok=True)

            try:
                await self._in(undo)
            except OSError as error:
                raise NodeError(f"network: {error}", reason="network") from error
        await self.close()

    async def _quit(self) -> None:
        """Ends the resolver and waits until it is gone."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        if await self._ask(b"quit\n") is None:
            return
        for _ in range(500):
            if await self.resolver() is None:
                break
            await asyncio.sleep(0.01)
        await self._in(self._wait_child)

    async def _in(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)


def _line(stream: IO[bytes], timeout: float) -> bytes:
    """The first line that a child writes, or what there is of it by then."""
    import select

    ready, _, _ = select.select([stream], [], [], timeout)
    return stream.readline() if ready else b""
