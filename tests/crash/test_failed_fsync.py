"""A disk that refuses a sync: nobody is told that a message is safe, nothing more is taken, a new start goes on."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from downrange.store.config import FlushDiskType
from downrange.store.errors import FlushFailed, StoreError
from downrange.store.group_commit import FlushOutcome, GroupCommit
from downrange.store.new_message import PutMessageStatus
from tests.support.checked_store import assert_clean
from tests.support.stores import append
from tests.unit.store.small_store import FailingFiles, bodies, kill, new_message, open_store, put


def test_nobody_is_acknowledged_after_a_sync_failed(tmp_path: Path) -> None:
    files = FailingFiles()
    store = open_store(tmp_path, files=files, flush_disk_type=FlushDiskType.SYNC_FLUSH)
    waiting: GroupCommit[bytes] = GroupCommit(5000)
    first = put(store, b"first")
    waiting.wait_for(first.end_offset, b"first", now=0)
    assert waiting.settle(store.flush_commit_log()) == [(b"first", FlushOutcome.FLUSHED)]

    second = put(store, b"second")
    waiting.wait_for(second.end_offset, b"second", now=0)
    files.fail["sync"] = errno.EIO
    with pytest.raises(FlushFailed, match="Input/output error"):
        store.flush_commit_log()
    assert store.flushed_offset == first.end_offset
    assert waiting.settle(store.flushed_offset) == []
    assert waiting.fail() == [(b"second", FlushOutcome.FAILED)]

    # The disk says yes again, but what it dropped meanwhile is not known.
    files.fail.clear()
    with pytest.raises(FlushFailed):
        store.flush_commit_log()
    refused = append(store, new_message(b"third"))
    assert refused.status is PutMessageStatus.SERVICE_NOT_AVAILABLE
    assert "cannot sync" in refused.reason
    assert bodies(store) == [b"first", b"second"]  # reading goes on

    store.close()
    assert (tmp_path / "abort").exists()
    with open_store(tmp_path) as store:
        assert not store.recovery.clean
        assert bodies(store)[:1] == [b"first"]
        put(store, b"after")
    assert_clean(tmp_path)


def test_a_queue_that_cannot_be_synced_keeps_the_checkpoint_back(tmp_path: Path) -> None:
    files = FailingFiles()
    store = open_store(tmp_path, files=files)
    put(store, b"first")
    store.flush_commit_log()
    store.write_pending()
    files.fail["sync"] = errno.EIO
    with pytest.raises(FlushFailed):
        store.flush_queues(thorough=True)
    files.fail.clear()
    assert not (tmp_path / "checkpoint").exists()
    assert append(store, new_message()).status is PutMessageStatus.SERVICE_NOT_AVAILABLE
    kill(store)
    with open_store(tmp_path) as store:
        assert bodies(store) == [b"first"]
    assert_clean(tmp_path)


@pytest.mark.parametrize("allowed", range(8))
def test_any_sync_of_an_orderly_stop_may_fail(allowed: int, tmp_path: Path) -> None:
    """Closing then says so or leaves the crash mark; the next start has everything."""

    class FailsAfter(FailingFiles):
        def sync(self, descriptor: int) -> None:
            if self.syncs >= allowed + at_open:
                self.fail["sync"] = errno.EIO
            super().sync(descriptor)

    at_open = 1 << 30
    files = FailsAfter()
    store = open_store(tmp_path, files=files)
    for number in range(30):
        put(store, b"%d" % number, queue_id=number % 2, properties={"KEYS": f"k{number}"})
    at_open = files.syncs
    failed = False
    try:
        store.close()
    except StoreError:
        failed = True
    assert failed == (tmp_path / "abort").exists()
    with open_store(tmp_path) as store:
        assert len(bodies(store)) + len(bodies(store, queue_id=1)) == 30
    assert_clean(tmp_path)
