"""What root inside a container cannot do, tried from inside on the real kernel."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dsec.model import SandboxSpec
from dsec.security import seccomp
from tests.fixtures_backend import Yard, sh

pytestmark = [pytest.mark.usefixtures("leftovers")]


@pytest.fixture
def driver(each_driver: str) -> str:
    return each_driver


@pytest_asyncio.fixture
async def box(leftovers: object, yard: Yard) -> Any:
    backend = await yard.backend()
    return await backend.launch(yard.plan(backend.node, env={"DECLARED": "yes"}))


async def python(box: Any, text: str) -> str:
    """What a Python program inside prints; its traceback when it fails."""
    code, out, err = await sh(box, f"python3 - <<'END'\n{text}\nEND\n")
    assert code == 0, err
    return out.strip()


CTYPES = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    ctypes.set_errno(0)
    result = libc.syscall(number, *args)
    return "ok" if result >= 0 else errno.errorcode.get(ctypes.get_errno(), "?")
"""


async def test_namespaces_are_its_own(box: Any) -> None:
    """Each namespace differs from the node's."""
    for name in ("pid", "mnt", "ipc", "uts", "net", "cgroup"):
        inside = os.readlink(f"/proc/{box.pid}/ns/{name}")
        assert inside != os.readlink(f"/proc/self/ns/{name}"), name


async def test_ids_are_mapped(box: Any) -> None:
    """Root inside is an unprivileged id outside; every id inside has a place."""
    if box.plan.idmap is None:
        pytest.skip("; ".join(box.plan.degraded))
    status = Path(f"/proc/{box.pid}/status").read_text()
    assert f"Uid:\t{box.plan.idmap.base}\t" in status
    assert (await sh(box, "cat /proc/self/uid_map"))[1].split() == ["0", str(box.plan.idmap.base), "65536"]
    assert (await sh(box, "stat -c %u:%g /etc/passwd /home/user /"))[1].split() == ["0:0", "1000:1000", "0:0"]


async def test_only_its_own_processes_are_seen(box: Any) -> None:
    """PID 1 is the agent, and no process of the node is visible."""
    numbers = (await sh(box, "ls -d /proc/[0-9]*"))[1].split()
    assert len(numbers) < 8
    assert (await sh(box, "cat /proc/1/comm"))[1] == "aether\n"


async def test_c54_the_nodes_environment_is_not_there(box: Any) -> None:
    """Only declared variables and the four defaults exist inside."""
    out = (await sh(box, "env"))[1]
    names = {line.split("=")[0] for line in out.splitlines()}
    assert names - {"PWD", "SHLVL", "_", "OLDPWD"} <= {"PATH", "HOME", "LANG", "DECLARED", "USER", "LOGNAME", "SHELL"}
    assert "DECLARED=yes" in out


async def test_mounts_and_masks_hold(box: Any) -> None:
    """Root inside neither mounts nor unmounts, and masked and read-only paths stay so."""
    mounts = ("mount -t tmpfs none /tmp", "mount -o remount,rw /proc/sys", "mount --bind / /tmp")
    for command in (*mounts, "umount /proc/keys", "umount -l /proc/sys"):
        assert (await sh(box, command))[0] != 0, command
    assert (await sh(box, "cat /proc/keys /proc/timer_list"))[1] == ""
    for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger"):
        assert (await sh(box, f"echo x > {path}"))[0] != 0, path


async def test_no_devices(box: Any) -> None:
    """A device node can neither be made nor, when a layer brings one, be opened; the usual ones work."""
    assert (await sh(box, "mknod /tmp/sda b 8 0"))[0] != 0
    assert (await sh(box, "echo x > /dev/null && head -c 4 /dev/urandom | wc -c && head -c 2 /dev/zero | wc -c"))[1].split() == ["4", "2"]
    assert (await sh(box, "echo x > /dev/full"))[0] != 0
    if box.plan.idmap is None:
        group = Path(f"/sys/fs/cgroup/devices/{box.plan.cgroup}")
        if group.exists():
            assert "a *:* rwm" not in (group / "devices.list").read_text()
        return
    flags = next(line.split()[5] for line in Path(f"/proc/{box.pid}/mountinfo").read_text().splitlines() if line.split()[4] == "/")
    assert "nodev" in flags.split(",")


async def test_the_nodes_devices_stay_the_nodes(box: Any, yard: Yard) -> None:
    """No launch gives a device of the node to root inside, who could close it to everybody."""
    names = ("null", "zero", "full", "random", "urandom", "tty")

    def shown() -> dict[str, tuple[int, int, int]]:
        found = {name: os.stat(f"/dev/{name}") for name in names}
        return {name: (info.st_uid, info.st_gid, info.st_mode) for name, info in found.items()}

    before = shown()
    other = await yard.backends[0].launch(yard.plan(yard.backends[0].node))
    try:
        for name in names:
            assert (await sh(other, f"chmod 600 /dev/{name}"))[0] != 0, name
            assert (await sh(other, f"chown 1 /dev/{name}"))[0] != 0, name
        assert shown() == before
    finally:
        for name, (uid, gid, mode) in before.items():
            os.chown(f"/dev/{name}", uid, gid)
            os.chmod(f"/dev/{name}", mode & 0o7777)


async def test_no_network(box: Any) -> None:
    """There is loopback and nothing else."""
    assert (await python(box, "import socket; print([n for _, n in socket.if_nameindex()])")) == "['lo']"
    code = """
import socket
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname(), 2); print("loopback")
try:
    socket.create_connection(("192.0.2.1", 80), 2)
except OSError as error:
    print(error.errno == 101)
try:
    socket.socket(17, 3)
except OSError as error:
    print(error.errno)
"""
    assert (await python(box, code)).split() == ["loopback", "True", "1"]


async def test_abstract_sockets_of_the_node_are_away(box: Any) -> None:
    """A node's abstract socket cannot be connected to from inside."""
    name = f"\0dsec-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        out = await python(box, f"import socket\ns = socket.socket(socket.AF_UNIX)\nprint(s.connect_ex({name!r}))")
    assert out == "111"


async def test_the_agents_socket_cannot_be_taken(box: Any) -> None:
    """PID 1's listener is out of reach of ptrace, pidfd_getfd, /proc and its path; a peer from inside is refused."""
    code = (
        CTYPES
        + f"""
pidfd = os.pidfd_open(1)
print(*[call(438, pidfd, fd, 0) for fd in range(8)])
print(call(101, 16, 1, 0, 0), call(101, 0x4206, 1, 0, 0))
for path in ("/proc/1/fd/3", "/proc/1/mem", "/proc/1/environ", "/proc/1/cwd", "/proc/1/root"):
    try:
        open(path, "rb").read(1) if path.endswith(("mem", "environ")) else os.readlink(path)
        print("open", path)
    except OSError as error:
        print(error.errno)
import socket
s = socket.socket(socket.AF_UNIX)
print(s.connect_ex({box.link.path!r}))
"""
    )
    lines = (await python(box, code)).splitlines()
    assert set(lines[0].split()) == {"EPERM"}
    assert set(lines[1].split()) == {"EPERM"}
    assert set(lines[2:7]) <= {"13", "1"}
    assert lines[7] == "2"
    assert (await sh(box, "echo still"))[1] == "still\n"


async def test_the_agents_binary_is_everyones_and_nobodys(box: Any, yard: Yard) -> None:
    """What root inside does to /.dsec/aether happens in its own upper: the next sandbox runs the real one."""
    await sh(box, "rm -rf /.dsec; mkdir /.dsec; printf '#!/bin/sh\\nsleep 99' > /.dsec/aether; chmod 755 /.dsec/aether")
    backend = yard.backends[0]
    following = await backend.launch(yard.plan(backend.node))
    assert (await sh(following, "head -c 4 /.dsec/aether"))[1] == "\x7fELF"


async def test_every_denied_call_is_denied(box: Any) -> None:
    """Each system call of the deny table answers EPERM inside, and each that cannot be filtered answers ENOSYS."""
    table = seccomp.numbers()
    names = sorted(name for name in seccomp.denied_names() if table[name][0] >= 0)
    code = CTYPES + "\n".join(f"print({name!r}, call({table[name][0]}, 0, 0, 0, 0, 0, 0))" for name in names)
    answers = dict(line.split() for line in (await python(box, code)).splitlines())
    assert answers == dict.fromkeys(names, "EPERM")
    extra = await python(
        box,
        CTYPES
        + "print(call(435, 0, 0), call(56, 0x10000000, 0, 0, 0, 0), call(9999), call(0x40000001, 1, 0, 0))\n"
        + "print(call(16, 0, ctypes.c_uint64(0xdeadbeefC0C0586D), 0), call(16, 0, 0x5412, 0), call(16, 0, 0x5401, 0))",
    )
    assert extra.split() == ["ENOSYS", "EPERM", "ENOSYS", "ENOSYS", "EPERM", "EPERM", "ENOTTY"]


async def test_capabilities_and_no_new_privs(box: Any) -> None:
    """The bounding set is the plan's, nothing can be gained by set-id programs."""
    status = dict(line.split(":\t") for line in (await sh(box, "cat /proc/self/status"))[1].splitlines() if ":\t" in line)
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    bounding = int(status["CapBnd"], 16)
    for number in (21, 19, 2, 16, 12, 27):  # SYS_ADMIN, SYS_PTRACE, DAC_READ_SEARCH, SYS_MODULE, NET_ADMIN, MKNOD
        assert not bounding >> number & 1, number
    assert (await sh(box, "mkdir /newdir && chmod 700 /newdir && id -u"))[1] == "0\n"  # c46: root inside can work


async def test_kernel_tables_are_its_own(box: Any, yard: Yard) -> None:
    """What one sandbox takes of the kernel's inotify instances is missing neither to a neighbour nor to the node."""
    if box.plan.idmap is None:
        pytest.skip("; ".join(box.plan.degraded))
    if yard.backends[0].driver.name == "runc":
        pytest.skip("the runtime makes the user namespace itself")
    one = "import ctypes; libc = ctypes.CDLL(None); "
    other = await yard.backends[0].launch(yard.plan(yard.backends[0].node))
    hog = asyncio.ensure_future(python(box, one + "n = 0\nwhile libc.inotify_init() >= 0: n += 1\nprint(n)\nimport time; time.sleep(3)"))
    await asyncio.sleep(1.5)
    assert int(await python(other, one + "print(libc.inotify_init())")) >= 0
    fd = ctypes.CDLL(None).inotify_init()
    assert fd >= 0
    os.close(fd)
    assert int(await hog) >= 16


async def test_shared_memory_is_its_own(box: Any, yard: Yard) -> None:
    """POSIX shared memory works, and is not the neighbour's."""
    code = """
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory("seen", create=True, size=1 << 20)
memory.buf[:3] = b"abc"
again = shared_memory.SharedMemory("seen")
print(bytes(again.buf[:3]))
again.close()
memory.unlink()
"""
    assert "b'abc'" in await python(box, code)
    await sh(box, "echo mine > /dev/shm/mark")
    other = await yard.backends[0].launch(yard.plan(yard.backends[0].node))
    assert (await sh(other, "ls /dev/shm"))[1] == ""
    assert (await sh(other, "ls -ld /dev/shm"))[1].startswith("drwxrwxrwt")


async def test_devpts_is_bounded(box: Any) -> None:
    """Terminals are the sandbox's own, 64 at most."""
    out = await python(box, "import os\nn = 0\ntry:\n    while n < 200: os.openpty(); n += 1\nexcept OSError: pass\nprint(n)")
    assert 16 <= int(out) <= 64


async def test_neighbours_do_not_meet(box: Any, yard: Yard) -> None:
    """Files of one sandbox are not in another, though both stand on one layer."""
    backend = yard.backends[0]
    other = await backend.launch(yard.plan(backend.node))
    await sh(box, "echo mine > /etc/mark; echo changed >> /etc/passwd")
    assert (await sh(other, "cat /etc/mark; tail -1 /etc/passwd"))[1].startswith("user:")


async def test_user_and_workdir_of_the_spec(leftovers: object, yard: Yard) -> None:
    """c47, c45: work runs as the spec's user; a missing workdir is made and belongs to it."""
    backend = await yard.backend()
    box = await backend.launch(yard.plan(backend.node, user="user", workdir="/home/user/work/deep"))
    code, out, err = await sh(box, "id -u; pwd; touch here && echo ok; echo $HOME")
    assert (code, out.split()) == (0, ["1000", "/home/user/work/deep", "ok", "/home/user"]), err


def test_the_spec_has_no_way_around() -> None:
    """A spec cannot ask for capabilities or mounts at all."""
    assert not {"capabilities", "mounts", "privileged"} & set(SandboxSpec.__struct_fields__)


async def test_interrupted_stop_is_finished_by_the_next(box: Any) -> None:
    """A stop that is cancelled midway leaves a sandbox that the next stop takes apart."""
    task = asyncio.ensure_future(box.stop())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await box.stop()
