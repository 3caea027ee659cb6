"""Pieces of an object, each as soon as it is there, from a web server that may do anything, and from a directory."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsec.errors import NotFound, Unavailable
from dsec.layers import ranges

DATA = bytes(range(256)) * 64
SPANS = ((1000, 300), (1300, 5000), (6300, 10))
WANT = [DATA[offset : offset + length] for offset, length in SPANS]
Answer = Callable[[socket.socket, int, int], None]


class Web:
    """A web server of one object. ``answer(connection, first, last)`` may be replaced; ``asked``: how often, by so many ``connections``."""

    def __init__(self) -> None:
        self.answer: Answer = plain
        self.asked = self.connections = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/some/where"
        self.open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.connections += 1
            self.open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        pending = b""
        while True:
            try:
                more = connection.recv(4096)
            except OSError:
                return
            if not more:
                return
            pending += more
            if b"\r\n\r\n" in pending:
                head, _, pending = pending.partition(b"\r\n\r\n")
                assert head.startswith(b"GET /some/where/layers/x/data HTTP/1.1\r\n")
                first, _, last = head.partition(b"Range: bytes=")[2].split()[0].partition(b"-")
                self.asked += 1
                self.answer(connection, int(first), int(last))

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closed by a test
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for connection in self.open:
            connection.close()


def head(first: int, last: int, *more: str) -> bytes:
    range_ = f"Content-Range: bytes {first}-{last}/{len(DATA)}"
    return "\r\n".join(("HTTP/1.1 206 Partial Content", range_, f"content-length: {last + 1 - first}", *more, "", "")).encode()


def plain(connection: socket.socket, first: int, last: int) -> None:
    connection.sendall(head(first, last) + DATA[first : last + 1])


@pytest.fixture
def web() -> Iterator[Web]:
    made = Web()
    yield made
    made.close()


class Other:
    """In obstore's place."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, offset: int, length: int) -> bytes:
        self.asked += 1
        return DATA[offset : offset + length]


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Other:
    made = Other()
    monkeypatch.setattr(ranges, "_through", lambda _store, _path: made)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return made


def source(web: Web, timeout: float = 20.0) -> ranges.Pieces:
    return ranges.pieces(web.url, "layers/x/data", None, timeout)


def got(source: ranges.Pieces, spans: tuple[ranges.Span, ...] = SPANS) -> list[bytes]:
    return [bytes(piece) for piece in source(spans)]


def test_neighbouring_pieces_come_by_one_request_and_the_next_ones_by_the_same_connection(web: Web, other: Other) -> None:
    """Any sizes, beyond the buffer too, and with a gap between them."""
    from_web = source(web)
    assert got(from_web) == WANT
    assert got(from_web, ((0, 5), (10, 16_000))) == [DATA[:5], DATA[10:16_010]]
    assert (web.asked, web.connections, other.asked) == (2, 1, 0)


def test_a_piece_is_there_before_the_next_has_arrived(web: Web, other: Other) -> None:
    """Whoever waits for the first does not wait for the others."""
    go = threading.Event()

    def slow(connection: socket.socket, first: int, last: int) -> None:
        connection.sendall(head(first, last) + DATA[first : first + 300])
        assert go.wait(20)
        connection.sendall(DATA[first + 300 : last + 1])

    web.answer = slow
    pieces = source(web)(SPANS)
    assert bytes(next(pieces)) == WANT[0]
    go.set()
    assert [bytes(piece) for piece in pieces] == WANT[1:]


def test_a_connection_that_the_server_ended_meanwhile_is_made_anew(web: Web, other: Other) -> None:
    """Nobody sees that it was gone."""
    from_web = source(web)
    assert got(from_web) == WANT
    for connection in web.open:
        connection.shutdown(socket.SHUT_RDWR)
    assert got(from_web) == WANT
    assert web.connections == 2


def test_a_connection_that_was_left_in_the_middle_is_not_used_again(web: Web, other: Other) -> None:
    """What was not taken from it would be the next answer."""
    from_web = source(web)
    pieces = from_web(SPANS)
    next(pieces)
    pieces.close()
    assert got(from_web) == WANT
    assert web.connections == 2


def test_a_server_that_closes_after_each_answer_gets_a_connection_for_each(web: Web, other: Other) -> None:
    """It says so, and nothing is asked twice."""
    web.answer = lambda connection, first, last: connection.sendall(head(first, last, "Connection: close") + DATA[first : last + 1])
    from_web = source(web)
    assert got(from_web) == got(from_web) == WANT
    assert (web.asked, web.connections) == (2, 2)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 16384\r\n\r\n" + DATA,
        b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 1000-6309/16384\r\nTransfer-Encoding: chunked\r\n\r\n",
        head(1000, 6308) + DATA[1000:6309],
        head(999, 6308) + DATA[999:6309],
        b"HTTP/1.1 206 Partial Content\r\nX-Long: " + b"x" * 9000,
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    ],
    ids=["all", "elsewhere", "chunked", "short", "another", "endless", "ssh"],
)
def test_what_is_not_plainly_the_range_is_left_to_obstore(web: Web, other: Other, answer: bytes) -> None:
    """It follows redirections, and has the words for what is wrong."""
    web.answer = lambda connection, _first, _last: connection.sendall(answer)
    assert got(source(web)) == WANT
    assert other.asked == 1


def test_a_proxy_is_obstores_business(web: Web, other: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows which hosts are to be asked through it."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert got(source(web)) == WANT
    assert (other.asked, web.asked) == (1, 0)


def test_a_server_that_breaks_off_or_says_nothing_cannot_be_reached(web: Web, other: Other) -> None:
    """What had arrived before was given."""

    def broken(connection: socket.socket, first: int, last: int) -> None:
        connection.sendall(head(first, last) + DATA[first : first + 400])
        connection.shutdown(socket.SHUT_RDWR)

    web.answer = broken
    pieces = source(web)(SPANS)
    assert bytes(next(pieces)) == WANT[0]
    with pytest.raises(Unavailable, match="cannot be reached: the connection was closed"):
        next(pieces)
    web.answer = lambda *_: None
    with pytest.raises(Unavailable, match="cannot be reached: it does not answer"):
        got(source(web, 0.2))
    web.close()
    with pytest.raises(Unavailable, match="cannot be reached"):
        got(source(web))


def test_a_directorys_pieces_end_where_its_file_does(tmp_path: Path, other: Other) -> None:
    """A file that is not there is `NotFound`; one that is too short gives less than was asked for, which the loader finds wrong."""
    from_directory = ranges.pieces(f"file://{tmp_path}", "x/data", None, 5.0)
    with pytest.raises(NotFound):
        got(from_directory)
    (tmp_path / "x").mkdir()
    (tmp_path / "x/data").write_bytes(DATA)
    assert got(from_directory) == WANT
    assert got(from_directory, ((16_380, 10), (16_390, 10))) == [DATA[16_380:], b""]


def test_so_many_connections_are_kept_for_later(web: Web, other: Other) -> None:
    """Six read at one time: what was needed only then is closed."""
    from_web = source(web)
    for connections in (6, 6 + 6 - ranges.KEPT):
        reading = [from_web(SPANS) for _ in range(6)]
        first = [bytes(next(pieces)) for pieces in reading]
        assert first == WANT[:1] * 6
        assert [[bytes(piece) for piece in pieces] for pieces in reading] == [WANT[1:]] * 6
        assert web.connections == connections
