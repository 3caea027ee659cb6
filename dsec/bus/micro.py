"""The NATS micro service protocol (ADR-32) over our transport: ``$SRV.PING|INFO|STATS[.name[.id]]``, as `nats service` asks."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from dsec.bus.subjects import is_reply
from dsec.bus.transport import Msg
from dsec.model import new_ulid

if TYPE_CHECKING:
    from dsec.bus.actor import Service

_encode = msgspec.json.Encoder().encode


def endpoint_name(service_subject: str, verb: str) -> str:
    """Endpoint names are tokens: the kind of subject (4th token) and the verb, such as ``sb-exec``."""
    parts = service_subject.split(".")
    kind = parts[3] if len(parts) > 3 and parts[0] == "dsec" else parts[0]
    return f"{kind}-{verb}".replace("*", "any").replace(">", "all").replace("$", "")


def micro_routes(service: Service) -> Iterator[tuple[str, Callable[[Msg], None]]]:
    """(subject, callback) for every discovery subject of one service instance."""
    id_ = new_ulid()
    started = dt.datetime.now(dt.UTC).isoformat().replace("+00:00", "Z")
    base = {"name": service.name, "id": id_, "version": service.version, "metadata": service.metadata}
    endpoints = [(route, verb) for route in service.routes for verb in route.verbs]

    def ping() -> dict[str, Any]:
        return base | {"type": "io.nats.micro.v1.ping_response"}

    def info() -> dict[str, Any]:
        shown = [
            {
                "name": endpoint_name(route.subject, verb.name),
                "subject": route.subject,
                "queue_group": route.queue,
                "metadata": {"request": _type_name(verb.request), "reply": _type_name(verb.reply)},
            }
            for route, verb in endpoints
        ]
        return base | {"type": "io.nats.micro.v1.info_response", "description": service.description, "endpoints": shown}

    def stats() -> dict[str, Any]:
        shown = []
        for route, verb in endpoints:
            numbers = service.stats[route.subject, verb.name]
            shown.append(
                {
                    "name": endpoint_name(route.subject, verb.name),
                    "subject": route.subject,
                    "queue_group": route.queue,
                    "num_requests": numbers.requests,
                    "num_errors": numbers.errors,
                    "last_error": numbers.last_error,
                    "processing_time": numbers.nanos,
                    "average_processing_time": numbers.nanos // numbers.requests if numbers.requests else 0,
                    "data": {"running": len(service.running)},
                }
            )
        return base | {"type": "io.nats.micro.v1.stats_response", "started": started, "endpoints": shown}

    def answering(make: Callable[[], dict[str, Any]]) -> Callable[[Msg], None]:
        def answer(msg: Msg) -> None:
            if is_reply(msg.reply):
                service.bus.transport.post(msg.reply, _encode(make()))

        return answer

    for verb_name, make in (("PING", ping), ("INFO", info), ("STATS", stats)):
        for suffix in ("", f".{service.name}", f".{service.name}.{id_}"):
            yield f"$SRV.{verb_name}{suffix}", answering(make)


def _type_name(type_: Any) -> str:
    return getattr(type_, "__name__", "") if type_ is not None else ""
