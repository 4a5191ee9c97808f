"""The ROCKETMQ binary header. All integers big-endian.

    code 2 | language 1 | version 2 | opaque 4 | flag 4 | remark length 4, remark | ext length 4, ext fields
    ext field = key length 2, key, value length 4, value          (texts are UTF-8)

A text of length zero counts as absent, as in every reader since 4.9.4.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from downrange.protocol.errors import LocalProtocolError, RemoteProtocolError

if TYPE_CHECKING:
    from downrange.protocol.command import Command

FIXED: Final = struct.Struct(">hbhiii")  # code … flag, remark length
assert FIXED.size == 17
_LENGTH: Final = struct.Struct(">i")
_SHORT_KEY: Final = struct.Struct(">HcI")  # key length, first byte of the key, value length if the key has one byte


class BinaryHeader(NamedTuple):
    code: int
    language: int
    version: int
    opaque: int
    flag: int
    remark: str | None
    ext: bytes


def decode(header: bytes) -> BinaryHeader:
    """The fixed part, the remark, and the ext-field block as raw bytes."""
    try:
        code, language, version, opaque, flag, remark_length = FIXED.unpack_from(header)
        ext_start = FIXED.size + remark_length
        if remark_length < 0 or ext_start > len(header):
            raise RemoteProtocolError(f"binary header: remark of {remark_length} bytes in a header of {len(header)}")
        remark = str(header[FIXED.size : ext_start], "utf-8") if remark_length else None
        (ext_length,) = _LENGTH.unpack_from(header, ext_start)
    except (struct.error, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"binary header cannot be read: {error}") from None
    ext_start += 4
    if ext_length < 0 or ext_start + ext_length > len(header):
        raise RemoteProtocolError(f"binary header: ext fields of {ext_length} bytes in a header of {len(header)}")
    return BinaryHeader(code, language, version, opaque, flag, remark, header[ext_start : ext_start + ext_length])


def decode_ext_fields(block: bytes) -> dict[str, str]:
    """The pairs of an ext-field block."""
    # Latin-1 maps bytes to characters one to one, so texts can be cut from one string; only texts that are not ASCII
    # are decoded again. This takes half the time of decoding each text.
    fields = {}
    text = block.decode("latin-1")
    is_ascii = block.isascii()
    end = len(block)
    at = 0
    try:
        while at < end:
            key_length, _, value_length = _SHORT_KEY.unpack_from(block, at)
            if key_length == 1:
                key = text[at + 2]
                at += 7
            else:
                key = text[at + 2 : at + 2 + key_length]
                at += 2 + key_length
                (value_length,) = _LENGTH.unpack_from(block, at)
                at += 4
            start = at
            at += value_length
            if value_length < 0 or at > end:
                raise RemoteProtocolError(f"binary header: ext value of {value_length} bytes, {end - start} are left")
            value = text[start:at]
            if not is_ascii and not value.isascii():
                value = block[start:at].decode()
            if not is_ascii and not key.isascii():
                key = key.encode("latin-1").decode()
            if key and value:
                fields[key] = value
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"binary header: ext fields cannot be read: {error}") from None
    return fields


def encode(command: Command, opaque: int) -> bytes:
    remark_bytes = command.remark.encode() if command.remark else b""
    pieces: list[bytes] = []
    for key, value in command.ext_fields.items():
        key_bytes, value_bytes = key.encode(), value.encode()
        pieces += (len(key_bytes).to_bytes(2, "big"), key_bytes, len(value_bytes).to_bytes(4, "big"), value_bytes)
    block = b"".join(pieces)
    try:
        fixed = FIXED.pack(command.code, command.language, command.version, opaque, command.flag, len(remark_bytes))
    except struct.error:
        what = f"code {command.code} or version {command.version}"
        raise LocalProtocolError(f"{what} does not fit a binary header: send it with a JSON one") from None
    return b"".join((fixed, remark_bytes, len(block).to_bytes(4, "big"), block))
