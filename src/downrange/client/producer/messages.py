"""Messages before they go out: which rules they must keep, and what they become on the wire.

MessageError
├── InvalidGroup        blank, too long, bad characters, or a name RocketMQ reserves
├── InvalidTopic        blank, too long, bad characters
├── ForbiddenTopic      belongs to the broker; nothing may be sent to it
├── InvalidBody         not bytes
│   ├── BodyMissing     None or empty
│   └── BodyTooLarge    larger than max_message_size
├── InvalidProperty     reserved name, separator inside, not text, or too much in all
├── InvalidDelayLevel   negative
└── InvalidBatch        empty, several topics, delayed messages, a retry topic, or different wait flags
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from downrange.client.compression import compress
from downrange.client.config import ProducerConfig
from downrange.model import properties as names
from downrange.model.errors import MessageError
from downrange.model.message import Message
from downrange.model.topics import RETRY_PREFIX, SEND_FORBIDDEN_TOPICS, check_group_name, check_topic_name
from downrange.protocol.bodies.send import encode_entry
from downrange.protocol.codes import RequestCode

DEFAULT_PRODUCER_GROUP: Final = "DEFAULT_PRODUCER"
DEFAULT_CONSUMER_GROUP: Final = "DEFAULT_CONSUMER"
_SEPARATORS: Final = (names.NAME_VALUE_SEPARATOR, names.PROPERTY_SEPARATOR)
SEND: Final = int(RequestCode.SEND_MESSAGE_V2)
_SEND_BATCH: Final = int(RequestCode.SEND_BATCH_MESSAGE)


class InvalidGroup(MessageError):
    pass


class InvalidTopic(MessageError):
    pass


class ForbiddenTopic(MessageError):
    pass


class InvalidBody(MessageError):
    pass


class BodyMissing(InvalidBody):
    pass


class BodyTooLarge(InvalidBody):
    pass


class InvalidProperty(MessageError):
    pass


class InvalidDelayLevel(MessageError):
    pass


class InvalidBatch(MessageError):
    pass


class Outgoing(msgspec.Struct, frozen=True, gc=False):
    """One request's worth of messages, the same for every attempt to send it; `topic` as it is on the wire."""

    code: int
    topic: str
    body: bytes
    sys_flag: int
    flag: int
    properties: str
    message_ids: tuple[str, ...]
    messages: Sequence[Message]
    born_timestamp: int


def check_producer_group(group: str) -> None:
    _check_group(group, DEFAULT_PRODUCER_GROUP)


def check_consumer_group(group: str) -> None:
    _check_group(group, DEFAULT_CONSUMER_GROUP)


def _check_group(group: str, placeholder: str) -> None:
    try:
        check_group_name(group)
    except MessageError as error:
        raise InvalidGroup(str(error)) from None
    if group == placeholder:
        raise InvalidGroup(f"the group {group} is RocketMQ's placeholder: give the group a name of its own")


def check_topic(topic: str) -> None:
    if not isinstance(topic, str):
        raise InvalidTopic(f"the topic is not a text but {type(topic).__name__}")
    try:
        check_topic_name(topic)
    except MessageError as error:
        raise InvalidTopic(f"{error} topic={topic!r}") from None
    if topic in SEND_FORBIDDEN_TOPICS:
        raise ForbiddenTopic(f"the topic {topic} belongs to the broker; nothing may be sent to it")


def check_body(body: object, max_bytes: int) -> None:
    if type(body) is not bytes:
        if body is None:
            raise BodyMissing("the message has no body")
        hint = ": encode it first" if isinstance(body, str) else ""
        raise InvalidBody(f"the body is not bytes but {type(body).__name__}{hint}")
    if not body:
        raise BodyMissing("the body of the message is empty")
    if len(body) > max_bytes:
        raise BodyTooLarge(f"the body has {len(body)} bytes; max_message_size is {max_bytes}")


def outgoing(message: Message, message_id: str, config: ProducerConfig, topic: str, now: int) -> Outgoing:
    """One message ready to go, born now. The topic was checked when its route was asked for."""
    body = message.body
    if type(body) is not bytes or not 0 < len(body) <= config.max_message_size:
        check_body(body, config.max_message_size)
    properties = properties_text(message, message_id)
    if config.namespace:
        properties += f"{names.INSTANCE_ID}\x01{config.namespace}\x02"
    sys_flag = 0
    if len(body) >= config.compress_over_bytes:
        body, sys_flag = compress(body, config.compression, config.compression_level)
    return Outgoing(SEND, topic, body, sys_flag, message.flag, properties, (message_id,), (message,), now)


OutgoingRules = tuple[type[Message], type[Outgoing], int, int, int, int, frozenset[str], str]
"""What the compiled twins of `outgoing` and `batches` need to know: kinds, request codes, most bytes of a body, fewest
to be compressed, names no property may have, and what comes after the properties."""


def outgoing_rules(config: ProducerConfig) -> OutgoingRules:
    last = f"{names.INSTANCE_ID}\x01{config.namespace}\x02" if config.namespace else ""
    largest, compressed = config.max_message_size, config.compress_over_bytes
    return Message, Outgoing, SEND, _SEND_BATCH, largest, compressed, names.RESERVED, last


def batches(
    messages: Iterable[Message], next_id: Callable[[], str], config: ProducerConfig, topic: str, now: int
) -> Iterator[Outgoing]:
    """Messages of one topic as few requests as their size allows, in their order. Call `check_batch` first."""
    properties = f"{names.WAIT}\x01true\x02"
    if config.namespace:
        properties += f"{names.INSTANCE_ID}\x01{config.namespace}\x02"
    entries: list[bytes] = []
    ids: list[str] = []
    members: list[Message] = []
    size = 0

    def request() -> Outgoing:
        wait = properties if members[0].wait_store_msg_ok else properties.replace("true", "false", 1)
        return Outgoing(_SEND_BATCH, topic, b"".join(entries), 0, 0, wait, tuple(ids), tuple(members), now)

    for message in messages:
        check_body(message.body, config.max_message_size)
        message_id = next_id()
        entry = encode_entry(message.flag, message.body, properties_text(message, message_id).encode())
        length = len(entry)
        if entries and size + length > config.max_message_size:
            yield request()
            entries, ids, members, size = [], [], [], 0
        if length > config.max_message_size:
            raise BodyTooLarge(
                f"a message of {length} bytes with its properties does not fit a batch of {config.max_message_size}: "
                "send it alone"
            )
        entries.append(entry)
        ids.append(message_id)
        members.append(message)
        size += length
    if entries:
        yield request()


def check_batch(messages: Sequence[Message]) -> str:
    """The topic all messages of a batch share; raises InvalidBatch."""
    if not messages:
        raise InvalidBatch("a batch without messages")
    topic = messages[0].topic
    for message in messages:
        if message.topic != topic:
            raise InvalidBatch(f"a batch has one topic; this one has {topic} and {message.topic}")
        if message.delay_level:
            raise InvalidBatch("delayed messages cannot be sent in a batch: send each alone")
        if message.wait_store_msg_ok != messages[0].wait_store_msg_ok:
            raise InvalidBatch("the messages of a batch must agree on wait_store_msg_ok")
    if topic.startswith(RETRY_PREFIX):
        raise InvalidBatch(f"batches cannot be sent to a retry topic: {topic}")
    return topic


def properties_text(message: Message, message_id: str) -> str:
    """Everything that travels with a message, in RocketMQ's text form; raises InvalidProperty."""
    text = f"UNIQ_KEY\x01{message_id}\x02WAIT\x01{'true' if message.wait_store_msg_ok else 'false'}\x02"
    if message.tags:
        text += f"TAGS\x01{_checked(names.TAGS, message.tags)}\x02"
    if message.keys:
        text += f"KEYS\x01{_checked(names.KEYS, message.keys)}\x02"
    if message.delay_level:
        if message.delay_level < 0:
            raise InvalidDelayLevel(f"the delay level is {message.delay_level}; 1 to 18 delay, 0 does not")
        text += f"DELAY\x01{message.delay_level}\x02"
    if message.sharding_key:
        text += f"{names.SHARDING_KEY}\x01{_checked(names.SHARDING_KEY, message.sharding_key)}\x02"
    if message.properties:
        if reserved := names.RESERVED.intersection(message.properties):
            raise InvalidProperty(f"the property name {min(reserved)} is reserved")
        for name, value in message.properties.items():
            if not name or not value:
                raise InvalidProperty(f"a property needs a name and a value: {name!r}={value!r}")
            text += f"{_checked('a property name', name)}\x01{_checked(name, value)}\x02"
    # A character takes at most three bytes for each UTF-16 unit Java counts; only long texts need a closer look.
    if len(text) * 4 > names.MAX_PROPERTIES_BYTES and len(text.encode()) > names.MAX_PROPERTIES_BYTES:
        raise InvalidProperty(f"properties of {len(text.encode())} bytes; at most {names.MAX_PROPERTIES_BYTES} can be")
    return text


def _checked(what: str, value: str) -> str:
    if not isinstance(value, str):
        raise InvalidProperty(f"{what} is not a text but {type(value).__name__}: {value!r}")
    if "\x01" in value or "\x02" in value:
        raise InvalidProperty(f"{what} holds one of the separators \\x01 and \\x02: {value!r}")
    return value
