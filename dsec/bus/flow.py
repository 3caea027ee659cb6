"""Credit flow control for output and files: pure, absolute offsets, so that any message may be lost or come twice.

The reader says "you may send up to absolute offset N" and repeats it each second; the writer never sends past N. A lost grant
delays by at most a second, a duplicate or an old one changes nothing, and a writer without a reader stops by itself. (The idea of
absolute credit is QUIC's MAX_STREAM_DATA, RFC 9000 section 4.1.)
"""

from __future__ import annotations

from dsec.errors import InvalidRequest

WINDOW = 4 * 1024 * 1024  # bytes in flight: 128 KiB chunks at a round trip of 10 ms still move 400 MiB/s
RESEND = 1.0  # seconds between repeated grants


class SendWindow:
    """The writer's side: ``sent`` and ``limit`` are absolute byte offsets."""

    __slots__ = ("limit", "sent")

    def __init__(self, limit: int = 0, sent: int = 0) -> None:
        self.sent = sent
        self.limit = limit

    @property
    def room(self) -> int:
        """Bytes that may be sent now."""
        return max(0, self.limit - self.sent)

    def grant(self, limit: int) -> bool:
        """Take a grant; True when it opened the window further. A limit never moves back."""
        if limit <= self.limit:
            return False
        self.limit = limit
        return True

    def take(self, wanted: int) -> int:
        """How much of ``wanted`` bytes may go now; counted as sent."""
        size = min(wanted, self.room)
        self.sent += size
        return size


class ReceiveWindow:
    """The reader's side: tells when a grant is worth sending, and which part of a chunk is new.

    ``received`` is the offset up to which bytes have come, ``consumed`` up to which they have been used.
    """

    __slots__ = ("consumed", "granted", "granted_at", "received", "window")

    def __init__(self, window: int = WINDOW, start: int = 0) -> None:
        self.window = window
        self.received = start
        self.consumed = start
        self.granted = start
        self.granted_at = float("-inf")

    def accept(self, offset: int, size: int) -> slice | None:
        """The new part of a chunk: None for a repeated one. Raises `InvalidRequest` for a gap or for more than was granted."""
        if offset > self.received:
            raise InvalidRequest(
                f"bytes {self.received} to {offset} are missing",
                field="offset",
                value=offset,
                reason="gap",
                fix=f"ask again from {self.received}",
            )
        end = offset + size
        if end <= self.received:
            return None
        if end > self.granted:
            raise InvalidRequest("more bytes than were granted", field="offset", value=end, reason="overrun")
        fresh = slice(self.received - offset, size)
        self.received = end
        return fresh

    def consume(self, size: int) -> None:
        """``size`` bytes have been used: room for as many more."""
        self.consumed = min(self.received, self.consumed + size)

    def due(self, now: float) -> int | None:
        """The grant to send now, or None. Due when half a window came free, and each second while the end has not come."""
        limit = self.consumed + self.window
        if limit - self.granted >= self.window // 2 or now - self.granted_at >= RESEND:
            self.granted = max(self.granted, limit)
            self.granted_at = now
            return self.granted
        return None
