"""What users of other sandboxes' clients look for under another name: the error names ours. No alias hides a difference in meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

CLIENT = {
    "run": "client.sandbox(image) and sandbox.exec(cmd)",
    "containers": "client.sandbox(…), client.create(…), client.list()",
    "get": "client.attach(id)",
    "connect": "client.attach(id)",
    "from_id": "client.attach(id)",
    "reconnect": "client.attach(id)",
    "ps": "client.list()",
    "kill": "client.stop(ids=[…])",
    "terminate": "client.stop(ids=[…])",
}
SANDBOX = {
    "run": "sandbox.exec(cmd)",
    "run_command": "sandbox.exec(cmd)",
    "run_code": 'sandbox.exec(["python3", "-c", code])',
    "execute": "sandbox.exec(cmd)",
    "exec_run": "sandbox.exec(cmd)",
    "pty": "sandbox.terminal(cmd)",
    "run_in_session": "sandbox.session() and its run(cmd)",
    "create_session": "sandbox.session()",
    "filesystem": "sandbox.files",
    "fs": "sandbox.files",
    "open": "sandbox.files.read(path) and sandbox.files.write(path, data)",
    "read_file": "sandbox.files.read(path)",
    "write_file": "sandbox.files.write(path, data)",
    "upload": "sandbox.files.upload(source, target)",
    "download": "sandbox.files.download(source, target)",
    "put_archive": "sandbox.files.upload(source, target)",
    "get_archive": "sandbox.files.download(source, target)",
    "get_host": "sandbox.expose(port)",
    "tunnels": "sandbox.expose(port)",
    "forward": "sandbox.expose(port)",
    "set_timeout": "ttl= and idle_timeout= of client.sandbox(…)",
    "poll": "sandbox.info() and its state, or sandbox.is_running()",
    "status": "sandbox.info() and its state, or sandbox.is_running()",
    "returncode": "sandbox.info() and its exit",
    "sandbox_id": "sandbox.id",
    "object_id": "sandbox.id",
    "get_info": "sandbox.info()",
    "metadata": "sandbox.labels",
    "logs": "sandbox.start(cmd) and its output, or sandbox.log() for the story of the sandbox",
    "remove": "sandbox.stop()",
    "close": "sandbox.stop()",
    "snapshot_filesystem": "sandbox.pack_diff(name)",
    "commit": "sandbox.pack_diff(name)",
    "unpause": "sandbox.resume()",
    "snapshot": "sandbox.checkpoint(name)",
    "branch": "sandbox.fork(n)",
    "clone": "sandbox.fork(n)",
}
CONTEXT = dict.fromkeys(
    ("exec", "start", "session", "terminal", "files", "id", "stop", "run", "commands", "fork", "checkpoint"),
    "the sandbox that its block gives (`async with client.sandbox(image) as sandbox`), or client.create(image) for one that stays",
)
FILES = {
    "make_dir": "files.mkdir(path)",
    "makedirs": "files.mkdir(path)",
    "listdir": "files.list(path)",
    "ls": "files.list(path)",
    "get_info": "files.stat(path)",
    "info": "files.stat(path)",
    "rm": "files.remove(path, recursive=True)",
    "delete": "files.remove(path)",
    "move": "files.rename(path, target)",
    "watch_dir": "files.watch(path)",
    "write_text": "files.write(path, text)",
    "put": "files.upload(source, target)",
    "get": "files.download(source, target)",
}


class Named:
    """A class whose missing attributes are told with the name that they have here; ``hasattr`` and ``getattr`` work as always."""

    _meant: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # a type checker goes on telling every unknown name

        def __getattr__(self, name: str) -> NoReturn:
            raise _unknown(self, name)


def _unknown(thing: Any, name: str) -> AttributeError:
    text = f"{type(thing).__name__!r} object has no attribute {name!r}"
    meant = type(thing)._meant.get(name)
    return AttributeError(f"{text}: use {meant}" if meant else text, name=name, obj=thing)
