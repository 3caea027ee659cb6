"""The native launcher: what it refuses, what it survives, and that nothing of the node is below a sandbox's root."""

from __future__ import annotations

import array
import asyncio
import contextlib
import ctypes
import json
import os
import signal
import struct
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from dsec import syscalls
from dsec.backends import frame, native
from dsec.backends.base import LaunchPlan, Undone
from dsec.backends.frame import Tag
from dsec.backends.plan import ids_of
from dsec.errors import NodeError
from dsec.model import MIB, Resources
from tests.fixtures_backend import Yard, sh

pytestmark = [pytest.mark.needs("root", "cgroup", "native"), pytest.mark.usefixtures("leftovers")]


@pytest_asyncio.fixture
async def backend(leftovers: object, yard: Yard) -> Any:
    backend = await yard.backend()
    assert backend.driver.name == "native"
    return backend


def strong(plan: LaunchPlan) -> LaunchPlan:
    """The same without a filter and with every capability that a user namespace can give."""
    return msgspec.structs.replace(plan, seccomp="", capabilities=tuple(f"CAP_{name}" for name in frame._CAPABILITIES))


# Runs as root with all capabilities in the sandbox's user namespace and no filter. Prints what each way out of the root shows.
ESCAPE = r"""
import ctypes, errno, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    ctypes.set_errno(0)
    result = libc.syscall(number, *args)
    return "ok" if result >= 0 else errno.errorcode.get(ctypes.get_errno(), "?")
UMOUNT, PIVOT, CHROOT, UNSHARE, SETNS, MOUNT, BY_HANDLE, OPEN_TREE, MOVE_MOUNT = 166, 155, 161, 272, 308, 165, 304, 428, 429
got = {}
def seen():
    names = set(os.listdir("/")) | set(os.listdir("."))
    return sorted(names)
def apart(name, attempt):
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            out = attempt()
        except OSError as error:
            out = errno.errorcode[error.errno]
        os.write(write, json.dumps(out).encode())
        os._exit(0)
    os.close(write)
    os.wait()
    got[name] = json.loads(os.read(read, 60000) or b'"died"')
def dotdot():
    os.chdir("/" + "../" * 20)
    return seen()
def classic():
    os.makedirs("/tmp/jail", exist_ok=True)
    os.chroot("/tmp/jail")
    for _ in range(30): os.chdir("..")
    os.chroot(".")
    return seen()
def by_descriptor():
    os.makedirs("/tmp/jail", exist_ok=True)
    fd = os.open("/", os.O_RDONLY)
    os.chroot("/tmp/jail")
    os.fchdir(fd)
    for _ in range(30): os.chdir("..")
    os.chroot(".")
    return seen()
def own_namespace():
    return call(SETNS, os.open("/proc/self/ns/mnt", os.O_RDONLY), 0)
def in_new_user_namespace(then):
    def attempt():
        first = call(UNSHARE, 0x10000000 | 0x20000)
        for name, text in (("setgroups", "deny"), ("uid_map", "0 0 1"), ("gid_map", "0 0 1")):
            with open("/proc/self/" + name, "w") as file: file.write(text)
        return [first, then(), seen()]
    return attempt
apart("dotdot", dotdot)
apart("classic", classic)
apart("descriptor", by_descriptor)
apart("setns", own_namespace)
apart("umount root", lambda: call(UMOUNT, b"/", 2))
apart("umount mask", lambda: call(UMOUNT, b"/proc/keys", 2))
apart("mount", lambda: call(MOUNT, b"none", b"/tmp", b"tmpfs", 0, None))
apart("bind", lambda: call(MOUNT, b"/", b"/tmp", None, 4096, None))
apart("remount", lambda: call(MOUNT, None, b"/proc/sys", None, 4096 | 32, None))
apart("clone root", lambda: call(OPEN_TREE, -100, b"/", 1))
apart("pivot", lambda: call(PIVOT, b"/", b"/"))
apart("new: nothing", in_new_user_namespace(lambda: ""))
apart("new: umount", in_new_user_namespace(lambda: call(UMOUNT, b"/", 2)))
apart("new: umount mask", in_new_user_namespace(lambda: call(UMOUNT, b"/proc/keys", 2)))
apart("new: remount", in_new_user_namespace(lambda: call(MOUNT, None, b"/proc/sys", None, 4096 | 32, None)))
apart("new: proc", in_new_user_namespace(lambda: call(MOUNT, b"proc", b"/tmp", b"proc", 0, None)))
def swing():
    os.makedirs("/tmp/top/old", exist_ok=True)
    steps = [call(MOUNT, b"none", b"/tmp/top", b"tmpfs", 0, None)]
    os.makedirs("/tmp/top/old", exist_ok=True)
    steps.append(call(PIVOT, b"/tmp/top", b"/tmp/top/old"))
    os.chdir("/old")
    for _ in range(30): os.chdir("..")
    steps += [sorted(os.listdir("/old")) if os.path.isdir("/old") else [], call(UMOUNT, b"/old", 2)]
    return steps
apart("new: pivot", in_new_user_namespace(swing))
handle = ctypes.create_string_buffer(bytes([8, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]))
for path in ("/", "/dev/null", "/proc/keys", "/dev/pts"):
    apart("handle " + path, lambda: call(BY_HANDLE, os.open(path, os.O_RDONLY), handle, os.O_RDONLY))
got["processes"] = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
got["session"] = libc.syscall(250, 0, -3, 0)
print(json.dumps(got))
"""


async def test_nothing_of_the_node_is_below_the_root(backend: Any, yard: Yard, state_dir: Path) -> None:
    """Root with every capability of its user namespace and no filter gets to no directory but its own root, by chroot, descriptors,
    namespaces of its own or handles; it can neither mount nor undo a mask."""
    plan = yard.plan(backend.node)
    if plan.idmap is None:
        pytest.skip("; ".join(plan.degraded))
    box = await backend.launch(strong(plan))
    script = state_dir / "escape.py"
    script.write_text(ESCAPE)
    from dsec.model import FileRequest

    await box.link.files(FileRequest(verb="write", path="/tmp/escape.py", data=ESCAPE.encode(), create=True))
    code, out, err = await sh(box, "python3 /tmp/escape.py")
    assert code == 0, err
    got = json.loads(out)
    inside = {*os.listdir(f"/proc/{box.pid}/root"), "old"}
    for way in ("dotdot", "classic", "descriptor"):
        assert set(got[way]) <= inside, way
        assert ".dsec" in got[way], way
    for way in ("setns", "umount root", "umount mask", "mount", "bind", "remount", "clone root", "pivot"):
        assert got[way] == "EPERM", (way, got[way])
    for way in ("new: umount", "new: umount mask", "new: remount", "new: proc"):
        made, done, left = got[way]
        assert made in ("EPERM", "ENOSPC") or done in ("EINVAL", "EPERM"), (way, got[way])
        assert set(left) <= inside, way
    _, steps, left = got["new: pivot"]
    assert set(steps[2]) | set(left) <= inside, got["new: pivot"]
    for path in ("/", "/dev/null", "/proc/keys", "/dev/pts"):
        assert got[f"handle {path}"] != "ok", got[f"handle {path}"]
    assert max(got["processes"]) < 200
    libc = ctypes.CDLL(None, use_errno=True)
    assert got["session"] < 0 or got["session"] != libc.syscall(250, 0, -3, 0), "the node's session keyring"


async def test_the_agent_holds_nothing_of_the_node(backend: Any, yard: Yard) -> None:
    """Its descriptors are its own, the listener and the view of its upper; its root, directory, session and ids are the sandbox's."""
    box = await backend.launch(yard.plan(backend.node))
    links = {int(fd): os.readlink(f"/proc/{box.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{box.pid}/fd")}
    assert {links[fd] for fd in (0, 1, 2)} == {"/dev/null"}
    assert links[3].startswith("socket:")
    assert links[4] == "/u"
    assert all(text.startswith(("anon_inode:", "socket:", "pipe:")) for fd, text in links.items() if fd > 4), links
    assert os.readlink(f"/proc/{box.pid}/cwd") == os.readlink(f"/proc/{box.pid}/root") == "/"
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{box.pid}/status").read_text().splitlines() if ":\t" in line)
    assert status["NSpid"].split()[1] == status["NSsid"].split()[1] == "1"
    assert status["CapInh"] == status["CapAmb"] == "0" * 16
    if box.plan.idmap is not None:
        assert set(status["Uid"].split()) == set(status["Gid"].split()) == {str(box.plan.idmap.base)}
        assert status["Groups"].strip() == ""
    namespace = Path(f"/proc/{box.pid}/mountinfo").read_text().splitlines()
    assert namespace[0].split()[4] == "/"
    assert len(namespace) < 32


def order(backend: Any, plan: LaunchPlan, **fields: Any) -> bytes:
    socket = backend.socket_path(plan.ulid)
    return frame.render(plan, lowers=len(plan.lowers) + 1, socket=socket, args=frame.arguments(plan, 3, 4), **fields)


async def spawn(backend: Any, plan: LaunchPlan, data: bytes) -> dict[str, Any]:
    """Hands a frame of the test's own to the holder, and waits until the agent is executed. Raises `NodeError` with the holder's words."""
    fd = native._in_memory(data)
    try:
        lowers = [layer.digest for layer in plan.lowers]
        answer: dict[str, Any] = await backend.site.holder.request("spawn", fds=(fd,), ulid=plan.ulid, lowers=lowers, top="")
    finally:
        os.close(fd)
    while isinstance(found := (await backend.site.holder.request("find", ulid=plan.ulid))["found"], int):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{found}/comm").read_text() == "aether\n":
                return answer
        await asyncio.sleep(0.005)
    raise NodeError(found["why"])


def sections(data: bytes) -> list[tuple[int, bytes]]:
    found, at = [], frame.HEAD.size
    while at < len(data):
        tag, _, length = frame.SECTION.unpack_from(data, at)
        at += frame.SECTION.size
        found.append((tag, data[at : at + length]))
        at += length
    return found


async def test_what_is_not_understood_is_refused_by_name(backend: Any, yard: Yard) -> None:
    """A version, a section, a flag, a size or a count that the zygote does not know starts nothing; the answer names the field."""
    plan = yard.plan(backend.node)
    await backend.prepare(plan)
    good = order(backend, plan)
    parts = sections(good)

    def changed(tag: Tag, body: bytes) -> bytes:
        return frame.pack([(number, body if number == tag else old) for number, old in parts])

    cases = {
        "version": good[:4] + struct.pack("=H", frame.VERSION + 1) + good[6:],
        "magic": b"junk" + good[4:],
        "size": good + b"\0",
        "tag": frame.pack([*parts, (77, b"")]),
        "namespaces": changed(Tag.NAMESPACES, struct.pack("=I", frame.NAMESPACES | 0x80)),
        "mounts": changed(Tag.MOUNT, struct.pack("=II", 1 << 30, 0) + b"proc\0proc\0/proc\0\0"),
        "rlimits": changed(Tag.RLIMIT, struct.pack("=IIQQ", 99, 0, 1, 1)),
        "upper": changed(Tag.UPPER, struct.pack("=II", 9, 0) + b"1\0001\0\0"),
        "lowers": changed(Tag.LOWERS, struct.pack("=I", 7)),
        "nodes": changed(Tag.NODES, b"null\0sda\0"),
        "hostname": changed(Tag.HOSTNAME, b"x" * 65 + b"\0"),
        "seccomp": frame.pack([*parts, (Tag.SECCOMP, b"1234567")]),
        "no_new_privs": frame.pack([part for part in parts if part[0] != Tag.NO_NEW_PRIVS]),
        "caps": frame.pack([*parts, (Tag.CAPS, bytes(8))]),
    }
    for field, data in cases.items():
        with pytest.raises(NodeError, match=f"refused: {field}:"):
            await spawn(backend, yard.plan(backend.node), data)
    with pytest.raises(NodeError, match="capability 63"):
        await spawn(backend, yard.plan(backend.node), changed(Tag.CAPS, struct.pack("=Q", 1 << 63)))
    assert (await sh(await backend.launch(plan), "echo as before"))[1] == "as before\n"


async def test_a_step_that_fails_is_named(backend: Any, yard: Yard) -> None:
    """A mount that the kernel refuses and a program that is not there end the launch with their step and the kernel's word."""
    plan = yard.plan(backend.node)
    await backend.prepare(plan)
    parts = sections(order(backend, plan))
    wrong = frame.pack([*parts, (Tag.MOUNT, struct.pack("=II", 0, 0) + b"tmpfs\0tmpfs\0/tmp\0no-such-option\0")])
    with pytest.raises(NodeError, match=r"mount tmpfs at /tmp with no-such-option: Invalid argument"):
        await spawn(backend, yard.plan(backend.node), wrong)
    absent = frame.pack([(tag, b"/no/agent\0" if tag == Tag.ARGV else body) for tag, body in parts])
    with pytest.raises(NodeError, match=r"execute /no/agent: No such file or directory"):
        await spawn(backend, yard.plan(backend.node), absent)
    await asyncio.sleep(0)
    await backend.reap(frozenset())


def zygotes(answer: dict[str, Any]) -> list[int]:
    return [int(pid) for pid in answer["pids"]]


async def test_a_zygote_that_is_killed_costs_at_most_its_launch(backend: Any, yard: Yard) -> None:
    """Sandboxes live on, and others are started by another zygote, as often as one dies."""
    first = await backend.launch(yard.plan(backend.node))
    for _ in range(3):
        before = zygotes(await backend.site.holder.request("zygotes"))
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        try:
            box = await backend.launch(yard.plan(backend.node))
        except Undone:  # it was handed to one that was just dying
            for _ in range(500):
                if not set(before) & set(zygotes(await backend.site.holder.request("zygotes"))):
                    break
                await asyncio.sleep(0.01)
            box = await backend.launch(yard.plan(backend.node))
        assert (await sh(box, "echo new"))[1] == "new\n"
    assert (await sh(first, "echo old"))[1] == "old\n"


async def test_a_stuck_zygote_is_given_up(backend: Any, yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that hangs costs its sandbox, with a reason, and not the node."""
    monkeypatch.setattr(native, "LAUNCH_TIMEOUT", 0.5)
    for pid in zygotes(await backend.site.holder.request("zygotes")):
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(NodeError) as caught:
        await backend.launch(yard.plan(backend.node))
    assert caught.value.reason == "launcher"
    monkeypatch.undo()
    assert await backend.reap(frozenset()) == ()
    for pid in zygotes(await backend.site.holder.request("zygotes")):
        os.kill(pid, signal.SIGCONT)
    assert (await sh(await backend.launch(yard.plan(backend.node)), "echo works"))[1] == "works\n"


async def test_zygotes_keep_nothing_of_a_launch(backend: Any, yard: Yard) -> None:
    """Launches, failed ones too, leave no descriptor and no child in a zygote."""
    pids = zygotes(await backend.site.holder.request("zygotes"))
    before = [sorted(os.listdir(f"/proc/{pid}/fd")) for pid in pids]
    plan = yard.plan(backend.node)
    await backend.prepare(plan)
    bad = frame.pack([*sections(order(backend, plan)), (Tag.MOUNT, struct.pack("=II", 0, 0) + b"tmpfs\0tmpfs\0/tmp\0no-such-option\0")])
    boxes = []
    for _ in range(6):
        boxes.append(await backend.launch(yard.plan(backend.node)))
        with pytest.raises(NodeError):
            await spawn(backend, yard.plan(backend.node), bad)
    for _ in range(500):  # it answers first, and closes then
        if [sorted(os.listdir(f"/proc/{pid}/fd")) for pid in pids] == before:
            break
        await asyncio.sleep(0.01)
    assert [sorted(os.listdir(f"/proc/{pid}/fd")) for pid in pids] == before
    assert [Path(f"/proc/{pid}/task/{pid}/children").read_text() for pid in pids] == [""] * len(pids)
    for box in boxes:
        await box.stop()
    await backend.reap(frozenset())


async def made_ahead(backend: Any, *boxes: Any) -> dict[int, str]:
    """Children of the zygotes with their networks, once there is one for each of ``boxes`` and none is a box's or the node's."""
    pids = zygotes(await backend.site.holder.request("zygotes"))
    taken = {os.readlink(namespace) for namespace in ("/proc/self/ns/net", *(box.netns for box in boxes))}
    for _ in range(1000):
        found = [int(child) for pid in pids for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        with contextlib.suppress(OSError):  # one that has just ended
            networks = {pid: os.readlink(f"/proc/{pid}/ns/net") for pid in found if _loopback_is_up(pid)}
            if len(networks) == len(boxes) and not taken & set(networks.values()):
                return networks
        await asyncio.sleep(0.01)
    raise AssertionError("nothing was made ahead")


async def _end(pid: int) -> None:
    """Until it has none of its namespaces any more."""
    for _ in range(1000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{pid} lives on")


def _loopback_is_up(pid: int) -> bool:
    """The last step of making them."""
    return "127.0.0.1" in Path(f"/proc/{pid}/net/fib_trie").read_text()


def ordered(yard: Yard, backend: Any) -> tuple[LaunchPlan, LaunchPlan]:
    """Two plans, the second of which is announced when the first one is launched."""
    first, second = yard.plan(backend.node), yard.plan(backend.node)
    slots = [(plan.idmap.base - ids_of(0).base) // ids_of(0).count for plan in (first, second)]
    backend.site.upcoming = lambda _: slots[1:]
    return first, second


async def test_namespaces_are_made_ahead_for_the_sandbox_that_comes_next(backend: Any, yard: Yard) -> None:
    """It gets them, its id map and a network of its own with them; they are counted, and an end of the zygotes ends them."""
    first, second = ordered(yard, backend)
    box = await backend.launch(first)
    [(nurse, network)] = (await made_ahead(backend, box)).items()
    assert (await backend.site.holder.request("zygotes"))["ahead"] == 1
    assert (backend.site.launches, backend.site.from_pool) == (1, 0)
    backend.site.upcoming = lambda _: ()
    next_box = await backend.launch(second)
    assert os.readlink(next_box.netns) == network
    assert (await sh(next_box, "cat /proc/self/uid_map"))[1].split() == ["0", str(second.idmap.base), str(second.idmap.count)]
    assert (await sh(next_box, "cat /proc/sys/kernel/hostname"))[1].strip() == second.hostname
    assert (backend.site.launches, backend.site.from_pool) == (2, 1)
    await _end(nurse)  # what is left of the launch goes when nothing has been asked for a moment
    await next_box.stop()
    await box.stop()


async def test_namespaces_made_ahead_for_another_are_not_used(backend: Any, yard: Yard) -> None:
    """Where all zygotes are prepared, a sandbox that was not announced gets its own, made when it is launched."""
    count = len(zygotes(await backend.site.holder.request("zygotes")))
    backend.site.upcoming = lambda _: range(900, 900 + count)
    boxes = [await backend.launch(yard.plan(backend.node)) for _ in range(count)]
    networks = set((await made_ahead(backend, *boxes)).values())
    assert len(networks) == count
    plan = yard.plan(backend.node)
    boxes.append(await backend.launch(plan))
    assert os.readlink(boxes[-1].netns) not in networks
    assert (await sh(boxes[-1], "cat /proc/self/uid_map"))[1].split()[1] == str(plan.idmap.base)
    assert backend.site.from_pool == 0
    for each in boxes:
        await each.stop()


async def test_a_launch_survives_the_end_of_what_was_made_ahead(backend: Any, yard: Yard) -> None:
    """The process that held it was killed: the sandbox gets namespaces that are made when it is launched."""
    first, second = ordered(yard, backend)
    box = await backend.launch(first)
    [nurse] = await made_ahead(backend, box)
    os.kill(nurse, signal.SIGKILL)
    await _end(nurse)
    next_box = await backend.launch(second)
    assert (await sh(next_box, "echo works"))[1] == "works\n"
    await next_box.stop()
    await box.stop()


async def test_a_zygotes_end_is_the_end_of_what_it_made_ahead(backend: Any, yard: Yard) -> None:
    """No namespace stays; of its process at most the exit status, which the holder takes when nothing lives any more."""
    first, _ = ordered(yard, backend)
    box = await backend.launch(first)
    [nurse] = await made_ahead(backend, box)
    for pid in zygotes(await backend.site.holder.request("zygotes")):
        os.kill(pid, signal.SIGKILL)
    await _end(nurse)
    await box.stop()


async def test_a_large_environment_arrives(backend: Any, yard: Yard) -> None:
    """A megabyte of variables, as many as planning takes, is there inside."""
    env = {f"V{number}": "x" * 100 for number in range(9000)}
    box = await backend.launch(yard.plan(backend.node, env=env, resources=Resources(memory=128 * MIB, disk=16 * MIB)))
    assert int((await sh(box, "env | grep -c ^V"))[1]) == 9000


async def test_a_sandbox_is_born_in_its_v2_group(backend: Any, yard: Yard, edge_name: str) -> None:
    """Where groups are v2 ones, the first process starts in its group: it never has to move."""
    unified = next((place for place in ("/sys/fs/cgroup/unified", "/sys/fs/cgroup") if os.path.exists(f"{place}/cgroup.procs")), "")
    if not unified:
        pytest.skip("no cgroup v2 hierarchy")
    plan = yard.plan(backend.node)
    await backend.prepare(plan)
    group = Path(unified) / f"{edge_name}-born"
    group.mkdir()
    try:
        pid = (await spawn(backend, plan, order(backend, plan, group2=f"/proc/{os.getpid()}/root{group}")))["pid"]
        assert (group / "cgroup.procs").read_text().split() == [str(pid)]
        assert "0::/\n" in await asyncio.to_thread(_inside, pid)
        await backend.site.holder.request("kill", ulid=plan.ulid)
        for _ in range(500):
            if not (group / "cgroup.procs").read_text():
                break
            await asyncio.sleep(0.01)
    finally:
        group.rmdir()
    await backend.reap(frozenset())


def _inside(pid: int) -> str:
    """The groups of ``pid`` as its own cgroup namespace shows them: read by a thread that joins it and ends."""
    found: list[str] = []

    def look() -> None:
        namespace = os.open(f"/proc/{pid}/ns/cgroup", os.O_RDONLY)
        syscalls.setns(namespace, syscalls.CLONE_NEWCGROUP)
        os.close(namespace)
        found.append(Path(f"/proc/{pid}/cgroup").read_text())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


def test_tags_are_the_headers() -> None:
    """Both sides number the sections alike."""
    header = (Path(native.__file__).parent / "launcher/launcher.h").read_text()
    names = [
        line.strip().split(",")[0].split(" ")[0] for line in header.split("enum tag {")[1].split("};")[0].splitlines() if "TAG_" in line
    ]
    assert [f"TAG_{tag.name}" for tag in Tag] == names[:-1]
    assert array.array("I", [frame.MAGIC]).tobytes() == bytes.fromhex("44534c31")
