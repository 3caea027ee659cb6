"""Pieces of one object of a store, for the loader's threads, whose readers wait: plain HTTP through sockets of our own, a directory by
preadv, everything else through obstore (whose ways lead through other threads, and through fresh memory for each answer).

All give neighbouring pieces one by one, each as soon as it is there: whoever waits for the first does not wait for the others. A piece is
good until the next one is asked for. Nothing is checked here: the loader knows what each piece must be. An answer over HTTP that is not
plainly the range that was asked for is left to obstore, which knows what to do or how to say what is wrong; so are proxies.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from dsec.errors import Unavailable
from dsec.layers import objects
from dsec.layers.manifest import CHUNK

Span = tuple[int, int]  # offset, length
Given = Generator[Any, None, None]
Pieces = Callable[[Sequence[Span]], Given]  # of neighbouring spans, in order; what it gives has the buffer protocol

CONNECT_S = 3.0
KEPT = 4  # idle connections, or buffers, of one blob
_HEAD = 8192  # bytes of an answer's head at most
_ANSWER = re.compile(rb"HTTP/1\.1 206 [^\r\n]*\r\n")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*\r\n", re.IGNORECASE)
_BEGIN = re.compile(rb"\r\ncontent-range:[ \t]*bytes (\d+)-", re.IGNORECASE)
_OTHER = re.compile(rb"\r\n(transfer-encoding|content-encoding|connection:[ \t]*close)", re.IGNORECASE)
_PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")


def pieces(url: str, path: str, store: Any, timeout: float) -> Pieces:
    """How to get pieces of the object at ``path`` of the store ``url``, which is ``store`` to obstore. ``timeout``: seconds that it may be
    silent. What is returned raises the project's errors as `objects.errors` does, and may be called by several threads."""
    plain = whole(_through(store, path))
    parts = urlsplit(url)
    if parts.scheme == "file":
        return _Directory(os.path.join(url.removeprefix("file://"), path))
    if parts.scheme == "http" and not (parts.username or parts.query or any(map(os.environ.get, _PROXIES))):
        return _Web(url, path, plain, timeout)
    return plain


def whole(get: Callable[[int, int], Any]) -> Pieces:
    """Pieces by way of one call that gives all of a range."""

    def given(spans: Sequence[Span]) -> Given:
        start = spans[0][0]
        data = memoryview(get(start, sum(spans[-1]) - start))
        for offset, length in spans:
            yield data[offset - start : offset - start + length]

    return given


def _through(store: Any, path: str) -> Callable[[int, int], Any]:
    import obstore

    def get(offset: int, length: int) -> Any:
        with objects.errors(path):
            return obstore.get_range(store, path, start=offset, length=length)

    return get


class _Directory:
    def __init__(self, path: str) -> None:
        self._path = path
        self._idle: list[bytearray] = []

    def __call__(self, spans: Sequence[Span]) -> Given:
        try:
            buffer = self._idle.pop()
        except IndexError:
            buffer = bytearray(CHUNK)
        try:
            with objects.errors(self._path), open(self._path, "rb", buffering=0) as file:
                for offset, length in spans:
                    if length > len(buffer):
                        buffer = bytearray(length)
                    view, done = memoryview(buffer)[:length], 0
                    while done < length and (got := os.preadv(file.fileno(), [view[done:]], offset + done)):
                        done += got
                    yield view[:done]
        finally:
            if len(self._idle) < KEPT:
                self._idle.append(buffer)


class _Odd(Exception):
    """An answer that is no plain range."""


class _Web:
    """Connections are kept, each with its buffer: the one that was used last goes first."""

    def __init__(self, url: str, path: str, otherwise: Pieces, timeout: float) -> None:
        parts = urlsplit(url)
        self._url = url
        self._address = (parts.hostname or "", parts.port or 80)
        self._request = f"GET {parts.path.rstrip('/')}/{path} HTTP/1.1\r\nHost: {parts.netloc}\r\nRange: bytes=".encode() + b"%d-%d\r\n\r\n"
        self._otherwise = otherwise
        self._timeout = timeout
        self._idle: list[_Connection] = []

    def __call__(self, spans: Sequence[Span]) -> Given:
        at = spans[0][0]
        try:
            connection = self._asked(at, sum(spans[-1]))
        except _Odd:
            yield from self._otherwise(spans)
            return
        good = False
        try:
            for offset, length in spans:
                with self._errors():
                    if offset > at:
                        connection.take(offset - at)
                    piece = connection.take(length)
                at = offset + length
                yield piece
            good = connection.keep
        finally:
            if good and len(self._idle) < KEPT:
                self._idle.append(connection)
            else:
                connection.close()

    def _asked(self, start: int, end: int) -> _Connection:
        """A connection whose next bytes are the range's. Raises `_Odd`, `Unavailable`."""
        request = self._request % (start, end - 1)
        with self._errors():
            while True:
                try:
                    connection, fresh = self._idle.pop(), False
                except IndexError:
                    connection, fresh = _Connection(self._address, self._timeout), True
                try:
                    connection.ask(request, start, end - start)
                except ConnectionError:  # servers end connections that they have not heard of for a while
                    connection.close()
                    if fresh:
                        raise
                except BaseException:
                    connection.close()
                    raise
                else:
                    return connection

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = "it does not answer" if isinstance(error, BlockingIOError) else str(error)  # SO_RCVTIMEO
            raise Unavailable(f"the layer store cannot be reached: {why}", field=objects.FIELD, value=self._url) from error


class _Connection:
    """One request at a time. ``keep``: it can be used for another when all bytes are taken."""

    def __init__(self, address: tuple[str, int], timeout: float) -> None:
        self._sock = socket.create_connection(address, min(timeout, CONNECT_S))
        self._sock.settimeout(None)  # the kernel's own limits need no poll before each call
        limit = struct.pack("@ll", int(timeout), int(timeout % 1 * 1e6))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = memoryview(bytearray(_HEAD + CHUNK))
        self._at = self._end = 0  # of what was received and not taken
        self.keep = True

    def ask(self, request: bytes, start: int, length: int) -> None:
        """Raises `_Odd`, `OSError`."""
        self._sock.sendall(request)
        self._at = self._end = 0
        while (close := bytes(self._buffer[: self._end]).find(b"\r\n\r\n")) < 0:
            if self._end == _HEAD:
                raise _Odd
            got = self._sock.recv_into(self._buffer[self._end : _HEAD])
            if not got:
                raise ConnectionResetError("the connection was closed")
            self._end += got
        head = bytes(self._buffer[: close + 2])
        size, begin, other = _LENGTH.search(head), _BEGIN.search(head), _OTHER.search(head)
        if not _ANSWER.match(head) or size is None or int(size[1]) != length or begin is None or int(begin[1]) != start:
            raise _Odd
        if other is not None and not other[1].lower().startswith(b"connection"):
            raise _Odd
        self.keep = other is None
        self._at = close + 4

    def take(self, length: int) -> memoryview:
        """The next so many bytes. Raises `OSError`."""
        if self._at + length > len(self._buffer):
            rest = bytes(self._buffer[self._at : self._end])
            if length > len(self._buffer):
                self._buffer = memoryview(bytearray(length))
            self._buffer[: len(rest)] = rest
            self._at, self._end = 0, len(rest)
        until = self._at + length
        while self._end < until:
            got = self._sock.recv_into(self._buffer[self._end : until], 0, socket.MSG_WAITALL)
            if not got:
                raise ConnectionResetError("the connection was closed")
            self._end += got
        piece = self._buffer[self._at : until]
        self._at = until
        if self._at == self._end:
            self._at = self._end = 0
        return piece

    def close(self) -> None:
        self._sock.close()
