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
from dsec.model import Exit, ExitReason, LayerRef, PackedLayer, SandboxInfo, SandboxSpec, Stat, State
from libdsec import blocking
from libdsec.burst import Burst
from libdsec.client import Client, connect
from libdsec.files import Files
from libdsec.process import OutputEvent, Process
from libdsec.results import ExecFailed, ExecResult, ItemOutcome, Output
from libdsec.sandbox import Sandbox
from libdsec.session import Session
from libdsec.spec import Options, spec

__all__ = [
    "Burst",
    "BurstError",
    "Busy",
    "Client",
    "Conflict",
    "DeadlineExceeded",
    "Denied",
    "DsecError",
    "ExecFailed",
    "ExecResult",
    "Exit",
    "ExitReason",
    "Files",
    "InvalidRequest",
    "ItemOutcome",
    "NodeError",
    "NotFound",
    "Options",
    "Output",
    "OutputEvent",
    "Process",
    "LayerRef",
    "Sandbox",
    "SandboxError",
    "SandboxGone",
    "SandboxInfo",
    "SandboxSpec",
    "PackedLayer",
    "Session",
    "Stat",
    "State",
    "Unavailable",
    "Unsupported",
    "blocking",
    "connect",
    "spec",
]
