"""The plans of loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from downrange.protocol.codes import SerializeType
from downrange.settings import ConfigError

HEADERS: Final = {"json": SerializeType.JSON, "binary": SerializeType.ROCKETMQ}
"""The encodings of request headers, by the name on the command line."""
MAX_QUEUES: Final = 10
"""The number of a queue has one digit in every frame."""
TOPIC_DIGITS: Final = 5
"""Digits of the number at the end of the names of several topics."""
MAX_TOPICS: Final = 10**TOPIC_DIGITS - 1
SMALLEST_BODY: Final = 16
"""A body begins with the number of its message."""


@dataclass(frozen=True, slots=True)
class SendPlan:
    """Sends of one kind. Without `rate` the loop is closed: `connections` x `outstanding` frames are always under way.
    With a rate (messages a second over all connections) it is open: a frame is sent when it is due."""

    seconds: float = 5.0
    warm_up_seconds: float = 1.0
    size: int = 128
    batch: int = 1
    connections: int = 8
    outstanding: int = 32
    rate: float | None = None
    has_keys: bool = True
    header: SerializeType = SerializeType.JSON
    tags: tuple[str, ...] = ("TagA",)
    """The tags of the messages of a batch, in turn."""
    polls: bool = False
    """Wait for replies by polling instead of sleeping, which occupies one core."""
    each_alone: bool = False
    """Read and write each connection separately, even if all of them could be read and written together."""
    ring: int = 0
    """The least number of frames that are made in advance and used repeatedly."""

    def __post_init__(self) -> None:
        check_range("seconds", self.seconds, 0.01, 86_400)
        check_range("warm-up", self.warm_up_seconds, 0, 3600)
        check_range("size", self.size, SMALLEST_BODY, 4 << 20)
        check_range("batch", self.batch, 1, 4096)
        check_range("connections", self.connections, 1, 60_000)
        check_range("outstanding", self.outstanding, 1, 100_000)
        check_range("ring", self.ring, 0, 1_000_000)
        if self.size * self.batch > 4 << 20:
            raise ConfigError(f"a batch of {self.batch} x {self.size} bytes is larger than a broker takes, 4 MiB")
        if self.rate is not None:
            check_range("rate", self.rate, 0.1, 10_000_000)


@dataclass(frozen=True, slots=True)
class PullPlan:
    """Read all queues from the first message to the one that is last at the start, or for `seconds`."""

    seconds: float = 60.0
    connections: int = 4
    outstanding: int = 8
    max_messages: int = 32
    header: SerializeType = SerializeType.JSON
    tags: str = "*"
    """The tags of the wanted messages; only those are counted."""

    def __post_init__(self) -> None:
        check_range("seconds", self.seconds, 0.01, 86_400)
        check_range("connections", self.connections, 1, 10_000)
        check_range("outstanding", self.outstanding, 1, 10_000)
        check_range("messages a pull", self.max_messages, 1, 10_000)


def check_range(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{name} {value}: expected {least} to {most}")
