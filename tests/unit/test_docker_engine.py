"""What the Docker backend says of daemons that it cannot use, told by the daemons' own answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from dsec.backends.docker import Engine
from dsec.config import DockerConfig
from dsec.errors import NodeError, Unsupported

Serve = Callable[[dict[str, Any]], Awaitable[Engine]]


@pytest.fixture
async def serve(state_dir: Path) -> AsyncIterator[Serve]:
    """``await serve({path: answer})``: an engine whose daemon answers so; a path that is not named gets 500."""
    servers: list[asyncio.Server] = []
    engines: list[Engine] = []

    async def start(answers: dict[str, Any]) -> Engine:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            path = "/" + head.split()[1].decode().rpartition("/")[2]
            body = json.dumps(answers.get(path, {"message": "this daemon is broken"})).encode()
            status = b"200 OK" if path in answers else b"500 Internal Server Error"
            headers = b"Content-Type: application/json\r\nConnection: close\r\nContent-Length: " + str(len(body)).encode()
            writer.write(b"HTTP/1.1 " + status + b"\r\n" + headers + b"\r\n\r\n" + body)
            await writer.drain()
            writer.close()

        path = state_dir / f"{len(servers)}.sock"
        servers.append(await asyncio.start_unix_server(answer, path))
        engines.append(Engine(DockerConfig(host=f"unix://{path}")))
        return engines[-1]

    yield start
    for engine in engines:
        await engine.close()
    for server in servers:
        server.close()


GOOD = {"/version": {"Version": "20.10.24", "ApiVersion": "1.41"}, "/info": {"Runtimes": {"dsec": {"path": "/bin/true"}}}}


async def test_an_old_daemon_is_refused(serve: Serve) -> None:
    """Below API 1.41 the refusal names the version and what to install."""
    engine = await serve(GOOD | {"/version": {"Version": "19.03.1", "ApiVersion": "1.40"}})
    with pytest.raises(Unsupported) as caught:
        await engine.look()
    assert "19.03.1" in caught.value.message
    assert "20.10" in caught.value.fix


async def test_a_rootless_daemon_is_refused(serve: Serve) -> None:
    """It could make neither our cgroups nor our mounts."""
    engine = await serve(GOOD | {"/info": {"SecurityOptions": ["name=seccomp,profile=default", "name=rootless"], "Runtimes": {}}})
    with pytest.raises(Unsupported) as caught:
        await engine.look()
    assert "rootless" in caught.value.message


async def test_another_program_under_our_name_is_refused(serve: Serve) -> None:
    """A runtime that is called as ours and is not ours would start containers that enforce nothing of the plan."""
    engine = await serve(GOOD)
    with pytest.raises(Unsupported) as caught:
        await engine.look()
    assert caught.value.field == "docker.runtime"
    assert "/bin/true" in caught.value.message


async def test_a_broken_daemon_is_the_nodes_fault(serve: Serve) -> None:
    """Its words reach the caller, as a `NodeError` that may be tried again."""
    engine = await serve(GOOD)
    with pytest.raises(NodeError) as caught:
        await engine.run("dsec-x", {}, "n1-x")
    assert "this daemon is broken" in caught.value.message
    assert caught.value.reason == "docker"
    assert caught.value.retryable
