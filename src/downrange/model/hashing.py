"""Java's String.hashCode, which RocketMQ stores in consume queues (tags) and index files (keys).

h = 31·h + c over the UTF-16 code units, wrapped to a signed 32-bit number: the units are the digits of a number in base
31, but a digit may be larger than 30. Split as c = 31·high + low both parts are proper digits, and `int(…, 31)` does
the whole sum at C speed: 0.5 µs for 32 characters instead of 2.3 µs for a loop.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

_MASK: Final = 0xFFFFFFFF
_DIGITS: Final = b"0123456789ABCDEFGHIJKLMNOPQRSTU"
_LOW: Final = bytes(_DIGITS[unit % 31] for unit in range(256))
_HIGH: Final = bytes(_DIGITS[unit // 31] for unit in range(256))
_CHUNK: Final = 4096  # Python refuses to convert a number with many more digits

_POWERS: Final = tuple(pow(31, n, 1 << 32) for n in range(256))


def java_hash_unsigned(text: str, start: int = 0) -> int:
    """The hash as an unsigned number; `start` is the hash of a text in front of this one, which is continued."""
    if text.isascii():
        if len(text) <= _CHUNK:
            units = text.encode("ascii")
            length = len(units)
            if not length:
                return start
            h = int(units.translate(_LOW), 31) + 31 * int(units.translate(_HIGH), 31)
            if start:
                h += start * (_POWERS[length] if length < 256 else pow(31, length, 1 << 32))
            return h & _MASK
        for at in range(0, len(text), _CHUNK):
            start = java_hash_unsigned(text[at : at + _CHUNK], start)
        return start
    raw = text.encode("utf-16-be", "surrogatepass")
    for high, low in zip(raw[::2], raw[1::2], strict=True):
        start = (31 * start + (high << 8 | low)) & _MASK
    return start


def to_signed(h: int) -> int:
    return h - 0x1_0000_0000 if h & 0x8000_0000 else h


def java_hash(text: str) -> int:
    """String.hashCode of `text` as Java computes it."""
    return to_signed(java_hash_unsigned(text))


@lru_cache(maxsize=65_536)
def tags_code(tags: str) -> int:
    """The number that a consume-queue entry holds for the TAGS property: its hash, or 0 without a tag."""
    return java_hash(tags) if tags else 0


class HashCache(dict[str, int]):
    """Unsigned Java hashes of texts that are needed again soon; `cache[text]` computes a missing hash.

    With `suffix` the hash is that of text + suffix; with `room` it is multiplied by 31ⁿ, so that adding the hash of n
    more units gives the hash of the whole. Holds at most `limit` texts: when full it forgets all of them, which costs
    less than remembering their order.
    """

    __slots__ = ("_factor", "_limit", "_suffix")

    def __init__(self, limit: int, *, suffix: str = "", room: int = 0) -> None:
        super().__init__()
        self._limit = limit
        self._suffix = suffix
        self._factor = pow(31, room, 1 << 32)

    def __missing__(self, text: str) -> int:
        if len(self) >= self._limit:
            self.clear()
        h = self[text] = java_hash_unsigned(text + self._suffix) * self._factor & _MASK
        return h
