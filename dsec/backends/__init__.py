"""Ways to run sandboxes. `open_backend` is the only door for the Edge;
nothing is loaded here, because the holder imports this package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsec.backends.registry import BACKENDS as BACKENDS
from dsec.backends.registry import open_backend as open_backend

if TYPE_CHECKING:
    from dsec.backends.base import Backend as Backend
