from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from downrange.model.hashing import java_hash
from downrange.model.message import PhysicalOffset
from downrange.store.errors import StoreClosed, StoreCorrupt, StoreError
from downrange.store.files import OS_FILES, OsFiles
from downrange.store.index.index_file import ENTRY, HEADER
from downrange.store.index.key_index import KeyIndex
from downrange.store.new_messages import NewMessages
from tests.unit.store.small_store import new_message, open_store

SLOTS, ENTRIES = 100, 20
T0 = 1_700_000_000_000
EVER = 1 << 60


class FailingFiles(OsFiles):
    """Fails the operations it is told to fail, and counts its mappings."""

    def __init__(self) -> None:
        self.failing: set[str] = set()

    def reserve(self, descriptor: int, position: int, length: int) -> None:
        if "reserve" in self.failing:
            raise OSError(28, "No space left on device")
        super().reserve(descriptor, position, length)

    def sync(self, descriptor: int) -> None:
        if "sync" in self.failing:
            raise OSError(5, "Input/output error")
        super().sync(descriptor)


def index_at(directory: Path, files: OsFiles = OS_FILES, *, entries: int = ENTRIES, writable: bool = True) -> KeyIndex:
    index = KeyIndex(directory, SLOTS, entries, files, lambda: T0, writable=writable)
    index.load()
    return index


def put_range(index: KeyIndex, start: int, stop: int) -> None:
    """Message n has the key `kn`, lies at byte 100·n and was stored n seconds after T0."""
    for number in range(start, stop):
        index.put_keys([("orders", None, f"k{number}", number * 100, T0 + number * 1000)])


def offsets(index: KeyIndex, key: str, max_num: int = 64, begin: int = 0, end: int = EVER) -> Sequence[int]:
    return index.query("orders", key, max_num, begin, end).physical_offsets


def test_a_message_is_found_by_each_of_its_keys(tmp_path: Path) -> None:
    index = index_at(tmp_path)
    index.put_keys([("orders", "7F00000110CD4E0E2F2A49F681BC007E", "red  green ", 500, T0)])
    for key in ("7F00000110CD4E0E2F2A49F681BC007E", "red", "green"):
        assert offsets(index, key) == [500]
    assert offsets(index, "") == offsets(index, "blue") == []
    assert index.query("payments", "red", 64, 0, EVER) == ([], T0, 500)
    index.close()


@pytest.mark.parametrize("unique_key", ["x", "ab", "é", "順序" * 20, "k" * 255, "k" * 256, "k" * 9000, "\ud83d\ude00"])
def test_unusual_unique_keys_are_found_too(tmp_path: Path, unique_key: str) -> None:
    index = index_at(tmp_path)
    index.put_keys([("orders", unique_key, None, 500, T0)])
    assert offsets(index, unique_key) == [500]
    index.close()


def test_nothing_was_ever_indexed(tmp_path: Path) -> None:
    index = index_at(tmp_path / "none")
    assert index.query("orders", "k", 64, 0, EVER) == ([], 0, 0)
    assert (index.safe_timestamp, index.delete_expired(PhysicalOffset(5)), index.flush()) == (0, 0, False)
    index.close()


def test_a_message_without_keys_leaves_the_index_as_it_is(tmp_path: Path) -> None:
    index = index_at(tmp_path)
    put_range(index, 0, 3)
    before = index.query("orders", "k0", 1, 0, EVER)
    with open_store(tmp_path / "store") as store:
        for properties in ({}, {"KEYS": ""}, {"TAGS": "a", "KEYS": " "}, {"KEYS": "rolled back"}):
            messages = NewMessages()
            is_rolled_back = "rolled back" in properties.values()
            store.add(messages, [new_message(topic="orders", properties=properties, sys_flag=12 * is_rolled_back)])
            store.append(messages)
            index.put(messages, 0, 1)
    assert index.query("orders", "k0", 1, 0, EVER) == before
    index.close()


def test_the_messages_of_a_batch_are_found_by_their_keys(tmp_path: Path) -> None:
    index = index_at(tmp_path / "other")
    messages = NewMessages()
    with open_store(tmp_path / "store") as store:
        for number in range(30):  # into the second file
            keys = {"UNIQ_KEY": f"u{number}", "KEYS": f"all k{number}"} if number % 3 else {"TAGS": "a"}
            assert store.add(messages, [new_message(b"", "orders", number % 2, keys)]) is None
        assert store.append(messages) is None
    index.put(messages, 0, 10)
    index.put(messages, 10, 30)
    places = [place[0] for place in messages.places]
    for number in range(30):
        expected = [places[number]] if number % 3 else []
        assert offsets(index, f"u{number}") == offsets(index, f"k{number}") == expected
    assert offsets(index, "all") == [place for number, place in reversed([*enumerate(places)]) if number % 3]
    index.close()


def test_a_full_file_is_followed_by_one_that_begins_with_its_end(tmp_path: Path) -> None:
    index = index_at(tmp_path)
    put_range(index, 0, 19)
    assert len(list(tmp_path.iterdir())) == 1
    index._writable_file()
    first, second = sorted(tmp_path.iterdir())
    index.close()
    assert HEADER.unpack(first.read_bytes()[:40])[4:] == (len({_slot(f"k{n}") for n in range(19)}), 20)
    end = (T0 + 18_000, T0 + 18_000, 1800, 1800)
    assert HEADER.unpack(second.read_bytes()[:40]) == (*end, 0, 1)


def _slot(key: str) -> int:
    return abs(java_hash(f"orders#{key}")) % SLOTS


def test_the_first_entry_of_a_file_counts_its_seconds_from_the_file_before(tmp_path: Path) -> None:
    index = index_at(tmp_path)
    put_range(index, 0, 19)
    index.put_keys([("orders", "a", "b", 1900, T0 + 21_500)])
    index.close()
    second = max(tmp_path.iterdir()).read_bytes()
    entries_at = 40 + 4 * SLOTS
    first_entry, second_entry = (ENTRY.unpack_from(second, entries_at + 20 * number) for number in (1, 2))
    assert (first_entry[2], second_entry[2]) == (3, 0)
    assert HEADER.unpack(second[:40])[:4] == (T0 + 21_500, T0 + 21_500, 1900, 1900)


def test_keys_of_one_message_may_lie_in_two_files(tmp_path: Path) -> None:
    index = index_at(tmp_path)
    put_range(index, 0, 18)
    index.put_keys([("orders", "a", "b c", 5000, T0 + 30_000)])
    index.close()
    again = index_at(tmp_path)
    assert [offsets(again, key) for key in "abc"] == [[5000]] * 3
    assert len(list(tmp_path.iterdir())) == 2
    again.close()


def test_a_message_indexed_before_is_passed_over(tmp_path: Path) -> None:
    index = index_at(tmp_path)
    put_range(index, 0, 10)
    put_range(index, 0, 9)
    assert [offsets(index, f"k{number}") for number in range(9)] == [[number * 100] for number in range(9)]
    put_range(index, 9, 10)  # the one at the end is indexed again, as RocketMQ does
    assert offsets(index, "k9") == [900, 900]
    index.close()


def test_the_newest_come_first_and_no_more_than_asked_for(tmp_path: Path) -> None:
    index = index_at(tmp_path)
    for number in range(50):
        index.put_keys([("orders", None, "same", number * 100, T0 + number * 1000)])
    assert offsets(index, "same") == [number * 100 for number in reversed(range(50))]
    assert offsets(index, "same", 3) == [4900, 4800, 4700]
    assert offsets(index, "same", 25) == [number * 100 for number in range(49, 24, -1)]
    assert offsets(index, "same", 0) == []
    index.close()


def test_time_limits_are_inclusive(tmp_path: Path) -> None:
    index = index_at(tmp_path, entries=1000)
    for number in range(50):
        index.put_keys([("orders", None, "same", number * 100, T0 + number * 1000)])
    assert offsets(index, "same", 64, T0 + 10_000, T0 + 12_000) == [1200, 1100, 1000]
    assert offsets(index, "same", 64, T0 + 50_000, EVER) == []
    assert offsets(index, "same", 64, 0, T0 - 1) == []
    index.close()


def test_times_before_the_first_and_far_ahead_fit_their_field(tmp_path: Path) -> None:
    index = index_at(tmp_path)
    index.put_keys([("orders", None, "a", 0, T0)])
    index.put_keys([("orders", None, "b", 100, T0 - 5_000)])
    index.put_keys([("orders", None, "c", 200, T0 + (1 << 50))])
    index.close()
    data = max(tmp_path.iterdir()).read_bytes()
    seconds = [ENTRY.unpack_from(data, 40 + 4 * SLOTS + 20 * number)[2] for number in (1, 2, 3)]
    assert seconds == [0, 0, 0x7FFFFFFF]


def test_names_are_local_time_and_never_collide(tmp_path: Path) -> None:
    index = index_at(tmp_path)
    put_range(index, 0, 60)
    index.close()
    first = time.strftime("%Y%m%d%H%M%S", time.localtime(T0 // 1000)) + "000"
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{int(first) + n}" for n in range(4)]


def test_names_keep_their_order_when_the_clock_goes_back(tmp_path: Path) -> None:
    times = iter([T0, T0 - 3_600_000])
    index = KeyIndex(tmp_path, SLOTS, ENTRIES, OS_FILES, lambda: next(times))
    put_range(index, 0, 30)
    index.close()
    again = index_at(tmp_path)
    put_range(again, 30, 31)
    assert [offsets(again, f"k{number}") for number in (0, 29, 30)] == [[0], [2900], [3000]]
    again.close()


def test_after_a_crash_young_files_are_dropped_and_filled_again(tmp_path: Path) -> None:
    index = index_at(tmp_path)
    put_range(index, 0, 45)
    assert index.flush() is True
    safe = index.safe_timestamp
    assert safe == T0 + 37_000  # the end of the second file
    again = KeyIndex(tmp_path, SLOTS, ENTRIES, OS_FILES, lambda: T0)
    again.load(safe)
    assert len(list(tmp_path.iterdir())) == 2
    assert again.safe_timestamp == safe
    assert (offsets(again, "k37"), offsets(again, "k38")) == ([3700], [])
    put_range(again, 38, 45)
    assert [offsets(again, f"k{number}") for number in range(45)] == [[number * 100] for number in range(45)]
    again.close()
    index.close()


def test_a_failing_sync_makes_nothing_safe(tmp_path: Path) -> None:
    files = FailingFiles()
    index = index_at(tmp_path, files)
    put_range(index, 0, 45)
    files.failing.add("sync")
    with pytest.raises(OSError, match="Input/output"):
        index.flush()
    assert index.safe_timestamp == 0
    files.failing.clear()
    assert index.flush() is True
    assert (index.safe_timestamp, index.flush()) == (T0 + 37_000, False)
    index.close()


def test_a_full_disk_is_an_error_and_leaves_no_empty_file(tmp_path: Path) -> None:
    files = FailingFiles()
    index = index_at(tmp_path, files)
    put_range(index, 0, 19)
    files.failing.add("reserve")
    with pytest.raises(OSError, match="No space"):
        put_range(index, 19, 20)
    assert len(list(tmp_path.iterdir())) == 1
    files.failing.clear()
    put_range(index, 19, 20)
    assert (offsets(index, "k0"), offsets(index, "k19")) == ([0], [1900])
    index.close()


def test_expired_files_go_but_never_the_last(tmp_path: Path) -> None:
    index = index_at(tmp_path)
    put_range(index, 0, 45)
    assert offsets(index, "k3") == [300]  # the first file is mapped now
    assert index.delete_expired(PhysicalOffset(1800)) == 0
    assert index.delete_expired(PhysicalOffset(1801)) == 1
    assert (offsets(index, "k3"), offsets(index, "k19")) == ([], [1900])
    assert index.delete_expired(PhysicalOffset(1 << 50)) == 1
    assert offsets(index, "k44") == [4400]
    assert index.flush() is True  # of files that are gone there is nothing to sync
    index.destroy()
    assert list(tmp_path.iterdir()) == []
    assert index.query("orders", "k44", 64, 0, EVER) == ([], 0, 0)


def test_old_files_are_mapped_only_while_they_are_used(tmp_path: Path) -> None:
    index = index_at(tmp_path)
    put_range(index, 0, 300)
    index.close()
    again = index_at(tmp_path)

    def mapped() -> int:
        return sum(one.map is not None for one in again._index_files)

    assert mapped() == 0
    assert [offsets(again, f"k{number}") for number in range(300)] == [[number * 100] for number in range(300)]
    assert mapped() == 4
    put_range(again, 300, 301)
    assert offsets(again, "k300") == [30_000]
    again.close()
    assert mapped() == 0
    put_range(again, 301, 302)
    assert offsets(again, "k301") == [30_100]
    again.close()


@pytest.mark.parametrize("value", [-1, 0, 5, 19, 20, 21, 1_000_000, 0x7FFFFFFF, -(1 << 31)])
@pytest.mark.parametrize("field", ["slot", "previous", "next entry", "used slots"])
def test_a_damaged_file_neither_loops_nor_raises(tmp_path: Path, field: str, value: int) -> None:
    index = index_at(tmp_path / "index")
    for number in range(10):
        index.put_keys([("orders", None, "same", number * 100, T0)])
    index.close()
    (path,) = (tmp_path / "index").iterdir()
    entries_at = 40 + 4 * SLOTS
    places = {"slot": 40 + 4 * _slot("same"), "previous": entries_at + 20 * 5 + 16, "next entry": 36, "used slots": 32}
    with path.open("r+b") as stream:
        stream.seek(places[field])
        stream.write(struct.pack(">i", value))
    again = index_at(tmp_path / "index")
    assert set(offsets(again, "same", 1000)) <= {number * 100 for number in range(10)}
    again.put_keys([("orders", None, "same", 2000, T0)])
    assert offsets(again, "same")[0] == 2000
    messages = NewMessages()
    with open_store(tmp_path / "store") as store:
        for message in (new_message(b"x" * 3000), new_message(b"", "orders", 0, {"KEYS": "new same"})):
            assert store.add(messages, [message]) is None
        assert store.append(messages) is None
    again.put(messages, 0, 2)
    assert offsets(again, "new") == [messages.places[1][0]]
    assert offsets(again, "same")[:2] == [messages.places[1][0], 2000]
    again.close()


def test_a_reader_changes_nothing_and_sees_more_when_it_loads_again(tmp_path: Path) -> None:
    index = index_at(tmp_path)
    put_range(index, 0, 5)
    reader = index_at(tmp_path, writable=False)
    assert offsets(reader, "k4") == [400]
    put_range(index, 5, 45)
    assert offsets(reader, "k44") == []
    reader.load()
    assert offsets(reader, "k44") == [4400]
    with pytest.raises(StoreClosed, match="reading only"):
        reader.put_keys([("orders", None, "k", 9999, T0)])
    assert reader.delete_expired(PhysicalOffset(1 << 40)) == 0
    reader.destroy()
    assert len(list(tmp_path.iterdir())) == 3
    index.close()


@pytest.mark.parametrize(("name", "size"), [("notes.txt", 840), ("20261115084131094", 100)])
def test_a_file_that_does_not_fit_stops_the_load(tmp_path: Path, name: str, size: int) -> None:
    (tmp_path / name).write_bytes(bytes(size))
    with pytest.raises(StoreCorrupt, match="move") as raised:
        index_at(tmp_path)
    assert str(tmp_path / name) in str(raised.value)


def test_an_empty_last_file_is_a_crash_while_it_was_made(tmp_path: Path) -> None:
    index = index_at(tmp_path)
    put_range(index, 0, 5)
    index.close()
    (tmp_path / "29991231235959999").write_bytes(b"")
    again = index_at(tmp_path)
    assert offsets(again, "k4") == [400]
    assert len(list(tmp_path.iterdir())) == 1
    again.close()


def test_a_file_needs_slots_and_entries(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="at least 1 slot"):
        KeyIndex(tmp_path, 0, 20, OS_FILES, lambda: T0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ("TagA", 2598919),
        ("TagB", 2598920),
        ("TagC", 2598921),
        ("TopicTest#k3", 2746026),
        ("polygenelubricants", -(1 << 31)),
        ("\u00e9", 0xE9),
        ("\U0001f600", 0xD83D * 31 + 0xDE00),
    ],
)
def test_java_hash(text: str, expected: int) -> None:
    assert java_hash(text) == expected


def test_the_hash_without_an_absolute_value_counts_as_zero(tmp_path: Path) -> None:
    assert java_hash("orders#3EG?7B3") == -(1 << 31)
    index = index_at(tmp_path)
    index.put_keys([("orders", "3EG?7B3", "3EG?7B3", 700, T0)])
    assert offsets(index, "3EG?7B3") == [700, 700]
    index.close()
    data = max(tmp_path.iterdir()).read_bytes()
    assert [ENTRY.unpack_from(data, 40 + 4 * SLOTS + 20 * number)[0] for number in (1, 2)] == [0, 0]


def test_the_worked_example_of_the_format_page(tmp_path: Path) -> None:
    index = index_at(tmp_path)
    index.put_keys([("TopicTest", None, "k3", 276, 1_794_727_122_803)])
    index.close()
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    time_field, offset_field = "000001a1de129773", "0000000000000114"
    assert len(data) == 840
    assert data[:40].hex() == time_field * 2 + offset_field * 2 + "00000001" + "00000002"
    assert data[144:148].hex() == "00000001"
    assert data[460:480].hex() == "0029e6aa" + offset_field + "00000000" * 2
