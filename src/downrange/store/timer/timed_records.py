"""Many records of the timer topic at once, from the log into the index.

Both steps do only what is usual, and the callers do the rest record by record. In Python nothing is usual: all records
are taken one by one.
"""

from __future__ import annotations

import mmap

from downrange.compiled import accelerated
from downrange.store.queue.backlog import Backlog

Timed = tuple[int, int, int, int, int, bool, str]
"""The fields of a `TimedRecord`, and the real topic of the message."""


@accelerated
def timed_records(backlog: Backlog) -> list[Timed]:
    """What the index keeps of records of the timer topic, up to the first that is unusual.

    Usual is a whole record in the file of the backlog, with a time and a real topic in ASCII.
    """
    return []


@accelerated
def put_units(
    records: list[Timed],
    at: int,
    wheel: mmap.mmap,
    ticks: tuple[int, int],
    part: mmap.mmap,
    places: tuple[int, int, int],
    rules: tuple[int, int, int, int, int, int],
) -> tuple[int, int, int]:
    """`TimerIndex.put` for `records[at:]`, up to the first for which there is no room in the wheel or the file.

    `ticks` are the slots of the wheel and its last tick; `places` the start of the file `part` of the timer log, the
    end of the log, and where units must end; `rules` are precision, window, rest, half window, earliest tick and read
    time. Return the position of the first record that was not put, the new end of the log, and the last tick.
    """
    return at, places[1], ticks[1]
