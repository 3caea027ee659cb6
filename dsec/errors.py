"""The DsecError tree, by who is at fault.

Every error has a stable ``code`` (what travels on the wire), says whether a retry can help, and carries what a
person needs: the ``field`` that was wrong, the ``value`` that was given and the ``fix``. Where Python has a builtin
for the same thing the error is one too, so ``except TimeoutError`` works.

Four families: the caller's fault (`InvalidRequest`, `NotFound`, `Conflict`, `Denied`), the sandbox's (`SandboxGone`,
`SandboxError`), the node's (`Busy`, `NodeError`), the service's (`Unavailable`, `DeadlineExceeded`, `BurstError`).
"""

from __future__ import annotations

import builtins

import msgspec


class ErrorBody(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """An error as it travels: a msgpack map. ``code`` names the class; unknown codes become `DsecError`."""

    code: str
    message: str
    field: str = ""
    value: str = ""
    fix: str = ""
    sandbox: str = ""
    reason: str = ""
    retryable: bool | None = None


class DsecError(Exception):
    """Base of every error that this project raises on purpose.

    Args:
        message: one sentence, lower case, without a full stop.
        field: the spec or config field at fault, as a path (``resources.memory``).
        value: what was given there, shortened to 200 characters.
        fix: what the reader may do about it.
        sandbox: the id of the sandbox that the error is about.
        reason: a machine-readable detail, such as an `ExitReason` or the name of a placement filter.
        retryable: overrides the class's own answer.
    """

    code = "error"
    retryable = False

    def __init__(
        self,
        message: str = "",
        *,
        field: str = "",
        value: object = "",
        fix: str = "",
        sandbox: str = "",
        reason: str = "",
        retryable: bool | None = None,
    ) -> None:
        self.message = message or (self.__doc__ or "").split("\n", 1)[0].rstrip(".")
        self.field = field
        text = value if isinstance(value, str) else repr(value)
        self.value = text if len(text) <= 200 else text[:197] + "..."
        self.fix = fix
        self.sandbox = sandbox
        self.reason = reason
        if retryable is not None:
            self.retryable = retryable
        super().__init__(self.message)

    def __str__(self) -> str:
        where = f"{self.field}={self.value!r}: " if self.field and self.value else (f"{self.field}: " if self.field else "")
        subject = f"sandbox {self.sandbox}: " if self.sandbox else ""
        fix = f" ({self.fix})" if self.fix else ""
        return f"{subject}{where}{self.message}{fix}"

    def body(self) -> ErrorBody:
        """The error as it goes on the wire."""
        return ErrorBody(
            code=self.code,
            message=self.message,
            field=self.field,
            value=self.value,
            fix=self.fix,
            sandbox=self.sandbox,
            reason=self.reason,
            retryable=self.retryable,
        )


class InvalidRequest(DsecError, ValueError):
    """The request is malformed or asks for something that cannot be."""

    code = "invalid"


class NotFound(DsecError, FileNotFoundError):
    """The named sandbox, layer, user, path or operation does not exist."""

    code = "not_found"


class Conflict(DsecError, FileExistsError):
    """It exists already, or the request id was used for another request, or the state does not allow it."""

    code = "conflict"


class Denied(DsecError, PermissionError):
    """A policy, a permission or a quota forbids it."""

    code = "denied"


class Unsupported(DsecError):
    """This backend, node or kernel cannot do it; ``reason`` is what `dsec doctor` prints."""

    code = "unsupported"


class SandboxGone(DsecError):
    """The sandbox has ended; ``reason`` is its Exit.reason."""

    code = "gone"


class SandboxError(DsecError, OSError):
    """Something inside the sandbox failed (a file operation, a full disk, the guest agent)."""

    code = "sandbox"


class Busy(DsecError):
    """The node or cluster has no room just now; ``reason`` names the filter or the limit."""

    code = "busy"
    retryable = True


class NodeError(DsecError):
    """The node failed to do it (a mount, the runtime, the disk)."""

    code = "node"
    retryable = True


class Unavailable(DsecError, ConnectionError):
    """Nobody answers: the bus, the Scheduler or the Edge is away."""

    code = "unavailable"
    retryable = True


class DeadlineExceeded(DsecError, builtins.TimeoutError):
    """The deadline passed before the outcome was known."""

    code = "deadline"
    retryable = True


class BurstError(DsecError):
    """Fewer sandboxes than ``min_ready`` were ready by the deadline."""

    code = "burst"


BY_CODE: dict[str, type[DsecError]] = {
    cls.code: cls
    for cls in (
        DsecError,
        InvalidRequest,
        NotFound,
        Conflict,
        Denied,
        Unsupported,
        SandboxGone,
        SandboxError,
        Busy,
        NodeError,
        Unavailable,
        DeadlineExceeded,
        BurstError,
    )
}


def from_body(body: ErrorBody) -> DsecError:
    """The exception that a peer sent; a code of a newer peer becomes a plain `DsecError`."""
    cls = BY_CODE.get(body.code, DsecError)
    return cls(
        body.message,
        field=body.field,
        value=body.value,
        fix=body.fix,
        sandbox=body.sandbox,
        reason=body.reason,
        retryable=body.retryable,
    )


def to_body(error: BaseException) -> ErrorBody:
    """Any exception as an `ErrorBody`; a foreign one is the node's fault and is named by its type."""
    if isinstance(error, DsecError):
        return error.body()
    return NodeError(f"{type(error).__name__}: {error}", retryable=False).body()
