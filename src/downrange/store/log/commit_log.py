"""Every message of this broker in arrival order. Layout of files and records: docs/formats/commit-log.md."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from zlib import crc32

from downrange.compiled import steps
from downrange.model.message import PhysicalOffset
from downrange.model.record import MAGIC_BLANK, MAGIC_V1, STORE_TIMESTAMP_END, record_size, store_timestamp_of
from downrange.store.config import BLANK_SIZE
from downrange.store.errors import StoreError
from downrange.store.log.segment import Segment
from downrange.store.log.segments import Segments, storage_error
from downrange.store.log.walk import Bulk, Walk
from downrange.store.new_message import NewMessage
from downrange.store.record_head import CRC_MASK, HEAD_V4, HEADS, SIZE_AND_MAGIC

if TYPE_CHECKING:
    from downrange.store.queue.queue_tails import QueueTails
    from downrange.store.queue.queues import QueueState
    from downrange.store.run import Place, Run


def topic_field(topic: str) -> bytes:
    """The topic as it stands in a record: its length in one byte, then the text."""
    raw = topic.encode()
    return len(raw).to_bytes(1, "big") + raw


class CommitLog:
    """The one log that everything else is derived from.

    Holds always: `min_offset <= flushed_offset <= max_offset`, and no record spans two files. The store's thread
    appends and reads; what its `segments` say of threads holds.
    """

    def __init__(self, segments: Segments) -> None:
        self.segments = segments
        self._current: Segment | None = None
        # Store time of the newest record: what the checkpoint may claim once the log is flushed.
        self.last_store_timestamp = 0
        # Called when appends used up some of what was ready for them: time to prepare more.
        self.on_room_used: Callable[[], None] = lambda: None

    @property
    def min_offset(self) -> PhysicalOffset:
        return self.segments.min_offset

    @property
    def max_offset(self) -> PhysicalOffset:
        return self.segments.max_offset

    @property
    def wrote_offset(self) -> PhysicalOffset:
        return self.segments.wrote_offset

    @property
    def flushed_offset(self) -> PhysicalOffset:
        return self.segments.flushed_offset

    def append(self, message: NewMessage, topic: bytes, queue_offset: int, store_timestamp: int) -> tuple[int, int]:
        """Write one record; return its physical offset and size. `topic` is the `topic_field`.

        The head is written last: until then the place reads as zeros, so a process that dies here leaves no half
        record, and another process that reads the files never sees one.
        """
        body = message.body
        properties = message.properties
        born_host = message.born_host
        store_host = message.store_host
        sys_flag = message.sys_flag & ~48
        body_length = len(body)
        if len(born_host) == 8 == len(store_host):
            head = HEAD_V4
            head_size = 88
        else:
            head, host_flags = HEADS[len(born_host), len(store_host)]
            head_size = head.size
            sys_flag |= host_flags
        properties_length = len(properties)
        size = head_size + body_length + len(topic) + 2 + properties_length

        segment = self._current
        if segment is None or segment.wrote + size > segment.limit:
            segment = self._room_for(size)
        memory: mmap.mmap = segment.memory  # type: ignore[assignment]  # open: it has room
        at = segment.wrote
        end = at + size
        physical_offset = segment.start + at
        memory[at + head_size : end] = b"".join((body, topic, properties_length.to_bytes(2, "big"), properties))
        head.pack_into(
            memory, at,
            size, MAGIC_V1, crc32(body) & CRC_MASK, message.queue_id, message.flag, queue_offset, physical_offset,
            sys_flag, message.born_timestamp, born_host, store_timestamp, store_host, message.reconsume_times,
            message.prepared_transaction_offset, body_length,
        )  # fmt: skip
        segment.wrote = end
        self.last_store_timestamp = store_timestamp
        return physical_offset, size

    def append_run(
        self, run: Run, tails: QueueTails, born_host: bytes | list[bytes], store_host: bytes, store_timestamp: int
    ) -> bool:
        """Write the records of many messages in one go, with the next queue offsets of their queues.

        As a batch, a run is there as a whole or not at all; False, and nothing was done, when this file lacks the room.
        With a list of hosts, one for each send, also when there is no compiled twin or that one lacks the room.
        """
        segment = self._current
        if segment is None:
            return False
        if steps is not None:
            end = steps.append_run(
                run, born_host, store_host, store_timestamp,
                segment.memory, segment.wrote, segment.limit, segment.start, tails.rows,
            )  # fmt: skip
            if end is not None:
                segment.wrote = end - segment.start
                self.last_store_timestamp = store_timestamp
                return True
        if isinstance(born_host, list):
            return False  # who gathers messages of several hosts can also store those of each host alone
        head, host_flags = HEADS[len(born_host), len(store_host)]
        pack = head.pack
        fixed = head.size + 2
        physical_offset = segment.start + segment.wrote
        rows = tails.rows
        messages = run.messages
        pieces: list[bytes] = []
        places: list[Place] = []
        for state, body, properties, _, born_timestamp, flag, sys_flag, reconsume_times in messages:
            row = state.row
            queue_offset = rows[row]
            rows[row] = queue_offset + 1
            topic = state.topic_field
            body_length = len(body)
            properties_length = len(properties)
            size = fixed + body_length + len(topic) + properties_length
            pieces += (
                pack(
                    size, MAGIC_V1, crc32(body) & CRC_MASK, state.queue_id, flag, queue_offset, physical_offset,
                    sys_flag & ~48 | host_flags, born_timestamp, born_host, store_timestamp, store_host,
                    reconsume_times, 0, body_length,
                ),
                body,
                topic,
                properties_length.to_bytes(2, "big"),
                properties,
            )  # fmt: skip
            places.append((physical_offset, size, queue_offset))
            physical_offset += size
        data = b"".join(pieces)
        if segment.wrote + len(data) > segment.limit and not self._can_make_room(segment, len(data)):
            for message in messages:
                message[0].next_offset -= 1
            return False
        self._write_whole(segment, data)
        self.last_store_timestamp = store_timestamp
        run.places = places
        return True

    def append_together(self, messages: Sequence[tuple[QueueState, NewMessage]], store_timestamp: int) -> list[Place]:
        """`append_run` for messages of all kinds, each with its queue; a run that does not fit begins a new file."""
        sizes = [
            74 + len(message.born_host) + len(message.store_host) + len(message.body) + len(state.topic_field)
            + len(message.properties)
            for state, message in messages
        ]  # fmt: skip
        total = sum(sizes)
        segment = self._current
        if segment is None or segment.wrote + total > segment.limit:
            segment = self._room_for(total)
        physical_offset = segment.start + segment.wrote
        pieces: list[bytes] = []
        places: list[Place] = []
        for (state, message), size in zip(messages, sizes, strict=True):
            body, properties, born_host, store_host = (
                message.body, message.properties, message.born_host, message.store_host
            )  # fmt: skip
            head, host_flags = HEADS[len(born_host), len(store_host)]
            queue_offset = state.next_offset
            state.next_offset = queue_offset + 1
            pieces += (
                head.pack(
                    size, MAGIC_V1, crc32(body) & CRC_MASK, message.queue_id, message.flag, queue_offset,
                    physical_offset, message.sys_flag & ~48 | host_flags, message.born_timestamp, born_host,
                    store_timestamp, store_host, message.reconsume_times, message.prepared_transaction_offset,
                    len(body),
                ),
                body,
                state.topic_field,
                len(properties).to_bytes(2, "big"),
                properties,
            )  # fmt: skip
            places.append((physical_offset, size, queue_offset))
            physical_offset += size
        self._write_whole(segment, b"".join(pieces))
        self.last_store_timestamp = store_timestamp
        return places

    @staticmethod
    def _write_whole(segment: Segment, data: bytes) -> None:
        """Write records; size and magic of the first one last: they are there as a whole or not at all."""
        at = segment.wrote
        end = at + len(data)
        memory = segment.memory
        assert memory is not None
        memory[at + BLANK_SIZE : end] = memoryview(data)[BLANK_SIZE:]
        memory[at : at + BLANK_SIZE] = data[:BLANK_SIZE]
        segment.wrote = end

    def _room_for(self, size: int) -> Segment:
        """The file that takes the next `size` bytes: the current one, or a new one after a blank record."""
        segment = self._current or self._open_last()
        if segment is not None:
            if not segment.is_full and self._make_room(segment, size):
                return segment
            start = segment.start + segment.size
        else:
            start = 0
        if size + BLANK_SIZE > self.segments.file_size:
            raise StoreError(f"a record of {size} bytes does not fit a file of {self.segments.file_size}")
        # First the new file, then the blank record: if there is no new file, the old one must stay usable.
        following = self.segments.roll(start)
        if segment is not None and not segment.is_full:
            segment.fill(SIZE_AND_MAGIC.pack(segment.size - segment.wrote, MAGIC_BLANK))
        self._current = following
        if not self._make_room(following, size):
            raise StoreError(f"a record of {size} bytes does not fit {following.path}")
        return following

    def _make_room(self, segment: Segment, size: int) -> bool:
        try:
            has_room = segment.make_room(size)
        except OSError as error:
            raise storage_error(f"no room for {size} bytes in {segment.path}", error) from error
        self.on_room_used()
        return has_room

    def _can_make_room(self, segment: Segment, size: int) -> bool:
        try:
            return not segment.is_full and self._make_room(segment, size)
        except StoreError:
            return False

    def _open_last(self) -> Segment | None:
        segment = self.segments.last
        if segment is not None and not segment.is_full:
            segment.open_for_append()
            self._current = segment
        return segment

    def append_data(self, start: int, data: bytes | memoryview) -> None:
        """Copy log bytes as a master sent them; `start` is their offset there and must be the end of this log.

        An empty log begins with the file that `start` lies in. Only whole files' ends may be crossed by the caller's
        chunks as they were by the master's: bytes are placed by offset.
        """
        if not len(self.segments):
            first = self.segments.roll(start - start % self.segments.file_size)
            first.set_end(start - first.start)
            first.open_for_append()
        if start != self.wrote_offset:
            raise StoreError(f"log bytes from {start} do not continue a log that ends at {self.wrote_offset}")
        view = memoryview(data)
        while view:
            segment = self.segments.last
            assert segment is not None
            if segment.is_full:
                segment = self.segments.roll(segment.start + segment.size)
            part = view[: segment.size - segment.wrote]
            limit = segment.limit
            try:
                segment.append_raw(part)
            except OSError as error:
                raise storage_error(f"cannot write {segment.path}", error) from error
            if segment.limit != limit:
                self.on_room_used()
            view = view[len(part) :]
            self._current = None

    def walk(self, start: PhysicalOffset, *, check_crc: bool = False, bulk: Bulk | None = None) -> Walk:
        return Walk(self.segments, start, check_crc=check_crc, bulk=bulk)

    def slice(self, physical_offset: int, size: int) -> memoryview | None:
        """These bytes as they lie on disk, or None when the file is gone or they are not readable yet."""
        segment = self.segments.find(physical_offset)
        if segment is None:
            return None
        at = physical_offset - segment.start
        if at + size > segment.readable or size <= 0:
            return None
        return segment.view[at : at + size]

    def readable_from(self, physical_offset: int, most: int) -> memoryview | None:
        """Bytes from here on, at most so many and none of the next file; None when there are none."""
        segment = self.segments.find(physical_offset)
        if segment is None:
            return None
        at = physical_offset - segment.start
        end = min(at + most, segment.readable)
        return segment.view[at:end] if at < end else None

    def record_at(self, physical_offset: PhysicalOffset) -> memoryview | None:
        """The record that begins at this offset, or None when none does."""
        head = self.slice(physical_offset, BLANK_SIZE)
        size = record_size(head) if head is not None else None
        return self.slice(physical_offset, size) if size is not None else None

    def store_timestamp_at(self, physical_offset: PhysicalOffset) -> int:
        """Store time of the record that begins here; -1 when it cannot be read."""
        head = self.slice(physical_offset, STORE_TIMESTAMP_END)
        return -1 if head is None else store_timestamp_of(head)

    def next_file_offset(self, physical_offset: PhysicalOffset) -> PhysicalOffset:
        size = self.segments.file_size
        return PhysicalOffset(physical_offset - physical_offset % size + size)
