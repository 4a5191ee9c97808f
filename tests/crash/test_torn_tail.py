"""A power cut can leave any part of the last record on disk. It is then whole or gone, never served damaged."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from downrange.store.files import OS_FILES, OsFiles
from tests.support.checked_store import assert_clean, checked
from tests.support.damage import CrashedStore, everything, log_file, overwrite
from tests.unit.store.small_store import open_store


def cut_last_record(crashed: CrashedStore, kept: int, rest: bytes) -> Path:
    root = crashed.copy()
    overwrite(log_file(root, crashed.last_record), (crashed.last_record + kept) % 4096, rest)
    return root


def test_a_record_whose_end_is_missing_is_whole_or_gone(tmp_path: Path) -> None:
    crashed = CrashedStore(tmp_path / "store", tmp_path, messages=13)
    size = crashed.end - crashed.last_record
    for kept in range(size + 1):
        root = cut_last_record(crashed, kept, bytes(size - kept))
        with crashed.reopen(root) as store:
            assert everything(store) == (crashed.before if kept == size else crashed.before[:-1])
            if kept < size:
                assert store.max_offset == crashed.last_record
                assert not any(log_file(root, crashed.last_record).read_bytes()[crashed.last_record % 4096 :])
                assert store.query("TopicTest", "U12", 8, 0, 1 << 62).slices == []
        assert_clean(root)
        shutil.rmtree(root)


def test_a_record_that_ends_in_garbage_is_never_served_with_a_wrong_body(tmp_path: Path) -> None:
    crashed = CrashedStore(tmp_path / "store", tmp_path, messages=13)
    size = crashed.end - crashed.last_record
    *earlier, last = crashed.before
    chance = random.Random(7)
    for kept in range(size):
        root = cut_last_record(crashed, kept, chance.randbytes(size - kept))
        with crashed.reopen(root) as store:
            found = everything(store)
            assert found[: len(earlier)] == earlier
            # Nothing protects topic and properties. Garbage that is text by chance cannot be told from a message.
            for message in found[len(earlier) :]:
                assert kept > size - 3
                assert (message.body, message.physical_offset) == (last.body, last.physical_offset)
        shutil.rmtree(root)


def test_check_tells_a_torn_tail_from_the_end(tmp_path: Path) -> None:
    crashed = CrashedStore(tmp_path / "store", tmp_path, messages=13)
    overwrite(log_file(crashed.root, crashed.end), (crashed.end - 20) % 4096, bytes(20))
    assert any("no text" in problem.what for problem in checked(crashed.root).problems)
    overwrite(log_file(crashed.root, crashed.end), (crashed.end - 100) % 4096, bytes(100))
    problems = checked(crashed.root).problems
    assert any(f"cuts the log at {crashed.last_record}" in problem.remedy for problem in problems)
    with crashed.reopen(crashed.root) as store:
        assert store.max_offset == crashed.last_record
    assert_clean(crashed.root)


class SizeWatchingFiles(OsFiles):
    """The real files; notes the size of one of them around everything that is done to it."""

    def __init__(self, watched: Path) -> None:
        self._watched = watched
        self.sizes: set[int] = set()

    def clear_from(self, path: Path, position: int) -> None:
        assert path == self._watched
        super().clear_from(path, position)

    def write_at(self, descriptor: int, data: bytes | bytearray | memoryview, position: int) -> None:
        self.sizes.add(self._watched.stat().st_size)
        super().write_at(descriptor, data, position)
        self.sizes.add(self._watched.stat().st_size)


def test_a_tail_is_cleared_without_changing_the_size_of_its_file(tmp_path: Path) -> None:
    """A process that died while it cleared the tail must leave a file that the next start accepts."""
    crashed = CrashedStore(tmp_path / "store", tmp_path, messages=13)
    path = log_file(crashed.root, crashed.last_record)
    overwrite(path, (crashed.last_record + 90) % 4096, b"\xff" * 20)
    files = SizeWatchingFiles(path)
    open_store(crashed.root, clock=crashed.clock, files=files).close()
    assert files.sizes == {4096}
    assert not any(path.read_bytes()[crashed.last_record % 4096 :])


def test_clearing_keeps_holes_and_what_stands_before(tmp_path: Path) -> None:
    path = tmp_path / "file"
    OS_FILES.create(path, 8 << 20)
    overwrite(path, 0, b"a" * 10_000)
    overwrite(path, 4 << 20, b"b" * 10_000)
    OS_FILES.clear_from(path, 5_000)
    data = path.read_bytes()
    assert len(data) == 8 << 20
    assert data[:5_000] == b"a" * 5_000
    assert not any(data[5_000:])
    assert path.stat().st_blocks * 512 < 1 << 20


def test_a_start_that_died_while_clearing_is_made_good_by_the_next(tmp_path: Path) -> None:
    crashed = CrashedStore(tmp_path / "store", tmp_path, messages=13)
    path = log_file(crashed.root, crashed.last_record)
    # The front of the tail is zero already, its rest is not.
    overwrite(path, crashed.last_record % 4096, bytes(100))
    with crashed.reopen(crashed.root) as store:
        assert everything(store) == crashed.before[:-1]
    assert not any(path.read_bytes()[crashed.last_record % 4096 :])
    assert_clean(crashed.root)
