"""Address patterns of white lists. [RemoteAddressStrategyFactory]

    *   *.*.*.*   *:*:*:*:*:*:*:*      every address
    10.1.2.3   fe80::1                 one address
    10.1.2.3,10.1.2.4                  several
    10.1.2.{3,4}   fe80::{1,2}         several that differ in their last part
    10.1.2.*   10.1.*.*   10.*.*.*     all that begin so
    10.1.2.7-20   10.1.3-9.*           a range in one part; only `*` may follow it
    fe80::1:*   fe80::1-ff:*           IPv6: range or `*` in the last two parts, numbers in hex

A blank pattern stands for no address.
"""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final, NamedTuple

_EVERY: Final = frozenset({"*", "*.*.*.*", "*:*:*:*:*:*:*:*"})
_V4_BITS: Final = 32
_V6_BITS: Final = 128
_REMEMBERED_ADDRESSES: Final = 4096


class AddressRange(NamedTuple):
    """All addresses of one kind between two, as numbers; the kind is the number of bits."""

    bits: int
    first: int
    last: int


Addresses = tuple[AddressRange, ...]
"""What a pattern stands for."""

_ALL: Final = (AddressRange(_V4_BITS, 0, (1 << _V4_BITS) - 1), AddressRange(_V6_BITS, 0, (1 << _V6_BITS) - 1))


def parse_addresses(pattern: str) -> Addresses:
    """The addresses that a pattern stands for. Raises a ValueError that says what is wrong with the pattern."""
    text = pattern.strip()
    if not text:
        return ()
    if text in _EVERY:
        return _ALL
    try:
        if text.endswith("}"):
            head, _, tail = text[:-1].rpartition("{")
            if not head.endswith((".", ":")):
                raise ValueError
            return tuple(_one(head + part.strip()) for part in tail.split(","))
        if "," in text:
            return tuple(_one(part.strip()) for part in text.split(","))
        if "*" in text or "-" in text:
            return (_range(text),)
        return (_one(text),)
    except ValueError:
        raise ValueError(
            f"{text[:100]!r} is no address pattern; patterns are like 10.1.2.3, 10.1.2.*, 10.1.2.7-20, 10.1.2.{{3,4}}"
        ) from None


def matches(addresses: Addresses, address: str) -> bool:
    """Whether the address of a peer, without its port, is one of these."""
    if not addresses:
        return False
    found = _number(address)
    if found is None:
        return False
    bits, number = found
    return any(bits == one.bits and one.first <= number <= one.last for one in addresses)


@lru_cache(_REMEMBERED_ADDRESSES)
def _number(address: str) -> tuple[int, int] | None:
    """The kind of an address and its number; an IPv4 address in IPv6 clothes is an IPv4 address."""
    try:
        parsed = ip_address(address.strip("[]").partition("%")[0])
    except ValueError:
        return None
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return parsed.max_prefixlen, int(parsed)


def _one(text: str) -> AddressRange:
    found = _number(text)
    if found is None or "%" in text or "[" in text:
        raise ValueError
    bits, number = found
    return AddressRange(bits, number, number)


def _range(text: str) -> AddressRange:
    """The addresses of a pattern with `*` or a range: a part with either, behind it only `*`."""
    if ":" in text:
        separator, base, part_bits, earliest = ":", 16, 16, -2
    else:
        separator, base, part_bits, earliest = ".", 10, 8, -3
    parts = [part.strip() for part in text.split(separator)]
    place = next(place for place, part in enumerate(parts) if "*" in part or "-" in part) - len(parts)
    if place < earliest or any(part != "*" for part in parts[place + 1 or len(parts) :]):
        raise ValueError
    largest = (1 << part_bits) - 1
    if parts[place] == "*":
        low, high = 0, largest
    else:
        low, high = (_part(digits.strip(), base) for digits in parts[place].split("-"))
    if not low <= high <= largest:
        raise ValueError
    beginning = separator.join(parts[:place] + ["0"] * -place)
    start = int(IPv6Address(beginning) if base == 16 else IPv4Address(beginning))
    below = part_bits * (-place - 1)
    bits = _V6_BITS if base == 16 else _V4_BITS
    return AddressRange(bits, start + (low << below), start + (high << below) + (1 << below) - 1)


def _part(digits: str, base: int) -> int:
    if not digits.isascii() or not digits.isalnum():  # int() would take signs, blanks and underscores
        raise ValueError
    return int(digits, base)
