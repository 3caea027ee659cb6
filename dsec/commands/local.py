"""What commands that work on this machine need of its configuration."""

from __future__ import annotations

import os


def layers_directory(config: str | None) -> str:
    """Where this node keeps its layers: ``layers.store_dir``, or ``<edge.state_dir>/layers``."""
    from dsec.config import load

    loaded = load(config)
    return loaded.layers.store_dir or os.path.join(loaded.edge.state_dir, "layers")
