"""Reads replies to sends: frames are found by their length, code and opaque of every reply are checked.

They are expected where the first reply, which is decoded completely, has them. A reply that looks different is decoded
completely, too.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from downrange.load.outstanding import FIRST_OPAQUE, Outstanding
from downrange.protocol.codes import ResponseCode, SerializeType
from downrange.protocol.command import Command
from downrange.protocol.errors import RemoteProtocolError
from downrange.protocol.framing import MAX_FRAME, FrameDecoder

_LENGTH: Final = struct.Struct(">i")
_OPAQUE: Final = b'"opaque":'
OPAQUE_DIGITS: Final = 9


class ReplyLayout(NamedTuple):
    """The position of the opaque in the replies of a broker: in JSON counted from the end of the frame, else fixed."""

    is_json: bool
    start: bytes
    """The beginning of the header of a reply with code 0; empty when the order of its fields is unknown."""
    after_opaque: int

    def key(self, opaque: int) -> bytes:
        """The bytes of the opaque in a reply."""
        return b"%d" % opaque if self.is_json else (opaque & 0xFFFFFFFF).to_bytes(4, "big")


def learn_layout(frame: bytes, reply: Command) -> ReplyLayout:
    """The layout of replies, from the bytes of one reply and the decoded reply."""
    if reply.serialize_type != SerializeType.JSON:
        return ReplyLayout(False, b"\0\0", 0)
    header_end = 8 + int.from_bytes(frame[5:8], "big")
    at = frame.rfind(_OPAQUE + b"%d" % reply.opaque, 8, header_end)
    is_usual = at >= 0 and frame.startswith(b'{"code":0,', 8) and header_end == len(frame)
    start = b'{"code":0,' if is_usual else b""
    return ReplyLayout(True, start, len(frame) - at - len(_OPAQUE) - OPAQUE_DIGITS)


class ReplyReader:
    """Reads the bytes of one connection. Every reply must answer an outstanding request, which it ends."""

    def __init__(self, layout: ReplyLayout, outstanding: Outstanding) -> None:
        self._layout = layout
        self._outstanding = outstanding
        self._rest = b""

    def feed(self, data: bytes) -> tuple[list[int], list[Command]]:
        """The send times of the requests that succeeded, and the replies with an error."""
        data = self._rest + data
        is_json, start, after = self._layout
        before = after + OPAQUE_DIGITS
        length_at, sent_at = _LENGTH.unpack_from, self._outstanding.moments
        moments: list[int] = []
        refused: list[Command] = []
        at, end = 0, len(data)
        while end - at >= _LENGTH.size:
            (length,) = length_at(data, at)
            if not 4 <= length <= MAX_FRAME:
                raise RemoteProtocolError(f"the broker sent a frame of {length} bytes")
            stop = at + 4 + length
            if stop > end:
                break
            slot = -1
            if start and data.startswith(start, at + 8) and length >= 4 + before:
                if not is_json:
                    slot = int.from_bytes(data[at + 13 : at + 17], "big") - FIRST_OPAQUE
                elif (digits := data[stop - before : stop - after]).isdigit():
                    slot = int(digits) - FIRST_OPAQUE
            if 0 <= slot < len(sent_at) and (moment := sent_at[slot]):
                sent_at[slot] = 0
                self._outstanding.count -= 1
                moments.append(moment)
            elif (reply := decode_reply(data[at:stop])).is_response:
                moment = self._outstanding.take(reply.opaque)
                if not moment:
                    raise RemoteProtocolError(f"the broker answered a request that is not outstanding: {reply.opaque}")
                if reply.code == ResponseCode.SUCCESS:
                    moments.append(moment)
                else:
                    refused.append(reply)
            at = stop
        self._rest = data[at:]
        return moments, refused


def decode_reply(frame: bytes) -> Command:
    decoder = FrameDecoder(max_header=MAX_FRAME)
    commands = decoder.feed(frame)
    if decoder.error is not None:
        raise decoder.error
    return commands[0]
