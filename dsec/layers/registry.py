"""Pull images from an OCI registry: the distribution specification's client side, as much of it as a pull needs.

HTTPS, and plain HTTP to loopback only. Tokens by the registry's own challenge; credentials from Docker's config.json, its helpers
included. Manifests and blobs are bounded in size and compared with their digests; a broken download goes on where it broke. aiohttp
speaks HTTP; it is a package of the node, not of the client.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import hashlib
import ipaddress
import json
import os
import random
import re
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar
from urllib.parse import urlsplit

import msgspec

from dsec.errors import Denied, DsecError, InvalidRequest, NodeError, NotFound, Unavailable, Unsupported
from dsec.layers import oci_model, tools
from dsec.layers.http_words import words
from dsec.layers.oci_model import DOCKER_HUB, INDEX_TYPES, MANIFEST_TYPES, MAX_DOCUMENT, Descriptor, Manifest, Reference

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")
TRIES = 5
CONNECT_TRIES = 2  # of a registry that has not answered yet: whoever waits is told soon that there is no way to it
CONNECT_S = 5.0
TIMEOUT = 30.0  # seconds without a byte
MAX_BLOB = 64 << 30
_CHALLENGE = re.compile(r'([a-zA-Z]+)="((?:[^"\\]|\\.)*)"')
_PIECE = 1 << 20


class Login(msgspec.Struct, frozen=True):
    """User and password, or an identity token."""

    user: str = ""
    password: str = ""
    token: str = ""


class Registry:
    """One image of one registry; a `Source`. ``environ`` tells where Docker's configuration is (DOCKER_CONFIG, HOME)."""

    def __init__(self, reference: Reference, machine: str = "", environ: Mapping[str, str] | None = None, tries: int = TRIES) -> None:
        self.reference = reference
        self.machine = machine
        self.label = f"oci {reference}"
        self._environ = os.environ if environ is None else environ
        self._tries = tries
        host = "registry-1.docker.io" if reference.registry == DOCKER_HUB else reference.registry
        self._base = f"{'http' if is_loopback(host) else 'https'}://{host}/v2/{reference.repository}"
        self._session: aiohttp.ClientSession | None = None
        self._reached = False
        self._authorization = ""
        self._login: Login | None = None

    # --- the Source protocol -----------------------------------------------------------------------------------------

    async def manifest(self) -> tuple[Manifest, str]:
        """Raises `NotFound` (no such image, not for this machine), `Denied`, `Unavailable`, `InvalidRequest`, `Unsupported`."""
        name = self.reference.digest or self.reference.tag
        size = MAX_DOCUMENT
        for _ in range(4):  # an index may name another one
            data, media_type = await self._small(f"{self._base}/manifests/{name}", size, accept=", ".join((*MANIFEST_TYPES, *INDEX_TYPES)))
            digest = oci_model.digest_of(data)
            if name.startswith("sha256:") and digest != name:
                raise NodeError(f"the registry answers {digest[:19]} for {name[:19]}", field="image", value=str(self.reference))
            found = oci_model.read_manifest(data, media_type)
            if found.manifests is None:
                return found, digest
            name = oci_model.choose(found, self.machine).digest
        raise InvalidRequest("an index of indexes without end", field="image", value=str(self.reference))

    async def document(self, blob: Descriptor) -> bytes:
        if blob.size > MAX_DOCUMENT:
            raise InvalidRequest("a document of an image larger than 4 MiB", field="image", value=blob.digest)
        data, _ = await self._small(f"{self._base}/blobs/{blob.digest}", blob.size)
        if len(data) != blob.size or oci_model.digest_of(data) != blob.digest:
            raise NodeError("the registry sent another configuration than the image's", field="image", value=blob.digest)
        return data

    async def read(self, blob: Descriptor, work: Callable[[BinaryIO], T]) -> T:
        """Give a blob to ``work``, in a thread, while it comes: through a pipe, so it is never a file. A broken download goes on where it
        broke. Raises `NodeError` when the blob is not what it should be, whatever ``work`` made of it, and what ``work`` raises."""
        if blob.size > MAX_BLOB:
            raise InvalidRequest(f"a layer of more than {MAX_BLOB >> 30} GiB", field="image", value=blob.digest)
        out, into = os.pipe2(os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # the user's share of pipe memory is used up: a smaller one does as well
            fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, _PIECE)

        def run() -> T:
            with open(out, "rb", buffering=_PIECE) as file:
                return work(file)

        reader = asyncio.ensure_future(tools.in_thread(run))
        try:
            try:
                await self._feed(blob, _Feed(into))
            finally:
                os.close(into)  # the reader comes to its end
        except BaseException:
            while not reader.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([reader])
            reader.exception()  # seen: what the download says is told instead
            raise
        return await reader

    async def range(self, digest: str, start: int, length: int) -> bytes:
        """A part of a blob; whoever asks knows how to check it. Raises `Unsupported` where the registry gives whole blobs only."""
        async for attempt in self._attempts():
            async with attempt:
                asked = {"Range": f"bytes={start}-{start + length - 1}"}
                async with self._get(f"{self._base}/blobs/{digest}", asked) as response:
                    if response.status != 206:
                        raise Unsupported(f"{self.reference.registry} does not give parts of blobs", field="image", reason="range")
                    data = bytearray()
                    while len(data) < length and (piece := await response.content.read(length - len(data))):
                        data += piece
                    if len(data) < length:
                        raise Unavailable("the download broke off", field="image", value=digest, fix="try again")
                    return bytes(data)
        raise AssertionError("an attempt returns or raises")

    async def _feed(self, blob: Descriptor, feed: _Feed) -> None:
        url = f"{self._base}/blobs/{blob.digest}"
        async for attempt in self._attempts():
            async with attempt:
                headers = {"Range": f"bytes={feed.done}-"} if feed.done else {}
                async with self._get(url, headers) as response:
                    again = feed.done if response.status != 206 else 0  # from the beginning: what is there already is passed over
                    async for piece in response.content.iter_chunked(_PIECE):
                        fresh = piece[min(again, len(piece)) :]
                        again -= len(piece) - len(fresh)
                        if feed.done + len(fresh) > blob.size:
                            raise NodeError("a blob is larger than its image says", field="image", value=blob.digest, retryable=False)
                        await tools.in_thread(feed.take, fresh)
                if feed.done < blob.size:
                    raise Unavailable("the download broke off", field="image", value=blob.digest, fix="try again")
        if feed.digest != blob.digest:
            raise NodeError("a blob is not what its digest says", field="image", value=blob.digest, retryable=False)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # --- HTTP ----------------------------------------------------------------------------------------------------------

    async def _small(self, url: str, size: int, accept: str = "") -> tuple[bytes, str]:
        async for attempt in self._attempts():
            async with attempt:
                async with self._get(url, {"Accept": accept} if accept else {}) as response:
                    data = b""
                    async for piece in response.content.iter_chunked(_PIECE):
                        data += piece
                        if len(data) > size:
                            raise InvalidRequest("the registry sends more than it said", field="image", value=str(self.reference))
                    return data, response.content_type
        raise AssertionError("an attempt returns or raises")

    async def _attempts(self) -> AsyncIterator[_Attempt]:
        """Attempts of one request: what may pass is tried again with growing pauses."""
        for number in range(self._tries):
            attempt = _Attempt(
                last=number == self._tries - 1, patient=self._reached or number < CONNECT_TRIES - 1, reference=self.reference
            )
            yield attempt
            if attempt.error is None:
                return
            pause = attempt.pause or min(8.0, 0.2 * 2**number)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))

    @contextlib.asynccontextmanager
    async def _get(self, url: str, headers: dict[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        session = self._open()
        for turn in range(2):
            sent = headers | ({"Authorization": self._authorization} if self._authorization else {})
            async with session.get(url, headers=sent) as response:
                self._reached = True
                if response.status == 401 and turn == 0:
                    await self._authorize(response.headers.get("WWW-Authenticate", ""))
                    continue
                self._check(response)
                yield response
                return

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, connect=2 * CONNECT_S, sock_connect=CONNECT_S, sock_read=TIMEOUT)
            # The blobs are compressed themselves; trust_env: the machine's proxy settings.
            self._session = aiohttp.ClientSession(timeout=timeout, auto_decompress=False, trust_env=True, headers={"User-Agent": "dsec"})
        return self._session

    def _check(self, response: aiohttp.ClientResponse) -> None:
        status, value = response.status, str(self.reference)
        if status < 400:
            return
        if status == 404:
            raise NotFound(f"{self.reference.registry} has no such image", field="image", value=value, fix="check name and tag")
        if status in (401, 403):
            fix = f"`docker login {self.reference.registry}`, or check the name: some registries do not tell what is absent"
            raise Denied(f"{self.reference.registry} refuses the image", field="image", value=value, fix=fix, reason="registry")
        if status == 429 or status >= 500:
            fix = "try again later; many registries let those who are logged in ask more often (`docker login`)"
            error = Unavailable(f"{self.reference.registry} answers {status}", field="image", value=value, fix=fix, reason="registry_busy")
            retry = response.headers.get("Retry-After", "")
            raise _Later(error, float(min(int(retry), 60)) if retry.isdigit() else 0.0)
        fix = "check the image's name, and that a registry answers there"
        raise NodeError(f"{self.reference.registry} answers {status}", field="image", value=value, fix=fix, retryable=False)

    async def _authorize(self, challenge: str) -> None:
        """Answer a challenge: basic, or a token of the realm that it names."""
        scheme, _, rest = challenge.partition(" ")
        if self._login is None:
            self._login = await credentials(self.reference.registry, self._environ)
        login = self._login
        if scheme.lower() == "basic":
            if not login.user:
                fix = f"`docker login {self.reference.registry}` on the node"
                raise Denied("the registry wants a login", field="image", value=str(self.reference), fix=fix, reason="registry")
            self._authorization = _basic(login)
            return
        fields = {key.lower(): value for key, value in _CHALLENGE.findall(rest)}
        realm = fields.get("realm", "")
        parts = urlsplit(realm)
        if scheme.lower() != "bearer" or not (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.netloc))):
            fix = "pull it where it can be pulled, and import it there (`dsec layer pull`, `dsec layer push`)"
            raise Denied(
                f"the registry asks for a login of a kind that is not known: {challenge[:100]}",
                field="image",
                value=str(self.reference),
                fix=fix,
                reason="registry",
            )
        asked = {"service": fields.get("service", ""), "scope": fields.get("scope") or f"repository:{self.reference.repository}:pull"}
        session = self._open()
        if login.token:
            form = asked | {"grant_type": "refresh_token", "refresh_token": login.token, "client_id": "dsec"}
            request = session.post(realm, data=form)
        else:
            request = session.get(realm, params=asked, headers={"Authorization": _basic(login)} if login.user else {})
        async with request as response:
            self._check(response)
            try:
                answer = json.loads(await response.content.read(MAX_DOCUMENT))
                token = str(answer.get("token") or answer["access_token"])
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                fix = f"`docker login {self.reference.registry}`, or try again"
                text = f"the registry's login service at {realm} gives no token"
                raise NodeError(text, field="image", value=str(self.reference), fix=fix) from error
        self._authorization = f"Bearer {token}"


class _Later(Exception):
    """To be tried again, not before ``pause`` seconds."""

    def __init__(self, error: DsecError, pause: float) -> None:
        super().__init__(str(error))
        self.error, self.pause = error, pause


class _Attempt:
    """One of several: an error that may pass is kept here unless it is the last one's."""

    def __init__(self, last: bool, patient: bool, reference: Reference) -> None:
        self.last, self.patient, self.reference = last, patient, reference
        self.error: BaseException | None = None
        self.pause = 0.0

    async def __aenter__(self) -> None:
        self.error = None

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        import aiohttp

        if error is None:
            return False
        if isinstance(error, _Later):
            self.pause = error.pause
            shown: DsecError = error.error
        elif isinstance(error, Unavailable):
            shown = error
        elif isinstance(error, (aiohttp.ClientError, TimeoutError, ConnectionError)) and not isinstance(error, DsecError):
            shown = _unreachable(self.reference, error)
            self.last = self.last or not self.patient
        else:
            return False
        if self.last:
            raise shown from error
        self.error = error
        return True


def _unreachable(reference: Reference, error: BaseException) -> Unavailable:
    return Unavailable(
        f"{reference.registry} cannot be reached: {words(error)}",
        field="image",
        value=str(reference),
        reason="registry",
        fix="check this node's network and HTTPS_PROXY; without a way there, `dsec layer pull` and `push` it on a node that has one",
    )


class _Feed:
    """The writing end of a blob's pipe. When its reader has given up the rest is only hashed: whose fault it was depends on that."""

    def __init__(self, fd: int) -> None:
        self.done = 0
        self._fd = fd
        self._hash = hashlib.sha256()
        self._read = True

    def take(self, piece: bytes) -> None:
        self._hash.update(piece)
        self.done += len(piece)
        view = memoryview(piece)
        while view and self._read:
            try:
                view = view[os.write(self._fd, view) :]
            except BrokenPipeError:
                self._read = False

    @property
    def digest(self) -> str:
        return "sha256:" + self._hash.hexdigest()


def is_loopback(host: str) -> bool:
    """``localhost`` or an address of this machine's loopback, with or without a port."""
    name = urlsplit(f"//{host}").hostname or ""
    if name == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return False


def _basic(login: Login) -> str:
    return "Basic " + base64.b64encode(f"{login.user}:{login.password}".encode()).decode()


async def credentials(registry: str, environ: Mapping[str, str]) -> Login:
    """What Docker's config.json has for a registry: its own entry, or what the named credential helper says. Nothing is an empty login.

    Raises `InvalidRequest` for a file that cannot be read.
    """
    directory = environ.get("DOCKER_CONFIG") or (f"{environ['HOME']}/.docker" if environ.get("HOME") else "")
    path = Path(directory or "/nonexistent") / "config.json"
    try:
        config = json.loads(await tools.read(path))
        if not isinstance(config, dict):
            raise TypeError("not a map")
    except (NodeError, OSError):
        return Login()
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"Docker's configuration cannot be read: {error}", field="image", value=str(path)) from None
    keys = ("https://index.docker.io/v1/", "index.docker.io", DOCKER_HUB) if registry == DOCKER_HUB else (registry, f"https://{registry}")
    helpers = config.get("credHelpers") or {}
    auths = config.get("auths") or {}
    for key in keys:
        if helper := helpers.get(key) or (config.get("credsStore") if key in auths and not auths[key].get("auth") else None):
            return await _ask_helper(str(helper), key, environ)
    for key in keys:
        entry = auths.get(key)
        if not isinstance(entry, dict):
            continue
        user, _, password = base64.b64decode(entry.get("auth") or "").decode(errors="replace").partition(":")
        return Login(
            user or str(entry.get("username", "")),
            password.rstrip("\0") or str(entry.get("password", "")),
            str(entry.get("identitytoken", "")),
        )
    return Login()


async def _ask_helper(name: str, server: str, environ: Mapping[str, str]) -> Login:
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise InvalidRequest("not a credential helper's name", field="image", value=name)
    program = tools.find(f"docker-credential-{name}", f"docker-credential-{name}")
    try:
        answer = json.loads(await tools.run([program, "get"], stdin=server.encode(), env=dict(environ)))
        user, secret = str(answer["Username"]), str(answer["Secret"])
    except NodeError:
        return Login()  # it has nothing for this registry
    except (ValueError, KeyError, TypeError) as error:
        raise NodeError(f"the credential helper {name} answers nonsense", retryable=False) from error
    return Login(token=secret) if user == "<token>" else Login(user, secret)
