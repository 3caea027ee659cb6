"""Dockerfiles, read without building anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.commands.layer_copy import ignore_rules
from dsec.errors import InvalidRequest, Unsupported
from dsec.layers.dockerfile import parse


def test_instructions_and_variables() -> None:
    """Continuations are joined, comments left out, variables filled in, and each step knows what was in force."""
    recipe = parse(
        'ARG TAG=1\n# c\nfrom base:$TAG AS only\nARG V\nENV A=1 B="x y"\nENV C the rest\nRUN a \\\n  # inside\n  && b ${A}\n'
        'WORKDIR /w\nWORKDIR ${B:+in}/d\nRUN ["x", "$A"]\nCOPY --chown=u:g --chmod=0750 a "b c" $A/\n'
        'USER u\nRUN c\nCMD run it\nENTRYPOINT ["e"]\n',
        {"TAG": "7", "V": "2"},
    )
    assert recipe.base == "base:7"
    run, workdir, below, listed, copy, last = recipe.steps
    assert run.argv == ("/bin/sh", "-c", "a   && b ${A}")
    assert (run.env, run.args, run.user) == ({"A": "1", "B": "x y", "C": "the rest"}, {"V": "2"}, "")
    assert (workdir.target, below.target, listed.argv, listed.workdir) == ("/w", "/w/in/d", ("x", "$A"), "/w/in/d")
    assert (copy.sources, copy.target, copy.chown, copy.chmod) == (("a", "b c"), "1/", "u:g", "0750")
    assert last.user == "u"
    assert (recipe.entrypoint, recipe.cmd, recipe.user, recipe.workdir) == (("e",), (), "u", "/w/in/d")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        *(("", InvalidRequest), ("RUN x", InvalidRequest), ("FROM a\nRUN", InvalidRequest), ("FROM a\nCOPY x", InvalidRequest)),
        *(("FROM scratch", InvalidRequest), ("FROM a\nENV 1=2", InvalidRequest), ("FROM a\nRUN x \\", InvalidRequest)),
        *(("FROM a\nFROM b extra", InvalidRequest), ("FROM a\nONBUILD RUN x", Unsupported), ("FROM a\nCOPY --from=1 x y", InvalidRequest)),
        *(("FROM a AS x\nFROM b AS X", InvalidRequest), ("FROM a\nCOPY --parents x y", Unsupported)),
        *(
            ("FROM a\nADD https://example.org/x /", Unsupported),
            ("FROM a\nADD x.tar.gz /", Unsupported),
            ("FROM a\nRUN <<EOF\nx\nEOF", Unsupported),
        ),
        *(('FROM a\nSHELL ["/bin/bash"]', Unsupported), ("FROM a\nRUN --mount=type=secret,id=x y", Unsupported)),
        ("FROM a\nCOPY 'x y", InvalidRequest),
    ],
)
def test_what_is_refused(text: str, error: type[Exception]) -> None:
    """What is no Dockerfile, and what would not be carried out as it says, is refused instead of being half done."""
    with pytest.raises(error):
        parse(text)


def test_stages() -> None:
    """A stage begins where its parent ended; COPY --from names a stage, by name or number, or an image; arguments are a stage's own."""
    text = (
        "ARG TAG=1\nFROM base:$TAG AS Build\nARG TAG\nENV A=$TAG\nWORKDIR /src\nUSER u\nRUN make\n"
        "FROM other\nENV B=$TAG\nCOPY --from=build --chown=7 /src/out /app\nCOPY --from=0 x y\nCOPY --from=busybox:1 /bin/sh /\n"
        'FROM build AS test\nRUN check\nCMD ["t"]\n'
    )
    last = parse(text)
    build, middle = last.before
    assert (build.name, build.base, build.parent, build.env) == ("build", "base:1", -1, {"A": "1"})
    assert (last.name, last.parent, last.env, last.workdir, last.user, last.cmd) == ("test", 0, {"A": "1"}, "/src", "u", ("t",))
    assert [step.argv[-1] for step in last.steps] == ["check"]
    assert (middle.env, middle.user) == ({"B": ""}, None)
    assert [(step.stage, step.image, step.chown) for step in middle.steps] == [(0, "", "7"), (0, "", ""), (-1, "busybox:1", "")]
    assert parse(text, target="BUILD").before == ()
    assert parse(text, target="1").before == (build,)
    with pytest.raises(InvalidRequest, match="build, test"):
        parse(text, target="none")


def test_dockerignore(tmp_path: Path) -> None:
    """The last pattern that fits a path decides."""
    (tmp_path / ".dockerignore").write_text("# c\n*.log\n**/__pycache__\nbuild/\n!keep.log\n")
    ignored = ignore_rules(tmp_path)
    names = ("a.log", "keep.log", "x/a.log", "x/__pycache__/y", "build/z", "builds")
    assert [name for name in names if ignored(name)] == ["a.log", "x/__pycache__/y", "build/z"]
