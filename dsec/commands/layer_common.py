"""What the `dsec layer` commands share."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import click

from dsec.commands.common import Settings, emit, run

if TYPE_CHECKING:
    from dsec.layers.store import LayerStore


def stored(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --config and --store."""
    where = "The layer store. [default: from the configuration, or that of the `dsec up` that runs here]"
    function = click.option("--store", default=None, metavar="DIR", help=where)(function)
    return click.option("--config", default=None, metavar="FILE", help="Configuration file. [env: DSEC_CONFIG]")(function)


def open_store(config: str | None, store: str | None) -> LayerStore:
    from dsec.commands.local import layers_directory, node_config
    from dsec.layers.store import LayerStore

    return LayerStore(store or layers_directory(node_config(config)))


def told(settings: Settings, work: Callable[[Callable[[str], None]], Coroutine[Any, Any, Any]]) -> Any:
    """Run something long; what it says goes to standard error."""
    return run(work(lambda line: None if settings.json else click.echo(line, err=True)))


def show_ref(settings: Settings, name: str, digest: str) -> None:
    emit({"name": name, "digest": digest}) if settings.json else click.echo(f"{name}  {digest}")
