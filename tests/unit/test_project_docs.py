"""What README, SPECIFICATION.md, docs/ and the container files show exists."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest
import yaml

import libdsec
from dsec import config
from dsec.layers import bootstrap, dockerfile

ROOT = Path(__file__).resolve().parents[2]
DOCS = [ROOT / "README.md", ROOT / "SPECIFICATION.md", *sorted((ROOT / "docs").glob("*.md"))]
# What the variables of README's snippets are.
TYPES = {"dsec": "Client", "sb": "Sandbox", "burst": "Burst", "result": "ExecResult"}


def snippets() -> list[str]:
    """The Python blocks of README.md and docs/."""
    return [block for path in DOCS for block in re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)]


@pytest.mark.parametrize("code", snippets())
def test_snippets_use_what_exists(code: str) -> None:
    """Every snippet parses, and every attribute that it uses of libdsec and of its objects exists."""
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        name = node.value.id
        if name == "libdsec":
            assert node.attr in libdsec.__all__, node.attr
        elif name in TYPES:
            cls = getattr(libdsec, TYPES[name])
            known = set(dir(cls)) | set(getattr(cls, "__annotations__", ())) | set(re.findall(r"self\.(\w+)", _source(cls)))
            assert node.attr in known, f"{TYPES[name]}.{node.attr}"


def _source(cls: type) -> str:
    return Path(importlib.import_module(cls.__module__).__file__ or "").read_text()


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_and_paths_lead_somewhere(path: Path) -> None:
    """Relative links and the files named in back quotes are there."""
    text = path.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (path.parent / target).exists(), target
    for name in re.findall(r"`((?:dsec|libdsec|config|tests|benchmarks|docs)/[\w./-]*)[`:]", text):
        assert (ROOT / name).exists() or "planned" in _row(text, name), name


def _row(text: str, name: str) -> str:
    return next((line for line in text.splitlines() if name in line), "")


def rows() -> list[list[str]]:
    """The promises: every table row of SPECIFICATION.md with four columns."""
    lines = (ROOT / "SPECIFICATION.md").read_text().splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [row for row in table if len(row) == 4 and row[0] != "promise" and not row[0].startswith("---")]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_promises_name_what_measures_them(row: list[str]) -> None:
    """A promise that is said to be measured or tested names a benchmark with that key, or a test, which exists."""
    promise, number, measured, state = row
    assert promise
    assert state in {"measured", "tested", "slow", "planned"}
    if state == "planned":
        return
    assert number
    benchmark = re.search(r"`bench (\w+)` \{(\w+)\}", measured)
    test = re.search(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", measured)
    assert benchmark or test, measured
    if benchmark:
        keys = importlib.import_module(f"benchmarks.{benchmark[1]}").KEYS
        assert benchmark[2] in keys
    if test:
        source = (ROOT / test[1]).read_text()
        assert not test[2] or f"def {test[2]}(" in source


def test_event_kinds_are_those_that_are_emitted() -> None:
    """docs/events.md names no kind that no actor emits, and leaves none out; these are the kinds that may be asked for."""
    from dsec.bus.events import KINDS

    text = (ROOT / "docs/events.md").read_text()
    documented = set(re.findall(r"^\| (\w+) \|", text[text.index("| kind | when |") :], re.MULTILINE)) - {"kind"}
    source = "".join(path.read_text() for path in (ROOT / "dsec/actors").glob("*.py"))
    emitted = set(re.findall(r"(?:emit|changed|outbox\.make)\((?:self, |sandbox, )?\"(\w+)\"", source))
    assert documented == emitted == set(KINDS)


def test_compose_starts_every_actor() -> None:
    """docker-compose.yml is valid YAML, names each actor once, and only the Edge is privileged."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert set(services) == {"nats", "scheduler", "watcher", "edge"}
    assert [name for name, service in services.items() if service.get("privileged")] == ["edge"]
    for name in ("scheduler", "watcher", "edge"):
        assert services[name]["command"] == ["serve", name]
        assert services[name]["environment"]["DSEC_BUS__URL"].startswith("nats://nats:")
        assert "nats" in services[name]["depends_on"]
        config.parse({}, services[name]["environment"])  # an unknown key is an error
    assert services["nats"]["command"] == ["-c", "/opt/dsec/config/nats.conf"]
    kept = {volume.split(":")[1] for volume in services["edge"]["volumes"]}
    assert config.Config().edge.state_dir in kept
    assert services["nats"]["volumes"][0].split(":")[1] in (ROOT / "config/nats.conf").read_text()


def test_dockerfile_copies_what_is_there() -> None:
    """Every path that the Dockerfile copies exists, and the lock file is installed with its hashes."""
    text = (ROOT / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
    assert "--require-hashes" in text
    assert [step.kind for step in dockerfile.parse(text).steps] == ["run", "workdir", *["copy", "run"], *["copy"] * 4, "run"]


def test_the_image_has_the_mkfs_that_setup_makes() -> None:
    """Both have mkfs.erofs 1.8, so that layers made in one and in the other are the same: the image's release is the one that set-up
    takes the source from, and its package is that version."""
    base = dockerfile.parse((ROOT / "Dockerfile").read_text()).base
    steps = "".join(path.read_text() for path in (ROOT / ".ci").iterdir() if path.is_file())
    suite = re.search(r'^SUITE = "(\w+)"', steps, re.MULTILINE)
    assert suite is not None
    assert base == f"{bootstrap.debian_name(suite[1]).replace('-', ':')}-slim"


def test_setup_and_image_install_the_same_packages() -> None:
    """What .ci/setup installs from apt for a node, the Dockerfile installs too (the benchmarks' peers apart)."""
    setup = set(re.findall(r"^want \S+ (\S+)", (ROOT / ".ci/setup").read_text(), re.MULTILINE)) - {"bubblewrap"}
    assert setup <= set((ROOT / "Dockerfile").read_text().split())


def test_nats_configuration_keeps_what_it_acknowledged() -> None:
    """The example configuration syncs JetStream on every write, as the embedded server's does."""
    text = (ROOT / "config/nats.conf").read_text()
    assert re.search(r"^\s*sync_interval: always$", text, re.MULTILINE)
