"""Where a running `dsec up` is noted, and what commands that name nothing make of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsec import config
from dsec.actors import noted
from dsec.actors.noted import Note
from dsec.commands import local
from dsec.errors import InvalidRequest

HERE = "nats://127.0.0.1:4222"


def test_a_note_is_there_while_its_writer_is(tmp_path: Path) -> None:
    """It goes with the block, and its folder too."""
    note = Note(os.getpid(), HERE, "/x.toml")
    where = tmp_path / "run"
    with noted.noted(note, where):
        assert noted.running(where) == [note]
    assert noted.running(where) == []
    assert not where.exists()


def test_the_note_of_one_that_was_killed_counts_for_nothing(tmp_path: Path) -> None:
    """The kernel let go of its lock, so whoever looks takes it away."""
    code = (
        "import os, signal, sys, pathlib; from dsec.actors.noted import Note, noted\n"
        "with noted(Note(os.getpid(), 'nats://h:1', '/x'), pathlib.Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    (left,) = tmp_path.iterdir()
    assert noted.running(tmp_path) == []
    assert not left.exists()


def test_a_folder_that_cannot_be_written_is_no_trouble(tmp_path: Path) -> None:
    """There is no note then."""
    (tmp_path / "file").touch()
    with noted.noted(Note(1, HERE, "/x"), tmp_path / "file" / "run"):
        pass


def test_which_one_is_meant() -> None:
    """The one at the address that was asked for; without one the only one, or that at the usual address."""
    usual, other = Note(1, "nats://localhost:4222", "a"), Note(2, "nats://127.0.0.1:5222", "b")
    assert noted.chosen([usual, other], "127.0.0.1:5222", asked=True) is other
    assert noted.chosen([other], HERE, asked=False) is other
    assert noted.chosen([other], HERE, asked=True) is None
    assert noted.chosen([other, usual], HERE, asked=False) is usual
    assert noted.chosen([], HERE, asked=False) is None
    with pytest.raises(InvalidRequest, match="several") as caught:
        noted.chosen([other, Note(3, "nats://127.0.0.1:5223", "c")], HERE, asked=False)
    assert (caught.value.field, "--store" in caught.value.fix) == ("url", True)


def test_commands_follow_the_up_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Edge's configuration is the node's, unless a file or the environment says where this node keeps its things."""
    for name in [name for name in os.environ if name.startswith("DSEC_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(noted, "folder", lambda: tmp_path / "run")
    edge = tmp_path / "n1.toml"
    edge.write_text(f'[edge]\nname = "n1"\nstate_dir = "{tmp_path}/edges/n1"\n[layers]\nstore_dir = "{tmp_path}/layers"\n')
    assert local.node_config(None) == config.Config()
    with noted.noted(Note(os.getpid(), HERE, str(edge)), tmp_path / "run"):
        assert local.layers_directory(local.node_config(None)) == f"{tmp_path}/layers"
        assert local.node_config(None).edge.name == "n1"
        monkeypatch.setenv("DSEC_EDGE__STATE_DIR", "/elsewhere")
        assert local.layers_directory(local.node_config(None)) == "/elsewhere/layers"


def test_what_is_no_address_is_refused_by_name() -> None:
    """A port that cannot be, in what was asked for; of several servers the first one counts, with a scheme or without."""
    notes = [Note(1, HERE, "/x.toml"), Note(2, "nats://127.0.0.1:4300", "/y.toml")]
    for url in ("nats://127.0.0.1:99999", "127.0.0.1:many"):
        with pytest.raises(InvalidRequest) as caught:
            noted.chosen(notes, url, asked=True)
        assert (caught.value.field, caught.value.value) == ("url", url)
    assert noted.chosen(notes, "127.0.0.1:4300, 10.0.0.1:4222", asked=True) == notes[1]
