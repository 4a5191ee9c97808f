"""When a consumer stops pulling a queue because its callbacks do not keep up."""

from __future__ import annotations

from dataclasses import dataclass

from downrange.client.consumer.config import OFF, ConsumerConfig
from downrange.client.consumer.process_queue import ProcessQueue


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much of one queue may be held in memory; `max_span` is None where ordered consumption bounds the span."""

    max_messages: int
    max_bytes: int
    max_span: int | None


def queue_limits(config: ConsumerConfig, queues_of_topic: int) -> QueueLimits:
    """The limits of each of so many queues of one topic. A limit of the topic is divided among them."""
    messages, size = config.pull_threshold_for_queue, config.pull_threshold_size_for_queue
    if config.pull_threshold_for_topic != OFF:
        messages = max(1, config.pull_threshold_for_topic // max(1, queues_of_topic))
    if config.pull_threshold_size_for_topic != OFF:
        size = max(1, config.pull_threshold_size_for_topic // max(1, queues_of_topic))
    return QueueLimits(messages, size, None if config.orderly else config.consume_concurrently_max_span)


def reason_to_wait(queue: ProcessQueue, limits: QueueLimits) -> str | None:
    """Why nothing more should be pulled for now; None when it may."""
    if queue.message_count > limits.max_messages:
        return f"{queue.message_count} messages in memory, more than {limits.max_messages}"
    if queue.byte_count > limits.max_bytes:
        return f"{queue.byte_count} bytes in memory, more than {limits.max_bytes}"
    if limits.max_span is not None and queue.span > limits.max_span:
        return f"messages over a span of {queue.span} in memory, more than {limits.max_span}"
    return None
