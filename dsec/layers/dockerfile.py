"""Read a Dockerfile: the subset that `dsec layer build` carries out. Pure.

FROM (any number of stages), RUN, COPY (also ``--from`` a stage or an image) and local ADD, ENV, ARG, WORKDIR, USER, ENTRYPOINT, CMD; LABEL,
EXPOSE, VOLUME and their like say nothing that matters to a sandbox and are passed over with a note. Anything else is refused with its line.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping

import msgspec

from dsec.errors import InvalidRequest, Unsupported

_PASSED = frozenset({"LABEL", "EXPOSE", "VOLUME", "STOPSIGNAL", "HEALTHCHECK", "MAINTAINER"})
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VARIABLE = re.compile(r"\\\$|\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)(?::([-+])([^}]*))?\})")
_HEREDOC = re.compile(r"<<-?[\"']?[A-Za-z_]")


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One instruction that changes files or how commands run. ``env``, ``user``, ``workdir``: in force where it stands."""

    kind: str  # run copy workdir
    line: int
    text: str  # as written, for people
    argv: tuple[str, ...] = ()  # run
    sources: tuple[str, ...] = ()  # copy
    target: str = ""  # copy, workdir
    stage: int = -1  # copy: the stage that the sources are in
    image: str = ""  # copy: the image that they are in; neither: the build's context
    chown: str = ""
    chmod: str = ""
    env: dict[str, str] = {}
    args: dict[str, str] = {}  # build arguments: in a RUN's environment, not in the image's
    user: str = ""
    workdir: str = "/"


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """What to build: the base, the steps, and what the image says in the end (None: as the base says).

    ``parent``: the stage that the base is, -1 for an image or a layer; ``before``: all stages before this one, by number. What a stage
    has from its parent is in its own fields.
    """

    base: str
    name: str = ""
    parent: int = -1
    before: tuple[Recipe, ...] = ()
    steps: tuple[Step, ...]
    env: dict[str, str]
    user: str | None = None
    workdir: str | None = None
    entrypoint: tuple[str, ...] | None = None
    cmd: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()


def parse(text: str, arguments: Mapping[str, str] | None = None, target: str = "") -> Recipe:
    """The last stage, or the one named ``target``. Raises `InvalidRequest` for what is no Dockerfile and `Unsupported` for what is not
    carried out; the value names the line."""
    return _Reader(dict(arguments or {})).read(text, target)


class _Reader:
    def __init__(self, given: dict[str, str]) -> None:
        self.given = given
        self.outer: dict[str, str] = {}  # arguments before the first FROM
        self.notes: list[str] = []
        self.stages: list[Recipe] = []
        self._begin("", "", -1)

    def _begin(self, base: str, name: str, parent: int) -> None:
        of = self.stages[parent] if parent >= 0 else None
        self.base, self.name, self.parent = base, name, parent
        self.args: dict[str, str] = {}
        self.env: dict[str, str] = dict(of.env) if of else {}
        self.user = of.user if of else None
        self.workdir = of.workdir if of else None
        self.entrypoint = of.entrypoint if of else None
        self.cmd = of.cmd if of else None
        self.steps: list[Step] = []

    def read(self, text: str, target: str) -> Recipe:
        for line, instruction in _instructions(text):
            word, _, rest = instruction.partition(" ")
            word, rest = word.upper(), rest.strip()
            if not self.base and word not in ("FROM", "ARG"):
                raise _wrong("the first instruction must be FROM", line, instruction)
            if word in _PASSED:
                self.notes.append(f"line {line}: {word} is passed over")
                continue
            method = getattr(self, f"_{word.lower()}", None)
            if method is None:
                raise Unsupported(f"line {line}: {word} is not carried out", field="dockerfile", value=instruction, reason=word)
            method(line, rest, instruction)
        if not self.base:
            raise InvalidRequest("no FROM in the Dockerfile", field="dockerfile")
        self._end()
        wanted = self._stage(target) if target else len(self.stages) - 1
        if wanted < 0:
            names = ", ".join(stage.name for stage in self.stages if stage.name)
            raise InvalidRequest("no such stage", field="target", value=target, fix=f"there are {names or 'no named ones'}")
        return msgspec.structs.replace(self.stages[wanted], before=tuple(self.stages[:wanted]), notes=tuple(self.notes))

    def _end(self) -> None:
        made = Recipe(base=self.base, name=self.name, parent=self.parent, steps=tuple(self.steps), env=self.env, user=self.user)
        made = msgspec.structs.replace(made, workdir=self.workdir, entrypoint=self.entrypoint, cmd=self.cmd)
        self.stages.append(made)

    def _stage(self, name: str) -> int:
        """The number of a stage by its name or number, -1 for none."""
        for number, stage in enumerate(self.stages):
            if stage.name == name.lower() or str(number) == name:
                return number
        return -1

    def _step(self, kind: str, line: int, text: str, **more: object) -> None:
        common = {"env": dict(self.env), "args": dict(self.args), "user": self.user or "", "workdir": self.workdir or ""}
        self.steps.append(msgspec.convert({"kind": kind, "line": line, "text": text, **common, **more}, Step))

    def _expand(self, text: str) -> str:
        known = self.args | self.env if self.base else self.outer

        def value(match: re.Match[str]) -> str:
            if match.group(0) == "\\$":
                return "$"
            name = match.group(1) or match.group(2)
            if match.group(3) == "-":
                return known.get(name) or match.group(4)
            if match.group(3) == "+":
                return match.group(4) if known.get(name) else ""
            return known.get(name, "")

        return _VARIABLE.sub(value, text)

    def _from(self, line: int, rest: str, text: str) -> None:
        if self.base:
            self._end()
        self.base = ""  # FROM knows the arguments before the first stage, and no stage's
        words = [word for word in self._expand(rest).split() if not word.startswith("--platform")]
        if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS") or words[0] == "scratch":
            raise _wrong("FROM wants an image or a layer", line, text)
        name = words[2].lower() if len(words) == 3 else ""
        if name and self._stage(name) >= 0:
            raise _wrong("two stages of one name", line, text)
        self._begin(words[0], name, -1 if words[0].isdigit() else self._stage(words[0]))

    def _arg(self, line: int, rest: str, text: str) -> None:
        known = self.args if self.base else self.outer
        for word in _words(rest, line, text):
            name, equals, default = word.partition("=")
            if not _NAME.fullmatch(name):
                raise _wrong("not a usable argument's name", line, text)
            if name in self.given or equals:
                known[name] = self.given.get(name, self._expand(default))
            elif self.base and name in self.outer:
                known[name] = self.outer[name]

    def _env(self, line: int, rest: str, text: str) -> None:
        first, _, value = rest.partition(" ")
        pairs = [(first, value.strip())] if "=" not in first else [word.partition("=")[::2] for word in _words(rest, line, text)]
        fresh = {}
        for name, value in pairs:
            if not _NAME.fullmatch(name):
                raise _wrong("not a usable variable's name", line, text)
            fresh[name] = self._expand(value)
        self.env |= fresh

    def _run(self, line: int, rest: str, text: str) -> None:
        while rest.startswith("--"):
            option, _, rest = rest.partition(" ")
            if not option.startswith(("--mount=type=cache", "--network=")):
                raise Unsupported(f"line {line}: RUN {option} is not carried out", field="dockerfile", value=text, reason="RUN options")
            self.notes.append(f"line {line}: {option} is passed over")
            rest = rest.lstrip()
        if not rest:
            raise _wrong("RUN without a command", line, text)
        self._step("run", line, text, argv=_exec_form(rest) or ("/bin/sh", "-c", rest))

    def _copy(self, line: int, rest: str, text: str) -> None:
        chown = chmod = image = ""
        stage = -1
        while rest.startswith("--"):
            option, _, rest = rest.partition(" ")
            name, _, value = option.partition("=")
            if name == "--chown":
                chown = self._expand(value)
            elif name == "--chmod" and re.fullmatch(r"[0-7]{3,4}", value):
                chmod = value
            elif name == "--from" and value:
                stage = self._stage(value)
                image = "" if stage >= 0 else self._expand(value)
                if value.isdigit() and stage < 0:
                    raise _wrong("no such stage before this one", line, text)
            elif name != "--link":
                raise Unsupported(f"line {line}: {option} is not carried out", field="dockerfile", value=text, reason="COPY options")
            rest = rest.lstrip()
        words = list(_exec_form(rest) or _words(rest, line, text))
        words = [self._expand(word) for word in words]
        if len(words) < 2:
            raise _wrong("COPY wants sources and a target", line, text)
        if any("://" in word or word.startswith("git@") for word in words[:-1]):
            raise Unsupported(f"line {line}: nothing is fetched from elsewhere", field="dockerfile", value=text, reason="ADD of an address")
        self._step("copy", line, text, sources=tuple(words[:-1]), target=words[-1], chown=chown, chmod=chmod, stage=stage, image=image)

    def _add(self, line: int, rest: str, text: str) -> None:
        if re.search(r"\.(?:tar|tgz|tar\.\w+)(?:\s|$|\")", rest):
            raise Unsupported(f"line {line}: ADD does not unpack archives here", field="dockerfile", value=text, reason="ADD of an archive")
        self._copy(line, rest, text)

    def _workdir(self, line: int, rest: str, text: str) -> None:
        path = self._expand(rest).strip("\"'")
        if not path:
            raise _wrong("WORKDIR without a directory", line, text)
        self.workdir = path if path.startswith("/") else f"{(self.workdir or '').rstrip('/')}/{path}"
        self._step("workdir", line, text, target=self.workdir)

    def _user(self, line: int, rest: str, text: str) -> None:
        self.user = self._expand(rest)
        if not self.user or " " in self.user:
            raise _wrong("USER wants one user", line, text)

    def _entrypoint(self, _line: int, rest: str, _text: str) -> None:
        self.entrypoint = _exec_form(rest) or ("/bin/sh", "-c", rest)
        self.cmd = None if self.cmd is None else ()

    def _cmd(self, _line: int, rest: str, _text: str) -> None:
        self.cmd = _exec_form(rest) or ("/bin/sh", "-c", rest)

    def _shell(self, line: int, rest: str, text: str) -> None:
        if _exec_form(rest) != ("/bin/sh", "-c"):
            raise Unsupported(f"line {line}: another SHELL is not carried out", field="dockerfile", value=text, reason="SHELL")


def _instructions(text: str) -> list[tuple[int, str]]:
    """Logical lines with the number of their first: continuations joined, comments and empty lines left out."""
    found: list[tuple[int, str]] = []
    parts: list[str] = []
    began = 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip() if not parts else raw.rstrip()
        if line.lstrip().startswith("#") or not line.strip():
            continue
        if not parts:
            began = number
        more = line.endswith("\\")
        parts.append(line[:-1] if more else line)
        if not more:
            whole = "".join(parts).strip()
            if whole.partition(" ")[0].upper() in ("RUN", "COPY", "ADD") and _HEREDOC.search(whole):
                raise Unsupported(f"line {began}: here-documents are not carried out", field="dockerfile", value=whole, reason="heredoc")
            found.append((began, whole))
            parts = []
    if parts:
        raise _wrong("it ends in the middle of an instruction", began, "".join(parts))
    return found


def _exec_form(text: str) -> tuple[str, ...]:
    """A JSON list of strings, else ()."""
    if not text.startswith("["):
        return ()
    try:
        words = json.loads(text)
    except ValueError:
        return ()
    return tuple(words) if isinstance(words, list) and words and all(isinstance(word, str) for word in words) else ()


def _words(text: str, line: int, whole: str) -> list[str]:
    try:
        return shlex.split(text, posix=True)
    except ValueError as error:
        raise _wrong(f"quotes do not match ({error})", line, whole) from None


def _wrong(why: str, line: int, text: str) -> InvalidRequest:
    return InvalidRequest(f"line {line}: {why}", field="dockerfile", value=text)
