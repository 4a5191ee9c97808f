"""Requests about messages that were popped: acknowledge, change the invisible time, make a dead letter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from downrange.client.consumer.pop.messages import PoppedMessage
from downrange.client.consumer.retry import DEAD_LETTER, send_back_request
from downrange.protocol.bodies.body import encode_body
from downrange.protocol.bodies.pop import (
    AckMessageRequest,
    BatchAck,
    BatchAckMessageBody,
    ChangeInvisibleTimeRequest,
    ReceiptHandle,
    encode_bits,
)
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request

MOST_BITS: Final = 8192
"""How far a message that is acknowledged with others may be behind the first of its pop."""


def ack_request(message: PoppedMessage, group: str) -> Command:
    handle = message.receipt_handle
    header = AckMessageRequest(
        consumer_group=group,
        topic=message.queue.topic,
        queue_id=handle.queue_id,
        extra_info=str(handle),
        offset=handle.offset,
    )
    return request(RequestCode.ACK_MESSAGE, header)


def batch_ack_request(messages: Iterable[PoppedMessage], group: str, broker_name: str) -> Command:
    """One request for messages of one broker (200151), whatever their topics are."""
    pops: dict[tuple[str, ReceiptHandle], list[int]] = {}
    for message in messages:
        handle = message.receipt_handle
        pops.setdefault((message.wire_topic, handle._replace(offset=0)), []).append(handle.offset)
    acks = tuple(
        BatchAck(
            consumer_group=group,
            topic=topic,
            retry=str(handle.retry_flag),
            start_offset=handle.start_offset,
            queue_id=handle.queue_id,
            revive_queue_id=handle.revive_queue,
            pop_time=handle.pop_time,
            invisible_time=handle.invisible_time,
            bits=encode_bits(offsets, handle.start_offset),
        )
        for (topic, handle), offsets in pops.items()
    )
    return request(
        RequestCode.BATCH_ACK_MESSAGE, body=encode_body(BatchAckMessageBody(broker_name=broker_name, acks=acks))
    )


def fits_a_batch(message: PoppedMessage) -> bool:
    handle = message.receipt_handle
    return 0 <= handle.offset - handle.start_offset < MOST_BITS


def change_request(message: PoppedMessage, group: str, invisible_millis: int) -> Command:
    handle = message.receipt_handle
    header = ChangeInvisibleTimeRequest(
        consumer_group=group,
        topic=message.queue.topic,
        queue_id=handle.queue_id,
        extra_info=str(handle),
        offset=handle.offset,
        invisible_time=invisible_millis,
    )
    return request(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, header)


def dead_letter_request(message: PoppedMessage, group: str) -> Command:
    """Have the broker copy the message to the dead letters of the group; the lease goes on until it is acknowledged."""
    return send_back_request(message, group, DEAD_LETTER, 0)
