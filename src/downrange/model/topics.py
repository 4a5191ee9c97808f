"""Topics and groups: their configuration, permissions, reserved names and naming rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntFlag
from typing import Final

from downrange.model.errors import MessageError

MAX_TOPIC_LENGTH: Final = 127
MAX_GROUP_LENGTH: Final = 255

RETRY_PREFIX: Final = "%RETRY%"
DLQ_PREFIX: Final = "%DLQ%"
SYSTEM_TOPIC_PREFIX: Final = "rmq_sys_"
SYSTEM_GROUP_PREFIX: Final = "CID_RMQ_SYS_"
REPLY_TOPIC_SUFFIX: Final = "_REPLY_TOPIC"

AUTO_CREATE_TOPIC: Final = "TBW102"
SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
BENCHMARK_TOPIC: Final = "BenchmarkTest"
HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_HALF_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
CHECK_MAX_TIME_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
SELF_TEST_TOPIC: Final = "SELF_TEST_TOPIC"
OFFSET_MOVED_TOPIC: Final = "OFFSET_MOVED_EVENT"
TIMER_TOPIC: Final = "rmq_sys_wheel_timer"
REVIVE_TOPIC_PREFIX: Final = "rmq_sys_REVIVE_LOG_"
TABLE_TOPIC: Final = "rmq_sys_TABLE_CHANGES"
"""Changes of a broker's tables, for its slaves. Not a topic of RocketMQ."""

# Topics that only the broker itself creates or deletes.
SYSTEM_TOPICS: Final = frozenset(
    {
        AUTO_CREATE_TOPIC,
        SCHEDULE_TOPIC,
        BENCHMARK_TOPIC,
        HALF_TOPIC,
        TRACE_TOPIC,
        OP_HALF_TOPIC,
        CHECK_MAX_TIME_TOPIC,
        SELF_TEST_TOPIC,
        OFFSET_MOVED_TOPIC,
    }
)
# Topics to which clients may not send.
SEND_FORBIDDEN_TOPICS: Final = frozenset(
    {
        SCHEDULE_TOPIC,
        HALF_TOPIC,
        OP_HALF_TOPIC,
        CHECK_MAX_TIME_TOPIC,
        SELF_TEST_TOPIC,
        OFFSET_MOVED_TOPIC,
        TIMER_TOPIC,
        TABLE_TOPIC,
    }
)

TOOLS_GROUP: Final = "TOOLS_CONSUMER"
TRANSACTION_GROUP: Final = "CID_RMQ_SYS_TRANS"
REVIVE_GROUP: Final = "CID_RMQ_SYS_REVIVE_GROUP"
BUILT_IN_GROUPS: Final = (
    TOOLS_GROUP,
    "FILTERSRV_CONSUMER",
    "SELF_TEST_C_GROUP",
    "CID_ONS-HTTP-PROXY",
    "CID_ONSAPI_PULL",
    "CID_ONSAPI_PERMISSION",
    "CID_ONSAPI_OWNER",
)

CUSTOMIZED: Final = "CUSTOMIZED"
EXPONENTIAL: Final = "EXPONENTIAL"
RETRY_POLICIES: Final = (CUSTOMIZED, EXPONENTIAL)

MESSAGE_TYPE: Final = "message.type"
MESSAGE_TYPES: Final = ("NORMAL", "FIFO", "DELAY", "TRANSACTION", "MIXED", "UNSPECIFIED")

_NAME_CHARACTERS: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-%|")


class Perm(IntFlag):
    """The permission bits of a topic."""

    INHERIT = 1
    WRITE = 2
    READ = 4
    PRIORITY = 8


READ_WRITE: Final = Perm.READ | Perm.WRITE


UNIT_FLAG: Final = 1
UNIT_SUB_FLAG: Final = 2
"""Bits of `topic_sys_flag`, of clusters that are divided into units."""


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """A topic on one broker. Producers use queues 0…write-1, consumers 0…read-1."""

    topic_name: str
    read_queue_nums: int = 16
    write_queue_nums: int = 16
    perm: int = int(READ_WRITE)
    topic_filter_type: str = "SINGLE_TAG"
    topic_sys_flag: int = 0
    order: bool = False
    attributes: dict[str, str] | None = None
    """Further settings of 5.x by name, as MESSAGE_TYPE; None: there are none, and 4.x is not bothered with them."""

    @property
    def message_type(self) -> str:
        """The type of the messages that the topic is for; NORMAL when it says nothing."""
        return (self.attributes or {}).get(MESSAGE_TYPE, "NORMAL")


@dataclass(frozen=True, slots=True)
class ExponentialRetryPolicy:
    """Each pause is `multiplier` times the one before, up to a maximum. In milliseconds."""

    initial: int = 5_000
    max: int = 7_200_000
    multiplier: float = 2


@dataclass(frozen=True, slots=True)
class CustomizedRetryPolicy:
    """The pauses before the second, third, … attempt, in milliseconds; the last one is for all further attempts."""

    next: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupRetryPolicy:
    """How long gRPC clients of a group wait before they try a message again."""

    type: str = CUSTOMIZED
    exponential_retry_policy: ExponentialRetryPolicy | None = None
    customized_retry_policy: CustomizedRetryPolicy | None = None


@dataclass(frozen=True, slots=True)
class SubscriptionGroupConfig:
    """A consumer group on one broker."""

    group_name: str
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    retry_queue_nums: int = 1
    retry_max_times: int = 16
    broker_id: int = 0
    which_broker_when_consume_slowly: int = 1
    notify_consumer_ids_changed_enable: bool = True
    consume_message_orderly: bool | None = None
    """Whether gRPC clients get the messages of a queue one after the other; None is no, and not sent to 4.x."""
    group_retry_policy: GroupRetryPolicy | None = None
    """The pauses between attempts of gRPC clients; None: those of RocketMQ, and not sent to 4.x."""


def changed_attributes(known: Mapping[str, str] | None, changes: Mapping[str, str]) -> dict[str, str] | None:
    """Attributes after a change: `+name` or `name` sets one, `-name` deletes one. Raises MessageError."""
    found = dict(known or {})
    for key, value in changes.items():
        name = key[1:] if key[:1] in "+-" else key
        if key.startswith("-"):
            found.pop(name, None)
            continue
        if name == MESSAGE_TYPE and value not in MESSAGE_TYPES:
            raise MessageError(f"{MESSAGE_TYPE}={value}: expected one of {', '.join(MESSAGE_TYPES)}")
        found[name] = value
    return found or None


def parse_attributes(text: str | None) -> dict[str, str]:
    """`+a=b,-c` as operators send it. Raises MessageError."""
    found = {}
    for piece in (text or "").split(","):
        if piece.strip():
            name, separator, value = piece.strip().partition("=")
            if name[:1] not in ("+", "-") or len(name) < 2 or bool(separator) != name.startswith("+"):
                raise MessageError(f"attribute {piece.strip()!r}: expected +name=value or -name")
            found[name] = value
    return found


def retry_topic(group: str) -> str:
    return RETRY_PREFIX + group


def dlq_topic(group: str) -> str:
    return DLQ_PREFIX + group


def pop_retry_topic(group: str, topic: str, *, version: int = 1) -> str:
    """Where messages of `topic` go that were popped by `group` and not acknowledged in time."""
    return f"{RETRY_PREFIX}{group}{'+' if version == 2 else '_'}{topic}"


def popped_topic(topic: str, group: str) -> str:
    """The topic that a group popped from, of the topic itself or of one of its retry topics."""
    if topic.startswith(RETRY_PREFIX):
        for separator in "+_":
            prefix = f"{RETRY_PREFIX}{group}{separator}"
            if topic.startswith(prefix) and len(topic) > len(prefix):
                return topic.removeprefix(prefix)
    return topic


def is_send_forbidden(topic: str) -> bool:
    """Whether only the broker itself may store messages in this topic."""
    return topic in SEND_FORBIDDEN_TOPICS or topic.startswith(REVIVE_TOPIC_PREFIX)


def is_system_topic(topic: str) -> bool:
    return topic in SYSTEM_TOPICS or topic.startswith(SYSTEM_TOPIC_PREFIX)


def check_topic_name(topic: str) -> None:
    """Raise MessageError with RocketMQ's words when `topic` breaks a naming rule."""
    _check_name("topic", topic, MAX_TOPIC_LENGTH)


def check_group_name(group: str) -> None:
    _check_name("group", group, MAX_GROUP_LENGTH)


def _check_name(kind: str, name: str, most: int) -> None:
    if not name.strip():
        raise MessageError(f"The specified {kind} is blank.")
    if not _NAME_CHARACTERS.issuperset(name):
        raise MessageError(f"The specified {kind} contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$")
    if len(name) > most:
        raise MessageError(f"The specified {kind} is longer than {kind} max length.")
