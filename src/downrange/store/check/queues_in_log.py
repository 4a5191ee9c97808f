"""What the log holds of every queue. Part of `check`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from downrange.model.message import PhysicalOffset, QueueOffset
from downrange.store.check.directory import Problems
from downrange.store.log.walk import WalkedRecord

Key = tuple[bytes, int]
"""Topic, as it stands in records, and queue id."""

NOT_IN_A_QUEUE: Final = 4  # the bit that prepared and rolled-back messages have in sysFlag


@dataclass(slots=True)
class QueueInLog:
    """What the log holds of one queue, since the topic was made: how many records, the first and the last."""

    records: int = 0
    first_physical: PhysicalOffset = PhysicalOffset(0)
    last_offset: QueueOffset = QueueOffset(-1)
    last_physical: PhysicalOffset = PhysicalOffset(0)
    is_after_gap: bool = False
    """Whether records may be missing before the next one."""


class QueuesInLog:
    """Gathers, record by record, what every queue should hold; tells when numbers do not follow each other."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._by_key: dict[Key, QueueInLog] = {}

    def __getitem__(self, key: Key) -> QueueInLog:
        return self._by_key.get(key) or QueueInLog()

    def __iter__(self) -> Iterator[Key]:
        return iter(self._by_key)

    def add(self, record: WalkedRecord) -> None:
        if record.sys_flag & NOT_IN_A_QUEUE:
            return
        queue_offset = record.queue_offset
        key = record.topic, record.queue_id
        queue = self._by_key.get(key)
        if queue is None:
            queue = self._by_key[key] = QueueInLog()
        if queue_offset == 0 or not queue.records:
            # A queue has one first message: the topic was made, or deleted and made again.
            queue.records = 0
            queue.first_physical = record.physical_offset
        elif queue_offset != queue.last_offset + 1 and not queue.is_after_gap:
            name = f"{record.topic.decode('utf-8', 'replace')}/{record.queue_id}"
            what = f"record at {record.physical_offset} has queue offset {queue_offset} after {queue.last_offset}"
            self._problems.add(f"queue {name}", "order", what, "consumers may miss messages or see some twice")
        queue.records += 1
        queue.last_offset = queue_offset
        queue.last_physical = record.physical_offset
        queue.is_after_gap = False

    def note_gap(self) -> None:
        """Records are missing here: the numbers of every queue may jump once."""
        for queue in self._by_key.values():
            queue.is_after_gap = True
