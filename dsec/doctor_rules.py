"""How the doctor's checks are told to it. A check says **ok**, **fallback** (the feature is not there, DSec uses something else and names
it) or **missing** (what stands on it is refused)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dsec.doctor_report import Status

Answer = tuple[Status, str]


class Rule(NamedTuple):
    """How one feature is looked at, what follows where it is not ok, and the command that a person may run then."""

    probe: Callable[[], Answer]
    consequence: str
    fix: str


class Rules(dict[str, Rule]):
    """Those of one part of a node, by feature, in the order of the report."""

    def check(self, name: str, consequence: str, fix: str = "") -> Callable[[Callable[[], Answer]], Callable[[], Answer]]:
        """Registers the function below it."""

        def register(probe: Callable[[], Answer]) -> Callable[[], Answer]:
            self[name] = Rule(probe, consequence, fix)
            return probe

        return register

    def tried(
        self, name: str, found: str, probe: Callable[[], object], consequence: str, fix: str = "", otherwise: Status = "missing"
    ) -> None:
        """Registers a check that is answered by trying: an `OSError` is the answer no."""

        def answer() -> Answer:
            try:
                probe()
            except OSError as error:
                return otherwise, error.strerror if error.strerror and not error.filename else str(error)
            return "ok", found

        self[name] = Rule(answer, consequence, fix)
