"""Queues that nobody uses sleep, and nobody notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from downrange.model.message import QueueOffset
from downrange.store.errors import StoreCorrupt
from downrange.store.message_store import MessageStore
from downrange.store.new_message import PutMessageStatus
from downrange.store.queue import queue_entries as queue_entries_module
from downrange.store.queue import queue_tails as queue_tails_module
from downrange.store.queue import queues as queues_module
from downrange.store.queue.queue_entry import ENTRY_SIZE
from tests.support.stores import append
from tests.unit.store.small_store import FailingFiles, new_message, open_store

QUEUES = [("A", 0), ("A", 3), ("B", 0), ("C", 1)]


@pytest.fixture(autouse=True)
def few_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues_module, "_ALWAYS_AWAKE", 0)


def put(store: MessageStore, topic: str, queue_id: int) -> int:
    """The queue offset that a message got."""
    result = append(store, new_message(topic=topic, queue_id=queue_id))
    assert result.status is PutMessageStatus.PUT_OK
    return result.queue_offset


def rest(store: MessageStore) -> None:
    """What a broker does with idle queues in three minutes."""
    store.write_pending()
    store.flush_queues(thorough=True)
    for _ in range(3):
        store.release_idle()


@pytest.fixture
def store(tmp_path: Path) -> MessageStore:
    """Four queues with two messages each, all asleep."""
    made = open_store(tmp_path, mapped_file_size_commit_log=1 << 20)
    for queue in QUEUES * 2:
        put(made, *queue)
    rest(made)
    assert not made.queues.states
    return made


def test_all_are_found_again(store: MessageStore) -> None:
    assert sorted(store.queues.names()) == sorted(QUEUES)
    assert len(store.queues) == 4
    assert ("A", 3) in store.queues.states
    assert ("A", 1) not in store.queues.states
    assert ("D", 0) not in store.queues.states
    assert not store.queues.states  # asking whether it is there wakes nobody
    assert [store.max_offset_of(*queue) for queue in QUEUES] == [2, 2, 2, 2]
    assert store.max_offset_of("A", 1) == 0
    assert sorted(store.queues.states) == sorted(QUEUES)
    assert store.read("C", 1, 0, 32).next_begin_offset == 2
    with pytest.raises(KeyError):
        store.queues.states["D", 0]
    store.close()


def test_numbering_goes_on(store: MessageStore) -> None:
    assert [put(store, *queue) for queue in QUEUES] == [2, 2, 2, 2]
    rest(store)
    assert [put(store, *queue) for queue in QUEUES] == [3, 3, 3, 3]
    store.close()


def test_whoever_is_used_stays_awake(store: MessageStore) -> None:
    put(store, "A", 0)
    store.write_pending()
    store.flush_queues(thorough=True)
    for _ in range(2):
        store.release_idle()
        assert list(store.queues.states) == [("A", 0)]
    store.release_idle()
    assert not store.queues.states
    store.close()


def test_what_is_not_on_disk_does_not_sleep(store: MessageStore) -> None:
    put(store, "A", 0)
    store.release_idle()
    store.release_idle()
    assert list(store.queues.states) == [("A", 0)]
    store.write_pending()  # written, but not synced
    store.release_idle()
    store.release_idle()
    assert list(store.queues.states) == [("A", 0)]
    store.close()


def test_a_queue_of_several_files_does_not_sleep(store: MessageStore) -> None:
    for _ in range(1000 // ENTRY_SIZE):
        put(store, "A", 0)
    rest(store)
    assert list(store.queues.states) == [("A", 0)]
    store.close()


def test_the_newest_may_sleep(store: MessageStore) -> None:
    assert store.queues.max_physical_offset == store.max_offset
    newest = store.queues.newest()
    assert newest is not None
    assert (newest.topic, newest.queue_id) == QUEUES[-1]
    store.close()


def test_sleeping_queues_are_removed(store: MessageStore) -> None:
    told: list[str] = []
    store.queues.on_change = told.append
    assert sorted(store.remove_topic("A")) == [("A", 0), ("A", 3)]
    assert sorted(store.queues.names()) == [("B", 0), ("C", 1)]
    assert not store.queues.states  # the others slept on
    assert set(told) == {"A"}
    assert put(store, "A", 0) == 0
    store.close()


def test_sleeping_queues_are_truncated(store: MessageStore) -> None:
    first = store.entries("B", 0, 1, 1)[0].physical_offset
    rest(store)
    store.queues.truncate(first)
    assert [store.max_offset_of(*queue) for queue in QUEUES] == [2, 2, 1, 1]
    store.close()


def test_a_woken_queue_knows_what_has_expired(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, "old", 0)
    put(store, "older", 0)
    rest(store)
    while len(store._segments) < 3:
        put(store, "new", 0)
    rest(store)
    store.remove_files(store.take_oldest_files(1))
    store.delete_dependents()
    assert ("old", 0) not in list(store.queues.states)
    assert (store.min_offset_of("old", 0), store.max_offset_of("old", 0)) == (1, 1)
    rest(store)
    assert sorted(store.remove_expired_queues()) == [("old", 0), ("older", 0)]
    store.close()


def test_a_queue_that_cannot_be_woken_sleeps_on(store: MessageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    files = store.queues._files

    def fail(*_: object, **__: object) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as broken:
        broken.setattr(type(files), "open", fail)
        with pytest.raises(OSError, match="Too many"):
            store.max_offset_of("B", 0)
    assert sorted(store.queues.names()) == sorted(QUEUES)
    assert store.max_offset_of("B", 0) == 2
    assert store.queues.by_row.count(None) == len(store.queues.by_row) - 1
    store.close()


def test_counts_of_those_that_fell_asleep_are_kept(store: MessageStore) -> None:
    store.queues.take_counts()
    size = append(store, new_message(topic="A")).size
    rest(store)
    assert not store.queues.states
    assert store.queues.take_counts() == [("A", 1, size)]
    store.close()


def test_after_a_start_all_sleep_but_the_newest(tmp_path: Path, store: MessageStore) -> None:
    store.close()
    again = open_store(tmp_path, mapped_file_size_commit_log=1 << 20)
    assert list(again.queues.states) == QUEUES[-1:]  # the end of the log was looked up there
    assert [again.max_offset_of(*queue) for queue in QUEUES] == [2, 2, 2, 2]
    again.close()


def test_a_start_has_few_of_them_awake_at_a_time(
    tmp_path: Path, store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.close()
    monkeypatch.setattr(queues_module, "_ALWAYS_AWAKE", 1)
    make = queues_module.ConsumeQueues._make
    awake: list[int] = []

    def watched(queues: queues_module.ConsumeQueues, *key: Any) -> queues_module.QueueState:
        state = make(queues, *key)
        awake.append(len(queues.states))
        return state

    monkeypatch.setattr(queues_module.ConsumeQueues, "_make", watched)
    again = open_store(tmp_path, mapped_file_size_commit_log=1 << 20)
    assert awake[:4] == [1, 2, 2, 2]
    assert [put(again, *queue) for queue in QUEUES] == [2, 2, 2, 2]
    again.close()


def test_a_start_that_is_refused_leaves_no_mark_of_a_crash(tmp_path: Path, store: MessageStore) -> None:
    store.close()
    stranger = tmp_path / "consumequeue" / "B" / "0" / "notes.txt"
    stranger.write_text("mine")
    with pytest.raises(StoreCorrupt, match=r"notes\.txt does not belong here"):
        open_store(tmp_path, mapped_file_size_commit_log=1 << 20)
    assert not (tmp_path / "abort").exists()
    stranger.unlink()
    again = open_store(tmp_path, mapped_file_size_commit_log=1 << 20)
    assert again.recovery.clean
    assert [again.max_offset_of(*queue) for queue in QUEUES] == [2, 2, 2, 2]
    again.close()


def test_a_queue_whose_first_file_was_lost_is_built_again(tmp_path: Path, store: MessageStore) -> None:
    for _ in range(1000 // ENTRY_SIZE):
        put(store, "A", 0)
    store.close()
    (tmp_path / "consumequeue" / "A" / "0" / f"{0:020d}").unlink()
    again = open_store(tmp_path, mapped_file_size_commit_log=1 << 20)
    assert again.recovery.rebuilt_queues == ["A/0"]
    assert (again.min_offset_of("A", 0), again.max_offset_of("A", 0)) == (0, 52)
    again.close()


def test_a_queue_that_lost_entries_is_filled_again(tmp_path: Path, store: MessageStore) -> None:
    end = put(store, "C", 1)
    store.close()
    path = tmp_path / "consumequeue" / "C" / "1" / f"{0:020d}"
    path.write_bytes(path.read_bytes()[: end * ENTRY_SIZE].ljust(1000, b"\0"))
    again = open_store(tmp_path, mapped_file_size_commit_log=1 << 20)
    assert again.max_offset_of("C", 1) == end + 1
    again.close()


def test_of_many_busy_queues_none_keeps_a_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path, mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=10_000)
    put(store, "A", 0)
    few = store.queues.get("A", 0)
    assert few is not None
    for allowed in (True, False):
        monkeypatch.setattr(queue_entries_module, "_MANY", 1 if allowed else 0)
        for _ in range(60):
            put(store, "A", 0)
        store.write_pending()
        assert few.queue.is_open
        assert (few.queue._descriptor >= 0) is allowed
        few.queue.release()
        few.queue.read(QueueOffset(0), 10)
        few.queue.read(QueueOffset(10), 10)  # who reads on would have it kept open, too
        assert (few.queue._descriptor >= 0) is allowed
        few.queue.release()
    store.close()


def test_queues_may_be_used_and_removed_while_others_are_released(store: MessageStore) -> None:
    for queue in QUEUES:
        assert put(store, *queue) == 2
    store.write_pending()
    store.flush_queues(thorough=True)
    store.release_idle()
    store.release_idle()
    awake = list(store.queues.states)
    slices = store.release_idle_in_slices(slice_size=1)
    next(slices)  # the first of them sleeps
    assert put(store, *awake[0]) == 3
    assert put(store, *awake[1]) == 3
    store.remove_topic(awake[3][0])
    for _ in slices:
        pass
    assert awake[1] in list(store.queues.states)  # it was used before its turn came
    assert awake[2] not in list(store.queues.states)
    assert store.max_offset_of(*awake[2]) == 3
    assert store.max_offset_of(*awake[3]) == 0
    store.close()


def test_waking_takes_no_look_into_the_file(
    tmp_path: Path, store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.close()
    again = open_store(tmp_path, mapped_file_size_commit_log=1 << 20)
    with monkeypatch.context() as unread:
        unread.setattr(type(again.queues._files), "open", None)
        assert [again.max_offset_of(*queue) for queue in QUEUES] == [2, 2, 2, 2]
        assert [again.min_offset_of(*queue) for queue in QUEUES] == [0, 0, 0, 0]
    assert [put(again, *queue) for queue in QUEUES] == [2, 2, 2, 2]
    again.close()


class TestOfMany:
    """What is done every second, where looking at all queues would take too long."""

    @pytest.fixture(autouse=True)
    def many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(queues_module, "_MANY", 0)
        monkeypatch.setattr(queue_tails_module, "_ROOM_OF_ALL", 0)

    def test_only_new_ones_are_written(self, tmp_path: Path) -> None:
        store = open_store(tmp_path, mapped_file_size_commit_log=1 << 20)
        put(store, "A", 0)
        for _ in store.write_pending_in_slices(least_pages=2):
            pass
        old = store.queues.get("A", 0)
        assert old is not None
        assert old.queue.has_files
        put(store, "A", 0)
        put(store, "B", 0)
        for _ in store.write_pending_in_slices(least_pages=2):
            pass
        assert old.queue.pending_bytes == ENTRY_SIZE
        new = store.queues.get("B", 0)
        assert new is not None
        assert not new.queue.pending_bytes
        store.write_pending()
        assert not old.queue.pending_bytes
        store.close()

    def test_one_that_was_made_anew_is_a_new_one(self, tmp_path: Path) -> None:
        store = open_store(tmp_path, mapped_file_size_commit_log=1 << 20)
        put(store, "A", 0)
        store.write_pending()
        store.remove_topic("A")
        put(store, "A", 0)
        for _ in store.write_pending_in_slices(least_pages=2):
            pass
        state = store.queues.get("A", 0)
        assert state is not None
        assert not state.queue.pending_bytes
        store.close()

    def test_they_are_synced_by_a_thorough_flush_only(self, tmp_path: Path) -> None:
        files = FailingFiles()
        store = open_store(tmp_path, files=files, mapped_file_size_commit_log=1 << 20)
        for _ in range(1000):
            put(store, "A", 0)
        store.write_pending()
        state = store.queues.get("A", 0)
        assert state is not None
        assert state.queue.needs_flush(2)
        store.flush_queues(2)
        assert state.queue.needs_flush(2)
        store.flush_queues(thorough=True)
        assert not state.queue.is_dirty
        store.close()
