"""The delays of messages with a delay level: `1s 5s 10s …` for level 1, 2, 3 and so on."""

from __future__ import annotations

from typing import Final

from downrange.model.errors import MessageError

DEFAULT_DELAY_LEVELS: Final = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
_UNIT_MILLIS: Final = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def parse_delay_levels(text: str) -> tuple[int, ...]:
    """The delay of level 1, 2, … in milliseconds. Raises MessageError."""
    delays = []
    for item in text.split():
        unit = _UNIT_MILLIS.get(item[-1])
        if unit is None or not item[:-1].isascii() or not item[:-1].isdigit():
            raise MessageError(f"messageDelayLevel={text}: {item!r} is not a number followed by s, m, h or d")
        delays.append(int(item[:-1]) * unit)
    if not delays:
        raise MessageError("messageDelayLevel is empty: expected at least one level such as 1s")
    return tuple(delays)
