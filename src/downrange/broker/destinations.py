"""Where plain sends may go, as the compiled twin looks it up: one place in a table, one piece of memory."""

from __future__ import annotations

import struct
from typing import Final

from downrange.broker.topics import Topics
from downrange.compiled import steps
from downrange.store.queue.queues import ConsumeQueues

_NONE: Final = -1
_NUMBER: Final = struct.Struct("=i")


class Destinations:
    """The topics that somebody sent plain messages to, each with the rows of its queues.

    With ten thousand topics what a message has to look at is not in the processor's cache, so it is little: how many
    queues (a 32-bit number), the row of each in `QueueTails` (32 bits; -1 when the queue is not there or special), the
    topic as records hold it.

    Holds always: what `table` knows is what `Topics.plain` and `ConsumeQueues` say. They tell of every change.
    """

    def __init__(self, topics: Topics, queues: ConsumeQueues) -> None:
        assert steps is not None
        self._topics = topics
        self._queues = queues
        self.table = steps.TopicTable()
        topics.on_plain_change = queues.on_change = self._forget

    def learn(self, topic: str) -> bytes | None:
        """What is to be known of a topic; None when plain messages may not go there (now)."""
        states = self._queues.states
        rows = []
        for queue_id in range(self._topics.plain.get(topic, 0)):
            state = states.get((topic, queue_id))
            rows.append(_NONE if state is None or state.is_special else state.row)
        while rows and rows[-1] == _NONE:
            del rows[-1]
        if not rows:
            return None
        field = states[topic, len(rows) - 1].topic_field
        return b"".join((_NUMBER.pack(len(rows)), *map(_NUMBER.pack, rows), field))

    def _forget(self, topic: str | None) -> None:
        """One topic has changed, or all may have."""
        if topic is None:
            self.table.clear()
        else:
            self.table.forget(topic)
