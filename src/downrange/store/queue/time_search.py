"""Which of many messages was stored nearest to a moment."""

from __future__ import annotations

from collections.abc import Callable


def nearest_by_time(timestamp: int, low: int, high: int, store_time_of: Callable[[int], int | None]) -> int | None:
    """The number from `low` to `high` whose message was stored nearest to `timestamp`; of two equally near the lower.

    `store_time_of(number)` is None for what has expired, as then has all before, and negative for what cannot be read:
    then the answer is 0. It is None when everything has expired.
    """
    earlier = later = -1
    earlier_time = later_time = -1
    while low <= high:
        middle = (low + high) // 2
        time = store_time_of(middle)
        if time is None:
            low = middle + 1
        elif time < 0:
            return 0
        elif time == timestamp:
            return middle
        elif time > timestamp:
            high, later, later_time = middle - 1, middle, time
        else:
            low, earlier, earlier_time = middle + 1, middle, time
    if earlier < 0:
        return later if later >= 0 else None
    if later < 0:
        return earlier
    return later if timestamp - earlier_time > later_time - timestamp else earlier
