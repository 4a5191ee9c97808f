"""What the broker sees of the store: append, read, query, flush, clean up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from downrange.clock import SystemClock
from downrange.model.message import PhysicalOffset, QueueOffset, TopicQueue
from downrange.store.checkpoint import AbortMarker, Checkpoint, DirectoryLock
from downrange.store.config import BrokerRole, StoreConfig
from downrange.store.dispatcher import BitmapOf, Dispatcher, LogFollower
from downrange.store.errors import StoreError
from downrange.store.files import OS_FILES, Files
from downrange.store.flushing import Flushing
from downrange.store.index.key_index import KeyIndex
from downrange.store.log.commit_log import CommitLog
from downrange.store.log.headroom import Stretch
from downrange.store.log.segments import BufferPool, LogPaths, Segments, disk_use, storage_error
from downrange.store.message_appender import MessageAppender
from downrange.store.message_limits import MessageLimits
from downrange.store.message_reader import MatchesEntry, MatchesRecord, MessageReader, QueueEntry
from downrange.store.new_messages import NewMessages
from downrange.store.queue.consume_queue import ENTRY
from downrange.store.queue.queues import ConsumeQueues
from downrange.store.recovery import Recovery, RecoveryReport
from downrange.store.refusals import Refusals
from downrange.store.removal import Removal
from downrange.store.truncation import Truncation

__all__ = ["MatchesEntry", "MatchesRecord", "MessageStore", "QueueEntry"]

log = logging.getLogger(__name__)


class WallClock(Protocol):
    """The part of a `Clock` that the store needs."""

    def now(self) -> int: ...


class MessageStore(MessageReader):
    """The messages of one broker in one directory.

    One thread appends, reads and removes. `flush_commit_log`, `commit`, `flush_queues` and `prepare_…` may run
    beside it in a worker thread, each in one at a time.

    A message that `append` accepted can be read at once (with the transient pool: after `commit` and
    `dispatch_pending`) and is safe once `flushed_offset` has reached its `end_offset`.
    """

    def __init__(
        self,
        config: StoreConfig,
        *,
        clock: WallClock | None = None,
        files: Files = OS_FILES,
        read_only: bool = False,
        disk_use: Callable[[Path], float] = disk_use,
        bitmap_of: BitmapOf | None = None,
    ) -> None:
        self.read_only = read_only
        self.recovery = RecoveryReport(clean=True)
        self._now = (clock or SystemClock()).now
        self._files = files
        self._disk_use = disk_use
        root = config.store_path_root_dir
        self._lock = DirectoryLock(root / "lock")
        self._abort = AbortMarker(root / "abort", files)
        self.checkpoint = Checkpoint(root / "checkpoint", files)
        self._pool = None
        if config.uses_transient_pool and not read_only:
            self._pool = BufferPool(
                config.transient_store_pool_size,
                config.mapped_file_size_commit_log,
                required=config.fast_fail_if_no_buffer_in_store_pool,
            )
        paths = LogPaths(config.commit_log_paths, config.read_only_commit_log_paths, disk_use)
        size = config.mapped_file_size_commit_log
        segments = Segments(paths, size, files, writable=not read_only, pool=self._pool)
        index = None
        if config.message_index_enable:
            slots, entries = config.max_hash_slot_num, config.max_index_num
            index = KeyIndex(root / "index", slots, entries, files, self._now, writable=not read_only)
        queues = ConsumeQueues(config, files, writable=not read_only)
        super().__init__(config, CommitLog(segments), queues, index)
        is_slave = config.broker_role is BrokerRole.SLAVE
        self.limits = MessageLimits(config)
        self._refusals = Refusals()
        self._refusals.refuse("closed", "the store is not open")
        self._dispatcher = Dispatcher(queues, index, config.delay_level_millis(), bitmap_of)
        self.follower = LogFollower(self.commit_log, self._dispatcher, self._refusals, is_slave=is_slave)
        """Puts what is in the log into the queues; `follower.at_once`: messages are there when `append` returns."""
        self._flushing = Flushing(self.commit_log, self.follower, self.checkpoint, self._refusals)
        self._truncation = Truncation(root, segments, files)
        self._removal = Removal(segments, queues, index, self._flushing, self._refusals, files)
        # Called for every message, so without a step in between. The rest is below: an object with more than thirty
        # attributes is slower to all who use it.
        appender = MessageAppender(self.commit_log, self.follower, self.limits, self._refusals, self._now)
        self.add = appender.add
        self.add_each = appender.add_each
        self.append = appender.append
        self.append_data = appender.append_data

    # Opening and closing.

    @classmethod
    def open(cls, config: StoreConfig, **options: object) -> MessageStore:
        """Build a store and recover it; arguments as for the class."""
        store = cls(config, **options)  # type: ignore[arg-type]
        store.start()
        return store

    def start(self) -> RecoveryReport:
        """Take the directory, recover what is in it, and begin to accept messages."""
        _refuse_foreign_stores(self.config.store_path_root_dir)
        if self.read_only:
            self._recover(clean=True)
        else:
            root = self.config.store_path_root_dir
            try:
                self._lock.take()
            except OSError as error:
                raise storage_error(f"cannot use {root} as a store", error) from error
            try:
                self._make_directories()
                self._recover(clean=not self._abort.is_set)
                # Only now: a mark of an older boot says that what was found here could not be trusted.
                self._abort.set()
            except BaseException as error:
                self._segments.close()
                self._lock.release()
                if isinstance(error, OSError):
                    raise storage_error(f"cannot open the store {root}", error) from error
                raise
        self.queues.release()
        self._flushing.is_recovering = False
        self._closed = None
        self._refusals.allow("closed")
        if self.read_only:
            self._refusals.refuse("read-only", "the store is open for reading only")
        elif self.config.broker_role is BrokerRole.SLAVE:
            self._refusals.refuse("slave", "this broker is a slave: it takes messages from its master only")
        for warning in self.recovery.warnings:
            log.warning("recovery: %s", warning)
        return self.recovery

    def _make_directories(self) -> None:
        """Make the names of all directories safe before anything is in them: a sync of a file does not sync them."""
        root = self.config.store_path_root_dir
        names = ("consumequeue",) if self.index is None else ("consumequeue", "index")
        for path in (root, *self.config.commit_log_paths, *map(root.joinpath, names)):
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                error.filename = str(path)  # the one that the settings name, not a parent of it
                raise
            self._files.sync_directory(path.parent)

    def _recover(self, *, clean: bool) -> None:
        unfinished = self._truncation.noted()
        clean = clean and unfinished is None
        report = self.recovery = RecoveryReport(clean=clean)
        report.warnings += self._segments.load()
        if unfinished is not None and not self.read_only:
            self._truncation.clear(unfinished)
            self.commit_log.cut(unfinished)
        self.queues.load(clean=clean)
        self.checkpoint.load()
        # After a power cut the newest index file cannot be trusted. If only the process died, it can.
        keep_index = report.is_intact = clean or self._abort.is_of_this_boot
        if self.index is not None:
            self.index.load(None if keep_index else self.checkpoint.index_msg_timestamp)
        if clean and not self.read_only:
            self._abort.set()  # from here on files change
        self.queues.recover(clean=clean)
        self._replay(report, machine_stopped=not keep_index)
        if unfinished is not None and not self.read_only:
            self._finish_truncation()
        if not self.read_only and (report.rebuilt_queues or (clean and report.replayed)):
            # The checkpoint already vouches for these entries: they must not be lost again by a crash that follows.
            self._flushing.flush_all_queues()
        log.info(
            "store recovered clean=%s start=%d end=%d records=%d replayed=%d",
            clean, report.start_offset, report.end_offset, report.records, report.replayed,
        )  # fmt: skip

    def _replay(self, report: RecoveryReport, *, machine_stopped: bool) -> None:
        Recovery(
            self.commit_log,
            self._dispatcher,
            self.checkpoint,
            self._files,
            self.config,
            machine_stopped=machine_stopped,
        ).run(report)
        self.queues.take_counts()  # those of the replay: the messages came in before
        self.follower.offset = self.commit_log.max_offset
        self._dispatcher.last_store_timestamp = self.commit_log.last_store_timestamp

    def close(self) -> None:
        """Flush everything and leave the directory in order. A store that could not flush keeps its crash mark."""
        if self._closed is not None:
            return
        self._closed = "the store was shut down"
        was_healthy = not self._refusals.has_broken_files
        self._refusals.refuse("closed", self._closed)
        try:
            if not self.read_only and was_healthy:
                self._flushing.flush_everything()
                self._close_index()
                self._segments.discard_prepared()
                if not self._refusals.has_broken_files:
                    self._abort.clear()
        finally:
            self._segments.close()
            self.queues.release()
            self._lock.release()

    def _close_index(self) -> None:
        if self.index is not None:
            try:
                self.index.close()
            except OSError as error:
                raise storage_error("cannot sync the index", error) from error

    def __enter__(self) -> MessageStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = str(self._refusals) or "open"
        return (
            f"<MessageStore {self.config.store_path_root_dir} {self.min_offset}..{self.max_offset} "
            f"queues={len(self.queues)} {state}>"
        )

    # Who may append.

    @property
    def is_writable(self) -> bool:
        return not self._refusals.any

    @property
    def refusals(self) -> dict[str, str]:
        """Why appends are refused now, by reason; empty when they are not."""
        return dict(self._refusals.texts)

    def set_role(self, role: BrokerRole) -> None:
        """Become the store of a master, which takes messages, or of a slave, which takes a master's log."""
        self.config = replace(self.config, broker_role=role)
        self.follower.is_slave = role is BrokerRole.SLAVE
        if role is BrokerRole.SLAVE:
            self._refusals.refuse("slave", "this broker is a slave: it takes messages from its master only")
        else:
            self._refusals.allow("slave")

    def set_fence(self, reason: str | None) -> None:
        """Take no messages for a reason that a controller's master has; None: take them."""
        if reason is None:
            self._refusals.allow("fence")
        else:
            self._refusals.refuse("fence", reason)

    def set_disk_full(self, full: bool) -> None:
        """Above the last watermark nothing is appended; reading goes on."""
        if full:
            self._refusals.refuse("disk full", "the disk is too full")
        else:
            self._refusals.allow("disk full")

    @property
    def max_message_size(self) -> int:
        return self.limits.max_message_size

    def set_max_message_size(self, size: int) -> None:
        """Change the largest body at run time; values below 10 are ignored, as RocketMQ does."""
        self.limits.set_max_message_size(size)

    @property
    def flushed_offset(self) -> PhysicalOffset:
        """Up to here the log is safe."""
        return self.commit_log.flushed_offset

    @property
    def dispatch_behind_bytes(self) -> int:
        return self.follower.behind_bytes

    @property
    def is_transient_pool_deficient(self) -> bool:
        return self._pool is not None and self._pool.available == 0

    @property
    def transient_buffers_available(self) -> int | None:
        """Free buffers of the transient pool; None without one."""
        return None if self._pool is None else self._pool.available

    # Under a controller.

    @property
    def whole_end(self) -> PhysicalOffset:
        """The end of the last whole record: behind it lies at most the beginning of a record from a master."""
        return self.commit_log.whole_end(self.follower.offset)

    def set_confirm_offset(self, offset: int | None) -> None:
        """Let only records that end at or before this offset be read by queue (None: all); see `dispatch_pending`."""
        self.follower.set_limit(offset)
        self._flushing.notes_confirm_offset = True

    def hide_unconfirmed(self, offset: int) -> None:
        """Take the records that end behind an offset out of their queues. They keep their queue offsets."""
        queues = self.queues
        queues.truncate(PhysicalOffset(offset), keep_numbers=True)
        newest = queues.newest()
        if newest is not None and newest.queue.max_physical_offset > offset:
            raw = newest.queue.read(QueueOffset(newest.queue.max_offset - 1), 1)
            queues.truncate(PhysicalOffset(ENTRY.unpack(raw)[0]), keep_numbers=True)
        self.follower.offset = max(self.min_offset, queues.max_physical_offset)
        self.set_confirm_offset(offset)

    def truncate(self, offset: int) -> None:
        """Cut the log at `offset`, where a record begins; it is cut on disk when this returns.

        While nothing flushes or prepares files in another thread. Queues and index follow; what else is derived from
        the log is the caller's business. Raises OSError or StoreError; then the next start finishes the truncation.
        """
        end = PhysicalOffset(offset)
        if not self.min_offset <= end < self.max_offset:
            raise StoreError(f"a log from {self.min_offset} to {self.max_offset} cannot be cut at {end}")
        confirmed = self.follower.limit
        self.flush_commit_log()  # what stays counts as safe afterwards
        self._truncation.note(end)
        self._segments.discard_prepared()
        self._truncation.clear(end)
        self.commit_log.cut(end)
        self.queues.truncate(end)
        self.queues.count_again()
        self._replay(RecoveryReport(clean=True), machine_stopped=False)
        self._finish_truncation()
        if confirmed is not None:
            self.hide_unconfirmed(min(confirmed, end))

    def _finish_truncation(self) -> None:
        self.checkpoint.go_back(self.commit_log.last_store_timestamp, self.max_offset)
        self._refusals.allow("master's log")
        self._truncation.finish()

    # What else the parts do; they say more about it.

    def check_takes_data(self) -> None:
        self._refusals.check_takes_data()

    def dispatch_pending(self, applied: Callable[[NewMessages], None] = lambda messages: None) -> None:
        self.follower.dispatch_pending(applied)

    def commit(self, least_pages: int = 0) -> bool:
        return self._flushing.commit(least_pages)

    def log_needs_flush(self, least_pages: int) -> bool:
        return self._flushing.log_needs_flush(least_pages)

    def queues_need_flush(self, least_pages: int) -> bool:
        return self._flushing.queues_need_flush(least_pages)

    def flush_commit_log(self, least_pages: int = 0) -> PhysicalOffset:
        return self._flushing.flush_commit_log(least_pages)

    def write_pending(self) -> None:
        self._flushing.write_pending()

    def write_pending_in_slices(self, slice_size: int = 64, least_pages: int = 0) -> Iterator[None]:
        return self._flushing.write_pending_in_slices(slice_size, least_pages)

    def flush_queues(self, least_pages: int = 0, *, thorough: bool = False) -> None:
        self._flushing.flush_queues(least_pages, thorough=thorough)

    def take_oldest_files(self, count: int) -> list[Path]:
        return self._removal.take_oldest_files(count)

    def remove_files(self, paths: Iterable[Path]) -> None:
        self._removal.remove_files(paths)

    def delete_dependents(self) -> int:
        return self._removal.delete_dependents()

    def remove_expired_queues(self) -> list[TopicQueue]:
        return self._removal.remove_expired_queues()

    def remove_unused_topics(self, topics: Iterable[str]) -> list[TopicQueue]:
        return self._removal.remove_unused_topics(topics)

    def remove_topic(self, topic: str) -> list[TopicQueue]:
        return self._removal.remove_topic(topic)

    # The log's files.

    @property
    def needs_next_file(self) -> bool:
        """Is it time to call `prepare_next_file`: is the current file in use and its successor not made yet?"""
        last = self._segments.last
        return last is not None and last.wrote > 0 and not self._segments.is_prepared

    def next_stretch(self) -> Stretch | None:
        """The part of the log that it is time to prepare; None when enough is ready. Without it appends do it.

        To be prepared at once or never: an append that comes so far first takes it back.
        """
        return self._segments.next_stretch()

    def prepare_stretch(self, stretch: Stretch) -> None:
        self._segments.prepare_stretch(stretch)

    def prepare_next_file(self) -> None:
        self._segments.prepare(warm=self.config.warm_mapped_file_enable)

    def release_idle(self) -> None:
        """Give back mappings and descriptors that were not used since the last call."""
        for _ in self.release_idle_in_slices():
            pass

    def release_idle_in_slices(self, slice_size: int = 500) -> Iterator[None]:
        """`release_idle` that yields after every so many queues, so that a caller can do other work between."""
        self._segments.release_idle()
        yield from self.queues.release_in_slices(slice_size)

    @property
    def commit_log_disk_use(self) -> float:
        """The fill of the emptiest disk that has a part of the log."""
        return min(self._disk_use(path) for path in self.config.commit_log_paths)

    @property
    def queue_disk_use(self) -> float:
        return self._disk_use(self.config.store_path_root_dir)

    def file_times(self) -> list[int]:
        """When each file of the log was last changed, oldest file first."""
        return [segment.modified_millis() for segment in self._segments]


def _refuse_foreign_stores(root: Path) -> None:
    """5.x can keep its queues in RocksDB; what we would make of such a directory is a second, diverging truth."""
    for name in ("consumequeue_r", "rocksdb"):
        if (root / name).is_dir():
            raise StoreError(
                f"{root / name}: this store keeps its queues in RocksDB (storeType=defaultRocksDB), unread here"
            )
    if any((root / "consumequeue").glob("CURRENT")):
        raise StoreError(f"{root / 'consumequeue'} is a RocksDB directory (storeType=defaultRocksDB), unread here")
