"""Which timer messages were delivered already by a run that ended without saying so.

The checkpoint of the index is written about once a second, so the last deliveries before a crash are not in it. They
are in the log: their copies lie in the queues of their real topics. A message that is delivered after a start is looked
for there first. What is compared are the id, the times and the body of a message: two that agree in all are one.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from downrange.broker.timed import roll_times
from downrange.model import properties as names
from downrange.model.record import CorruptRecord
from downrange.model.topics import TIMER_TOPIC
from downrange.store.kept_message import KeptMessage, read_kept
from downrange.store.message_store import MessageStore

_READ: Final = 512

# Unique key, TIMER_OUT_MS, born time, hash of the body, how often it was rolled.
Identity = tuple[str | None, str | None, int, int, int]


class TimerCopies:
    """The copies that were stored from a time on, counted queue by queue when somebody first asks.

    A queue must be asked about before this run delivers anything to it: that is no copy of the run before.
    """

    def __init__(self, store: MessageStore, since: int) -> None:
        self._store = store
        self._since = since
        self._queues: dict[tuple[str, int], Counter[Identity]] = {}

    def take(self, kept: KeptMessage, topic: str, queue_id: int, *, is_roll: bool) -> bool:
        """Whether there is a copy of this message, to be delivered to this queue, that was not taken before."""
        key = (topic, queue_id)
        copies = self._queues.get(key)
        if copies is None:
            copies = self._queues[key] = self._count(topic, queue_id)
        wanted = _identity(kept, 1 if is_roll else 0)
        if copies[wanted] <= 0:
            return False
        copies[wanted] -= 1
        return True

    def _count(self, topic: str, queue_id: int) -> Counter[Identity]:
        copies: Counter[Identity] = Counter()
        offset, end = self._first(topic, queue_id), self._store.max_offset_of(topic, queue_id)
        while offset < end:
            entries = self._store.entries(topic, queue_id, offset, min(_READ, end - offset))
            for entry in entries:
                record = self._store.record_at(entry.physical_offset)
                try:
                    kept = read_kept(record) if record is not None else None
                except CorruptRecord:
                    kept = None
                if kept is not None and kept.store_timestamp >= self._since and _is_copy(kept, topic):
                    copies[_identity(kept, 0)] += 1
            if not entries:
                break
            offset += len(entries)
        return copies

    def _first(self, topic: str, queue_id: int) -> int:
        """The first message of a queue that was stored since; a little before it does no harm."""
        offset: int = self._store.offset_by_time(topic, queue_id, self._since)
        lowest = self._store.min_offset_of(topic, queue_id)
        while offset > lowest and self._store.store_time_of(topic, queue_id, offset - 1) >= self._since:
            offset -= 1  # several may have been stored in one millisecond
        return max(offset, lowest)


def _is_copy(kept: KeptMessage, topic: str) -> bool:
    if topic == TIMER_TOPIC:
        return roll_times(kept) > 0
    return kept.find(names.TIMER_OUT_MS) is not None and kept.find(names.REAL_TOPIC) == topic


def _identity(kept: KeptMessage, more_rolls: int) -> Identity:
    message = kept.message
    return (
        kept.find(names.UNIQ_KEY),
        kept.find(names.TIMER_OUT_MS),
        message.born_timestamp,
        hash(message.body),
        roll_times(kept) + more_rolls,
    )
