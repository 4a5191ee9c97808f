"""What the log holds of every queue, and how far the queue's files were found to say the same. Part of `check`."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from typing import Final, NamedTuple

from downrange.compiled import steps
from downrange.model.hashing import tags_code
from downrange.model.topics import SCHEDULE_TOPIC
from downrange.store.check.directory import StoreDirectory
from downrange.store.dispatcher import find_in
from downrange.store.log.walk import WalkedRecord
from downrange.store.queue.consume_queue import ENTRY, ENTRY_SIZE, count_valid

Key = tuple[bytes, int]
"""Topic, as it stands in records, and queue id."""

# The layout of a row is known to `_compiled/check_records.c`, too.
RECORDS, FIRST_PHYSICAL, LAST_OFFSET, LAST_PHYSICAL, AFTER_GAP = range(5)
SEEN_FROM, SEEN_TO, SEEN_LAST, BLOCK_AT, FROM, LOADED, ASKED_TO = range(5, 12)
NUMBERS: Final = 12

_NO_BLOCK: Final = -1
_MOST: Final = ((1 << 63) - 1) // ENTRY_SIZE
_ALL: Final = 1 << 62
_NOT_IN_A_QUEUE: Final = 4  # the bit that prepared and rolled-back messages have in sysFlag
_ROOM_OF_ALL: Final = 128 << 20
_LEAST_ROOM: Final = 400
_MOST_ROOM: Final = 65_520


class QueueInLog(NamedTuple):
    """What the log holds of one queue, since the topic was made: how many records, the first and the last.

    The entries that are `seen` are those of consecutive records of the log; the last of them points at `seen_last`.
    """

    records: int = 0
    first_physical: int = 0
    last_offset: int = -1
    last_physical: int = 0
    seen: range = range(0)
    seen_last: int = 0


class QueuesInLog:
    """Gathers, record by record, what every queue should hold; tells when numbers do not follow each other.

    With the compiled twin of `check`, records are also compared with entries, which are loaded block by block:
    so queues are read side by side with the log, and the log once. What was not seen is left for `QueueCheck`.
    """

    def __init__(self, directory: StoreDirectory) -> None:
        self._directory = directory
        self.by_key: dict[Key, int] = {}
        """Where the row of each queue begins."""
        self.rows = array("q")
        """For each queue the numbers of `QueueInLog`, whether records are missing before the next one, and which
        entries are in its block: from FROM on LOADED many; asking for more of those up to ASKED_TO is useless."""
        self.blocks = bytearray()
        """Some entries of each queue that has files."""
        room = _ROOM_OF_ALL // max(1, len(directory.queues))
        self.block_size = max(_LEAST_ROOM, min(room - room % ENTRY_SIZE, _MOST_ROOM))
        self.rows_by_topic = steps.TopicTable() if steps is not None else None
        self._directories = {
            (place.topic.encode("utf-8", "surrogateescape"), place.queue_id): str(place.path)
            for place in directory.queues
            # Entries of these hold something else than a tag hash.
            if place.topic != SCHEDULE_TOPIC and (place.topic, place.queue_id) not in directory.ext_queues
        }
        self._keys: list[Key] = []

    def __getitem__(self, key: Key) -> QueueInLog:
        row = self.by_key.get(key)
        if row is None:
            return QueueInLog()
        records, first_physical, last_offset, last_physical, _, seen_from, seen_to, seen_last = self.rows[row : row + 8]
        return QueueInLog(records, first_physical, last_offset, last_physical, range(seen_from, seen_to), seen_last)

    def __iter__(self) -> Iterator[Key]:
        return iter(self.by_key)

    def add(self, record: WalkedRecord) -> None:
        physical_offset, _, topic, queue_id, queue_offset, sys_flag, _, _ = record
        if sys_flag & _NOT_IN_A_QUEUE:
            return
        key = topic, queue_id
        row = self.by_key.get(key)
        if row is None:
            row = self._add_row(key)
        rows = self.rows
        if queue_offset == 0 or not rows[row + RECORDS]:
            # A queue has one first message: the topic was made, or deleted and made again.
            rows[row + RECORDS] = 0
            rows[row + FIRST_PHYSICAL] = physical_offset
        elif queue_offset != rows[row + LAST_OFFSET] + 1 and not rows[row + AFTER_GAP]:
            name = f"{topic.decode('utf-8', 'replace')}/{queue_id}"
            what = f"record at {physical_offset} has queue offset {queue_offset} after {rows[row + LAST_OFFSET]}"
            self._directory.problems.add(
                f"queue {name}", "order", what, "consumers may miss messages or see some twice"
            )
        rows[row + RECORDS] += 1
        rows[row + LAST_OFFSET] = queue_offset
        rows[row + LAST_PHYSICAL] = physical_offset
        rows[row + AFTER_GAP] = 0
        if steps is not None:
            self._look_for_entry(row, record)

    def _look_for_entry(self, row: int, record: WalkedRecord) -> None:
        """What the twin does for the records that it takes, so that what it sees of a queue is in one piece."""
        physical_offset, size, _, _, queue_offset, _, _, properties = record
        rows = self.rows
        if not rows[row + FROM] <= queue_offset < rows[row + ASKED_TO]:
            self.load(row, queue_offset)
        number = queue_offset - rows[row + FROM]
        if 0 <= number < rows[row + LOADED]:
            tags = find_in(properties, b"TAGS\x01") or b""
            at = rows[row + BLOCK_AT] + number * ENTRY_SIZE
            expected = ENTRY.pack(physical_offset, size, tags_code(tags.decode("utf-8", "replace")))
            if self.blocks[at : at + ENTRY_SIZE] == expected:
                if rows[row + SEEN_FROM] == rows[row + SEEN_TO]:
                    rows[row + SEEN_FROM] = rows[row + SEEN_TO] = queue_offset
                if rows[row + SEEN_TO] == queue_offset:
                    rows[row + SEEN_TO] += 1
                    rows[row + SEEN_LAST] = physical_offset

    def _add_row(self, key: Key) -> int:
        row = self.by_key[key] = len(self.rows)
        self._keys.append(key)
        self.rows.extend((0,) * NUMBERS)
        self.rows[row + LAST_OFFSET] = -1
        self.rows[row + BLOCK_AT] = _NO_BLOCK
        return row

    def note_gap(self) -> None:
        """Records are missing here: the numbers of every queue may jump once."""
        self.rows[AFTER_GAP::NUMBERS] = array("q", (1,)) * len(self.by_key)

    def load(self, row: int, queue_offset: int) -> None:
        """Read a block of entries, from this one on."""
        rows = self.rows
        if not 0 <= queue_offset <= _MOST:
            return
        block = self._read(self._keys[row // NUMBERS], queue_offset * ENTRY_SIZE)
        loaded = count_valid(block)
        if loaded:
            if rows[row + BLOCK_AT] == _NO_BLOCK:
                rows[row + BLOCK_AT] = len(self.blocks)
                self.blocks.extend(bytes(self.block_size))
            at = rows[row + BLOCK_AT]
            self.blocks[at : at + len(block)] = block
        rows[row + FROM] = queue_offset
        rows[row + LOADED] = loaded
        rows[row + ASKED_TO] = queue_offset + loaded if loaded and loaded * ENTRY_SIZE == len(block) else _ALL

    def _read(self, key: Key, position: int) -> bytes:
        directory, file_size = self._directories.get(key), self._directory.queue_file_size or 0
        if directory is None or file_size % ENTRY_SIZE or not file_size:
            return b""
        at = position % file_size
        try:
            descriptor = os.open(f"{directory}/{position - at:020d}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                block = os.pread(descriptor, min(self.block_size, file_size - at), at)
            finally:
                os.close(descriptor)
        except OSError:  # it is not there, or `QueueCheck` will say what is wrong with it
            return b""
        return block[: len(block) - len(block) % ENTRY_SIZE]
