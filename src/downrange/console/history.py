"""Figures over time, in memory: every 10 seconds for an hour, every minute for a day.

A ring takes one row of figures at a time. A figure that is not known is NaN, and charts leave a gap there.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from typing import Final

FINE_SECONDS: Final = 10
COARSE_SECONDS: Final = 60
HOUR: Final = 3600
DAY: Final = 24 * HOUR
RANGES: Final = {"1h": HOUR, "6h": 6 * HOUR, "24h": DAY, "7d": 7 * DAY, "30d": 30 * DAY}

Row = tuple[float, ...]
"""Seconds since 1970, then the figures."""


class Level:
    """Rows of one spacing in one array, the oldest first; rows older than `keep` seconds are cut off in blocks."""

    def __init__(self, spacing: int, keep: int, width: int) -> None:
        self.spacing = spacing
        self._most = keep // spacing
        self._width = width + 1
        self._values = array("d")
        self._last = -math.inf

    def __len__(self) -> int:
        return len(self._values) // self._width

    def add(self, row: Row) -> bool:
        """Take a row unless the last one is younger than the spacing; whether it was taken."""
        slot = row[0] // self.spacing
        if slot <= self._last:
            return False
        self._last = slot
        self._values.extend(row)
        if len(self) > self._most + self._most // 8:
            del self._values[: (len(self) - self._most) * self._width]
        return True

    def rows(self, begin: float) -> Iterator[Row]:
        width = self._width
        for at in range(0, len(self._values), width):
            if self._values[at] >= begin:
                yield tuple(self._values[at : at + width])


class Ring:
    """One hour finely and one day coarsely, of some figures that belong together."""

    def __init__(self, width: int) -> None:
        self.fine = Level(FINE_SECONDS, HOUR, width)
        self.coarse = Level(COARSE_SECONDS, DAY, width)

    def add(self, seconds: float, figures: Sequence[float | None]) -> bool:
        """Take the figures of now; whether the minute is a new one."""
        row = (seconds, *(math.nan if figure is None else figure for figure in figures))
        self.fine.add(row)
        return self.coarse.add(row)

    def put(self, rows: Sequence[Row]) -> None:
        """Rows of before a restart."""
        for row in rows:
            self.coarse.add(row)

    def rows(self, begin: float, now: float) -> list[Row]:
        """Rows since `begin`. Of the last hour the fine ones, and coarse ones where those are of before a restart."""
        coarse, fine = list(self.coarse.rows(begin)), list(self.fine.rows(begin))
        if begin >= now - HOUR - FINE_SECONDS:
            return [row for row in coarse if not fine or row[0] < fine[0][0]] + fine
        newest = coarse[-1][0] if coarse else begin
        return coarse + [row for row in fine if row[0] >= newest + COARSE_SECONDS][-1:]


class History:
    """The rings of one cluster: `cluster` has messages in and out a second, `group:NAME` behind, oldest and dead.

    `broker:NAME` has a one as long as its master answers: after a restart it is known which brokers there were.
    """

    def __init__(self) -> None:
        self._rings: dict[str, Ring] = {}

    def add(self, name: str, seconds: float, figures: Sequence[float | None]) -> bool:
        ring = self._rings.get(name)
        if ring is None:
            ring = self._rings[name] = Ring(len(figures))
        return ring.add(seconds, figures)

    def put(self, name: str, rows: Sequence[Row]) -> None:
        if rows and name not in self._rings:
            self._rings[name] = Ring(len(rows[0]) - 1)
            self._rings[name].put(rows)

    def rows(self, name: str, begin: float, now: float) -> list[Row]:
        ring = self._rings.get(name)
        return [] if ring is None else ring.rows(begin, now)

    def before(self, name: str, begin: float, now: float) -> Row | None:
        """The first row since `begin`."""
        rows = self.rows(name, begin, now)
        return rows[0] if rows else None

    def above_zero_since(self, name: str, now: float) -> float | None:
        """Since when the first figure has been above zero without a break; None when it is not."""
        since: float | None = None
        fine = self.rows(name, now - HOUR, now)
        coarse = [row for row in self.rows(name, now - DAY, now) if not fine or row[0] < fine[0][0]]
        for row in reversed([*coarse, *fine]):
            if not row[1] > 0:
                break
            since = row[0]
        return since

    def forget(self, name: str) -> None:
        self._rings.pop(name, None)


def thinned(rows: Sequence[Row], most: int) -> list[Row]:
    """At most `most` rows, evenly chosen, the last one always among them."""
    if len(rows) <= most:
        return list(rows)
    step = len(rows) / most
    chosen = [rows[int(index * step)] for index in range(most - 1)]
    return [*chosen, rows[-1]]
