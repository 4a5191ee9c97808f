"""Message properties: reserved names, and the text form `name \\x01 value \\x02 …` that travels and is stored.

The text form means what Java's decoder reads: pieces between \\x02, each of a name up to its first \\x01 and a value
behind that. A piece without a name, without \\x01 or with an empty value is dropped; of several values of one name the
last counts. Everything that reads properties uses the functions at the end of this file, in C `_compiled/properties.h`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import AnyStr, Final

NAME_VALUE_SEPARATOR: Final = "\x01"
PROPERTY_SEPARATOR: Final = "\x02"
KEY_SEPARATOR: Final = " "
MAX_PROPERTIES_BYTES: Final = 32767

KEYS: Final = "KEYS"
TAGS: Final = "TAGS"
WAIT: Final = "WAIT"
DELAY: Final = "DELAY"
RETRY_TOPIC: Final = "RETRY_TOPIC"
REAL_TOPIC: Final = "REAL_TOPIC"
REAL_QID: Final = "REAL_QID"
TRAN_MSG: Final = "TRAN_MSG"
PGROUP: Final = "PGROUP"
MIN_OFFSET: Final = "MIN_OFFSET"
MAX_OFFSET: Final = "MAX_OFFSET"
ORIGIN_MESSAGE_ID: Final = "ORIGIN_MESSAGE_ID"
RECONSUME_TIME: Final = "RECONSUME_TIME"
MAX_RECONSUME_TIMES: Final = "MAX_RECONSUME_TIMES"
UNIQ_KEY: Final = "UNIQ_KEY"
CONSUME_START_TIME: Final = "CONSUME_START_TIME"
MSG_REGION: Final = "MSG_REGION"
TRACE_ON: Final = "TRACE_ON"
CLUSTER: Final = "CLUSTER"
INSTANCE_ID: Final = "INSTANCE_ID"
CORRELATION_ID: Final = "CORRELATION_ID"
REPLY_TO_CLIENT: Final = "REPLY_TO_CLIENT"
TTL: Final = "TTL"
MSG_TYPE: Final = "MSG_TYPE"
ARRIVE_TIME: Final = "ARRIVE_TIME"
PUSH_REPLY_TIME: Final = "PUSH_REPLY_TIME"
TRANSACTION_CHECK_TIMES: Final = "TRANSACTION_CHECK_TIMES"
CHECK_IMMUNITY_TIME_IN_SECONDS: Final = "CHECK_IMMUNITY_TIME_IN_SECONDS"
TRAN_PREPARED_QUEUE_OFFSET: Final = "TRAN_PREPARED_QUEUE_OFFSET"
TRANSACTION_ID: Final = "__transactionId__"
INNER_MULTI_DISPATCH: Final = "INNER_MULTI_DISPATCH"
INNER_MULTI_QUEUE_OFFSET: Final = "INNER_MULTI_QUEUE_OFFSET"
SHARDING_KEY: Final = "__SHARDINGKEY"
POP_CK: Final = "POP_CK"
FIRST_POP_TIME: Final = "1ST_POP_TIME"
TIMER_DELIVER_MS: Final = "TIMER_DELIVER_MS"
TIMER_DELAY_SEC: Final = "TIMER_DELAY_SEC"
TIMER_DELAY_MS: Final = "TIMER_DELAY_MS"
TIMER_PROPERTIES: Final = (TIMER_DELAY_SEC, TIMER_DELAY_MS, TIMER_DELIVER_MS)
TIMER_OUT_MS: Final = "TIMER_OUT_MS"
TIMER_ENQUEUE_MS: Final = "TIMER_ENQUEUE_MS"
TIMER_DEQUEUE_MS: Final = "TIMER_DEQUEUE_MS"
TIMER_ROLL_TIMES: Final = "TIMER_ROLL_TIMES"
TIMER_DEL_UNIQKEY: Final = "TIMER_DEL_UNIQKEY"
BORN_TIMESTAMP: Final = "BORN_TIMESTAMP"

# Names a user may not choose for a property of their own.
RESERVED: Final = frozenset(
    {
        KEYS, TAGS, WAIT, DELAY, RETRY_TOPIC, REAL_TOPIC, REAL_QID, TRAN_MSG, PGROUP, MIN_OFFSET, MAX_OFFSET,
        ORIGIN_MESSAGE_ID, RECONSUME_TIME, MAX_RECONSUME_TIMES, UNIQ_KEY, CONSUME_START_TIME, MSG_REGION, TRACE_ON,
        CLUSTER, INSTANCE_ID, CORRELATION_ID, REPLY_TO_CLIENT, TTL, MSG_TYPE, ARRIVE_TIME, PUSH_REPLY_TIME,
        TRANSACTION_CHECK_TIMES, CHECK_IMMUNITY_TIME_IN_SECONDS, TRAN_PREPARED_QUEUE_OFFSET, TRANSACTION_ID,
        INNER_MULTI_DISPATCH, INNER_MULTI_QUEUE_OFFSET, SHARDING_KEY, "BUYER_ID", "TRANSFER_FLAG", "CORRECTION_FLAG",
        "MQ2_FLAG", POP_CK, "POP_CK_OFFSET", FIRST_POP_TIME, TIMER_DELAY_SEC, TIMER_DELAY_MS, TIMER_DELIVER_MS,
        TIMER_ENQUEUE_MS, TIMER_DEQUEUE_MS, TIMER_ROLL_TIMES, TIMER_OUT_MS, TIMER_DEL_UNIQKEY,
        "TIMER_DELAY_LEVEL", "EXTEND_UNIQ_INFO", "INNER_NUM", "INNER_BASE", "DUP_INFO", "PROPERTY_FORWARD_QUEUE_ID",
        "REDIRECT", "TRACE_CONTEXT", "__BORNHOST", BORN_TIMESTAMP, "__CRC32#", "DLQ_ORIGIN_TOPIC",
        "DLQ_ORIGIN_MESSAGE_ID",
    }
)  # fmt: skip


def encode_properties(properties: Mapping[str, str]) -> str:
    """The text form, ended by a separator as 4.8 and 5.x write it (4.9 readers accept both)."""
    return "".join(
        f"{name}{NAME_VALUE_SEPARATOR}{value}{PROPERTY_SEPARATOR}" for name, value in properties.items() if value
    )


def decode_properties(text: str) -> dict[str, str]:
    """All properties of the text form."""
    properties = {}
    for piece in text.split(PROPERTY_SEPARATOR):
        name, separator, value = piece.partition(NAME_VALUE_SEPARATOR)
        if separator and name and value:
            properties[name] = value
    return properties


def find_property(text: str, name: str) -> str | None:
    """The value that `decode_properties` finds under `name`, without reading the other properties.

    `name` is not empty and holds no separator.
    """
    return _last_value(f"\x02{text}\x02", f"\x02{name}\x01", "\x02")


def find_in_bytes(properties: bytes, name: bytes) -> bytes | None:
    """`find_property` for the text form as it is stored, in UTF-8."""
    return _last_value(b"\x02%b\x02" % properties, b"\x02%b\x01" % name, b"\x02")


def find_tags_and_keys(text: str) -> tuple[str | None, str | None, str | None]:
    """TAGS, UNIQ_KEY and KEYS: the properties that a consume queue and the key index are made of."""
    tags = unique_key = keys = None
    for piece in text.split(PROPERTY_SEPARATOR):
        name, _, value = piece.partition(NAME_VALUE_SEPARATOR)
        if value:
            if name == "TAGS":
                tags = value
            elif name == "UNIQ_KEY":
                unique_key = value
            elif name == "KEYS":
                keys = value
    return tags, unique_key, keys


def _last_value(framed: AnyStr, name: AnyStr, separator: AnyStr) -> AnyStr | None:
    """The last value of a name that is not empty. `framed` has separators at both ends, `name` on both sides."""
    at = framed.rfind(name)
    while at >= 0:
        start = at + len(name)
        end = framed.find(separator, start)
        if end > start:
            return framed[start:end]
        at = framed.rfind(name, 0, at + 1)
    return None
