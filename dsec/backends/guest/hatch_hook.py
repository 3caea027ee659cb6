"""hatch's build hook: a wheel carries the static guest programs for every architecture; an editable install builds them when asked."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class GuestHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs build.py by its path: the package itself cannot be imported in a build environment."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or self.target_name != "wheel":
            return
        path = Path(self.root) / "dsec/backends/guest/build.py"
        spec = importlib.util.spec_from_file_location("dsec_guest_build", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for binary in module.build_all():
            for file in (binary, binary.with_suffix(".sha256")):
                build_data["force_include"][str(file)] = f"dsec/backends/guest/bin/{file.name}"
