"""The result of replaying the log, for statistics and for waiting pulls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from downrange.store.log.walk import WalkedRecord
from downrange.store.queue.queues import QueueState


class GrownQueue(NamedTuple):
    """A queue that got a message by replay, with all that a waiting pull needs to know."""

    topic: str
    queue_id: int
    queue_offset: int
    properties: bytes
    store_timestamp: int
    size: int


class Growth:
    """The messages that one replay put into queues.

    Messages of watched queues are kept one by one, in the order of the log; of all others only the sizes.
    """

    __slots__ = ("sizes", "watched", "watched_messages")

    def __init__(self, watched: Mapping[tuple[str, int], object] | None = None) -> None:
        self.watched = watched
        """Topics and ids of the watched queues; None when all queues are watched."""
        self.watched_messages: list[GrownQueue] = []
        self.sizes: dict[tuple[str, int], list[int]] = {}
        """The sizes of all new records, by topic and queue id."""

    def add(self, state: QueueState, record: WalkedRecord) -> None:
        _, size, _, queue_id, queue_offset, _, timestamp, properties = record
        queue = state.topic, queue_id
        sizes = self.sizes.get(queue)
        if sizes is None:
            self.sizes[queue] = [size]
        else:
            sizes.append(size)
        if self.watched is None or queue in self.watched:
            self.watched_messages.append(GrownQueue(*queue, queue_offset, properties, timestamp, size))
