"""The reply to a send that was stored, read in one step instead of two and without a command in between."""

from __future__ import annotations

from typing import Final

import msgspec

from downrange.client.messages import Outgoing
from downrange.client.send_result import SendResult, SendStatus
from downrange.model.message import MessageQueue
from downrange.protocol.bodies.fields import Int32
from downrange.protocol.bodies.send import SendMessageResponse
from downrange.protocol.codes import ResponseCode, SerializeType
from downrange.protocol.command import RESPONSE_FLAG
from downrange.protocol.framing import Frame
from downrange.transport.connection import Connection

_JSON: Final = int(SerializeType.JSON)
_SUCCESS: Final = int(ResponseCode.SUCCESS)
_UNREADABLE: Final = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class StoredReply(msgspec.Struct, frozen=True, gc=False, rename={"stored": "extFields"}):
    """A reply with the code SUCCESS."""

    code: Int32
    stored: SendMessageResponse
    opaque: Int32 = 0
    flag: Int32 = 0

    def result(self, ready: Outgoing, queue: MessageQueue) -> SendResult:
        """What it means for the one message of a request that went to `queue`."""
        stored = self.stored
        topic = ready.messages[0].topic
        if stored.queue_id != queue.queue_id or topic != queue.topic:
            queue = MessageQueue(topic, queue.broker_name, stored.queue_id)
        return SendResult(SendStatus.SEND_OK, ready.message_ids[0], stored.msg_id, queue, stored.queue_offset)


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


def take_stored(frames: list[Frame], at: int, connection: Connection) -> int:
    """The `Express` of a connection that sends: each StoredReply goes to who asked by `ask_encoded`."""
    requests = connection.requests
    first = at
    while at < len(frames):
        reply = read_stored(frames[at])
        if reply is None:
            break
        asked = requests.get(reply.opaque)
        if asked is None or not asked[4]:
            break
        del requests[reply.opaque]
        if not asked[0].done():
            asked[0].set_result(reply)
        at += 1
    connection.room_made(at - first)
    return at
