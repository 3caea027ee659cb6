"""The gate between a job and a real bus, on the cluster with the fake backend: what passes, and what a forger meets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import nkeys
import pytest
import pytest_asyncio

import libdsec
from dsec.bus import Bus, Msg, codec, subjects
from dsec.bus.grants import LABEL, Grant
from dsec.bus.messages import Empty, ManyReply, Selector
from dsec.bus.server import NatsServer
from dsec.bus.signing import Signer
from dsec.bus.subjects import Caller
from dsec.bus.upstream import Upstream
from dsec.errors import Denied, InvalidRequest, NotFound, Unsupported
from libdsec import Client
from tests.integration.client_box import FAKE, eventually
from tests.integration.test_bus_creds import Authority, key

WORKER = "far-01j8z7q0000000000000000000"  # on a node that is not there: nobody says that it has ended


class Door:
    """Listens as a worker's agent does; each connection goes through a gate, or, with ``gated`` False, plainly to nats-server."""

    def __init__(self, url: str, grant: Grant, *, gated: bool = True, signer: Signer | None = None) -> None:
        self.url, self.grant, self.gated, self.signer = url, grant, gated, signer
        self.server: asyncio.Server | None = None
        self.tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> str:
        self.server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"nats://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        assert self.server is not None
        self.server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._gated(reader, writer) if self.gated else self._plain(reader, writer))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _gated(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = await Upstream.open(self.url, self.grant, signer=self.signer)

        def tell() -> None:
            writer.write(bytes(upstream.gate.down))
            upstream.gate.down.clear()

        async def up() -> None:
            tell()
            while not upstream.gate.over and (data := await reader.read(65_536)):
                await upstream.say(data)
                tell()

        async def down() -> None:
            while data := await upstream.heard():
                await upstream.take(data)
                tell()

        await self._both(up(), down(), writer)
        upstream.close()

    async def _plain(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far, near = await asyncio.open_connection("127.0.0.1", int(self.url.rpartition(":")[2]))

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65_536):
                sink.write(data)

        await self._both(copy(reader, near), copy(far, writer), writer)
        near.close()

    @staticmethod
    async def _both(one: object, other: object, writer: asyncio.StreamWriter) -> None:
        ways = [asyncio.ensure_future(each) for each in (one, other)]  # type: ignore[call-overload]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            with contextlib.suppress(OSError):
                writer.close()


def grant_of(client: Client) -> Grant:
    return Grant(unit="main", worker=WORKER, principal=subjects.job("local", WORKER), project=client.project)


@pytest_asyncio.fixture
async def inside(fake_cluster: str, dsec: Client) -> AsyncIterator[Client]:
    """A client as a worker has it."""
    grant = grant_of(dsec)
    async with (
        Door(fake_cluster, grant) as url,
        libdsec.connect(url, project=dsec.project, principal=grant.principal, lease_ttl=2) as client,
    ):
        yield client


async def test_a_job_makes_and_drives_its_own(dsec: Client, inside: Client) -> None:
    """Create, burst, exec, output, files, list, pause, stop through the gate; they bear the job's mark; its user sees them as his own."""
    async with inside.sandbox("image", **FAKE) as sandbox:
        assert (await sandbox.exec("echo inside")).stdout == b"inside\n"
        await sandbox.files.write("/note", b"x" * 300_000)
        assert await sandbox.files.read("/note") == b"x" * 300_000
        async with sandbox.start("echo 1") as process:
            assert [line async for line in process.lines()] == ["1"]
        info = await sandbox.info()
        assert info.labels[LABEL] == WORKER
        assert [each.id for each in await inside.list()] == [sandbox.id]
        assert [each.id for each in await dsec.list(labels={LABEL: WORKER})] == [sandbox.id]
        owner = await dsec.attach(sandbox.id)
        async with owner.start("echo seen") as process:
            assert [line async for line in process.lines()] == ["seen"]
        assert [outcome.ok for outcome in await dsec.pause(labels={LABEL: WORKER})] == [True]
        assert (await sandbox.exec("echo again")).stdout == b"again\n"
    async with inside.burst("image", 8, **FAKE) as burst:
        assert len(await burst.wait()) == 8
    await eventually(lambda: _nothing(inside))


async def _nothing(client: Client) -> bool:
    return not await client.list()


async def test_another_jobs_sandbox_is_not_there(dsec: Client, inside: Client, fake_cluster: str) -> None:
    """Its user's own and another job's: not found, not listed, not stopped, not found by name of a checkpoint; no event is told."""
    other = Grant(
        unit="main", worker="far-01j8z7q1111111111111111111", principal="local~far-01j8z7q1111111111111111111", project=dsec.project
    )
    async with (
        Door(fake_cluster, other) as url,
        libdsec.connect(url, project=dsec.project, principal=other.principal) as elsewhere,
        elsewhere.sandbox("image", **FAKE) as theirs,
        dsec.sandbox("image", **FAKE) as users,
    ):
        for sandbox in (theirs, users):
            with pytest.raises(NotFound):
                await inside.attach(sandbox.id)
        assert await inside.list() == []
        assert [outcome.ok for outcome in await inside.stop(ids=[theirs.id])] in ([], [False])
        checkpoint = await theirs.checkpoint()
        with pytest.raises(NotFound):
            await inside.restore(checkpoint)
        with pytest.raises(Denied, match="a job hears no events"):
            async for _ in inside.events(since="all", follow=False):
                pass
        mine = await inside.create("image", **FAKE)
        with pytest.raises(Denied) as caught:
            await mine.pack_diff("debian-12")
        assert caught.value.field == "name"
        assert (await mine.pack_diff()).name.startswith("packed/")
        with pytest.raises(InvalidRequest):
            await mine.set_labels({LABEL: "another"})
        with pytest.raises(Denied):
            await inside.create("image", network="open", **FAKE)
        await mine.stop()
        assert (await theirs.exec("echo still")).ok
        assert (await users.exec("echo still")).ok


@pytest.mark.parametrize("gated", [True, False])
async def test_a_forged_principal(dsec: Client, fake_cluster: str, gated: bool) -> None:
    """Somebody in the worker speaks as its user and stops the user's sandbox: denied by the gate. Over a plain way to the same bus it
    works, which shows that it is the gate that keeps him from it."""
    async with Door(fake_cluster, grant_of(dsec), gated=gated) as url:
        victim = await dsec.create("image", **FAKE)
        async with Bus.connect(url, inbox=f"_INBOX.{grant_of(dsec).principal}", user="local", password="x") as forger:
            told: list[bytes] = []

            def hear(msg: Msg) -> None:
                told.append(msg.data)

            overheard = await forger.subscribe_raw("dsec.v1.main.>", hear)
            everyone = subjects.everyone("main", "stop", Caller("local", dsec.project))
            one = subjects.sandbox("main", "stop", Caller("local", dsec.project), victim._id)
            if gated:
                for subject, message in ((everyone, Selector()), (one, Empty()), ("dsec.v1.main.edge.n1.drain", Empty())):
                    with pytest.raises(Denied):
                        await forger.call(subject, message, ManyReply, timeout=5)
                assert (await victim.exec("echo alive")).stdout == b"alive\n"
                assert not told
                assert "denied" in forger.events.counts
            else:
                await forger.call(everyone, Selector(ids=(victim.id,)), ManyReply, timeout=5)
                assert not await victim.is_running()
                await forger.flush()
                assert told
            await overheard.unsubscribe()
        await victim.stop()


async def test_a_job_that_the_bus_itself_holds_to_its_subjects(state_dir: Path) -> None:
    """Where the server checks credentials, the Edge signs in for the job with ones of its own: nats-server refuses what the gate would,
    also where there is no gate."""
    authority = Authority()
    grant = Grant(unit="main", worker=WORKER, principal=subjects.job("local", WORKER), project="acme/rl")
    async with NatsServer(state_dir / "nats", jetstream=False, extra=authority.config) as server:
        signer = Signer(authority.account_seed)
        creds = signer.credentials(grant)
        async with (
            Bus.connect(server.url, creds=authority.creds()) as trusted,
            Bus.connect(server.url, creds=creds, inbox=grant.inbox.rstrip(".")) as job,
            Door(server.url, grant, signer=signer) as url,
            Bus.connect(url, inbox=grant.inbox.rstrip(".")) as gated,
        ):
            heard: list[str] = []
            await trusted.subscribe_raw("dsec.v1.>", lambda msg: _answer(trusted, heard, msg))
            await trusted.flush()
            mine = subjects.api("main", "create", Caller(grant.principal, "acme/rl"))
            lists = subjects.everyone("main", "list", Caller(grant.principal, "acme/rl"))
            for bus in (job, gated):
                await bus.transport.request(lists, codec.encode(Empty()), timeout=5)
            for forged in (mine.replace(grant.principal, "local"), "dsec.v1.main.edge.n1.launch", mine.replace("acme.rl", "acme")):
                with pytest.raises(Denied):
                    await job.transport.request(forged, b"", timeout=5)
            assert heard == [lists, lists]
            denied = await job.subscribe_raw("_INBOX.>", lambda msg: None)
            await job.flush()
            assert "permissions violation" in getattr(denied, "denied", "").lower()
        with pytest.raises(Denied):
            await Bus.connect(server.url, connect_timeout=2)
        with pytest.raises(Denied):
            await Bus.connect(server.url, creds=Signer(Authority().account_seed).credentials(grant), connect_timeout=2)
    for bad in ("SAxyz", "", key(nkeys.PREFIX_BYTE_USER)[2]):
        with pytest.raises(InvalidRequest):
            Signer(bad)


def _answer(bus: Bus, heard: list[str], msg: Msg) -> None:
    heard.append(msg.subject)
    bus.transport.post(msg.reply, codec.encode(Empty()))


async def test_a_job_takes_no_lease_of_anothers(dsec: Client, inside: Client, fake_cluster: str) -> None:
    """Leases of one name in a job and outside are two: neither holds what is the other's, nor keeps it from being made."""
    grant = grant_of(dsec)
    async with (
        Door(fake_cluster, grant) as url,
        libdsec.connect(url, project=dsec.project, principal=grant.principal, lease="train-7", lease_ttl=2) as thief,
        thief.sandbox("image", **FAKE),
        libdsec.connect(fake_cluster, project=dsec.project, lease="train-7", lease_ttl=2) as client,
        client.sandbox("image", **FAKE) as sandbox,
    ):
        await thief._leases.close()
        await asyncio.sleep(0.5)
        assert (await sandbox.exec("echo held")).stdout == b"held\n"


async def test_a_backend_without_workers_says_so(dsec: Client) -> None:
    """Where the agent cannot listen for the node the create is refused, with the field."""
    with pytest.raises(Unsupported) as caught:
        await dsec.create("image", worker=True, timeout=20, **FAKE)
    assert caught.value.field == "worker"
