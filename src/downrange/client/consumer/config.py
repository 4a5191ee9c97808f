"""How a push consumer consumes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from downrange.client.consumer.allocation import AllocationStrategy, Averagely
from downrange.client.consumer.offsets import LOCAL_DIRECTORY, PERSIST_SECONDS
from downrange.client.consumer.rebalance import REBALANCE_SECONDS
from downrange.model.topics import TRACE_TOPIC, check_topic_name
from downrange.protocol.bodies.groups import ConsumeFromWhere, MessageModel
from downrange.protocol.bodies.pop import MOST_MESSAGES
from downrange.settings import ConfigError

OFF: Final = -1
CONCURRENT_RECONSUME_TIMES: Final = 16
UNLIMITED_RECONSUME_TIMES: Final = 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class ConsumerConfig:
    """Settings of one consumer. Defaults are those of RocketMQ 4.9; names are its names, in seconds and bytes."""

    message_model: MessageModel = MessageModel.CLUSTERING
    """Whether the members of the group share the messages, or each gets all of them."""
    orderly: bool = False
    """One message of a queue at a time, in order, and never two consumers at one queue."""
    consume_from_where: ConsumeFromWhere = ConsumeFromWhere.LAST_OFFSET
    """Where a group begins that has committed nothing. On a young queue brokers let it begin at the first message."""
    consume_timestamp: int | None = None
    """Milliseconds since 1970, for ConsumeFromWhere.TIMESTAMP; half an hour before the start unless given."""
    allocation: AllocationStrategy = field(default_factory=Averagely)
    """How the members share the queues. All members of a group must have the same strategy."""
    client_rebalance: bool = True
    """Share the queues out here. False: brokers do, and they say whether the group pulls a topic or pops it. Where an
    operator set the mode POP (`downrange group set-consume-mode`), messages are leased. [clientRebalance]"""
    pop_invisible_seconds: float = 60.0
    """POP: how long a message is leased, from 5 to 300; leases are renewed while the callback works."""
    pop_batch_nums: int = 32
    """POP: how many messages one pop asks for, from 1 to 32."""
    pop_threshold_for_queue: int = 96
    """POP: popping rests while more messages than this of one assigned queue wait or are being consumed."""
    consume_threads: int = 20
    """How many callbacks may run at the same time."""
    consume_message_batch_max_size: int = 1
    """How many messages one call of a batch callback gets at most."""
    pull_batch_size: int = 32
    """How many messages one pull asks for."""
    pull_interval_seconds: float = 0.0
    """Pause between two pulls of a queue."""
    pull_threshold_for_queue: int = 1000
    """Pulling pauses while more messages of a queue than this wait or are being consumed."""
    pull_threshold_size_for_queue: int = 100 * 1024 * 1024
    """How many bytes of messages of one queue may be held."""
    pull_threshold_for_topic: int = OFF
    """How many messages of one topic may be held, divided evenly among its queues; -1: no limit."""
    pull_threshold_size_for_topic: int = OFF
    """As pull_threshold_size_for_queue, for all queues of a topic together."""
    consume_concurrently_max_span: int = 2000
    """How far the newest message may be ahead of the oldest unfinished one."""
    max_reconsume_times: int = OFF
    """Deliveries after the first before a message is a dead letter; -1: 16, and without end for orderly consumers."""
    consume_timeout_seconds: float = 900.0
    """A message that is being consumed for longer is sent back to the broker, and delivered again."""
    suspend_current_queue_seconds: float = 1.0
    """How long an orderly queue rests after a failure, from 0.01 to 30."""
    broker_suspend_seconds: float = 15.0
    """How long a broker may hold a pull until there is a message. [brokerSuspendMaxTimeMillis]"""
    pull_timeout_seconds: float = 30.0
    """The longest wait for the answer to a pull."""
    pull_delay_when_exception_seconds: float = 1.0
    """Pause after a pull that failed."""
    local_retry_seconds: float = 5.0
    """After so many seconds a failed message is consumed here again, if it could neither be sent back nor sent anew."""
    persist_consumer_offset_seconds: float = PERSIST_SECONDS
    """Pause between two commits of offsets."""
    rebalance_seconds: float = REBALANCE_SECONDS
    """Pause between two looks at who shares the queues."""
    lock_renewal_seconds: float = 20.0
    """Pause between two renewals of the locks of an orderly consumer."""
    lock_lives_seconds: float = 30.0
    """How long an orderly consumer trusts a lock since it was last granted; the broker keeps it twice as long."""
    close_timeout_seconds: float = 10.0
    """How long `close` waits for callbacks that are running."""
    namespace: str = ""
    """Put before every topic and group, so that several users share a cluster."""
    trace: bool = False
    """Report every message consumed to the trace topic, before and after its callback."""
    trace_topic: str = TRACE_TOPIC
    """The topic for traces."""
    instance_name: str = "DEFAULT"
    """Part of the client id of a broadcasting consumer, by which it finds its offset file again."""
    local_offset_store_dir: Path = field(default_factory=lambda: Path.home() / LOCAL_DIRECTORY)
    """Directory for the offsets of broadcasting consumers. [rocketmq.client.localOffsetStoreDir]"""

    def __post_init__(self) -> None:
        positive = (
            "consume_threads",
            "consume_message_batch_max_size",
            "pop_threshold_for_queue",
            "pull_batch_size",
            "pull_threshold_for_queue",
            "pull_threshold_size_for_queue",
            "consume_concurrently_max_span",
            "consume_timeout_seconds",
            "broker_suspend_seconds",
            "pull_delay_when_exception_seconds",
            "local_retry_seconds",
            "persist_consumer_offset_seconds",
            "rebalance_seconds",
            "lock_renewal_seconds",
        )
        for name in positive:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be positive")
        for name in ("pull_threshold_for_topic", "pull_threshold_size_for_topic", "max_reconsume_times"):
            value = getattr(self, name)
            if value < 0 and value != OFF:
                raise ConfigError(f"{name} is {value}; it must not be negative, or -1 for the default")
        for name, least, most in (("pop_invisible_seconds", 5, 300), ("pop_batch_nums", 1, MOST_MESSAGES)):
            if not least <= getattr(self, name) <= most:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be from {least} to {most}")
        if self.pull_interval_seconds < 0:
            raise ConfigError(f"pull_interval_seconds is {self.pull_interval_seconds}; it must not be negative")
        if not 0.01 <= self.suspend_current_queue_seconds <= 30:
            raise ConfigError(
                f"suspend_current_queue_seconds is {self.suspend_current_queue_seconds}; it must be from 0.01 to 30"
            )
        if self.pull_timeout_seconds <= self.broker_suspend_seconds:
            raise ConfigError(
                f"pull_timeout_seconds is {self.pull_timeout_seconds:g}; it must be longer than the "
                f"{self.broker_suspend_seconds:g} s a broker may hold a pull"
            )
        if self.lock_renewal_seconds >= self.lock_lives_seconds:
            raise ConfigError("lock_renewal_seconds must be shorter than lock_lives_seconds")
        check_topic_name(self.trace_topic)

    @property
    def is_broadcasting(self) -> bool:
        """Whether every member of the group gets every message."""
        return self.message_model is MessageModel.BROADCASTING

    @property
    def reconsume_limit(self) -> int:
        """After how many further deliveries a message is a dead letter."""
        if self.max_reconsume_times != OFF:
            return self.max_reconsume_times
        return UNLIMITED_RECONSUME_TIMES if self.orderly else CONCURRENT_RECONSUME_TIMES
