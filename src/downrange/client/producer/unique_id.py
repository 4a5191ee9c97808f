"""Unique message ids, made by the client before a message is sent. Layout: model/message_id.py."""

from __future__ import annotations

import itertools
import os
import random
import socket
import time
from typing import Final

from downrange.clock import Clock

_MILLIS: Final = 0xFFFFFFFF
_COUNTER: Final = 0xFFFF


class UniqueIds:
    """Gives every message of this process an id of its own: 32 hex digits, upper case.

    Tools read the time of sending out of the id, so its base is the start of the current month, local time. Any thread
    may call.
    """

    def __init__(self, clock: Clock, *, host: str | None = None, process_id: int | None = None) -> None:
        self._now = clock.now
        address = socket.inet_aton(host or local_address())
        process = (os.getpid() if process_id is None else process_id) & 0xFFFF
        # Java takes the hash of a class loader here: any number that differs between processes of one id does.
        constant = random.getrandbits(32)
        self._prefix = (address + process.to_bytes(2, "big") + constant.to_bytes(4, "big")).hex().upper()
        self.number = itertools.count().__next__  # no two threads get the same
        self.month = self._prefix, 0, 0
        """What all ids of the current month begin with, when it begins and when it ends."""
        # All but the counter is the same for every message of a millisecond.
        self._stem = -1, ""

    def next(self) -> str:
        return f"{self.stem(self._now())}{self.number() & _COUNTER:04X}"

    def stem(self, now: int) -> str:
        """An id made now, without the last four digits, which are those of a `number`."""
        millis, stem = self._stem
        if now != millis:
            _, start, end = self.month
            if not start <= now < end:
                start, end = month_around(now)
                self.month = self._prefix, start, end
            stem = f"{self._prefix}{(now - start) & _MILLIS:08X}"
            self._stem = now, stem
        return stem


def month_around(now_millis: int) -> tuple[int, int]:
    """When the month of `now_millis` begins and ends, local time, in milliseconds since 1970."""
    local = time.localtime(now_millis / 1000)
    start = time.mktime((local.tm_year, local.tm_mon, 1, 0, 0, 0, 0, 0, -1))
    end = time.mktime((local.tm_year, local.tm_mon + 1, 1, 0, 0, 0, 0, 0, -1))  # month 13 is January
    return int(start * 1000), int(end * 1000)


def local_address() -> str:
    """The IPv4 address other machines see, as far as this machine knows; no packet is sent to find out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
