"""What commands that work on this machine need of its configuration."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from dsec.config import Config


def node_config(file: str | None) -> Config:
    """This node's configuration: what ``file``, DSEC_CONFIG or the environment say; where none of them says where the node keeps its
    files and a `dsec up` runs here (the one at --url, when there are several), that of its Edge."""
    from dsec.actors import noted
    from dsec.config import ENV_FILE, Config, load

    loaded, plain = load(file), Config()
    if file or os.environ.get(ENV_FILE) or loaded.layers.store_dir or loaded.edge.state_dir != plain.edge.state_dir:
        return loaded
    url = _asked_url()
    note = noted.chosen(noted.running(noted.folder()), url or loaded.bus.url, asked=bool(url) or loaded.bus.url != plain.bus.url)
    return load(note.config) if note is not None else loaded


def _asked_url() -> str:
    context = click.get_current_context(silent=True)
    if context is None:
        return ""
    return context.params.get("url") or (context.find_root().obj or {}).get("url") or ""


def layers_directory(config: Config) -> str:
    """Where this node keeps its layers: ``layers.store_dir``, or ``<edge.state_dir>/layers``."""
    return config.layers.store_dir or os.path.join(config.edge.state_dir, "layers")
