"""A message that a broker leased to a consumer, and how it is read out of the answer to a pop."""

from __future__ import annotations

from collections import defaultdict, deque

from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.namespace import unwrap
from downrange.model import properties as names
from downrange.model.message import MessageQueue
from downrange.model.record import CorruptRecord, unpack_record
from downrange.protocol.bodies.pop import (
    PopMessageResponse,
    ReceiptHandle,
    handles_of,
    read_order_count_info,
)
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError


class PoppedMessage(ReceivedMessage, frozen=True, eq=False, gc=False, kw_only=True):
    """A message that is invisible to other consumers of the group until its time is over.

    `receipt_handle` is the lease in force: a change of the invisible time replaces it. `queue` is where the message
    lay, a retry topic of the group if it came again; `reconsume_times` is how often it was delivered before.
    """

    wire_topic: str
    """The topic as brokers name it: with its namespace, and never a retry topic."""
    receipt_handle: ReceiptHandle

    @property
    def delivery_attempt(self) -> int:
        """1 for the first delivery."""
        return self.reconsume_times + 1

    @property
    def properties(self) -> dict[str, str]:
        """All properties, and two that Java's consumers add: the receipt handle, and the time of the first pop."""
        found = names.decode_properties(self.properties_text)
        found[names.POP_CK] = str(self.receipt_handle)
        found.setdefault(names.FIRST_POP_TIME, str(self.receipt_handle.pop_time))
        return found


def read_popped(reply: Command, topic: str, group: str, broker_name: str, namespace: str) -> list[PoppedMessage]:
    """The messages in the answer to a pop of `topic` by `group`; raises BrokerError when it cannot be understood."""
    header = reply.header(PopMessageResponse)
    counts = read_order_count_info(header.order_count_info)
    # The topic and a retry topic may both have given offset 5 of their queue 0: handles come in the order of records.
    handles: defaultdict[tuple[int, int], deque[ReceiptHandle]] = defaultdict(deque)
    for handle in handles_of(header, broker_name):
        handles[handle.queue_id, handle.offset].append(handle)
    shown = unwrap(namespace, topic) if namespace else topic
    messages = []
    data = reply.body_bytes
    length = len(data)
    at = 0
    try:
        while at < length:
            head, body_at, _, properties_at, end = unpack_record(data, at, length)
            (size, _, body_crc, queue_id, flag, queue_offset, physical_offset, sys_flag, born_timestamp, born_host,
             store_timestamp, store_host, reconsume_times, prepared, body_length) = head  # fmt: skip
            handle = handles[queue_id, queue_offset].popleft()
            if handle.is_orderly:
                of_queue = counts.get(str(queue_id), reconsume_times)
                reconsume_times = counts.get(f"qo{queue_id}%{queue_offset}", of_queue)
            messages.append(
                PoppedMessage(
                    shown,
                    MessageQueue(handle.source(topic, group), broker_name, queue_id),
                    queue_offset,
                    physical_offset,
                    data[body_at : body_at + body_length],
                    data[properties_at:end].decode(),
                    sys_flag,
                    flag,
                    born_timestamp,
                    born_host,
                    store_timestamp,
                    store_host,
                    reconsume_times,
                    prepared,
                    body_crc,
                    size,
                    0,
                    0,
                    wire_topic=topic,
                    receipt_handle=handle,
                )
            )
            at = end
    except (CorruptRecord, UnicodeDecodeError, IndexError) as error:
        reason = str(error) if not isinstance(error, IndexError) else f"no handle for the record at {at}"
        raise BrokerError(f"the broker {broker_name} answered a pop that cannot be read: {reason}") from None
    return messages
