"""Configuration: strict, documented, overridable."""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path

import pytest

from dsec import config, doctor, syscalls
from dsec.errors import InvalidRequest, Unsupported

ROOT = Path(__file__).parents[2]


def test_the_file_shows_every_key_with_its_default() -> None:
    """config/dsec.toml is exactly what the Structs say, and reads back as the defaults."""
    assert (ROOT / "config" / "dsec.toml").read_text() == config.render()
    assert config.load(ROOT / "config" / "dsec.toml", {}) == config.Config()


def test_every_key_has_one_line_of_comment() -> None:
    """No key without words."""
    lines = config.render().splitlines()
    for before, line in itertools.pairwise(lines):
        if " = " in line and not line.startswith("#"):
            assert before.startswith("# ")
            assert len(before) > 12


@pytest.mark.parametrize("path", sorted((ROOT / "config" / "profiles").glob("*.toml")), ids=lambda p: p.stem)
def test_profiles_are_valid(path: Path) -> None:
    """Each profile loads."""
    config.load(path, {})


def test_an_unknown_key_is_named_with_its_neighbours() -> None:
    """Path and near matches are in the error."""
    with pytest.raises(InvalidRequest) as caught:
        config.parse({"edge": {"slotz": 3}})
    assert caught.value.field == "edge.slotz"
    assert "slots" in caught.value.fix
    with pytest.raises(InvalidRequest) as caught:
        config.parse({"egde": {}})
    assert "edge" in caught.value.fix


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"edge": {"slots": 0}}, "edge.slots"),
        ({"edge": {"slots": "many"}}, "edge.slots"),
        ({"edge": {"on_shutdown": "explode"}}, "edge.on_shutdown"),
        ({"edge": 3}, "edge"),
    ],
)
def test_a_wrong_value_is_named(data: dict[str, object], field: str) -> None:
    """Type and range errors carry the key's path, what was given and what would do."""
    with pytest.raises(InvalidRequest) as caught:
        config.parse(data)
    assert caught.value.field == field
    assert caught.value.value
    assert caught.value.fix


def test_the_environment_overrides() -> None:
    """DSEC_<ROOM>__<KEY> wins over the file, by the key's own type."""
    env = {
        "DSEC_EDGE__SLOTS": "7",
        "DSEC_EDGE__BACKENDS": "fake,container",
        "DSEC_EDGE__NAME": "12",
        "DSEC_DISABLE": "ipv6, fuse",
        "PATH": "/bin",
    }
    got = config.parse({"edge": {"slots": 3}}, env)
    assert (got.edge.slots, got.edge.backends, got.edge.name) == (7, ("fake", "container"), "12")
    with pytest.raises(InvalidRequest) as caught:
        config.parse({}, {"DSEC_EDGE__SLOTZ": "7"})
    assert caught.value.value == "DSEC_EDGE__SLOTZ"


def test_a_missing_or_broken_file_is_told(tmp_path: Path) -> None:
    """Neither is a traceback."""
    with pytest.raises(InvalidRequest, match="cannot read"):
        config.load(tmp_path / "absent.toml", {})
    (tmp_path / "bad.toml").write_text("[edge\n")
    with pytest.raises(InvalidRequest, match="not TOML"):
        config.load(tmp_path / "bad.toml", {})


def test_dump_reads_back() -> None:
    """What a child process is given is what it reads."""
    made = config.parse({"edge": {"labels": {"zone": 'a"b', "x.y": "1"}, "backends": ["fake"]}, "log": {"json": True}})
    assert config.parse(tomllib.loads(config.dump(made))) == made


def test_containers_need_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is not root hears so before anything starts; simulated sandboxes need none."""
    monkeypatch.setattr("os.geteuid", lambda: 65534)
    with pytest.raises(Unsupported, match="needs root") as caught:
        config.check_root(config.EdgeConfig())
    assert (caught.value.field, caught.value.value) == ("edge.backends", "container")
    assert "run as root" in caught.value.fix
    config.check_root(config.EdgeConfig(backends=("fake",)))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    config.check_root(config.EdgeConfig())


def test_a_feature_that_does_not_exist_cannot_be_hidden() -> None:
    """A misspelt DSEC_DISABLE would leave on what it was meant to hide: it is an error that names those that there are."""
    with pytest.raises(InvalidRequest) as caught:
        config.parse({}, {"DSEC_DISABLE": "userns,fanotfy"})
    assert (caught.value.field, caught.value.value) == ("DSEC_DISABLE", "fanotfy")
    assert "fanotify" in caught.value.fix


def test_every_feature_that_is_asked_for_can_be_hidden() -> None:
    """The list is that of the doctor and of what the code asks `syscalls.disabled` about."""
    code = "".join(path.read_text() for path in Path(config.__file__).parent.rglob("*.py"))
    asked = set(re.findall(r'disabled\("(\w+)"\)', code)) | {"quota", "btrfs"}
    assert set(doctor.names()) | asked == syscalls.FEATURES
