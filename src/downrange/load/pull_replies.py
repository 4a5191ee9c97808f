"""Reads replies to pulls in place: frames are found by their length, and bodies are not copied."""

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

# Key of the request (empty if the whole reply must be decoded to know it), start of the frame, start of its body, end.
Place = tuple[bytes, int, int, int]


class PullReplies:
    """Finds complete replies in the bytes of one connection; their places refer to `data`, valid until the next `feed`.

    Holds always: a reply with a key has the code SUCCESS.
    """

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
    """A text that only the headers of replies with this `next_offset` contain."""
    if header is SerializeType.JSON:
        return b'"nextBeginOffset":"%d"' % next_offset
    digits = b"%d" % next_offset
    return b"\0\x0fnextBeginOffset\0\0\0%c%b" % (len(digits), digits)


def next_offset_in(header: SerializeType, data: bytes, at: int, stop: int) -> int:
    """The next offset in the header of a reply at this place; -1 when it has none."""
    mark = b'"nextBeginOffset":"' if header is SerializeType.JSON else b"\0\x0fnextBeginOffset\0\0\0"
    found = data.find(mark, at, stop)
    if found < 0:
        return -1
    start = found + len(mark)
    if header is SerializeType.JSON:
        return int(data[start : data.index(b'"', start, stop)])
    return int(data[start + 1 : start + 1 + data[start]])


def count_records(data: bytes, at: int, stop: int, end: int = MAX_OFFSET) -> int:
    """The number of records in this part of `data` whose queue offsets are below `end`."""
    count = 0
    while at < stop:
        size = int.from_bytes(data[at : at + 4], "big")
        if not 0 < size <= stop - at:
            raise RemoteProtocolError(f"a pull reply has a record of {size} bytes where {stop - at} are left")
        count += end == MAX_OFFSET or RECORD_START.unpack_from(data, at)[2] < end
        at += size
    return count
