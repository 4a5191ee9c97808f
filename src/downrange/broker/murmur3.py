"""MurmurHash3 (x64, 128 bits, seed 0), by which RocketMQ chooses the bits of a consumer."""

from __future__ import annotations

from typing import Final

_MASK: Final = 0xFFFF_FFFF_FFFF_FFFF
_C1: Final = 0x87C3_7B91_1142_53D5
_C2: Final = 0x4CF5_AD43_2745_937F


def murmur3_low(data: bytes) -> int:
    """The first 64 bits of the hash, unsigned."""
    first = second = 0
    whole = len(data) & ~15
    for at in range(0, whole, 16):
        first ^= _mixed(int.from_bytes(data[at : at + 8], "little"), _C1, 31, _C2)
        first = (_rotated(first, 27) + second) * 5 + 0x52DCE729 & _MASK
        second ^= _mixed(int.from_bytes(data[at + 8 : at + 16], "little"), _C2, 33, _C1)
        second = (_rotated(second, 31) + first) * 5 + 0x38495AB5 & _MASK
    # The remaining bytes are filled up with zeros; a half of zeros changes nothing.
    first ^= _mixed(int.from_bytes(data[whole : whole + 8], "little"), _C1, 31, _C2)
    second ^= _mixed(int.from_bytes(data[whole + 8 :], "little"), _C2, 33, _C1)
    first ^= len(data)
    second ^= len(data)
    first = first + second & _MASK
    second = second + first & _MASK
    return _scattered(first) + _scattered(second) & _MASK


def _mixed(half: int, before: int, bits: int, after: int) -> int:
    return _rotated(half * before & _MASK, bits) * after & _MASK


def _rotated(number: int, bits: int) -> int:
    return (number << bits | number >> 64 - bits) & _MASK


def _scattered(number: int) -> int:
    number = (number ^ number >> 33) * 0xFF51_AFD7_ED55_8CCD & _MASK
    number = (number ^ number >> 33) * 0xC4CE_B9FE_1A85_EC53 & _MASK
    return number ^ number >> 33
