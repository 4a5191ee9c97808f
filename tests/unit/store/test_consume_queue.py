from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from downrange.model.message import PhysicalOffset, QueueOffset, TopicQueue
from downrange.store.errors import StoreClosed, StoreCorrupt, StoreError
from downrange.store.files import OS_FILES, OsFiles
from downrange.store.queue.consume_queue import BLANK, ENTRY, ConsumeQueue, count_valid

FILE_SIZE = 200  # ten entries


class FailingFiles(OsFiles):
    """Fails the operations it is told to fail."""

    def __init__(self) -> None:
        self.failing: set[str] = set()
        self.open_descriptors: set[int] = set()

    def open(self, path: Path | str, *, writable: bool = True) -> int:
        descriptor = super().open(path, writable=writable)
        self.open_descriptors.add(descriptor)
        return descriptor

    def close(self, descriptor: int) -> None:
        self.open_descriptors.remove(descriptor)
        super().close(descriptor)

    def write_at(self, descriptor: int, data: bytes | bytearray | memoryview, position: int) -> None:
        if "write" in self.failing:
            raise OSError(28, "No space left on device")
        super().write_at(descriptor, data, position)

    def sync(self, descriptor: int) -> None:
        if "sync" in self.failing:
            raise OSError(5, "Input/output error")
        super().sync(descriptor)


def queue_at(
    directory: Path, files: OsFiles = OS_FILES, *, size: int = FILE_SIZE, writable: bool = True
) -> ConsumeQueue:
    queue = ConsumeQueue(directory, TopicQueue("orders", 3), size, files, writable=writable)
    queue.load()
    queue.recover()
    return queue


def put_range(queue: ConsumeQueue, start: int, stop: int) -> None:
    """Entry n points at byte 100·n, is 100 bytes long and has the tag n."""
    for number in range(start, stop):
        queue.put(QueueOffset(number), PhysicalOffset(number * 100), 100, number)


def numbers_of(queue: ConsumeQueue) -> list[int]:
    """The tags of everything readable, read file by file."""
    found: list[int] = []
    at: int = queue.min_offset
    while at < queue.max_offset:
        block = queue.read(QueueOffset(at), 1000)
        assert block
        found += [tags_code for _, _, tags_code in ENTRY.iter_unpack(block)]
        at += len(block) // ENTRY.size
    return found


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "consumequeue" / "orders" / "3"


def test_entries_come_back_before_and_after_they_are_written(directory: Path) -> None:
    queue = queue_at(directory)
    put_range(queue, 0, 7)
    assert not directory.exists()
    assert numbers_of(queue) == list(range(7))
    queue.write_pending()
    put_range(queue, 7, 9)
    queue.release()
    assert numbers_of(queue) == list(range(9))
    assert (queue.min_offset, queue.max_offset, queue.max_physical_offset) == (0, 9, 900)
    assert repr(queue) == "<ConsumeQueue orders/3 0..9, 2 pending>"


def test_a_read_joins_file_and_memory_but_never_crosses_a_file(directory: Path) -> None:
    queue = queue_at(directory)
    put_range(queue, 0, 4)
    queue.write_pending()
    queue.release()
    put_range(queue, 4, 25)
    assert len(queue.read(QueueOffset(2), 1000)) == 8 * ENTRY.size
    assert [tag for _, _, tag in ENTRY.iter_unpack(queue.read(QueueOffset(2), 5))] == [2, 3, 4, 5, 6]
    assert queue.read(QueueOffset(25), 5) == queue.read(QueueOffset(-1), 5) == queue.read(QueueOffset(0), 0) == b""
    assert [queue.next_file_offset(QueueOffset(n)) for n in (0, 9, 10, 25)] == [10, 10, 20, 30]


def test_files_have_their_full_size_and_are_sparse(tmp_path: Path) -> None:
    queue = queue_at(tmp_path / "big", size=6_000_000)
    put_range(queue, 0, 1)
    queue.write_pending()
    (path,) = (tmp_path / "big").iterdir()
    assert path.name == "0" * 20
    assert path.stat().st_size == 6_000_000
    assert path.stat().st_blocks * 512 < 100_000


def test_a_queue_that_begins_late_is_filled_up(directory: Path) -> None:
    queue = queue_at(directory)
    put_range(queue, 33, 35)
    queue.write_pending()
    (path,) = directory.iterdir()
    assert path.name == f"{600:020d}"
    entries = [ENTRY.pack(number * 100, 100, number) for number in (33, 34)]
    assert path.read_bytes() == (BLANK * 3 + b"".join(entries)).ljust(FILE_SIZE, b"\0")
    again = queue_at(directory)
    again.correct_min_offset(PhysicalOffset(0))
    for one in (queue, again):
        assert (one.min_offset, one.max_offset, numbers_of(one)) == (33, 35, [33, 34])


def test_duplicates_are_passed_over(directory: Path) -> None:
    queue = queue_at(directory)
    put_range(queue, 0, 15)
    put_range(queue, 0, 15)
    queue.put(QueueOffset(15), PhysicalOffset(1300), 100, 99)  # ends before what was seen
    queue.put(QueueOffset(4), PhysicalOffset(9000), 100, 99)  # a number that is taken
    assert numbers_of(queue) == list(range(15))


def test_a_lost_record_leaves_a_blank_and_its_followers_keep_their_numbers(directory: Path) -> None:
    queue = queue_at(directory)
    put_range(queue, 0, 8)
    put_range(queue, 11, 13)
    queue.write_pending()
    again = queue_at(directory)
    assert again.max_offset == 13
    assert again.read(QueueOffset(8), 1) == again.read(QueueOffset(10), 1) == BLANK
    assert ENTRY.unpack(again.read(QueueOffset(11), 1)) == (1100, 100, 11)
    again.correct_min_offset(PhysicalOffset(750))
    assert again.min_offset == 11
    again.truncate(PhysicalOffset(700))
    assert (again.max_offset, again.max_physical_offset) == (7, 700)


def test_missing_files_are_reported_not_papered_over(directory: Path) -> None:
    queue = queue_at(directory)
    put_range(queue, 0, 5)
    with pytest.raises(StoreCorrupt, match=r"ends at queue offset 5.* number 20: .*move the whole consumequeue"):
        queue.put(QueueOffset(20), PhysicalOffset(2000), 100, 0)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 20, 35])
def test_recovery_finds_the_end(directory: Path, count: int, clean: bool) -> None:
    queue = queue_at(directory)
    put_range(queue, 0, count)
    queue.write_pending()
    again = ConsumeQueue(directory, TopicQueue("orders", 3), FILE_SIZE, OS_FILES)
    again.load()
    again.recover(clean=clean)
    assert (again.max_offset, again.max_physical_offset) == (count, count * 100)
    assert again.is_dirty is (count > 0 and not clean)
    assert again.flush() is (count > 0 and not clean)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("count", [203, 204, 205, 5000, 299_999, 300_000])
def test_recovery_finds_the_end_of_a_large_file(directory: Path, count: int, clean: bool) -> None:
    OS_FILES.create(directory / ("0" * 20), 6_000_000)
    with (directory / ("0" * 20)).open("r+b") as stream:
        stream.write(ENTRY.pack(77, 200, -5) * count)
    queue = ConsumeQueue(directory, TopicQueue("orders", 3), 6_000_000, OS_FILES)
    queue.load()
    queue.recover(clean=clean)
    assert queue.max_offset == count


def test_what_lies_behind_a_damaged_entry_is_cut_and_does_not_come_back(directory: Path) -> None:
    queue = queue_at(directory)
    put_range(queue, 0, 48)
    queue.write_pending()
    third = directory / f"{600:020d}"
    with third.open("r+b") as stream:
        stream.seek(4 * ENTRY.size)
        stream.write(bytes(ENTRY.size))
    again = queue_at(directory)
    assert again.max_offset == 34
    assert sorted(path.name for path in directory.iterdir()) == [f"{start:020d}" for start in (0, 200, 400, 600)]
    again.put(QueueOffset(34), PhysicalOffset(5000), 10, 7)
    again.write_pending()
    assert queue_at(directory).max_offset == 35
    assert third.read_bytes()[5 * ENTRY.size :].strip(b"\0") == b""


def test_only_the_last_three_files_are_scanned(directory: Path) -> None:
    queue = queue_at(directory)
    put_range(queue, 0, 45)
    queue.write_pending()
    (directory / f"{200:020d}").write_bytes(bytes(FILE_SIZE))
    assert queue_at(directory).max_offset == 45


@pytest.mark.parametrize(
    ("entry", "valid"),
    [
        ((0, 1, 0), 1),
        ((-1, 1, 0), 0),
        ((5, 0, 3), 0),
        ((5, -1, 3), 0),
        ((5, 256, -1), 1),
        ((1 << 62, 0x7FFFFFFF, 1), 1),
    ],
)
def test_an_entry_is_valid_with_an_offset_and_a_size(entry: tuple[int, int, int], valid: int) -> None:
    good = ENTRY.pack(1, 1, 1)
    assert count_valid(ENTRY.pack(*entry)) == valid
    assert count_valid(good * 3 + ENTRY.pack(*entry) + good) == (5 if valid else 3)


@pytest.mark.parametrize("cut", [0, 1, 5, 9, 10, 11, 20, 24])
def test_truncation_keeps_what_points_before(directory: Path, cut: int) -> None:
    queue = queue_at(directory)
    put_range(queue, 0, 25)
    queue.truncate(PhysicalOffset(cut * 100))
    for one in (queue, queue_at(directory)):
        assert (numbers_of(one), one.max_physical_offset) == (list(range(cut)), cut * 100)
    put_range(queue, cut, 27)
    queue.write_pending()
    assert numbers_of(queue_at(directory)) == list(range(27))


def test_truncating_behind_the_end_changes_nothing(directory: Path) -> None:
    queue = queue_at(directory)
    put_range(queue, 0, 5)
    queue.truncate(PhysicalOffset(500))
    assert (queue.max_offset, directory.exists()) == (5, False)


def test_truncating_a_late_queue_keeps_its_numbering(directory: Path) -> None:
    queue = queue_at(directory)
    put_range(queue, 33, 35)
    queue.truncate(PhysicalOffset(0))
    assert (queue.min_offset, queue.max_offset, queue.max_physical_offset) == (33, 33, 0)
    put_range(queue, 33, 36)
    assert numbers_of(queue) == [33, 34, 35]


def test_expired_files_go_and_the_minimum_moves(directory: Path) -> None:
    queue = queue_at(directory)
    put_range(queue, 0, 35)
    queue.write_pending()
    queue.read(QueueOffset(0), 1)
    queue.read(QueueOffset(0), 1)  # now the first file has a descriptor
    assert queue.delete_expired(PhysicalOffset(1250)) == 1
    assert (queue.min_offset, numbers_of(queue)) == (13, list(range(13, 35)))
    assert queue.delete_expired(PhysicalOffset(99_999)) == 2
    assert (queue.min_offset, queue.max_offset) == (35, 35)
    assert [path.name for path in directory.iterdir()] == [f"{600:020d}"]
    again = queue_at(directory)
    again.correct_min_offset(PhysicalOffset(99_999))
    assert (again.min_offset, again.max_offset) == (35, 35)
    again.put(QueueOffset(35), PhysicalOffset(100_000), 10, 35)
    assert numbers_of(again) == [35]


def test_search_by_time_takes_the_nearest(directory: Path) -> None:
    queue = queue_at(directory)
    put_range(queue, 0, 25)
    queue.write_pending()
    for number, start in enumerate((0, 200, 400)):
        os.utime(directory / f"{start:020d}", ns=(0, (number * 70 + 63 + 2) * 1_000_000))

    def stored(physical_offset: int) -> int:
        return physical_offset // 100 * 7

    def search(timestamp: int, store_time_of: Callable[[PhysicalOffset], int] = stored, log_min: int = 0) -> int:
        return queue.search_by_time(timestamp, PhysicalOffset(log_min), store_time_of)

    assert [search(time) for time in (-5, 0, 3, 4, 7, 62, 63)] == [0, 0, 0, 1, 1, 9, 9]
    assert search(65) == 9  # not later than the first file's time of change
    assert search(66) == 10  # the second file's first entry, though 63 is nearer
    assert search(9_999) == 24
    assert search(7, log_min=400) == 4
    assert search(7, lambda physical_offset: -1) == 0
    assert search(7, lambda physical_offset: 7 if physical_offset == 400 else -1, log_min=100_000) == 0
    assert search(10, lambda physical_offset: physical_offset // 100 * 10 + 5) == 0  # a tie: the earlier one


def test_search_by_time_in_nothing_is_zero(directory: Path) -> None:
    assert queue_at(directory).search_by_time(5, PhysicalOffset(0), lambda physical_offset: 5) == 0


def test_a_failing_write_loses_nothing(directory: Path) -> None:
    files = FailingFiles()
    queue = queue_at(directory, files)
    files.failing.add("write")
    raised = 0
    for number in range(25):
        try:
            queue.put(QueueOffset(number), PhysicalOffset(number * 100), 100, number)
        except OSError:
            raised += 1
    assert raised > 0
    with pytest.raises(OSError, match="No space"):
        queue.write_pending()
    assert numbers_of(queue) == list(range(25))
    assert queue.search_by_time(1 << 60, PhysicalOffset(0), lambda physical_offset: physical_offset) == 24
    files.failing.clear()
    queue.write_pending()
    assert numbers_of(queue_at(directory)) == list(range(25))


def test_a_failing_sync_does_not_count_as_flushed(directory: Path) -> None:
    files = FailingFiles()
    queue = queue_at(directory, files)
    put_range(queue, 0, 25)
    assert queue.is_dirty
    queue.write_pending()
    files.failing.add("sync")
    with pytest.raises(OSError, match="Input/output"):
        queue.flush(0)
    assert queue.is_dirty
    files.failing.clear()
    assert queue.flush(0)
    assert (queue.is_dirty, queue.dirty_pages, queue.flush(0)) == (False, 0, False)


def test_flush_waits_for_enough_pages(directory: Path) -> None:
    queue = queue_at(directory, size=100_000)
    put_range(queue, 0, 300)  # 6,000 bytes
    queue.write_pending()
    assert queue.dirty_pages == 1
    assert queue.flush(2) is False
    assert queue.flush(1) is True


def test_descriptors_are_kept_by_busy_queues_only(directory: Path) -> None:
    files = FailingFiles()
    queue = queue_at(directory, files, size=100_000)
    put_range(queue, 0, 5)
    queue.write_pending()
    assert not files.open_descriptors
    put_range(queue, 5, 200)
    queue.write_pending()
    assert len(files.open_descriptors) == 1
    queue.release()
    assert not files.open_descriptors
    was_open = queue.is_open  # it was busy, and is ready for more
    queue.release()
    assert (was_open, queue.is_open) == (True, False)
    queue.read(QueueOffset(0), 1)
    assert not files.open_descriptors
    queue.read(QueueOffset(1), 1)
    assert len(files.open_descriptors) == 1
    queue.destroy()
    assert not files.open_descriptors
    assert not directory.exists()
    assert (queue.min_offset, queue.max_offset, queue.max_physical_offset) == (0, 0, 0)


def test_an_idle_queue_is_small(tmp_path: Path) -> None:
    queue = ConsumeQueue(tmp_path / "orders" / "3", TopicQueue("orders", 3), 6_000_000, OS_FILES)
    assert not hasattr(queue, "__dict__")
    assert sys.getsizeof(queue) < 250


def test_a_reader_changes_nothing(directory: Path) -> None:
    queue = queue_at(directory)
    put_range(queue, 0, 25)
    queue.write_pending()
    with (directory / f"{200:020d}").open("r+b") as stream:
        stream.write(bytes(ENTRY.size))
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    reader = queue_at(directory, writable=False)
    assert numbers_of(reader) == list(range(10))
    reader.truncate(PhysicalOffset(500))
    assert numbers_of(reader) == list(range(5))
    with pytest.raises(StoreClosed, match="reading only"):
        reader.put(QueueOffset(5), PhysicalOffset(500), 100, 5)
    assert reader.delete_expired(PhysicalOffset(1 << 40)) == 0
    reader.destroy()
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before


def test_a_reader_sees_what_was_added_when_it_loads_again(directory: Path) -> None:
    queue = queue_at(directory)
    put_range(queue, 0, 5)
    queue.write_pending()
    reader = queue_at(directory, writable=False)
    put_range(queue, 5, 25)
    queue.write_pending()
    reader.load()
    reader.recover()
    assert numbers_of(reader) == list(range(25))


@pytest.mark.parametrize(
    ("name", "size", "complaint"),
    [
        ("notes.txt", FILE_SIZE, "does not belong here"),
        (f"{200:020d}", 199, "has 199 bytes, files of 200 are configured"),
        (f"{400:020d}", FILE_SIZE, f"followed by {200:020d}"),
        (f"{250:020d}", FILE_SIZE, f"followed by {200:020d}"),
    ],
)
def test_a_file_that_does_not_fit_stops_the_load(directory: Path, name: str, size: int, complaint: str) -> None:
    queue = queue_at(directory)
    put_range(queue, 0, 5)
    queue.write_pending()
    (directory / name).write_bytes(bytes(size))
    with pytest.raises(StoreCorrupt, match=complaint) as raised:
        queue.load()
    assert str(directory / name) in str(raised.value)
    assert "move" in str(raised.value)


def test_an_empty_last_file_is_a_crash_while_it_was_made(directory: Path) -> None:
    queue = queue_at(directory)
    put_range(queue, 0, 10)
    queue.write_pending()
    (directory / f"{200:020d}").write_bytes(b"")
    again = queue_at(directory)
    put_range(again, 10, 12)
    again.write_pending()
    assert numbers_of(queue_at(directory)) == list(range(12))


def test_a_file_holds_whole_entries() -> None:
    with pytest.raises(StoreError, match="multiple of 20"):
        ConsumeQueue(Path("x"), TopicQueue("orders", 0), 1001, OS_FILES)


def test_what_is_put_during_a_sync_stays_dirty(directory: Path) -> None:
    class BusyFiles(OsFiles):
        def sync(self, descriptor: int) -> None:
            super().sync(descriptor)
            put_range(queue, 5, 6)
            queue.write_pending()

    queue = queue_at(directory, BusyFiles())
    put_range(queue, 0, 5)
    queue.write_pending()
    assert queue.flush(0)
    assert queue.is_dirty


def test_entries_in_memory_are_read_right_while_more_come_and_others_are_cut(directory: Path) -> None:
    queue = queue_at(directory, size=20_000)
    expected: list[int] = []
    for round_number in range(30):
        first = len(expected)
        put_range(queue, first, first + 25)
        expected += range(first, first + 25)
        assert numbers_of(queue) == expected  # through all of it, so that there is one piece of it
        if round_number % 7 == 6:
            queue.truncate(PhysicalOffset((len(expected) - 40) * 100))
            del expected[-40:]
            assert numbers_of(queue) == expected
        if round_number % 5 == 4:
            queue.write_pending()
            queue.release()
            assert numbers_of(queue) == expected
