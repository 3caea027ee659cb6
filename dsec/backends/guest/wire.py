"""The guest wire: frames between a node and Aether, the agent inside a sandbox. Standard library only; the C side is src/frame.c.

A connection is a Unix stream (container) or a virtio channel (VM). All integers are little-endian. A frame is

    u32 length | u16 type | u16 zero | u32 request | body (length bytes, at most 1 MiB)

``request`` is chosen by the node; every answer carries it, so many requests run at one time on one connection. A *text* is
``u32 length | bytes | NUL`` with no NUL inside. An *op* is the 16 raw bytes of an operation's id, chosen by the caller.

| type | way | body |
|---|---|---|
| HELLO | -> | u16 proto, u16 proto_min, u32 features, u64 edge generation |
| HELLO | <- | the same, with the highest generation seen, then u32 its pid inside |
| START | -> | op, u32 flags (`Start`), u32 timeout_ms (0 none), u32 head, u32 tail, u16 rows, u16 cols, text user, text cwd, u32 argc,
u32 envc, argc + envc texts |
| STATUS | <- | status. Answers START once exec is known to have worked; the same START again is answered by where the operation stands |
| WAIT | -> | op. Answered at the operation's end by CAPTURE... DONE; START with NOTIFY is a START and a WAIT |
| CAPTURE | <- | u8 stream (1, 2), u8 part (0 head, 1 tail), data: pieces of large captured output, in order |
| DONE | <- | status, u32 lengths of stdout head, stdout tail, stderr head, stderr tail, then these bytes (empty after CAPTURE) |
| OUTPUT | -> | op, u64 offset x 2, u64 credit x 2, u8 view (may be left out): follow both streams from absolute offsets. The newest
reader holds the streams (the command waits for it); the others and those with ``view`` look on and may see jumps; eight at most |
| CREDIT | -> | u64 x 2: absolute offsets up to which the reader takes bytes; request is the OUTPUT's |
| CHUNK | <- | u8 stream, 7 zero, u64 offset, data <= 128 KiB; request is the OUTPUT's. A jump in offsets is dropped output |
| END | <- | u64 x 2: total bytes of both streams; the OUTPUT is over |
| DETACH | -> | empty; the OUTPUT is over, no answer |
| INPUT | -> | op, u64 offset, u8 eof, data <= 256 KiB |
| ACCEPTED | <- | u64: offset up to which stdin took bytes; the node sends again from there |
| SIGNAL | -> | op, u32 signum, u8 tree |
| RESIZE | -> | op, u16 rows, u16 cols |
| OK | <- | empty: done (SIGNAL, RESIZE, STOP, LISTEN) |
| OPS | both | ->: empty; <-: u32 n, n x status |
| | | START with SERVICE: argv[0] names a service of the guest's own (``dsec:connect tcp PORT``, ``dsec:connect unix PATH``, ``dsec:pack``,
``dsec:unpack``, ``dsec:watch``); stdin, output, credit and signals are as a command's. One whose reader stays away for 10 s is ended.
``dsec:listen tcp PORT`` listens on the loopback until it is signalled; its output is the ids of the operations that connections become |
| FILE | -> | u8 verb, u8 flags (1 create, 2 truncate, 4 recursive), u16 0, u32 mode, u64 offset, u32 length, text path, text target,
text user, data |
| FILE | <- | u8 flags (1 end), u32 written, u32 n, n x stat, data |
| ERROR | <- | u16 code, u32 errno (0 none), text field, text message |
| STOP | -> | empty: kill everything in the pid namespace and exit |
| LISTEN | -> | empty; a listening socket comes along (SCM_RIGHTS). Answered by OK; from then on it is called there, and all its connections
are closed, this one last |

*status*: op, u8 ended, u8 flags (1 timed out, 2 OOM, 4 ended by a signal, 8 session, 16 terminal, 32 run), u16 0,
i32 exit code or signal (-1 while running), u32 pid, u64 microseconds, u64 stdout total, u64 stderr total.
*stat*: u8 kind, u32 mode, u32 uid, u32 gid, u64 size, i64 mtime in ns, text name, text target.

A START with *session* makes a shell whose stdin is Aether's; one with *run* gives that shell a command: its cwd names the session's op
in hex, its first argument is the line for the shell, and its output and end are the command's own (src/session.c).

HELLO is the first frame of a connection; the highest generation wins and connections of lower ones are closed. Changes of the
protocol raise PROTO; a node speaks N and N-1, since the agent in a running sandbox cannot be replaced.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple

PROTO = 1
PROTO_MIN = 1
MAX_FRAME = 1 << 20
MAX_DATA = 256 << 10

HEADER = struct.Struct("<IHHI")
HELLO = struct.Struct("<HHIQ")
HELLO_REPLY = struct.Struct("<HHIQI")
STATUS = struct.Struct("<16sBBHiIQQQ")
CHUNK = struct.Struct("<B7xQ")
OFFSETS = struct.Struct("<QQ")
_START = struct.Struct("<16sIIIIHH")
_OUTPUT = struct.Struct("<16sQQQQ")
_INPUT = struct.Struct("<16sQB")
_SIGNAL = struct.Struct("<16sIB")
_RESIZE = struct.Struct("<16sHH")
_FILE = struct.Struct("<BBHIQI")
_FILE_REPLY = struct.Struct("<BII")
_STAT = struct.Struct("<BIIIQq")
_ERROR = struct.Struct("<HI")
_LENGTHS = struct.Struct("<IIII")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Type(enum.IntEnum):
    """Frame types; numbers never change their meaning."""

    HELLO = 1
    START = 2
    STATUS = 3
    WAIT = 4
    CAPTURE = 5
    DONE = 6
    OUTPUT = 7
    CREDIT = 8
    CHUNK = 9
    END = 10
    DETACH = 11
    INPUT = 12
    ACCEPTED = 13
    SIGNAL = 14
    OK = 15
    RESIZE = 16
    OPS = 17
    FILE = 18
    ERROR = 19
    STOP = 20
    LISTEN = 21


class Code(enum.IntEnum):
    """Error codes of ERROR."""

    INVALID = 1
    NOT_FOUND = 2
    CONFLICT = 3
    DENIED = 4
    BUSY = 5
    SANDBOX = 6
    STALE = 7
    UNSUPPORTED = 8
    REUSED = 9


class Start(enum.IntFlag):
    """Flags of START."""

    STDIN = 1
    TTY = 2
    BACKGROUND = 4
    STREAM = 8
    NOTIFY = 16
    SERVICE = 32
    SESSION = 64
    RUN = 128
    WALL = 256  # its time-out goes on while the sandbox stands still


VERBS = {
    "read": 1,
    "write": 2,
    "stat": 3,
    "list": 4,
    "mkdir": 5,
    "remove": 6,
    "rename": 7,
    "chmod": 8,
    "chown": 9,
    "symlink": 10,
    "link": 11,
    "touch": 12,
}
_KIND_NAMES = {"f": "file", "d": "dir", "l": "link", "p": "fifo", "s": "socket", "c": "char", "b": "block", "?": "gone"}
KINDS = {ord(letter): name for letter, name in _KIND_NAMES.items()}


class WireError(ValueError):
    """A frame that the protocol does not allow; ``field`` names what is wrong where the caller can mend it."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class Status(NamedTuple):
    op: str
    ended: bool
    timed_out: bool
    oom: bool
    signalled: bool
    code: int
    pid: int
    micros: int
    totals: tuple[int, int]
    kind: str = ""  # session, terminal, run


class Done(NamedTuple):
    status: Status
    parts: tuple[bytes, bytes, bytes, bytes]  # stdout head, stdout tail, stderr head, stderr tail


class FileStat(NamedTuple):
    kind: str
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    name: str
    target: str


class File(NamedTuple):
    eof: bool
    written: int
    stats: tuple[FileStat, ...]
    data: bytes


class Error(NamedTuple):
    code: int
    errno: int
    field: str
    message: str


# ---- node -> guest


def frame(kind: int, request: int, body: bytes = b"") -> bytes:
    """A whole frame. Raises `WireError` when the body is larger than 1 MiB."""
    if len(body) > MAX_FRAME:
        raise WireError(f"{len(body)} bytes in one frame, {MAX_FRAME} are allowed")
    return HEADER.pack(len(body), kind, 0, request) + body


def text(value: str, field: str = "") -> bytes:
    """A text; lone surrogates stand for raw bytes, as in os.fsencode. Raises `WireError` for a NUL."""
    try:
        raw = value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise WireError("holds a character that cannot be encoded", field) from None
    if b"\0" in raw:
        raise WireError("holds a NUL byte", field)
    return _U32.pack(len(raw)) + raw + b"\0"


def op_bytes(op: str) -> bytes:
    """The 16 bytes of an operation id. Raises `WireError` unless it is 32 hex digits."""
    try:
        raw = bytes.fromhex(op)
    except ValueError:
        raw = b""
    if len(raw) != 16 or len(op) != 32:
        raise WireError("an operation id is 32 hex digits", "op")
    return raw


def _u32(value: int, field: str) -> int:
    if not 0 <= value < 1 << 32:
        raise WireError("out of range", field)
    return value


def hello(generation: int) -> bytes:
    return HELLO.pack(PROTO, PROTO_MIN, 0, generation)


def start(
    op: str,
    argv: Iterable[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str = "",
    user: str = "",
    timeout_ms: int = 0,
    flags: int = 0,
    head: int = 64 << 10,
    tail: int = 256 << 10,
    rows: int = 24,
    cols: int = 80,
) -> bytes:
    """Body of START. Raises `WireError` with the field at fault."""
    args = [text(arg, "argv") for arg in argv]
    if not args or len(args[0]) == 5:
        raise WireError("no command", "argv")
    pairs = []
    for name, value in (env or {}).items():
        if not name or "=" in name:
            raise WireError("not a name of an environment variable", "env")
        pairs.append(text(f"{name}={value}", "env"))
    for field, size in (("head", head), ("tail", tail)):
        if not 0 <= size <= 1 << 20:
            raise WireError("at most 1 MiB is kept of each end of a stream", field)
    for field, size in (("rows", rows), ("cols", cols)):
        if not 0 <= size < 1 << 16:
            raise WireError("out of range", field)
    fixed = _START.pack(op_bytes(op), flags, _u32(timeout_ms, "timeout_ms"), head, tail, rows, cols)
    body = b"".join((fixed, text(user, "user"), text(cwd, "cwd"), _U32.pack(len(args)), _U32.pack(len(pairs)), *args, *pairs))
    if len(body) > MAX_FRAME:
        raise WireError(f"command and environment take {len(body)} bytes, {MAX_FRAME} are allowed; put the data into a file", "argv")
    return body


def output(op: str, offsets: tuple[int, int], credit: tuple[int, int], view: bool = False) -> bytes:
    if not all(0 <= number < 1 << 64 for number in (*offsets, *credit)):
        raise WireError("out of range", "offset")
    return _OUTPUT.pack(op_bytes(op), *offsets, *credit) + (b"\1" if view else b"")


def input_(op: str, offset: int, data: bytes, eof: bool) -> bytes:
    if len(data) > MAX_DATA:
        raise WireError(f"at most {MAX_DATA} bytes in one piece", "data")
    if not 0 <= offset < 1 << 63:
        raise WireError("out of range", "offset")
    return _INPUT.pack(op_bytes(op), offset, eof) + data


def signal(op: str, signum: int, tree: bool) -> bytes:
    return _SIGNAL.pack(op_bytes(op), _u32(signum, "signum"), tree)


def resize(op: str, rows: int, cols: int) -> bytes:
    for field, size in (("rows", rows), ("cols", cols)):
        if not 0 <= size < 1 << 16:
            raise WireError("out of range", field)
    return _RESIZE.pack(op_bytes(op), rows, cols)


def file(
    verb: str,
    path: str,
    *,
    offset: int = 0,
    length: int = 0,
    data: bytes = b"",
    create: bool = False,
    truncate: bool = False,
    recursive: bool = False,
    target: str = "",
    mode: int = 0o644,
    user: str = "",
) -> bytes:
    """Body of FILE. Raises `WireError` with the field at fault."""
    if verb not in VERBS:
        raise WireError("one of " + ", ".join(VERBS), "verb")
    if len(data) > MAX_DATA:
        raise WireError(f"at most {MAX_DATA} bytes in one piece", "data")
    if not 0 <= length <= MAX_DATA:
        raise WireError(f"at most {MAX_DATA}", "length")
    if not 0 <= offset < (1 << 63) - MAX_DATA - 1:
        raise WireError("out of range", "offset")
    flags = create | truncate << 1 | recursive << 2
    fixed = _FILE.pack(VERBS[verb], flags, 0, mode & 0o7777, offset, length)
    return b"".join((fixed, text(path, "path"), text(target, "target"), text(user, "user"), data))


# ---- guest -> node. What comes from a guest is checked as a stranger's.


def header(buffer: bytes | bytearray | memoryview, at: int = 0) -> tuple[int, int, int]:
    """(length, type, request) of the frame at ``at``. Raises `WireError`."""
    length, kind, zero, request = HEADER.unpack_from(buffer, at)
    if length > MAX_FRAME or zero or not 1 <= kind <= 20:
        raise WireError("not a frame of this protocol")
    return length, kind, request


def _text(body: bytes, at: int) -> tuple[str, int]:
    (n,) = _U32.unpack_from(body, at)
    end = at + 4 + n
    if end >= len(body) or body[end]:
        raise WireError("a text runs over its frame")
    return body[at + 4 : end].decode("utf-8", "surrogateescape"), end + 1


def status(body: bytes, at: int = 0) -> Status:
    op, ended, flags, _, code, pid, micros, out, err = STATUS.unpack_from(body, at)
    kind = "session" if flags & 8 else "run" if flags & 32 else "terminal" if flags & 16 else ""
    return Status(op.hex(), bool(ended), bool(flags & 1), bool(flags & 2), bool(flags & 4), code, pid, micros, (out, err), kind)


def done(body: bytes) -> Done:
    """Raises `WireError` when the lengths do not add up."""
    lengths = _LENGTHS.unpack_from(body, STATUS.size)
    at = STATUS.size + _LENGTHS.size
    if at + sum(lengths) != len(body):
        raise WireError("a DONE whose lengths do not add up")
    parts = []
    for n in lengths:
        parts.append(body[at : at + n])
        at += n
    return Done(status(body), (parts[0], parts[1], parts[2], parts[3]))


def capture(body: bytes) -> tuple[int, bytes]:
    """(index into `Done.parts`, data) of a CAPTURE."""
    if len(body) < 2 or body[0] not in (1, 2) or body[1] > 1:
        raise WireError("not a CAPTURE")
    return (body[0] - 1) * 2 + body[1], body[2:]


def ops(body: bytes) -> tuple[Status, ...]:
    (n,) = _U32.unpack_from(body)
    if 4 + n * STATUS.size != len(body):
        raise WireError("an OPS whose length does not add up")
    return tuple(status(body, 4 + i * STATUS.size) for i in range(n))


def _shown(name: str) -> str:
    """A name as a message can carry it: bytes that are not UTF-8 are spelled as \\xNN, so one odd name does not hide its directory."""
    return name if name.isascii() else name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def file_reply(body: bytes) -> File:
    flags, written, count = _FILE_REPLY.unpack_from(body)
    at = _FILE_REPLY.size
    if count * _STAT.size > len(body):
        raise WireError("more entries than fit")
    stats = []
    for _ in range(count):
        kind, mode, uid, gid, size, mtime = _STAT.unpack_from(body, at)
        if kind not in KINDS:
            raise WireError("an unknown kind of file")
        name, at = _text(body, at + _STAT.size)
        target, at = _text(body, at)
        stats.append(FileStat(KINDS[kind], mode, uid, gid, size, mtime, _shown(name), _shown(target)))
    return File(bool(flags & 1), written, tuple(stats), body[at:])


def error(body: bytes) -> Error:
    code, number = _ERROR.unpack_from(body)
    field, at = _text(body, _ERROR.size)
    message, _ = _text(body, at)
    return Error(code, number, field, message)


def accepted(body: bytes) -> int:
    return int(_U64.unpack(body)[0])


def decode(kind: int, body: bytes) -> object:
    """The body of any frame that a guest sends, but CHUNK (read in place by the link). Raises `WireError` and nothing else."""
    try:
        match kind:
            case Type.STATUS:
                return status(body)
            case Type.DONE:
                return done(body)
            case Type.CAPTURE:
                return capture(body)
            case Type.ERROR:
                return error(body)
            case Type.FILE:
                return file_reply(body)
            case Type.OPS:
                return ops(body)
            case Type.ACCEPTED:
                return accepted(body)
            case Type.END:
                return OFFSETS.unpack(body)
            case Type.HELLO:
                return HELLO_REPLY.unpack(body)
            case Type.OK:
                return None
    except struct.error as error_:
        raise WireError("a frame that is too short or too long") from error_
    raise WireError(f"a guest does not send frames of type {kind}")
