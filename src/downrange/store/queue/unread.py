"""What the consumers of a group have not read, taken from all queues of a topic at once."""

from __future__ import annotations

from array import array
from typing import Final

from downrange.compiled import accelerated
from downrange.store.queue.queue_entry import ENTRY, ENTRY_SIZE
from downrange.store.queue.queue_tails import END
from downrange.store.queue.queues import QueueState

Taken = tuple[int, int, bytes, int]
"""A queue id, the offset where reading began, the entries from there on, and how many bytes their records have."""
Unread = tuple[int, list[Taken]]
"""How many entries are left in all queues, and what was taken from them."""
Readable = tuple[int, int, int]
"""The part of the log that may be read, from one offset to another, and the most bytes of one queue."""
_NONE: Final = b"", 0


@accelerated
def take_unread(
    states: dict[tuple[str, int], QueueState],
    rows: array[int],
    memory: bytearray,
    topic: str,
    queues: int,
    offsets: dict[int, int],
    turns: tuple[int, int],
    most: int,
    readable: Readable,
) -> list[Unread]:
    """Take unread entries of a topic for several readers, one after the other: up to `most` for each.

    `turns` are the queue that the first reader begins with, and how many readers there are; each begins one queue
    further. `offsets` are those of the group, and move behind what was taken. `states` is that of `ConsumeQueues`,
    `rows` and `memory` are those of `QueueTails`.

    Ends before the first reader that finds something unusual, for which nothing changes: a queue or an offset is
    missing, an offset is too large, or entries or records cannot be read here.
    """
    found: list[Unread] = []
    first, readers = turns
    for number in range(first, first + readers):
        order = [each % queues for each in range(number, number + queues)]
        one = _take(states, rows, topic, order, offsets, most, readable)
        if one is None:
            break
        for queue_id, offset, entries, _ in one[1]:
            offsets[queue_id] = offset + len(entries) // ENTRY_SIZE
        found.append(one)
    return found


def _take(
    states: dict[tuple[str, int], QueueState],
    rows: array[int],
    topic: str,
    order: list[int],
    offsets: dict[int, int],
    most: int,
    readable: Readable,
) -> Unread | None:
    """What one reader takes; None when something is unusual."""
    left, taken = 0, []
    for queue_id in order:
        state, offset = dict.get(states, (topic, queue_id)), offsets.get(queue_id, -1)
        if state is None or offset < 0:
            return None
        unread = rows[state.row + END] // ENTRY_SIZE - offset
        if unread and most > 0:
            entries, byte_count = _read(state, offset, min(unread, most), readable)
            if not entries:
                return None
            taken.append((queue_id, offset, entries, byte_count))
            most -= len(entries) // ENTRY_SIZE
            unread -= len(entries) // ENTRY_SIZE
        left += max(0, unread)
    return left, taken


def _read(state: QueueState, offset: int, count: int, readable: Readable) -> tuple[bytes, int]:
    """Entries of one queue, and the bytes of their records; none when they are unusual."""
    entries = state.queue.read(offset, count) if count > 0 else b""  # type: ignore[arg-type]  # a NewType is a call
    least, end, most_bytes = readable
    total = 0
    for physical_offset, size, _ in ENTRY.iter_unpack(entries):
        if not least <= physical_offset <= end - size:
            return _NONE
        total += size
    return (entries, total) if 0 < total <= most_bytes else _NONE
