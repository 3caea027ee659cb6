"""From an error to one line and an exit code."""

from __future__ import annotations

import json
import os
import sys

FAILED, USAGE, NOT_FOUND, BUSY, OWN, CANNOT, NO_COMMAND, INTERRUPTED = 1, 2, 3, 4, 125, 126, 127, 130


def report(error: BaseException, arguments: list[str]) -> int:
    """Say what went wrong on standard error (and as JSON on standard output where JSON was asked for); the exit code."""
    import click

    from dsec.errors import DsecError

    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt | click.exceptions.Abort):
        _print("interrupted")
        return INTERRUPTED
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # click >= 8.2: the help itself, not a line made of it
        sys.stderr.write(str(error) + "\n")
        return USAGE
    if isinstance(error, click.UsageError):
        fix = f"see `{error.ctx.command_path} --help`" if error.ctx is not None else ""
        message = error.format_message().rstrip(".")
        if _wants_json(arguments):
            _emit({"code": "invalid", "message": " ".join(message.split()), "fix": fix, "retryable": False})
        _print(f"{message} ({fix})" if fix else message)
        return USAGE
    if isinstance(error, click.ClickException):
        _print(error.format_message())
        return error.exit_code
    if isinstance(error, DsecError):
        if _wants_json(arguments):
            import msgspec

            _emit(msgspec.to_builtins(error.body()))
        _print(str(error))
        return code_of(error)
    if isinstance(error, OSError):
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        missing = isinstance(error, FileNotFoundError)
        fix = f"it is looked for on this machine, from {os.getcwd()}" if missing else ""
        if _wants_json(arguments):
            _emit({"code": "not_found" if missing else "error", "message": message, "fix": fix, "retryable": False})
        _print(f"{message} ({fix})" if fix else message)
        return NOT_FOUND if missing else FAILED
    raise error


def code_of(error: BaseException) -> int:
    from dsec.errors import Busy, DeadlineExceeded, InvalidRequest, NotFound, SandboxGone, Unavailable

    if isinstance(error, InvalidRequest):
        return USAGE
    if isinstance(error, NotFound | SandboxGone):
        return NOT_FOUND
    if isinstance(error, Busy | Unavailable | DeadlineExceeded):
        return BUSY
    return FAILED


def _wants_json(arguments: list[str]) -> bool:
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in own


def _emit(body: dict[str, object]) -> None:
    sys.stdout.write(json.dumps({"error": body}) + "\n")


def _print(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"dsec: {' '.join(text.split())}\n")
