"""Backend names and how each is made. Imports nothing until a backend is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsec.backends.container import ContainerBackend, Layers
    from dsec.backends.fake import FakeBackend
    from dsec.config import Config

BACKENDS = ("container", "fake")


def open_backend(
    name: str, config: Config, *, edge: str, generation: int, layers: Layers | None = None, state_dir: str = ""
) -> ContainerBackend | FakeBackend:
    """The backend called ``name``; await its `open` before anything else, then ``backend.node`` is what `make_plan` wants.

    ``generation`` must grow with each start of the Edge (its start counter). ``layers`` is the node's `LayerStore` (the container
    backend asks it for ``mount_plan``). ``state_dir`` defaults to the configured one. Raises `InvalidRequest` for an unknown name.
    """
    if name == "container":
        from dsec.backends.container import ContainerBackend, Options
        from dsec.layers.store import LayerStore

        state = state_dir or config.edge.state_dir
        options = Options(
            edge=edge,
            state_dir=state,
            generation=generation,
            runtime=config.container.runtime,
            cgroup_root=config.container.cgroup_root,
            userns=config.container.userns,
        )
        return ContainerBackend(options, layers if layers is not None else LayerStore(config.layers.store_dir or f"{state}/layers"))
    if name == "fake":
        from dsec.backends.fake import FakeBackend, Faults

        return FakeBackend(Faults(launch_delay=config.fake.launch_ms / 1000), edge=edge, generation=generation)
    from dsec.errors import InvalidRequest

    raise InvalidRequest("no such backend", field="backend", value=name, fix=f"use {' or '.join(BACKENDS)}")
