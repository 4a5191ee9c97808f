"""Reading the log record by record, up to its end or to the first damage."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from downrange.model.message import PhysicalOffset, QueueOffset
from downrange.model.record import (
    CRC_MASK,
    FIXED_SIZE,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    SIZE_AND_MAGIC,
    CorruptRecord,
    unpack_record,
)
from downrange.store.config import BLANK_SIZE
from downrange.store.log.segment import Segment
from downrange.store.log.segments import Segments

if TYPE_CHECKING:
    from downrange.store.bulk_replay import BulkReplay


class WalkedRecord(NamedTuple):
    """The parts of a record that consume queues and key index are made of."""

    physical_offset: PhysicalOffset
    size: int
    topic: bytes
    queue_id: int
    queue_offset: QueueOffset
    sys_flag: int
    store_timestamp: int
    properties: bytes


class Walk:
    """One pass over the records from `start` on; iterate it once.

    Afterwards `end` is the offset at which it stopped, and `damage` says what is wrong there: None where the log simply
    ends (zeros, or the last readable byte). `is_cut_short` says that a record begins there whose end is not there yet.

    The iteration passes over the records that `bulk` takes. `bulk` is asked again after every record that the iteration
    gives, until it is set to None.
    """

    def __init__(
        self, segments: Segments, start: PhysicalOffset, *, check_crc: bool, bulk: BulkReplay | None = None
    ) -> None:
        self._segments = segments
        self._check_crc = check_crc
        self.bulk = bulk
        self.end = start
        self.damage: str | None = None
        self.is_cut_short = False
        self.torn_blanks: list[tuple[Segment, int]] = []
        """Files that end with a blank record of a wrong size, and where in the file it lies. The size is in another
        sector than the magic number, perhaps, and a power cut took it. Readers need the magic number only."""
        self.records = 0
        self.last_offset = PhysicalOffset(0)
        self.last_timestamp = 0
        """Physical offset and store time of the last record."""

    def __iter__(self) -> Iterator[WalkedRecord]:
        segment = self._segments.find(self.end)
        while segment is not None:
            at = self.end - segment.start
            limit = segment.readable
            if at < limit:
                yield from self._records_of(segment, at, limit)
                if self.end < segment.start + segment.size:
                    return
            elif limit < segment.size:
                return
            following = self._segments.following(segment)
            if following is not None:
                self.end = PhysicalOffset(following.start)
            segment = following

    def _records_of(self, segment: Segment, at: int, limit: int) -> Iterator[WalkedRecord]:
        """Every record of one file; moves `end` along, to the end of the file when a blank record says so."""
        mapping = segment.mapping
        start = segment.start
        make = WalkedRecord._make
        while True:
            if self.bulk is not None:
                at = self._take_in_bulk(self.bulk, mapping, at, limit, start)
                if at == limit:  # all records were taken
                    self._stop(segment, at, limit, "")
                    return
            try:
                head, body_at, topic_at, properties_at, end = unpack_record(mapping, at, limit, start)
            except CorruptRecord as error:
                self._stop(segment, at, limit, str(error))
                return
            (_, _, crc, queue_id, _, queue_offset, place, sys_flag, _, _, timestamp, _, _, _, body_length) = head
            if place != start + at:  # a part of its head is missing, which the checksum of its body does not tell
                self.damage = f"record at {start + at}: it says that it lies at {place}"
                return
            if self._check_crc and crc32(mapping[body_at : body_at + body_length]) & CRC_MASK != crc:
                self.damage = f"record at {start + at}: the body does not match its checksum"
                return
            self.records += 1
            # A NewType is called at runtime, too, which takes longer than the addition.
            self.last_offset, self.last_timestamp = start + at, timestamp  # type: ignore[assignment]
            self.end = start + end  # type: ignore[assignment]
            yield make(
                (
                    start + at,
                    head[0],
                    mapping[topic_at : properties_at - 2],
                    queue_id,
                    queue_offset,
                    sys_flag,
                    timestamp,
                    mapping[properties_at:end],
                )
            )
            at = end

    def _stop(self, segment: Segment, at: int, limit: int, reason: str) -> None:
        """Say why the record at `at` of a file cannot be read: the file or the log ends here, or is damaged."""
        if at + BLANK_SIZE > limit:
            if limit == segment.size:
                self.end = PhysicalOffset(segment.start + limit)
            self.is_cut_short = at < limit < segment.size
            return
        size, magic = SIZE_AND_MAGIC.unpack_from(segment.mapping, at)
        if magic == MAGIC_BLANK:
            self.end = PhysicalOffset(segment.start + segment.size)
            if size != segment.size - at:
                self.torn_blanks.append((segment, at))
        elif size or magic:
            self.damage = reason
            is_cut_off = magic in (MAGIC_V1, MAGIC_V2) and size > limit - at
            self.is_cut_short = is_cut_off and FIXED_SIZE <= size < segment.size - at

    def _take_in_bulk(self, bulk: BulkReplay, mapping: mmap.mmap, at: int, limit: int, start: PhysicalOffset) -> int:
        before = bulk.records
        at = bulk.take(mapping, at, limit, start, self._check_crc)
        if bulk.records > before:
            self.records += bulk.records - before
            self.last_offset, self.last_timestamp = bulk.last_offset, bulk.last_timestamp
            self.end = PhysicalOffset(start + at)
        return at
