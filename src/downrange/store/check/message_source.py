"""Messages out of a store directory, in the order of the log or of one queue, past whatever is damaged."""

from __future__ import annotations

import os
from collections.abc import Iterator

from downrange.model.message import PhysicalOffset, StoredMessage
from downrange.model.record import CorruptRecord, decode_record
from downrange.store.check.directory import QueuePlace, StoreDirectory
from downrange.store.queue.consume_queue import BLANK, ENTRY, ENTRY_SIZE, count_valid, file_starts

_BLOCK_ENTRIES = 1000


class MessageSource:
    """The messages of a store that match. What could not be read is said in `damage` once the messages were taken."""

    def __init__(self, directory: StoreDirectory, topic: str | None, queue_id: int | None, key: str | None) -> None:
        self._directory = directory
        self._topic = topic
        self._queue_id = queue_id
        self._key = key
        self.damage: list[str] = []

    def from_offset(self, offset: int) -> Iterator[StoredMessage]:
        """From this offset of the log on, or of the queue when one was named."""
        place = self._queue_place()
        if place is not None:
            yield from filter(self._matches, self._of_queue(place, offset))
        elif self._queue_id is not None:
            yield from (found for found in self._of_log(0) if self._matches(found) and found.queue_offset >= offset)
        else:
            yield from filter(self._matches, self._of_log(offset))

    def from_time(self, timestamp: int) -> Iterator[StoredMessage]:
        """Messages stored at this time or later."""
        start = 0
        for segment in self._directory.segments:
            if self._directory.record_at(segment.start) is None:
                continue
            if self._directory.commit_log.store_timestamp_at(segment.start) >= timestamp:
                break
            start = segment.start
        for message in self._of_log(start):
            if message.store_timestamp >= timestamp and self._matches(message):
                yield message

    def _queue_place(self) -> QueuePlace | None:
        wanted = self._topic, self._queue_id
        return next((place for place in self._directory.queues if (place.topic, place.queue_id) == wanted), None)

    def _matches(self, message: StoredMessage) -> bool:
        if self._topic is not None and message.topic != self._topic:
            return False
        if self._queue_id is not None and message.queue_id != self._queue_id:
            return False
        return self._key is None or self._key == message.unique_key or self._key in message.keys

    def _of_log(self, offset: int) -> Iterator[StoredMessage]:
        directory = self._directory
        if not len(directory.segments):
            return
        start = PhysicalOffset(max(offset, directory.segments.min_offset))
        if directory.record_at(start) is None:
            start = directory.next_record(start) or directory.segments.max_offset
        while True:
            walk = directory.commit_log.walk(start, check_crc=True)
            for record in walk:
                message = self._decoded(record.physical_offset, record.size)
                if message is not None:
                    yield message
            if directory.is_live and directory.record_at(walk.end) is not None:
                start = walk.end  # it was written meanwhile
                continue
            if directory.is_live or (walk.damage is None and not directory.has_data_from(walk.end)):
                return
            following = directory.next_record(PhysicalOffset(walk.end + 1))
            if following is None:
                if walk.damage is not None:
                    self.damage.append(f"the log ends with a torn record: {walk.damage}")
                return
            self.damage.append(
                f"{walk.damage or f'no record at {walk.end}'}; {following - walk.end} bytes could not be read"
            )
            start = following

    def _of_queue(self, place: QueuePlace, offset: int) -> Iterator[StoredMessage]:
        size = self._directory.queue_file_size or ENTRY_SIZE
        for start in file_starts(str(place.path), size):
            position = max(0, offset * ENTRY_SIZE - start)
            with (place.path / f"{start:020d}").open("rb") as stream:
                while position < size:
                    block = os.pread(stream.fileno(), min(_BLOCK_ENTRIES * ENTRY_SIZE, size - position), position)
                    valid = count_valid(block) * ENTRY_SIZE
                    for at in range(0, valid, ENTRY_SIZE):
                        if (message := self._of_entry(block[at : at + ENTRY_SIZE])) is not None:
                            yield message
                    if valid < len(block):
                        return
                    position += valid

    def _of_entry(self, raw: bytes) -> StoredMessage | None:
        physical_offset, size, _ = ENTRY.unpack(raw)
        if raw == BLANK or physical_offset < self._directory.segments.min_offset:
            return None
        if self._directory.record_at(physical_offset) is None:
            self.damage.append(f"a queue entry points at {physical_offset}, where no record begins")
            return None
        return self._decoded(physical_offset, size)

    def _decoded(self, physical_offset: PhysicalOffset, size: int) -> StoredMessage | None:
        record = self._directory.commit_log.slice(physical_offset, size)
        try:
            return decode_record(record or b"", check_crc=True)
        except CorruptRecord as error:
            self.damage.append(f"record at {physical_offset}: {error}")
            return None
