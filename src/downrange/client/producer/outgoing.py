"""Messages before they go out: the rules they must keep, and the requests they become.

MessageError
├── InvalidGroup        blank, too long, bad characters, or a name RocketMQ reserves
├── InvalidTopic        blank, too long, bad characters
├── ForbiddenTopic      belongs to the broker; nothing may be sent to it
├── InvalidBody         not bytes
│   ├── BodyMissing     None or empty
│   └── BodyTooLarge    larger than max_message_size
├── InvalidProperty     reserved name, separator inside, not text, or too much in all
├── InvalidDelayLevel   negative
├── InvalidDeliveryTime no time, without a time zone, negative, or given twice
├── InvalidHandle       not the recall handle of a message
└── InvalidBatch        empty, several topics, delayed messages, a retry topic, or different wait flags
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

import msgspec

from downrange.client.compression import Compression, compress
from downrange.client.config import ProducerConfig
from downrange.client.producer.send_result import Expected
from downrange.client.unique_id import IdMonth
from downrange.compiled import accelerated_if_usual
from downrange.model import properties as names
from downrange.model.errors import MessageError
from downrange.model.message import Message, MessageQueue
from downrange.model.topics import RETRY_PREFIX, SEND_FORBIDDEN_TOPICS, check_group_name, check_topic_name
from downrange.protocol.bodies.send import encode_entry
from downrange.protocol.bodies.send_template import LONGEST_FRAME, encode_send
from downrange.protocol.codes import RequestCode

log = logging.getLogger(__name__)

DEFAULT_PRODUCER_GROUP: Final = "DEFAULT_PRODUCER"
DEFAULT_CONSUMER_GROUP: Final = "DEFAULT_CONSUMER"
SEND: Final = int(RequestCode.SEND_MESSAGE_V2)
_USUAL_LEVELS: Final = 18
_told_levels: set[int] = set()
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LONGEST_SECONDS: Final = 2**63 // 1000
_SEND_BATCH: Final = int(RequestCode.SEND_BATCH_MESSAGE)


class InvalidGroup(MessageError):
    """The name of a group is empty, too long, reserved, or has characters that RocketMQ does not allow."""


class InvalidTopic(MessageError):
    """The name of a topic is empty, too long, or has characters that RocketMQ does not allow."""


class ForbiddenTopic(MessageError):
    """Only brokers send to this topic."""


class InvalidBody(MessageError):
    """The body of a message cannot be sent."""


class BodyMissing(InvalidBody):
    """The body is empty."""


class BodyTooLarge(InvalidBody):
    """The body is longer than max_message_size."""


class InvalidProperty(MessageError):
    """A property is reserved, empty, too long, or has a character that separates properties."""


class InvalidDelayLevel(MessageError):
    """The delay level is negative."""


class InvalidDeliveryTime(MessageError):
    """The time of delivery is no time, or is given twice."""


class InvalidHandle(MessageError):
    """This is no handle with which a message can be recalled."""


class InvalidBatch(MessageError):
    """These messages cannot be sent as one batch."""


class Outgoing(msgspec.Struct, frozen=True, gc=False):
    """The messages of one request, the same for every attempt to send it. `topic` has its namespace, as on the wire."""

    code: int
    topic: str
    body: bytes
    sys_flag: int
    flag: int
    properties: str
    message_ids: tuple[str, ...]
    messages: Sequence[Message]
    born_timestamp: int


class Target(NamedTuple):
    """A queue that a request may go to: the address of its broker, and the fixed parts of the request's frame."""

    queue: MessageQueue
    address: str | None
    pieces: tuple[bytes, ...]


class OutgoingRules(NamedTuple):
    """How one producer makes requests of messages. The compiled steps read the fields by position, up to `last`."""

    message_type: type[Message]
    outgoing_type: type[Outgoing]
    code: int
    batch_code: int
    max_message_size: int
    compress_over_bytes: int
    reserved: frozenset[str]
    last: str
    """The properties behind all others, as text: the namespace."""
    longest_frame: int
    compression: Compression
    compression_level: int

    @classmethod
    def of(cls, config: ProducerConfig) -> OutgoingRules:
        return cls(
            Message,
            Outgoing,
            SEND,
            _SEND_BATCH,
            config.max_message_size,
            config.compress_over_bytes,
            names.RESERVED,
            f"{names.INSTANCE_ID}\x01{config.namespace}\x02" if config.namespace else "",
            LONGEST_FRAME,
            config.compression,
            config.compression_level,
        )


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


@accelerated_if_usual
def make_outgoing(message: Message, topic: str, stem: str, number: int, now: int, rules: OutgoingRules) -> Outgoing:
    """The request of one message that is born now; raises MessageError. `topic` was checked, and has its namespace.

    The message's unique id is `stem` and the last four hex digits of `number`.
    """
    message_id = f"{stem}{number & 0xFFFF:04X}"
    body = message.body
    if type(body) is not bytes or not 0 < len(body) <= rules.max_message_size:
        check_body(body, rules.max_message_size)
    properties = properties_text(message, message_id) + rules.last
    sys_flag = 0
    if len(body) >= rules.compress_over_bytes:
        body, sys_flag = compress(body, rules.compression, rules.compression_level)
    return Outgoing(SEND, topic, body, sys_flag, message.flag, properties, (message_id,), (message,), now)


@accelerated_if_usual
def make_send(
    message: Message, topic: str, month: IdMonth, nanoseconds: int, rules: OutgoingRules, target: Target, opaque: int
) -> tuple[Outgoing, bytes, Expected]:
    """The request of one message that is born now, its frame, and what is known of its result; raises MessageError.

    Raises LocalProtocolError when the frame would be too large.
    """
    now = nanoseconds // 1_000_000
    ready = make_outgoing(message, topic, month.stem(now), month.next_number(), now, rules)
    queue = target.queue
    frame = encode_send(
        target.pieces,
        opaque,
        queue.queue_id,
        ready.sys_flag,
        now,
        ready.flag,
        ready.properties,
        ready.body,
        rules.longest_frame,
    )
    return ready, frame, (ready.message_ids[0], message.topic, queue)


@accelerated_if_usual
def make_batch(
    messages: tuple[Message, ...],
    topic: str,
    wire_topic: str,
    stem: str,
    next_number: Callable[[], int],
    now: int,
    rules: OutgoingRules,
) -> Sequence[Outgoing]:
    """As few requests as the size of the messages allows, in their order; raises MessageError."""
    check_batch(messages)
    return list(batches(messages, wire_topic, lambda: f"{stem}{next_number() & 0xFFFF:04X}", now, rules))


def batches(
    messages: tuple[Message, ...], topic: str, next_id: Callable[[], str], now: int, rules: OutgoingRules
) -> Iterator[Outgoing]:
    """Requests of messages that `check_batch` found right, in their order; `next_id` gives the id of each."""
    properties = f"{names.WAIT}\x01{'true' if messages[0].wait_store_msg_ok else 'false'}\x02{rules.last}"
    entries: list[bytes] = []
    ids: list[str] = []
    members: list[Message] = []
    size = 0
    most = rules.max_message_size

    def request() -> Outgoing:
        return Outgoing(_SEND_BATCH, topic, b"".join(entries), 0, 0, properties, tuple(ids), tuple(members), now)

    for message in messages:
        check_body(message.body, most)
        message_id = next_id()
        entry = encode_entry(message.flag, message.body, properties_text(message, message_id).encode())
        length = len(entry)
        if entries and size + length > most:
            yield request()
            entries, ids, members, size = [], [], [], 0
        if length > most:
            raise BodyTooLarge(
                f"a message of {length} bytes with its properties does not fit a batch of {most}: send it alone"
            )
        entries.append(entry)
        ids.append(message_id)
        members.append(message)
        size += length
    yield request()


def check_batch(messages: Sequence[Message]) -> None:
    """Raise InvalidBatch for messages that cannot be sent in one request."""
    if not messages:
        raise InvalidBatch("a batch without messages")
    topic = messages[0].topic
    for message in messages:
        if message.topic != topic:
            raise InvalidBatch(f"a batch has one topic; this one has {topic} and {message.topic}")
        if message.is_delayed:
            raise InvalidBatch("delayed messages cannot be sent in a batch: send each alone")
        if message.wait_store_msg_ok != messages[0].wait_store_msg_ok:
            raise InvalidBatch("the messages of a batch must agree on wait_store_msg_ok")
    if topic.startswith(RETRY_PREFIX):
        raise InvalidBatch(f"batches cannot be sent to a retry topic: {topic}")


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
        if message.delay_level > _USUAL_LEVELS and message.delay_level not in _told_levels:
            _told_levels.add(message.delay_level)
            log.warning(
                "delay level %d: brokers have %d levels unless messageDelayLevel names more; the last, of 2 h, counts",
                message.delay_level,
                _USUAL_LEVELS,
            )
        text += f"DELAY\x01{message.delay_level}\x02"
    if message.deliver_at is not None or message.deliver_after is not None:
        text += _delivery_time(message)
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


def _delivery_time(message: Message) -> str:
    """The property that says when a timer message is due; raises InvalidDeliveryTime."""
    at, after = message.deliver_at, message.deliver_after
    if at is not None and (after is not None or message.delay_level):
        raise InvalidDeliveryTime("give only one of deliver_at, deliver_after and delay_level")
    if after is not None:
        if message.delay_level:
            raise InvalidDeliveryTime("give only one of deliver_at, deliver_after and delay_level")
        seconds = after.total_seconds() if isinstance(after, timedelta) else after
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < _LONGEST_SECONDS:
            raise InvalidDeliveryTime(f"deliver_after is {after!r}; give seconds or a timedelta that is not negative")
        return f"{names.TIMER_DELAY_MS}\x01{round(seconds * 1000)}\x02"
    if isinstance(at, datetime):
        if at.tzinfo is None:
            raise InvalidDeliveryTime(f"deliver_at is {at!r}: give it a time zone, such as datetime.UTC")
        at = (at - _EPOCH) // timedelta(milliseconds=1)
    if isinstance(at, bool) or not isinstance(at, int) or not 0 <= at < _LONGEST_SECONDS * 1000:
        raise InvalidDeliveryTime(f"deliver_at is {at!r}; give a datetime, or milliseconds since 1970")
    return f"{names.TIMER_DELIVER_MS}\x01{at}\x02"


def _checked(what: str, value: str) -> str:
    if not isinstance(value, str):
        raise InvalidProperty(f"{what} is not a text but {type(value).__name__}: {value!r}")
    if "\x01" in value or "\x02" in value:
        raise InvalidProperty(f"{what} holds one of the separators \\x01 and \\x02: {value!r}")
    return value
