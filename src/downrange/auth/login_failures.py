"""Counts failed logins by source address: which addresses must be slowed down, and which failures get a log line.

Each address may fail 20 times at once, and then once a second. Beyond that it is in debt: its connections wait a second
before each further attempt. That slows guessing down, and locks nobody out: a client with the right key behind the same
address waits one second once for each connection, and not at all for requests that its account repeats.

Pure: the time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from ipaddress import IPv6Address
from typing import Final, NamedTuple

BURST: Final = 20
REFILL_PER_SECOND: Final = 1.0
MOST_SOURCES: Final = 4096
QUIET_SECONDS: Final = 60.0
MOST_LINES_A_MINUTE: Final = 60
_NETWORK_BITS: Final = 64  # a peer with IPv6 usually has a whole /64


class _Source(NamedTuple):
    """An address that failed: attempts that are left at a time, the time of the last log line, failures since then."""

    left: float
    at: float
    logged_at: float | None
    left_out: int


class LoginFailures:
    """The sources whose logins failed lately.

    Holds always: at most `MOST_SOURCES` are known, whoever attacks; the source that failed longest ago is forgotten
    first. At most `MOST_LINES_A_MINUTE` lines are due in a minute, one of them for each source.
    """

    def __init__(self) -> None:
        self.count = 0
        """Failures from all sources."""
        self._sources: OrderedDict[str, _Source] = OrderedDict()
        self._minute = 0.0
        self._lines = 0

    def __len__(self) -> int:
        return len(self._sources)

    def __repr__(self) -> str:
        return f"<LoginFailures {self.count} from {len(self._sources)} sources>"

    def failed(self, address: str, now: float) -> int | None:
        """Count a failure; the number of failures that got no line before this one, or None if this one gets none."""
        self.count += 1
        name = source_of(address)
        source = self._sources.pop(name, None) or _Source(BURST, now, None, 0)
        left = max(0.0, _left(source, now) - 1)
        is_due = source.logged_at is None or now - source.logged_at >= QUIET_SECONDS
        left_out: int | None = None
        if is_due and self._has_line(now):
            left_out = source.left_out
            self._sources[name] = _Source(left, now, now, 0)
        else:
            self._sources[name] = _Source(left, now, source.logged_at, source.left_out + 1)
        if len(self._sources) > MOST_SOURCES:
            self._sources.popitem(last=False)
        return left_out

    def is_in_debt(self, address: str, now: float) -> bool:
        """Whether an address failed so often that its next attempts must wait."""
        source = self._sources.get(source_of(address))
        return source is not None and _left(source, now) < 1

    def _has_line(self, now: float) -> bool:
        if now - self._minute >= QUIET_SECONDS:
            self._minute, self._lines = now, 0
        self._lines += 1
        return self._lines <= MOST_LINES_A_MINUTE


def source_of(address: str) -> str:
    """The source that an address counts for: itself, or the network of an IPv6 address."""
    if ":" not in address:
        return address
    try:
        parsed = IPv6Address(address.strip("[]").partition("%")[0])
    except ValueError:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(IPv6Address(int(parsed) >> _NETWORK_BITS << _NETWORK_BITS))


def _left(source: _Source, now: float) -> float:
    return min(float(BURST), source.left + max(0.0, now - source.at) * REFILL_PER_SECOND)
