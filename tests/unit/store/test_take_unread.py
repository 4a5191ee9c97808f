"""What a group has not read, in all queues of a topic at once."""

from __future__ import annotations

from pathlib import Path

from downrange.model.record import decode_records
from downrange.store.log.segment import Segment
from downrange.store.message_store import MessageStore
from downrange.store.queue.backlog import pieces_of
from downrange.store.queue.queue_entry import ENTRY_SIZE
from downrange.store.queue.unread import Taken
from tests.unit.store.small_store import open_store, put


def bodies(taken: list[Taken], log_file: Segment | None) -> list[bytes]:
    """The bodies of messages that were taken."""
    assert log_file is not None
    found = []
    for _, _, entries, byte_count in taken:
        pieces = pieces_of((entries, log_file.view, log_file.start, log_file.readable), byte_count)
        found += [one.body for piece in pieces for one in decode_records(piece)]
    return found


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
        offsets = {0: 15, 1: 3, 2: 1}
        ((left, taken),), log_file = store.take_unread("TopicTest", 3, offsets, (1, 1), 6)
        counts = [(queue_id, offset, len(entries) // ENTRY_SIZE) for queue_id, offset, entries, _ in taken]
        assert counts == [(2, 1, 4), (0, 15, 2)], "queue 1 has been read"
        assert (left, offsets) == (3, {0: 17, 1: 3, 2: 5})
        assert bodies(taken, log_file) == [b"2/1", b"2/2", b"2/3", b"2/4", b"0/15", b"0/16"]


def test_several_readers_share_what_there_is(tmp_path: Path) -> None:
    with filled(tmp_path, 5, 4) as store:
        offsets = {0: 0, 1: 0}
        found, log_file = store.take_unread("TopicTest", 2, offsets, (0, 4), 3)
        assert [bodies(taken, log_file) for _, taken in found] == [
            [b"0/0", b"0/1", b"0/2"],
            [b"1/0", b"1/1", b"1/2"],
            [b"0/3", b"0/4", b"1/3"],
            [],
        ]
        assert [left for left, _ in found] == [6, 3, 0, 0]
        assert offsets == {0: 5, 1: 4}


def test_entries_in_a_file_are_taken_like_those_in_memory(tmp_path: Path) -> None:
    with filled(tmp_path, 1000) as store:
        offsets = {0: 0}
        while True:
            ((left, taken),), log_file = store.take_unread("TopicTest", 1, before := offsets.copy(), (0, 1), 32)
            first = offsets[0]
            assert bodies(taken, log_file) == [b"0/%d" % number for number in range(first, before[0])]
            assert left == 1000 - before[0]
            offsets = before
            if not left:
                break


def test_what_is_unusual_is_left_to_the_caller_and_changes_nothing(tmp_path: Path) -> None:
    with filled(tmp_path / "behind", 3, 3) as store:
        offsets = {0: 0, 1: 9}
        assert store.take_unread("TopicTest", 2, offsets, (0, 1), 32)[0] == [], "the offset of queue 1 is too large"
        assert offsets == {0: 0, 1: 9}
        assert len(store.take_unread("TopicTest", 2, offsets, (0, 1), 3)[0]) == 1, "nobody looks at queue 1"
        assert offsets == {0: 3, 1: 9}
    with filled(tmp_path / "old", 100, mapped_file_size_commit_log=4096) as store:
        assert store.take_unread("TopicTest", 1, {0: 0}, (0, 1), 32)[0] == [], "the records are in an older file"
        assert store.take_unread("TopicTest", 1, {0: 99}, (0, 1), 32)[0] != []


def test_an_empty_store_or_a_missing_queue_or_offset_is_left_to_the_caller(tmp_path: Path) -> None:
    with open_store(tmp_path / "empty") as store:
        assert store.take_unread("TopicTest", 1, {0: 0}, (0, 1), 32) == ([], None)
    with filled(tmp_path / "filled", 3) as store:
        assert store.take_unread("TopicTest", 2, {0: 0, 1: 0}, (0, 1), 32)[0] == []
        assert store.take_unread("TopicTest", 1, {}, (0, 1), 32)[0] == []
