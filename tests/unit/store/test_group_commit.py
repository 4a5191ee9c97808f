from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from downrange.clock import ManualClock
from downrange.store.config import StoreConfig
from downrange.store.errors import FlushFailed
from downrange.store.group_commit import FlushOutcome, FlushPolicy, FlushTimes, GroupCommit, QuickSyncs
from downrange.store.message_store import MessageStore
from downrange.store.new_message import PutMessageStatus
from tests.support.stores import append
from tests.unit.store.small_store import NOW, FailingFiles, bodies, dispatched, kill, new_message, open_store, put


def test_a_flush_is_due_by_the_clock_and_thorough_now_and_then() -> None:
    policy = FlushPolicy(FlushTimes.of_commit_log(StoreConfig()), now=0)
    assert policy.due(499) is None
    due = policy.due(500)
    assert due is not None
    assert (due.least_pages, due.is_thorough) == (4, False)
    assert policy.due(999) is None
    assert policy.next_due == 1000
    late = policy.due(10_000)
    assert late is not None
    assert late.is_thorough
    after = policy.due(10_500)
    assert after is not None
    assert not after.is_thorough


def test_a_log_that_is_not_flushed_by_the_clock_alone_is_looked_at_all_the_time() -> None:
    times = FlushTimes.of_commit_log(StoreConfig(flush_commit_log_timed=False))
    assert (times.interval_millis, times.least_pages, times.thorough_interval_millis) == (10, 4, 10_000)


def test_one_flush_serves_everybody_before_it() -> None:
    waiting: GroupCommit[str] = GroupCommit(5000)
    for offset, name in ((100, "a"), (200, "b"), (300, "c")):
        waiting.wait_for(offset, name, now=0)
    assert [item.token for item in waiting.settle(250)] == ["a", "b"]
    assert waiting.settle(299) == []
    assert len(waiting) == 1


def test_who_waits_too_long_is_told_so() -> None:
    waiting: GroupCommit[str] = GroupCommit(5000)
    waiting.wait_for(100, "a", now=0)
    waiting.wait_for(200, "b", now=1000)
    assert waiting.expire(4999) == []
    assert [(item.token, item.outcome) for item in waiting.expire(5999)] == [("a", FlushOutcome.TIMED_OUT)]
    assert [item.token for item in waiting.expire(6000)] == ["b"]


def test_a_failed_flush_fails_all_who_wait() -> None:
    waiting: GroupCommit[str] = GroupCommit(5000)
    waiting.wait_for(100, "a", now=0)
    waiting.wait_for(200, "b", now=0)
    assert [(item.token, item.outcome) for item in waiting.fail()] == [
        ("a", FlushOutcome.FAILED),
        ("b", FlushOutcome.FAILED),
    ]
    assert len(waiting) == 0


def sent_away(quick: QuickSyncs) -> int:
    """How many syncs go to the other thread before the next one here."""
    count = 0
    while not quick.is_next_here():
        count += 1
    return count


def test_quick_syncs_stay_and_slow_ones_go_away_for_longer_and_longer() -> None:
    quick = QuickSyncs()
    for _ in range(5):
        assert sent_away(quick) == 0
        quick.took(0.0001)
    away = []
    for _ in range(10):
        quick.took(0.008)
        away.append(sent_away(quick))
    assert away == [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 4096]
    quick.took(0.0001)
    assert sent_away(quick) == 0
    quick.took(0.008)
    assert sent_away(quick) == 16


def test_flushed_moves_only_with_a_sync(tmp_path: Path) -> None:
    files = FailingFiles()
    with open_store(tmp_path, files=files) as store:
        first = put(store)
        assert store.flushed_offset == 0
        assert store.flush_commit_log() == first.end_offset == store.flushed_offset
        syncs = files.syncs
        assert store.flush_commit_log() == first.end_offset
        assert files.syncs == syncs
        # Below four dirty pages there is nothing worth doing.
        second = put(store)
        assert store.flush_commit_log(4) == first.end_offset
        assert store.flush_commit_log() == second.end_offset
        for _ in range(5):
            put(store, bytes(3900))
        assert store.flush_commit_log(4) == store.max_offset


def test_after_a_failed_sync_nothing_is_ever_called_safe_again(tmp_path: Path) -> None:
    files = FailingFiles()
    store = open_store(tmp_path, files=files)
    safe = put(store).end_offset
    store.flush_commit_log()
    put(store, b"doubtful")
    files.fail["sync"] = errno.EIO
    with pytest.raises(FlushFailed, match="Input/output error"):
        store.flush_commit_log()
    assert store.flushed_offset == safe
    files.fail.clear()
    with pytest.raises(FlushFailed):
        store.flush_commit_log()
    assert store.flushed_offset == safe
    refused = append(store, new_message())
    assert refused.status is PutMessageStatus.SERVICE_NOT_AVAILABLE
    assert "cannot sync" in refused.reason
    # Reading goes on, and the crash mark stays, so that the next start looks closely.
    assert bodies(store) == [b"hello", b"doubtful"]
    store.close()
    assert (tmp_path / "abort").exists()
    with open_store(tmp_path) as store:
        assert not store.recovery.clean
        assert bodies(store) == [b"hello", b"doubtful"]


def test_a_failed_sync_of_queues_keeps_the_checkpoint_where_it_is(tmp_path: Path) -> None:
    files = FailingFiles()
    store = open_store(tmp_path, files=files)
    put(store)
    store.write_pending()
    files.fail["sync"] = errno.EIO
    with pytest.raises(FlushFailed, match="consume queues"):
        store.flush_queues(thorough=True)
    files.fail.clear()
    with pytest.raises(FlushFailed, match="consume queues"):
        store.flush_queues(thorough=True)
    assert store.checkpoint.logics_msg_timestamp == 0
    assert not store.is_writable
    store.close()
    assert (tmp_path / "abort").exists()


def test_the_checkpoint_speaks_only_of_entries_that_were_written(tmp_path: Path) -> None:
    clock = ManualClock(NOW)
    with open_store(tmp_path, clock=clock) as store:
        put(store)
        store.write_pending()
        clock.tick(60)
        put(store)  # its entry waits in memory while the flush runs in its thread
        store.flush_queues(thorough=True)
        assert store.checkpoint.logics_msg_timestamp == NOW


class SlowFiles(FailingFiles):
    """A disk whose sync takes until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.in_sync = threading.Event()
        self.go_on = threading.Event()

    def sync(self, descriptor: int) -> None:
        self.in_sync.set()
        assert self.go_on.wait(timeout=30)
        super().sync(descriptor)


@contextmanager
def flushing_in_a_thread(store: MessageStore, files: SlowFiles) -> Iterator[None]:
    """A flush that is waiting for the disk while the body of the `with` runs."""
    files.in_sync.clear()
    files.go_on.clear()
    thread = threading.Thread(target=store.flush_commit_log)
    thread.start()
    assert files.in_sync.wait(timeout=30)
    yield
    files.go_on.set()
    thread.join()


def test_what_is_appended_during_a_sync_is_not_part_of_it(tmp_path: Path) -> None:
    files = SlowFiles()
    files.go_on.set()
    with open_store(tmp_path, files=files) as store:
        before = put(store, bytes(3000))
        with flushing_in_a_thread(store, files):
            put(store, b"in the same file")
            put(store, bytes(3000))
        assert store.flushed_offset == before.end_offset
        assert store.flush_commit_log() == store.max_offset


def test_a_file_may_be_deleted_while_it_is_being_synced(tmp_path: Path) -> None:
    files = SlowFiles()
    files.go_on.set()
    with open_store(tmp_path, files=files) as store:
        for _ in range(3):
            put(store, bytes(3000))
        store.write_pending()
        store.flush_queues(thorough=True)
        with flushing_in_a_thread(store, files):
            store.remove_files(store.take_oldest_files(1))
        assert store.flush_commit_log() == store.max_offset
        assert store.is_writable
        assert len(bodies(store)) == 3 - 1


def test_a_new_file_has_its_name_synced_too(tmp_path: Path) -> None:
    synced: list[Path] = []

    class Files(FailingFiles):
        def sync_directory(self, path: Path) -> None:
            synced.append(path)
            super().sync_directory(path)

    with open_store(tmp_path, files=Files()) as store:
        put(store)
        synced.clear()
        store.flush_commit_log()
        assert synced == [tmp_path / "commitlog"]
        put(store)
        store.flush_commit_log()
        assert len(synced) == 1


def test_a_queue_that_cannot_be_written_stops_appends_until_it_can(tmp_path: Path) -> None:
    files = FailingFiles()
    with open_store(tmp_path, files=files) as store:
        for _ in range(49):
            put(store)
        files.fail["create"] = errno.ENOSPC  # the queue's first file, due with its fiftieth entry
        stored = append(store, new_message())
        assert stored.status is PutMessageStatus.PUT_OK  # it is in the log
        assert append(store, new_message()).status is PutMessageStatus.SERVICE_NOT_AVAILABLE
        assert "No space left" in store.refusals["dispatch"]
        files.fail.clear()
        store.dispatch_pending()
        assert store.is_writable
        assert put(store).queue_offset == 50
        assert len(bodies(store)) == 51


def test_the_transient_pool_shows_messages_once_committed(tmp_path: Path) -> None:
    options = {"transient_store_pool_enable": True, "transient_store_pool_size": 2}
    store = open_store(tmp_path, **options)
    deficient = [store.is_transient_pool_deficient]
    results = [put(store, b"%d" % number * 1000) for number in range(8)]
    # Two files are waiting for their commit; the third goes without a buffer.
    deficient.append(store.is_transient_pool_deficient)
    assert [result.queue_offset for result in results] == list(range(8))
    assert store.max_offset == 0
    assert bodies(store) == []
    assert store.commit()
    assert [place[2] for place in dispatched(store)] == list(range(8))
    assert bodies(store) == [b"%d" % number * 1000 for number in range(8)]
    assert [*deficient, store.is_transient_pool_deficient] == [False, True, False]
    # A message that comes between commit and dispatch keeps its number to itself.
    assert put(store, b"8" * 1000).queue_offset == 8
    store.commit()
    assert put(store, b"lost with the process" * 100).queue_offset == 9
    assert [place[2] for place in dispatched(store)] == [8]
    assert put(store, b"lost, too").queue_offset == 10
    assert not store.commit(least_pages=4)
    kill(store)
    with open_store(tmp_path, **options) as store:
        assert len(bodies(store)) == 9
        put(store, b"after")
        store.commit()
        store.dispatch_pending()
        assert bodies(store)[-1] == b"after"
    with open_store(tmp_path) as store:
        assert store.recovery.clean
        assert len(bodies(store)) == 10


def test_without_a_buffer_a_file_may_be_refused(tmp_path: Path) -> None:
    with open_store(
        tmp_path,
        transient_store_pool_enable=True,
        transient_store_pool_size=1,
        fast_fail_if_no_buffer_in_store_pool=True,
    ) as store:
        put(store, bytes(3000))
        refused = append(store, new_message(bytes(3000)))
        assert refused.status is PutMessageStatus.CREATE_MAPEDFILE_FAILED
        assert "transient pool" in refused.reason
