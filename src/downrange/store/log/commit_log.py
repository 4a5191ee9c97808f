"""Every message of this broker in arrival order. Layout of files and records: docs/formats/commit-log.md."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

from downrange.model.message import PhysicalOffset
from downrange.model.record import (
    MAGIC_BLANK,
    SIZE_AND_MAGIC,
    STORE_TIMESTAMP_END,
    record_size,
    store_timestamp_of,
)
from downrange.store.config import BLANK_SIZE
from downrange.store.errors import StoreError
from downrange.store.log.record_writer import write_records
from downrange.store.log.segment import Segment
from downrange.store.log.segments import Segments, storage_error
from downrange.store.log.walk import Walk
from downrange.store.new_messages import NewMessages

if TYPE_CHECKING:
    from downrange.store.bulk_replay import BulkReplay


def topic_field(topic: str) -> bytes:
    """The topic as it stands in a record: its length in one byte, then the text."""
    raw = topic.encode()
    return len(raw).to_bytes(1, "big") + raw


class CommitLog:
    """The one log that everything else is derived from.

    Holds always, and `check` tests it: `min_offset <= flushed_offset <= max_offset`, and no record spans two files. The
    store's thread appends and reads; what its `segments` say of threads holds.
    """

    def __init__(self, segments: Segments) -> None:
        self.segments = segments
        self._current: Segment | None = None
        # Store time of the newest record: what the checkpoint may claim once the log is flushed.
        self.last_store_timestamp = 0
        # Called when appends used up some of what was ready for them: time to prepare more.
        self.on_room_used: Callable[[], None] = lambda: None

    def check(self) -> None:
        """Raise AssertionError unless everything holds that holds always; the records of the last file are read."""
        self.segments.check()
        last = self.segments.last
        assert self._current in (None, last), "appends go to the last file"
        if last is not None:
            walk = self.walk(last.start)
            for _ in walk:
                pass
            assert walk.damage is None or walk.is_cut_short, walk.damage

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

    def append(self, messages: NewMessages, number: int, rows: array[int], store_timestamp: int) -> int:
        """Write records from message `number` on, as many whole groups as the current file has room for, at least one.

        Return the number of the first message that was not written. `rows` are those of `QueueTails`.
        """
        segment = self._current or self._room_for(messages.group_size(number))
        stop, segment.wrote = write_records(
            messages, number, segment.memory, segment.wrote, segment.limit, segment.start, store_timestamp, rows
        )
        if stop == number:
            segment = self._room_for(messages.group_size(number))
            stop, segment.wrote = write_records(
                messages, number, segment.memory, segment.wrote, segment.limit, segment.start, store_timestamp, rows
            )
            assert stop > number, "a file with room for these messages did not take them"
        self.last_store_timestamp = store_timestamp
        return stop

    def _room_for(self, size: int) -> Segment:
        """The file that takes the next `size` bytes: the current one, or a new one after a blank record."""
        segment = self._current or self._open_last()
        if segment is not None:
            if not segment.is_full and self._make_room(segment, size):
                return segment
            start = PhysicalOffset(segment.start + segment.size)
        else:
            start = PhysicalOffset(0)
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

    def _open_last(self) -> Segment | None:
        segment = self.segments.last
        if segment is not None and not segment.is_full:
            segment.open_for_append()
            self._current = segment
        return segment

    def append_data(self, start: PhysicalOffset, data: bytes | memoryview) -> None:
        """Copy log bytes as a master sent them; `start` is their offset there and must be the end of this log.

        An empty log begins with the file that `start` lies in. Only whole files' ends may be crossed by the caller's
        chunks as they were by the master's: bytes are placed by offset.
        """
        if not len(self.segments):
            first = self.segments.roll(PhysicalOffset(start - start % self.segments.file_size))
            first.set_end(start - first.start)
            first.open_for_append()
        if start != self.wrote_offset:
            raise StoreError(f"log bytes from {start} do not continue a log that ends at {self.wrote_offset}")
        view = memoryview(data)
        while view:
            segment = self.segments.last
            assert segment is not None
            if segment.is_full:
                segment = self.segments.roll(PhysicalOffset(segment.start + segment.size))
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

    def cut(self, offset: PhysicalOffset) -> None:
        """Make `offset`, which lies between two records, the end of the log; the files are the caller's business."""
        self._current = None
        self.segments.cut(offset)

    def whole_end(self, start: PhysicalOffset) -> PhysicalOffset:
        """The end of the last whole record of the log, read from `start` on, where a record begins."""
        walk = self.walk(max(start, self.min_offset))
        for _ in walk:
            pass
        return min(walk.end, self.max_offset)

    def walk(self, start: PhysicalOffset, *, check_crc: bool = False, bulk: BulkReplay | None = None) -> Walk:
        return Walk(self.segments, start, check_crc=check_crc, bulk=bulk)

    def slice(self, physical_offset: PhysicalOffset, size: int) -> memoryview | None:
        """These bytes as they lie on disk, or None when the file is gone or they are not readable yet."""
        segment = self.segments.find(physical_offset)
        if segment is None:
            return None
        at = physical_offset - segment.start
        if at + size > segment.readable or size <= 0:
            return None
        return segment.view[at : at + size]

    def readable_from(self, physical_offset: PhysicalOffset, most: int) -> memoryview | None:
        """Bytes from here on, at most so many and none of the next file; None when there are none."""
        segment = self.segments.find(physical_offset)
        if segment is None:
            return None
        at = physical_offset - segment.start
        end = min(at + most, segment.readable)
        return segment.view[at:end] if at < end else None

    def record_at(self, physical_offset: PhysicalOffset) -> memoryview | None:
        """The record that begins at this offset, or None when none does."""
        segment = self.segments.find(physical_offset)
        if segment is None:
            return None
        at = physical_offset - segment.start
        left = segment.readable - at
        size = record_size(segment.view, at) if left >= BLANK_SIZE else None
        return segment.view[at : at + size] if size is not None and size <= left else None

    def store_timestamp_at(self, physical_offset: PhysicalOffset) -> int:
        """Store time of the record that begins here; -1 when it cannot be read."""
        head = self.slice(physical_offset, STORE_TIMESTAMP_END)
        return -1 if head is None else store_timestamp_of(head)

    def next_file_offset(self, physical_offset: PhysicalOffset) -> PhysicalOffset:
        size = self.segments.file_size
        return PhysicalOffset(physical_offset - physical_offset % size + size)
