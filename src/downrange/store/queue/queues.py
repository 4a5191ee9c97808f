"""Every consume queue of a store: find, make, recover, expire and remove them."""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Callable, Iterator
from sys import intern
from typing import Final

from downrange.model.message import PhysicalOffset, QueueOffset, TopicQueue
from downrange.model.topics import SCHEDULE_TOPIC
from downrange.store.config import StoreConfig
from downrange.store.errors import StoreError
from downrange.store.files import Files
from downrange.store.free_memory import give_back_memory
from downrange.store.log.commit_log import topic_field
from downrange.store.queue.consume_queue import ENTRY, PAGE_SIZE, ConsumeQueue
from downrange.store.queue.consume_queue_ext import ConsumeQueueExt
from downrange.store.queue.queue_states import QueueStates, Resting
from downrange.store.queue.queue_tails import BYTES, MESSAGES, ROW, QueueTails
from downrange.store.queue.topic_table import TopicTable

# 5.x only: what we would have to read to know the queue offsets of such topics.
_BATCH_QUEUES: Final = "batchconsumequeue"

# With more queues to sync than this, syncing the whole file system takes less time: 40,000 one by one took 19 s.
_MANY: Final = 500
# Up to so many none sleeps: they take little memory, and waking one takes a look into its file.
_ALWAYS_AWAKE: Final = 500
_NO_ROW: Final = 1 << 60
# Writing to a queue, and making its first file, in terms of looking whether there is something to write.
_WRITING: Final = 32
_MAKING: Final = 320


class QueueState:
    """One queue as the store works with it: its files, the next queue offset, and the topic as records hold it."""

    __slots__ = ("ext", "is_schedule", "is_special", "queue", "queue_id", "row", "tails", "topic", "topic_field")

    def __init__(
        self, topic: str, queue_id: int, topic_field: bytes, queue: ConsumeQueue, ext: ConsumeQueueExt | None
    ) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.topic_field = topic_field
        self.queue = queue
        self.row = queue.row
        self.tails = queue.tails
        self.ext = ext
        self.is_schedule = topic == SCHEDULE_TOPIC
        # Do entries of this queue hold something else than a tag hash?
        self.is_special = self.is_schedule or ext is not None
        self.next_offset = queue.max_offset

    @property
    def next_offset(self) -> QueueOffset:
        """The queue offset the next message gets."""
        return self.tails.rows[self.row]  # type: ignore[return-value]

    @next_offset.setter
    def next_offset(self, queue_offset: QueueOffset) -> None:
        self.tails.rows[self.row] = queue_offset

    def leave(self) -> None:
        """This queue is no longer one of the store; see `ConsumeQueue.leave`."""
        self.queue.leave()
        self.row, self.tails = self.queue.row, self.queue.tails

    def forget_row(self) -> None:
        """The queue sleeps from now on, and this object must not be used: any use of it raises IndexError."""
        self.tails.remove_row(self.row)
        self.row = self.queue.row = _NO_ROW

    def __repr__(self) -> str:
        return f"<QueueState {self.topic}/{self.queue_id} next={self.next_offset}>"


TopicCount = tuple[str, int, int]


def check_storable(topic: str, queue_id: int) -> str | None:
    """Why this pair cannot name a queue directory; None when it can."""
    try:
        length = len(topic.encode())
    except UnicodeEncodeError:
        return f"topic {topic!a} is not valid text"
    if not topic or topic in (".", "..") or "/" in topic or "\0" in topic:
        return f"topic {topic!r} cannot be a directory name"
    if length > 255:
        return f"topic {topic!r} is longer than 255 bytes"
    if not 0 <= queue_id <= 0x7FFFFFFF:
        return f"queue id {queue_id} is not from 0 to {0x7FFFFFFF}"
    return None


class ConsumeQueues:
    """All queues, by topic and id. A queue comes into being with its first message, never by being asked for.

    Where there are many, those sleep (`QueueStates`) that nobody has used since the start, or since the `release`
    before the last one. All that sleep have one file, which is written and synced: nothing about them has to be looked
    after.
    """

    def __init__(self, config: StoreConfig, files: Files, *, writable: bool) -> None:
        self._root = config.store_path_root_dir
        self._file_size = config.consume_queue_file_size
        self._ext_file_size = config.mapped_file_size_consume_queue_ext if config.enable_consume_queue_ext else None
        self._files = files
        self._writable = writable
        self.tails = QueueTails()
        self._topic_fields: dict[str, bytes] = {}  # one for all queues of a topic
        self._counts_of_removed: list[TopicCount] = []
        self._commit_log_min = PhysicalOffset(0)
        self.states = QueueStates(self._wake)
        self.by_row: list[QueueState | None] = []
        """The queues that are awake, by the number of their row in `tails`; None for rows that no queue has."""
        self.on_change: Callable[[str], None] = lambda topic: None
        """Called with the topic of a queue that was made or removed."""
        self._without_files: set[QueueState] = set()  # as far as is known
        # Queues by the bytes of their topic in records, for replaying; None for names that no queue can have.
        self._by_raw_topic: dict[tuple[bytes, int], QueueState | None] = {}
        self.rows_by_topic = TopicTable()
        """The rows of queues that the compiled step of a replay has looked up in `by_raw_topic`."""

    def __len__(self) -> int:
        return len(self.states) + sum(1 for _ in self.states.sleeping())

    def __iter__(self) -> Iterator[QueueState]:
        """Iterate over the queues that are awake."""
        return iter(tuple(self.states.values()))

    def names(self) -> Iterator[tuple[str, int]]:
        """Topic and id of every queue, awake or not."""
        yield from tuple(self.states)
        for topic, queue_id, _ in self.states.sleeping():
            yield topic, queue_id

    def load(self, *, clean: bool) -> None:
        """Find the queues; directories that are not named by a number are passed over.

        Of many that were left in good order, most are recovered here and sleep from now on, one after the other: so a
        start never has all of them in memory. That changes no file.
        """
        with contextlib.suppress(FileNotFoundError), os.scandir(self._root / _BATCH_QUEUES) as found:
            if any(found):
                raise StoreError(
                    f"{self._root / _BATCH_QUEUES} has queues of the 5.x type BatchCQ, which cannot be read here"
                )
        directory = self._root / "consumequeue"
        with contextlib.suppress(FileNotFoundError), os.scandir(directory) as topics:
            for topic in topics:
                if topic.is_dir():
                    self._load_topic(intern(topic.name), topic.path, clean=clean)

    def _load_topic(self, topic: str, path: str, *, clean: bool) -> None:
        with os.scandir(path) as queues:
            for queue in queues:
                if queue.name.isascii() and queue.name.isdecimal() and queue.is_dir():
                    state = self._make(topic, int(queue.name))
                    if clean and len(self.states) > _ALWAYS_AWAKE and self._is_first_file_only(state):
                        state.queue.recover(clean=True)
                        if state.queue.may_sleep:
                            self._put_to_sleep([state])

    def _is_first_file_only(self, state: QueueState) -> bool:
        """Whether a queue of which only the file names are known has one file, the first that it ever had."""
        queue = state.queue
        return self._writable and not state.is_special and not queue.min_offset and queue.has_one_file

    def recover(self, *, clean: bool) -> None:
        """Find the end of each queue. After a crash all of them get ready for more: much will be replayed."""
        for state in self:
            state.queue.recover(clean=clean)
            state.next_offset = state.queue.max_offset
            if state.ext is not None:
                state.ext.recover()
                self._cut_ext(state)
            if not clean and self._writable:
                state.queue.get_ready()
                self._by_raw_topic[state.topic_field[1:], state.queue_id] = state

    def get(self, topic: str, queue_id: int) -> QueueState | None:
        return self.states.get((topic, queue_id))

    def get_or_make(self, topic: str, queue_id: int) -> QueueState:
        return self.states.get((topic, queue_id)) or self._make(topic, queue_id)

    def of_record(self, topic: bytes, queue_id: int) -> QueueState | None:
        """The queue of a record of the log; None when its topic or queue id cannot name one."""
        key = topic, queue_id
        try:
            return self._by_raw_topic[key]
        except KeyError:
            name = topic.decode("utf-8", "replace")
            state = self.get_or_make(name, queue_id) if check_storable(name, queue_id) is None else None
            self._by_raw_topic[key] = state
            return state

    @property
    def by_raw_topic(self) -> dict[tuple[bytes, int], QueueState | None]:
        """The queues that `of_record` has looked up so far, for the compiled step of a replay."""
        return self._by_raw_topic

    def _forget_raw_topics(self) -> None:
        self._by_raw_topic.clear()
        self.rows_by_topic.clear()

    def _make(self, topic: str, queue_id: int, resting: Resting | None = None) -> QueueState:
        topic = intern(topic)  # one object for all who have it as a key
        queue = ConsumeQueue(
            f"{self._root}/consumequeue/{topic}/{queue_id}", TopicQueue(topic, queue_id), self._file_size, self._files,
            writable=self._writable, tails=self.tails,
        )  # fmt: skip
        if resting is None:
            queue.load()
        else:
            queue.resume(resting)
        ext = None
        if self._ext_file_size is not None:
            ext_directory = self._root / "consumequeue_ext" / topic / str(queue_id)
            ext = ConsumeQueueExt(ext_directory, self._ext_file_size, self._files, writable=self._writable)
            ext.load()
        field = self._topic_fields.get(topic)
        if field is None:
            field = self._topic_fields[topic] = topic_field(topic)
        state = QueueState(topic, queue_id, field, queue, ext)
        self.states[topic, queue_id] = state
        number = state.row // ROW
        self.by_row += [None] * (number + 1 - len(self.by_row))
        self.by_row[number] = state
        if not queue.has_files:
            self._without_files.add(state)
        self.on_change(topic)
        return state

    @property
    def max_physical_offset(self) -> PhysicalOffset:
        """End of the last record that has an entry; 0 without any."""
        newest = self.newest()
        return PhysicalOffset(0) if newest is None else newest.queue.max_physical_offset

    def newest(self) -> QueueState | None:
        """The queue that has the last record of all."""
        awake = max(self.states.values(), key=lambda state: state.queue.max_physical_offset, default=None)
        end = 0 if awake is None else awake.queue.max_physical_offset
        asleep = max(self.states.sleeping(), key=lambda queue: queue[2], default=("", 0, 0))
        return self.get(*asleep[:2]) if asleep[2] > end else awake

    def truncate(self, physical_offset: PhysicalOffset, *, keep_numbers: bool = False) -> None:
        """Forget every entry whose record begins at or behind this offset.

        With `keep_numbers` new messages are numbered behind those records all the same.
        """
        self._wake_where(lambda topic, queue_id, physical_end: physical_end > physical_offset)
        for state in self:
            if state.queue.max_physical_offset > physical_offset:
                number = state.next_offset
                state.queue.truncate(physical_offset)
                state.next_offset = number if keep_numbers else state.queue.max_offset
                self._cut_ext(state)

    def count_again(self) -> None:
        """Number new messages behind the entries that there are."""
        for state in self:
            state.next_offset = state.queue.max_offset

    def _cut_ext(self, state: QueueState) -> None:
        if state.ext is not None and state.queue.max_offset > state.queue.min_offset:
            last = state.queue.read(QueueOffset(state.queue.max_offset - 1), 1)
            state.ext.truncate_by_max_address(ENTRY.unpack(last)[2])

    def correct_min_offsets(self, commit_log_min: PhysicalOffset) -> None:
        self._commit_log_min = commit_log_min
        for state in self:
            state.queue.correct_min_offset(commit_log_min)

    def delete_expired(self, commit_log_min: PhysicalOffset) -> int:
        """Remove leading files that only point below the commit log; how many."""
        self._commit_log_min = commit_log_min  # those that sleep have one file and correct themselves when they wake
        removed = 0
        for state in self:
            removed += state.queue.delete_expired(commit_log_min)
            if state.ext is not None and (first := state.queue.read(state.queue.min_offset, 1)):
                removed += state.ext.truncate_by_min_address(ENTRY.unpack(first)[2])
        return removed

    def remove_where(self, is_unwanted: Callable[[str, int, int], bool]) -> list[QueueState]:
        """Destroy queues and the topic directories that thereby become empty.

        `is_unwanted` is asked with topic, id, and where the last record ends.
        """
        self._wake_where(is_unwanted)
        removed = [state for state in self if is_unwanted(state.topic, state.queue_id, state.queue.max_physical_offset)]
        self._forget_raw_topics()
        self._topic_fields.clear()
        for state in removed:
            self.destroy(state)
            self._part_with(state)
            state.leave()
            del self.states[state.topic, state.queue_id]
            for kind in ("consumequeue", "consumequeue_ext"):
                with contextlib.suppress(OSError):  # other queues of the topic are still there
                    (self._root / kind / state.topic).rmdir()
        return removed

    def _part_with(self, state: QueueState) -> None:
        """Take a queue out of all tables, because it falls asleep or is destroyed."""
        self._counts_of_removed += self._count_of(state)
        self._without_files.discard(state)
        self.by_row[state.row // ROW] = None
        self.on_change(state.topic)

    def take_counts(self) -> list[TopicCount]:
        """The messages that came in since the last call: for each queue its topic, their number and their bytes."""
        counts, self._counts_of_removed = self._counts_of_removed, []
        rows = self.tails.rows
        numbers = zip(self.by_row, rows[MESSAGES::ROW], rows[BYTES::ROW], strict=True)
        counts += [(state.topic, messages, size) for state, messages, size in numbers if messages and state is not None]
        rows[MESSAGES::ROW] = rows[BYTES::ROW] = array("q", bytes(8 * self.tails.queues))
        return counts

    def _count_of(self, state: QueueState) -> list[TopicCount]:
        rows, at = self.tails.rows, state.row + MESSAGES
        messages, size = rows[at], rows[at + 1]
        rows[at] = rows[at + 1] = 0
        return [(state.topic, messages, size)] if messages else []

    def destroy(self, state: QueueState) -> None:
        """Empty one queue; it may be filled again."""
        state.queue.destroy()
        if state.ext is not None:
            state.ext.destroy()
        state.next_offset = QueueOffset(0)
        self._without_files.add(state)

    def write_pending(self, slice_size: int, least_pages: int = 0) -> Iterator[None]:
        """Write what waits in memory; yields after every so many queues, so that a caller can do other work between.

        Where there are many queues, those that have files and less than `least_pages` to write are passed over.
        """
        least_bytes = least_pages * PAGE_SIZE if len(self.states) > _MANY else 0
        # No queue keeps more in memory than there is room for.
        states = tuple(self._without_files) if least_bytes > self.tails.room else self
        work = 0
        for state in states:
            work += 1
            queue = state.queue
            pending = queue.pending_bytes
            if pending and (pending >= least_bytes or not queue.has_files):
                work += _WRITING if queue.has_files else _MAKING
                queue.write_pending()
            if queue.has_files:
                self._without_files.discard(state)
            if work >= slice_size * _WRITING:
                work = 0
                yield

    def need_flush(self, least_pages: int) -> bool:
        """Whether `flush` would sync anything."""
        if least_pages and len(self.states) > _MANY:
            return False
        return any(state.queue.needs_flush(least_pages) for state in self)

    def flush(self, least_pages: int) -> None:
        """Sync what was written. May run in a worker thread, after `write_pending`.

        Where there are many queues, only without `least_pages`: those that have written as much are too many, too.
        """
        if least_pages and len(self.states) > _MANY:
            return
        dirty = [state for state in self if state.queue.needs_flush(least_pages)]
        if len(dirty) > _MANY:
            progress = [state.queue.progress for state in dirty]
            self._files.sync_file_system(self._root)
            for state, reached in zip(dirty, progress, strict=True):
                state.queue.flushed_up_to(reached)
        else:
            dirty = [state for state in dirty if state.queue.flush(least_pages)]
        for state in dirty:
            if state.ext is not None:
                state.ext.flush()

    # -- rest ----------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Give back what queues hold open; of many, let those sleep that held nothing open since the last call."""
        for _ in self.release_in_slices(max(1, len(self.states))):
            pass

    def release_in_slices(self, slice_size: int) -> Iterator[None]:
        """`release` that yields after every so many queues, so that a caller can do other work between."""
        awake = tuple(self.states.values())
        is_crowded = len(awake) > _ALWAYS_AWAKE
        slept = 0
        for at in range(0, len(awake), slice_size):
            states = awake[at : at + slice_size]
            idle = [state for state in states if self._may_sleep(state)]
            for state in states:
                state.queue.release()
                if state.ext is not None:
                    state.ext.release()
            if idle and is_crowded:
                slept += len(idle)
                self._put_to_sleep(idle)
            yield
        if slept:
            self.states.shrink()
        self.tails.shrink()
        del self.by_row[self.tails.queues :]
        if slept:
            give_back_memory()

    def _may_sleep(self, state: QueueState) -> bool:
        """Whether all that is known of a queue is in its file; not so while numbered messages have no entry yet."""
        is_usual = not state.is_special and state.next_offset == state.queue.max_offset
        return self._writable and is_usual and state.queue.may_sleep

    def _put_to_sleep(self, idle: list[QueueState]) -> None:
        """Empties the list: first all objects go, then what stays is made, so that it does not lie between them."""
        keys = [(state.topic, state.queue_id) for state in idle]
        numbers = [state.queue.resting for state in idle]
        self._forget_raw_topics()
        while idle:
            state = idle.pop()
            del self.states[state.topic, state.queue_id]
            self._topic_fields.pop(state.topic, None)
            self._part_with(state)
            state.forget_row()
        del state
        for key, resting in zip(keys, numbers, strict=True):
            self.states.add_sleeping(key, resting)

    def _wake(self, topic: str, queue_id: int, resting: Resting) -> QueueState:
        state = self._make(topic, queue_id, resting)
        try:
            state.queue.correct_min_offset(self._commit_log_min)
        except BaseException:
            del self.states[topic, queue_id]
            self._part_with(state)
            state.forget_row()
            raise
        return state

    def _wake_where(self, is_wanted: Callable[[str, int, int], bool]) -> None:
        for topic, queue_id, physical_end in self.states.sleeping():
            if is_wanted(topic, queue_id, physical_end):
                self.get(topic, queue_id)
