"""Trees and tars into real containers and out of them, and changes of files as they happen."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import libdsec
from dsec.actors.up import Cluster
from dsec.model import FileReply, FileRequest
from dsec.trees import clear
from libdsec import Client, Denied, InvalidRequest, NotFound, Sandbox, SandboxError
from tests.system.small_cluster import ROOMY, client, cluster, sandbox
from tests.unit.test_tar import END, HOSTILE

__all__ = ["client", "cluster", "sandbox"]
pytestmark = [pytest.mark.needs("root", "cgroup", "oci", "guest"), pytest.mark.asyncio(loop_scope="module")]

HASH = "import hashlib, sys; print(hashlib.file_digest(open(sys.argv[1], 'rb'), 'sha256').hexdigest())"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(cluster: Cluster) -> AsyncIterator[Sandbox]:
    """For tests that keep to a directory of their own."""
    async with libdsec.connect(cluster.url) as client, client.sandbox("small", **ROOMY) as sandbox:
        yield sandbox


async def pieces(data: bytes, size: int = 100_000) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


async def whole(stream: AsyncIterator[bytes]) -> tarfile.TarFile:
    return tarfile.open(fileobj=io.BytesIO(b"".join([piece async for piece in stream])))


def noise(path: Path, mib: int) -> None:
    with path.open("wb") as file:
        file.writelines(os.urandom(1 << 20) for _ in range(mib))


def holes(path: Path, places: list[int], size: int) -> None:
    with path.open("wb") as file:
        for at in places:
            file.seek(at)
            file.write(b"y" * 4096)
        file.truncate(size)


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def services(sandbox: Sandbox) -> list[str]:
    """Names of processes inside that a transfer or a watch has left."""
    code = "import glob; print(*[open(p).read().strip() for p in glob.glob('/proc/[0-9]*/comm')])"
    return [name for name in (await sandbox.exec(["python3", "-c", code])).stdout.text.split() if name == "aether-service"]


async def test_c44_a_tree_goes_up_and_down_as_it_is(sandbox: Sandbox, tmp_path: Path) -> None:
    """Modes, nanoseconds, links of both kinds, absolute ones, FIFOs, holes, attributes, odd names: the same after both ways."""
    tree = tmp_path / "tree"
    (tree / "a/b").mkdir(parents=True)
    (tree / "a/b/f").write_bytes(b"x" * 1000)
    (tree / "a/b/f").chmod(0o751)
    os.utime(tree / "a/b/f", ns=(0, 1_500_000_000_987_654_321))
    os.link(tree / "a/b/f", tree / "again")
    (tree / "a/b").chmod(0o555)
    (tree / "abs").symlink_to("/etc/passwd")
    (tree / "dangling").symlink_to("../../../../nowhere")
    (tree / "empty").mkdir()
    os.mkfifo(tree / "fifo")
    (tree / ("long-" * 40)).write_text("long")
    (tree / os.fsdecode(b"\xff odd\n\t")).write_text("odd")
    (tree / ("d" * 100) / ("e" * 100)).mkdir(parents=True)
    (tree / ("d" * 100) / ("e" * 100) / "deep").write_text("deep")
    holes(tree / "holes", [30 << 20], 40 << 20)
    await sandbox.files.upload(tree, "/work/tree")
    words = "cd /work/tree; stat -c '%a %Y %h' again; stat -c '%U' holes; stat -c %N abs; head -c 4 abs; cat d*/e*/deep;stat -c ' %b' holes"
    lines = (await sandbox.exec(words)).stdout.text.split()
    assert lines[:7] == ["751", "1500000000", "2", "root", "'abs'", "->", "'/etc/passwd'"]
    assert lines[7] == "rootdeep"
    assert int(lines[8]) < 100
    back = tmp_path / "back"
    await sandbox.files.download("/work/tree", back)
    done = await asyncio.to_thread(subprocess.run, ["diff", "-r", "--no-dereference", "-x", "fifo", str(tree), str(back)], check=False)
    assert done.returncode == 0
    for path in tree.rglob("*"):
        there, here = (back / path.relative_to(tree)).lstat(), path.lstat()
        assert (there.st_mode, there.st_mtime_ns, there.st_nlink) == (here.st_mode, here.st_mtime_ns, here.st_nlink), path
    assert (back / "holes").stat().st_blocks < 100
    assert await services(sandbox) == []


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 18_433, 120_000, 262_145, 20_000_000])
async def test_c39_c40_every_size_in_a_tar(shared: Sandbox, tmp_path: Path, size: int) -> None:
    """Hashes agree inside and after the way back, within a deadline."""
    (tmp_path / "up").mkdir()
    data = os.urandom(size)
    (tmp_path / "up/f").write_bytes(data)
    async with asyncio.timeout(30):
        assert await shared.files.upload(tmp_path / "up", f"/sizes/{size}") == size
        inside = (await shared.exec(["python3", "-c", HASH, f"/sizes/{size}/f"])).stdout.text.strip()
        assert inside == hashlib.sha256(data).hexdigest()
        await shared.files.download(f"/sizes/{size}", tmp_path / "down")
    assert (tmp_path / "down/f").read_bytes() == data


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_c39_a_gibibyte(client: Client, tmp_path: Path) -> None:
    """As one file and as a tar."""
    await asyncio.to_thread(noise, tmp_path / "f", 1024)
    digest = digest_of(tmp_path / "f")
    async with client.sandbox("small", memory="512MiB", disk="1200MiB", cpus=1) as sandbox:
        await sandbox.files.upload(tmp_path / "f", "/f")
        assert (await sandbox.exec(["python3", "-c", HASH, "/f"], timeout=120)).stdout.text.strip() == digest
        await sandbox.files.download("/f", tmp_path / "g")
        assert digest_of(tmp_path / "g") == digest
        await sandbox.files.remove("/f")
        (tmp_path / "d").mkdir()
        (tmp_path / "g").rename(tmp_path / "d/g")
        await sandbox.files.upload(tmp_path / "d", "/d")
        assert (await sandbox.exec(["python3", "-c", HASH, "/d/g"], timeout=120)).stdout.text.strip() == digest


STREAM = """
import asyncio, sys, libdsec
async def main():
    size = int(sys.argv[3])
    async def up():
        head = libdsec_header(size)
        yield head
        block = bytes(1 << 20)
        for _ in range(size >> 20):
            yield block
        yield bytes(1024)
    async with libdsec.connect(sys.argv[1]) as client:
        sandbox = await client.attach(sys.argv[2])
        done = await sandbox.files.upload_tar(up(), "/big")
        assert done.bytes == size, done
        got = 0
        async for piece in sandbox.files.download_tar("/big"):
            got += len(piece)
        assert got > size, got
    print([int(line.split()[1]) // 1024 for line in open('/proc/self/status') if line.startswith('VmHWM')][0])
def libdsec_header(size):
    import tarfile
    info = tarfile.TarInfo("f")
    info.size = size
    return info.tobuf(tarfile.PAX_FORMAT)
asyncio.run(main())
"""


@pytest.mark.parametrize("size", [64 << 20, pytest.param(2 << 30, marks=[pytest.mark.slow, pytest.mark.timeout(400)])])
async def test_c42_a_stream_takes_no_memory(client: Client, cluster: Cluster, size: int) -> None:
    """2 GiB (64 MiB in the quick run) up and down: the client stays below 100 MiB."""
    async with client.sandbox("small", memory="512MiB", disk=f"{(size >> 20) + 100}MiB", cpus=1) as sandbox:
        words = [sys.executable, "-c", STREAM, cluster.url, sandbox.id, str(size)]
        process = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)
        out, _ = await process.communicate()
        assert process.returncode == 0
        assert int(out) < 100


@pytest.mark.parametrize("name", HOSTILE)
async def test_c43_a_hostile_tar_stays_below_its_target(shared: Sandbox, name: str) -> None:
    """The same archives into the sandbox: refused with a typed error or unpacked below the target, twice in a row."""
    await shared.exec("rm -rf /w; mkdir -p /w/out /w/target; cd /w; echo keep > out/keep; chmod 600 out/keep", check=True)
    for _ in range(2):
        with contextlib.suppress(InvalidRequest, SandboxError, NotFound):  # nothing else may come out
            await shared.files.upload_tar(pieces(HOSTILE[name]("/w/out") + END, 5000), "/w/target")
    left = await shared.exec("cd /w; ls -A /w out; cat out/keep; stat -c %a out/keep; ls -A / | grep -c evil")
    assert left.stdout.text == "/w:\nout\ntarget\n\nout:\nkeep\nkeep\n600\n0\n"
    assert await services(shared) == []


@pytest.mark.parametrize("form", ["pax", "gnu", "ustar", "oldgnu", "v7"])
async def test_archives_of_other_programs(sandbox: Sandbox, tmp_path: Path, form: str) -> None:
    """GNU tar's formats, with holes where the format has them, long names, and an archive that comes in odd pieces."""
    tree = tmp_path / "t"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub/f").write_bytes(os.urandom(100_001))
    os.link(tree / "sub/f", tree / "hard")
    (tree / "l").symlink_to("/etc/passwd")
    holes(tree / "s", [at << 20 for at in range(1, 40)], 40 << 20)
    if form in ("pax", "gnu"):
        (tree / ("n" * 150)).write_text("long")
    sparse = ["-S"] if form in ("pax", "gnu", "oldgnu") else []
    made = await asyncio.to_thread(
        subprocess.run, ["tar", f"--format={form}", *sparse, "-C", str(tmp_path), "-c", "t"], capture_output=True, check=True
    )
    done = await sandbox.files.upload_tar(pieces(made.stdout, 12_345), "/tmp/u")
    assert done.members >= 6
    back = tmp_path / "back"
    await sandbox.files.download("/tmp/u/t", back)
    compared = await asyncio.to_thread(subprocess.run, ["diff", "-r", "--no-dereference", str(tree), str(back)], check=False)
    assert compared.returncode == 0
    assert (await sandbox.files.stat("/tmp/u/t/hard")).size == 100_001
    if sparse:
        blocks = (await sandbox.exec(["stat", "-c", "%b", "/tmp/u/t/s"])).stdout.text
        assert int(blocks) < 39 * 4096 // 512 + 100


async def test_owners_are_kept_only_when_asked(sandbox: Sandbox, tmp_path: Path) -> None:
    """By default all is the run-as user's and plain; with ``owners`` root gets owners and set-id bits, another user a note."""
    tree = tmp_path / "t"
    tree.mkdir()
    (tree / "su").write_text("x")
    os.chown(tree / "su", 1234, 4321)
    (tree / "su").chmod(0o4755)
    await sandbox.files.upload(tree, "/tmp/plain")
    found = await sandbox.files.stat("/tmp/plain/su")
    assert (found.uid, found.gid, found.mode) == (0, 0, 0o755)
    await sandbox.files.upload(tree, "/tmp/kept", owners=True)
    found = await sandbox.files.stat("/tmp/kept/su")
    assert (found.uid, found.gid, found.mode) == (1234, 4321, 0o4755)
    tar = b"".join([piece async for piece in sandbox.files.download_tar("/tmp/kept")])
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        info = archive.getmember("kept/su")
        assert (info.uid, info.gid, info.mode) == (1234, 4321, 0o4755)
    as_user = sandbox.files.as_user("user")
    done = await as_user.upload_tar(pieces(tar), "/home/user/u")
    assert done.notes == ("owners were not kept: the user is not root",)
    found = await sandbox.files.stat("/home/user/u/kept/su")
    assert (found.uid, found.mode) == (1000, 0o755)
    await sandbox.files.download("/tmp/kept", tmp_path / "plain")
    assert (tmp_path / "plain/su").stat().st_uid == os.geteuid()
    assert (tmp_path / "plain/su").stat().st_mode & 0o7777 == 0o755
    await sandbox.files.download("/tmp/kept", tmp_path / "kept", owners=True)
    assert (tmp_path / "kept/su").stat().st_uid == 1234
    assert (tmp_path / "kept/su").stat().st_mode & 0o7777 == 0o4755


async def test_file_capabilities_go_with_owners(sandbox: Sandbox, tmp_path: Path) -> None:
    """security.capability is packed, and set again only where owners are kept."""
    raw = "0100000200200000000000000000000000000000"  # version 2, effective, CAP_NET_RAW
    code = f"import os; open('/d/f', 'w'); os.setxattr('/d/f', 'security.capability', bytes.fromhex('{raw}'))"
    await sandbox.exec(["mkdir", "/d"], check=True)
    await sandbox.exec(["python3", "-c", code], check=True)
    tar = b"".join([piece async for piece in sandbox.files.download_tar("/d")])
    assert b"SCHILY.xattr.security.capability" in tar
    look = "import os, sys; print(*os.listxattr(sys.argv[1]))"
    for owners, names in ((True, b"security.capability\n"), (False, b"\n")):
        done = await sandbox.files.upload_tar(pieces(tar), f"/to-{owners}", owners=owners)
        assert (await sandbox.exec(["python3", "-c", look, f"/to-{owners}/d/f"])).stdout == names
        assert bool(done.notes) is not owners


async def test_c41_one_limit_and_typed_errors(sandbox: Sandbox) -> None:
    """What the client sends is cut into pieces that every server takes; a piece beyond the limit is refused by name, not cut short."""
    data = os.urandom(3_000_001)
    await sandbox.files.write("/f", data)
    assert await sandbox.files.read("/f") == data
    request = FileRequest(verb="write", path="/f", data=bytes(256 * 1024 + 1))
    with pytest.raises(InvalidRequest) as caught:
        await sandbox._request("files", request, FileReply)
    assert caught.value.field == "data"
    assert await sandbox.files.read("/f") == data


async def test_what_a_user_may_not_do_is_named(sandbox: Sandbox, tmp_path: Path) -> None:
    """Rights are the user's; errors name the member; a full disk is told; nothing is left running."""
    (tmp_path / "t").mkdir()
    (tmp_path / "t/f").write_text("x")
    with pytest.raises(Denied) as caught:
        await sandbox.files.as_user("user").upload(tmp_path / "t", "/root/t")
    assert caught.value.field == "path"
    await sandbox.exec("mkdir -m 700 /tmp/secret; echo s > /tmp/secret/s", check=True)
    with pytest.raises(Denied):
        [piece async for piece in sandbox.files.as_user("user").download_tar("/tmp/secret")]
    with pytest.raises(NotFound) as missing:
        await sandbox.files.download("/tmp/nowhere", tmp_path / "n")
    assert missing.value.value == "/tmp/nowhere"
    await asyncio.to_thread(noise, tmp_path / "t/big", 300)
    with pytest.raises(SandboxError) as full:
        await sandbox.files.upload(tmp_path / "t", "/tmp/t")
    assert full.value.reason in ("ENOSPC", "EDQUOT")
    assert full.value.value == "big"
    with pytest.raises(InvalidRequest):
        await sandbox.files.upload(Path("/dev/null"), "/tmp/null")
    with pytest.raises(NotFound):
        await sandbox.files.upload(tmp_path / "absent", "/tmp/absent")
    assert await services(sandbox) == []


async def test_an_upload_over_what_is_there(sandbox: Sandbox, tmp_path: Path) -> None:
    """Files are replaced, directories merged; a link to a directory and the mode of the target stay."""
    await sandbox.exec("mkdir -p /t/real /t/d; ln -s real /t/link; echo old > /t/f; echo other > /t/d/other; chmod 1777 /t", check=True)
    tree = tmp_path / "t"
    (tree / "link").mkdir(parents=True)
    (tree / "link/in").write_text("in")
    (tree / "f").write_text("new")
    (tree / "d").mkdir()
    (tree / "d/more").write_text("more")
    await sandbox.files.upload(tree, "/t")
    shown = await sandbox.exec("cd /t; cat f real/in d/other d/more; stat -c %N link; stat -c %a .")
    assert shown.stdout.text == "newinother\nmore'link' -> 'real'\n1777\n"


async def test_a_cancelled_transfer_leaves_nothing(sandbox: Sandbox, tmp_path: Path) -> None:
    """Cancelled in the middle, both ways: no process inside, no thread here that goes on, and the sandbox works."""
    (tmp_path / "t").mkdir()
    await asyncio.to_thread(noise, tmp_path / "t/big", 150)
    await sandbox.exec("mkdir /d; head -c 100M /dev/zero | tr '\\0' x > /d/big", check=True)
    for transfer in (sandbox.files.upload(tmp_path / "t", "/tmp/t"), sandbox.files.download("/d", tmp_path / "back")):
        task = asyncio.ensure_future(transfer)
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    for _ in range(30):
        if await services(sandbox) == []:
            break
        await asyncio.sleep(0.1)
    assert await services(sandbox) == []
    await asyncio.to_thread(clear, tmp_path / "back")
    assert (await sandbox.exec("echo well")).stdout == b"well\n"


async def test_many_small_files(sandbox: Sandbox, tmp_path: Path) -> None:
    """Two thousand files in a hundred directories, both ways, in seconds."""
    tree = tmp_path / "t"
    for n in range(2000):
        (tree / f"d{n % 100}").mkdir(parents=True, exist_ok=True)
        (tree / f"d{n % 100}/f{n}").write_bytes(os.urandom(n))
    async with asyncio.timeout(20):
        await sandbox.files.upload(tree, "/many")
        await sandbox.files.download("/many", tmp_path / "back")
    done = await asyncio.to_thread(subprocess.run, ["diff", "-r", str(tree), str(tmp_path / "back")], check=False)
    assert done.returncode == 0


async def test_the_whole_root(sandbox: Sandbox) -> None:
    """What the kernel shows as files is left out, the directories stay, and it ends."""
    async with asyncio.timeout(60):
        archive = await whole(sandbox.files.download_tar("/", name="."))
    names = {member.name for member in archive}
    assert {"etc/passwd", "proc", "sys", "dev", "bin/sh"} <= names
    assert not [name for name in names if name.startswith(("proc/", "sys/"))]


async def test_a_single_file_with_holes(sandbox: Sandbox, tmp_path: Path) -> None:
    """A file of 20 GiB that is nearly all hole takes neither time nor room, up and down."""
    holes(tmp_path / "up", [1 << 20, 3 << 30], 20 << 30)
    async with asyncio.timeout(10):
        await sandbox.files.upload(tmp_path / "up", "/d/up")
    shown = await sandbox.exec(["stat", "-c", "%s %b", "/d/up"])
    size, blocks = map(int, shown.stdout.text.split())
    assert size == 20 << 30
    assert blocks < 100
    holes(tmp_path / "small", [1 << 20, 30 << 20], 40 << 20)
    await sandbox.files.upload(tmp_path / "small", "/d/small")
    await sandbox.files.download("/d/small", tmp_path / "back")
    assert digest_of(tmp_path / "back") == digest_of(tmp_path / "small")
    assert (tmp_path / "back").stat().st_blocks < 2000


async def test_single_files(sandbox: Sandbox) -> None:
    """Ranges, modes, owners, links, times, globs; the limit of `read` is a typed error that names the fix."""
    files = sandbox.files
    await files.write("/d/f", bytes(range(256)) * 4000)
    assert await files.read("/d/f", offset=10, length=3) == b"\n\x0b\x0c"
    assert await files.read("/d/f", offset=262_000, length=300_000) == (bytes(range(256)) * 4000)[262_000:562_000]
    assert await files.read("/d/f", offset=1_023_999) == b"\xff"
    assert await files.read("/d/f", offset=2_000_000) == b""
    with pytest.raises(InvalidRequest, match="download") as caught:
        await files.read("/d/f", limit=1000)
    assert caught.value.field == "path"
    await files.chmod("/d/f", 0o2640)
    await files.chown("/d/f", "user:user")
    await files.touch("/d/f", 1e9)
    found = await files.stat("/d/f")
    assert (found.mode & 0o777, found.uid, found.gid, found.mtime) == (0o640, 1000, 1000, 1e9)
    await files.symlink("/d/s", "/etc/passwd")
    assert await files.readlink("/d/s") == "/etc/passwd"
    await files.chown("/d/s", "1000")
    assert (await files.stat("/d/s")).uid == 1000
    assert (await files.stat("/etc/passwd")).uid == 0
    await files.link("/d/f", "/d/h")
    assert (await files.stat("/d/h")).size == 1_024_000
    with pytest.raises(libdsec.Conflict):
        await files.symlink("/d/s", "x")
    with pytest.raises(Denied):
        await files.as_user("user").chmod("/etc/passwd", 0o777)
    await sandbox.exec("mkdir -p /g/a /g/b /g/.hidden; touch /g/a/1.xml /g/b/2.xml /g/b/3.txt /g/.hidden/4.xml '/g/[x]'", check=True)
    assert await files.glob("/g/*/*.xml") == ["/g/a/1.xml", "/g/b/2.xml"]
    assert await files.glob("/g/.h*/?.xml") == ["/g/.hidden/4.xml"]
    assert await files.glob("/g/nothing*") == []


CHANGES = """cd /w; echo a > f; mkdir -p new/deep; echo b > new/deep/g; mv f h; echo c > old/i; chmod 600 h
mv new moved; sleep 0.2; echo d > moved/deep/j; sleep 0.2; rm -r moved; rm -r /w"""


async def test_changes_are_told(sandbox: Sandbox) -> None:
    """After ``ready`` every change comes: files, directories made meanwhile with what is in them, moves, removals; then the end."""
    seen: list[libdsec.FileEvent] = []
    await sandbox.files.mkdir("/w/old")
    async with asyncio.timeout(20):
        async for event in sandbox.files.watch("/w", recursive=True):
            seen.append(event)
            if event.kind == "ready":
                await sandbox.exec(CHANGES, check=True)
    kinds = {(event.kind, event.path) for event in seen}
    wanted = [
        *(("created", "/w/f"), ("changed", "/w/f"), ("created", "/w/new"), ("created", "/w/new/deep"), ("created", "/w/new/deep/g")),
        *(("moved_from", "/w/f"), ("moved_to", "/w/h"), ("changed", "/w/old/i"), ("attributes", "/w/h"), ("moved_to", "/w/moved")),
        *(("changed", "/w/moved/deep/j"), ("removed", "/w/moved/deep"), ("removed", "/w/moved"), ("removed", "/w")),
    ]
    assert [one for one in wanted if one not in kinds] == []
    assert next(event for event in seen if event.path == "/w/new").directory
    with pytest.raises(NotFound):
        async for _ in sandbox.files.watch("/absent"):
            pass
    async for event in sandbox.files.watch("/tmp"):
        assert event.kind == "ready"
        break
    await asyncio.sleep(0.2)
    assert await services(sandbox) == []


async def test_transfers_survive_a_killed_edge(client: Client, cluster: Cluster, tmp_path: Path) -> None:
    """The Edge is killed with -9 and started in the middle of an upload and of a download: both end whole."""
    (tmp_path / "t").mkdir()
    await asyncio.to_thread(noise, tmp_path / "t/big", 80)
    (edge,) = cluster.edges.values()
    async with client.sandbox("small", **ROOMY) as sandbox:
        uploading = asyncio.ensure_future(sandbox.files.upload(tmp_path / "t", "/t"))
        await asyncio.sleep(0.15)
        await edge.kill()
        await asyncio.sleep(0.2)
        await edge.start()
        async with asyncio.timeout(60):
            await uploading
        downloading = asyncio.ensure_future(sandbox.files.download("/t", tmp_path / "back"))
        await asyncio.sleep(0.1)
        await edge.kill()
        await asyncio.sleep(0.2)
        await edge.start()
        async with asyncio.timeout(60):
            await downloading
    assert (tmp_path / "back/big").read_bytes() == (tmp_path / "t/big").read_bytes()
