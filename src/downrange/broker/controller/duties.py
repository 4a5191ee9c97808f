"""What a broker reads from its log and its tables when it becomes master, and forgets when it is no master any more."""

from __future__ import annotations

from dataclasses import dataclass

from downrange.broker.pop.revival import Revival
from downrange.broker.services.timer import TimerService
from downrange.broker.table_journal import TableJournal
from downrange.broker.topics import Topics
from downrange.broker.transactions.half_messages import HalfMessages


@dataclass(frozen=True, slots=True)
class Duties:
    """The duties of a master: half messages are checked, leases of POP end, timer messages are delivered."""

    journal: TableJournal
    half_messages: HalfMessages
    revival: Revival
    timer: TimerService
    topics: Topics

    def begin(self) -> None:
        self.journal.take_over()
        self.half_messages.load()
        self.topics.adopt(self.half_messages.destinations())
        self.revival.recover()
        self.timer.begin_delivery()

    def began(self) -> None:
        self.journal.took_over()

    def log_cut(self, end_offset: int) -> None:
        """The log was cut: what was made of the records that are gone goes, too."""
        self.journal.log_may_be_cut()
        self.timer.truncated(end_offset)

    def end(self) -> None:
        self.revival.rest()
        self.journal.log_may_be_cut()
