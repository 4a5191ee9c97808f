"""Pulls straight from and to frames: from header to values and from values to reply, in one step each.

`parse_pull` reads the header of request 11 as nearly all clients write it, without the `Command` that any other header
takes. `PullReply` writes the bytes that `encode(command.reply(…))` would.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final

import msgspec

from downrange.protocol import header_binary
from downrange.protocol.bodies.fields import FieldError, Int32, decode_fields, encode_fields
from downrange.protocol.bodies.pull import PullMessageRequest, PullMessageResponse
from downrange.protocol.codes import RequestCode, SerializeType
from downrange.protocol.command import RESPONSE_FLAG, Command
from downrange.protocol.errors import RemoteProtocolError
from downrange.protocol.framing import PREFIX, Frame, encode, with_prefix

JSON: Final = int(SerializeType.JSON)
BINARY: Final = int(SerializeType.ROCKETMQ)
_JSON_START: Final = b'{"code":%d,' % RequestCode.PULL_MESSAGE
_BINARY_START: Final = RequestCode.PULL_MESSAGE.to_bytes(2, "big")

# Opaque, flag of the command, header, queue offset, commit offset. The last two count, not those of the header.
ParsedPull = tuple[int, int, PullMessageRequest, int, int]


def parse_pull(frame: Frame) -> ParsedPull | None:
    """The values of request 11; None when the frame is something else, or is written in an unusual way, or wrongly."""
    kind, header, _ = frame
    try:
        if kind == JSON and header.startswith(_JSON_START):
            pull = _decode_json(header)
            opaque, flag, request = pull.opaque, pull.flag, pull.ext
        elif kind == BINARY and header.startswith(_BINARY_START):
            usual = _parse_usual(header)
            if usual is not None:
                return usual
            _, _, _, opaque, flag, _, ext = header_binary.decode(header)
            request = decode_fields(PullMessageRequest, header_binary.decode_ext_fields(ext))
        else:
            return None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, RemoteProtocolError, FieldError):
        return None
    return opaque, flag, request, request.queue_offset, request.commit_offset


class _JsonPull(msgspec.Struct, gc=False, rename={"ext": "extFields"}):
    """What a JSON header says of a pull."""

    ext: PullMessageRequest
    opaque: Int32 = 0
    flag: Int32 = 0


_decode_json = msgspec.json.Decoder(_JsonPull, strict=False).decode


# Between two pulls of one queue only two numbers change. The fields around them are read once and remembered.
_FIXED: Final = struct.Struct(">hbhiiii")  # code, language, version, opaque, flag, remark length, ext length
_FIXED_SIZE: Final = _FIXED.size
_OFFSET_KEY: Final = b"\0\x0bqueueOffset\0\0\0"
_COMMIT_KEY: Final = b"\0\x0ccommitOffset\0\0\0"
_MOST_DIGITS: Final = 18  # a number of so many digits fits Java's long


def _parse_usual(header: bytes) -> ParsedPull | None:
    """Several times as fast as what takes any order and form of the fields."""
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
_MARK: Final = b"\0\0\0%c%b"  # a number in a binary header: its length in four bytes, its text


Numbers = tuple[int, int, int, int]
"""Suggested broker, next offset, smallest and largest offset of the queue."""


class PullReply:
    """All replies to pulls with one code and remark, but for their numbers and their body."""

    __slots__ = ("pieces",)

    def __init__(self, code: int, remark: str) -> None:
        suggested, next_offset, minimum, maximum = _NUMBER_MARKS
        fields = encode_fields(
            PullMessageResponse(
                suggest_which_broker_id=suggested, next_begin_offset=next_offset, min_offset=minimum, max_offset=maximum
            )
        )
        text = encode(Command(code, _OPAQUE_MARK, RESPONSE_FLAG, fields, remark=remark))[PREFIX.size :]
        for mark in (*_NUMBER_MARKS, _OPAQUE_MARK):
            assert text.count(b"%d" % mark) == 1
            text = text.replace(b"%d" % mark, b"%d")
        command = Command(code, 0, RESPONSE_FLAG, fields, remark=remark, serialize_type=BINARY)
        header = encode(command)[PREFIX.size :]
        block = header_binary.decode(header).ext
        before_opaque = header[: _OPAQUE_AT.start]
        between = header[_OPAQUE_AT.stop : -len(block) - 4]
        for mark in _NUMBER_MARKS:
            block = block.replace(b"\0\0\0\x13%d" % mark, _MARK)  # 19 digits: length and text
        assert b"%" not in text.replace(b"%d", b"") + block.replace(_MARK, b"")
        self.pieces: Final = tuple(text.split(b"%d")), (before_opaque, between, *block.split(_MARK))
        """The bytes that stand around the numbers, for a JSON header and for a binary one."""


def encode_head(pieces: tuple[bytes, ...], kind: int, opaque: int, numbers: Numbers, body_length: int) -> bytes:
    """The frame of a reply up to its body, with the `PullReply.pieces` of this kind of header."""
    if kind == JSON:
        return with_prefix(JSON, b"%d".join(pieces) % (*numbers, opaque), body_length)
    before_opaque, between, *around = pieces
    suggested, next_offset, minimum, maximum = [b"%d" % number for number in numbers]
    block = _MARK.join(around) % (
        len(suggested), suggested, len(next_offset), next_offset, len(minimum), minimum, len(maximum), maximum,
    )  # fmt: skip
    opaque_bytes = opaque.to_bytes(4, "big", signed=True)
    header = b"".join((before_opaque, opaque_bytes, between, len(block).to_bytes(4, "big"), block))
    return with_prefix(BINARY, header, body_length)
