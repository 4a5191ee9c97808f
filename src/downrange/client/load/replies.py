"""Replies to sends, walked by their length and checked where it matters.

Of every reply the code and the opaque are checked. They are looked for at the place where the first reply, which was
decoded whole, had them; a reply that does not look like that is decoded whole, too.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from downrange.protocol.codes import SerializeType
from downrange.protocol.command import Command
from downrange.protocol.errors import RemoteProtocolError
from downrange.protocol.framing import MAX_FRAME, FrameDecoder

_LENGTH: Final = struct.Struct(">i")
_OPAQUE: Final = b'"opaque":'
OPAQUE_DIGITS: Final = 9


class ReplyLayout(NamedTuple):
    """Where a broker's replies have their opaque: so far from the end of the frame if positive, else from its start."""

    is_json: bool
    start: bytes
    """What the header of a reply with code 0 starts with; empty when replies follow no order we know."""
    after_opaque: int

    def key(self, opaque: int) -> bytes:
        """The opaque as it stands in a reply."""
        return b"%d" % opaque if self.is_json else (opaque & 0xFFFFFFFF).to_bytes(4, "big")


def learn_layout(frame: bytes, reply: Command) -> ReplyLayout:
    """From one reply, as it came and decoded."""
    if reply.serialize_type != SerializeType.JSON:
        return ReplyLayout(False, b"\0\0", 0)
    header_end = 8 + int.from_bytes(frame[5:8], "big")
    at = frame.rfind(_OPAQUE + b"%d" % reply.opaque, 8, header_end)
    is_usual = at >= 0 and frame.startswith(b'{"code":0,', 8) and header_end == len(frame)
    start = b'{"code":0,' if is_usual else b""
    return ReplyLayout(True, start, len(frame) - at - len(_OPAQUE) - OPAQUE_DIGITS)


class ReplyReader:
    """Bytes of one connection in; out come the keys of the requests that succeeded and the replies that did not."""

    __slots__ = ("_layout", "_rest")

    def __init__(self, layout: ReplyLayout) -> None:
        self._layout = layout
        self._rest = b""

    def feed(self, data: bytes) -> tuple[list[bytes], list[Command]]:
        is_json, start, after = self._layout
        if self._rest:
            data = self._rest + data
        succeeded: list[bytes] = []
        others: list[Command] = []
        add = succeeded.append
        length_at = _LENGTH.unpack_from
        at = 0
        end = len(data)
        before = after + OPAQUE_DIGITS
        while end - at >= 8:
            (length,) = length_at(data, at)
            stop = at + 4 + length
            if stop > end:
                if not 4 <= length <= MAX_FRAME:
                    raise RemoteProtocolError(f"the broker sent a frame of {length} bytes")
                break
            if start and data.startswith(start, at + 8):
                add(data[stop - before : stop - after] if is_json else data[at + 13 : at + 17])
            else:
                reply = decode_reply(data[at:stop])
                if reply.is_response and reply.code == 0:
                    add(self._layout.key(reply.opaque))
                elif reply.is_response:
                    others.append(reply)
            at = stop
        self._rest = data[at:] if at < end else b""
        return succeeded, others


def decode_reply(frame: bytes) -> Command:
    decoder = FrameDecoder(max_header=MAX_FRAME)
    commands = decoder.feed(frame)
    if decoder.error is not None:
        raise decoder.error
    return commands[0]
