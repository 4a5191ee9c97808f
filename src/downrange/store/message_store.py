"""What the broker sees of the store: append, read, query, flush, clean up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from downrange.clock import SystemClock
from downrange.model.message import TopicQueue
from downrange.model.topics import MAX_TOPIC_LENGTH, OP_HALF_TOPIC, SCHEDULE_TOPIC
from downrange.store.bulk_replay import BulkReplay
from downrange.store.checkpoint import AbortMarker, Checkpoint, DirectoryLock
from downrange.store.commit_log import CommitLog, Walk, join_properties
from downrange.store.config import BrokerRole, StoreConfig
from downrange.store.dispatcher import BitmapOf, Dispatcher
from downrange.store.errors import DiskFull, FlushFailed, StoreClosed, StoreError
from downrange.store.files import OS_FILES, Files
from downrange.store.growth import Growth
from downrange.store.headroom import Stretch
from downrange.store.key_index import KeyIndex
from downrange.store.message_limits import MessageLimits
from downrange.store.message_reader import MatchesEntry, MatchesRecord, MessageReader, QueueEntry
from downrange.store.new_message import AppendResult, BatchUnit, NewMessage, PutMessageStatus
from downrange.store.queues import ConsumeQueues, QueueState, check_storable
from downrange.store.recovery import Recovery, RecoveryReport
from downrange.store.run import Place, PlainMessage, Run, run_of
from downrange.store.segments import BufferPool, Segments, disk_use, storage_error

__all__ = ["MatchesEntry", "MatchesRecord", "MessageStore", "QueueEntry"]

log = logging.getLogger(__name__)

PUT_OK: Final = PutMessageStatus.PUT_OK
# A clock that was set back by less than this is waited for; a larger step is believed.
_CLOCK_STEP_MILLIS: Final = 60_000
_LMQ_PREFIX: Final = "%LMQ%"
# Reasons to refuse messages that do not keep a slave from following its master.
_MASTERS_BUSINESS: Final = frozenset(("slave", "disk full"))


class WallClock(Protocol):
    """The part of a `Clock` that the store needs."""

    def now(self) -> int: ...


class _Progress(NamedTuple):
    """How far queue entries were written: store time of the last one, and the log offset behind its record."""

    timestamp: int
    offset: int


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
        memory_bytes: int | None = None,
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
        segments = Segments(
            config.commit_log_paths,
            config.mapped_file_size_commit_log,
            files,
            read_only_paths=config.read_only_commit_log_paths,
            writable=not read_only,
            pool=self._pool,
            disk_use=disk_use,
        )
        index = None
        if config.message_index_enable:
            slots, entries = config.max_hash_slot_num, config.max_index_num
            index = KeyIndex(root / "index", slots, entries, files, self._now, writable=not read_only)
        queues = ConsumeQueues(config, files, writable=not read_only)
        super().__init__(config, CommitLog(segments), queues, index, memory_bytes)
        self._dispatcher = Dispatcher(queues, index, config.delay_level_millis(), bitmap_of)
        # Why appends are refused; several reasons may hold at once.
        self._refusals: dict[str, str] = {"closed": "the store is not open"}
        self._refused = True
        self._dispatched_offset = 0
        self._written = _Progress(0, 0)
        self._queues_safe_up_to = 0
        self.limits = MessageLimits(config)

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
        self._closed = None
        self._allow("closed")
        if self.read_only:
            self._refuse("read-only", "the store is open for reading only")
        elif self.config.broker_role is BrokerRole.SLAVE:
            self._refuse("slave", "this broker is a slave: it takes messages from its master only")
        for warning in self.recovery.warnings:
            log.warning("recovery: %s", warning)
        return self.recovery

    def _make_directories(self) -> None:
        """Make their names safe before anything is in them: nobody looks at them again when a message is synced."""
        root = self.config.store_path_root_dir
        for path in (root, *self.config.commit_log_paths):
            path.mkdir(parents=True, exist_ok=True)
            self._files.sync_directory(path.parent)

    def _recover(self, *, clean: bool) -> None:
        report = self.recovery = RecoveryReport(clean=clean)
        report.warnings += self._segments.load()
        self.queues.load()
        self.checkpoint.load()
        # After a power cut the newest index file cannot be trusted. If only the process died, it can.
        keep_index = clean or self._abort.is_of_this_boot
        if self.index is not None:
            self.index.load(None if keep_index else self.checkpoint.index_msg_timestamp)
        if clean and not self.read_only:
            self._abort.set()  # from here on files change
        self.queues.recover(clean=clean)
        Recovery(
            self.commit_log,
            self.queues,
            self.index,
            self._dispatcher,
            self.checkpoint,
            self._files,
            check_crc=self.config.check_crc_on_recover,
            index_safe=self.config.message_index_safe,
            machine_stopped=not keep_index,
            is_slave=self.config.broker_role is BrokerRole.SLAVE,
            writable=not self.read_only,
        ).run(report)
        self._dispatched_offset = self.commit_log.max_offset
        self._dispatcher.last_store_timestamp = self.commit_log.last_store_timestamp
        if not self.read_only and (report.rebuilt_queues or (clean and report.replayed)):
            # The checkpoint already vouches for these entries: they must not be lost again by a crash that follows.
            self.write_pending()
            self.flush_queues(thorough=True)
        log.info(
            "store recovered clean=%s start=%d end=%d records=%d replayed=%d",
            clean, report.start_offset, report.end_offset, report.records, report.replayed,
        )  # fmt: skip

    def close(self) -> None:
        """Flush everything and leave the directory in order. A store that could not flush keeps its crash mark."""
        if self._closed is not None:
            return
        self._closed = "the store was shut down"
        was_healthy = not (self._refusals.keys() & {"flush", "dispatch"})
        self._refuse("closed", self._closed)
        try:
            if not self.read_only and was_healthy:
                self.commit()
                self.dispatch_pending()
                self.flush_commit_log()
                self.write_pending()
                self.flush_queues(thorough=True)
                self._close_index()
                self._segments.discard_prepared()
                if not (self._refusals.keys() & {"flush", "dispatch"}):
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
        state = ", ".join(self._refusals.values()) or "open"
        return (
            f"<MessageStore {self.config.store_path_root_dir} {self.min_offset}..{self.max_offset} "
            f"queues={len(self.queues)} {state}>"
        )

    # Who may append.

    def _refuse(self, reason: str, text: str) -> None:
        self._refusals[reason] = text
        self._refused = True

    def _allow(self, reason: str) -> None:
        self._refusals.pop(reason, None)
        self._refused = bool(self._refusals)

    @property
    def is_writable(self) -> bool:
        return not self._refused

    @property
    def refusals(self) -> dict[str, str]:
        """Why appends are refused now, by reason; empty when they are not."""
        return dict(self._refusals)

    def set_disk_full(self, full: bool) -> None:
        """Above the last watermark nothing is appended; reading goes on."""
        if full:
            self._refuse("disk full", "the disk is too full")
        else:
            self._allow("disk full")

    @property
    def max_message_size(self) -> int:
        return self.limits.max_message_size

    def set_max_message_size(self, size: int) -> None:
        """Change the largest body at run time; values below 10 are ignored, as RocketMQ does."""
        self.limits.set_max_message_size(size)

    @property
    def is_transient_pool_deficient(self) -> bool:
        return self._pool is not None and self._pool.available == 0

    @property
    def transient_buffers_available(self) -> int | None:
        """Free buffers of the transient pool; None without one."""
        return None if self._pool is None else self._pool.available

    # Appending.

    def append(self, message: NewMessage, now: int | None = None) -> AppendResult:
        """Store one message. Who stores many at once may read the clock for all of them and pass `now`."""
        if self._refused:
            return self._refusal()
        if len(message.body) + len(message.properties) > self.limits.surely_fits:
            refused = self.limits.check(message)
            if refused is not None:
                return refused
        state = self._states.get((message.topic, message.queue_id))
        if state is None:
            made = self._make_state(message)
            if isinstance(made, AppendResult):
                return made
            state = made
        sys_flag = message.sys_flag
        takes_place = not sys_flag & 4  # neither prepared nor rolled back: the message gets a queue offset
        queue_offset = state.next_offset if takes_place else 0
        commit_log = self.commit_log
        if now is None:
            now = self._now()
        if now < commit_log.last_store_timestamp:
            now = self._not_before(now)
        try:
            physical_offset, size = commit_log.append(message, state.topic_field, queue_offset, now)
        except StoreError as error:
            return self._failed_append(error)
        if takes_place:
            state.next_offset = queue_offset + 1
        if self._dispatched_offset == physical_offset and self._pool is None:
            try:
                text = message.properties.decode("utf-8", "replace")
                self._dispatcher.apply(state, queue_offset, physical_offset, size, sys_flag, now, text)
                self._dispatched_offset = physical_offset + size
            except (OSError, StoreError) as error:
                self._dispatch_failed(error)
        elif self._pool is None:
            self.dispatch_pending()
        return AppendResult(PUT_OK, physical_offset, size, queue_offset, now)

    def append_run(self, run: Run, born_host: bytes | list[bytes], store_host: bytes, now: int) -> bool:
        """Store many messages at once; False when nothing was stored, and `append` knows why.

        For messages that need no further look: they fit (`surely_fits`), are not transactional, and their queues exist
        and are not special.
        """
        commit_log = self.commit_log
        if self._refused or self._pool is not None or self._dispatched_offset != self._segments.wrote_offset:
            return False
        if now < commit_log.last_store_timestamp:
            now = self._not_before(now)
        if not commit_log.append_run(run, self.queues.tails, born_host, store_host, now):
            return False
        try:
            self._dispatcher.apply_run(run, now)
            self._dispatched_offset = run.end
        except (OSError, StoreError) as error:
            self._dispatch_failed(error)
        return True

    def takes_together(self, message: NewMessage) -> bool:
        """Does the message need no further look: it fits, gets a place in a queue, and that queue exists?"""
        return (
            len(message.body) + len(message.properties) <= self.limits.surely_fits
            and (message.topic, message.queue_id) in self._states
            and not message.sys_flag & 4
        )

    def append_together(self, messages: Sequence[NewMessage], now: int) -> list[Place] | None:
        """`append_run` for messages of all kinds that `takes_together` says yes to.

        As those of a run they are counted by their queues; see `ConsumeQueues.take_counts`.
        """
        if self._refused or self._pool is not None or self._dispatched_offset != self._segments.wrote_offset:
            return None
        commit_log = self.commit_log
        if now < commit_log.last_store_timestamp:
            now = self._not_before(now)
        states = self._states
        run = [(states[message.topic, message.queue_id], message) for message in messages]
        try:
            places = commit_log.append_together(run, now)
        except StoreError:
            return None
        try:
            self._apply_together(run, places, now)
        except (OSError, StoreError) as error:
            self._dispatch_failed(error)
        return places

    def _apply_together(self, run: Sequence[tuple[QueueState, NewMessage]], places: list[Place], now: int) -> None:
        if any(state.is_special for state, _ in run):
            for (state, message), (physical_offset, size, queue_offset) in zip(run, places, strict=True):
                text = message.properties.decode("utf-8", "replace")
                self._dispatcher.apply(state, queue_offset, physical_offset, size, message.sys_flag, now, text)
                state.count(1, size)
        else:
            plain: list[PlainMessage] = [
                (
                    state, message.body, message.properties, message.properties.decode("utf-8", "replace"),
                    message.born_timestamp, message.flag, message.sys_flag, message.reconsume_times,
                )
                for state, message in run
            ]  # fmt: skip
            applied = run_of(plain)
            applied.places = places
            self._dispatcher.apply_run(applied, now)
        offset, size, _ = places[-1]
        self._dispatched_offset = offset + size

    @property
    def surely_fits(self) -> int:
        """A body and properties that together have no more bytes than this break no limit."""
        return self.limits.surely_fits

    def append_batch(self, message: NewMessage, units: Sequence[BatchUnit]) -> AppendResult:
        """Store several messages of one queue, all or none; `message` carries what they share, its body is not used."""
        if self._refused:
            return self._refusal()
        refused = self.limits.check_batch(message, units)
        if refused is not None:
            return refused
        state = self._states.get((message.topic, message.queue_id))
        if state is None:
            made = self._make_state(message)
            if isinstance(made, AppendResult):
                return made
            state = made
        now = self._not_before(self._now())
        first_queue_offset = state.next_offset
        places = self._append_as_run(state, message, units, now)
        if places is not None:
            size = sum(place[1] for place in places)
            return AppendResult(
                PUT_OK, places[0][0], size, first_queue_offset, now, tuple(place[0] for place in places)
            )
        try:
            records = self.commit_log.append_batch(message, units, state.topic_field, first_queue_offset, now)
        except StoreError as error:
            return self._failed_append(error)
        state.next_offset += len(records)
        if self._pool is None:
            if self._dispatched_offset == records[0][0]:
                try:
                    for number, (offset, size, properties) in enumerate(records):
                        text = properties.decode("utf-8", "replace")
                        self._dispatcher.apply(
                            state, first_queue_offset + number, offset, size, message.sys_flag, now, text
                        )
                    self._dispatched_offset = offset + size
                except (OSError, StoreError) as error:
                    self._dispatch_failed(error)
            else:
                self.dispatch_pending()
        return AppendResult(
            PUT_OK,
            records[0][0],
            sum(record[1] for record in records),
            first_queue_offset,
            now,
            tuple(record[0] for record in records),
        )

    def _append_as_run(
        self, state: QueueState, message: NewMessage, units: Sequence[BatchUnit], now: int
    ) -> list[Place] | None:
        """A batch by the fast way of plain messages, which is whole or not at all, too; None when it is not plain."""
        if state.is_special or message.prepared_transaction_offset:
            return None
        messages: list[PlainMessage] = []
        for unit in units:
            properties = join_properties(unit.properties, message.properties)
            text = properties.decode("utf-8", "replace")
            messages.append(
                (
                    state, unit.body, properties, text, message.born_timestamp, unit.flag, message.sys_flag,
                    message.reconsume_times,
                )
            )  # fmt: skip
        run = run_of(messages)
        if not self.append_run(run, message.born_host, message.store_host, now):
            return None
        places = run.places
        state.uncount(len(places), sum(place[1] for place in places))
        return places

    def append_data(self, start: int, data: bytes | memoryview) -> None:
        """Take log bytes from a master; `dispatch_pending` then makes whole records readable by queue."""
        self.check_takes_data()
        empty = not len(self._segments)
        self.commit_log.append_data(start, data)
        if empty:
            self._dispatched_offset = start

    def check_takes_data(self) -> None:
        """Raise StoreClosed when no more of a master's log can be taken, or what was taken cannot be read."""
        if not self._refusals.keys() <= _MASTERS_BUSINESS:
            raise StoreClosed(
                "; ".join(text for reason, text in self._refusals.items() if reason not in _MASTERS_BUSINESS)
            )

    def dispatch_pending(self, watched: Mapping[tuple[str, int], object] | None = None) -> Growth:
        """Apply what lies in the log beyond the last applied record; return what was new, for those who wait for it.

        `watched` has the topics and ids of their queues; None is all queues.
        """
        growth = Growth(watched)
        while self._dispatched_offset < self.commit_log.max_offset:
            bulk = BulkReplay(self.queues, self.index, self._dispatcher, growth)
            walk = self.commit_log.walk(max(self._dispatched_offset, self.commit_log.min_offset), bulk=bulk)
            try:
                for record in walk:
                    self._dispatched_offset = record[0]  # until this one is applied, too
                    state = self._dispatcher.replay(record)
                    if state is not None:
                        growth.add(state, record)
            except (OSError, StoreError) as error:
                self._dispatch_failed(error)
                return growth
            self._dispatched_offset = walk.end
            if walk.records:
                self.commit_log.last_store_timestamp = walk.last_timestamp
            if self.config.broker_role is BrokerRole.SLAVE:
                if walk.end < self.commit_log.max_offset and not walk.is_cut_short:
                    self._refuse_to_follow(walk)
                    return growth
                break  # the rest of this record is still under way
            if walk.damage is None:
                break
            log.error("cannot dispatch: %s; the rest of this file is skipped", walk.damage)
            self._dispatched_offset = min(
                self.commit_log.next_file_offset(self._dispatched_offset), self.commit_log.max_offset
            )
        self._allow("dispatch")
        return growth

    def _refuse_to_follow(self, walk: Walk) -> None:
        """What the master sent cannot be read: its log is not the continuation of this one."""
        found = walk.damage or f"no record at {walk.end}: zeros"
        text = f"the log from the master does not fit this one: {found}; give this slave an empty directory"
        if self._refusals.get("master's log") != text:
            log.error("cannot follow: %s", text)
        self._refuse("master's log", text)

    @property
    def dispatch_behind_bytes(self) -> int:
        # A slave may know that the rest of a file is blank before it has got it.
        return max(0, self.commit_log.max_offset - self._dispatched_offset)

    def _make_state(self, message: NewMessage) -> QueueState | AppendResult:
        reason = check_storable(message.topic, message.queue_id)
        if reason is None and len(message.topic.encode()) > MAX_TOPIC_LENGTH:
            reason = f"message topic length too long {len(message.topic)}"
        if reason is not None:
            return AppendResult(PutMessageStatus.MESSAGE_ILLEGAL, reason=reason)
        try:
            return self.queues.get_or_make(message.topic, message.queue_id)
        except StoreError as error:
            return AppendResult(PutMessageStatus.UNKNOWN_ERROR, reason=str(error))

    def _not_before(self, now: int) -> int:
        """Store times do not run backwards: recovery and the search by time rely on it."""
        last = self.commit_log.last_store_timestamp
        return last if last - _CLOCK_STEP_MILLIS < now < last else now

    def _refusal(self) -> AppendResult:
        return AppendResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, reason="; ".join(self._refusals.values()))

    def _failed_append(self, error: StoreError) -> AppendResult:
        log.error("append failed: %s", error)
        status = (
            PutMessageStatus.SERVICE_NOT_AVAILABLE
            if isinstance(error, DiskFull)
            else PutMessageStatus.CREATE_MAPEDFILE_FAILED
        )
        return AppendResult(status, reason=str(error))

    def _dispatch_failed(self, error: Exception) -> None:
        """The log has the record, its queue does not: refuse more until `dispatch_pending` got through."""
        log.error("dispatch failed offset=%d: %s", self._dispatched_offset, error)
        self._refuse("dispatch", f"a consume queue or the index cannot be written: {error}")

    # Flushing.

    @property
    def flushed_offset(self) -> int:
        return self.commit_log.flushed_offset

    def commit(self, least_pages: int = 0) -> bool:
        """Carry the transient pool to the files; True when something became readable (then `dispatch_pending`)."""
        if self._pool is None or self._segments.pages_to_commit < least_pages:
            return False
        before = self.commit_log.max_offset
        self._segments.commit()
        return self.commit_log.max_offset > before

    def flush_commit_log(self, least_pages: int = 0) -> int:
        """Sync the log if at least `least_pages` pages are dirty; return the offset up to which it is safe.

        Raises FlushFailed when the disk refuses, now and for ever after; the store then takes no more messages.
        """
        if least_pages and self._segments.dirty_pages < least_pages:
            return self._segments.flushed_offset
        timestamp = self.commit_log.last_store_timestamp
        try:
            flushed = self._segments.flush()
        except FlushFailed as error:
            self._refuse("flush", str(error))
            raise
        if self._pool is None or self.commit_log.max_offset == self.commit_log.wrote_offset:
            self.checkpoint.physic_msg_timestamp = max(self.checkpoint.physic_msg_timestamp, timestamp)
        return flushed

    def write_pending(self) -> None:
        """Write queue entries that wait in memory. For the store's own thread, before `flush_queues`.

        Raises DiskFull, say, when they cannot be written; nothing is lost, and no more is taken until a later call
        gets through.
        """
        for _ in self.write_pending_in_slices():
            pass

    def write_pending_in_slices(self, slice_size: int = 64, least_pages: int = 0) -> Iterator[None]:
        """The same with pauses: thousands of queues take longer than a sender may wait.

        With `least_pages`, and many queues, those that have less to write are left for later: a write takes as long
        for one entry as for hundreds. A thorough flush needs all of them.
        """
        if "queues" in self._refusals:
            least_pages = 0  # only when all were written is it known that they can be
        timestamp, offset = self._dispatcher.last_store_timestamp, self._dispatched_offset
        try:
            yield from self.queues.write_pending(slice_size, least_pages)
        except OSError as error:
            failure = storage_error("cannot write consume queues", error)
            self._refuse("queues", str(failure))
            raise failure from error
        if not least_pages:
            self._allow("queues")
            self._written = _Progress(timestamp, offset)

    def flush_queues(self, least_pages: int = 0, *, thorough: bool = False) -> None:
        """Sync queues, and full index files; a thorough flush takes every queue and writes the checkpoint.

        Raises FlushFailed as `flush_commit_log` does.
        """
        written = self._written  # what is dispatched meanwhile waits in memory and is not part of this flush
        try:
            self.queues.flush(0 if thorough else least_pages)
            if self.index is not None:
                self.index.flush()
        except OSError as error:
            # As with the log: a later sync may say yes to pages that were dropped, so the checkpoint must stay.
            failure = FlushFailed(f"cannot sync consume queues or index: {error.strerror or error}")
            self._refuse("flush", str(failure))
            raise failure from error
        if "flush" in self._refusals:
            raise FlushFailed(self._refusals["flush"])
        if thorough:
            self._queues_safe_up_to = written.offset
            checkpoint = self.checkpoint
            checkpoint.logics_msg_timestamp = max(checkpoint.logics_msg_timestamp, written.timestamp)
            if self.index is not None:
                checkpoint.index_msg_timestamp = self.index.safe_timestamp
            try:
                checkpoint.write()
            except OSError as error:  # it may say less than is true: the next one puts that right
                raise storage_error("cannot write the checkpoint", error) from error

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
        self._segments.release_idle()
        self.queues.release()

    # Removing.

    def take_oldest_files(self, count: int) -> list[Path]:
        """Take the first files out of the log, never the last one; `remove_files` then removes them for good."""
        taken = []
        for _ in range(count):
            if self.min_offset + self.config.mapped_file_size_commit_log > self._queues_safe_up_to:
                # Queue entries of these messages may only be in memory. If they were lost together with the log that
                # they can be built from, a restart would give their queue offsets to other messages.
                self.write_pending()
                self.flush_queues(thorough=True)
            path = self._segments.take_oldest()
            if path is None:
                break
            taken.append(path)
        return taken

    def remove_files(self, paths: Iterable[Path]) -> None:
        """Unlink what was taken out. May run in a worker thread. What cannot be removed is back at the next start."""
        for path in paths:
            try:
                self._files.remove(path)
            except OSError as error:
                log.error("cannot remove %s: %s", path, error.strerror or error)

    def delete_dependents(self) -> int:
        """Remove queue and index files that only point at deleted messages, and correct the queues' beginnings."""
        removed = self.queues.delete_expired(self.min_offset)
        if self.index is not None:
            removed += self.index.delete_expired(self.min_offset)
        return removed

    def remove_expired_queues(self) -> list[TopicQueue]:
        """Remove queues all of whose messages are gone (request 306)."""
        minimum = self.min_offset
        return self._remove(lambda topic, _, end: topic != SCHEDULE_TOPIC and 0 < end < minimum)

    def remove_unused_topics(self, topics: Iterable[str]) -> list[TopicQueue]:
        """Remove queues of topics that are not among `topics` (request 316; after deleting a topic, 215)."""
        kept = {*topics, SCHEDULE_TOPIC, OP_HALF_TOPIC}
        return self._remove(lambda topic, *_: topic not in kept and not topic.startswith(_LMQ_PREFIX))

    def remove_topic(self, topic: str) -> list[TopicQueue]:
        return self._remove(lambda name, *_: name == topic)

    def _remove(self, is_unwanted: Callable[[str, int, int], bool]) -> list[TopicQueue]:
        self._check_open()
        return [TopicQueue(state.topic, state.queue_id) for state in self.queues.remove_where(is_unwanted)]

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
