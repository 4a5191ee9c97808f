"""The double write of a SYNC_MASTER: a sender waits until a slave has its message, too."""

from __future__ import annotations

from collections.abc import Callable

from downrange.broker.live_config import LiveConfig
from downrange.clock import Clock
from downrange.store.group_commit import FlushOutcome, GroupCommit, Settled
from downrange.store.new_message import PutMessageStatus

Tell = Callable[[PutMessageStatus], None]


class WaitingSenders:
    """The senders that wait for a slave, in the order of their messages. For the loop's thread.

    Holds always: a sender is told PUT_OK only after a slave reported an offset at or beyond the end of its message.
    """

    def __init__(self, config: LiveConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._waiting: GroupCommit[Tell] = GroupCommit(config.store.slave_timeout)
        self.acknowledged_offset = 0
        """The highest offset that a slave has reported; it never goes back."""

    def __len__(self) -> int:
        return len(self._waiting)

    def tell_when_copied(self, end_offset: int, tell: Tell, *, slaves: int) -> None:
        """Call `tell`, which must not raise, when a slave has the log up to `end_offset`, or will not have it in time.

        `tell` is called at once if there is no slave, or if all are too far behind.
        """
        gap = end_offset - self.acknowledged_offset
        if not slaves or gap >= self._config.store.ha_slave_fallbehind_max:
            tell(PutMessageStatus.SLAVE_NOT_AVAILABLE)
        elif gap <= 0:
            tell(PutMessageStatus.PUT_OK)
        else:
            self._waiting.wait_for(end_offset, tell, self._millis())

    def acknowledge(self, offset: int) -> None:
        """Tell the senders whose messages end at or before `offset`, which a slave reported."""
        if offset > self.acknowledged_offset:
            self.acknowledged_offset = offset
            _tell(self._waiting.settle(offset))

    def expire(self) -> None:
        """End waits of more than slaveTimeout: these messages are stored here, and perhaps on no slave."""
        if len(self._waiting):
            _tell(self._waiting.expire(self._millis()))

    def close(self) -> None:
        _tell(self._waiting.fail())

    def _millis(self) -> int:
        return int(self._clock.monotonic() * 1000)


def _tell(settled: list[Settled[Tell]]) -> None:
    for tell, outcome in settled:
        is_copied = outcome is FlushOutcome.FLUSHED
        tell(PutMessageStatus.PUT_OK if is_copied else PutMessageStatus.FLUSH_SLAVE_TIMEOUT)
