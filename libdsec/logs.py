"""Where a library's log belongs: into the program's own `logging`, never onto its standard output."""

from __future__ import annotations

from typing import Any

import structlog


def use_logging() -> None:
    """Let structlog speak through `logging` (loggers ``dsec.*`` and ``libdsec``), unless the program has configured structlog itself."""
    if structlog.is_configured():
        return
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, structlog.processors.format_exc_info, _line],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,  # the program may still configure it otherwise
    )


def _line(_logger: Any, _method: str, event: Any) -> str:
    """``what key=value …``"""
    what = event.pop("event", "")
    return " ".join([str(what), *(f"{key}={value!r}" for key, value in event.items())])
