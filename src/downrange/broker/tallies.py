"""Counts by topic or group, and what they were at the samples of a minute, an hour and a day."""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from downrange.protocol.bodies.statistics import StatsItem

SIZE_BOUNDS: Final = (1 << 10, 1 << 12, 1 << 19, 1 << 20, 1 << 21, 1 << 22)
MINUTE, HOUR, DAY = 0, 1, 2
"""The windows of a tally."""
FIELDS: Final = 3  # calls, messages, bytes
_IDLE_SAMPLES: Final = 24 * 3600 // 10  # of the minute window: a day

K = TypeVar("K")


class Tally:
    """Counts of one key since it was first seen, and what they were at the last samples of each window."""

    __slots__ = ("bytes", "calls", "idle_samples", "messages", "seen_calls", "windows")

    def __init__(self) -> None:
        self.calls = 0
        self.messages = 0
        self.bytes = 0
        self.seen_calls = 0
        self.idle_samples = 0
        # Flat rows of calls, messages and bytes: a tuple a sample would take five times the memory.
        self.windows = (array("q"), array("q"), array("q"))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} calls={self.calls} messages={self.messages} bytes={self.bytes}>"

    def sample(self, window: int, kept: int) -> None:
        rows = self.windows[window]
        if not rows:  # a new key had nothing at the sample before
            rows.extend((0, 0, 0))
        rows.extend((self.calls, self.messages, self.bytes))
        if len(rows) > kept * FIELDS:
            del rows[:FIELDS]


class PutTally(Tally):
    """Counts of messages that came in, and how many there were of each size."""

    __slots__ = ("by_size",)

    def __init__(self) -> None:
        super().__init__()
        self.by_size = [0] * (len(SIZE_BOUNDS) + 1)


T = TypeVar("T", bound=Tally)


class Window:
    """When the samples of one window were taken. The rows of a tally belong to the newest of these times."""

    __slots__ = ("every_seconds", "kept", "times")

    def __init__(self, every_seconds: int, kept: int, now: int) -> None:
        self.every_seconds = every_seconds
        self.kept = kept
        self.times = deque([now], maxlen=kept)

    def rate_of(self, rows: array[int], field: int) -> StatsItem:
        """How fast a tally grew from the first to the last of the rows that it has for this window."""
        if not rows:
            return StatsItem()
        elapsed = self.times[-1] - self.times[-(len(rows) // FIELDS)]
        total = rows[field - FIELDS] - rows[field]
        calls = rows[-FIELDS] - rows[0]
        return StatsItem(
            sum=total,
            tps=total * 1000 / elapsed if elapsed > 0 else 0.0,
            avgpt=total / calls if calls > 0 else 0.0,
        )


class Tallies(Generic[K, T]):
    """The tallies of one kind by key, and one over all of them.

    Holds always: `whole` never counts backwards, although keys that were idle for a day are forgotten.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self.by_key: defaultdict[K, T] = defaultdict(make)
        self.whole = Tally()
        self._forgotten = Tally()

    @property
    def messages(self) -> int:
        return self._forgotten.messages + sum([tally.messages for tally in self.by_key.values()])

    @property
    def bytes(self) -> int:
        return self._forgotten.bytes + sum([tally.bytes for tally in self.by_key.values()])

    @property
    def calls(self) -> int:
        return self._forgotten.calls + sum([tally.calls for tally in self.by_key.values()])

    def sample(self, window: int, kept: int) -> None:
        self.whole.calls, self.whole.messages, self.whole.bytes = self.calls, self.messages, self.bytes
        self.whole.sample(window, kept)
        if window != MINUTE:
            for tally in self.by_key.values():
                tally.sample(window, kept)
            return
        silent = []
        for key, tally in self.by_key.items():
            if tally.calls != tally.seen_calls:
                tally.seen_calls = tally.calls
                tally.idle_samples = 0
            else:
                tally.idle_samples += 1
                if tally.idle_samples >= _IDLE_SAMPLES:
                    silent.append(key)
                if tally.idle_samples > kept:  # all rows are equal already: one more would change nothing
                    continue
            tally.sample(window, kept)
        for key in silent:
            self.forget(key)

    def forget(self, key: K) -> None:
        tally = self.by_key.pop(key)
        self._forgotten.calls += tally.calls
        self._forgotten.messages += tally.messages
        self._forgotten.bytes += tally.bytes

    def forget_where(self, is_unwanted: Callable[[K], bool]) -> None:
        for key in [key for key in self.by_key if is_unwanted(key)]:
            self.forget(key)
