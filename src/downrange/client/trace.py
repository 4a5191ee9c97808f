"""Message traces: what producers and consumers report about single messages, as text in the trace topic.

Fields of an entry are separated by \\x01, entries end with \\x02; the first field is the kind:

    Pub             timestamp region group topic msgId tags keys storeHost bodyLength cost msgType offsetMsgId success
    SubBefore       timestamp region group requestId msgId retryTimes keys
    SubAfter        requestId msgId cost success keys contextCode timestamp group
    EndTransaction  timestamp region group topic msgId tags keys storeHost msgType transactionId state fromCheck

Written here, read in client/trace_reader.py. [TraceDataEncoder]
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from downrange.model.message import Message

FIELD_SEPARATOR: Final = "\x01"
ENTRY_END: Final = "\x02"
ABSENT: Final = "null"
DEFAULT_REGION: Final = "DefaultRegion"


class MessageType(IntEnum):
    """The type of a sent message, as entries number it."""

    NORMAL = 0
    HALF = 1
    COMMIT = 2
    DELAY = 3
    ORDER = 4


class ConsumeCode(IntEnum):
    """How a call of a callback ended. [ConsumeReturnType]"""

    SUCCESS = 0
    TIME_OUT = 1
    EXCEPTION = 2
    RETURN_NULL = 3
    FAILED = 4


def encode_pub(
    *,
    timestamp: int,
    region_id: str,
    group: str,
    message: Message,
    message_id: str,
    store_host: str,
    cost_millis: int,
    offset_message_id: str,
    is_half: bool = False,
) -> str:
    """The entry of one message that was sent."""
    kind = MessageType.HALF if is_half else MessageType.DELAY if message.is_delayed else MessageType.NORMAL
    return _entry(
        "Pub",
        timestamp,
        region_id,
        group,
        message.topic,
        message_id,
        message.tags,
        message.keys,
        store_host,
        len(message.body),
        cost_millis,
        int(kind),
        offset_message_id,
        "true",
    )


def encode_sub_before(
    *,
    timestamp: int,
    region_id: str | None,
    group: str,
    request_id: str,
    message_id: str,
    retry_times: int,
    keys: str | None,
) -> str:
    """The entry of one message that a callback is about to get. All messages of one call have one `request_id`."""
    return _entry("SubBefore", timestamp, region_id, group, request_id, message_id, retry_times, keys)


def encode_sub_after(
    *,
    timestamp: int,
    group: str,
    request_id: str,
    message_id: str,
    keys: str | None,
    cost_millis: int,
    success: bool,
    code: ConsumeCode,
) -> str:
    """The entry of one message a callback has had."""
    ended = "true" if success else "false"
    return _entry("SubAfter", request_id, message_id, cost_millis, ended, keys, int(code), timestamp, group)


def encode_end_transaction(
    *,
    timestamp: int,
    group: str,
    topic: str,
    message_id: str,
    tags: str | None,
    keys: str | None,
    store_host: str,
    transaction_id: str,
    state: str,
    from_check: bool,
) -> str:
    """The entry of a transaction that ended; `state` is COMMIT_MESSAGE, ROLLBACK_MESSAGE or UNKNOW."""
    return _entry(
        "EndTransaction",
        timestamp,
        DEFAULT_REGION,
        group,
        topic,
        message_id,
        tags,
        keys,
        store_host,
        int(MessageType.COMMIT),
        transaction_id,
        state,
        "true" if from_check else "false",
    )


def _entry(*fields: str | int | None) -> str:
    return FIELD_SEPARATOR.join(ABSENT if field is None or field == "" else str(field) for field in fields) + ENTRY_END
