"""When to flush, and for whom. Pure: takes the time, returns what to do; the broker's services do it.

`FlushPolicy` answers "is it time?" for the commit log, the transient pool and the consume queues. `GroupCommit` is the
waiting room of SYNC_FLUSH: one sync serves everybody whose message was appended before it began. `QuickSyncs` says
whether a sync is worth another thread, `LoneSender` whether it is worth looking for others to share it with.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Final, Generic, NamedTuple, TypeVar

from downrange.store.config import StoreConfig

Token = TypeVar("Token")

_SOON_MILLIS: Final = 10


class FlushRound(NamedTuple):
    """What a flusher should do now: sync if so many pages are dirty; 0 pages means thoroughly."""

    least_pages: int

    @property
    def is_thorough(self) -> bool:
        return self.least_pages == 0


@dataclass(frozen=True, slots=True)
class FlushTimes:
    """Pause between rounds, the pages that make one worth while, and after how long a round is thorough."""

    interval_millis: int
    least_pages: int
    thorough_interval_millis: int

    @classmethod
    def of_commit_log(cls, config: StoreConfig) -> FlushTimes:
        return cls(
            config.flush_interval_commit_log if config.flush_commit_log_timed else _SOON_MILLIS,
            config.flush_commit_log_least_pages,
            config.flush_commit_log_thorough_interval,
        )

    @classmethod
    def of_transient_pool(cls, config: StoreConfig) -> FlushTimes:
        return cls(
            config.commit_interval_commit_log,
            config.commit_commit_log_least_pages,
            config.commit_commit_log_thorough_interval,
        )

    @classmethod
    def of_consume_queues(cls, config: StoreConfig) -> FlushTimes:
        return cls(
            config.flush_interval_consume_queue,
            config.flush_consume_queue_least_pages,
            config.flush_consume_queue_thorough_interval,
        )


class FlushPolicy:
    """Says when the next round is due and whether it is a thorough one."""

    def __init__(self, times: FlushTimes, now: int) -> None:
        self._times = times
        self._last_round = now
        self._last_thorough = now

    @property
    def next_due(self) -> int:
        return self._last_round + self._times.interval_millis

    def due(self, now: int) -> FlushRound | None:
        """The round to do now, or None when it is too early. A round that is handed out counts as done."""
        if self._last_round <= now < self.next_due:
            return None
        self._last_round = now
        # A clock that was set back makes a round thorough rather than never.
        if not self._last_thorough <= now < self._last_thorough + self._times.thorough_interval_millis:
            self._last_thorough = now
            return FlushRound(0)
        return FlushRound(self._times.least_pages)


_QUICK_SECONDS: Final = 0.0005
_FEWEST_AWAY: Final = 16
_MOST_AWAY: Final = 4096


class QuickSyncs:
    """Whether the thread that appends does the next sync itself.

    To hand a sync to another thread and hear of its end takes longer than a good disk needs, and all the more when the
    one that appends is busy. So it does them as long as they are quick. After a slow one the next go to the other
    thread, more of them every time in a row.
    """

    def __init__(self) -> None:
        self._away = 0
        self._away_next = _FEWEST_AWAY

    @property
    def is_away(self) -> bool:
        """Will the next one go to the other thread?"""
        return self._away > 0

    def is_next_here(self) -> bool:
        """To be asked once before each sync; after a True, tell `took`."""
        if self._away:
            self._away -= 1
            return False
        return True

    def took(self, seconds: float) -> None:
        if seconds < _QUICK_SECONDS:
            self._away_next = _FEWEST_AWAY
        else:
            self._away = self._away_next
            self._away_next = min(2 * self._away_next, _MOST_AWAY)


_ALONE: Final = 8


class LoneSender:
    """Whether one who comes to wait is the only one, as far as one can know.

    Then looking for others to share the sync with is in vain. A sender is alone when so many syncs in a row served one
    each, and nobody else came in the same turn of the loop.
    """

    def __init__(self) -> None:
        self._alike = 0
        self._is_turn_taken = False

    def is_here(self) -> bool:
        """To be asked when one comes while nobody waits. After a True, tell when this turn of the loop is over."""
        if self._is_turn_taken:
            self._alike = 0
        self._is_turn_taken = self._alike >= _ALONE
        return self._is_turn_taken

    def turn_over(self) -> None:
        self._is_turn_taken = False

    def served(self, waiters: int) -> None:
        """A sync served so many."""
        self._alike = self._alike + 1 if waiters == 1 else 0


class FlushOutcome(Enum):
    """How waiting for a flush ended."""

    FLUSHED = "FLUSHED"
    TIMED_OUT = "TIMED_OUT"
    FAILED = "FAILED"


class Waiter(NamedTuple, Generic[Token]):
    """Somebody who waits until the log is safe up to an offset."""

    target_offset: int
    deadline: int
    token: Token


class Settled(NamedTuple, Generic[Token]):
    """A waiter whose wait is over."""

    token: Token
    outcome: FlushOutcome


class GroupCommit(Generic[Token]):
    """Those who wait for the disk, in the order of their offsets.

    Who is told FLUSHED is safe: `settle` only passes offsets that a sync has reached. For the store's own thread.
    """

    def __init__(self, timeout_millis: int) -> None:
        self._timeout_millis = timeout_millis
        self._waiting: deque[Waiter[Token]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def wait_for(self, target_offset: int, token: Token, now: int) -> None:
        """Enter the waiting room. Offsets only grow from caller to caller, as appends do."""
        self._waiting.append(Waiter(target_offset, now + self._timeout_millis, token))

    def settle(self, flushed_offset: int) -> list[Settled[Token]]:
        """A sync succeeded up to here: release everybody whose message lies before."""
        released = []
        waiting = self._waiting
        while waiting and waiting[0].target_offset <= flushed_offset:
            released.append(Settled(waiting.popleft().token, FlushOutcome.FLUSHED))
        return released

    def fail(self) -> list[Settled[Token]]:
        """A sync failed: nobody who waits now can be promised anything."""
        failed = [Settled(waiter.token, FlushOutcome.FAILED) for waiter in self._waiting]
        self._waiting.clear()
        return failed

    def expire(self, now: int) -> list[Settled[Token]]:
        """Give up on those who waited too long: their message is stored, whether it is safe is not known."""
        late = []
        while self._waiting and self._waiting[0].deadline <= now:
            late.append(Settled(self._waiting.popleft().token, FlushOutcome.TIMED_OUT))
        return late
