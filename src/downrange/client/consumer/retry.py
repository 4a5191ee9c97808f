"""Messages whose callback failed: when they come again, and when they become dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from downrange.client.consumer.messages import ReceivedMessage
from downrange.model import properties as names
from downrange.model.errors import MQError
from downrange.model.message import COMPRESSION_TYPE_MASK, MessageQueue, SysFlag
from downrange.model.topics import retry_topic
from downrange.protocol.bodies.send import ConsumerSendMessageBackRequest, SendMessageRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request

INNER_PRODUCER_GROUP: Final = "CLIENT_INNER_PRODUCER"
FIRST_RETRY_LEVEL: Final = 3
DEAD_LETTER: Final = -1
SEND_BACK_TIMEOUT_SECONDS: Final = 5.0
_COMPRESSION_BITS: Final = int(SysFlag.COMPRESSED) | COMPRESSION_TYPE_MASK


class BadAnswer(MQError):
    """A callback returned something that says neither done nor later. The message is delivered again."""


@dataclass(frozen=True, slots=True)
class Later:
    """What a callback returns for a message it could not handle now: it is delivered again.

    `delay_level` 1 to 18 means after 1 s … 2 h, or what the broker's messageDelayLevel says; more than it has means its
    last. 0 lets the broker choose, a longer pause each time; -1 makes it a dead letter at once. `suspend_seconds` is
    for orderly consumers: how long the queue rests.
    """

    delay_level: int = 0
    suspend_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.delay_level < DEAD_LETTER:
            raise BadAnswer(f"delay_level is {self.delay_level}; it must be -1, 0 or a level of the broker")


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """What a batch callback returns when the first `count` messages are done and the others are for later."""

    count: int
    later: Later = Later()


Answer = Later | Acknowledged | None
_CHOSEN_BY_BROKER: Final = Later()


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many messages of a batch, from the first, are done; the others are for `later`."""

    done: int
    later: Later


def verdict(answer: object, count: int) -> Verdict:
    """What a callback's answer means for the `count` messages it got; raises BadAnswer when it means nothing."""
    match answer:
        case None:
            return Verdict(count, _CHOSEN_BY_BROKER)
        case Later():
            return Verdict(0, answer)
        case Acknowledged(done, later):
            if not 0 <= done <= count:
                raise BadAnswer(f"the callback acknowledged {done} messages of {count}")
            return Verdict(done, later)
        case _:
            raise BadAnswer(f"the callback returned {answer!r}; expected None, Later(…) or Acknowledged(…)")


def send_back_request(message: ReceivedMessage, group: str, delay_level: int, limit: int) -> Command:
    """Ask the broker that stored the message to deliver it again (36)."""
    header = ConsumerSendMessageBackRequest(
        offset=message.physical_offset,
        group=group,
        delay_level=delay_level,
        origin_msg_id=message.message_id,
        origin_topic=origin_topic(message),
        max_reconsume_times=limit,
        bname=message.broker_name,
    )
    return request(RequestCode.CONSUMER_SEND_MSG_BACK, header)


def retry_send_request(
    message: ReceivedMessage, group: str, queue: MessageQueue, *, times: int, limit: int, now_millis: int
) -> Command:
    """The message once more, as an ordinary send to the retry topic: when it cannot be sent back, or order forbids it.

    The broker makes a dead letter of one whose `times` have reached the `limit`.
    """
    properties = names.decode_properties(message.properties_text)
    properties.setdefault(names.RETRY_TOPIC, origin_topic(message))
    properties.setdefault(names.ORIGIN_MESSAGE_ID, message.message_id)
    properties[names.RECONSUME_TIME] = str(times)
    properties[names.MAX_RECONSUME_TIMES] = str(limit)
    properties[names.DELAY] = str(FIRST_RETRY_LEVEL + message.reconsume_times)
    for name in (names.TRAN_MSG, names.REAL_TOPIC, names.REAL_QID):
        properties.pop(name, None)
    header = SendMessageRequest(
        producer_group=INNER_PRODUCER_GROUP,
        topic=retry_topic(group),
        queue_id=queue.queue_id,
        sys_flag=message.sys_flag & _COMPRESSION_BITS,
        born_timestamp=now_millis,
        flag=message.flag,
        properties=names.encode_properties(properties),
        reconsume_times=times,
        max_reconsume_times=limit,
        bname=queue.broker_name,
    )
    return request(RequestCode.SEND_MESSAGE_V2, header, body=message.stored_body)


def origin_topic(message: ReceivedMessage) -> str:
    """The topic as the broker names it, of the first delivery."""
    return names.find_property(message.properties_text, names.RETRY_TOPIC) or message.queue.topic


@dataclass(frozen=True, slots=True)
class OrderlyFailure:
    """The next step for messages that an ordered callback could not handle."""

    again: Sequence[ReceivedMessage]
    """To be consumed again in place, one delivery older."""
    dead: Sequence[ReceivedMessage]
    """At their limit: to be sent to the retry topic, where the broker makes dead letters of them."""


def orderly_failure(messages: Sequence[ReceivedMessage], limit: int) -> OrderlyFailure:
    return OrderlyFailure(
        [
            message.with_reconsume_times(message.reconsume_times + 1)
            for message in messages
            if message.reconsume_times < limit
        ],
        [message for message in messages if message.reconsume_times >= limit],
    )
