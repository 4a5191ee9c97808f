"""The plain pull, the most frequent request of consumers: its header is read, and its reply written, in one step each.

`parse_pull` and `PullReplyHead` do what `Command.header(PullMessageRequest)` and `Command.reply(…)` do, for request 11
and the reply FOUND only, without the objects in between. `parse_pull` gives None for what only `Command.header` reads.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final

from downrange.protocol import header_binary
from downrange.protocol.bodies.fields import FieldError, decode_fields, encode_fields
from downrange.protocol.bodies.plain_header import BINARY, JSON, PlainHeader
from downrange.protocol.bodies.pull import PullMessageRequest, PullMessageResponse
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import RESPONSE_FLAG, Command
from downrange.protocol.errors import RemoteProtocolError
from downrange.protocol.framing import PREFIX, Frame, encode, with_prefix

PULL_HEADER: Final = PlainHeader(RequestCode.PULL_MESSAGE, PullMessageRequest)

# Opaque, flag of the command, header, queue offset, commit offset. The two offsets replace those of the header.
PlainPull = tuple[int, int, PullMessageRequest, int, int]


def parse_pull(frame: Frame) -> PlainPull | None:
    """The values of a pull; None when the frame is another request, or has to be read leniently, or is wrong."""
    kind, header, _ = frame
    if kind == JSON:
        pull = PULL_HEADER.read_json(header)
    elif kind == BINARY and header.startswith(PULL_HEADER.binary_start):
        usual = _parse_usual(header)
        if usual is not None:
            return usual
        pull = PULL_HEADER.read_binary(header)
    else:
        return None
    if pull is None:
        return None
    request = pull.ext
    return pull.opaque, pull.flag, request, request.queue_offset, request.commit_offset


# Between two pulls of one queue only two numbers change. The fields around them are read once and remembered.
_FIXED: Final = struct.Struct(">hbhiiii")  # code, language, version, opaque, flag, remark length, ext length
_FIXED_SIZE: Final = _FIXED.size
_OFFSET_KEY: Final = b"\0\x0bqueueOffset\0\0\0"
_COMMIT_KEY: Final = b"\0\x0ccommitOffset\0\0\0"
_MOST_DIGITS: Final = 18  # a number of so many digits fits Java's long


def _parse_usual(header: bytes) -> PlainPull | None:
    """Read a header in the usual order and form of fields; several times as fast as reading any header."""
    try:
        _, _, _, opaque, flag, remark_length, ext_length = _FIXED.unpack_from(header)
        offset_at = header.index(_OFFSET_KEY, _FIXED_SIZE)
        commit_at = header.index(_COMMIT_KEY, offset_at)
        offset_start = offset_at + len(_OFFSET_KEY) + 1
        offset_end = offset_start + header[offset_start - 1]
        commit_start = commit_at + len(_COMMIT_KEY) + 1
        commit_end = commit_start + header[commit_start - 1]
    except (struct.error, ValueError, IndexError):
        return None
    offset, commit = header[offset_start:offset_end], header[commit_start:commit_end]
    if (
        remark_length
        or ext_length != len(header) - _FIXED_SIZE
        or offset_end > commit_at
        or commit_end > len(header)
        or not _is_number(offset)
        or not _is_number(commit)
    ):
        return None
    rest = _rest(header[_FIXED_SIZE:offset_at] + header[offset_end:commit_at] + header[commit_end:])
    return None if rest is None else (opaque, flag, rest, int(offset), int(commit))


def _is_number(text: bytes) -> bool:
    """Whether the text is a number as all clients write it, without leading zeros."""
    return text.isdigit() and len(text) <= _MOST_DIGITS and (text[0] != 48 or len(text) == 1)


@lru_cache(maxsize=4096)
def _rest(block: bytes) -> PullMessageRequest | None:
    """The header without its two offsets; None when it cannot be read, or when an offset occurs in it again."""
    try:
        fields = header_binary.decode_ext_fields(block)
        if "queueOffset" in fields or "commitOffset" in fields:
            return None
        return decode_fields(PullMessageRequest, {**fields, "queueOffset": "0", "commitOffset": "0"})
    except (RemoteProtocolError, FieldError):
        return None


# Marks that stand for the changing numbers while the text around them is made.
_OPAQUE_MARK: Final = 1_928_374_650
_NUMBER_MARKS: Final = tuple(7_036_874_417_766_350_240 + number for number in range(4))
_OPAQUE_AT: Final = slice(5, 9)  # of a binary header


class PullReplyHead:
    """The reply to a pull that found messages, without its numbers and its body.

    Holds always: it writes the bytes that come before the body in `encode(command.reply(SUCCESS, "FOUND", …))`.
    """

    __slots__ = ("_before_opaque", "_between", "_block", "_json", "pieces")

    def __init__(self) -> None:
        suggested, next_offset, minimum, maximum = _NUMBER_MARKS
        response = PullMessageResponse(
            suggest_which_broker_id=suggested, next_begin_offset=next_offset, min_offset=minimum, max_offset=maximum
        )
        fields = encode_fields(response)
        text = encode(Command(ResponseCode.SUCCESS, _OPAQUE_MARK, RESPONSE_FLAG, fields, remark="FOUND"))[PREFIX.size :]
        for mark in (*_NUMBER_MARKS, _OPAQUE_MARK):
            assert text.count(b"%d" % mark) == 1
            text = text.replace(b"%d" % mark, b"%d")
        self._json = text

        command = Command(ResponseCode.SUCCESS, 0, RESPONSE_FLAG, fields, remark="FOUND", serialize_type=BINARY)
        header = encode(command)[PREFIX.size :]
        block = header_binary.decode(header).ext
        self._before_opaque = header[: _OPAQUE_AT.start]
        self._between = header[_OPAQUE_AT.stop : -len(block) - 4]
        assert b"%" not in block
        for mark in _NUMBER_MARKS:
            block = block.replace(b"\0\0\0\x13%d" % mark, b"\0\0\0%c%b")  # 19 digits: length and text
        assert block.count(b"%c%b") == len(_NUMBER_MARKS)
        self._block = block
        self.pieces: Final = (
            tuple(text.split(b"%d")),
            (self._before_opaque, self._between, *block.split(b"\0\0\0%c%b")),
        )
        """The texts around the numbers, by kind of header, for the compiled function."""

    def encode(self, kind: int, opaque: int, numbers: tuple[int, int, int, int], body_length: int) -> bytes:
        """A frame up to its body. `numbers` are suggested broker, next offset, smallest and largest offset."""
        if kind == JSON:
            return with_prefix(JSON, self._json % (*numbers, opaque), body_length)
        suggested, next_offset, minimum, maximum = [b"%d" % number for number in numbers]
        block = self._block % (
            len(suggested), suggested, len(next_offset), next_offset, len(minimum), minimum, len(maximum), maximum,
        )  # fmt: skip
        opaque_bytes = opaque.to_bytes(4, "big", signed=True)
        length = len(block).to_bytes(4, "big")
        header = b"".join((self._before_opaque, opaque_bytes, self._between, length, block))
        return with_prefix(BINARY, header, body_length)
