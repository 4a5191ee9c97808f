"""The reply to a send that was stored, read in one step instead of two and without a command in between."""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from downrange.client.producer.send_result import SendResult, SendStatus
from downrange.compiled import steps
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
_OK: Final = SendStatus.SEND_OK
_KINDS: Final = (SendResult, _OK, MessageQueue)

Expected = tuple[str, str, MessageQueue]
"""What is known of a result before the reply: the message's unique id, its topic, the queue it was sent to."""


class Asking(Protocol):
    """A connection, as far as replies are concerned."""

    @property
    def requests(self) -> dict[int, Asked]: ...

    def room_made(self, replies: int) -> None: ...


class StoredReply(msgspec.Struct, frozen=True, gc=False, rename={"stored": "extFields"}):
    """A reply with the code SUCCESS."""

    code: Int32
    stored: SendMessageResponse
    opaque: Int32 = 0
    flag: Int32 = 0

    def result(self, expected: Expected) -> SendResult:
        return result_of(self.stored, _OK, expected)


def result_of(stored: SendMessageResponse, status: SendStatus, expected: Expected) -> SendResult:
    """What became of one message."""
    message_id, topic, queue = expected
    if stored.queue_id != queue.queue_id or topic != queue.topic:
        queue = MessageQueue(topic, queue.broker_name, stored.queue_id)
    return SendResult(
        status, message_id, stored.msg_id, queue, stored.queue_offset, stored.msg_region, stored.trace_on is not False
    )


_decode = msgspec.json.Decoder(StoredReply, strict=False).decode


def read_stored(frame: Frame) -> StoredReply | None:
    """The reply in a frame; None when it says anything but stored, or takes a closer look."""
    kind, header, _ = frame
    if kind != _JSON:
        return None
    try:
        reply = _decode(header)
    except _UNREADABLE:
        return None
    return reply if reply.code == _SUCCESS and reply.flag & RESPONSE_FLAG else None


def take_stored(frames: list[Frame], at: int, connection: Asking) -> int:
    """The `Express` of a connection that sends: who said to `ask_encoded` what to expect gets a SendResult."""
    first = at
    if steps is not None:
        at = steps.take_stored(frames, at, connection.requests, _KINDS) or at
    if at < len(frames):
        at = take_in_python(frames, at, connection)
    connection.room_made(at - first)
    return at


def take_in_python(frames: list[Frame], at: int, connection: Asking) -> int:
    """The same without the compiled twin, which leaves to us what is unusual."""
    requests = connection.requests
    while at < len(frames):
        reply = read_stored(frames[at])
        if reply is None:
            break
        asked = requests.get(reply.opaque)
        if asked is None or asked[4] is None:
            break
        del requests[reply.opaque]
        if not asked[0].done():
            asked[0].set_result(reply.result(asked[4]))
        at += 1
    return at
