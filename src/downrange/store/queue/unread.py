"""What the consumers of a group have not read, in all queues of a topic at once."""

from __future__ import annotations

from array import array
from typing import Final

from downrange.compiled import accelerated
from downrange.store.queue.queue_entry import ENTRY, ENTRY_SIZE
from downrange.store.queue.queue_tails import END, START, read_tail
from downrange.store.queue.queues import QueueState

Unread = tuple[int, int, int, bytes, int]
"""A queue id, the offset of the group, how many entries lie behind it (below 0: the offset is too large), the first of
these entries, and how many bytes their records have."""
Readable = tuple[int, int, int]
"""The part of the log that may be read, from one offset to another, and the most bytes of one queue."""
_NONE: Final = b""


@accelerated
def unread_queues(
    states: dict[tuple[str, int], QueueState],
    rows: array[int],
    memory: bytearray,
    topic: str,
    first: int,
    queues: int,
    offsets: dict[int, int],
    most: int,
    readable: Readable,
) -> list[Unread] | None:
    """The queues of a topic, from `first` on and around, in which the offset is not the end.

    The first `most` entries come with them. None comes from a queue whose entries are not in memory, or whose records
    are not readable, nor from those behind it. `states` is that of `ConsumeQueues`, `rows` and `memory` are those of
    `QueueTails`. None when a queue or an offset is missing: it has to be made.
    """
    found = []
    for number in range(first, first + queues):
        queue_id = number % queues
        state, offset = dict.get(states, (topic, queue_id)), offsets.get(queue_id, -1)
        if state is None or offset < 0:
            return None
        unread = rows[state.row + END] // ENTRY_SIZE - offset
        if not unread:
            continue
        entries, byte_count = _NONE, 0
        if (count := min(unread, most)) > 0:
            entries, byte_count = _read(rows, memory, state.row, offset, count, readable)
            most = most - count if entries else 0
        found.append((queue_id, offset, unread, entries, byte_count))
    return found


def _read(
    rows: array[int], memory: bytearray, row: int, offset: int, count: int, readable: Readable
) -> tuple[bytes, int]:
    """Entries of one queue, and the bytes of their records; none when they are unusual."""
    position = offset * ENTRY_SIZE
    if position < rows[row + START]:
        return _NONE, 0
    entries = read_tail(rows, memory, row, position, position + count * ENTRY_SIZE)
    least, end, most_bytes = readable
    total = 0
    for physical_offset, size, _ in ENTRY.iter_unpack(entries):
        if not least <= physical_offset <= end - size:
            return _NONE, 0
        total += size
    return (entries, total) if 0 < total <= most_bytes else (_NONE, 0)
