"""The compiled step that reads usual sends: where they may go, as that step looks it up.

A send is usual when its header is written as nearly all clients write it, its topic and queue are there already, and
its message is neither delayed nor transactional nor a retry. All others are read by `SendReader`, and all of them where
nothing is compiled.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

from downrange.broker.topics import Topics
from downrange.compiled import accelerated
from downrange.protocol.bodies.send_replies import SendReplies
from downrange.protocol.framing import Frame
from downrange.store.new_messages import NewMessages
from downrange.store.queue.queues import ConsumeQueues, QueueState
from downrange.store.queue.topic_table import TopicTable
from downrange.transport.connection import Connection

_NONE: Final = -1
_NUMBER: Final = struct.Struct("=i")


@accelerated
class UsualSends:
    """Reads the usual sends of a batch. This class, in Python, leaves them all to `SendReader`."""

    def __init__(
        self,
        topics: TopicTable,
        learn: Callable[[str], bytes | None],
        by_row: list[QueueState | None],
        cluster: bytes,
        store_host: bytes,
    ) -> None:
        """`learn` is asked for topics that the table does not know; `cluster` is a property that all messages get."""

    def read(
        self,
        frames: list[Frame],
        origins: list[Connection],
        at: int,
        stop: int,
        replies: SendReplies,
        messages: NewMessages,
        fits: int,
        batch_fits: int,
    ) -> int:
        """Add what the usual sends from `frames[at]` on ask for, up to `stop` or the first that is not usual.

        Return the position of the first frame that was not read. `fits` bounds body and properties of a message,
        `batch_fits` the records of a batch.
        """
        return at


def usual_sends(topics: Topics, queues: ConsumeQueues, cluster: bytes, store_host: bytes) -> UsualSends:
    """The reader of usual sends of one broker."""
    destinations = Destinations(topics, queues)
    return UsualSends(destinations.table, destinations.learn, queues.by_row, cluster, store_host)


class Destinations:
    """The topics that usual messages were sent to, each with the rows of its queues.

    With ten thousand topics what a message has to look at is not in the processor's cache, so it is little: how many
    queues (a 32-bit number), the row of each in `QueueTails` (32 bits; -1 when the queue is not there or special), the
    topic as records hold it.

    Holds always: what `table` knows is what `Topics.usual` and `ConsumeQueues` say. They tell of every change.
    """

    def __init__(self, topics: Topics, queues: ConsumeQueues) -> None:
        self._topics = topics
        self._queues = queues
        self.table: Any = TopicTable()
        topics.on_usual_change = queues.on_change = self._forget

    def learn(self, topic: str) -> bytes | None:
        """The packed destination of a topic; None when usual messages may not go there (now)."""
        states = self._queues.states
        rows = []
        for queue_id in range(self._topics.usual.get(topic, 0)):
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
