"""The node's side of a worker's connection: a plain connection to nats-server, signed in by the Edge, with the gate before it."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import ssl
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from dsec import __version__
from dsec.bus.credentials import Credentials
from dsec.bus.gate import Gate
from dsec.bus.grants import Grant
from dsec.bus.signing import Signer
from dsec.errors import Unavailable

READ = 64 << 10  # bytes at once
OPEN = 5.0  # seconds until a server has said its INFO


@functools.cache
def _tls() -> ssl.SSLContext:
    """Made once: it takes 15 ms to read the machine's authorities."""
    return ssl.create_default_context()


class Upstream:
    """Made by `open`. `say` gives it what the client said, `heard` waits for what there is for the client."""

    def __init__(self, gate: Gate, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.gate = gate
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, url: str, grant: Grant, *, creds: str = "", signer: Signer | None = None) -> Self:
        """Connect to one of the servers of ``url``. ``signer`` makes credentials of the job's own; without one those of ``creds`` serve, or
        none. Raises `Unavailable`."""
        servers = [part.strip() for part in url.split(",") if part.strip()]
        random.shuffle(servers)
        last: Exception | None = None
        for server in servers:
            try:
                async with asyncio.timeout(OPEN):
                    return await cls._open(server, grant, signer.credentials(grant) if signer is not None else creds)
            except (OSError, TimeoutError, ValueError, asyncio.LimitOverrunError) as error:
                last = error
        raise Unavailable(f"no nats-server answers: {last}", reason="no_server", fix="see that bus.url is reached from this node")

    @classmethod
    async def _open(cls, server: str, grant: Grant, creds: str) -> Self:
        parts = urlsplit(server if "://" in server else f"nats://{server}")
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 4222)
        try:
            line = await reader.readline()
            if not line.startswith(b"INFO "):
                raise OSError("what answers there is no nats-server")
            info: dict[str, Any] = json.loads(line[5:])
            if parts.scheme == "tls" or info.get("tls_required"):
                await writer.start_tls(_tls(), server_hostname=parts.hostname)
            connect: dict[str, Any] = {"name": f"worker {grant.worker}", "lang": "dsec", "version": __version__}
            if creds:
                known = Credentials(creds)
                connect |= {"jwt": known.jwt().decode(), "sig": known.sign(str(info.get("nonce", ""))).decode()}
            elif parts.username and parts.password is not None:
                connect |= {"user": unquote(parts.username), "pass": unquote(parts.password)}
            elif parts.username:
                connect["auth_token"] = unquote(parts.username)
            gate = Gate(grant, version=str(info.get("version", "")), max_payload=int(info.get("max_payload", 1 << 20)), connect=connect)
        except BaseException:
            writer.transport.abort()
            raise
        return cls(gate, reader, writer)

    async def say(self, data: bytes) -> None:
        """Bytes of the client. Raises OSError when nats-server has gone."""
        self.gate.client(data)
        await self._flush()

    async def heard(self) -> bytes:
        """What nats-server says next, as it came; b"" at its end."""
        try:
            return await self._reader.read(READ)
        except OSError:
            return b""

    async def take(self, data: bytes) -> None:
        """What `heard` brought, through the gate into its ``down``. Raises OSError, `InvalidRequest`."""
        self.gate.server(data)
        await self._flush()

    async def _flush(self) -> None:
        if self.gate.up:
            said, self.gate.up = self.gate.up, bytearray()
            self._writer.write(said)
            await self._writer.drain()

    def close(self) -> None:
        """At once: what was not sent is not."""
        self._writer.transport.abort()
