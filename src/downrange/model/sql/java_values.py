"""Converts texts to numbers and booleans as Java does. A text that Java refuses raises ValueError.

Python allows more in integers (blanks, underscores) and less in doubles (no suffix, other spellings).
"""

from __future__ import annotations

import math
import re
from typing import Final

_INTEGER: Final = re.compile(r"[+-]?\d+")
_DOUBLE: Final = re.compile(
    r"(?P<sign>[+-]?)(?:(?P<word>NaN|Infinity)"
    r"|(?P<decimal>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)[fFdD]?"
    r"|(?P<hexadecimal>0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)[pP][+-]?[0-9]+)[fFdD]?)"
)
_BLANKS: Final = "".join(map(chr, range(33)))


def to_int(text: str) -> int:
    """Integer.valueOf: 32 bits."""
    return _integer(text, 1 << 31)


def to_long(text: str) -> int:
    """Long.valueOf: 64 bits."""
    return _integer(text, 1 << 63)


def _integer(text: str, bound: int) -> int:
    if not text.isdecimal() and _INTEGER.fullmatch(text) is None:
        raise ValueError(f"{text!r} is no integer")
    number = int(text)
    if -bound <= number < bound:
        return number
    raise ValueError(f"{text} is out of range")


def to_double(text: str) -> float:
    """Double.valueOf."""
    if text.isascii() and text.replace(".", "", 1).isdigit():
        return float(text)  # the usual form of a number
    found = _DOUBLE.fullmatch(text.strip(_BLANKS))
    if found is None:
        raise ValueError(f"{text!r} is no number")
    sign = -1.0 if found["sign"] == "-" else 1.0
    if found["decimal"]:
        return math.copysign(float(found["decimal"]), sign)
    if found["word"]:
        return math.nan if found["word"] == "NaN" else sign * math.inf
    try:
        return math.copysign(float.fromhex(found["hexadecimal"]), sign)
    except OverflowError:
        return sign * math.inf


def to_boolean(text: str) -> bool:
    """Boolean.valueOf: everything but "true" is false."""
    return text.lower() == "true"


def order_doubles(left: float, right: float) -> int:
    """-1, 0 or 1 as from Double.compareTo: NaN is the largest and equal to itself, -0.0 is below 0.0."""
    if left < right:
        return -1
    if left > right:
        return 1
    first, second = _rank(left), _rank(right)
    return (first > second) - (first < second)


def _rank(number: float) -> int:
    """The order of numbers of which none is less than the other: -0.0, 0.0, NaN."""
    if math.isnan(number):
        return 2
    return 0 if number == 0 and math.copysign(1.0, number) < 0 else 1
