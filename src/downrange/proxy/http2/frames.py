"""Frames of HTTP/2 (RFC 9113), header blocks that we send, and the errors of the protocol. No I/O.

length:3 type:1 flags:1 stream:4 payload
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Final, NamedTuple
from urllib.parse import quote

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The first bytes of a client."""
HEAD_SIZE: Final = 9


class Kind(IntEnum):
    """The kinds of frames; others are skipped."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
WITH_PRIORITY: Final = 0x20


class ErrorCode(IntEnum):
    """Why a connection or a stream ends."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class Setting(IntEnum):
    """The settings that each side tells the other."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class Http2Error(Exception):
    """The peer broke the rules: the connection ends with this code."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Frame(NamedTuple):
    """A frame as it arrived."""

    kind: int
    flags: int
    stream: int
    payload: bytes


_HEAD: Final = struct.Struct(">HBBBI")  # the length as 16 + 8 bits
_SETTING: Final = struct.Struct(">HI")
_NUMBER: Final = struct.Struct(">I")
MOST_WINDOW: Final = 0x7FFFFFFF


def encode_frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return _HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


def encode_settings(settings: dict[Setting, int]) -> bytes:
    return encode_frame(Kind.SETTINGS, 0, 0, b"".join(_SETTING.pack(*pair) for pair in settings.items()))


def decode_settings(payload: bytes) -> Iterator[tuple[int, int]]:
    if len(payload) % _SETTING.size:
        raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of a wrong size")
    return _SETTING.iter_unpack(payload)


def encode_window_update(stream: int, size: int) -> bytes:
    return encode_frame(Kind.WINDOW_UPDATE, 0, stream, _NUMBER.pack(size))


def encode_reset(stream: int, code: ErrorCode) -> bytes:
    return encode_frame(Kind.RST_STREAM, 0, stream, _NUMBER.pack(code))


def encode_goaway(last_stream: int, code: ErrorCode, reason: str = "") -> bytes:
    return encode_frame(Kind.GOAWAY, 0, 0, struct.pack(">II", last_stream, code) + reason.encode())


def decode_number(payload: bytes) -> int:
    """The number that is the whole payload of a WINDOW_UPDATE or RST_STREAM, without its highest bit."""
    if len(payload) != _NUMBER.size:
        raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "a frame of a wrong size")
    number: int = _NUMBER.unpack(payload)[0]
    return number & MOST_WINDOW


def without_padding(frame: Frame) -> bytes:
    """The payload of a DATA or HEADERS frame without padding and priority."""
    payload = frame.payload
    start, end = 0, len(payload)
    if frame.flags & PADDED:
        if not payload:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "a padded frame without the length of its padding")
        start, end = 1, end - payload[0]
    if frame.kind == Kind.HEADERS and frame.flags & WITH_PRIORITY:
        start += 5
    if start > end:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "more padding than payload")
    return payload[start:end]


class FrameReader:
    """Bytes in, frames out."""

    def __init__(self, max_frame_size: int) -> None:
        self._max_frame_size = max_frame_size
        self._rest = b""
        self._is_begun = False

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that became whole. Raises Http2Error."""
        data = self._rest + data if self._rest else data
        at = 0
        if not self._is_begun:
            if not data.startswith(PREFACE[: len(data)]):
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "not HTTP/2")
            if len(data) < len(PREFACE):
                self._rest = data
                return []
            self._is_begun = True
            at = len(PREFACE)
        frames = []
        end = len(data)
        while end - at >= HEAD_SIZE:
            high, low, kind, flags, stream = _HEAD.unpack_from(data, at)
            size = high << 8 | low
            if size > self._max_frame_size:
                raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {size} bytes")
            start = at + HEAD_SIZE
            if end - start < size:
                break
            at = start + size
            frames.append(Frame(kind, flags, stream & MOST_WINDOW, data[start:at]))
        self._rest = data[at:] if at else data
        return frames


def _literal(name: bytes, value: bytes) -> bytes:
    """A header field that no table remembers, so that both sides keep nothing."""
    return b"\0" + _length(name) + name + _length(value) + value


def _length(text: bytes) -> bytes:
    """The length of a text as HPACK writes it: one byte up to 126, then 7 bits in each."""
    size = len(text)
    if size < 0x7F:
        return bytes((size,))
    rest = size - 0x7F
    out = bytearray((0x7F,))
    while rest >= 0x80:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)
    return bytes(out)


_STATUS_200: Final = b"\x88"
RESPONSE_HEADERS: Final = _STATUS_200 + _literal(b"content-type", b"application/grpc")
"""The header block in front of the messages of an answer."""
UNSUPPORTED_MEDIA_TYPE: Final = _literal(b":status", b"415")
"""The header block of the answer to a request that is not gRPC."""
OK_TRAILERS: Final = _literal(b"grpc-status", b"0")


def trailers(status: int, message: str) -> bytes:
    """The header block behind the messages of an answer, or the end of its only header block."""
    if not status:
        return OK_TRAILERS
    text = quote(message, safe=" !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~").encode()
    return _literal(b"grpc-status", str(status).encode()) + _literal(b"grpc-message", text)
