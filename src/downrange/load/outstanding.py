"""The unanswered requests of a load, and when they were sent."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

FIRST_OPAQUE: Final = 100_000_000  # nine digits, as all opaques that follow


class Outstanding:
    """The times of unanswered requests. Each has a slot; its opaque is `FIRST_OPAQUE` plus the slot. For one thread.

    Holds always: the time of a slot (in nanoseconds) is zero exactly when its request is not under way, and `count` is
    the number of requests under way.
    """

    def __init__(self, slots: int) -> None:
        self.moments = array("q", bytes(8 * slots))
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def is_free(self, first: int, end: int) -> bool:
        return not (any(self.moments[first:end]) if end - first > 1 else self.moments[first])

    def add(self, first: int, end: int, moment: int) -> None:
        """Note that the requests of the free slots `first` to `end` were sent at one moment."""
        if end - first == 1:  # saves making an array
            self.moments[first] = moment
        else:
            self.moments[first:end] = array("q", (moment,)) * (end - first)
        self.count += end - first

    def add_each(self, first: int, moments: Sequence[int]) -> None:
        """Note the times of the requests of the free slots from `first` on."""
        self.moments[first : first + len(moments)] = array("q", moments)
        self.count += len(moments)

    def take(self, opaque: int) -> int:
        """Free the slot of an answered request and return its time; zero when it was not under way."""
        slot = opaque - FIRST_OPAQUE
        if not 0 <= slot < len(self.moments):
            return 0
        moment, self.moments[slot] = self.moments[slot], 0
        self.count -= moment > 0
        return moment
