"""The queues of a store by topic and id: those in use as objects, the rest as little more than a number each."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from downrange.store.queues import QueueState

_NONE: Final = -1
Key = tuple[str, int]


class QueueStates(dict[Key, "QueueState"]):
    """Topic and id -> queue. A queue that sleeps is found like any other, and woken by that.

    Iterating, and counting with `len`, is about those that are awake. A broker may have tens of thousands of queues
    that nobody uses: awake each takes a kilobyte, asleep some fifty bytes, which say that it is there, and where its
    last record ends.
    """

    def __init__(self, wake: Callable[[str, int], QueueState]) -> None:
        super().__init__()
        self._wake = wake
        self._asleep: dict[str, array[int]] = {}  # where the last record of each queue ends, by its id

    def get(self, key: Key, default: object = None) -> QueueState | None:  # type: ignore[override]
        state = dict.get(self, key)
        return state if state is not None or not self._asleep else self._woken(key)

    def __missing__(self, key: Key) -> QueueState:
        state = self._woken(key)
        if state is None:
            raise KeyError(key)
        return state

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key) or (bool(self._asleep) and self._end_of(key) != _NONE)  # type: ignore[arg-type]

    def _end_of(self, key: Key) -> int:
        topic, queue_id = key
        ends = self._asleep.get(topic)
        return ends[queue_id] if ends is not None and 0 <= queue_id < len(ends) else _NONE

    def _woken(self, key: Key) -> QueueState | None:
        if self._end_of(key) == _NONE:
            return None
        state = self._wake(*key)  # if that fails, it sleeps on
        self._forget_sleeping(key)
        return state

    # -- sleeping ------------------------------------------------------------------------------------------------------

    def add_sleeping(self, key: Key, physical_end: int) -> None:
        """Of a queue that was taken out, keep that it is there, and where its last record ends."""
        topic, queue_id = key
        ends = self._asleep.get(topic)
        if ends is None:
            ends = self._asleep[topic] = array("q")
        ends.extend([_NONE] * (queue_id + 1 - len(ends)))
        ends[queue_id] = physical_end

    def shrink(self) -> None:
        """Many were taken out: a dictionary keeps the room for them until it is filled anew."""
        kept = list(self.items())
        self.clear()
        self.update(kept)

    def _forget_sleeping(self, key: Key) -> None:
        topic, queue_id = key
        ends = self._asleep[topic]
        ends[queue_id] = _NONE
        if max(ends) == _NONE:
            del self._asleep[topic]

    def sleeping(self) -> Iterator[tuple[str, int, int]]:
        """Topic, id, and where the last record ends, of each that sleeps; they may be woken meanwhile."""
        for topic, ends in list(self._asleep.items()):
            for queue_id, end in enumerate(ends):
                if end != _NONE:
                    yield topic, queue_id, end
