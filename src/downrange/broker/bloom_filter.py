"""Bit maps beside the consume queue, which say in a few bits which consumers may want a message.

Every consumer with an SQL92 filter has a few bits of a bit map, chosen by a hash of its group and topic. A message's
bit map has the bits of all consumers whose filter it matches. A consumer whose bits are not all set does not want the
message; one whose bits are all set may want it. Bit p stands in byte p // 8 with the value 1 << p % 8, so that a bit
map is one integer, least byte first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from operator import or_

from downrange.broker.murmur3 import murmur3_low


@dataclass(frozen=True, slots=True)
class BloomFilter:
    """The size of the bit maps, and how many bits of them each consumer has."""

    bit_count: int
    hash_count: int

    @classmethod
    def sized_for(cls, consumers: int, error_percent: int) -> BloomFilter:
        """The smallest bit maps with which `consumers` of a topic are each offered `error_percent` of it in vain."""
        rate = error_percent / 100
        hash_count = math.ceil(math.log(rate) / math.log(0.5))
        bit_count = math.ceil(consumers * (math.log(1 / rate) / math.log(2)) * (math.log(math.e) / math.log(2)))
        return cls((bit_count + 7) // 8 * 8, hash_count)

    def positions(self, text: str) -> tuple[int, ...]:
        """The positions of the bits of the consumer with this name; a position may occur twice."""
        hashed = murmur3_low(text.encode())
        first, second = hashed & 0xFFFF_FFFF, hashed >> 32
        return tuple(
            _non_negative(first + number * second) % self.bit_count for number in range(1, self.hash_count + 1)
        )

    def bitmap(self, mask: int) -> bytes:
        return mask.to_bytes(self.bit_count // 8, "little")

    def may_want(self, bitmap: bytes, mask: int) -> bool:
        """Whether all bits of `mask` are set; True for a bit map of another size, which says nothing."""
        return len(bitmap) * 8 != self.bit_count or int.from_bytes(bitmap, "little") & mask == mask


def mask_of(positions: tuple[int, ...]) -> int:
    """The bits at these positions as one number."""
    return reduce(or_, (1 << position for position in positions), 0)


def _non_negative(number: int) -> int:
    """The low 32 bits as a signed number; its complement if this is negative."""
    low = number & 0xFFFF_FFFF
    return low if low < 0x8000_0000 else low ^ 0xFFFF_FFFF
