"""Replies to pulls, walked by their length and looked at where they lie: nothing of a body is copied."""

from __future__ import annotations

import struct
from typing import Final

from downrange.load.replies import OPAQUE_DIGITS, ReplyLayout
from downrange.protocol.codes import SerializeType
from downrange.protocol.errors import RemoteProtocolError
from downrange.protocol.framing import MAX_FRAME

_PREFIX: Final = struct.Struct(">iI")  # length; kind and length of the header
_OPAQUE: Final = struct.Struct(f"{OPAQUE_DIGITS}s")
_BINARY_OPAQUE: Final = struct.Struct("4s")
# A record up to its queue offset: magic, queue id, queue offset. See docs/formats/record.md.
RECORD_START: Final = struct.Struct(">4xI4xi4xq")

MAX_OFFSET: Final = (1 << 63) - 1

# Key of the request, empty when only the whole reply can tell; start of the frame, start of its body, end.
Place = tuple[bytes, int, int, int]


class PullReplies:
    """Bytes of one connection in; out come the places of whole replies in `data`, which stays until the next `feed`.

    Holds always: a key stands for a reply whose code is SUCCESS.
    """

    __slots__ = ("_at", "data")

    def __init__(self) -> None:
        self.data = b""
        self._at = 0

    def feed(self, received: bytes, layout: ReplyLayout | None) -> list[Place]:
        data = self.data = self.data[self._at :] + received if self._at < len(self.data) else received
        is_json, start, after = layout or ReplyLayout(True, b"", 0)
        key_of, before = (_OPAQUE.unpack_from, after + OPAQUE_DIGITS) if is_json else (_BINARY_OPAQUE.unpack_from, 0)
        prefix_at = _PREFIX.unpack_from
        places: list[Place] = []
        at, end = 0, len(data)
        while end - at >= 8:
            length, mark = prefix_at(data, at)
            stop = at + 4 + length
            if stop > end or length < 4:
                if not 4 <= length <= MAX_FRAME:
                    raise RemoteProtocolError(f"the broker sent a frame of {length} bytes")
                break
            body_at = at + 8 + (mark & 0xFFFFFF)
            if start and data.startswith(start, at + 8) and body_at <= stop:
                places.append((key_of(data, body_at - before if is_json else at + 13)[0], at, body_at, stop))
            else:
                places.append((b"", at, body_at, stop))
            at = stop
        self._at = at
        return places


def expected_header(header: SerializeType, next_offset: int) -> bytes:
    """What stands in the header of a reply that leads to `next_offset`, and in no other."""
    if header is SerializeType.JSON:
        return b'"nextBeginOffset":"%d"' % next_offset
    digits = b"%d" % next_offset
    return b"\0\x0fnextBeginOffset\0\0\0%c%b" % (len(digits), digits)


def next_offset_in(header: SerializeType, data: bytes, at: int, stop: int) -> int:
    """Where the reply whose header stands there leads to; -1 when it does not say so."""
    mark = b'"nextBeginOffset":"' if header is SerializeType.JSON else b"\0\x0fnextBeginOffset\0\0\0"
    found = data.find(mark, at, stop)
    if found < 0:
        return -1
    start = found + len(mark)
    if header is SerializeType.JSON:
        return int(data[start : data.index(b'"', start, stop)])
    return int(data[start + 1 : start + 1 + data[start]])


def count_records(data: bytes, at: int, stop: int, end: int = MAX_OFFSET) -> int:
    """How many records lie there whose queue offsets are below `end`."""
    count = 0
    while at < stop:
        size = int.from_bytes(data[at : at + 4], "big")
        if not 0 < size <= stop - at:
            raise RemoteProtocolError(f"a pull reply holds a record of {size} bytes where {stop - at} are left")
        count += end == MAX_OFFSET or RECORD_START.unpack_from(data, at)[2] < end
        at += size
    return count
