"""What removes trees enters no mounts, follows no links, and takes any depth."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsec import trees

# Everything is mounted in a mount namespace of its own; what is mounted is a directory of the test's.
_MOUNTED = """
import os, sys
from dsec import syscalls, trees
top = sys.argv[1]
syscalls.unshare(syscalls.CLONE_NEWNS)
syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
syscalls.mount(top + "/precious", top + "/tree/deep/dev", None, syscalls.MS_BIND)
for remove in (trees.remove, trees.empty):
    for path in ("/tree", "/tree/deep", "/tree/deep/dev"):
        try:
            remove(top + path)
        except OSError as error:
            print(error.errno, error.filename)
"""


def test_a_tree_is_removed_and_links_out_of_it_are_not_followed(tmp_path: Path) -> None:
    """Files, links, pipes and directories go; what links name stays; a link in a directory's place is no directory."""
    tree, other = tmp_path / "tree", tmp_path / "other"
    for directory in (tree / "a/b", tree / "c", other):
        directory.mkdir(parents=True)
    for file in (tree / "a/f", tree / "a/b/g", other / "kept"):
        file.write_text("x")
    (tree / "a/out").symlink_to(other)
    (tree / "broken").symlink_to("nowhere")
    os.mkfifo(tree / "c/pipe")
    trees.empty(tree / "a")
    assert sorted(os.listdir(tree)) == ["a", "broken", "c"]
    assert os.listdir(tree / "a") == []
    trees.remove(str(tree))
    assert os.listdir(tmp_path) == ["other"]
    assert (other / "kept").exists()
    (tmp_path / "link").symlink_to(other)
    with pytest.raises(OSError, match="link"):
        trees.remove(tmp_path / "link")
    with pytest.raises(FileNotFoundError):
        trees.remove(tmp_path / "nothing")
    assert (other / "kept").exists()


def test_a_tree_of_any_depth_is_removed(tmp_path: Path) -> None:
    """3,000 levels: more than Python's frames, and a path longer than the kernel takes."""
    tree = tmp_path / "tree"
    tree.mkdir()
    fd = os.open(tree, os.O_RDONLY)
    for _ in range(3_000):
        os.mkdir("directory", dir_fd=fd)
        below = os.open("directory", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    before = len(os.listdir("/proc/self/fd"))
    trees.remove(tree)
    assert not tree.exists()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.needs("root")
def test_what_is_mounted_below_is_not_removed(tmp_path: Path) -> None:
    """A mount of the same file system in the tree, or the tree itself: an error that names it, and what is behind it stays."""
    (tmp_path / "tree/deep/dev").mkdir(parents=True)
    (tmp_path / "precious/sub").mkdir(parents=True)
    (tmp_path / "precious/null").write_text("x")
    done = subprocess.run([sys.executable, "-c", _MOUNTED, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{errno.EXDEV} {tmp_path}/tree/deep/dev"] * 6, done.stderr
    assert sorted(os.listdir(tmp_path / "precious")) == ["null", "sub"]
