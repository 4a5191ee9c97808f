"""Header fields of requests (HPACK, RFC 7541). Tables are those of the package hpack; no I/O.

    1xxxxxxx  a field of the table       01xxxxxx  a field that the table remembers
    001xxxxx  a new size of the table    000xxxxx  a field that it does not remember

hpack's own decoder takes ten times as long: it logs each field, and reads Huffman codes by the half byte.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from hpack.huffman_table import HUFFMAN_COMPLETE, HUFFMAN_EMIT_SYMBOL, HUFFMAN_FAIL, HUFFMAN_TABLE
from hpack.table import HeaderTable

from downrange.proxy.http2.frames import ErrorCode, Http2Error

Field = tuple[bytes, bytes]

MAX_TABLE_BYTES: Final = 4096
_STATIC: Final[tuple[Field, ...]] = tuple(HeaderTable.STATIC_TABLE)
_OVERHEAD: Final = 32
_MOST_INTEGER_BYTES: Final = 5
_steps: Final[dict[int, tuple[int, bytes, bool]]] = {}
"""State of the Huffman decoder and next byte -> next state, letters, whether a text may end here; filled by use."""


class HeaderDecoder:
    """The header fields of one connection, block after block."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of all fields of one request."""
        self._max_bytes = max_bytes
        self._recent: deque[Field] = deque()
        """The table's own part, the newest field first."""
        self._size = 0
        self._limit = MAX_TABLE_BYTES

    def decode(self, block: bytes) -> dict[bytes, bytes]:
        """The fields of a block; of several with one name the last. Raises Http2Error."""
        found: dict[bytes, bytes] = {}
        at, end, total = 0, len(block), 0
        try:
            while at < end:
                first = block[at]
                if first & 0x80:
                    index, at = _integer(block, at, 0x7F)
                    name, value = self._field(index)
                elif first & 0x40:
                    index, at = _integer(block, at, 0x3F)
                    (name, value), at = self._literal(block, index, at)
                    self._remember(name, value)
                elif first & 0x20:
                    size, at = _integer(block, at, 0x1F)
                    if size > MAX_TABLE_BYTES or found:
                        raise _wrong("the table is too large, or changes behind a field")
                    self._limit = size
                    self._shrink()
                    continue
                else:
                    index, at = _integer(block, at, 0x0F)
                    (name, value), at = self._literal(block, index, at)
                found[name] = value
                total += len(name) + len(value) + _OVERHEAD
                if total > self._max_bytes:
                    raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "too many headers")
        except IndexError:
            raise _wrong("a header block is cut off") from None
        return found

    def _field(self, index: int) -> Field:
        if 0 < index <= len(_STATIC):
            return _STATIC[index - 1]
        place = index - len(_STATIC) - 1
        if not 0 <= place < len(self._recent):
            raise _wrong("no such field in the table")
        return self._recent[place]

    def _literal(self, block: bytes, index: int, at: int) -> tuple[Field, int]:
        if index:
            name = self._field(index)[0]
        else:
            name, at = _text(block, at)
        value, at = _text(block, at)
        return (name, value), at

    def _remember(self, name: bytes, value: bytes) -> None:
        self._recent.appendleft((name, value))
        self._size += len(name) + len(value) + _OVERHEAD
        if self._size > self._limit:
            self._shrink()

    def _shrink(self) -> None:
        while self._size > self._limit:
            name, value = self._recent.pop()
            self._size -= len(name) + len(value) + _OVERHEAD


def _integer(block: bytes, at: int, mask: int) -> tuple[int, int]:
    """A number that begins in the low bits of a byte, and the place behind it."""
    number = block[at] & mask
    at += 1
    if number < mask:
        return number, at
    for shift in range(0, 7 * _MOST_INTEGER_BYTES, 7):
        byte = block[at]
        at += 1
        number += (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise _wrong("a number is too large")


def _text(block: bytes, at: int) -> tuple[bytes, int]:
    is_huffman = block[at] & 0x80
    size, at = _integer(block, at, 0x7F)
    end = at + size
    if end > len(block):
        raise _wrong("a header block is cut off")
    return (_decode_huffman(block[at:end]) if is_huffman else block[at:end]), end


def _decode_huffman(data: bytes) -> bytes:
    state = 0
    is_complete = True
    parts = []
    known = _steps.get
    for byte in data:
        key = state << 8 | byte
        state, letters, is_complete = known(key) or _step(key)
        parts.append(letters)
    if not is_complete:
        raise _wrong("a text ends within a letter")
    return b"".join(parts)


def _step(key: int) -> tuple[int, bytes, bool]:
    state, byte = key >> 8, key & 0xFF
    letters = bytearray()
    flags = 0
    for half in (byte >> 4, byte & 0x0F):
        state, flags, letter = HUFFMAN_TABLE[state * 16 + half]
        if flags & HUFFMAN_FAIL:
            raise _wrong("no letter has this code")
        if flags & HUFFMAN_EMIT_SYMBOL:
            letters.append(letter)
    found = _steps[key] = (state, bytes(letters), bool(flags & HUFFMAN_COMPLETE))
    return found


def _wrong(reason: str) -> Http2Error:
    return Http2Error(ErrorCode.COMPRESSION_ERROR, f"headers: {reason}")
