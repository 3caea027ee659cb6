"""The id of a sandbox on the command line, completed by the shell from those that run."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import click
from click.shell_completion import CompletionItem


class SandboxParam(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases of click only
    name = "id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ARG002
        """Checked here, before anything is connected to."""
        from dsec.model import SandboxId

        SandboxId.parse(value)
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        """The sandboxes that begin so; none when the cluster does not answer at once: a shell must not hang."""
        from dsec.errors import DsecError

        async def work() -> list[CompletionItem]:
            import libdsec

            async with asyncio.timeout(2.0), libdsec.connect(project=os.environ.get("DSEC_PROJECT"), connect_timeout=0.5) as client:
                return [CompletionItem(info.id, help=info.image) for info in await client.list() if info.id.startswith(incomplete)]

        try:
            return asyncio.run(work())
        except (DsecError, TimeoutError, OSError):
            return []


SANDBOX = SandboxParam()
