"""Reads replies to sends: frames are found by their length, code and opaque of every reply are checked.

They are expected where the first reply, which is decoded completely, has them. A reply that looks different is decoded
completely, too.
"""

from __future__ import annotations

import struct
from array import array
from functools import partial
from typing import Final, NamedTuple

from downrange.compiled import steps as compiled
from downrange.load.outstanding import FIRST_OPAQUE, Outstanding
from downrange.protocol.codes import ResponseCode, SerializeType
from downrange.protocol.command import Command
from downrange.protocol.errors import RemoteProtocolError
from downrange.protocol.framing import MAX_FRAME, FrameDecoder

_LENGTH: Final = struct.Struct(">i")
_BINARY_OPAQUE: Final = struct.Struct(">i")
_BINARY_OPAQUE_AT: Final = 13
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
    """Reads the bytes of one connection; gives the send times of requests that succeeded, and replies with an error.

    Every reply must answer an outstanding request, which is then no longer outstanding.
    """

    __slots__ = ("_outstanding", "_read", "_rest")

    def __init__(self, layout: ReplyLayout, outstanding: Outstanding) -> None:
        self._outstanding = outstanding
        self._read = partial(
            read_replies if compiled is None else compiled.read_replies, *layout, FIRST_OPAQUE, outstanding.moments
        )
        self._rest = b""

    def feed(self, data: bytes) -> tuple[int, list[int], list[Command]]:
        """The number of successes; their send times, each followed by its number of requests in a row; the refusals."""
        if self._rest:
            data = self._rest + data
        at, count, succeeded = self._read(data, 0)
        self._outstanding.count -= count
        if at == len(data):  # the usual case
            self._rest = b""
            return count, succeeded, []
        refused: list[Command] = []
        while frame := _whole_frame(data, at):
            reply = decode_reply(frame)
            if reply.is_response:
                moment = self._outstanding.take(reply.opaque)
                if not moment:
                    raise RemoteProtocolError(f"the broker answered a request that is not outstanding: {reply.opaque}")
                if reply.code == ResponseCode.SUCCESS:
                    succeeded += moment, 1
                    count += 1
                else:
                    refused.append(reply)
            at, more, moments = self._read(data, at + len(frame))
            self._outstanding.count -= more
            count += more
            succeeded += moments
        self._rest = data[at:]
        return count, succeeded, refused


def _whole_frame(data: bytes, at: int) -> bytes:
    """The frame that begins at `at`; empty when it is incomplete."""
    if len(data) - at < _LENGTH.size:
        return b""
    (length,) = _LENGTH.unpack_from(data, at)
    if not 4 <= length <= MAX_FRAME:
        raise RemoteProtocolError(f"the broker sent a frame of {length} bytes")
    stop = at + _LENGTH.size + length
    return data[at:stop] if stop <= len(data) else b""


def read_replies(
    is_json: bool, start: bytes, after: int, first_opaque: int, moments: array[int], data: bytes, at: int
) -> tuple[int, int, list[int]]:
    """Read replies from `at` on, as long as they have the expected form and answer outstanding requests.

    Returns the end of the last one, their number, and their send times as `ReplyReader.feed` returns them.
    """
    before = after + OPAQUE_DIGITS
    shortest = 4 + max(len(start), before if is_json else 9)  # in the way the length field counts
    slots, end = len(moments), len(data)
    answered: list[int] = []
    count = last = times = 0
    length_at, opaque_at = _LENGTH.unpack_from, _BINARY_OPAQUE.unpack_from
    while start and end - at >= 8:
        (length,) = length_at(data, at)
        stop = at + 4 + length
        if length < shortest or stop > end or not data.startswith(start, at + 8):
            break
        if not is_json:
            slot = opaque_at(data, at + _BINARY_OPAQUE_AT)[0] - first_opaque
        elif (digits := data[stop - before : stop - after]).isdigit():
            slot = int(digits) - first_opaque
        else:
            break
        if not 0 <= slot < slots or (moment := moments[slot]) == 0:
            break
        moments[slot] = 0
        if moment == last:
            times += 1
        else:
            if times:
                answered += last, times
                count += times
            last, times = moment, 1
        at = stop
    if times:
        answered += last, times
    return at, count + times, answered


def decode_reply(frame: bytes) -> Command:
    decoder = FrameDecoder(max_header=MAX_FRAME)
    commands = decoder.feed(frame)
    if decoder.error is not None:
        raise decoder.error
    return commands[0]
