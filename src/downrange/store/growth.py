"""The messages that a replay of the log brought, for the statistics and for waiting pulls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from downrange.model.message import QueueOffset
from downrange.store.log.walk import WalkedRecord
from downrange.store.queue.queues import QueueState


class GrownQueue(NamedTuple):
    """A queue that got a message by replay: everything a waiting pull wants to know."""

    topic: str
    queue_id: int
    queue_offset: QueueOffset
    properties: bytes
    store_timestamp: int
    size: int


class Growth:
    """The messages that came into queues by one replay.

    Messages of watched queues are kept one by one, in the order of the log; of all others only their sizes are kept.
    """

    __slots__ = ("sizes", "watched", "watched_messages")

    def __init__(self, watched: Mapping[tuple[str, int], object] | None = None) -> None:
        self.watched = watched
        """Topics and ids of the queues that are watched; None when all are."""
        self.watched_messages: list[GrownQueue] = []
        self.sizes: dict[tuple[str, int], list[int]] = {}
        """The sizes of all new records, by topic and queue id."""

    def add(self, state: QueueState, record: WalkedRecord) -> None:
        queue = state.topic, record.queue_id
        self.sizes.setdefault(queue, []).append(record.size)
        if self.watched is None or queue in self.watched:
            self.watched_messages.append(
                GrownQueue(*queue, record.queue_offset, record.properties, record.store_timestamp, record.size)
            )
