"""What is fetched beside what is read: the rest of the same file, the more the more was read, and no other's."""

from __future__ import annotations

import asyncio
import struct
import time
from pathlib import Path

import pytest

from dsec.backends.guest import build
from dsec.layers import erofs, units
from dsec.layers.units import LARGE, MOST, SOON, STEP, STRETCH, Units

CHUNK = 1000
PROGRAM, FOLDER = 1, 2


def nothing(_number: int) -> bool:
    return False


def read(units: Units, offset: int, length: int = 1) -> list[int]:
    return units.read(offset, range(offset // CHUNK, (offset + length - 1) // CHUNK + 1), nothing)


def test_a_file_of_a_few_chunks_comes_as_a_whole_and_nothing_of_its_neighbours() -> None:
    """It begins and ends where the metadata says, in the middle of chunks."""
    made = Units([(0, 2500, 1, 0), (2500, 2500 + SOON * CHUNK - CHUNK, 2, 0), (9600, 20_000, 3, 0)], CHUNK, 20)
    assert sorted(read(made, 3100)) == [2, 4, 5, 6, 7, 8, 9]
    assert read(made, 3100) == []


def test_of_a_large_file_comes_more_the_more_of_it_was_read() -> None:
    """What follows comes first; what is asked for once is not asked for again."""
    made = Units([(0, 1000 * CHUNK, 1, 0)], CHUNK, 1000)
    assert read(made, 500 * CHUNK) == [501, 502]
    assert read(made, 501 * CHUNK) == [503, 504, 505]
    assert read(made, 510 * CHUNK) == [511, 512]
    asked = {*range(500, 506), 510, 511, 512}
    for number in range(600, 700):
        more = read(made, number * CHUNK)
        assert len(more) <= STEP
        assert not asked & set(more)
        asked |= {number, *more}
    assert len(asked) <= 103 + MOST


def test_a_programs_end_comes_with_its_beginning() -> None:
    """The dynamic loader writes to its data at once; a chunk that is there is not fetched."""
    made = Units([(0, 100 * CHUNK, 1, PROGRAM)], CHUNK, 100)
    assert read(made, 0)[0] == 99
    made = Units([(0, 100 * CHUNK, 1, PROGRAM)], CHUNK, 100)
    assert made.read(0, range(1), lambda number: number in (1, 99)) == [2]


def test_small_files_bring_those_of_their_directory() -> None:
    """Wherever they lie; a chunk that several directories share is everybody's."""
    made = Units([(0, 1500, 1, FOLDER), (1500, 8200, 2, FOLDER), (8200, 12_000, 1, FOLDER)], CHUNK, 12)
    assert read(made, 100) == [1]
    assert read(made, 9000) == [10]
    assert read(made, 8500) == [11]
    assert read(made, 5000) == [6]


def test_without_the_metadata_a_stretch_of_the_blob_is_read_ahead_with_care() -> None:
    """Never beyond its end."""
    made = Units([], CHUNK, STRETCH + 3)
    assert read(made, 0) == []
    assert read(made, CHUNK) == [2]
    assert read(made, STRETCH * CHUNK) == []
    assert read(made, (STRETCH + 2) * CHUNK) == [STRETCH + 1]
    assert made.read(99 * CHUNK, range(0), nothing) == []


@pytest.fixture(scope="module")
def library() -> str:
    return str(build.ensure(program="hand"))


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tree as metadata and blob."""
    if not erofs.available():
        pytest.skip("no mkfs.erofs")
    place = tmp_path_factory.mktemp("units")
    tree = place / "tree"
    files = {
        "lib/libx.so.1": LARGE + 1,
        "lib/archive": LARGE + 70_000,
        "lib/small": 3000,
        "lib/.hidden/other": 5000,
        "lib/b": 70,
        "empty": 0,
    }
    for seed, (name, size) in enumerate(files.items(), 1):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(bytes((seed * 31 + at * at * seed) % 251 for at in range(size)))
    (tree / "lib/again").hardlink_to(tree / "lib/small")
    for number in range(300):
        (tree / "many" / f"{number:03d}").parent.mkdir(exist_ok=True)
        (tree / "many" / f"{number:03d}").write_bytes(b"%03d" % number * 50)
    image, blob = place / "image", place / "blob"
    blob.touch()
    asyncio.run(erofs.build(str(tree), str(image), erofs.survey(str(tree)), blob=str(blob)))
    return tree, place


def test_the_metadata_tells_which_bytes_are_one_files_or_one_directorys(split: tuple[Path, Path], library: str) -> None:
    """Each file's bytes are found in the blob where its unit is."""
    tree, place = split
    data = (place / "blob").read_bytes()
    found = units.read(str(place / "image"), library)
    assert found == sorted(found)

    def unit(name: str) -> tuple[int, int]:
        content = (tree / name).read_bytes()
        at = data.index(content[:4000])
        return next((number, flags) for start, end, number, flags in reversed(found) if start <= at and at + len(content) <= end)

    assert unit("lib/libx.so.1")[1] == PROGRAM
    assert unit("lib/archive")[1] == 0
    assert unit("lib/small") == unit("lib/b")
    assert unit("lib/small")[1] == FOLDER
    assert len({unit(name)[0] for name in ("lib/libx.so.1", "lib/archive", "lib/small", "lib/.hidden/other", "many/000")}) == 5
    assert len({unit(f"many/{number:03d}") for number in range(300)}) == 1


def test_a_damaged_image_is_a_lesser_hint_and_nothing_worse(split: tuple[Path, Path], library: str, tmp_path: Path) -> None:
    """Whatever its bytes are: extents in order within what 48 bits can say, or none. Without the library there are none."""
    whole = (split[1] / "image").read_bytes()
    path = tmp_path / "image"
    for seed in range(200):
        broken = bytearray(whole)
        for number in range(1 + seed % 40):
            at = (seed * 7919 + number * 104_729 + 1024) % len(whole) if seed % 2 else 1024 + (seed * 31 + number * 17) % 3000
            broken[at] = (seed * 13 + number * 7) % 256
        path.write_bytes(broken[: len(whole) - seed * 11 if seed % 5 == 0 else len(whole)])
        found = units.read(str(path), library)
        assert all(start < end for start, end, _, _ in found)
        assert [start for start, _, _, _ in found] == sorted(start for start, _, _, _ in found)
    path.write_bytes(b"")
    assert units.read(str(path), library) == units.read(str(tmp_path / "none"), library) == []
    assert units.read(str(split[1] / "image"), str(tmp_path / "none")) == []


def test_an_image_that_goes_in_circles_ends(library: str, tmp_path: Path) -> None:
    """Every entry of its root is the root again, so that each look at it finds a third of a million others: it is left after as many steps
    as it has bytes."""
    size, block = 4 << 20, 512
    image = bytearray(size)
    struct.pack_into("<I", image, 1024, 0xE0F5E1E2)
    struct.pack_into("<BBH", image, 1024 + 12, 9, 0, 0)
    struct.pack_into("<I", image, 1024 + 40, 4)  # inodes are from block 4
    struct.pack_into("<HHHHIII", image, 4 * block, 0, 0, 0o40755, 2, size - 8 * block, 0, 8)
    entry = b"".join(struct.pack("<QHBB", 0, 504, 2, 0) for _ in range(42)) + b"again\0\0\0"
    image[8 * block :] = entry * (size // block - 8)
    path = tmp_path / "image"
    path.write_bytes(image)
    began = time.thread_time()
    assert units.read(str(path), library) == []
    assert time.thread_time() - began < 20  # without that end an hour


def test_what_names_nothing_costs_steps_too(library: str, tmp_path: Path) -> None:
    """Half a million directories that are all of the image, whose blocks hold no entry: they are left like those that go in circles. The
    name at its very end has no byte, and nothing behind it is looked at."""
    size, block = 16 << 20, 512
    blocks = size // 32 // 42 + 1
    image = bytearray(size)
    struct.pack_into("<I", image, 1024, 0xE0F5E1E2)
    struct.pack_into("<BBH", image, 1024 + 12, 9, 0, 0)
    struct.pack_into("<I", image, 1024 + 40, 4)  # inodes are from block 4
    struct.pack_into("<HHHHIII", image, 4 * block, 0, 0, 0o40755, 2, blocks * block, 0, 8)
    struct.pack_into("<HHHHIII", image, 4 * block + 32, 0, 0, 0o40755, 2, size // 2, 0, size // block // 2)
    entry = struct.pack("<QHBB", 1, 504, 2, 0) * 42 + b"again\0\0\0"
    image[8 * block : (8 + blocks) * block] = entry * blocks
    image[-block : 12 - block] = struct.pack("<QHBB", 1, 12, 2, 0)
    path = tmp_path / "image"
    path.write_bytes(image)
    began = time.thread_time()
    assert units.read(str(path), library) == []
    assert time.thread_time() - began < 20  # without that end some minutes
