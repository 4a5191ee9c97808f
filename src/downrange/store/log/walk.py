"""Reading the log record by record, and what is wrong where that ends."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Protocol
from zlib import crc32

from downrange.compiled import steps
from downrange.model.record import FIXED_SIZE, MAGIC_BLANK, MAGIC_V1, MAGIC_V2
from downrange.store.config import BLANK_SIZE
from downrange.store.log.segment import Segment
from downrange.store.log.segments import Segments
from downrange.store.record_head import CRC_MASK, HEAD_BY_FLAGS, HEAD_V4, SIZE_AND_MAGIC, V6_FLAGS

# physical offset, size, topic, queue id, queue offset, sysFlag, store timestamp, properties
WalkedRecord = tuple[int, int, bytes, int, int, int, int, bytes]


class Bulk(Protocol):
    """Who takes many records of a walk at once, by a compiled twin."""

    records: int
    """How many were taken so far."""
    last_offset: int
    last_timestamp: int
    """Physical offset and store time of the last of them."""

    def take(self, mapping: mmap.mmap, at: int, limit: int, start: int, check_crc: bool) -> int:
        """Take records from position `at` of a file on, none of which ends behind `limit`; where the next begins.

        `start` is the offset of the file's first byte.
        """


class Walk:
    """One pass over the records from `start` on; iterate it once.

    Afterwards `end` is the offset at which it stopped, and `damage` says what is wrong there: None where the log simply
    ends (zeros, or the last readable byte). `is_cut_short` says that a record begins there whose end is not there yet.

    What `bulk` takes is not seen by who iterates; it is asked again after every record that is, until it is None.
    """

    def __init__(self, segments: Segments, start: int, *, check_crc: bool, bulk: Bulk | None = None) -> None:
        self._segments = segments
        self._check_crc = check_crc
        self.bulk = bulk if steps is not None else None
        self.end = start
        self.damage: str | None = None
        self.is_cut_short = False
        self.records = 0
        self.last_offset = self.last_timestamp = 0
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
                self.end = following.start
            segment = following

    def _records_of(self, segment: Segment, at: int, limit: int) -> Iterator[WalkedRecord]:
        """Every record of one file; moves `end` along, to the end of the file when a blank record says so."""
        mapping = segment.mapping
        start = segment.start
        check_crc = self._check_crc
        unpack_v4 = HEAD_V4.unpack_from
        while True:
            if self.bulk is not None:
                at = self._take_in_bulk(self.bulk, mapping, at, limit, start)
            if at + BLANK_SIZE > limit:
                if limit == segment.size:
                    self.end = start + limit
                self.is_cut_short = at < limit < segment.size
                return
            size, magic = SIZE_AND_MAGIC.unpack_from(mapping, at)
            if magic != MAGIC_V1 and magic != MAGIC_V2:
                if magic == MAGIC_BLANK:
                    self.end = start + segment.size
                elif size or magic:
                    self.damage = f"no record at {start + at}: magic number {magic:#010x}"
                return
            if size < FIXED_SIZE or at + size > limit:
                self.damage = f"record at {start + at} says {size} bytes, {limit - at} are there"
                self.is_cut_short = FIXED_SIZE <= size < segment.size - at
                return
            # fmt: off
            (_, _, crc, queue_id, _, queue_offset, _, sys_flag, _, _, timestamp, _, _, _, body_length
             ) = unpack_v4(mapping, at)
            # fmt: on
            body_at = at + 88
            if sys_flag & V6_FLAGS:
                layout = HEAD_BY_FLAGS[sys_flag & V6_FLAGS]
                body_at = at + layout.size
                if body_at > limit:
                    self.damage = f"record at {start + at} is too short for its hosts"
                    return
                fields = layout.unpack_from(mapping, at)
                timestamp, body_length = fields[10], fields[14]
            topic_at = body_at + body_length + (1 if magic == MAGIC_V1 else 2)
            if body_length < 0 or topic_at + 2 > at + size:
                self.damage = f"record at {start + at} has a body of {body_length} bytes in {size}"
                return
            topic_length = mapping[topic_at - 1]
            if magic == MAGIC_V2:
                topic_length += mapping[topic_at - 2] << 8
            properties_at = topic_at + topic_length + 2
            end = at + size
            if properties_at > end or int.from_bytes(mapping[properties_at - 2 : properties_at], "big") != (
                end - properties_at
            ):
                self.damage = f"record at {start + at}: its parts do not add up to {size} bytes"
                return
            if check_crc and crc32(mapping[body_at : body_at + body_length]) & CRC_MASK != crc:
                self.damage = f"record at {start + at}: the body does not match its checksum"
                return
            self.records += 1
            self.last_offset, self.last_timestamp = start + at, timestamp
            self.end = start + end
            yield (
                start + at,
                size,
                mapping[topic_at : properties_at - 2],
                queue_id,
                queue_offset,
                sys_flag,
                timestamp,
                mapping[properties_at:end],
            )
            at = end

    def _take_in_bulk(self, bulk: Bulk, mapping: mmap.mmap, at: int, limit: int, start: int) -> int:
        before = bulk.records
        at = bulk.take(mapping, at, limit, start, self._check_crc)
        if bulk.records > before:
            self.records += bulk.records - before
            self.last_offset, self.last_timestamp = bulk.last_offset, bulk.last_timestamp
            self.end = start + at
        return at
