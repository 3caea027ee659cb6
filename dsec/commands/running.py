"""The Edges that serve on this machine, for the doctor."""

from __future__ import annotations

import asyncio
import os

import libdsec
from dsec.actors import noted
from dsec.config import ENV_FILE, Config, edge_name, load
from dsec.doctor_report import Running
from dsec.errors import DsecError

PATIENCE = 2.0  # seconds for a connection


async def here() -> tuple[Running, ...]:
    """Of each `dsec up` that runs here, and the one that DSEC_CONFIG configures. One that does not answer says why."""
    notes = await asyncio.to_thread(noted.running, noted.folder())
    files = {note.config: note.url for note in notes}
    if configured := os.environ.get(ENV_FILE):
        files.setdefault(configured, "")
    return tuple(await asyncio.gather(*(_look(file, url) for file, url in sorted(files.items()))))


async def _look(file: str, url: str) -> Running:
    config, name = Config(), ""
    try:
        config = await asyncio.to_thread(load, file)
        name = edge_name(config)
        async with libdsec.connect(
            url or config.bus.url, unit=config.bus.scale_unit, name="dsec doctor", connect_timeout=PATIENCE
        ) as client:
            view = await client.nodes()
    except DsecError as error:
        return Running(edge=name, url=url or config.bus.url, trouble=error.message)
    beat = next((node for node in view.nodes if node.edge == name), None)
    if beat is None:
        return Running(edge=name, url=url or config.bus.url, trouble="the Watcher does not hear it")
    return Running(edge=name, url=url or config.bus.url, sandboxes=sum(beat.states.values()), pools=beat.pools)
