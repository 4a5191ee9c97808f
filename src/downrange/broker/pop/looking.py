"""Looks at what a pop would find, without taking it."""

from __future__ import annotations

from downrange.broker.pop.popped import PopRequest
from downrange.broker.pop.state import PopState
from downrange.model.topics import TopicConfig, pop_retry_topic
from downrange.protocol.bodies.pop import ANY_QUEUE


class Looking:
    """Knows how many messages the consumers of a group have not got."""

    def __init__(self, state: PopState) -> None:
        self._state = state

    def has_message(self, topic: TopicConfig, request: PopRequest) -> bool:
        """Whether a pop might find something."""
        state, group, name = self._state, request.group, request.topic
        queues = range(topic.read_queue_nums) if request.queue_id == ANY_QUEUE else (request.queue_id,)
        for queue_id in queues:
            if request.is_orderly and state.orders.is_blocked(
                (name, group, queue_id), request.attempt_id, state.clock.now()
            ):
                continue
            if self.backlog(name, group, queue_id, request.init_mode) > 0:
                return True
        if request.is_orderly:
            return False
        retries = (pop_retry_topic(group, name, version=version) for version in (1, 2))
        return any(each in state.tables.topics and self.backlog(each, group, 0, 0) > 0 for each in retries)

    def backlog(self, topic: str, group: str, queue_id: int, init_mode: int = 0) -> int:
        """How many messages of a queue no consumer of a group has got."""
        offset = self._state.offsets.get(topic, group, queue_id)
        if offset is None or offset < 0:
            offset = self.first_offset(topic, queue_id, init_mode)
        return max(0, self._state.store.max_offset_of(topic, queue_id) - offset)

    def first_offset(self, topic: str, queue_id: int, init_mode: int) -> int:
        """Where a group begins that is new: with the oldest message (0), or with the newest (1)."""
        store = self._state.store
        lowest = max(0, store.min_offset_of(topic, queue_id))
        if init_mode == 0 or (lowest == 0 and not store.is_beyond_memory(topic, queue_id, 0)):
            return lowest
        return max(0, store.max_offset_of(topic, queue_id) - 1)
