"""From the options of a reader to offsets: a word, a time or numbers become one offset for each queue."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from downrange.model.message import MessageQueue
from downrange.spark.errors import NothingToRead
from downrange.spark.offsets import FROM_EARLIEST, FROM_LATEST, Offsets, describe
from downrange.spark.options import EARLIEST, GROUP, ReadPosition
from downrange.spark.planner import Reach


class Origins(Protocol):
    """A cluster or a store directory, for the driver."""

    def queues(self) -> list[MessageQueue]:
        """The queues that the options choose and that exist now."""
        ...

    def reach(self, queues: Collection[MessageQueue], *, must_answer: bool) -> dict[MessageQueue, Reach]:
        """The offset ranges of queues. Without `must_answer`, queues whose broker is away are left out."""
        ...

    def at_time(self, times: Mapping[MessageQueue, int], reach: Mapping[MessageQueue, Reach]) -> Offsets:
        """The offset of the first message of each queue stored at its time or later; the end if there is none."""
        ...

    def committed(self, queues: Collection[MessageQueue]) -> Offsets:
        """The committed offsets of the group; queues without one are left out."""
        ...

    def commit(self, offsets: Offsets) -> None: ...


def resolve(
    which: str, place: ReadPosition, otherwise: str, reach: Mapping[MessageQueue, Reach], origins: Origins
) -> Offsets:
    """The offset of every queue of `reach` that `place` means; `otherwise` is the word for queues it does not name.

    `which` is `starting` or `ending`: of a queue that a group has never committed, all messages are still to be read.
    """
    if place.millis is not None:
        return origins.at_time(dict.fromkeys(reach, place.millis), reach)
    named = place.offsets or place.times or {}
    if missing := [queue for queue in named if queue not in reach]:
        raise NothingToRead(f"{which}Offsets names queues that are not read: {describe(missing)}")
    word = place.word or otherwise
    begins = word == EARLIEST or (word == GROUP and which == "starting")
    found = {queue: there.minimum if begins else there.maximum for queue, there in reach.items()}
    if word == GROUP:
        found |= origins.committed(reach)
    if place.times is not None:
        found |= origins.at_time(place.times, reach)
    words = {FROM_EARLIEST: lambda there: there.minimum, FROM_LATEST: lambda there: there.maximum}
    for queue, offset in (place.offsets or {}).items():
        found[queue] = words[offset](reach[queue]) if offset in words else offset
    return found
