"""DSec for Python: sandboxes over NATS. Start with `connect`; `libdsec.blocking` is the same without an event loop."""

from dsec.errors import (
    BurstError,
    Busy,
    Conflict,
    DeadlineExceeded,
    Denied,
    DsecError,
    InvalidRequest,
    NodeError,
    NotFound,
    SandboxError,
    SandboxGone,
    Unavailable,
    Unsupported,
)
from dsec.model import (
    Checkpoint,
    Command,
    Exit,
    ExitReason,
    ImageConfig,
    LayerRef,
    PackedLayer,
    Paused,
    SandboxInfo,
    SandboxSpec,
    Stat,
    State,
    Worker,
)
from libdsec import blocking
from libdsec.burst import Burst
from libdsec.checkpoint import Restored
from libdsec.client import Client, connect
from libdsec.files import Files
from libdsec.forward import Address, Connection, Forward
from libdsec.process import OutputEvent, Process
from libdsec.results import ExecFailed, ExecResult, ItemOutcome, Output
from libdsec.sandbox import Sandbox
from libdsec.session import Session
from libdsec.spec import Options, spec
from libdsec.watch import FileEvent

__all__ = [
    "Address",
    "Burst",
    "BurstError",
    "Busy",
    "Checkpoint",
    "Client",
    "Command",
    "Conflict",
    "Connection",
    "DeadlineExceeded",
    "Denied",
    "DsecError",
    "ExecFailed",
    "ExecResult",
    "Exit",
    "ExitReason",
    "FileEvent",
    "Files",
    "Forward",
    "ImageConfig",
    "InvalidRequest",
    "ItemOutcome",
    "LayerRef",
    "NodeError",
    "NotFound",
    "Options",
    "Output",
    "OutputEvent",
    "PackedLayer",
    "Paused",
    "Process",
    "Restored",
    "Sandbox",
    "SandboxError",
    "SandboxGone",
    "SandboxInfo",
    "SandboxSpec",
    "Session",
    "Stat",
    "State",
    "Unavailable",
    "Unsupported",
    "Worker",
    "blocking",
    "connect",
    "spec",
]
