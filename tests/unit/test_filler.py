"""A sparse file that is filled chunk by chunk: each is checked, fetched once, and there as soon as it has arrived."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dsec.layers.chunks import Altered, Filler
from dsec.layers.manifest import Manifest

CHUNK, COUNT = 100, 10
DATA = bytes(range(250)) * 4
Spans = Sequence[tuple[int, int]]


class Store:
    """Gives the pieces of DATA; ``before(number)`` is called before each, and may change what is given or raise."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.ends_before = COUNT
        self.before: Callable[[int], bytes | None] = lambda _offset: None

    def __call__(self, spans: Spans) -> Generator[bytes, None, None]:
        self.asked.append([offset // CHUNK for offset, _ in spans])
        for offset, length in spans:
            if offset // CHUNK == self.ends_before:
                return
            other = self.before(offset // CHUNK)
            yield DATA[offset : offset + length] if other is None else other


class Box:
    def __init__(self, place: Path) -> None:
        self.store = Store()
        self.path = place / "blob"
        self.path.touch()
        os.truncate(self.path, len(DATA))
        bitmap = str(place / "blob.map")
        Filler.create(bitmap)
        hashes = tuple(hashlib.sha256(DATA[start : start + CHUNK]).hexdigest() for start in range(0, len(DATA), CHUNK))
        known = Manifest(v=1, meta="", meta_size=0, size=len(DATA), chunk=CHUNK, chunks=hashes)
        self.fd = os.open(self.path, os.O_RDWR)
        self.pool = ThreadPoolExecutor(2)
        self.whole = threading.Event()
        self.filler = Filler(self.fd, known, bitmap, self.store, self.pool, self.whole.set)

    def there(self, number: int) -> bool:
        piece = self.path.read_bytes()[number * CHUNK : (number + 1) * CHUNK]
        return bool(self.filler.have[number]) and piece == DATA[number * CHUNK : (number + 1) * CHUNK]


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    made = Box(tmp_path)
    yield made
    made.pool.shutdown()
    made.filler.close()
    os.close(made.fd)


def test_each_chunk_is_there_as_soon_as_it_has_arrived(box: Box) -> None:
    """Whoever waits for the first of a run goes on before the second has come, and nobody asks for it again."""
    told: list[OSError | None] = []
    seen: list[tuple[bool, int]] = []

    def before(number: int) -> None:
        seen.append((box.there(number - 1), len(told)))

    box.store.before = before
    runs: list[list[int]] = []
    box.filler.want([4], told.append, behind=[5], start=runs.append)
    assert (runs, told) == ([[4, 5]], [])
    box.filler.want([5], told.append)
    box.filler.run(runs[0])
    assert seen == [(False, 0), (True, 1)]
    assert told == [None, None]
    assert box.store.asked == [[4, 5]]


def test_a_chunk_that_is_not_what_its_hash_says_is_an_error_of_its_readers_alone(box: Box) -> None:
    """The rest of its run is there, and so is the chunk itself when it is asked for again."""
    box.store.before = lambda number: bytes(CHUNK) if number == 2 else DATA[:7] if number == 3 else None
    box.filler.bring([1, 2, 3, 4])
    assert [box.there(number) for number in (1, 2, 3, 4)] == [True, False, False, True]
    with pytest.raises(Altered):
        box.filler.ensure([2])
    box.store.before = lambda _number: None
    box.filler.ensure([2, 3])
    assert box.there(2)
    assert box.there(3)


def test_a_file_that_took_the_place_of_a_whole_one_is_not_whole(box: Box) -> None:
    """Who completes a file that was removed meanwhile leaves the bits of the one that has its name now."""
    box.filler.ensure(range(COUNT - 1))
    os.unlink(box.filler.bitmap)
    Filler.create(box.filler.bitmap)
    box.filler.ensure([COUNT - 1])
    assert box.whole.wait(10)
    assert os.path.exists(box.filler.bitmap)


def test_who_closes_waits_for_the_thread_that_completes(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits are let go of when they have been removed, and not while another thread is about to."""
    begun, go, sync = threading.Event(), threading.Event(), os.fdatasync

    def late(fd: int) -> None:
        begun.set()
        go.wait(10)
        sync(fd)

    box.filler.ensure(range(COUNT - 1))
    monkeypatch.setattr(os, "fdatasync", late)
    box.filler.ensure([COUNT - 1])
    assert begun.wait(10)
    closing = threading.Thread(target=box.filler.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    go.set()
    closing.join(10)
    assert box.whole.is_set()
    assert not os.path.exists(box.filler.bitmap)


@pytest.mark.parametrize("how", ["error", "end"])
def test_a_run_that_breaks_off_leaves_nobody_waiting(box: Box, how: str) -> None:
    """What had arrived is there; the readers of the rest get an error, whatever went wrong."""
    told: list[OSError | None] = []
    runs: list[list[int]] = []
    box.filler.want([6], told.append, behind=[7, 8], start=runs.append)
    box.filler.want([7], told.append)
    if how == "error":
        box.store.before = lambda number: fail() if number == 7 else None
    else:
        box.store.ends_before = 7
    box.filler.run(runs[0])
    assert box.there(6)
    assert told[0] is None
    assert isinstance(told[1], OSError)
    assert not box.filler.have[7]


def fail() -> None:
    raise OSError(5, "gone")


def test_everything_once_and_then_it_is_whole(box: Box) -> None:
    """Long runs come in few requests; without the bitmap the file is whole for everybody."""
    box.filler.bring([3])
    box.filler.fill_all()
    assert box.path.read_bytes() == DATA
    assert sorted(number for run in box.store.asked for number in run) == list(range(COUNT))
    assert box.whole.wait(10)
    assert not os.path.exists(box.filler.bitmap)
