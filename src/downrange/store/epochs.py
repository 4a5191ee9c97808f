"""Epochs of a log: which part of it was written under which master. Pure. [EpochFileCache]

An epoch is the term of one master. An entry says where the first byte of an epoch lies; its end is the start of the
next entry, and the last entry is open.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from downrange.store.errors import StoreError


class Epoch(NamedTuple):
    """The number of an epoch and the offset of its first byte."""

    epoch: int
    start: int


class StaleEpoch(StoreError):
    """An epoch is not newer than those that are known already."""


class EpochList:
    """The epochs of one log.

    Holds always: numbers and starts rise strictly from entry to entry. So no two epochs have one start: two masters
    that wrote different bytes at one offset wrote them under different entries.
    """

    def __init__(self, entries: Iterable[Epoch] = ()) -> None:
        self.entries: tuple[Epoch, ...] = tuple(entries)
        for before, after in zip(self.entries, self.entries[1:], strict=False):
            if after.epoch <= before.epoch or after.start <= before.start:
                raise StoreError(f"epoch {after.epoch} from {after.start} cannot follow {before.epoch}, {before.start}")
        if self.entries and (self.entries[0].epoch < 0 or self.entries[0].start < 0):
            raise StoreError(f"no epoch: {self.entries[0].epoch}-{self.entries[0].start}")

    def __repr__(self) -> str:
        return f"<EpochList {' '.join(f'{entry.epoch}-{entry.start}' for entry in self.entries)}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EpochList) and self.entries == other.entries

    __hash__ = None  # type: ignore[assignment]

    @property
    def last(self) -> Epoch | None:
        return self.entries[-1] if self.entries else None

    def at(self, offset: int) -> Epoch | None:
        """The epoch of the byte at `offset`; None for bytes before the first entry."""
        return next((entry for entry in reversed(self.entries) if entry.start <= offset), None)

    def following(self, entry: Epoch) -> Epoch | None:
        """The entry at which an entry ends; None for the last one, which is open."""
        return next((later for later in self.entries if later.epoch > entry.epoch), None)

    def appended(self, epoch: int, start: int) -> EpochList:
        """The list with a new last epoch. Entries at or behind its start go: nothing of them is in the log.

        RocketMQ refuses an epoch that begins where the last one began, and goes on under the old number.
        """
        kept = self.before(start)
        if kept.last is not None and epoch <= kept.last.epoch:
            raise StaleEpoch(f"epoch {epoch} from {start} is not newer than epoch {kept.last.epoch}")
        return EpochList((*kept.entries, Epoch(epoch, start)))

    def before(self, offset: int) -> EpochList:
        """The list of a log that was cut at `offset`."""
        return EpochList(entry for entry in self.entries if entry.start < offset)

    def within(self, end: int) -> EpochList:
        """The list of a log that ends at `end`: an entry behind it was noted before its first byte came."""
        return EpochList(entry for entry in self.entries if entry.start <= end)

    def without_prefix(self, min_offset: int) -> EpochList:
        """The list of a log whose files before `min_offset` were deleted; the last entry always stays."""
        ends = [later.start for later in self.entries[1:]]
        gone = sum(end < min_offset for end in ends)
        return EpochList(self.entries[gone:])


def common_point(own: EpochList, own_end: int, theirs: EpochList, their_end: int) -> int | None:
    """The offset up to which two logs are equal for certain; None when their epochs do not tell.

    The newest epoch that both logs have with one start is the last one that they wrote together; both have its bytes as
    far as the shorter one goes. Logs whose first epochs differ and begin at 0 have nothing in common.
    """
    starts = dict(theirs.entries)
    for entry in reversed(own.entries):
        if starts.get(entry.epoch) == entry.start:
            return min(_end(own, entry, own_end), _end(theirs, entry, their_end))
    begins = {epochs.entries[0].start if epochs.entries else None for epochs in (own, theirs)}
    return 0 if begins == {0} else None


def _end(epochs: EpochList, entry: Epoch, log_end: int) -> int:
    following = epochs.following(entry)
    return log_end if following is None else min(following.start, log_end)
