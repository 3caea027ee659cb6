"""The journal of names, and the parsing of apt's sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.errors import InvalidRequest
from dsec.layers import aptsources
from dsec.layers.importer import check_at
from dsec.layers.index import PASSING, Entry, Index, check_name

D1, D2 = "sha256:" + "1" * 64, "sha256:" + "2" * 64


def test_the_newest_entry_of_a_name_counts_and_history_keeps_all(tmp_path: Path) -> None:
    """tag, tag again, untag."""
    index = Index(str(tmp_path / "names"))
    index.append(Entry(op="tag", name="a", digest=D1))
    index.append(Entry(op="tag", name="a", digest=D2))
    index.append(Entry(op="tag", name="b", digest=D1))
    index.append(Entry(op="untag", name="b"))
    assert index.names() == {"a": D2}
    assert [entry.digest for entry in index.history("a")] == [D1, D2]


def test_another_processs_changes_are_seen(tmp_path: Path) -> None:
    """Two indexes of one file agree."""
    one, two = Index(str(tmp_path / "names")), Index(str(tmp_path / "names"))
    assert two.names() == {}
    one.append(Entry(op="tag", name="a", digest=D1))
    assert two.names() == {"a": D1}


def test_checkpoints_that_are_gone_do_not_fill_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of names of checkpoints come and go in a journal of bounded size; other names keep their history, readers see no gap."""
    monkeypatch.setattr("dsec.layers.index.COMPACT_BYTES", 4096)
    monkeypatch.setattr("os.fsync", lambda _: None)
    path = tmp_path / "names"
    one, two = Index(str(path)), Index(str(path))
    one.append(Entry(op="tag", name="a", digest=D1))
    one.append(Entry(op="tag", name="a", digest=D2))
    one.append(Entry(op="tag", name=f"{PASSING}n/kept", digest=D1))
    for number in range(500):
        one.append(Entry(op="tag", name=f"{PASSING}n/{number}", digest=D1))
        assert two.names() == {"a": D2, f"{PASSING}n/kept": D1, f"{PASSING}n/{number}": D1}
        one.append(Entry(op="untag", name=f"{PASSING}n/{number}"))
    assert path.stat().st_size < 3 * 4096
    assert [entry.digest for entry in Index(str(path)).history("a")] == [D1, D2]


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_torn_last_line_loses_only_itself(tmp_path: Path, cut: int) -> None:
    """A crash in an append neither hides earlier names nor swallows the next one."""
    path = tmp_path / "names"
    index = Index(str(path))
    index.append(Entry(op="tag", name="a", digest=D1))
    index.append(Entry(op="tag", name="torn", digest=D2))
    path.write_bytes(path.read_bytes()[:-cut])
    after = Index(str(path))
    assert "a" in after.names()
    after.append(Entry(op="tag", name="b", digest=D2))
    assert {"a", "b"} <= Index(str(path)).names().keys()


@pytest.mark.parametrize("name", ["debian-12", "repo@v1.2", "name:tag", "team/repo@feature_x", "A"])
def test_usable_names(name: str) -> None:
    """What the README shows."""
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "..", "../x", "a/../b", "/a", "a/", "-a", "a b", "a\0b", "a@", "a:b:c", "sha256:abc", "x" * 300, "a\n"]
)
def test_unusable_names_are_typed_errors(name: str) -> None:
    """Paths, control characters and digests are no names."""
    with pytest.raises(InvalidRequest):
        check_name(name)


@pytest.mark.parametrize(("at", "where"), [("/", "."), ("/opt/x", "opt/x"), ("//opt/./x/", "opt/x")])
def test_places_in_a_layer(at: str, where: str) -> None:
    """Absolute, normalised."""
    assert check_at(at) == where


@pytest.mark.parametrize("at", ["", "opt", "/a/../b", "/..", "/a\0b", "/" + "x" * 256])
def test_places_that_would_leave_the_layer_are_refused(at: str) -> None:
    """No relative path, no dots."""
    with pytest.raises(InvalidRequest):
        check_at(at)


def test_deb822_stanzas_are_filtered_by_suite_and_lose_credentials() -> None:
    """Other vendors' archives stay out of a base, and so do passwords."""
    text = """# a comment
Types: deb deb-src
URIs: https://user:secret@mirror.example/debian
Suites: bookworm bookworm-updates trixie
Components: main
Signed-By: /usr/share/keyrings/k.gpg

Types: deb
URIs: https://vendor.example/x
Suites: nodistro
Components: main

Types: deb
Enabled: no
URIs: https://off.example
Suites: bookworm
Components: main
"""
    found = aptsources.for_suite(aptsources.parse_deb822(text), "bookworm")
    assert [source.suites for source in found] == [("bookworm", "bookworm-updates")]
    assert "secret" in aptsources.render(found, credentials=True)
    shown = aptsources.render(found, credentials=False)
    assert "secret" not in shown
    assert "https://mirror.example/debian" in shown
    assert aptsources.parse_deb822(shown)[0].signed_by == "/usr/share/keyrings/k.gpg"


def test_one_line_sources() -> None:
    """Options, comments and deb-src lines."""
    text = """deb [arch=amd64 signed-by=/k.gpg] http://m.example/debian bookworm main contrib # c
deb-src http://m.example bookworm main
#deb x y z
"""
    (source,) = aptsources.parse_one_line(text)
    assert (source.suites, source.components, source.signed_by) == (("bookworm",), ("main", "contrib"), "/k.gpg")


def test_a_release_that_the_machine_lacks_has_no_sources() -> None:
    """Security updates alone are no release: the tool's own default is used then."""
    sources = aptsources.parse_one_line("deb http://m.example bookworm-security main\ndeb http://u.example noble main")
    assert aptsources.for_suite(sources, "bookworm") == []
