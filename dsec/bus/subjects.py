"""Every NATS subject, as a pair of functions: where to send, and what to subscribe to. Pattern in the comment.

``u`` is the scale unit. A project path ``acme/rl`` becomes the tokens ``acme.rl`` and stands last, so that NATS permissions
nest as projects do. The principal's token is pinned by NATS permissions: identity comes from the subject, never from a payload.
"""

from __future__ import annotations

import re

import msgspec

from dsec.model import SandboxId

ROOT = "dsec.v1"
BELOW = "~"  # no project has this name
OF_JOB = "~"  # and no principal that a person chooses: `<who>~<worker>` is the job that this sandbox of theirs works for


def project_tokens(project: str) -> str:
    return project.replace("/", ".")


def project_path(tokens: list[str]) -> str:
    return "/".join(tokens)


class Caller(msgspec.Struct, frozen=True):
    """Who sent a request, read from its subject."""

    principal: str
    project: str


def job(principal: str, worker: str) -> str:
    """The principal of the sandboxes that the sandbox ``worker`` of ``principal`` makes; jobs nest."""
    return f"{principal}{OF_JOB}{worker}"


def worker_of(principal: str) -> str:
    """The id of the sandbox for whose job this principal stands; "" where it is none."""
    return principal.rpartition(OF_JOB)[2] if OF_JOB in principal else ""


def head_job(principal: str) -> str:
    """The job that a principal's work is part of in the end, when workers have workers of their own; "" where it is none's."""
    return OF_JOB.join(principal.split(OF_JOB)[:2]) if OF_JOB in principal else ""


def user_of(principal: str) -> str:
    """Whose work it is in the end."""
    return principal.partition(OF_JOB)[0]


def owns(principal: str, owner: str) -> bool:
    """Whether ``principal`` may deal with what belongs to ``owner``: with its own, and with that of its jobs."""
    return owner == principal or owner.startswith(principal + OF_JOB)


def lease_of(principal: str, lease: str) -> str:
    """The name under which an Edge keeps a lease: a job's are its own, whatever it calls them."""
    return f"{principal} {lease}" if OF_JOB in principal else lease


def inbox(principal: str) -> str:
    """What the inboxes of a job begin with."""
    return f"_INBOX.{principal}"


_REPLY = re.compile(r"(?!\$|dsec\.)[^\s\x00*>]{1,400}")


def is_reply(subject: str) -> bool:
    """Whether an answer may be sent there. A caller names this subject, and the actor that answers may publish more than the caller
    may: neither the server's own subjects nor ours are anybody's inbox."""
    return _REPLY.fullmatch(subject) is not None


# dsec.v1.<u>.api.<verb>.<principal>.<p…>            Scheduler, queue group
def api(u: str, verb: str, caller: Caller) -> str:
    return f"{ROOT}.{u}.api.{verb}.{caller.principal}.{project_tokens(caller.project)}"


def api_all(u: str, verb: str) -> str:
    return f"{ROOT}.{u}.api.{verb}.*.>"


def api_caller(subject: str) -> Caller:
    parts = subject.split(".")
    return Caller(parts[5], project_path(parts[6:]))


# dsec.v1.<u>.all.<verb>.<principal>.<p…>            every Edge, scatter-gather
# With BELOW as the last token it is about the project and all below it: whoever may say that holds `<p…>.>`, not the project alone.
def everyone(u: str, verb: str, caller: Caller, *, below: bool = False) -> str:
    return f"{ROOT}.{u}.all.{verb}.{caller.principal}.{project_tokens(caller.project)}{f'.{BELOW}' if below else ''}"


def everyone_all(u: str) -> str:
    return f"{ROOT}.{u}.all.>"


def everyone_parse(subject: str) -> tuple[str, Caller]:
    parts = subject.split(".")
    return parts[4], Caller(parts[5], project_path(parts[6:-1] if everyone_below(subject) else parts[6:]))


def everyone_below(subject: str) -> bool:
    return subject.endswith(f".{BELOW}")


def covers(caller: Caller, below: bool, principal: str, project: str) -> bool:
    """Whether what belongs to ``principal`` in ``project`` is among what a request to everyone is about."""
    inside = project == caller.project or (below and project.startswith(f"{caller.project}/"))
    return inside and owns(caller.principal, principal)


# dsec.v1.<u>.edge.<edge>.<verb>                     one Edge, for actors only
def edge(u: str, edge_name: str, verb: str) -> str:
    return f"{ROOT}.{u}.edge.{edge_name}.{verb}"


def edge_all(u: str, edge_name: str) -> str:
    return f"{ROOT}.{u}.edge.{edge_name}.*"


def edge_verb(subject: str) -> str:
    return subject.rsplit(".", 1)[1]


# dsec.v1.<u>.sb.<verb>.<principal>.<edge>.<ulid>.<p…>   the Edge of one sandbox
def sandbox(u: str, verb: str, caller: Caller, sb: SandboxId) -> str:
    return f"{ROOT}.{u}.sb.{verb}.{caller.principal}.{sb.edge}.{sb.ulid}.{project_tokens(caller.project)}"


def sandbox_all(u: str, edge_name: str) -> str:
    return f"{ROOT}.{u}.sb.*.*.{edge_name}.>"


def sandbox_verb(u: str, edge_name: str, verb: str) -> str:
    return f"{ROOT}.{u}.sb.{verb}.*.{edge_name}.>"


def sandbox_parse(subject: str) -> tuple[str, Caller, SandboxId]:
    parts = subject.split(".")
    return parts[4], Caller(parts[5], project_path(parts[8:])), SandboxId(parts[6], parts[7])


# dsec.v1.<u>.lease.<edge>.<principal>.<p…>          lease renewals of a client
def lease(u: str, edge_name: str, caller: Caller) -> str:
    return f"{ROOT}.{u}.lease.{edge_name}.{caller.principal}.{project_tokens(caller.project)}"


def lease_all(u: str, edge_name: str) -> str:
    return f"{ROOT}.{u}.lease.{edge_name}.>"


def lease_caller(subject: str) -> Caller:
    parts = subject.split(".")
    return Caller(parts[5], project_path(parts[6:]))


# dsec.v1.<u>.out.<edge>.<ulid>.<op>.<principal>.<p…>   output chunks to the op's reader; never JetStream; bulk connection
def output(u: str, sb: SandboxId, op: str, caller: Caller) -> str:
    return f"{ROOT}.{u}.out.{sb.edge}.{sb.ulid}.{op}.{caller.principal}.{project_tokens(caller.project)}"


# dsec.v1.<u>.hb.<edge>                              heartbeat, 1 Hz
def heartbeat(u: str, edge_name: str) -> str:
    return f"{ROOT}.{u}.hb.{edge_name}"


def heartbeat_all(u: str) -> str:
    return f"{ROOT}.{u}.hb.*"


# dsec.v1.<u>.view                                   the Watcher's cluster view
def view(u: str) -> str:
    return f"{ROOT}.{u}.view"


# dsec.v1.<u>.evt.<kind>.<edge>.<ulid>.<p…>          stream DSEC_EVENTS; ulid is "-" for events of a node
def event(u: str, kind: str, edge_name: str, ulid: str, project: str) -> str:
    return f"{ROOT}.{u}.evt.{kind}.{edge_name}.{ulid or '-'}.{project_tokens(project)}"


def event_all(u: str, kind: str = "*", edge_name: str = "*", ulid: str = "*") -> str:
    return f"{ROOT}.{u}.evt.{kind}.{edge_name}.{ulid}.>"
