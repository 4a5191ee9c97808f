"""Syncing many queues at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from downrange.store import queues as queues_module
from downrange.store.errors import FlushFailed
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
