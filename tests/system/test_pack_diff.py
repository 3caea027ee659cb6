"""pack_diff on real containers: what a sandbox changed becomes a layer that is used at once, whatever kind of entry it is."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import libdsec
from dsec.actors.up import Cluster
from dsec.layers.importer import import_dir
from dsec.layers.store import LayerStore
from dsec.trees import clear
from libdsec import Client, InvalidRequest, Sandbox, SandboxGone
from tests.fixtures_backend import build_small_base

pytestmark = [pytest.mark.needs("root", "cgroup", "oci", "guest"), pytest.mark.asyncio(loop_scope="module")]

SMALL: libdsec.Options = {"memory": "96MiB", "disk": "64MiB", "cpus": 0.5, "pids": 64}

# What the base holds for the changes below to be made on.
PREPARE = """
mkdir -p a/b/c d/sub e ren/x mov data; echo 1 >a/f1; echo 2 >a/f2; echo 3 >a/b/c/deep; echo x >d/old1; echo y >d/sub/old2
echo z >e/keep; echo q >e/gone; ln e/keep e/keep2; echo 1 >ren/x/1; echo 2 >ren/x/2; echo h >hl; cp /bin/true capped
head -c 300000 /dev/urandom >big; touch -d 2020-01-01 a/f2
"""
CHANGES = r"""
import os, socket, struct
os.chdir("/w")
os.remove("a/f1")
os.system("rm -r a/b; rm -r d; mkdir d; echo new >d/new; rm e/gone; echo more >>e/keep")
os.system("cp -r ren ren2; rm -r ren; ln hl hl2; mv e/keep2 mov/keep2")
with open("sparse", "wb") as f:
    f.truncate(20 << 20)
    f.seek(10 << 20)
    f.write(b"middle")
os.mkfifo("ff", 0o640)
os.system("cp /bin/true su; chmod 4755 su; cp /bin/true sg; chmod 2755 sg; chmod 600 big")
os.system("mkdir emptyd; chmod 1777 emptyd; mkdir -p new/deep/tree")
os.symlink("nowhere/" + "x" * 500, "dangling")
os.symlink("/etc/passwd", "absolute")
try:
    os.symlink("../" * 60 + "x" * 3000, "long")
except OSError:  # xfs: 1024 bytes
    os.symlink("../" * 60 + "x" * 700, "long")
cap = struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0)
os.setxattr("su", "user.note", b"kept\0whole")
os.chown("big", 1234, 99)
os.mkdir("dir with é ümlaut")
open("dir with é ümlaut/日本", "w").write("hi")
open(b"bad-\xff-name", "w").write("raw")
open("n" * 255, "w").write("long name")
open("empty", "w")
for size in (1, 1023, 1024, 1025, 4095, 4096, 4097, 65536, 70001):
    open(f"data/{size}", "wb").write(os.urandom(size))
open("new/deep/tree/rnd", "wb").write(os.urandom(100000))
os.mkdir("many")
for n in range(700):
    open(f"many/{n}-{'m' * (n % 80)}", "w").write(str(n))
try:
    cap = struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0)
    os.setxattr("sg", "security.capability", cap)
except OSError as error:
    print("no capability:", error)
try:
    os.setxattr("emptyd", "system.posix_acl_default", struct.pack("<I", 2) + struct.pack("<HHI", 1, 7, 0xFFFFFFFF)
        + struct.pack("<HHI", 2, 5, 1000) + struct.pack("<HHI", 4, 5, 0xFFFFFFFF) + struct.pack("<HHI", 16, 7, 0xFFFFFFFF)
        + struct.pack("<HHI", 32, 0, 0xFFFFFFFF))
except OSError as error:
    print("no acl:", error)
s = socket.socket(socket.AF_UNIX); s.bind("sock")
for name in ("a/f2", "dangling", "d"):
    os.utime(name, ns=(1614834367123456789, 1614834367123456789), follow_symlinks=False)
"""
# Everything a process can see of a tree; a layer's mount keeps access times and directory sizes to itself.
SNAP = r"""
import hashlib, json, os, stat
out = {}
for top, dirs, files in os.walk(b"/w"):
    for name in [b"."] + dirs + files:
        if name == b"." and top != b"/w":
            continue
        path = os.path.join(top, name)
        s = os.lstat(path)
        row = [oct(s.st_mode), s.st_uid, s.st_gid, s.st_mtime_ns]
        if not stat.S_ISDIR(s.st_mode):
            row += [s.st_size, s.st_nlink]
        if stat.S_ISLNK(s.st_mode):
            row.append(os.readlink(path).decode("utf-8", "backslashreplace"))
        elif stat.S_ISREG(s.st_mode):
            row.append(hashlib.sha256(open(path, "rb").read()).hexdigest()[:16])
        try:
            row.append(sorted([n, os.getxattr(path, n, follow_symlinks=False).hex()] for n in os.listxattr(path, follow_symlinks=False)))
        except OSError as error:
            row.append(error.errno)
        out[path.decode("utf-8", "backslashreplace")] = row
print(json.dumps(out))
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    """One Edge with the container backend, a base of this machine's programs and a workspace layer to change."""
    place = Path(tempfile.mkdtemp(prefix="dsec-t-", dir="/tmp"))
    try:
        await asyncio.to_thread(build_small_base, place / "base")
        (place / "w").mkdir()
        process = await asyncio.create_subprocess_exec("bash", "-ec", PREPARE, cwd=place / "w")
        assert await process.wait() == 0
        os.setxattr(place / "w/a/f2", "user.foo", b"bar")
        cluster = Cluster(place / "up", edges=(f"t{secrets.token_hex(4)}",), overrides={"edge": {"sweep_ms": 200}})
        store = LayerStore(cluster.layer_store)
        await import_dir(store, place / "base", "small")
        await import_dir(store, place / "w", "work", at="/w")
        async with cluster:
            yield cluster
    finally:
        await asyncio.to_thread(clear, place)


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with libdsec.connect(cluster.url) as client:
        yield client
        assert await client.list() == []


async def run(sandbox: Sandbox, script: str) -> str:
    result = await sandbox.exec(["python3", "-c", script], timeout=60)
    assert result.exit_code == 0, result.stderr.text
    return result.stdout.text


async def test_c44_every_kind_of_entry_is_in_the_packed_layer(client: Client, cluster: Cluster) -> None:
    """A second sandbox on the packed layer sees exactly what the first one left: content, kinds, modes, owners, times, links, attributes,
    deletions."""
    async with client.sandbox("small", workspace=["work"], **SMALL) as sandbox:
        said = await run(sandbox, CHANGES)
        before = json.loads(await run(sandbox, SNAP.replace("print(", "import sys; sys.stdout.write(")))
        layer = await sandbox.pack_diff(scrub=["*.pyc"])
        assert layer.parents == tuple(ref.digest for ref in sandbox.layers)
        assert layer.entries > 700
        assert layer.size > layer.bytes > 20 << 20
        assert (await sandbox.exec("echo on")).stdout.text == "on\n"
    async with client.sandbox("small", workspace=["work", layer], **SMALL) as other:
        after = json.loads(await run(other, SNAP.replace("print(", "import sys; sys.stdout.write(")))
    different = {name: (before.get(name), after.get(name)) for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert not different
    assert not {"/w/a/f1", "/w/d/old1"} & after.keys()
    if "no capability" not in said:
        assert any(name == "security.capability" for name, _ in after["/w/sg"][-1])
    store = LayerStore(cluster.layer_store)
    info = await store.info(layer.digest)
    assert info.parents == layer.parents
    assert info.names == (layer.name,)


async def test_what_belongs_to_a_run_is_left_out(client: Client) -> None:
    """/tmp, /run, /dev/shm and what the caller's globs name are not in the layer; the rest is; packing twice gives the same bytes."""
    async with client.sandbox("small", **SMALL) as sandbox:
        await sandbox.exec(
            "mkdir -p /run /home/user/.cache/x /srv; cd /home/user/.cache/x;"
            "for f in /tmp/t /dev/shm/s c /srv/kept /srv/a.tmp; do echo x >$f; done",
            check=True,
        )
        first = await sandbox.pack_diff("mine/first", scrub=["/home/user/.cache", "*.tmp"])
        second = await sandbox.pack_diff("mine/second", scrub=["/home/user/.cache", "*.tmp"])
        assert first.scrubbed >= 3
        assert second.digest == first.digest
    async with client.sandbox("small", workspace="mine/first", **SMALL) as other:
        found = (await other.exec("cd /; ls tmp dev/shm; ls -d srv/* home/user/.cache 2>/dev/null")).stdout.text.split()
        assert [name for name in found if not name.endswith(":")] == ["srv/kept"]
        assert (await other.exec("stat -c %a /tmp")).stdout.text == "1777\n"


async def test_a_refused_pack_leaves_the_sandbox_running(client: Client) -> None:
    """Too many entries, too many bytes, an unusable name or glob: a typed error, and the sandbox runs on."""
    async with client.sandbox("small", **SMALL) as sandbox:
        await sandbox.exec("mkdir /srv; for i in 1 2 3 4 5; do head -c 1000 /dev/zero >/srv/$i; done", check=True)
        for options, field in (
            ({"max_entries": 3}, "max_entries"),
            ({"max_bytes": 3000}, "max_bytes"),
            ({"name": "not/a name"}, "name"),
            ({"name": "a//b"}, "name"),
            ({"scrub": ["/"]}, "scrub[0]"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                await sandbox.pack_diff(**options)  # type: ignore[arg-type]
            assert caught.value.field.endswith(field), caught.value
            assert (await sandbox.exec("echo on")).stdout.text == "on\n"
        assert (await sandbox.info()).state == "running"


async def test_a_paused_sandbox_stays_paused(client: Client) -> None:
    """Packing a paused sandbox does not resume it, several at once are done one after another, and a stopped one says so."""
    async with client.sandbox("small", **SMALL) as sandbox:
        await sandbox.exec("echo x >/root/x", check=True)
        await sandbox.pause()
        layers = await asyncio.gather(*(sandbox.pack_diff() for _ in range(3)))
        assert len({layer.digest for layer in layers}) == 1
        assert layers[0].frozen_ms == 0
        assert (await sandbox.info()).state == "paused"
        await sandbox.resume()
        await sandbox.stop()
        with pytest.raises(SandboxGone):
            await sandbox.pack_diff()


async def test_stopping_in_the_middle_of_a_pack(client: Client) -> None:
    """A stop wins over a pack that is under way: the pack ends with the reason, and nothing is left."""
    async with client.sandbox("small", **SMALL) as sandbox:
        await sandbox.exec(
            "head -c 40000000 /dev/urandom >/root/x; mkdir /root/d; for i in $(seq 500); do echo $i >/root/d/$i; done", check=True
        )
        packing = asyncio.ensure_future(sandbox.pack_diff())
        await asyncio.sleep(0.02)
        await sandbox.stop()
        (outcome,) = await asyncio.gather(packing, return_exceptions=True)
        assert isinstance(outcome, (SandboxGone, libdsec.PackedLayer)), outcome


async def test_the_way_to_the_upper_is_closed_to_the_sandbox(client: Client) -> None:
    """No process inside can reach the descriptor that the node uses: it is held by the init alone."""
    script = (
        "import os\n"
        "assert not any(os.readlink(f'/proc/self/fd/{n}').startswith('/u') for n in os.listdir('/proc/self/fd') if n != '3')\n"
        "try: os.open('/proc/1/fd/4', os.O_RDONLY); print('open')\n"
        "except PermissionError: print('closed')"
    )
    async with client.sandbox("small", **SMALL) as sandbox:
        assert await run(sandbox, script) == "closed\n"


async def test_packing_after_a_restart_of_the_edge(client: Client, cluster: Cluster) -> None:
    """An Edge that was killed and came back packs what was written before and after."""
    edge = next(iter(cluster.edges.values()))
    async with client.sandbox("small", disk_mode="loop" if shutil.which("mkfs.ext4") else "auto", **SMALL) as sandbox:
        await sandbox.exec("echo before >/root/before", check=True)
        await edge.kill()
        await edge.start()
        await sandbox.exec("echo after >/root/after", check=True)
        layer = await sandbox.pack_diff()
    async with client.sandbox("small", workspace=layer, **SMALL) as other:
        assert (await other.exec("cat /root/before /root/after")).stdout.text == "before\nafter\n"


async def dsec(*words: str) -> str:
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "dsec.cli", *words, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


async def test_layers_can_be_looked_into(client: Client, cluster: Cluster) -> None:
    """`dsec layer pack`, `tree`, `diff` and `lineage` make a layer and show what it changes and what it stands on."""
    store = ("--store", str(cluster.layer_store), "--json")
    async with client.sandbox("small", workspace="work", **SMALL) as sandbox:
        await sandbox.exec(
            "rm /w/hl; rm -r /w/d; mkdir /w/d; echo x >/w/d/old1; echo x >/w/added; echo x >/w/a/f1; touch /tmp/t", check=True
        )
        packed = json.loads(await dsec("--url", cluster.url, "layer", "pack", "--json", sandbox.id, "looked", "--scrub", "*.o"))
        assert packed["name"] == "looked"
        assert packed["scrubbed"] >= 1
    rows = json.loads(await dsec("layer", "diff", *store, "looked"))
    changed = {row["path"]: row["change"] for row in rows}
    wanted = {"/w/hl": "D", "/w/d": "C", "/w/d/old1": "C", "/w/d/sub": "D", "/w/d/sub/old2": "D", "/w/added": "A", "/w/a/f1": "C"}
    assert {path: changed.get(path) for path in wanted} == wanted
    kinds = {row["path"]: row["kind"] for row in json.loads(await dsec("layer", "tree", *store, "looked"))}
    assert (kinds["/w/hl"], kinds["/w/d"], kinds["/w/added"]) == ("whiteout", "opaque", "file")
    both = json.loads(await dsec("layer", "diff", *store, "work", "looked"))
    assert {"change": "A", "path": "/w/added"} in both
    chain = json.loads(await dsec("layer", "lineage", *store, "looked"))
    assert [layer["names"] for layer in chain["parents"]] == [["work"], ["small"]]
    under = json.loads(await dsec("layer", "lineage", *store, "work"))["children"]
    assert "looked" in [name for layer in under for name in layer["names"]]


async def test_a_sandbox_of_very_many_layers(client: Client, cluster: Cluster) -> None:
    """Eighty layers and the base make one root: the topmost one's file counts, and each one's own files are there."""
    store = LayerStore(cluster.layer_store)
    names = []
    with tempfile.TemporaryDirectory(prefix="dsec-t-") as folder:
        for number in range(80):
            (Path(folder) / f"own-{number}").write_text(str(number))
            (Path(folder) / "which").write_text(str(number))
            names.append((await import_dir(store, folder, f"many-{number}", at="/m")).name)
            (Path(folder) / f"own-{number}").unlink()
    spec = libdsec.spec("small", workspace=names[:40], toolkits=names[40:], **SMALL)
    async with client.sandbox(spec) as sandbox:
        assert (await sandbox.exec("cat /m/which; ls /m | wc -l; cat /m/own-0 /m/own-79")).stdout.text == "7981\n079"


async def test_an_edge_killed_in_the_middle_of_a_pack(client: Client, cluster: Cluster) -> None:
    """The next Edge finds the sandbox frozen and lets it run on; the caller's repeated request packs it."""
    edge = next(iter(cluster.edges.values()))
    async with client.sandbox("small", **SMALL | {"disk": "128MiB", "inodes": 40_000}) as sandbox:
        await sandbox.exec(
            "mkdir /root/d; cd /root/d; head -c 40000 /dev/urandom >a; for i in $(seq 400); do ln a $i 2>/dev/null || cp a $i; done;"
            'cp -r /root/d /root/e; python3 -c \'import os\nfor i in range(12000): open(str(i)+"x","w").write("y"*3000)\'',
            check=True,
        )
        counter = sandbox.start("while :; do echo >>/tmp/count; sleep 0.01; done", stdin=False)
        async with counter:
            packing = asyncio.ensure_future(sandbox.pack_diff())
            until = asyncio.get_running_loop().time() + 5
            while "capturing" not in {info.state for info in await client.list()} and asyncio.get_running_loop().time() < until:
                if packing.done():
                    break
            await edge.kill()
            await edge.start()
            first = (await sandbox.exec("cat /tmp/count")).stdout.text
            await asyncio.sleep(0.3)
            assert (await sandbox.exec("cat /tmp/count")).stdout.text != first
            layer = await asyncio.wait_for(packing, 60)
        assert (await sandbox.info()).state == "running"
        assert layer.entries > 12_000
