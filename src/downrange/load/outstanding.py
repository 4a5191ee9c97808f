"""Which requests of a load are on their way, and since when."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

FIRST_OPAQUE: Final = 100_000_000  # nine digits, and so are all that follow


class Outstanding:
    """A request has a slot, and `FIRST_OPAQUE` plus its slot for opaque. One thread uses it.

    Holds always: a slot's moment (in nanoseconds) is zero exactly when its request is not on its way, and `count` is
    the number of those that are.
    """

    __slots__ = ("count", "moments")

    def __init__(self, slots: int) -> None:
        self.moments = array("q", bytes(8 * slots))
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def is_free(self, first: int, end: int) -> bool:
        return not (any(self.moments[first:end]) if end - first > 1 else self.moments[first])

    def add(self, first: int, end: int, moment: int) -> None:
        """The free slots `first` to `end`, all sent at once."""
        if end - first == 1:  # spares an array
            self.moments[first] = moment
        else:
            self.moments[first:end] = array("q", (moment,)) * (end - first)
        self.count += end - first

    def add_each(self, first: int, moments: Sequence[int]) -> None:
        """The free slots from `first` on, a moment for each."""
        self.moments[first : first + len(moments)] = array("q", moments)
        self.count += len(moments)

    def take(self, opaque: int) -> int:
        """The moment of a request that was answered; zero when it was not on its way."""
        slot = opaque - FIRST_OPAQUE
        if not 0 <= slot < len(self.moments):
            return 0
        moment, self.moments[slot] = self.moments[slot], 0
        self.count -= moment > 0
        return moment
