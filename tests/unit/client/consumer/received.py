"""Messages as a pull would bring them."""

from __future__ import annotations

from downrange.client.consumer.messages import ReceivedMessage
from downrange.model.message import MessageQueue, PhysicalOffset, QueueOffset
from downrange.model.message_id import pack_host

QUEUE = MessageQueue("orders", "broker-a", 0)


def message(
    offset: int,
    body: bytes = b"body",
    *,
    queue: MessageQueue = QUEUE,
    properties: str = "UNIQ_KEY\x01id\x02",
    reconsume_times: int = 0,
    sys_flag: int = 0,
) -> ReceivedMessage:
    return ReceivedMessage(
        topic=queue.topic,
        queue=queue,
        queue_offset=QueueOffset(offset),
        physical_offset=PhysicalOffset(offset * 1000),
        stored_body=body,
        properties_text=properties,
        sys_flag=sys_flag,
        flag=0,
        born_timestamp=1,
        packed_born_host=pack_host("10.0.0.9", 1),
        store_timestamp=2,
        packed_store_host=pack_host("10.0.0.1", 40911),
        reconsume_times=reconsume_times,
        prepared_transaction_offset=0,
        body_crc=0,
        store_size=200,
        min_offset=0,
        max_offset=offset + 1,
    )
