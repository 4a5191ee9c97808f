"""Points in time and durations of protobuf, in milliseconds."""

from __future__ import annotations

from downrange.proxy.wire.messages import Dur, Ts

_MILLION = 1_000_000


def millis(time: Ts | Dur) -> int:
    return time.seconds * 1000 + time.nanos // _MILLION


def put(time: Ts | Dur, value: int) -> None:
    """Set a time in place, as protobuf wants it for members of a message."""
    time.seconds, rest = divmod(value, 1000)
    time.nanos = rest * _MILLION
