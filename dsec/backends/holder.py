"""The holder: a small, dull process beside the Edge that owns what must outlive it.

It is the subreaper of the sandboxes, so their exit statuses are kept while no Edge runs; it holds one detached mount for each
layer; it starts launchers in a mount namespace of its own. It knows nothing of NATS, specs or policies. It ends when it is told to,
or when no Edge has been there for a while and nothing lives.

    python -m dsec.backends.holder --socket PATH --guest FILE --launcher FILE [--linger SECONDS]

Messages are JSON in SEQPACKET frames: ``{"id": n, "op": …}`` is answered by ``{"id": n, "ok": {…}}`` or ``{"id": n, "error": text}``;
``{"event": "exit", …}`` comes by itself. Descriptors travel beside them (SCM_RIGHTS). Only the same user may connect.

Only the standard library, dsec.syscalls and of dsec.layers `mounts` and `lazy` are imported, and everything runs in one thread: start-up
60 ms, 15 MiB.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from typing import Any

from dsec import syscalls
from dsec.backends.holder_disks import DiskStores
from dsec.backends.holder_heir import Heirs
from dsec.backends.holder_layers import GUEST_LAYER, LayersHeld
from dsec.backends.holder_parts import FRAMES, PROTO, PROTO_MIN, Call, Edge, Refused, Sandbox
from dsec.backends.ondemand import OnDemand
from dsec.backends.zygotes import STRAY_AFTER, Zygotes

_COMM = ctypes.create_string_buffer(b"dsec-holder")
MAX_MESSAGE = 128 * 1024
MAX_FDS = 4
PAGE = 500
LISTEN_FD, STATUS_FD, FIRST_LOWER = 3, 4, 5
MAX_LAYERS_A_LAUNCH = 500  # overlayfs, OVL_MAX_STACK
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")  # of the node, that sandboxes share
# Directories that exist everywhere and that nothing here needs: one of them is covered, in our own namespace only.
ROOTS = ("/mnt", "/media", "/srv", "/opt", "/home")


class Holder(LayersHeld, OnDemand, Zygotes, DiskStores, Heirs):
    def __init__(self, listener: socket.socket, launcher: str, linger: float) -> None:
        LayersHeld.__init__(self)
        OnDemand.__init__(self)
        Zygotes.__init__(self)
        DiskStores.__init__(self)
        Heirs.__init__(self)
        self.listener = listener
        self.launcher = launcher
        self.linger = linger
        self.edges: dict[int, Edge] = {}
        self.sandboxes: dict[str, Sandbox] = {}
        self.exits: dict[str, dict[str, Any]] = {}
        self.by_fd: dict[int, tuple[str, Sandbox]] = {}
        self.programs: dict[tuple[str, int, int], int] = {}
        self.alone_since = time.monotonic()
        self.running = True

    # --- the mount namespace ---------------------------------------------------------------------------------------

    def enter_namespace(self, keep: tuple[str, ...]) -> None:
        """A private mount namespace with an empty tmpfs where roots are attached, and without the cgroup2 mount of a hybrid
        hierarchy (crun 1.8: "cgroups in hybrid mode not supported")."""
        syscalls.unshare(syscalls.CLONE_NEWNS)
        # A slave: what the node unmounts goes here too, else this copy would keep other people's file systems busy for ever.
        syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_SLAVE)
        with open("/proc/self/mountinfo") as file:
            table = [line.split(" - ") for line in file]
        if any(right.startswith("cgroup ") for _, right in table):
            for left, right in table:
                if right.startswith("cgroup2 "):
                    syscalls.umount2(left.split()[4], syscalls.MNT_DETACH)
        free = (path for path in ROOTS if os.path.isdir(path) and not any(used == path or used.startswith(path + "/") for used in keep))
        self.place = next(free, "")
        if not self.place:
            raise Refused(f"none of {', '.join(ROOTS)} is free to attach roots at")
        for name in DEVICES:  # crun gives /dev/null to root inside (fchown): the node's must refuse
            copy = syscalls.open_tree(f"/dev/{name}")
            try:
                syscalls.mount_setattr(copy, attr_set=syscalls.MOUNT_ATTR_RDONLY)
                syscalls.move_mount(copy, f"/dev/{name}")
            finally:
                os.close(copy)
        syscalls.mount("dsec", self.place, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "size=256k,mode=755")
        os.mkdir(f"{self.place}/root", 0o755)
        for number in range(MAX_LAYERS_A_LAUNCH + 1):
            os.mkdir(f"{self.place}/l{number}", 0o755)

    def hold_guest(self, binary: str) -> None:
        """The agent as a layer of its own, so that it leaves no trace in any upper and no sandbox can change another's.

        It also holds /dev: places for the runtime to bind the usual devices on, and shm as a plain directory, which is the sandbox's
        own once it is written to and counts to its disk. So a sandbox needs no file system for either.
        """
        fd = syscalls.new_mount("tmpfs", [("size", "16m"), ("nr_inodes", "64"), ("mode", "0755")], syscalls.MOUNT_ATTR_NODEV)
        os.mkdir(".dsec", 0o755, dir_fd=fd)
        with open(binary, "rb") as file:
            data = file.read()
        out = os.open(".dsec/aether", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o555, dir_fd=fd)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(out, view) :]
            os.fchmod(out, 0o555)
        finally:
            os.close(out)
        for path, mode in (("proc", 0o755), ("dev", 0o755), ("dev/pts", 0o755), ("dev/shm", 0o1777)):
            os.mkdir(path, mode, dir_fd=fd)
            os.chmod(path, mode, dir_fd=fd)
        for name in DEVICES:
            os.close(os.open(f"dev/{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666, dir_fd=fd))
        for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
            os.symlink(f"/proc/self/{target}", f"dev/{name}", dir_fd=fd)
        os.symlink("pts/ptmx", "dev/ptmx", dir_fd=fd)
        os.symlink("/proc/kcore", "dev/core", dir_fd=fd)  # crun makes it; it is masked
        syscalls.mount_setattr(fd, attr_set=syscalls.MOUNT_ATTR_RDONLY)
        self.by_paths = syscalls.disabled("overlay_fd") or not _can_clone(fd)
        self._hold(GUEST_LAYER, fd)

    # --- requests --------------------------------------------------------------------------------------------------

    def op_hello(self, _call: Call) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "proto": PROTO,
            "proto_min": PROTO_MIN,
            "root": f"{self.place}/root",
            "prefix": f"{self.place}/l",
            "by_paths": self.by_paths,
            "native": FRAMES,  # it keeps zygotes
            "disabled": os.environ.get("DSEC_DISABLE", ""),
        }

    def op_list(self, call: Call) -> dict[str, Any]:
        """Everything known after ``after``, in pages: a value is the pid of an init, 0 while it is launched, or how it ended."""
        names = sorted(name for name in (*self.sandboxes, *self.exits) if name > call["after"])[:PAGE]
        return {"page": {name: self.sandboxes[name].pid if name in self.sandboxes else self.exits[name] for name in names}}

    def op_launch(self, call: Call) -> dict[str, Any] | None:
        """Start a launcher; answered when the runtime has ended and the sandbox's init is known."""
        if len(call.fds) != 1:
            raise Refused("a launch needs its listening socket")
        box = self._admit(call)
        argv = [str(word) for word in call["argv"]]
        program = self._program(argv[argv.index("--") + 1])
        layers = self._layers_of(call)
        box.pidfile = call["pidfile"]
        status, status_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        box.status = status
        # The lowest numbers are targets of dup2 in the child: everything is moved out of their way by asking for high copies.
        sources = [_high(call.fds[0]), _high(status_write), *(_high(fd) for fd in layers)]
        if program >= 0:
            sources.append(_high(program))
            argv.insert(0, "-x")
        for fd in (status_write, *layers):
            os.close(fd)
        actions: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_DUP2, source, LISTEN_FD + index) for index, source in enumerate(sources)]
        actions += [(os.POSIX_SPAWN_OPEN, fd, "/dev/null", os.O_RDWR, 0) for fd in (0, 1, 2)]
        argv = [self.launcher, "-l", str(len(layers)), "-r", f"{self.place}/root", *argv]
        try:
            box.launcher_pid = os.posix_spawn(
                self.launcher, argv, call["env"], file_actions=actions, setsid=True, setsigmask=(), setsigdef=(signal.SIGPIPE,)
            )
            box.launcher = syscalls.pidfd_open(box.launcher_pid)
        except OSError as error:
            os.close(status)
            raise Refused(f"launcher: {error}") from error
        finally:
            for source in sources:
                os.close(source)
        self.sandboxes[box.ulid] = box
        self._watch(box.launcher, "launcher", box)
        return None

    def _admit(self, call: Call) -> Sandbox:
        if call["ulid"] in self.sandboxes or call["ulid"] in self.exits:
            raise Refused(f"{call['ulid']} was launched already")
        box = Sandbox(call["ulid"])
        box.reply = (call.edge, call["id"])
        return box

    def _program(self, path: str) -> int:
        """The runtime as a sealed memfd, made once; -1 where that cannot be. A runtime that finds itself in one needs no private copy of
        itself (its guard against CVE-2019-5736) and no second start: a third of crun's time."""
        try:
            found = os.stat(path)
            key = (path, found.st_mtime_ns, found.st_size)
            if key not in self.programs:
                with open(path, "rb") as file:
                    data = file.read()
                if data[:4] != b"\x7fELF":
                    return -1
                fd = os.memfd_create("runtime", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                os.truncate(fd, len(data))
                os.pwrite(fd, data, 0)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
                self.programs[key] = fd
            return self.programs[key]
        except OSError:
            return -1

    def op_lend(self, call: Call) -> dict[str, Any]:
        """Numbers of the descriptors that a launch needs, for one that is not our child: Docker's shim starts it (wrapper/oci.c)."""
        if call["ulid"] in self.sandboxes or call["ulid"] in self.exits:
            raise Refused(f"{call['ulid']} was launched already")
        missing = [key for key in call["lowers"] if key not in self.layers]
        if missing:
            raise Refused(f"layers are not mounted: {', '.join(missing)}")
        layers = [self.layers[key] for key in (GUEST_LAYER, *call["lowers"])]
        return {"pid": os.getpid(), "layers": layers, "program": self._program(call["runtime"]), "launcher": self.launcher}

    def op_find(self, call: Call) -> dict[str, Any]:
        """As `list` for one: ``found`` is null for what was never launched or is forgotten."""
        box = self.sandboxes.get(call["ulid"])
        return {"found": box.pid if box is not None else self.exits.get(call["ulid"])}

    def op_adopt(self, call: Call) -> dict[str, Any]:
        """Watch an init that an earlier holder launched: its death will be seen, its status will not."""
        box = self.sandboxes.get(call["ulid"])
        if box is None:
            box = Sandbox(call["ulid"])
            try:
                box.init = syscalls.pidfd_open(call["pid"])
            except ProcessLookupError as error:
                raise Refused("it has ended") from error
            box.pid, box.child = call["pid"], False
            self.sandboxes[box.ulid] = box
            self._watch(box.init, "init", box)
        return {"pid": box.pid}

    def op_kill(self, call: Call) -> dict[str, Any]:
        """SIGKILL to the init and to a launcher that still runs. The exit comes as an event."""
        box = self.sandboxes.get(call["ulid"])
        if box is None:
            return {"live": False}
        box.doomed = True
        for fd in (box.init, box.launcher):
            if fd >= 0:
                syscalls.pidfd_send_signal(fd, signal.SIGKILL)
        return {"live": True}

    def op_signal(self, call: Call) -> dict[str, Any]:
        """A signal to the init only (it is delivered where the init has a handler)."""
        box = self.sandboxes.get(call["ulid"])
        return {"live": box is not None and box.init >= 0 and syscalls.pidfd_send_signal(box.init, call["signal"])}

    def op_forget(self, call: Call) -> dict[str, Any]:
        for ulid in call["ulids"]:
            self.exits.pop(ulid, None)
        return {}

    def op_quit(self, call: Call) -> dict[str, Any]:
        """End, unless sandboxes live."""
        if self.sandboxes and not call["force"]:
            raise Refused(f"{len(self.sandboxes)} sandboxes live")
        self.running = False
        return {}

    # --- deaths ----------------------------------------------------------------------------------------------------

    def launcher_ended(self, box: Sandbox) -> None:
        """The runtime (or the launcher, when it failed) is gone: find the init, or say what failed."""
        self._unwatch(box.launcher)
        code, signum = syscalls.waitid(box.launcher, block=True) or (-1, 0)
        os.close(box.launcher)
        box.launcher = -1
        text = _drain(box.status)
        box.status = -1
        pid = _read_pid(box.pidfile)
        if pid:
            # It is our child as soon as the runtime has ended, so the number cannot have been used again.
            with contextlib.suppress(ProcessLookupError):
                box.init = syscalls.pidfd_open(pid)
                box.pid = pid
        if code == 0 and box.init >= 0 and not box.doomed:
            self._watch(box.init, "init", box)
            self._answer(box, {"ok": {"pid": pid}})
            return
        if box.init >= 0:
            syscalls.pidfd_send_signal(box.init, signal.SIGKILL)
            self._watch(box.init, "init", box)
        else:
            self._gone(box, {"code": -1, "signal": 0})
            self._reap_strays()
        how = f"signal {signum}" if signum else f"exit code {code}"
        self._answer(box, {"error": text or f"the runtime ended with {how}"})

    def init_ended(self, box: Sandbox) -> None:
        self._unwatch(box.init)
        status: dict[str, Any] = {"code": None, "signal": None}
        if box.child:
            try:
                code, signum = syscalls.waitid(box.init, block=True) or (-1, 0)
                status = {"code": None, "signal": signum} if signum else {"code": code, "signal": None}
            except ChildProcessError:  # the runtime has not given it to us
                pass
        os.close(box.init)
        box.init = -1
        if box.starting:
            box.ended = status  # its zygote knows why, and says so next
        else:
            self.init_gone(box, status)

    def init_gone(self, box: Sandbox, status: dict[str, Any]) -> None:
        self._gone(box, status | ({"why": box.why} if box.why else {}))

    def _gone(self, box: Sandbox, status: dict[str, Any]) -> None:
        self.sandboxes.pop(box.ulid, None)
        status |= {"wall": time.time(), "pid": box.pid}
        self.exits[box.ulid] = status
        for edge in list(self.edges.values()):
            self._send(edge, {"event": "exit", "ulid": box.ulid, "exit": status})
        self.alone_since = time.monotonic()

    def _reap_strays(self) -> bool:
        """Wait for children that nobody watches: what a killed runtime left, or what a zygote made ahead for nobody. Walks all children, so
        only after such a kill. False when it could not see them all."""
        known = {box.pid for box in self.sandboxes.values()} | {box.launcher_pid for box in self.sandboxes.values()}
        known |= {self.loader_pid, *self.zygote_pids()}
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return True
            if found is None or found.si_pid in known:  # a known one is taken by its own descriptor
                return found is None
            os.waitid(os.P_PID, found.si_pid, os.WEXITED)

    # --- the loop --------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        self.epoll.register(self.listener.fileno(), select.EPOLLIN)
        while self.running:
            for fd, _ in self.epoll.poll(min(self.patience(5.0), self.zygote_patience())):
                if fd == self.listener.fileno():
                    self._accept()
                elif fd in self.edges:
                    self._read(self.edges[fd])
                elif self.loader_event(fd) or self.zygote_event(fd):
                    continue
                elif fd in self.by_fd:
                    kind, box = self.by_fd[fd]
                    (self.launcher_ended if kind == "launcher" else self.init_ended)(box)
            self.look_after()
            self.sweep()
            if 0 < self.strays_at < time.monotonic():
                self.strays_at = 0.0 if self._reap_strays() else time.monotonic() + STRAY_AFTER
            if self.edges or self.sandboxes:
                self.alone_since = time.monotonic()
            else:
                self._reap_strays()
                if time.monotonic() - self.alone_since > self.linger:
                    return

    def _accept(self) -> None:
        sock, _ = self.listener.accept()
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.geteuid():
            sock.close()
            return
        sock.settimeout(5.0)  # for sends: an Edge that does not read is dropped
        self.edges[sock.fileno()] = Edge(sock)
        self.epoll.register(sock.fileno(), select.EPOLLIN)

    def _drop(self, edge: Edge) -> None:
        fd = edge.sock.fileno()
        if fd >= 0:
            self.edges.pop(fd, None)
            self.epoll.unregister(fd)
            edge.sock.close()

    def _read(self, edge: Edge) -> None:
        try:
            data, ancillary, flags, _ = edge.sock.recvmsg(
                MAX_MESSAGE, socket.CMSG_SPACE(MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
            )
        except BlockingIOError:
            return
        except OSError:
            self._drop(edge)
            return
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % 4])
        try:
            if not data or flags & socket.MSG_TRUNC:
                self._drop(edge)
                return
            message = json.loads(data)
            handler = getattr(self, f"op_{message['op']}", None)
            try:
                if handler is None:
                    raise Refused(f"no operation {message['op']!r}")
                answer = handler(Call(message, list(fds), edge))
            except (Refused, OSError, KeyError, TypeError, ValueError) as error:
                code = error.errno if isinstance(error, OSError) else None
                self._send(edge, {"id": message.get("id"), "error": str(error), "errno": code})
            else:
                if answer is not None:
                    self._send(edge, {"id": message["id"], "ok": answer})
        except (ValueError, KeyError, TypeError) as error:
            with contextlib.suppress(OSError):  # a full disk takes no log, and must not take the holder
                sys.stderr.write(f"holder: dropped an Edge that does not speak the protocol: {error}\n")
            self._drop(edge)
        finally:
            for fd in fds:
                os.close(fd)

    def _answer(self, box: Sandbox, body: dict[str, Any]) -> None:
        if box.reply is not None:
            edge, number = box.reply
            box.reply = None
            self._send(edge, {"id": number, **body})

    def _send(self, edge: Edge, body: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        if edge.sock.fileno() < 0:
            return
        try:
            edge.sock.sendmsg([json.dumps(body).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])
        except OSError:
            self._drop(edge)

    def _watch(self, fd: int, kind: str, box: Sandbox) -> None:
        self.by_fd[fd] = (kind, box)
        self.epoll.register(fd, select.EPOLLIN)

    def _unwatch(self, fd: int) -> None:
        self.by_fd.pop(fd, None)
        self.epoll.unregister(fd)


def _can_clone(fd: int) -> bool:
    """Whether this kernel clones a mount that is attached nowhere."""
    try:
        os.close(syscalls.open_tree("", syscalls.OPEN_TREE_CLONE | syscalls.AT_EMPTY_PATH, fd))
    except OSError:
        return False
    return True


def _high(fd: int) -> int:
    """A copy of a descriptor above every number that the launcher expects."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_LOWER + MAX_LAYERS_A_LAUNCH + 1)


def _drain(fd: int) -> str:
    """What the launcher wrote before it ended."""
    try:
        return os.read(fd, 4096).decode(errors="replace").strip()
    except BlockingIOError:
        return ""
    finally:
        os.close(fd)


def _read_pid(path: str) -> int:
    try:
        with open(path) as file:
            return int(file.read().strip() or 0)
    except (FileNotFoundError, ValueError):
        return 0


def _listen(path: str) -> socket.socket:
    """Bind the socket, or end quietly when another holder serves it already."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mask = os.umask(0o177)
    try:
        try:
            listener.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
                try:
                    probe.connect(path)
                except ConnectionRefusedError:
                    os.unlink(path)
                    listener.bind(path)
                else:
                    raise SystemExit(3) from None
    finally:
        os.umask(mask)
    listener.listen(16)
    return listener


def _detach() -> int:
    """Leave the Edge's tree: the process that it started ends with 0 as soon as the returned descriptor has been written to."""
    read, write = os.pipe2(os.O_CLOEXEC)
    if child := os.fork():
        os.close(write)
        if os.read(read, 1):
            os._exit(0)
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF or 1)
    os.close(read)
    return write


def main() -> None:
    parser = argparse.ArgumentParser(prog="dsec.backends.holder")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--guest", required=True)
    parser.add_argument("--launcher", required=True)
    parser.add_argument("--linger", type=float, default=30.0)
    parser.add_argument("--keep", action="append", default=[], help="a path that must stay visible in our mount namespace")
    options = parser.parse_args()
    ready = _detach()
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # what ends an Edge must not end its sandboxes
        signal.signal(signum, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # one descriptor a sandbox, two a layer
    syscalls.set_child_subreaper()
    syscalls.run_slice()
    syscalls.prctl(syscalls.PR_SET_NAME, ctypes.addressof(_COMM))
    paths = (options.socket, options.guest, options.launcher, sys.prefix, *options.keep)
    holder = Holder(_listen(options.socket), options.launcher, options.linger)
    try:
        holder.enter_namespace(tuple(os.path.realpath(path) for path in paths))
        holder.hold_guest(options.guest)
        os.write(ready, b"1")
        os.close(ready)
        holder.serve()
        holder.end_loader()
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(options.socket)


if __name__ == "__main__":
    main()
