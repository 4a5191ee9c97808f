"""What a group has not read, in all queues of a topic at once."""

from __future__ import annotations

from pathlib import Path

from downrange.model.record import decode_records
from downrange.store.message_store import MessageStore
from downrange.store.queue.backlog import pieces_of
from downrange.store.queue.queue_entry import ENTRY_SIZE
from tests.unit.store.small_store import open_store, put

BIG = {"mapped_file_size_commit_log": 1 << 20}


def filled(root: Path, *counts: int, **changes: object) -> MessageStore:
    """A store with so many messages in each queue."""
    store = open_store(root, **(BIG | changes))
    for queue_id, count in enumerate(counts):
        for number in range(count):
            put(store, b"%d/%d" % (queue_id, number), queue_id=queue_id)
    return store


def test_the_first_messages_of_each_queue_come_until_there_are_enough(tmp_path: Path) -> None:
    with filled(tmp_path, 20, 3, 5) as store:
        found = store.read_unread("TopicTest", 1, 3, {0: 15, 1: 3, 2: 1}, 6)
        assert found is not None
        queues, log_file = found
        counts = [(queue_id, offset, unread, len(entries)) for queue_id, offset, unread, entries, _ in queues]
        assert counts == [(2, 1, 4, 4 * ENTRY_SIZE), (0, 15, 5, 2 * ENTRY_SIZE)], "queue 1 has been read"
        _, _, _, entries, byte_count = queues[1]
        pieces = pieces_of((entries, log_file.view, log_file.start, log_file.readable), byte_count)
        assert [one.body for piece in pieces for one in decode_records(piece)] == [b"0/15", b"0/16"]


def test_an_offset_behind_the_end_is_told(tmp_path: Path) -> None:
    with filled(tmp_path, 3) as store:
        found = store.read_unread("TopicTest", 0, 1, {0: 9}, 32)
        assert found is not None
        assert found[0] == [(0, 9, -6, b"", 0)]


def test_messages_in_an_older_file_of_the_log_are_only_counted(tmp_path: Path) -> None:
    with filled(tmp_path, 100, mapped_file_size_commit_log=4096) as store:
        found = store.read_unread("TopicTest", 0, 1, {0: 0}, 32)
        assert found is not None
        assert found[0] == [(0, 0, 100, b"", 0)]


def test_an_empty_store_or_a_missing_queue_or_offset_is_left_to_the_caller(tmp_path: Path) -> None:
    with open_store(tmp_path / "empty") as store:
        assert store.read_unread("TopicTest", 0, 1, {0: 0}, 32) is None
    with filled(tmp_path / "filled", 3) as store:
        assert store.read_unread("TopicTest", 0, 2, {0: 0, 1: 0}, 32) is None
        assert store.read_unread("TopicTest", 0, 1, {}, 32) is None
