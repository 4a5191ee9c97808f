"""Syncing many queues at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from downrange.store import queues as queues_module
from downrange.store.errors import FlushFailed, StoreError
from downrange.store.files import OsFiles
from downrange.store.message_store import MessageStore
from tests.unit.store.small_store import FailingFiles, new_message, small_config


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
        store.append(new_message(queue_id=queue_id))
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
            store.append(new_message(queue_id=queue_id))
        for _ in store.write_pending_in_slices(least_pages=2):
            pass
        assert all(state.queue.has_files for state in store.queues), "making them all at the end would take long"
        for number in range(6 + 420):  # 420 entries are more than two pages
            store.append(new_message(queue_id=number if number < 6 else 3))
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
            store.append(new_message(queue_id=queue_id))
        for _ in store.write_pending_in_slices(least_pages=2):
            pass
        assert not any(state.queue.pending_bytes for state in store.queues)


def test_entries_that_were_left_for_later_are_built_again_after_a_kill(tmp_path: Path, files: CountingFiles) -> None:
    store = MessageStore.open(small_config(tmp_path), files=files)
    for number in range(18):
        store.append(new_message(queue_id=number % 6))
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
    store.append(new_message(queue_id=1))
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
