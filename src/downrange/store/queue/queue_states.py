"""The queues of a store by topic and id: those in use as objects, the rest as little more than a number each."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from downrange.store.queue.queues import QueueState

_NONE: Final = -1
_NUMBERS: Final = 4
Key = tuple[str, int]


class Resting(NamedTuple):
    """All there is to know of a queue that nobody uses; the last three are of its `ConsumeQueue`."""

    physical_end: int
    """Where its last record ends."""
    end: int
    min: int
    min_physical: int


class QueueStates(dict[Key, "QueueState"]):
    """Topic and id -> queue. A queue that sleeps is found like any other, and woken by that.

    Iterating, and counting with `len`, is about those that are awake. A broker may have tens of thousands of queues
    that nobody uses: awake each takes a kilobyte, asleep some seventy bytes.
    """

    def __init__(self, wake: Callable[[str, int, Resting], QueueState]) -> None:
        super().__init__()
        self._wake = wake
        self._asleep: dict[str, array[int]] = {}  # by topic: four numbers for each queue id

    def get(self, key: Key, default: object = None) -> QueueState | None:  # type: ignore[override]
        state = dict.get(self, key)
        return state if state is not None or not self._asleep else self._woken(key)

    def __missing__(self, key: Key) -> QueueState:
        state = self._woken(key)
        if state is None:
            raise KeyError(key)
        return state

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key) or (bool(self._asleep) and self._resting(key) is not None)  # type: ignore[arg-type]

    def _resting(self, key: Key) -> Resting | None:
        topic, queue_id = key
        numbers = self._asleep.get(topic)
        at = queue_id * _NUMBERS
        if numbers is None or not 0 <= at < len(numbers) or numbers[at] == _NONE:
            return None
        return Resting(*numbers[at : at + _NUMBERS])

    def _woken(self, key: Key) -> QueueState | None:
        resting = self._resting(key)
        if resting is None:
            return None
        state = self._wake(*key, resting)  # if that fails, it sleeps on
        self._forget_sleeping(key)
        return state

    # -- sleeping ------------------------------------------------------------------------------------------------------

    def add_sleeping(self, key: Key, resting: Resting) -> None:
        """Note a queue as asleep; it must have been taken out of this table before."""
        topic, queue_id = key
        numbers = self._asleep.get(topic)
        if numbers is None:
            numbers = self._asleep[topic] = array("q")
        at = queue_id * _NUMBERS
        numbers.extend([_NONE] * (at + _NUMBERS - len(numbers)))
        numbers[at : at + _NUMBERS] = array("q", resting)

    def shrink(self) -> None:
        """Give back the memory of queues that were taken out: a dictionary keeps it until it is filled anew."""
        kept = list(self.items())
        self.clear()
        self.update(kept)

    def _forget_sleeping(self, key: Key) -> None:
        topic, queue_id = key
        numbers = self._asleep[topic]
        numbers[queue_id * _NUMBERS] = _NONE
        if max(numbers[::_NUMBERS]) == _NONE:
            del self._asleep[topic]

    def sleeping(self) -> Iterator[tuple[str, int, int]]:
        """Each queue that sleeps: its topic, its id, and where its last record ends. Queues may be woken meanwhile."""
        for topic, numbers in list(self._asleep.items()):
            for queue_id, end in enumerate(numbers[::_NUMBERS]):
                if end != _NONE:
                    yield topic, queue_id, end
