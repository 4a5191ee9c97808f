"""Frames: length 4 | serialize type 1 | header length 3 | header | body. `length` counts what follows it.

`FrameDecoder` takes bytes cut anywhere and returns complete frames, or the commands in them. It never raises: when the
bytes break a rule, it returns the frames before that point, and `error` says what is wrong; the bytes after it are
ignored.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final, TypeVar

from downrange.compiled import accelerated, accelerated_if_usual
from downrange.protocol import header_binary, header_json
from downrange.protocol.codes import SerializeType
from downrange.protocol.command import Buffer, Command
from downrange.protocol.errors import LocalProtocolError, RemoteProtocolError

MAX_FRAME: Final = 16 * 1024 * 1024  # including the length field
MAX_HEADER: Final = 64 * 1024  # the limit of a server; replies to large batches have longer headers
_SMALLEST_FRAME: Final = 4  # serialize type and header length
PREFIX: Final = struct.Struct(">iI")  # length, then serialize type and header length in one number
_unpack_prefix = PREFIX.unpack_from
_pack_prefix = PREFIX.pack
_BUFFERS: Final = (bytes, bytearray, memoryview)
# Numbers, not enum members: reading an enum member costs as much as reading the prefix of a frame.
_JSON: Final = int(SerializeType.JSON)
_BINARY: Final = int(SerializeType.ROCKETMQ)

F = TypeVar("F")
Frame = tuple[int, bytes, bytes]
"""Serialize type, header, body."""


class FrameDecoder:
    """Turns the bytes of one direction of a connection into frames or commands.

    Holds always: no more than one incomplete frame is kept, and its declared length passed the limits.
    """

    __slots__ = ("_buffer", "_needed", "buffered", "error", "max_frame", "max_header")

    def __init__(self, max_frame: int = MAX_FRAME, max_header: int = MAX_HEADER) -> None:
        self.max_frame = max_frame
        self.max_header = max_header
        self.error: RemoteProtocolError | None = None
        self.buffered = 0
        """The number of bytes held of an incomplete frame."""
        self._buffer = bytearray()
        self._needed = 8  # bytes that must be in the buffer before it can contain a frame

    def feed(self, data: bytes) -> list[Command]:
        """The commands that `data` completes, in order."""
        commands: list[Command] = []
        for frame in self.frames(data):
            try:
                commands.append(decode_frame(frame))
            except RemoteProtocolError as error:
                self.error = error
                break
        return commands

    def frames(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes, in order, without reading their headers."""
        if self.error is not None:
            return []
        if self.buffered:
            self._buffer += data
            self.buffered = len(self._buffer)
            if self.buffered < self._needed:
                return []
            data = bytes(self._buffer)
            self._buffer.clear()
            self.buffered = 0
        frames, at = cut_frames(data, self.max_frame - 4, self.max_header)
        if at < len(data):
            self._keep(data, at)
        return frames

    def _keep(self, data: bytes, at: int) -> None:
        """Hold the beginning of a frame until more of it arrives, unless it breaks a rule."""
        if len(data) - at >= 8:
            length, mark = _unpack_prefix(data, at)
            self.error = _other_protocol(data[at : at + 16]) or self._broken_rule(length, mark & 0xFFFFFF)
            if self.error is not None:
                return
            self._needed = 4 + length
        else:
            self._needed = 8
        self._buffer += data[at:] if at else data
        self.buffered = len(self._buffer)

    def _broken_rule(self, length: int, header_length: int) -> RemoteProtocolError | None:
        if not _SMALLEST_FRAME <= length <= self.max_frame - 4:
            return RemoteProtocolError(
                f"frame of {length} bytes; {_SMALLEST_FRAME} to {self.max_frame - 4} are allowed"
            )
        if header_length > length - 4:
            return RemoteProtocolError(f"header of {header_length} bytes in a frame of {length}")
        if header_length > self.max_header:
            return RemoteProtocolError(f"header of {header_length} bytes; at most {self.max_header} are allowed")
        return None


def _other_protocol(start: bytes) -> RemoteProtocolError | None:
    """An error that names the protocol of the other end, if that is one which people take for RocketMQ's by mistake.

    No frame begins so: as a length, the first four bytes are more than a frame may have, or its header is empty.
    """
    if start.startswith((b"HTTP/", b"<!DO", b"<html")):
        return RemoteProtocolError("the other end speaks HTTP, not RocketMQ's protocol: this is another server's port")
    if start[:2] == b"\0\0" and start[3:8] == b"\x04\0\0\0\0":
        return RemoteProtocolError("the other end speaks HTTP/2: this is a port for gRPC clients")
    if start[:2] in (b"\x15\x03", b"\x16\x03"):
        return RemoteProtocolError("the other end speaks TLS: connect with TLS (--tls, or ROCKETMQ_TLS_ENABLE=true)")
    return None


@accelerated_if_usual
def cut_frames(data: bytes, max_length: int, max_header: int) -> tuple[list[Frame], int]:
    """The whole frames at the beginning of `data`, up to one that breaks a rule, and the position behind them."""
    frames: list[Frame] = []
    at = 0
    end = len(data)
    while end - at >= 8:
        length, mark = _unpack_prefix(data, at)
        header_length = mark & 0xFFFFFF
        header_end = at + 8 + header_length
        frame_end = at + 4 + length
        if length > max_length or header_end > frame_end or header_length > max_header or frame_end > end:
            break
        frames.append((mark >> 24, data[at + 8 : header_end], data[header_end:frame_end]))
        at = frame_end
    return frames, at


_JSON_CODE: Final = b'{"code":'


def code_of(frame: Frame) -> int:
    """The code of the command in a frame. Raises RemoteProtocolError when its header cannot be read."""
    serialize_type, header, _ = frame
    if serialize_type == _BINARY and len(header) >= 2:
        return int.from_bytes(header[:2], "big", signed=True)
    if header.startswith(_JSON_CODE):  # as nearly all clients write it
        digits = header[8 : header.find(b",", 8)]
        if digits.isdigit():
            return int(digits)
    return decode_frame(frame).code


@accelerated
def next_run(frames: list[Frame], at: int, families: Mapping[int, F]) -> tuple[F | None, int]:
    """The family of the command at `at`, by its code, and the position of the first frame that has another family.

    A command whose code has no family is a run of its own, with None. A header that the compiled function does not read
    ends the run; if it is the first one, the run is empty.
    """
    family = families.get(code_of(frames[at]))
    stop = at + 1
    kind, header, _ = frames[at]
    known = 2 if kind == _BINARY else header.find(b",") + 1  # so many bytes say the code, if they come again
    start = header[:known]
    while family is not None and stop < len(frames):
        other = frames[stop]
        try:
            if not (other[0] == kind and other[1][:known] == start) and families.get(code_of(other)) is not family:
                break
        except RemoteProtocolError:
            break
        stop += 1
    return family, stop


def decode_frame(frame: Frame) -> Command:
    """The command in a frame. Raises RemoteProtocolError when its header cannot be read."""
    serialize_type, header, body = frame
    if serialize_type == _JSON:
        fields = header_json.decode(header)
        if not header.startswith(b'{"code":%d,' % fields.code) and header.startswith(_JSON_CODE):
            digits = header[8 : header.find(b",", 8)]
            if digits.isdigit() and int(digits) != fields.code:  # `code_of` must not see another one
                raise RemoteProtocolError(f"JSON header with two codes, {int(digits)} and {fields.code}")
        ext = fields.ext
        return Command(
            fields.code,
            fields.opaque,
            fields.flag,
            None if ext is header_json.NO_EXT else ext,
            body,
            fields.remark,
            header_json.language_code(fields.language),
            fields.version,
            _JSON,
        )
    if serialize_type == _BINARY:
        code, language, version, opaque, flag, remark, ext_block = header_binary.decode(header)
        return Command(code, opaque, flag, ext_block, body, remark, language, version, _BINARY)
    raise RemoteProtocolError(f"unknown serialize type {serialize_type}")


def encode_parts(command: Command, opaque: int | None = None) -> list[Buffer]:
    """The frame as buffers to write one after the other; a body of several buffers is not copied."""
    body = command.body
    parts: list[Buffer] = [body] if isinstance(body, _BUFFERS) else list(body)
    codec = header_json if command.serialize_type == _JSON else header_binary
    header = codec.encode(command, command.opaque if opaque is None else opaque)
    body_length = sum(map(len, parts))
    head = with_prefix(command.serialize_type, header, body_length)
    return [head, *parts] if body_length else [head]


def with_prefix(serialize_type: int, header: bytes, body_length: int) -> bytes:
    """The frame up to its body."""
    length = 4 + len(header) + body_length
    if length > MAX_FRAME - 4:
        raise LocalProtocolError(f"frame of {length} bytes; at most {MAX_FRAME - 4} are allowed: send less at a time")
    if len(header) > 0xFFFFFF:
        raise LocalProtocolError(f"header of {len(header)} bytes does not fit a frame")
    return _pack_prefix(length, serialize_type << 24 | len(header)) + header


def encode(command: Command, opaque: int | None = None) -> bytes:
    """The whole frame as one piece."""
    return b"".join(encode_parts(command, opaque))
