"""The reply to a send that was stored, read straight into a SendResult, without a Command in between."""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from downrange.client.producer.send_result import Expected, SendResult, SendStatus
from downrange.compiled import accelerated
from downrange.model.message import MessageQueue
from downrange.protocol.bodies.fields import Int32
from downrange.protocol.bodies.send import SendMessageResponse
from downrange.protocol.codes import ResponseCode, SerializeType
from downrange.protocol.command import RESPONSE_FLAG
from downrange.protocol.framing import Frame
from downrange.transport.outstanding import Asked

_JSON: Final = int(SerializeType.JSON)
_SUCCESS: Final = int(ResponseCode.SUCCESS)
_UNREADABLE: Final = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)

ResultTypes = tuple[type[SendResult], SendStatus, type[MessageQueue]]
_TYPES: Final[ResultTypes] = (SendResult, SendStatus.SEND_OK, MessageQueue)


class Asking(Protocol):
    """The part of a connection that reading replies needs."""

    @property
    def requests(self) -> dict[int, Asked]: ...

    def room_made(self, replies: int) -> None: ...


class StoredReply(msgspec.Struct, frozen=True, gc=False, rename={"stored": "extFields"}):
    """A reply with the code SUCCESS."""

    code: Int32
    stored: SendMessageResponse
    opaque: Int32 = 0
    flag: Int32 = 0


def result_of(stored: SendMessageResponse, status: SendStatus, expected: Expected) -> SendResult:
    """The result of one message."""
    message_id, topic, queue = expected
    if stored.queue_id != queue.queue_id or topic != queue.topic:
        queue = MessageQueue(topic, queue.broker_name, stored.queue_id)
    return SendResult(
        status,
        message_id,
        stored.msg_id,
        queue,
        stored.queue_offset,
        stored.msg_region,
        stored.trace_on is not False,
        stored.recall_handle,
    )


_decode = msgspec.json.Decoder(StoredReply, strict=False).decode


def read_stored(frame: Frame) -> StoredReply | None:
    """The reply in a frame; None unless it says, in JSON, that the message was stored."""
    kind, header, _ = frame
    if kind != _JSON:
        return None
    try:
        reply = _decode(header)
    except _UNREADABLE:
        return None
    return reply if reply.code == _SUCCESS and reply.flag & RESPONSE_FLAG else None


@accelerated
def take_stored_replies(frames: list[Frame], at: int, requests: dict[int, Asked], types: ResultTypes) -> int:
    """Give the waiters of stored messages their results, from frame `at` on.

    Returns the position of the first frame that is not such a reply: its reply is read as a Command.
    """
    while at < len(frames):
        reply = read_stored(frames[at])
        asked = None if reply is None else requests.get(reply.opaque)
        if reply is None or asked is None or asked[4] is None:
            break
        del requests[reply.opaque]
        if not asked[0].done():
            asked[0].set_result(result_of(reply.stored, SendStatus.SEND_OK, asked[4]))
        at += 1
    return at


def take_stored(frames: list[Frame], at: int, connection: Asking) -> int:
    """Read the replies of a connection: requests that say what they expect get a SendResult."""
    end = take_stored_replies(frames, at, connection.requests, _TYPES)
    connection.room_made(end - at)
    return end
