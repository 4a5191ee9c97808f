"""The rules for names and messages, in the order and with the words of RocketMQ's proxy. Pure."""

from __future__ import annotations

import re
from typing import Final

from downrange.model import properties as names
from downrange.model.topics import (
    MAX_GROUP_LENGTH,
    MAX_TOPIC_LENGTH,
    SYSTEM_GROUP_PREFIX,
    is_system_topic,
)
from downrange.proxy.errors import Refused
from downrange.proxy.times import millis
from downrange.proxy.wire.enums import Code, MessageType
from downrange.proxy.wire.messages import Message, Resource

MAX_BODY_BYTES: Final = 4 * 1024 * 1024
MAX_USER_PROPERTIES: Final = 128
MAX_USER_PROPERTY_BYTES: Final = 16384
MAX_MESSAGE_GROUP_BYTES: Final = 64
MAX_DELAY_MILLIS: Final = 86_400_000
MAX_RECOVERY_SECONDS: Final = 3600
MIN_INVISIBLE_MILLIS: Final = 10_000
MAX_INVISIBLE_MILLIS: Final = 43_200_000

_NAME: Final = re.compile(r"[%|a-zA-Z0-9_-]+")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_ALLOWED: Final = "^[%|a-zA-Z0-9_-]+$"
_CHECKPOINT_TOPIC: Final = "CHECKPOINT_TOPIC"

# Properties that clients must not set; they are not shown to consumers either.
RESERVED: Final = (names.RESERVED | {"EXTEND_UNIQ_INFO"}) - {
    names.SHARDING_KEY, "TRACE_CONTEXT", names.TRANSACTION_ID, names.TRANSACTION_CHECK_TIMES,
    names.CHECK_IMMUNITY_TIME_IN_SECONDS, "INNER_NUM", "INNER_BASE", names.INNER_MULTI_DISPATCH, "REDIRECT",
    "PROPERTY_FORWARD_QUEUE_ID",
}  # fmt: skip


def check_topic(topic: Resource) -> str:
    """The name of a topic that clients may use."""
    name = topic.name
    if not name.strip():
        raise Refused(Code.ILLEGAL_TOPIC, "The specified topic is blank")
    if len(name) > MAX_TOPIC_LENGTH:
        raise Refused(Code.ILLEGAL_TOPIC, f"The specified topic is longer than topic max length {MAX_TOPIC_LENGTH}.")
    if not _NAME.fullmatch(name):
        raise Refused(
            Code.ILLEGAL_TOPIC, f"The specified topic[{name}] contains illegal characters, allowing only {_ALLOWED}"
        )
    if is_system_topic(name) or name == _CHECKPOINT_TOPIC:
        raise Refused(Code.ILLEGAL_TOPIC, "cannot access system topic")
    return name


def check_group(group: Resource) -> str:
    """The name of a consumer group that clients may use."""
    name = group.name
    if not name.strip():
        raise Refused(Code.ILLEGAL_CONSUMER_GROUP, "the specified group is blank")
    if len(name) > MAX_GROUP_LENGTH:
        raise Refused(
            Code.ILLEGAL_CONSUMER_GROUP, f"the specified group is longer than group max length {MAX_GROUP_LENGTH}."
        )
    if not _NAME.fullmatch(name):
        raise Refused(
            Code.ILLEGAL_CONSUMER_GROUP,
            f"the specified group[{name}] contains illegal characters, allowing only {_ALLOWED}",
        )
    if name.startswith(SYSTEM_GROUP_PREFIX):
        raise Refused(Code.ILLEGAL_CONSUMER_GROUP, "cannot use system consumer group")
    return name


def check_message(message: Message, now: int) -> None:
    """A message that a client sends, without its topic."""
    system = message.system_properties
    if not message.body:
        raise Refused(Code.MESSAGE_BODY_EMPTY, "message body cannot be empty")
    if len(message.body) > MAX_BODY_BYTES:
        raise Refused(Code.MESSAGE_BODY_TOO_LARGE, f"message body cannot exceed the max {MAX_BODY_BYTES}")
    size = _check_user_properties(message)
    if system.tag:
        _check_text(system.tag, "tag", Code.ILLEGAL_MESSAGE_TAG)
    for key in system.keys:
        if key:
            _check_text(key, "key", Code.ILLEGAL_MESSAGE_KEY)
            size += len(key.encode())
    if size + len(system.tag.encode()) > MAX_USER_PROPERTY_BYTES:
        raise Refused(
            Code.MESSAGE_PROPERTIES_TOO_LARGE,
            f"the total size of user property is too large, max is {MAX_USER_PROPERTY_BYTES}",
        )
    if not system.message_id.strip():
        raise Refused(Code.ILLEGAL_MESSAGE_ID, "message id cannot be empty")
    if _CONTROL.search(system.message_id):
        raise Refused(Code.ILLEGAL_MESSAGE_ID, "message id cannot contain control character")
    if (
        system.message_type == MessageType.TRANSACTION
        and system.orphaned_transaction_recovery_duration.seconds > MAX_RECOVERY_SECONDS
    ):
        text = f"the max transaction recovery time of message is too large, max is {MAX_RECOVERY_SECONDS}"
        raise Refused(Code.BAD_REQUEST, text)
    if system.HasField("delivery_timestamp") and millis(system.delivery_timestamp) - now > MAX_DELAY_MILLIS:
        raise Refused(
            Code.ILLEGAL_DELIVERY_TIME, f"the max delay time of message is too large, max is {MAX_DELAY_MILLIS}"
        )
    if system.message_group:
        if not system.message_group.strip():
            raise Refused(Code.ILLEGAL_MESSAGE_GROUP, "message group cannot be the char sequence of whitespace")
        if len(system.message_group.encode()) >= MAX_MESSAGE_GROUP_BYTES:
            raise Refused(Code.ILLEGAL_MESSAGE_GROUP, f"message group exceed the max size {MAX_MESSAGE_GROUP_BYTES}")
        if _CONTROL.search(system.message_group):
            raise Refused(Code.ILLEGAL_MESSAGE_GROUP, "message group cannot contain control character")
    if _CONTROL.search(system.trace_context) or _CONTROL.search(system.born_host):
        raise Refused(Code.BAD_REQUEST, "trace context and born host cannot contain control character")


def _check_user_properties(message: Message) -> int:
    """The size of the user's properties, in UTF-8."""
    found = message.user_properties
    if not found:
        return 0
    if len(found) > MAX_USER_PROPERTIES:
        raise Refused(Code.MESSAGE_PROPERTIES_TOO_LARGE, f"too many user properties, max is {MAX_USER_PROPERTIES}")
    size = 0
    for name, value in found.items():
        if name in RESERVED:
            raise Refused(Code.ILLEGAL_MESSAGE_PROPERTY_KEY, f"property is used by system: {name}")
        if _CONTROL.search(name):
            raise Refused(Code.ILLEGAL_MESSAGE_PROPERTY_KEY, "the key of property cannot contain control character")
        if _CONTROL.search(value):
            raise Refused(Code.ILLEGAL_MESSAGE_PROPERTY_KEY, "the value of property cannot contain control character")
        size += len(name.encode()) + len(value.encode())
    return size


def _check_text(text: str, what: str, code: Code) -> None:
    if not text.strip():
        raise Refused(code, f"{what} cannot be the char sequence of whitespace")
    if what == "tag" and "|" in text:
        raise Refused(code, "tag cannot contain '|'")
    if _CONTROL.search(text):
        raise Refused(code, f"{what} cannot contain control character")


def check_invisible(value: int, least: int) -> None:
    if value < least:
        raise Refused(Code.ILLEGAL_INVISIBLE_TIME, f"the invisibleTime is too small. min is {least}")
    if value > MAX_INVISIBLE_MILLIS:
        raise Refused(Code.ILLEGAL_INVISIBLE_TIME, f"the invisibleTime is too large. max is {MAX_INVISIBLE_MILLIS}")
