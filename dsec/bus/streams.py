"""JetStream by its own wire API (JSON over `Transport.request`): the events stream and small key-value buckets.

Direct use of the API keeps every request under our reconnection rules, and answers what nats-py's helpers hide: the revision
under a delete or expiry marker, which `create` needs.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from dsec.bus import subjects
from dsec.bus.bus import Bus
from dsec.bus.transport import Msg
from dsec.errors import Conflict, InvalidRequest, NodeError, NotFound, Unavailable

EVENTS_STREAM = "DSEC_EVENTS"
TIMEOUT = 5.0  # seconds; a stream whose leader died has a new one in about six

WRONG_SEQUENCE = {10071, 10164}  # JetStream's "wrong last sequence"
NO_CLUSTER = 10074  # "replicas > 1 not supported in non-clustered mode"
NOT_FOUND = {10059, 10037, 10014}  # stream, message, consumer


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One message for a stream: its Nats-Msg-Id, subject and payload."""

    id: str
    subject: str
    data: bytes


class EventsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The events stream: bounded by age and by bytes, whichever comes first; the oldest go."""

    max_age: float = 7 * 86_400.0  # seconds
    max_bytes: int = 4 * 1024**3
    replicas: int = 1  # 3 in a cluster


async def ask(bus: Bus, verb: str, payload: dict[str, Any] | None = None, *, timeout: float = TIMEOUT) -> dict[str, Any]:
    """One request to the JetStream API. Raises `NotFound`, `Conflict`, `Unavailable` (JetStream is off or has no leader), `NodeError`."""
    body = msgspec.json.encode(payload) if payload is not None else b""
    try:
        msg = await bus.transport.request(f"$JS.API.{verb}", body, timeout=timeout)
    except Unavailable as error:
        if error.reason == "no_responders":
            raise Unavailable("JetStream is not enabled on this nats-server", field="nats", fix="set jetstream in nats.conf") from error
        raise
    return checked(msg)


def checked(msg: Msg) -> dict[str, Any]:
    """A JetStream answer as a dict; raises the error it carries."""
    try:
        answer: dict[str, Any] = msgspec.json.decode(msg.data)
    except msgspec.DecodeError as error:
        raise NodeError(f"JetStream sent no JSON: {msg.data[:80]!r}") from error
    fault = answer.get("error")
    if fault is None:
        return answer
    code, text = int(fault.get("err_code", 0)), str(fault.get("description", ""))
    if code in WRONG_SEQUENCE:
        raise Conflict(text, reason="revision")
    if code in NOT_FOUND or int(fault.get("code", 0)) == 404:
        raise NotFound(text, reason=str(code))
    if code == NO_CLUSTER:
        fix = "1 for a single nats-server, or give bus.url the servers of a cluster"
        raise InvalidRequest(text, field="bus.events_replicas", fix=fix, reason="replicas")
    if int(fault.get("code", 0)) == 503:
        raise Unavailable(text, reason=str(code))
    raise NodeError(f"JetStream: {text}", reason=str(code), retryable=int(fault.get("code", 0)) >= 500)


async def ensure_events_stream(bus: Bus, config: EventsConfig | None = None, *, update: bool = False) -> None:
    """Create the events stream of this unit, or accept one that is configured the same.

    Raises `Conflict` naming what differs, unless ``update`` changes it.
    """
    config = config or EventsConfig()
    wanted = {
        "name": EVENTS_STREAM,
        "subjects": [subjects.event_all(bus.unit, "*", "*", "*")],
        "retention": "limits",
        "storage": "file",
        "discard": "old",
        "max_age": int(config.max_age * 1e9),
        "max_bytes": config.max_bytes,
        "num_replicas": config.replicas,
        "duplicate_window": int(min(120.0, config.max_age) * 1e9),
        "allow_direct": True,
    }
    await ensure_stream(bus, wanted, update=update)


async def ensure_stream(bus: Bus, wanted: dict[str, Any], *, update: bool = False) -> None:
    name = wanted["name"]
    try:
        found = (await ask(bus, f"STREAM.INFO.{name}"))["config"]
    except NotFound:
        await ask(bus, f"STREAM.CREATE.{name}", wanted)
        return
    different = {key: (found.get(key), value) for key, value in wanted.items() if found.get(key, _zero(value)) != value}
    if not different:
        return
    if not update:
        text = "; ".join(f"{key} is {have!r}, wanted {want!r}" for key, (have, want) in sorted(different.items()))
        raise Conflict(
            f"stream {name} is configured otherwise: {text}",
            field=f"stream.{name}",
            reason="stream_config",
            fix="change the configuration, or let it be updated (update=True)",
        )
    await ask(bus, f"STREAM.UPDATE.{name}", found | wanted)


def _zero(value: Any) -> Any:
    """JetStream leaves out fields that are zero."""
    return type(value)()


# ------------------------------------------------------------------ key-value
class Entry(msgspec.Struct, frozen=True):
    """A key's value; ``revision`` is what `KvBucket.update` compares."""

    key: str
    value: bytes
    revision: int


class KvBucket:
    """A NATS key-value bucket with compare-and-set, for fence records, node records and quotas. Reads go to the stream's leader.

    Keys are subject tokens joined by dots (`InvalidRequest` otherwise). Use `open`.
    """

    def __init__(self, bus: Bus, name: str) -> None:
        self.bus = bus
        self.name = name

    @classmethod
    async def open(cls, bus: Bus, name: str, *, ttl: float = 0.0, replicas: int = 1, max_bytes: int = 64 * 1024**2) -> KvBucket:
        """Create the bucket or accept an equal one. ``ttl``: seconds until a key expires by itself; 0 = never."""
        wanted = {
            "name": f"KV_{name}",
            "subjects": [f"$KV.{name}.>"],
            "retention": "limits",
            "storage": "file",
            "discard": "new",
            "max_msgs_per_subject": 1,
            "max_bytes": max_bytes,
            "max_age": int(ttl * 1e9),
            "num_replicas": replicas,
            "allow_rollup_hdrs": True,
            "deny_delete": True,
            "allow_direct": True,
            "allow_msg_ttl": True,
        }
        await ensure_stream(bus, wanted)
        return cls(bus, name)

    async def get(self, key: str) -> Entry | None:
        """The entry; None when it is absent, deleted or expired."""
        found, live = await self._last(key)
        return found if live else None

    async def put(self, key: str, value: bytes) -> int:
        """Write whatever was there; returns the new revision."""
        return await self._write(key, value, {})

    async def create(self, key: str, value: bytes) -> int:
        """Write only if absent, deleted or expired. Raises `Conflict` (reason ``exists``)."""
        try:
            return await self.update(key, value, 0)
        except Conflict:
            found, live = await self._last(key)
            if live or found is None:
                raise Conflict("the key exists", field="key", value=key, reason="exists") from None
            # Under the marker of a delete or an expiry: absent, but with a revision of its own that the server compares.
            return await self.update(key, value, found.revision)

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """Write only if the key is still at ``revision`` (0: never written). Raises `Conflict` (reason ``revision``)."""
        return await self._write(key, value, {"Nats-Expected-Last-Subject-Sequence": str(revision)})

    async def delete(self, key: str, revision: int | None = None) -> None:
        """Leave a delete marker; with ``revision`` only if the key is still there."""
        headers = {"KV-Operation": "DEL"}
        if revision is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(revision)
        await self._write(key, b"", headers)

    async def keys(self, prefix: str = "") -> list[str]:
        """Every live key under ``prefix`` (whole tokens), sorted. One request a page and one a key: for buckets of up to some thousands."""
        names: list[str] = []
        while True:
            wanted = f"$KV.{self.name}.{prefix + '.' if prefix else ''}>"
            info = await ask(self.bus, f"STREAM.INFO.KV_{self.name}", {"subjects_filter": wanted, "offset": len(names)})
            page = (info.get("state") or {}).get("subjects") or {}
            names += [subject[len(self.name) + 5 :] for subject in page]
            if not page or len(names) >= int(info.get("total", len(names))):
                break
        live = [name for name in names if (await self._last(name))[1]]
        return sorted(live)

    async def _last(self, key: str) -> tuple[Entry | None, bool]:
        try:
            answer = await ask(self.bus, f"STREAM.MSG.GET.KV_{self.name}", {"last_by_subj": self._subject(key)})
        except NotFound:
            return None, False
        message = answer["message"]
        headers = base64.b64decode(message.get("hdrs", "")).decode("utf-8", "replace").lower()
        marker = "kv-operation: del" in headers or "kv-operation: purge" in headers or "nats-marker-reason:" in headers
        return Entry(key, base64.b64decode(message.get("data", "")), int(message["seq"])), not marker

    async def _write(self, key: str, value: bytes, headers: dict[str, str]) -> int:
        msg = await self.bus.transport.request(self._subject(key), value, timeout=TIMEOUT, headers=headers)
        return int(checked(msg)["seq"])

    def _subject(self, key: str) -> str:
        if not key or key.startswith(".") or key.endswith(".") or ".." in key or any(c.isspace() or c in "*>" for c in key):
            raise InvalidRequest("not a usable key", field="key", value=key, fix="use letters, digits, - _ = / and inner dots")
        return f"$KV.{self.name}.{key}"


async def kv_bucket(bus: Bus, name: str, *, ttl: float = 0.0, replicas: int = 1) -> KvBucket:
    return await KvBucket.open(bus, name, ttl=ttl, replicas=replicas)


__all__ = ["EVENTS_STREAM", "Entry", "EventsConfig", "KvBucket", "ask", "checked", "ensure_events_stream", "ensure_stream", "kv_bucket"]
