"""nats-server absent, too old, killed and started again; refused credentials; full queues."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import uvloop

from dsec import errors
from dsec.bus import Bus, Context, Msg, Route, Verb, subjects
from dsec.bus.messages import Empty, LeaseAck, StopRequest
from dsec.bus.nats_transport import NatsTransport, check_version
from dsec.bus.server import NatsServer, find_binary
from dsec.errors import DsecError
from tests.fixtures_bus import Opener

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy")


@pytest.fixture(scope="module")
def event_loop_policy() -> uvloop.EventLoopPolicy:
    """Actors run on uvloop, so these tests do; the contract suite runs on asyncio's own loop."""
    return uvloop.EventLoopPolicy()


EDGE = subjects.edge("main", "n1", "stop")


def route(handler: object) -> Route:
    verb = Verb(name="stop", request=StopRequest, reply=LeaseAck, handler=handler, idempotent=True)  # type: ignore[arg-type]
    return Route(subject=subjects.edge_all("main", "n1"), verbs=(verb,), verb_of=subjects.edge_verb)


async def quick(context: Context, request: StopRequest) -> LeaseAck:
    return LeaseAck(seq=request.grace_ms)


async def test_absent_server_is_unavailable_with_a_fix() -> None:
    """Connecting where nothing listens fails within the given time and says what to do."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(errors.Unavailable) as caught:
        await Bus.connect(f"nats://user:secret@127.0.0.1:{port}", connect_timeout=0.5)
    assert time.monotonic() - started < 1.5
    assert caught.value.field == "url"
    assert "dsec up" in caught.value.fix
    assert "secret" not in str(caught.value)
    assert isinstance(caught.value, ConnectionError)


@pytest.mark.parametrize("url", ["nats://127.0.0.1:notaport", "", "nats://"])
async def test_a_bad_url_is_the_callers_fault(url: str) -> None:
    """A URL that cannot be parsed is refused as such."""
    with pytest.raises(DsecError) as caught:
        await Bus.connect(url, connect_timeout=0.5)
    assert caught.value.field == "url"


async def test_too_old_server_is_refused() -> None:
    """A server below 2.12 is refused at start, with its version in the text."""

    async def old(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.9.10","max_payload":1048576,"headers":true}\r\n')
        while line := await reader.readline():
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
        writer.close()

    async with await asyncio.start_server(old, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(errors.Unsupported, match=r"2\.9\.10"):
            await Bus.connect(f"nats://127.0.0.1:{port}")
    check_version("2.12.0")
    check_version("2.15.1-RC.1")
    for version in ("2.11.9", "1.4", "", "two"):
        with pytest.raises(errors.Unsupported):
            check_version(version)


async def test_refused_credentials_are_denied_at_once(state_dir: Path) -> None:
    """A wrong password fails at once as Denied; the right one connects."""
    extra = "authorization { users: [ {user: ann, password: right} ] }"
    async with NatsServer(state_dir / "nats", jetstream=False, extra=extra) as server:
        started = time.monotonic()
        with pytest.raises(errors.Denied):
            await Bus.connect(server.url, user="ann", password="wrong")
        assert time.monotonic() - started < 3
        async with Bus.connect(server.url, user="ann", password="right") as bus:
            assert bus.connected
            assert bus.new_inbox().startswith("_INBOX.ann.")


async def test_what_permissions_forbid_is_denied(state_dir: Path) -> None:
    """A request or a service on a forbidden subject raises Denied at once, is counted, and the connection lives on."""
    extra = """authorization { users: [ {user: ann, password: p, permissions: {
        publish: ["ok.>", "$JS.>"], subscribe: ["_INBOX.ann.>", "ok.>", "$SRV.>"]}} ] }"""
    async with (
        NatsServer(state_dir / "nats", jetstream=False, extra=extra) as server,
        Bus.connect(server.url, user="ann", password="p") as bus,
    ):
        started = time.monotonic()
        with pytest.raises(errors.Denied):
            await bus.call("Secret.x", Empty(), Empty, timeout=5)
        answers, refusals = await bus.scatter("Secret.x", Empty(), Empty, timeout=5)
        assert (answers, [type(error) for error in refusals]) == ([], [errors.Denied])
        with pytest.raises(errors.Denied):
            await bus.serve("edge", route(quick))
        assert time.monotonic() - started < 2
        assert bus.events.counts["denied"] >= 2
        with pytest.raises(errors.Unavailable):
            await bus.call("ok.x", Empty(), Empty, timeout=5)


async def test_killed_server_fails_requests_early_and_all_comes_back(nats_server: NatsServer, open_bus: Opener) -> None:
    """Requests in flight when nats-server is killed fail then, not at their deadline; after its return subscriptions work again."""
    served, client = await open_bus(name="served"), await open_bus(name="client")
    runs: list[str] = []

    async def slow(context: Context, request: StopRequest) -> LeaseAck:
        runs.append(context.request_id)
        await asyncio.sleep(0.3)
        return LeaseAck(seq=1)

    await served.serve("edge", route(slow))
    in_flight = [asyncio.create_task(client.call(EDGE, StopRequest(), LeaseAck, timeout=30)) for _ in range(5)]
    retried = asyncio.create_task(client.call(EDGE, StopRequest(), LeaseAck, timeout=30, retries=20, request_id="once"))
    await asyncio.sleep(0.1)
    started = time.monotonic()
    nats_server.kill()
    results = await asyncio.gather(*in_flight, return_exceptions=True)
    assert time.monotonic() - started < 2
    assert all(isinstance(result, errors.Unavailable) and result.reason == "disconnected" for result in results)
    served.post("t.buffered", Empty())  # kept for the reconnection
    await asyncio.sleep(0.5)
    await nats_server.start()
    assert await retried == LeaseAck(seq=1)
    assert runs.count("once") == 1  # the repeat found the first one's outcome
    await served.transport.wait_connected(5)
    assert await client.call(EDGE, StopRequest(grace_ms=1), LeaseAck, timeout=5, retries=5) == LeaseAck(seq=1)
    assert client.events.counts["disconnected"] == 1
    assert client.events.counts["reconnected"] == 1


async def test_call_during_an_outage_waits_for_the_server(nats_server: NatsServer, open_bus: Opener) -> None:
    """A call made while nats-server is away goes out when it is back, or fails as Unavailable at its time-out."""
    served, client = await open_bus(), await open_bus()
    await served.serve("edge", route(quick))
    nats_server.kill()
    await asyncio.sleep(0.1)
    with pytest.raises(errors.Unavailable):
        await client.call(EDGE, StopRequest(grace_ms=2), LeaseAck, timeout=0.3)
    waiting = asyncio.create_task(client.call(EDGE, StopRequest(grace_ms=3), LeaseAck, timeout=20, retries=10))
    await asyncio.sleep(0.1)
    await nats_server.start()
    assert await waiting == LeaseAck(seq=3)


async def test_a_stranger_on_the_port_does_not_end_the_reconnecting(nats_server: NatsServer, open_bus: Opener) -> None:
    """Something else answers on the server's port for a while, with rubbish; the connection comes back when nats-server does."""
    client = await open_bus()
    nats_server.kill()
    answers = [b"INFO " + b"x" * 2_000_000, b"INFO {broken\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff" * 100, b""]
    met = 0

    async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal met
        writer.write(answers[met % len(answers)])
        met += 1
        try:
            await writer.drain()
        except OSError:
            pass  # the client has seen enough
        writer.close()

    async with await asyncio.start_server(stranger, nats_server.host, nats_server.port):
        async with asyncio.timeout(20):
            while met < 6:  # noqa: ASYNC110 - counted by connections
                await asyncio.sleep(0.05)
    await nats_server.start()
    await client.transport.wait_connected(20)
    await client.flush()


async def test_long_outage_fills_the_buffer_with_an_error(nats_server: NatsServer, open_bus: Opener) -> None:
    """Publishing into an outage is kept up to 2 MiB, then raises Unavailable: memory is bounded and nothing is lost silently."""
    client = await open_bus()
    nats_server.kill()
    await asyncio.sleep(0.1)
    sent = 0
    try:
        for _ in range(10_000):
            client.transport.post("t.x", b"x" * 1000)
            sent += 1
    except errors.Unavailable as error:
        assert "buffer is full" in error.message  # noqa: PT017 - the loop tells how much was taken before
    assert 1500 < sent < 2200
    got: list[bytes] = []
    await nats_server.start()
    await client.transport.wait_connected(10)
    await client.subscribe_raw("t.y", lambda msg: got.append(msg.data))
    await client.transport.publish("t.y", b"later")
    await client.flush()
    assert got == [b"later"]


async def test_stalled_server_is_noticed(nats_server: NatsServer, open_bus: Opener) -> None:
    """A flush against a frozen server times out with a typed error, and the late PONG does not break the reader."""
    import signal

    client = await open_bus()
    os.kill(nats_server.pid, signal.SIGSTOP)
    while ") T" not in Path(f"/proc/{nats_server.pid}/stat").read_text():  # noqa: ASYNC110  # its threads stop one by one
        await asyncio.sleep(0.01)
    try:
        with pytest.raises(errors.DeadlineExceeded):
            await client.flush(0.2)
    finally:
        os.kill(nats_server.pid, signal.SIGCONT)
    await client.flush(5)
    got: list[bytes] = []
    await client.subscribe_raw("t.y", lambda msg: got.append(msg.data))
    client.transport.post("t.y", b"1")
    await client.flush()
    assert got == [b"1"]


async def test_slow_consumer_is_counted_and_said(nats_server: NatsServer, open_bus: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """A subscriber that cannot keep up loses messages above its bound, and each loss is counted and reported to listeners."""
    from dsec.bus import bus as bus_module

    monkeypatch.setattr(bus_module._Spawner, "WAITING", 100)
    slow, fast = await open_bus(), await open_bus()
    heard: list[str] = []
    slow.events.listeners.append(lambda what, detail: heard.append(what))
    release = asyncio.Event()
    handled = 0

    async def handler(message: Empty, msg: Msg) -> None:
        nonlocal handled
        await release.wait()
        handled += 1

    await slow.subscribe("t.s", Empty, handler, concurrency=10)
    await slow.flush()
    for _ in range(500):
        fast.post("t.s", Empty())
    await fast.flush()
    await slow.flush()
    assert slow.events.counts["slow_consumer"] == 390
    assert heard.count("slow_consumer") == 390
    release.set()
    await asyncio.sleep(0.1)
    assert handled == 110


async def test_drain_loses_nothing_that_was_sent(nats_server: NatsServer, open_bus: Opener) -> None:
    """Closing right after posting still delivers everything."""
    reader = await open_bus()
    got: list[bytes] = []
    await reader.subscribe_raw("t.d", lambda msg: got.append(msg.data))
    await reader.flush()
    writer = await Bus.connect(nats_server.url)
    for number in range(20_000):
        await writer.transport.publish("t.d", b"%d" % number)
    await writer.close()
    await reader.flush()
    assert len(got) == 20_000
    with pytest.raises(errors.Unavailable):
        writer.post("t.d", Empty())


async def test_flush_under_uvloop_waits_for_what_was_published(nats_server: NatsServer, open_bus: Opener) -> None:
    """A process that publishes, flushes and exits at once has delivered everything, under uvloop too."""
    pytest.importorskip("uvloop")
    reader = await open_bus()
    count = 0

    def callback(msg: Msg) -> None:
        nonlocal count
        count += 1

    await reader.subscribe_raw("t.u", callback)
    await reader.flush()
    script = textwrap.dedent(
        f"""
        import os
        from dsec.bus import Bus, run
        async def main():
            bus = await Bus.connect({nats_server.url!r})
            for number in range(20000):
                bus.transport.post("t.u", b"x" * 270)
            await bus.flush()
            os._exit(0)
        run(main())
        """
    )
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", script], check=True, timeout=30)
    await reader.flush()
    await asyncio.sleep(0.2)
    assert count == 20_000


async def test_server_dies_with_its_parent(state_dir: Path) -> None:
    """A process killed with -9 takes its embedded nats-server along."""
    script = textwrap.dedent(
        f"""
        import asyncio, os, signal
        from dsec.bus.server import NatsServer, find_binary
        async def main():
            server = await NatsServer({str(state_dir)!r}).start()
            print(server.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(main())
        """
    )
    done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    pid = int(done.stdout)
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
            return
        await asyncio.sleep(0.02)
    pytest.fail(f"nats-server {pid} outlived its parent")


async def test_a_server_that_cannot_start_says_why(state_dir: Path) -> None:
    """A bad configuration is a NodeError with the end of the server's log."""
    server = NatsServer(state_dir, extra="no_such_key_at_all { a: 1 }\nlisten: 'x:y:z'")
    with pytest.raises(errors.NodeError, match="nats-server ended"):
        await server.start()
    assert server.pid == 0


async def test_nats_transport_is_a_transport(nats_server: NatsServer) -> None:
    """The connection names itself at the server and takes its limits from it."""
    transport = await NatsTransport.connect(nats_server.url)
    assert transport.max_payload == 1 << 20
    assert transport.server_version.startswith("2.")
    await transport.close()
    await transport.close()
    assert not transport.connected


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")
async def test_tls_is_spoken_and_checked(state_dir: Path) -> None:
    """A server with a certificate of our CA is accepted, without that CA it is not, and nothing falls back to plain text."""
    key, cert = state_dir / "key.pem", state_dir / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    extra = f'tls {{ cert_file: "{cert}", key_file: "{key}" }}'
    async with NatsServer(state_dir / "nats", jetstream=False, extra=extra) as server:
        url = server.url.replace("nats://", "tls://")
        async with Bus.connect(url, tls_ca=str(cert)) as bus:
            await bus.serve("edge", route(quick))
            assert await bus.call(EDGE, StopRequest(grace_ms=4), LeaseAck, timeout=5) == LeaseAck(seq=4)
        with pytest.raises(errors.Unavailable, match="certificate"):
            await Bus.connect(url, connect_timeout=0.5)


async def test_the_shipped_configuration_is_accepted(tmp_path: Path) -> None:
    """nats-server takes config/nats.conf as it stands."""
    text = (Path(__file__).parents[2] / "config" / "nats.conf").read_text().replace("/var/lib/nats", str(tmp_path))
    (tmp_path / "nats.conf").write_text(text)
    assert "sync_interval: always" in text
    done = await asyncio.to_thread(subprocess.run, [find_binary(), "-t", "-c", str(tmp_path / "nats.conf")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("creds", ["/nonexistent/user.creds", __file__])
async def test_unusable_credentials_name_the_field(nats_server: NatsServer, creds: str) -> None:
    """A credentials file that is absent or holds none is the caller's fault."""
    with pytest.raises(errors.InvalidRequest) as caught:
        await Bus.connect(nats_server.url, creds=creds)
    assert caught.value.field == "creds"


async def test_a_connection_that_takes_nothing_is_dropped_with_what_it_holds(nats_server: NatsServer) -> None:
    """nats-server stands still and its connections stay open: three unanswered pings are enough, however much is still to be written. When
    it goes on there is a new connection."""
    assert nats_server.process is not None
    async with Bus.connect(nats_server.url, ping_interval=0.2) as bus:
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def heard(what: str, _detail: str) -> None:
            if what == "disconnected" and not gone.done():
                gone.set_result(None)

        bus.events.listeners.append(heard)
        nats_server.process.send_signal(signal.SIGSTOP)
        try:
            for _ in range(256):  # more than the kernel's buffers take
                bus.transport.post("t.flood", bytes(100_000))
                await asyncio.sleep(0)
            await asyncio.wait_for(gone, 20)
        finally:
            nats_server.process.send_signal(signal.SIGCONT)
        await bus.transport.wait_connected(20)
        await bus.flush()
