from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from downrange.store.errors import DiskFull
from downrange.store.files import OsFiles
from downrange.store.log import headroom as sizes
from downrange.store.log.headroom import AHEAD, STEP, Headroom
from downrange.store.log.segment import Segment, segment_name
from downrange.store.message_store import MessageStore
from tests.unit.store.small_store import FailingFiles, bodies, open_store, put

PIECE = 4096
SIZE = 10 * PIECE + 100


class RecordedFiles(FailingFiles):
    """Real files that remember every write of zeros, as (position, length)."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[tuple[int, int]] = []

    def write_at(self, descriptor: int, data: bytes | bytearray | memoryview, position: int) -> None:
        super().write_at(descriptor, data, position)
        if not any(data):
            self.writes.append((position, len(data)))


@pytest.fixture
def files() -> RecordedFiles:
    return RecordedFiles()


@pytest.fixture
def path(tmp_path: Path, files: RecordedFiles) -> Path:
    path = tmp_path / segment_name(0)
    files.create(path, SIZE)
    return path


@pytest.fixture
def headroom(path: Path, files: RecordedFiles) -> Headroom:
    headroom = Headroom(path, SIZE, files, piece=PIECE)
    headroom.begin_at(0)
    return headroom


def blocks(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_it_is_extended_by_whole_pieces_that_have_blocks(headroom: Headroom, path: Path, files: RecordedFiles) -> None:
    headroom.extend(PIECE + 1)
    assert headroom.end == 2 * PIECE
    assert files.writes == [(0, PIECE), (PIECE, PIECE)]
    assert blocks(path) >= 2 * PIECE


def test_what_is_ready_is_not_written_again(headroom: Headroom, files: RecordedFiles) -> None:
    headroom.extend(PIECE)
    headroom.extend(PIECE)
    headroom.extend(10)
    assert files.writes == [(0, PIECE)]


def test_it_ends_with_the_file(headroom: Headroom, path: Path, files: RecordedFiles) -> None:
    headroom.extend(SIZE + 12345)
    assert headroom.end == SIZE
    assert files.writes[-1] == (10 * PIECE, 100)
    assert path.stat().st_size == SIZE


def test_data_before_it_stays(headroom: Headroom, path: Path, files: RecordedFiles) -> None:
    path.write_bytes(b"x" * 5000 + bytes(SIZE - 5000))
    headroom.begin_at(5000)
    headroom.extend(3 * PIECE)
    assert files.writes == [(5000, 2 * PIECE - 5000), (2 * PIECE, PIECE)]
    assert path.read_bytes() == b"x" * 5000 + bytes(SIZE - 5000)


def test_of_a_file_whose_end_is_not_known_nothing_is_written(path: Path, files: RecordedFiles) -> None:
    path.write_bytes(b"x" * SIZE)
    Headroom(path, SIZE, files, piece=PIECE).extend(SIZE)
    segment = Segment(path, SIZE, files)
    assert segment.next_stretch() is None
    assert files.writes == []


def test_a_full_disk_leaves_what_was_ready(headroom: Headroom, files: RecordedFiles) -> None:
    headroom.extend(PIECE)
    files.fail["write_at"] = errno.ENOSPC
    with pytest.raises(OSError, match="No space"):
        headroom.extend(3 * PIECE)
    assert headroom.end == PIECE
    files.fail.clear()
    headroom.extend(3 * PIECE)
    assert headroom.end == 3 * PIECE


class HeldFiles(OsFiles):
    """A worker's writes stop before the piece at `hold_at` until they are let go."""

    def __init__(self, hold_at: int) -> None:
        self._hold_at = hold_at
        self.is_held = threading.Event()
        self.let_go = threading.Event()

    def write_at(self, descriptor: int, data: bytes | bytearray | memoryview, position: int) -> None:
        if position == self._hold_at and threading.current_thread() is not threading.main_thread():
            self.is_held.set()
            assert self.let_go.wait(30)
        super().write_at(descriptor, data, position)


def opened(path: Path, size: int, files: OsFiles) -> Segment:
    files.create(path, size)
    segment = Segment(path, size, files, piece=PIECE)
    segment.set_end(0)
    segment.open_for_append()
    return segment


def test_an_append_never_overtakes_the_zeros_of_a_worker(tmp_path: Path) -> None:
    """The worker is in the middle of a piece that an append wants: were it not waited for, zeros would follow data."""
    files = HeldFiles(PIECE)
    segment = opened(tmp_path / segment_name(0), SIZE, files)
    assert segment.make_room(PIECE - 8)
    stretch = segment.next_stretch()
    assert stretch is not None
    worker = threading.Thread(target=stretch.prepare)
    worker.start()
    assert files.is_held.wait(30)
    timer = threading.Timer(0.05, files.let_go.set)
    timer.start()
    segment.append_raw(memoryview(b"x" * (2 * PIECE)))
    assert files.let_go.is_set()
    worker.join()
    assert bytes(segment.view[: 2 * PIECE]) == b"x" * (2 * PIECE)


def test_a_stretch_that_was_taken_back_is_left_alone_for_ever(tmp_path: Path) -> None:
    segment = opened(tmp_path / segment_name(0), SIZE, OsFiles())
    stretch = segment.next_stretch()
    assert stretch is not None
    assert segment.next_stretch() is None  # somebody is at it
    segment.append_raw(memoryview(b"x" * (2 * PIECE)))
    stretch.prepare()  # too late
    assert bytes(segment.view[: 2 * PIECE]) == b"x" * (2 * PIECE)
    again = segment.next_stretch()
    assert again is not None
    again.prepare()
    assert segment.next_stretch() is None
    assert bytes(segment.view[: 2 * PIECE]) == b"x" * (2 * PIECE)


def test_a_stretch_that_failed_may_be_tried_again(headroom: Headroom, files: RecordedFiles) -> None:
    stretch = headroom.next_stretch(3 * PIECE)
    assert stretch is not None
    files.fail["reserve"] = errno.ENOSPC
    with pytest.raises(OSError, match="No space"):
        stretch.prepare()
    files.fail.clear()
    again = headroom.next_stretch(3 * PIECE)
    assert again is not None
    again.prepare()
    assert headroom.end == 3 * PIECE


def test_appends_beside_a_worker_keep_every_byte(tmp_path: Path) -> None:
    """Both get ready the same file as fast as they can; whoever is first, nothing that was appended becomes zeros."""
    for turn in range(20):
        size = 64 * PIECE
        segment = opened(tmp_path / segment_name(turn * size), size, OsFiles())
        workers = []
        data = os.urandom(997)
        written = b""
        while segment.make_room(len(data)):
            stretch = segment.next_stretch()
            if stretch is not None:
                workers.append(threading.Thread(target=stretch.prepare))
                workers[-1].start()
            segment.append_raw(memoryview(data))
            written += data
        for worker in workers:
            worker.join()
        assert bytes(segment.view[: len(written)]) == written


def prepare(store: MessageStore) -> bool:
    """What a worker does; whether there was something to do."""
    stretch = store.next_stretch()
    if stretch is not None:
        store.prepare_stretch(stretch)
    return stretch is not None


def test_a_worker_keeps_a_stretch_ready_and_appends_write_none(tmp_path: Path) -> None:
    files = RecordedFiles()
    with open_store(tmp_path, files=files, mapped_file_size_commit_log=AHEAD + STEP) as store:
        used: list[int] = []
        store.commit_log.on_room_used = lambda: used.append(store.max_offset)
        assert not prepare(store)
        put(store, b"first")
        assert used == [0]
        assert files.writes == [(0, sizes.PIECE)]
        assert prepare(store)
        assert not prepare(store)
        assert sum(length for _, length in files.writes) == AHEAD + sizes.PIECE
        ready = len(files.writes)
        body = bytes(60_000)
        while used[-1] < AHEAD - STEP:
            put(store, body)
        assert len(files.writes) == ready
        assert len(used) == 5
        assert prepare(store)


def test_the_next_file_is_made_ready_when_this_one_ends(tmp_path: Path) -> None:
    files = RecordedFiles()
    with open_store(tmp_path, files=files) as store:
        put(store)
        store.prepare_next_file()
        assert prepare(store)
        assert files.writes == [(0, 4096), (0, 4096)]
        put(store, bytes(2000))
        put(store, bytes(2000))
        assert store.max_offset > 4096
        assert files.writes == [(0, 4096), (0, 4096)]


def test_no_room_for_a_worker_is_a_full_disk(tmp_path: Path) -> None:
    files = FailingFiles()
    with open_store(tmp_path, files=files, mapped_file_size_commit_log=4 << 20) as store:
        put(store, b"first")
        files.fail["reserve"] = errno.ENOSPC
        with pytest.raises(DiskFull, match="no room for more of the commit log"):
            prepare(store)
        put(store, b"second")  # what is ready may still be used
        files.fail.clear()
        assert prepare(store)
        assert bodies(store) == [b"first", b"second"]


def test_a_log_that_is_opened_again_goes_on_with_zeros_behind_its_end(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, b"first")
        end = store.max_offset
    files = RecordedFiles()
    with open_store(tmp_path, files=files) as store:
        put(store, b"second")
        assert files.writes[0] == (end, 4096 - end)
        assert bodies(store) == [b"first", b"second"]


def test_there_is_always_room_for_the_blank_record(tmp_path: Path) -> None:
    """The file is left with a blank record; its page must have a block even if nothing was appended since the start."""
    with open_store(tmp_path) as store:
        put(store, b"first")
        end = store.max_offset
    files = RecordedFiles()
    with open_store(tmp_path, files=files) as store:
        put(store, bytes(3980))
        assert store.max_offset > 4096
        assert files.writes[0] == (end, 4096 - end)
