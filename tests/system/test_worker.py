"""Workers: sandboxes that make and drive others, on real containers."""

from __future__ import annotations

import asyncio
import json

import pytest

import libdsec
from dsec.actors.up import Cluster
from libdsec import Client
from tests.system.worker_box import CHILD, HEAD, WORKER, client, cluster, driver, inside, raw, settled, until

__all__ = ["client", "cluster", "driver"]

pytestmark = [pytest.mark.needs("root", "cgroup", "oci", "guest"), pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]


async def test_a_worker_drives_sandboxes_of_its_job(client: Client, cluster: Cluster) -> None:
    """Without an argument it makes, uses and stops them, from a sandbox with no network; its user sees them under the job's label."""
    async with client.sandbox("small", labels={"job": "j1"}, **WORKER) as worker:
        said = await inside(
            worker,
            """
async with dsec.sandbox("small", **CHILD) as sandbox:
    result = await sandbox.exec("echo from below")
    await sandbox.files.write("/note", b"x" * 200_000)
    size = len(await sandbox.files.read("/note"))
    async with sandbox.start("seq 3") as process:
        lines = [line async for line in process.lines()]
    info = await sandbox.info()
    alone = [each.id for each in await dsec.list()] == [sandbox.id]
    print(json.dumps([result.stdout.text, size, lines, info.labels, info.principal, alone]))
async with dsec.burst("small", 4, **CHILD) as burst:
    print(len(await burst.wait()))
""",
        )
        first, count = said.splitlines()
        text, size, lines, labels, principal, alone = json.loads(first)
        assert (text.split(), size, lines, alone, int(count)) == (["from", "below"], 200_000, ["1", "2", "3"], True, 4)
        assert (labels, principal) == ({"dsec.job": worker.id, "job": "j1"}, f"local~{worker.id}")
        assert (await worker.info()).labels == {"dsec.job": worker.id, "job": "j1"}


async def test_a_hostile_worker_reaches_nobody_else(client: Client, cluster: Cluster) -> None:
    """Root in one job's worker, with sockets of its own: another job's sandbox is not there for it, in its user's name it is denied, what
    others say it does not hear, and no label or field that it writes makes its sandbox another's."""
    async with (
        client.sandbox("small", **CHILD) as users,
        client.sandbox("small", **WORKER) as worker,
        client.sandbox("small", **WORKER) as other,
    ):
        theirs = (await inside(other, 'print((await dsec.create("small", **CHILD)).id)')).strip()
        refused = json.loads(
            await inside(
                worker,
                f"""
refused = {{}}
async def attempt(name, doing):
    try:
        await doing
        refused[name] = "done"
    except libdsec.DsecError as error:
        refused[name] = type(error).__name__
for name, target in (("theirs", {theirs!r}), ("users", {users.id!r}), ("me", os.environ["DSEC_JOB"])):
    await attempt(name, dsec.attach(target))
    box = libdsec.Sandbox(dsec, dsec._wire.caller and libdsec.sandbox.SandboxId.parse(target))
    await attempt(name + " exec", box.exec("id"))
    await attempt(name + " stop", box._request("info", libdsec.sandbox.Empty(), libdsec.sandbox.InfoReply))
refused["list"] = [info.id for info in await dsec.list(stopped=True)]
refused["stop all"] = [outcome.id for outcome in await dsec.stop(everything=True)]
await attempt("open", dsec.create("small", network="open", **CHILD))
await attempt("nodes", dsec.nodes())
made = await dsec.create("small", labels={{"dsec.job": "another"}}, ends_with={theirs!r}, **CHILD)
info = await made.info()
refused["marked"] = info.labels == {{"dsec.job": os.environ["DSEC_JOB"]}} and info.principal == os.environ["DSEC_PRINCIPAL"]
await attempt("label", made.set_labels({{"dsec.job": "another"}}))
await attempt("layer", made.pack_diff("small"))
await made.stop()
for principal in ("local", "local~" + {theirs!r}, os.environ["DSEC_PRINCIPAL"] + "~" + {theirs!r}):
    try:
        async with libdsec.connect(principal=principal, connect_timeout=2) as forged:
            await attempt("forged list " + principal, forged.list())
            await attempt("forged create " + principal, forged.create("small", timeout=3, **CHILD))
    except libdsec.DsecError as error:
        refused["forged " + principal] = type(error).__name__
print(json.dumps(refused))
""",
            )
        )
        for name in ("theirs", "users", "me"):
            assert refused[name] == "NotFound"
            assert refused[f"{name} exec"] in ("NotFound", "SandboxGone")
        assert (refused["list"], refused["stop all"], refused["marked"]) == ([], [], True)
        assert {what for name, what in refused.items() if name.startswith(("open", "layer", "forged"))} == {"Denied"}
        assert sum(name.startswith("forged") for name in refused) >= 3
        assert (refused["label"], refused["nodes"]) == ("InvalidRequest", "done")
        said = await raw(
            worker,
            r"""
say(b"SUB > 1\r\nSUB dsec.> 2\r\nSUB _INBOX.> 3\r\nSUB $SYS.> 4\r\nSUB dsec.v1.main.out.> 5\r\nSUB dsec.v1.main.hb.* 6\r\n")
say(b"PUB dsec.v1.main.all.stop.local.default 2\r\n{}\r\nPUB $JS.API.STREAM.DELETE.DSEC_EVENTS 0\r\n\r\n")
say(b"PUB dsec.v1.main.all.list." + ME + b".default _INBOX.local.1 2\r\n{}\r\nPING\r\n")
print(hear(b"PONG"))
""",
        )
        assert said.count("Permissions Violation for Subscription") == 6
        assert said.count("Permissions Violation for Publish") == 3
        assert "MSG" not in said
        assert (await users.exec("echo alive")).stdout == b"alive\n"
        assert (await (await client.attach(theirs)).exec("echo alive")).stdout == b"alive\n"


async def test_a_worker_that_floods_keeps_only_itself_busy(client: Client, cluster: Cluster) -> None:
    """A hundred thousand messages, as fast as it can, on eight connections: others are served meanwhile, and it is afterwards."""
    async with client.sandbox("small", **CHILD) as users, client.sandbox("small", **WORKER) as worker:
        flood = r"""
line = b"PUB dsec.v1.main.all.list." + ME + b".default 2\r\n{}\r\n"
others = [connect() for _ in range(7)]
for each in [sock, *others]:
    each.settimeout(3)
    try:
        each.sendall(line * 12_500)
    except TimeoutError:
        pass
print("flooded")
"""
        flooding = asyncio.create_task(raw(worker, flood))
        served = 0
        while not flooding.done():
            assert (await users.exec("echo served")).stdout == b"served\n"
            served += 1
        assert "flooded" in await flooding
        assert served
        assert await inside(worker, "print(len(await dsec.list()))") == "0\n"


async def test_many_creates_at_once_are_made_or_refused(client: Client, cluster: Cluster) -> None:
    """Two hundred from one worker: each is there or hears why not, others are served meanwhile, and all end with the worker."""
    async with client.sandbox("small", **CHILD) as users, client.sandbox("small", **{**WORKER, "memory": "256MiB"}) as worker:
        program = """
from dsec.errors import DsecError
async def one():
    try:
        sandbox = await dsec.create("small", timeout=90, **CHILD)
        return (await sandbox.exec("echo there")).stdout.text.strip()
    except DsecError as error:
        return type(error).__name__
found = await asyncio.gather(*(one() for _ in range(200)))
print(json.dumps({word: found.count(word) for word in found}))
"""
        asking = asyncio.create_task(inside(worker, program, timeout=120))
        while not asking.done():
            assert (await users.exec("echo served")).stdout == b"served\n"
        found = json.loads(await asking)
        assert sum(found.values()) == 200
        assert set(found) <= {"there", "Busy", "DeadlineExceeded"}
        assert found["there"]


async def test_connections_without_number_or_word_end(client: Client, cluster: Cluster) -> None:
    """Two thousand connections of which none says a word: few are taken at one time, each is ended after a while; then the way is free."""
    async with client.sandbox("small", **{**WORKER, "nofile": 4096}) as worker:
        said = await raw(
            worker,
            r"""
import selectors
lot = []
for _ in range(2000):
    each = socket.socket()
    each.setblocking(False)
    each.connect_ex(("127.0.0.1", 4222))
    lot.append(each)
taken, end = 0, time.monotonic() + 40
while not taken and time.monotonic() < end:
    time.sleep(1)
    for each in lot:
        try:
            taken += each.recv(5) == b"INFO "
        except OSError:
            pass
print(len(lot), taken)
ended, end = 0, time.monotonic() + 40
first = [each for each in lot[:16]]
while ended < 16 and time.monotonic() < end:
    time.sleep(0.2)
    for each in list(first):
        try:
            while data := each.recv(4096):
                pass
            first.remove(each); ended += 1
        except BlockingIOError:
            pass
        except OSError:
            first.remove(each); ended += 1
print(ended)
""",
        )
        lot, taken, ended = map(int, said.split())
        assert (lot, ended) == (2000, 16)
        assert 1 <= taken <= 32
        assert await inside(worker, "print(len(await dsec.list()))") == "0\n"


async def test_what_is_no_protocol_ends_a_connection(client: Client, cluster: Cluster) -> None:
    """Lines and payloads beyond measure, broken numbers, a half of a message and silence: told, ended, and nothing else is disturbed."""
    async with client.sandbox("small", **WORKER) as worker:
        said = await raw(
            worker,
            r"""
for bad in (b"A" * 9000, b"PUB a 99999999\r\n", b"PUB " + b"x" * 5000, b"PUB a -1\r\n", b"\x00\xff\r\n", b"SUB\r\n", b"HPUB a 9 3\r\n"):
    each = connect()
    each.sendall(bad)
    print(everything(each).count(b"-ERR"))
half = connect()
half.sendall(b"PUB dsec.v1.main.all.list." + ME + b".default 2000\r\nhalf")
half.close()
silent = connect()
silent.shutdown(socket.SHUT_WR)
print(everything(silent).count(b"-ERR"))
""",
        )
        assert said.split() == ["1"] * 7 + ["0"]
        assert await inside(worker, "print(len(await dsec.list()))") == "0\n"


async def test_a_job_ends_with_its_worker(client: Client, cluster: Cluster) -> None:
    """What it made ends when the worker is stopped, also what was to be kept, below its project and by workers of its own, and says why;
    with on_end="keep" it stays."""
    async with client.sandbox("small", **WORKER) as worker:
        ids = json.loads(
            await inside(
                worker,
                r"""
kept = await dsec.create("small", **CHILD)
inner = await dsec.create("small", worker=True, toolkits=["libdsec"], memory="160MiB", disk="64MiB", pids=64)
make = "print((await d.create('small', memory='48MiB', disk='16MiB')).id)"
program = f"import asyncio, libdsec\nasync def main():\n  async with libdsec.connect() as d: {make}\nasyncio.run(main())"
result = await inner.exec(["python3", "-c", program])
print(json.dumps([kept.id, inner.id, result.stdout.text.strip() or result.stderr.text]))
""",
            )
        )
        assert {info.id for info in await client.list()} == {worker.id, *ids}, ids
    await settled(client, 0)
    ended = {info.id: info.exit for info in await client.list(stopped=True)}
    for each in ids:
        how = ended[each]
        assert how is not None
        assert (how.reason, "this with it" in how.detail) == ("lease", True)
    keep: libdsec.Options = {**WORKER, "worker": libdsec.Worker(on_end="keep")}
    async with client.sandbox("small", **keep) as worker:
        kept = (await inside(worker, 'print((await dsec.create("small", **CHILD)).id)')).strip()
    await asyncio.sleep(1)
    assert (await (await client.attach(kept)).exec("echo kept")).stdout == b"kept\n"
    assert [outcome.ok for outcome in await client.stop(ids=[kept])] == [True]


async def test_a_job_is_paused_as_one(client: Client, cluster: Cluster) -> None:
    """By its label, worker and all; it goes on with the worker, whose connections have lasted or come back."""
    async with client.sandbox("small", **WORKER) as worker:
        program = """
sandbox = await dsec.create("small", **CHILD)
n = 0
while not os.path.exists("/tmp/enough"):
    result = await sandbox.exec(f"echo {n} >>/tmp/count; cat /tmp/count | wc -l", step=f"s{n}", check=True)
    n = int(result.stdout)
    open("/tmp/progress", "w").write(str(n))
print(n)
"""
        running = asyncio.create_task(inside(worker, program, timeout=120))
        await until(lambda: worker.files.exists("/tmp/progress"))
        outcomes = await client.pause(labels={"dsec.job": worker.id})
        assert [outcome.ok for outcome in outcomes] == [True, True]
        states = {info.state for info in await client.list()}
        await asyncio.sleep(1)
        assert states == {info.state for info in await client.list()} == {"paused"}
        assert all(outcome.ok for outcome in await client.resume(labels={"dsec.job": worker.id}))
        before = int(await worker.files.read_text("/tmp/progress") or 0)

        async def further() -> bool:
            return int(await worker.files.read_text("/tmp/progress") or 0) > before + 2

        await until(further)
        await worker.files.write("/tmp/enough", b"")
        assert int(await running) > before


@pytest.mark.slow
async def test_a_worker_that_speaks_with_the_bus_is_not_idle(client: Client, cluster: Cluster) -> None:
    """However long nobody asks anything of it, it is not paused while it has a connection; once it has none it is."""
    async with client.sandbox("small", idle_timeout=2, **WORKER) as worker:
        program = """
async def main():
    async with libdsec.connect():
        open("/tmp/connected", "w")
        while not os.path.exists("/tmp/enough"):
            await asyncio.sleep(0.1)
asyncio.run(main())
"""
        async with worker.start(["python3", "-c", HEAD + program], stdin=False) as process:
            process.detach()
        await until(lambda: worker.files.exists("/tmp/connected"))
        await asyncio.sleep(4)
        assert [info.state for info in await client.list()] == ["running"]
        await worker.files.write("/tmp/enough", b"")

        async def paused() -> bool:
            return [info.state for info in await client.list()] == ["paused"]

        await until(paused)


async def test_options() -> None:
    """What a worker may is checked before anything is sent."""
    assert libdsec.spec("small", **WORKER).worker == libdsec.Worker()
    assert libdsec.spec("small", **CHILD).worker is None
    for bad in ("yes", libdsec.Worker(networks=("pypi",)), libdsec.Worker(on_end="restart"), libdsec.Worker(project="a//b")):
        with pytest.raises(libdsec.InvalidRequest):
            libdsec.spec("small", worker=bad)  # type: ignore[typeddict-item]


async def test_what_begins_from_a_worker_is_another_one(client: Client, cluster: Cluster) -> None:
    """A fork of its files has a job of its own; its processes, which speak for its job, are not forked."""
    async with client.sandbox("small", **WORKER) as worker:
        with pytest.raises(libdsec.Unsupported, match="speak for its job"):
            await worker.checkpoint(kind="memory")
        async with await worker.fork(1) as (fork,):
            said = json.loads(
                await inside(fork, 'async with dsec.sandbox("small", **CHILD) as made:\n    print(json.dumps((await made.info()).labels))')
            )
            assert said == (await fork.info()).labels == {"dsec.job": fork.id}


async def test_a_job_is_below_its_makers_project(client: Client, cluster: Cluster) -> None:
    """A worker's sandboxes are in its project or in one below it, and in no other."""
    for outside in ("another", "defaulted", "default2/x"):
        with pytest.raises(libdsec.Denied):
            await client.create("small", **{**WORKER, "worker": libdsec.Worker(project=outside)})
    async with client.sandbox("small", **{**WORKER, "worker": libdsec.Worker(project="default/below")}) as worker:
        await inside(worker, 'await dsec.create("small", **CHILD)')
        assert {info.project for info in await client.list(below=True)} == {"default", "default/below"}
        assert [info.project for info in await client.list()] == ["default"]

    async def over() -> bool:
        return not await client.list(below=True)

    await until(over)
