"""Decides when to flush and which senders to tell. Pure: the broker's services do the flushing.

`FlushPolicy` decides when the commit log, the transient pool and the consume queues are flushed. `GroupCommit` has the
senders that wait under SYNC_FLUSH: one sync serves all whose messages were appended before it began. `QuickSyncs`
decides whether a sync goes to another thread, `LoneSender` whether it waits for other senders to share it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Final, Generic, NamedTuple, TypeVar

from downrange.store.config import StoreConfig

Token = TypeVar("Token")

_SOON_MILLIS: Final = 10  # with flushCommitLogTimed=false: how often to look whether enough pages are dirty


class FlushRound(NamedTuple):
    """A round of flushing: sync if at least `least_pages` are dirty; a round with 0 is thorough."""

    least_pages: int

    @property
    def is_thorough(self) -> bool:
        return self.least_pages == 0


@dataclass(frozen=True, slots=True)
class FlushTimes:
    """Pause between rounds, the least dirty pages for a sync, and the time after which a round is thorough."""

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
    """Decides when the next round is due and whether it is thorough. `now` is of a clock that nobody sets."""

    def __init__(self, times: FlushTimes, now: int) -> None:
        self._times = times
        self._last_round = now
        self._last_thorough = now

    @property
    def next_due(self) -> int:
        return self._last_round + self._times.interval_millis

    def due(self, now: int) -> FlushRound | None:
        """The round to do now, or None when it is too early. A round that is returned counts as done."""
        if now < self.next_due:
            return None
        self._last_round = now
        if now >= self._last_thorough + self._times.thorough_interval_millis:
            self._last_thorough = now
            return FlushRound(0)
        return FlushRound(self._times.least_pages)


_QUICK_SECONDS: Final = 0.0005
_FEWEST_AWAY: Final = 16
_MOST_AWAY: Final = 4096


class QuickSyncs:
    """Decides whether the thread that appends does the next sync itself.

    Passing a sync to another thread and learning of its end takes longer than a sync of a good disk, above all when the
    appending thread is busy. So this thread syncs itself as long as syncs are quick. After a slow sync the next ones go
    to the other thread, twice as many each time in a row.
    """

    def __init__(self) -> None:
        self._away = 0
        self._away_next = _FEWEST_AWAY

    @property
    def is_away(self) -> bool:
        """Whether the next sync goes to the other thread."""
        return self._away > 0

    def is_next_here(self) -> bool:
        """Call this once before each sync; if it is True, sync and then call `took`."""
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
    """Decides whether a sender is probably the only one, so that it is useless to wait for others to share its sync.

    A sender counts as alone when the last syncs, `_ALONE` of them, served one sender each, and no other sender came in
    the same turn of the loop.
    """

    def __init__(self) -> None:
        self._alike = 0
        self._is_turn_taken = False

    def is_here(self) -> bool:
        """Call this when a sender comes while none waits. If True, call `turn_over` after this turn of the loop."""
        if self._is_turn_taken:
            self._alike = 0
        self._is_turn_taken = self._alike >= _ALONE
        return self._is_turn_taken

    def turn_over(self) -> None:
        self._is_turn_taken = False

    def served(self, waiters: int) -> None:
        """Note how many senders a sync served."""
        self._alike = self._alike + 1 if waiters == 1 else 0


class FlushOutcome(Enum):
    """How the wait for a flush ended."""

    FLUSHED = "FLUSHED"
    TIMED_OUT = "TIMED_OUT"
    FAILED = "FAILED"


class Waiter(NamedTuple, Generic[Token]):
    """A sender that waits until the log is on disk up to an offset."""

    target_offset: int
    deadline: int
    token: Token


class Settled(NamedTuple, Generic[Token]):
    """A sender whose wait is over."""

    token: Token
    outcome: FlushOutcome


class GroupCommit(Generic[Token]):
    """The senders that wait for the disk, in the order of their offsets. For the store's own thread.

    Holds always: a sender gets FLUSHED only after a sync has reached its offset.
    """

    def __init__(self, timeout_millis: int) -> None:
        self._timeout_millis = timeout_millis
        self._waiting: deque[Waiter[Token]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def wait_for(self, target_offset: int, token: Token, now: int) -> None:
        """Let a sender wait. Offsets must grow from call to call, as those of appends do."""
        self._waiting.append(Waiter(target_offset, now + self._timeout_millis, token))

    def settle(self, flushed_offset: int) -> list[Settled[Token]]:
        """After a sync up to `flushed_offset`: release the senders whose messages end at or before it."""
        released = []
        waiting = self._waiting
        while waiting and waiting[0].target_offset <= flushed_offset:
            released.append(Settled(waiting.popleft().token, FlushOutcome.FLUSHED))
        return released

    def fail(self) -> list[Settled[Token]]:
        """After a sync failed: release all senders as failed."""
        failed = [Settled(waiter.token, FlushOutcome.FAILED) for waiter in self._waiting]
        self._waiting.clear()
        return failed

    def expire(self, now: int) -> list[Settled[Token]]:
        """Release senders that waited too long: their messages are stored, but perhaps not on disk."""
        late = []
        while self._waiting and self._waiting[0].deadline <= now:
            late.append(Settled(self._waiting.popleft().token, FlushOutcome.TIMED_OUT))
        return late
