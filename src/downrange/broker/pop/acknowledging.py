"""Acknowledgements: popped messages were consumed, and do not come again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from downrange.broker.pop.leases import Lease, LeaseKey
from downrange.broker.pop.state import PopState
from downrange.protocol.errors import MessageIllegal, ServiceNotAvailable
from downrange.store.new_message import NewMessage


class Acknowledging:
    """Ends leases.

    Holds always: an acknowledgement is in the log before `acknowledge` returns; what it cannot store, it raises.
    """

    def __init__(self, state: PopState) -> None:
        self._state = state

    def acknowledge(self, acks: Mapping[Lease, int]) -> int:
        """End leases of messages: for each lease a bit set, as that of `Lease.held`. What is not held has no effect.

        Returns the offset up to which the log has to be safe; 0 when nothing was written.
        """
        state = self._state
        state.refuse_on_slave()
        ended = [(lease, held) for lease, bits in acks.items() if (held := lease.held & bits)]
        if not ended:
            return 0
        batch = state.append_acknowledgements(ended)
        stored = batch.stored
        state.leases.end(ended[:stored])
        state.offsets.mark_unsaved()
        if stored < len(ended):
            raise ServiceNotAvailable("not all acknowledgements could be stored: send them again")
        return batch.end_offset

    def acknowledge_in_order(self, key: LeaseKey, offsets: Iterable[int], invisible_time: int) -> int:
        """Messages of an ordered pop were consumed. Returns as `acknowledge` does."""
        state = self._state
        state.refuse_on_slave()
        messages = list(self._in_order(key, sorted(set(offsets)), invisible_time))
        if not messages:
            return 0
        batch = state.append(messages)
        state.acknowledgements += batch.stored
        for message, (_, _, offset) in zip(messages, batch.places, strict=False):
            state.orders.noted(message.queue_id, offset)
        state.offsets.mark_unsaved()
        return batch.end_offset

    def _in_order(self, key: LeaseKey, offsets: list[int], invisible_time: int) -> Iterable[NewMessage]:
        state, now = self._state, self._state.clock.now()
        topic, group, queue_id, _, pop_time = key
        place = topic, group, queue_id
        for offset in offsets:
            committed = state.offsets.get(topic, group, queue_id)
            if committed is not None and offset < committed:
                continue
            try:
                next_offset = state.orders.acknowledge(place, offset, pop_time)
            except KeyError:
                lowest, highest = state.offset_range(topic, queue_id)
                raise MessageIllegal(
                    f"offset is illegal, key:{topic}@{group}@{queue_id}, commit:{offset}, store:{lowest}~{highest}"
                ) from None
            if next_offset is None and state.orders.get(place) is None and offset == committed:
                next_offset = offset + 1  # its pop was forgotten: RocketMQ would pass over all messages before it
            if next_offset is None:
                continue
            state.offsets.commit(topic, group, queue_id, next_offset)
            if not state.orders.is_blocked(place, None, now):
                state.unlocks.pop(place, None)
                state.waiting.wake(topic, group)
            yield state.records.ordered_acknowledgement(key, offset, pop_time + invisible_time, now, next_offset)
