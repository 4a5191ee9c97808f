"""Sends of single messages and batches, and messages that a consumer sends back.

Requests 310, 320 and 325 have one-letter field names (V2), 10 and 324 have whole words (V1). Both become a
`SendMessageRequest` here: `decode_fields` and `encode_fields` are for V2, `decode_send_v1` and `encode_send_v1` for V1.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from msgspec import field

from downrange.protocol.bodies.body import BodyError
from downrange.protocol.bodies.fields import FieldError, Header, Int32, Int64, decode_fields, encode_fields


class SendMessageRequest(Header, frozen=True, kw_only=True, gc=False):
    """A message without its body.

    The names on the wire are those of V2, so that the JSON text of the header, which every send has, is converted in
    one step.
    """

    producer_group: str = field(name="a", default="")
    topic: str = field(name="b")
    default_topic: str = field(name="c", default="TBW102")
    default_topic_queue_nums: Int32 = field(name="d", default=4)
    queue_id: Int32 = field(name="e")
    sys_flag: Int32 = field(name="f", default=0)
    born_timestamp: Int64 = field(name="g")
    flag: Int32 = field(name="h", default=0)
    properties: str = field(name="i", default="")
    reconsume_times: Int32 = field(name="j", default=0)
    unit_mode: bool = field(name="k", default=False)
    max_reconsume_times: Int32 | None = field(name="l", default=None)
    batch: bool = field(name="m", default=False)
    bname: str | None = field(name="n", default=None)


_V1_NAMES: Final = {
    "a": "producerGroup",
    "b": "topic",
    "c": "defaultTopic",
    "d": "defaultTopicQueueNums",
    "e": "queueId",
    "f": "sysFlag",
    "g": "bornTimestamp",
    "h": "flag",
    "i": "properties",
    "j": "reconsumeTimes",
    "k": "unitMode",
    "l": "maxReconsumeTimes",
    "m": "batch",
    "n": "bname",
}
_LETTERS: Final = {name: letter for letter, name in _V1_NAMES.items()}


def decode_send_v1(ext_fields: Mapping[str, str]) -> SendMessageRequest:
    letters = {_LETTERS[name]: value for name, value in ext_fields.items() if name in _LETTERS}
    try:
        return decode_fields(SendMessageRequest, letters)
    except FieldError as error:
        name = _V1_NAMES[error.field]
        raise FieldError(name, str(error).replace(f"'{error.field}'", f"'{name}'", 1)) from None


def encode_send_v1(request: SendMessageRequest) -> dict[str, str]:
    return {_V1_NAMES[letter]: value for letter, value in encode_fields(request).items()}


class SendMessageResponse(Header, frozen=True, kw_only=True, gc=False):
    """The place of the stored message. For a batch `msg_id` has all offset ids, separated by commas."""

    msg_id: str
    queue_id: Int32
    queue_offset: Int64
    transaction_id: str | None = None
    batch_uniq_id: str | None = None
    recall_handle: str | None = None
    msg_region: str | None = field(name="MSG_REGION", default=None)
    trace_on: bool | None = field(name="TRACE_ON", default=None)


class ConsumerSendMessageBackRequest(Header, frozen=True, kw_only=True):
    """Request 36 of a consumer that failed: deliver the message at `offset` of the commit log to its group again."""

    offset: Int64
    group: str
    delay_level: Int32
    origin_msg_id: str | None = None
    origin_topic: str | None = None
    unit_mode: bool = False
    max_reconsume_times: Int32 | None = None
    bname: str | None = None


class BatchEntry(NamedTuple):
    """One message of a batch; the header of the request has what all of them share."""

    flag: int
    body: bytes
    properties: str


# One entry of a batch body: entry size, magic 0, body CRC 0, flag, body length; body; properties length; properties.
_ENTRY_HEAD: Final = struct.Struct(">iiiii")
_PROPERTIES_LENGTH: Final = struct.Struct(">h")
_ENTRY_FIXED_SIZE: Final = _ENTRY_HEAD.size + _PROPERTIES_LENGTH.size


def encode_batch(entries: Iterable[BatchEntry]) -> bytes:
    return b"".join(encode_entry(flag, body, properties.encode()) for flag, body, properties in entries)


def encode_entry(flag: int, body: bytes, properties: bytes) -> bytes:
    """Encode one message of a batch; a batch is these bytes of all its messages, one after the other."""
    if len(properties) > 0x7FFF:
        raise BodyError(f"properties of {len(properties)} bytes in a batch; at most 32767 are allowed")
    size = _ENTRY_FIXED_SIZE + len(body) + len(properties)
    head = _ENTRY_HEAD.pack(size, 0, 0, flag, len(body))
    return b"".join((head, body, _PROPERTIES_LENGTH.pack(len(properties)), properties))


def decode_batch(data: bytes) -> list[BatchEntry]:
    """The messages of a batch; raises BodyError if the lengths do not add up."""
    entries = []
    at = 0
    while at < len(data):
        if len(data) - at < _ENTRY_FIXED_SIZE:
            raise BodyError(f"batch entry at byte {at} is cut off")
        size, _, _, flag, body_length = _ENTRY_HEAD.unpack_from(data, at)
        body_start = at + _ENTRY_HEAD.size
        body_end = body_start + body_length
        text_start = body_end + _PROPERTIES_LENGTH.size
        end = at + size
        if body_length < 0 or text_start > end or end > len(data):
            raise BodyError(f"batch entry at byte {at}: body of {body_length} bytes in an entry of {size}")
        (text_length,) = _PROPERTIES_LENGTH.unpack_from(data, body_end)
        if text_length < 0 or text_start + text_length != end:
            raise BodyError(f"batch entry at byte {at}: properties of {text_length} bytes do not end the entry")
        try:
            properties = data[text_start:end].decode()
        except UnicodeDecodeError:
            raise BodyError(f"batch entry at byte {at}: properties are not UTF-8") from None
        entries.append(BatchEntry(flag, data[body_start:body_end], properties))
        at = end
    return entries
