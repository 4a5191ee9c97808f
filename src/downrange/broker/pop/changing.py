"""Changes of the invisible time of popped messages."""

from __future__ import annotations

from downrange.broker.pop.leases import Lease, LeaseKey
from downrange.broker.pop.state import PopState
from downrange.protocol.bodies.pop import ReceiptHandle


class Changing:
    """Gives single messages another lease: a longer one, or one that ends at once."""

    def __init__(self, state: PopState) -> None:
        self._state = state

    def change(self, topic: str, group: str, handle: ReceiptHandle, invisible_millis: int) -> tuple[ReceiptHandle, int]:
        """Let a message of the topic that was read be visible again so long from now; 0: at once.

        Returns the new handle, and the offset up to which the log has to be safe. A handle whose lease is over changes
        nothing: the message comes again, or was acknowledged.
        """
        state = self._state
        state.refuse_on_slave()
        if handle.is_orderly:
            return self._change_in_order(topic, group, handle, invisible_millis)
        now = state.clock.now()
        queue_id, offset = handle.queue_id, handle.offset
        old = LeaseKey(topic, group, queue_id, handle.start_offset, handle.pop_time)
        key = LeaseKey(topic, group, queue_id, offset, now)
        while key in state.leases or key == old:
            key = key._replace(pop_time=key.pop_time + 1)
        changed = handle._replace(start_offset=offset, pop_time=key.pop_time, invisible_time=invisible_millis)
        lease = state.leases.get(old)
        bit = lease.bit_of(offset) if lease is not None else 0
        if lease is None or not bit:
            return changed, 0
        again = Lease(key, 1, invisible_millis, lease.revive_queue)
        checkpoint = state.records.checkpoint(again, now)
        over = state.records.acknowledgement(lease, bit, now)
        batch = state.append_together((checkpoint, over))
        again.revive_offset = batch.places[0][2]
        state.checkpoints += 1
        state.acknowledgements += 1
        state.leases.end([(lease, bit)])
        state.hold([again])
        state.offsets.mark_unsaved()
        return changed, batch.end_offset

    def _change_in_order(
        self, topic: str, group: str, handle: ReceiptHandle, invisible_millis: int
    ) -> tuple[ReceiptHandle, int]:
        state = self._state
        place = topic, group, handle.queue_id
        visible_at = state.clock.now() + invisible_millis
        if not state.orders.change(place, handle.offset, handle.pop_time, visible_at):
            return handle, 0
        state.unlock_later(place)
        return handle._replace(invisible_time=visible_at - handle.pop_time), state.note_orders((place,))
