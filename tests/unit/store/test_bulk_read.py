"""Bulk reads: many records at a time, for readers that are known to take them."""

from __future__ import annotations

from pathlib import Path

from downrange.model.hashing import tags_code
from downrange.model.record import decode_records
from downrange.store.message_store import MessageStore
from downrange.store.read_result import GetMessageStatus, ReadResult
from tests.unit.store.small_store import open_store, put

BIG = {"mapped_file_size_commit_log": 8 << 20, "mapped_file_size_consume_queue": 20 * 10_000}
MIB = 1 << 20


def filled(root: Path, count: int, *, size: int = 10, **changes: object) -> MessageStore:
    store = open_store(root, **(BIG | changes))
    for number in range(count):
        put(store, bytes(size), properties={"TAGS": "even" if number % 2 == 0 else "odd"})
    return store


def offsets(result: ReadResult) -> list[int]:
    return [message.queue_offset for part in result.slices for message in decode_records(part)]


def test_as_many_as_are_asked_for(tmp_path: Path) -> None:
    with filled(tmp_path, 5000) as store:
        assert offsets(store.read("TopicTest", 0, 7, 1000, bulk_bytes=MIB)) == list(range(7, 1007))
        assert store.read("TopicTest", 0, 0, 1 << 30, bulk_bytes=4 * MIB).next_begin_offset == 4096
        assert offsets(store.read("TopicTest", 0, 4990, 1000, bulk_bytes=MIB)) == list(range(4990, 5000))
        assert store.read("TopicTest", 0, 5000, 1000, bulk_bytes=MIB).status is GetMessageStatus.OFFSET_OVERFLOW_ONE
        assert store.read("TopicTest", 0, 0, 1000).message_count == 32


def test_no_more_bytes_than_allowed_but_always_one_record(tmp_path: Path) -> None:
    with filled(tmp_path, 100, size=10_000) as store:
        result = store.read("TopicTest", 0, 0, 100, bulk_bytes=500_000)
        assert result.message_count == 49
        assert result.byte_count == sum(len(part) for part in result.slices) <= 500_000
        assert store.read("TopicTest", 0, 0, 100, bulk_bytes=1).message_count == 1


def test_old_messages_come_a_mebibyte_at_a_time(tmp_path: Path) -> None:
    with filled(tmp_path, 300, size=10_000) as store:
        store.memory_limit = 0
        result = store.read("TopicTest", 0, 0, 300, bulk_bytes=4 * MIB)
        assert MIB - 11_000 < result.byte_count <= MIB
        assert result.suggest_pulling_from_slave


def test_small_records_that_lie_apart_are_copied_together_large_ones_are_not(tmp_path: Path) -> None:
    with open_store(tmp_path, **BIG) as store:
        for number in range(300):
            put(store, bytes(10 if number < 200 else 20_000), topic=("TopicTest", "Other")[number % 2])
        small = store.read("TopicTest", 0, 0, 100, bulk_bytes=4 * MIB)
        assert len(small.slices) == 1
        assert offsets(small) == list(range(100))
        large = store.read("TopicTest", 0, 100, 100, bulk_bytes=4 * MIB)
        assert len(large.slices) == 50
        assert offsets(large) == list(range(100, 150))


def test_filters_look_at_as_many_entries(tmp_path: Path) -> None:
    with filled(tmp_path, 3000) as store:
        odd = tags_code("odd")
        result = store.read("TopicTest", 0, 0, 2000, matches=lambda code, unit: code == odd, bulk_bytes=4 * MIB)
        assert offsets(result) == list(range(1, 2000, 2))
        assert result.next_begin_offset == 2000
        nothing = store.read("TopicTest", 0, 0, 2000, matches_record=lambda view: False, bulk_bytes=4 * MIB)
        assert (nothing.status, nothing.next_begin_offset) == (GetMessageStatus.NO_MATCHED_MESSAGE, 2000)
        assert nothing.slices == []
