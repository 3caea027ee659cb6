"""Credentials files (JWT and nkey) against a server in operator mode, made here from keys of this test's own."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import time
from pathlib import Path

import nkeys
import pytest

from dsec import errors
from dsec.bus import Bus, Msg
from dsec.bus.server import NatsServer


def key(prefix: int) -> tuple[nkeys.KeyPair, str, str]:
    """(pair, public key, seed) of a new key."""
    seed = bytes(nkeys.encode_seed(os.urandom(32), prefix))
    pair = nkeys.from_seed(bytearray(seed))
    return pair, bytes(pair.public_key).decode(), seed.decode()


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def jwt(issuer: nkeys.KeyPair, subject: str, nats: dict[str, object], expires: float | None = None) -> str:
    claims = {"jti": os.urandom(16).hex(), "iat": int(time.time()), "iss": bytes(issuer.public_key).decode(), "sub": subject, "name": "t"}
    claims |= {"nats": nats | {"version": 2}}
    if expires is not None:
        claims["exp"] = int(expires)
    text = b64(json.dumps({"typ": "JWT", "alg": "ed25519-nkey"}).encode()) + "." + b64(json.dumps(claims).encode())
    return text + "." + b64(issuer.sign(text.encode()))


class Authority:
    """An operator with one account: makes the server's configuration and users' credentials. ``jetstream``: the account may use it."""

    def __init__(self, *, jetstream: bool = False) -> None:
        self.operator, self.operator_name, _ = key(nkeys.PREFIX_BYTE_OPERATOR)
        self.account, self.account_name, self.account_seed = key(nkeys.PREFIX_BYTE_ACCOUNT)
        limits = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1) | {"wildcards": True}
        stored = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1) if jetstream else {}
        accounts = {self.account_name: limits | stored}
        operator = jwt(self.operator, self.operator_name, {"type": "operator"})
        self.config = f"operator: {operator}\nresolver: MEMORY\n"
        if jetstream:  # the server wants an account of its own for that
            system = key(nkeys.PREFIX_BYTE_ACCOUNT)[1]
            accounts[system] = limits
            self.config += f"system_account: {system}\n"
        known = [f"{name}: {jwt(self.operator, name, {'type': 'account', 'limits': has})}" for name, has in accounts.items()]
        self.config += f"resolver_preload: {{ {', '.join(known)} }}"

    def creds(self, expires: float | None = None, publish: list[str] | None = None) -> str:
        _, name, seed = key(nkeys.PREFIX_BYTE_USER)
        may: dict[str, object] = {"type": "user", "subs": -1, "data": -1, "payload": -1}
        if publish is not None:
            may["pub"] = {"allow": publish}
        token = jwt(self.account, name, may, expires)
        return (
            f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
        )


async def test_credentials_as_file_and_as_text(state_dir: Path) -> None:
    """A credentials file and its text both authenticate; none, a forged one and a damaged seed are refused with a type."""
    authority = Authority()
    path = state_dir / "user.creds"
    path.write_text(authority.creds())
    async with NatsServer(state_dir / "nats", jetstream=False, extra=authority.config) as server:
        for creds in (str(path), authority.creds(publish=["a.>"])):
            async with Bus.connect(server.url, creds=creds) as bus:
                await bus.flush()
        async with Bus.connect(server.url, creds=authority.creds(publish=["a.>"])) as bus:
            with pytest.raises(errors.Denied):
                await bus.transport.request("b.x", b"", timeout=5)
        with pytest.raises(errors.Denied):
            await Bus.connect(server.url)
        with pytest.raises(errors.Denied):
            await Bus.connect(server.url, creds=Authority().creds())
        with pytest.raises(errors.InvalidRequest) as caught:
            await Bus.connect(server.url, creds=authority.creds().replace("\nSU", "\nSX"))
        assert caught.value.field == "creds"


async def test_expired_credentials_are_read_again(state_dir: Path) -> None:
    """When credentials expire the server ends the connection; it comes back by itself once the file holds new ones."""
    authority = Authority()
    path = state_dir / "user.creds"
    path.write_text(authority.creds(expires=time.time() + 2))
    async with (
        NatsServer(state_dir / "nats", jetstream=False, extra=authority.config) as server,
        Bus.connect(server.url, creds=str(path)) as bus,
    ):
        got: list[bytes] = []

        def callback(msg: Msg) -> None:
            got.append(msg.data)

        await bus.subscribe_raw("a.b", callback)
        gone = asyncio.Event()
        bus.events.listeners.append(lambda what, detail: gone.set() if what == "disconnected" else None)
        await asyncio.wait_for(gone.wait(), 10)
        await asyncio.sleep(0.3)
        assert not bus.connected
        path.write_text("-----BEGIN NATS USER JWT-----\nhalf writ")
        await asyncio.sleep(0.3)
        path.write_text(authority.creds())
        await bus.transport.wait_connected(10)
        bus.transport.post("a.b", b"again")
        await bus.flush()
        assert got == [b"again"]
