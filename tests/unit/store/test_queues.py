"""Syncing many queues at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from downrange.model.message import PhysicalOffset, QueueOffset
from downrange.store.errors import FlushFailed, StoreError
from downrange.store.files import OsFiles
from downrange.store.message_store import MessageStore
from downrange.store.queue import queues as queues_module
from tests.support.stores import append, append_batch
from tests.unit.store.small_store import FailingFiles, new_message, open_store, put, small_config


class CountingFiles(FailingFiles):
    """Counts whole syncs; one fails while `fail` names it."""

    def __init__(self) -> None:
        super().__init__()
        self.file_system_syncs = 0

    def sync_file_system(self, path: Path) -> None:
        self._maybe_fail("sync_file_system")
        self.file_system_syncs += 1
        super().sync_file_system(path)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> CountingFiles:
    monkeypatch.setattr(queues_module, "_MANY", 5)
    return CountingFiles()


def filled(root: Path, files: OsFiles, queues: int) -> MessageStore:
    store = MessageStore.open(small_config(root), files=files)
    for queue_id in range(queues):
        append(store, new_message(queue_id=queue_id))
    store.write_pending()
    return store


def test_a_few_queues_are_synced_one_by_one(tmp_path: Path, files: CountingFiles) -> None:
    with filled(tmp_path, files, 5) as store:
        before = files.syncs
        store.flush_queues(thorough=True)
        assert files.syncs - before >= 5
        assert files.file_system_syncs == 0
        assert not any(state.queue.is_dirty for state in store.queues)


def test_many_queues_are_synced_by_one_call(tmp_path: Path, files: CountingFiles) -> None:
    with filled(tmp_path, files, 6) as store:
        store.flush_queues(thorough=True)
        assert files.file_system_syncs == 1
        assert not any(state.queue.is_dirty for state in store.queues)
        store.flush_queues(thorough=True)
        assert files.file_system_syncs == 1, "nothing was dirty any more"


def test_a_sync_of_many_queues_that_fails_leaves_them_all_dirty(tmp_path: Path, files: CountingFiles) -> None:
    store = filled(tmp_path, files, 6)
    files.fail["sync_file_system"] = 5
    with pytest.raises(FlushFailed, match="Input/output error"):
        store.flush_queues(thorough=True)
    assert all(state.queue.is_dirty for state in store.queues)
    files.fail.clear()
    store.close()


def test_of_many_queues_only_those_with_much_to_write_are_written_between_thorough_flushes(
    tmp_path: Path, files: CountingFiles
) -> None:
    config = small_config(tmp_path, mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=6_000_000)
    with MessageStore.open(config, files=files) as store:
        for queue_id in range(6):
            append(store, new_message(queue_id=queue_id))
        for _ in store.write_pending_in_slices(least_pages=2):
            pass
        assert all(state.queue.has_files for state in store.queues), "making them all at the end would take long"
        for number in range(6 + 420):  # 420 entries are more than two pages
            append(store, new_message(queue_id=number if number < 6 else 3))
        for _ in store.write_pending_in_slices(least_pages=2):
            pass
        store.flush_queues(least_pages=2)
        assert [bool(state.queue.pending_bytes) for state in store.queues] == [True, True, True, False, True, True]
        assert store.checkpoint.logics_msg_timestamp == 0, "nobody may rely on what is not written"
        for _ in store.write_pending_in_slices():
            pass
        store.flush_queues(thorough=True)
        assert not any(state.queue.pending_bytes for state in store.queues)
        assert store.checkpoint.logics_msg_timestamp > 0


def test_a_few_queues_are_always_written(tmp_path: Path, files: CountingFiles) -> None:
    with MessageStore.open(small_config(tmp_path), files=files) as store:
        for queue_id in range(5):
            append(store, new_message(queue_id=queue_id))
        for _ in store.write_pending_in_slices(least_pages=2):
            pass
        assert not any(state.queue.pending_bytes for state in store.queues)


def test_entries_that_were_left_for_later_are_built_again_after_a_kill(tmp_path: Path, files: CountingFiles) -> None:
    store = MessageStore.open(small_config(tmp_path), files=files)
    for number in range(18):
        append(store, new_message(queue_id=number % 6))
        for _ in store.write_pending_in_slices(least_pages=2):
            pass
    assert all(state.queue.pending_bytes for state in store.queues)
    store._lock.release()  # a killed process leaves everything as it is
    with MessageStore.open(small_config(tmp_path)) as again:
        assert [again.max_offset_of("TopicTest", queue_id) for queue_id in range(6)] == [3] * 6


def test_after_a_write_that_failed_all_queues_are_written_before_messages_are_taken(
    tmp_path: Path, files: CountingFiles
) -> None:
    store = filled(tmp_path, files, 6)
    append(store, new_message(queue_id=1))
    files.fail["write_at"] = 28
    with pytest.raises(StoreError, match="No space left"):
        store.write_pending()
    assert "queues" in store.refusals
    files.fail.clear()
    for _ in store.write_pending_in_slices(least_pages=2):
        pass
    assert store.refusals == {}
    assert not any(state.queue.pending_bytes for state in store.queues)
    store.close()


def counted(store: MessageStore) -> dict[str, tuple[int, int]]:
    counts: dict[str, tuple[int, int]] = {}
    for topic, messages, size in store.queues.take_counts():
        before = counts.get(topic, (0, 0))
        counts[topic] = before[0] + messages, before[1] + size
    return counts


def test_every_message_that_came_in_is_counted_by_topic(tmp_path: Path) -> None:
    store = open_store(tmp_path, mapped_file_size_commit_log=1 << 20)
    size = put(store, topic="a").size
    put(store, topic="b", sys_flag=4)  # a message that is in no queue is not counted
    groups = [[new_message(topic=topic, queue_id=queue_id)] for topic, queue_id in (("a", 0), ("b", 0), ("a", 1))]
    append_batch(store, groups)
    append_batch(store, [[new_message(topic="a")] * 5])
    assert counted(store) == {"a": (8, 8 * size), "b": (1, size)}
    assert counted(store) == {}
    append_batch(store, groups[1:])
    store.remove_topic("b")
    assert counted(store) == {"a": (1, size), "b": (1, size)}
    store.close()


def test_queues_are_found_by_their_rows(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    told: list[str] = []
    store.queues.on_change = told.append
    for topic, queue_id in (("a", 2), ("a", 0), ("b", 1)):
        append(store, new_message(topic=topic, queue_id=queue_id))
    assert told == ["a", "a", "b"]
    states = list(store.queues)
    assert store.queues.by_row == states
    store.queues.remove_where(lambda topic, queue_id, end: (topic, queue_id) == ("a", 2))
    assert store.queues.by_row == [None, *states[1:]]
    append(store, new_message(topic="c"))
    assert store.queues.by_row == [store.queues.get("c", 0), *states[1:]]
    assert told == ["a", "a", "b", "a", "c"]
    store.close()


def test_whoever_still_holds_a_removed_queue_does_not_touch_another(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    append(store, new_message(topic="old"))
    removed = store.queues.states["old", 0]
    store.remove_topic("old")
    append(store, new_message(topic="new"))
    removed.next_offset = QueueOffset(77)
    removed.queue.put(QueueOffset(0), PhysicalOffset(1 << 40), 100, 0)
    state = store.queues.states["new", 0]
    assert (state.next_offset, state.queue.max_offset, state.queue.max_physical_offset) == (1, 1, store.max_offset)
    store.close()


def test_a_start_looks_into_each_file_of_a_small_queue_once(tmp_path: Path) -> None:
    filled(tmp_path, OsFiles(), 30).close()
    opened: list[str] = []

    class WatchedFiles(OsFiles):
        def open(self, path: Path | str, *, writable: bool = True) -> int:
            opened.append(str(path))
            return super().open(path, writable=writable)

    store = MessageStore.open(small_config(tmp_path), files=WatchedFiles())
    of_queues = [path for path in opened if "consumequeue" in path]
    assert len(set(of_queues)) == 30
    assert len(of_queues) <= 30 + 2  # the newest one also says where the log ends, and when
    opened.clear()
    store.delete_dependents()
    assert opened == []
    store.close()


def test_the_beginning_of_a_queue_is_looked_up_only_when_the_log_lost_messages(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for _ in range(3):
        append(store, new_message())
    queue = store.queues.states["TopicTest", 0].queue
    queue.correct_min_offset(PhysicalOffset(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(queue), "_bytes", lambda *arguments: pytest.fail("looked into the entries"))
        queue.correct_min_offset(PhysicalOffset(0))
    queue.correct_min_offset(PhysicalOffset(1))
    assert queue.min_offset == 1
    store.close()
