"""Unique message ids, made by the client before a message is sent. Layout: model/message_id.py."""

from __future__ import annotations

import itertools
import os
import random
import socket
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from downrange.clock import Clock
from downrange.transport.own_address import own_address

_MILLIS: Final = 0xFFFFFFFF
_COUNTER: Final = 0xFFFF


class IdMonth(NamedTuple):
    """The ids of one month. A compiled step reads the fields by position."""

    prefix: str
    """The first 20 digits of all ids."""
    start: int
    end: int
    next_number: Callable[[], int]
    stem: Callable[[int], str]
    """`UniqueIds.stem`, for a message that is born in another month."""


class UniqueIds:
    """Gives every message of this process an id of its own: 32 hex digits, upper case.

    Tools read the time of sending out of the id, so its base is the start of the current month, local time. Any thread
    may call.
    """

    def __init__(self, clock: Clock, *, host: str | None = None, process_id: int | None = None) -> None:
        self._now = clock.now
        address = socket.inet_aton(host or own_address())
        process = (os.getpid() if process_id is None else process_id) & 0xFFFF
        # Java takes the hash of a class loader here; any number does that differs between processes with the same pid.
        constant = random.getrandbits(32)
        prefix = (address + process.to_bytes(2, "big") + constant.to_bytes(4, "big")).hex().upper()
        self.next_number = itertools.count().__next__  # no two threads get the same
        self.month = IdMonth(prefix, 0, 0, self.next_number, self.stem)
        # All but the counter is the same for every message of a millisecond.
        self._stem = -1, ""

    def next(self) -> str:
        return f"{self.stem(self._now())}{self.next_number() & _COUNTER:04X}"

    def stem(self, now: int) -> str:
        """The id of a message born at `now`, but for the last four digits, which are those of a `next_number`."""
        millis, stem = self._stem
        if now != millis:
            if not self.month.start <= now < self.month.end:
                start, end = month_around(now)
                self.month = self.month._replace(start=start, end=end)
            stem = f"{self.month.prefix}{(now - self.month.start) & _MILLIS:08X}"
            self._stem = now, stem
        return stem


def month_around(now_millis: int) -> tuple[int, int]:
    """When the month of `now_millis` begins and ends, local time, in milliseconds since 1970."""
    local = time.localtime(now_millis / 1000)
    start = time.mktime((local.tm_year, local.tm_mon, 1, 0, 0, 0, 0, 0, -1))
    end = time.mktime((local.tm_year, local.tm_mon + 1, 1, 0, 0, 0, 0, 0, -1))  # month 13 is January
    return int(start * 1000), int(end * 1000)
