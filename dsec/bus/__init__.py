"""The bus: the only package that imports nats. Subjects, messages, and typed requests over NATS (or in memory, for tests of logic)."""

from dsec.bus.actor import Context, Mailbox, Route, Service, Verb
from dsec.bus.bus import Bus, run
from dsec.bus.codec import CHUNK, MAX_MESSAGE, decode, decode_untyped, encode
from dsec.bus.events import EventPublisher, EventReader
from dsec.bus.idempotency import Idempotency, Key
from dsec.bus.streams import EventsConfig, KvBucket, ensure_events_stream, kv_bucket
from dsec.bus.transport import Events, Headers, Msg, Subscription, Transport

__all__ = [
    "CHUNK",
    "MAX_MESSAGE",
    "Bus",
    "Context",
    "EventPublisher",
    "EventReader",
    "Events",
    "EventsConfig",
    "Headers",
    "Idempotency",
    "Key",
    "KvBucket",
    "Mailbox",
    "Msg",
    "Route",
    "Service",
    "Subscription",
    "Transport",
    "Verb",
    "decode",
    "decode_untyped",
    "encode",
    "ensure_events_stream",
    "kv_bucket",
    "run",
]
