"""Where plain sends may go, as the compiled twin looks it up: one key, one piece of memory."""

from __future__ import annotations

import struct
from typing import Final

from downrange.broker.topics import Topics
from downrange.store.queues import ConsumeQueues

_NONE: Final = -1
_NUMBER: Final = struct.Struct("=i")


class Destinations(dict[str, bytes]):
    """Topic -> the rows of its queues and its name, learnt when somebody sends to it.

    With ten thousand topics what a message has to look at is not in the processor's cache, so it is little: how many
    queues (a 32-bit number), the row of each in `QueueTails` (32 bits; -1 when the queue is not there or special), the
    topic as records hold it.

    Holds always: what it says is what `Topics.plain` and `ConsumeQueues` say. They tell it of every change.
    """

    def __init__(self, topics: Topics, queues: ConsumeQueues) -> None:
        super().__init__()
        self._topics = topics
        self._queues = queues
        topics.on_plain_change = queues.on_change = self._forget

    def __missing__(self, topic: str) -> bytes:
        states = self._queues.states
        rows = []
        for queue_id in range(self._topics.plain[topic]):
            state = states.get((topic, queue_id))
            rows.append(_NONE if state is None or state.is_special else state.row)
        while rows and rows[-1] == _NONE:
            del rows[-1]
        if not rows:
            raise KeyError(topic)
        field = states[topic, len(rows) - 1].topic_field
        packed = self[topic] = b"".join((_NUMBER.pack(len(rows)), *map(_NUMBER.pack, rows), field))
        return packed

    def _forget(self, topic: str | None) -> None:
        """One topic has changed, or all may have."""
        if topic is None:
            self.clear()
        else:
            self.pop(topic, None)
