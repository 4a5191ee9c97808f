"""How a simple consumer consumes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from downrange.model.topics import TRACE_TOPIC, check_topic_name
from downrange.protocol.bodies.groups import ConsumeFromWhere, MessageModel
from downrange.settings import ConfigError

__all__ = ["ConsumeFromWhere", "SimpleConsumerConfig"]


@dataclass(frozen=True, slots=True)
class SimpleConsumerConfig:
    """Settings of one consumer. Names are those of the rocketmq-clients where these have one, in seconds."""

    await_duration: float | timedelta = 20.0
    """How long `receive` waits for a message, unless it is told."""
    consume_from_where: ConsumeFromWhere = ConsumeFromWhere.LAST_OFFSET
    """Where a group begins that has received nothing: LAST_OFFSET (the newest message) or FIRST_OFFSET."""
    retry_seconds: float = 10.0
    """How long an acknowledgement is repeated while its broker is away; then `ack` raises."""
    namespace: str = ""
    """Put before every topic and group, so that several users share a cluster."""

    trace: bool = False
    """Report every message to the trace topic, when it is received and when it is acknowledged."""
    trace_topic: str = TRACE_TOPIC
    """The topic for traces."""

    def __post_init__(self) -> None:
        check_topic_name(self.trace_topic)
        seconds_of("await_duration", self.await_duration)
        if self.consume_from_where is ConsumeFromWhere.TIMESTAMP:
            raise ConfigError("consume_from_where is TIMESTAMP; a simple consumer takes FIRST_OFFSET or LAST_OFFSET")
        if self.retry_seconds < 0:
            raise ConfigError(f"retry_seconds is {self.retry_seconds}; it must not be negative")

    @property
    def message_model(self) -> MessageModel:
        """Always CLUSTERING: members share the messages that brokers lease."""
        return MessageModel.CLUSTERING


def seconds_of(name: str, duration: float | timedelta) -> float:
    """A duration in seconds; raises ConfigError when it is none."""
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 2**31:
        raise ConfigError(f"{name} is {duration!r}; give seconds or a timedelta that is not negative")
    return seconds
