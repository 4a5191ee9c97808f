"""How a lite pull consumer consumes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from downrange.client.consumer.allocation import AllocationStrategy, Averagely
from downrange.client.consumer.offsets import LOCAL_DIRECTORY, PERSIST_SECONDS
from downrange.client.consumer.rebalance import REBALANCE_SECONDS
from downrange.model.topics import TRACE_TOPIC, check_topic_name
from downrange.protocol.bodies.groups import ConsumeFromWhere, MessageModel
from downrange.settings import ConfigError

__all__ = ["ConsumeFromWhere", "LitePullConfig", "MessageModel"]


@dataclass(frozen=True, slots=True)
class LitePullConfig:
    """Settings of one consumer. Defaults are those of RocketMQ 4.9; names are its names, in seconds and bytes."""

    auto_commit: bool = True
    """Commit the messages of a `poll` with the next `poll`, which shows that the user is through with them."""
    auto_commit_interval_seconds: float = PERSIST_SECONDS
    """Pause between two commits of offsets."""
    message_model: MessageModel = MessageModel.CLUSTERING
    """Whether members share the messages or each get all."""
    consume_from_where: ConsumeFromWhere = ConsumeFromWhere.LAST_OFFSET
    """Where a group begins that has committed nothing. On a young queue brokers let it begin at the first message."""
    consume_timestamp: int | None = None
    """Milliseconds since 1970, for ConsumeFromWhere.TIMESTAMP; half an hour before the start unless given."""
    allocation: AllocationStrategy = field(default_factory=Averagely)
    """How the members share the queues. All members of a group must have the same strategy."""
    pull_batch_size: int = 10
    """How many messages one pull asks for, and one `poll` hands out at most."""
    poll_timeout_seconds: float = 5.0
    """The longest wait of a `poll` that names none."""
    pull_threshold_for_queue: int = 1000
    """Fetching a queue rests while more messages of it than this wait for `poll`."""
    pull_threshold_size_for_queue: int = 100 * 1024 * 1024
    """Fetching a queue rests while more bytes of it than this wait for `poll`."""
    consume_max_span: int = 2000
    """How far the newest message that waits may be ahead of the oldest."""
    pull_threshold_for_all: int = 10_000
    """Fetching rests while more messages of all queues together than this wait."""
    broker_suspend_seconds: float = 20.0
    """How long a broker may hold a pull until there is a message. [brokerSuspendMaxTimeMillis]"""
    pull_delay_when_exception_seconds: float = 1.0
    """Pause after a pull that failed."""
    rebalance_seconds: float = REBALANCE_SECONDS
    """Pause between two looks at who shares the queues."""
    namespace: str = ""
    """Put before every topic and group, so that several users share a cluster."""
    trace: bool = False
    """Report every message handed out to the trace topic, when it is handed out."""
    trace_topic: str = TRACE_TOPIC
    """The topic for traces."""
    instance_name: str = "DEFAULT"
    """Part of the client id of a broadcasting consumer, by which it finds its offset file again."""
    local_offset_store_dir: Path = field(default_factory=lambda: Path.home() / LOCAL_DIRECTORY)
    """Directory for the offsets of broadcasting consumers. [rocketmq.client.localOffsetStoreDir]"""

    def __post_init__(self) -> None:
        positive = (
            "pull_batch_size",
            "pull_threshold_for_queue",
            "pull_threshold_size_for_queue",
            "consume_max_span",
            "pull_threshold_for_all",
            "broker_suspend_seconds",
            "pull_delay_when_exception_seconds",
            "rebalance_seconds",
        )
        for name in positive:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.auto_commit_interval_seconds < 1:
            raise ConfigError(
                f"auto_commit_interval_seconds is {self.auto_commit_interval_seconds:g}; it must be at least 1"
            )
        if self.poll_timeout_seconds < 0:
            raise ConfigError(f"poll_timeout_seconds is {self.poll_timeout_seconds:g}; it must not be negative")
        check_topic_name(self.trace_topic)

    @property
    def is_broadcasting(self) -> bool:
        """Whether every member of the group gets every message."""
        return self.message_model is MessageModel.BROADCASTING
