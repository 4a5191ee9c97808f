"""Java's String.hashCode, which RocketMQ stores in consume queues (tags) and index files (keys).

h = 31·h + c over the UTF-16 code units, wrapped to a signed 32-bit number.
"""

from __future__ import annotations

import struct
from functools import lru_cache

_MASK = 0xFFFFFFFF


def java_hash_unsigned(text: str, start: int = 0) -> int:
    """The hash before it is read as signed; `start` continues the hash of a text that stands before this one."""
    h = start
    if text.isascii():
        units: bytes | tuple[int, ...] = text.encode("ascii")
    else:
        raw = text.encode("utf-16-be", "surrogatepass")
        units = struct.unpack(f">{len(raw) // 2}H", raw)
    for unit in units:
        h = (31 * h + unit) & _MASK
    return h


def to_signed(h: int) -> int:
    return h - 0x1_0000_0000 if h & 0x8000_0000 else h


def java_hash(text: str) -> int:
    """String.hashCode of `text` as Java computes it."""
    return to_signed(java_hash_unsigned(text))


@lru_cache(maxsize=65_536)
def tags_code(tags: str) -> int:
    """What a consume-queue entry holds for the TAGS property: its hash, 0 when there is no tag."""
    return java_hash(tags) if tags else 0
