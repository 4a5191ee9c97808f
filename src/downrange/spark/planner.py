"""What one batch reads and how it is shared out over tasks: arithmetic on offsets, no broker and no Spark in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from downrange.model.message import MessageQueue
from downrange.spark.offsets import Offsets


class QueueRange(NamedTuple):
    """Messages `start` to `stop` (exclusive) of one queue. A new queue may begin later than that: nothing is lost."""

    queue: MessageQueue
    start: int
    stop: int
    is_new: bool = False

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Reach:
    """How far a queue reaches at one moment: its oldest message, and the number the next one will get."""

    minimum: int
    maximum: int


class Loss(NamedTuple):
    """Messages of a queue that can no longer be read: from where we are to where the queue now begins or ends."""

    queue: MessageQueue
    expected: int
    found: Reach

    def __str__(self) -> str:
        if self.expected < self.found.minimum:
            what = f"messages {self.expected} to {self.found.minimum - 1} were deleted before they were read"
        else:
            what = (
                f"message {self.expected} was to be read, but the queue ends at {self.found.maximum}: it was made anew"
            )
        return f"{self.queue.topic} on {self.queue.broker_name} queue {self.queue.queue_id}: {what}"


def ranges(start: Offsets, end: Offsets) -> list[QueueRange]:
    """What lies between two offsets. A queue that `start` does not know appeared since: all of it is read."""
    return [
        QueueRange(queue, start.get(queue, 0), stop, is_new=queue not in start)
        for queue, stop in sorted(end.items())
        if stop > start.get(queue, 0)
    ]


def losses(start: Offsets, reach: Mapping[MessageQueue, Reach]) -> list[Loss]:
    """Queues that no longer have what comes next."""
    return [
        Loss(queue, offset, found)
        for queue, offset in sorted(start.items())
        if (found := reach.get(queue)) is not None and not found.minimum <= offset <= found.maximum
    ]


def latest(start: Offsets, reach: Mapping[MessageQueue, Reach]) -> Offsets:
    """The end of everything there is. Queues whose broker is away stay where they are.

    A queue that was made anew ends before it starts: its end is its beginning, and the next batch reads on from there.
    """
    found = dict(start)
    for queue, there in reach.items():
        known = start.get(queue)
        found[queue] = there.minimum if known is not None and known > there.maximum else there.maximum
    return found


def waiting(start: Offsets, end: Offsets) -> int:
    return sum(one.size for one in ranges(start, end))


def limited(start: Offsets, end: Offsets, most: int, begin: Mapping[MessageQueue, int] | None = None) -> Offsets:
    """`end`, or so much less that at most `most` messages lie before it, shared out by what each queue has waiting.

    `begin` says where queues that `start` does not know begin.
    """
    known = {**(begin or {}), **start}
    sizes = {queue: max(0, stop - known.get(queue, 0)) for queue, stop in end.items()}
    total = sum(sizes.values())
    if total <= most:
        return end
    cut = {}
    rest = most
    remaining = total
    # Whole numbers that add up: each queue takes its share of what is left, so nothing is lost to rounding.
    for queue, size in sorted(sizes.items()):
        share = min(size, -(-rest * size // remaining)) if remaining else 0
        share = min(share, rest)
        rest -= share
        remaining -= size
        cut[queue] = known.get(queue, 0) + share if size else end[queue]
    return cut


def capped(end: Offsets, target: Offsets) -> Offsets:
    """`end`, but nothing behind `target`: what Trigger.AvailableNow saw when it began."""
    return {queue: min(offset, target[queue]) for queue, offset in end.items() if queue in target}


def tasks(wanted: Sequence[QueueRange], *, most: int, at_least: int | None = None) -> list[tuple[QueueRange, ...]]:
    """`wanted` cut into tasks of about the same size, at most `most` messages each; small batches are one task."""
    total = sum(one.size for one in wanted)
    if not total:
        return []
    number = min(total, max(at_least or 1, -(-total // most)))
    found: list[tuple[QueueRange, ...]] = []
    current: list[QueueRange] = []
    done = 0
    for one in wanted:
        start = one.start
        while start < one.stop:
            # Where the current task ends, counted in messages from the very first: rounding never adds up.
            room = total * (len(found) + 1) // number - done
            taken = min(room, one.stop - start)
            current.append(one._replace(start=start, stop=start + taken))
            start += taken
            done += taken
            if taken == room:
                found.append(tuple(current))
                current = []
    return found
