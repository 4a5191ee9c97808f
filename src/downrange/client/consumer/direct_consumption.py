"""One stored message handed to the callback because an operator asked for it (309)."""

from __future__ import annotations

from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.listener import Listener
from downrange.client.consumer.messages import received
from downrange.client.consumer.retry import verdict
from downrange.clock import Clock
from downrange.model.message import MessageQueue
from downrange.model.record import decode_record
from downrange.protocol.bodies.consumers import ConsumeMessageDirectlyResult, ConsumeResult


async def consume_directly(
    listener: Listener, config: ConsumerConfig, clock: Clock, record: bytes, broker_name: str
) -> ConsumeMessageDirectlyResult:
    """The result of the callback. The call does not count in the group's offsets and statistics."""
    stored = decode_record(record)
    queue = MessageQueue(stored.topic, broker_name, stored.queue_id)
    message = received(stored, queue, namespace=config.namespace)
    begun = clock.monotonic()
    result, remark = ConsumeResult.SUCCESS, None
    try:
        if not verdict(await listener.consume((message,)), 1).done:
            result = ConsumeResult.LATER
    except Exception as error:
        result, remark = ConsumeResult.THROW_EXCEPTION, f"{type(error).__name__}: {error}"
    return ConsumeMessageDirectlyResult(
        consume_result=result.value,
        remark=remark,
        spent_time_mills=int((clock.monotonic() - begun) * 1000),
        order=config.orderly,
        auto_commit=True,
    )
