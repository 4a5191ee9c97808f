"""Message bodies compressed by their producer: zlib always, LZ4 and Zstandard with the extra `compression`.

A sysFlag says how: bit 0 that the body is compressed, bits 8-10 with what. 4.8 sets no type and means zlib.
"""

from __future__ import annotations

import importlib
import zlib
from enum import StrEnum
from types import ModuleType
from typing import Final

from downrange.model.errors import MessageError
from downrange.model.message import COMPRESSION_TYPE_MASK, StoredMessage, SysFlag
from downrange.settings import ConfigError

MAX_BODY_BYTES: Final = 16 * 1024 * 1024


class Compression(StrEnum):
    """How a producer compresses. Consumers of 4.8 and older read only zlib."""

    ZLIB = "zlib"
    LZ4 = "lz4"
    ZSTD = "zstd"


_FLAGS: Final = {
    Compression.ZLIB: int(SysFlag.COMPRESSED | SysFlag.ZLIB),
    Compression.LZ4: int(SysFlag.COMPRESSED | SysFlag.LZ4),
    Compression.ZSTD: int(SysFlag.COMPRESSED | SysFlag.ZSTD),
}
# Python 3.14 brings Zstandard along.
_MODULES: Final = {
    Compression.LZ4: ("lz4.frame",),
    Compression.ZSTD: ("compression.zstd", "backports.zstd"),
}


class CompressionMissing(ConfigError):
    """The library for a kind of compression is not installed."""


def check_compression(kind: Compression, level: int) -> None:
    """Raise ConfigError now rather than with the first large message."""
    try:
        compress(b"", kind, level)
    except (ValueError, zlib.error, OverflowError) as error:
        raise ConfigError(f"compression level {level} does not suit {kind}: {error}") from None


def compress(body: bytes, kind: Compression, level: int) -> tuple[bytes, int]:
    """The body as it is sent and the bits of sysFlag that say so. A body that would not get smaller stays as it is."""
    match kind:
        case Compression.ZLIB:
            smaller = zlib.compress(body, level)
        case Compression.LZ4:
            smaller = _library(kind).compress(body, compression_level=level)
        case Compression.ZSTD:
            smaller = _library(kind).compress(body, level)
    return (smaller, _FLAGS[kind]) if len(smaller) < len(body) else (body, 0)


def plain_body(message: StoredMessage, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The body as its sender gave it. Never inflates to more than `max_bytes`."""
    if not message.sys_flag & SysFlag.COMPRESSED:
        return message.body
    return decompress(message.body, message.sys_flag, message.message_id, max_bytes)


def decompress(body: bytes, sys_flag: int, message_id: str, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The plain form of a compressed body; raises MessageError that names the message."""
    name = f"body of {message_id}"
    match sys_flag & COMPRESSION_TYPE_MASK:
        case 0 | SysFlag.ZLIB:
            return _inflate(name, body, max_bytes)
        case SysFlag.LZ4:
            return _expand(name, Compression.LZ4, body, max_bytes)
        case SysFlag.ZSTD:
            return _expand(name, Compression.ZSTD, body, max_bytes)
        case other:
            raise MessageError(f"{name} is compressed with type {other >> 8}, which is not supported")


def _inflate(name: str, body: bytes, max_bytes: int) -> bytes:
    inflater = zlib.decompressobj()
    try:
        # One byte more than allowed tells a body of exactly that size from a larger one.
        plain = inflater.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise MessageError(f"{name} cannot be decompressed: {error}") from None
    return _checked(name, plain, inflater.eof, max_bytes)


def _expand(name: str, kind: Compression, body: bytes, max_bytes: int) -> bytes:
    try:
        library = _library(kind)
    except CompressionMissing as error:
        raise MessageError(f"{name} is compressed with {kind.name}: {error}") from None
    decompressor = library.LZ4FrameDecompressor() if kind is Compression.LZ4 else library.ZstdDecompressor()
    try:
        plain: bytes = decompressor.decompress(body, max_length=max_bytes + 1)
    except (RuntimeError, EOFError, getattr(library, "ZstdError", RuntimeError)) as error:
        raise MessageError(f"{name} cannot be decompressed: {error}") from None
    return _checked(name, plain, decompressor.eof, max_bytes)


def _checked(name: str, plain: bytes, is_complete: bool, max_bytes: int) -> bytes:
    if len(plain) > max_bytes:
        raise MessageError(f"{name} is larger than {max_bytes} bytes when decompressed")
    if not is_complete:
        raise MessageError(f"{name} cannot be decompressed: it is cut off")
    return plain


def _library(kind: Compression) -> ModuleType:
    for module in _MODULES[kind]:
        try:
            return importlib.import_module(module)
        except ImportError:
            continue
    raise CompressionMissing(f"{kind} needs a library that is not installed: pip install 'downrange[compression]'")
