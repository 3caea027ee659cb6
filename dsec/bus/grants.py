"""What a job may say on the bus: the subjects of its principal, and what its creates may ask for. Pure.

The same table is what the Edge's gate lets through (dsec/bus/gate.py) and what nats-server enforces where the Edge signs credentials for
jobs (dsec/bus/signing.py). A job is a principal of its own, so all that Edges and Schedulers check by principal holds between jobs.
"""

from __future__ import annotations

import msgspec

from dsec.bus import subjects
from dsec.bus.messages import CreateRequest
from dsec.bus.subjects import BELOW, ROOT, project_tokens
from dsec.errors import Denied, InvalidRequest
from dsec.model import SandboxSpec, Worker

LABEL = "dsec.job"  # the id of the worker, on it and on all that its job makes
MANY = ("list", "stop", "pause", "resume", "prune", "checkpoints", "uncheckpoint", "cancel")
DEEPEST = 4  # workers of workers
LABELS = 100_000  # of a job that one create may bear, all specs together: there is no room for more in a message


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """Of one worker. ``principal`` is its job's, ``project`` that of the sandboxes it makes."""

    unit: str
    worker: str  # id of the sandbox
    principal: str
    project: str
    limits: Worker = Worker()
    labels: dict[str, str] = {}  # of the worker: its job's sandboxes have them as well, unless they have others of these names

    @property
    def inbox(self) -> str:
        """What its inboxes begin with."""
        return subjects.inbox(self.principal) + "."

    @property
    def publish(self) -> tuple[str, ...]:
        """Patterns of subjects that it may send to."""
        u, who, p = f"{ROOT}.{self.unit}", self.principal, project_tokens(self.project)
        many = [f"{u}.all.{verb}.{who}.{p}{below}" for verb in MANY for below in ("", f".{BELOW}")]
        return (f"{u}.api.create.{who}.{p}", f"{u}.sb.*.{who}.*.*.{p}", f"{u}.lease.*.{who}.{p}", *many)

    @property
    def subscribe(self) -> tuple[str, ...]:
        """Patterns of subjects that it may hear."""
        u, p = f"{ROOT}.{self.unit}", project_tokens(self.project)
        return (f"{self.inbox}>", f"{u}.out.*.*.*.{self.principal}.{p}", f"{u}.view")

    @property
    def create(self) -> str:
        """Where its creates go."""
        return subjects.api(self.unit, "create", subjects.Caller(self.principal, self.project))


def within(patterns: tuple[str, ...], subject: str) -> bool:
    """Whether all that ``subject`` means, itself a pattern or not, is meant by one of ``patterns``."""
    tokens = subject.split(".")
    return all(tokens) and any(_within(pattern.split("."), tokens) for pattern in patterns)


def _within(pattern: list[str], tokens: list[str]) -> bool:
    for at, allowed in enumerate(pattern):
        if allowed == ">":
            return len(tokens) > at
        if at >= len(tokens) or tokens[at] == ">" or (allowed != "*" and tokens[at] != allowed):
            return False
    return len(pattern) == len(tokens)


def narrow(grant: Grant, request: CreateRequest) -> CreateRequest:
    """The request as it goes on: every sandbox with the job's mark, and none that may more than the job. Raises `Denied`."""
    if not request.inbox.startswith(grant.inbox):
        raise Denied("not an inbox of this job", field="inbox", value=request.inbox, fix=f"use one below {grant.inbox}")
    if len(request.specs) * len(grant.labels) > LABELS:
        raise InvalidRequest(
            f"{len(request.specs)} specs with the {len(grant.labels)} labels of this job each",
            field="specs",
            fix=f"{LABELS} labels are most: send it in slices",
        )
    specs = tuple(_narrow(grant, spec, f"specs[{at}]") for at, spec in enumerate(request.specs))
    return msgspec.structs.replace(request, specs=specs)


def _narrow(grant: Grant, spec: SandboxSpec, field: str) -> SandboxSpec:
    limits = grant.limits
    if spec.network.mode not in limits.networks:
        raise Denied(
            "this job's sandboxes may not have that network",
            field=f"{field}.network",
            value=spec.network.mode,
            fix=f"{' or '.join(limits.networks)} is what its worker was made with",
            reason="job",
        )
    if (worker := spec.worker) is not None:
        wider = sorted(set(worker.networks) - set(limits.networks))
        if wider:
            raise Denied(
                "a worker's worker has no more than it",
                field=f"{field}.worker.networks",
                value=wider,
                reason="job",
                fix=f"use {' or '.join(limits.networks)}",
            )
        if grant.principal.count(subjects.OF_JOB) >= DEEPEST:
            fix = "make it from a worker further up"
            raise Denied(f"workers of workers go {DEEPEST} deep", field=f"{field}.worker", reason="job", fix=fix)
    ends_with = grant.worker if limits.on_end == "stop" else ""
    return msgspec.structs.replace(spec, ends_with=ends_with, labels={**grant.labels, **spec.labels, LABEL: grant.worker})
