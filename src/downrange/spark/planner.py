"""Plans which messages a batch reads and how tasks divide them: arithmetic on offsets, without brokers or Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from downrange.model.message import MessageQueue
from downrange.spark.offsets import Offsets

# Unless told otherwise, tasks are small, so that every core gets one, and larger when there are many: to start a
# task costs as much as reading 30,000 messages.
_SMALL_TASK: Final = 100_000
_LARGE_TASK: Final = 1_000_000
_MANY_TASKS: Final = 32


class QueueRange(NamedTuple):
    """Messages `start` to `stop` (exclusive) of one queue. A new queue may begin after `start` without a loss."""

    queue: MessageQueue
    start: int
    stop: int
    is_new: bool = False

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Reach:
    """The offset range of a queue at one moment: its oldest message, and the offset of the next one.

    `is_of_slave`: a slave said so while its master was away. It may be behind: more messages exist than it knows of.
    """

    minimum: int
    maximum: int
    is_of_slave: bool = False

    def nearest(self, offset: int) -> int:
        """The offset, or the first or last one that there is."""
        inside = max(offset, self.minimum)
        return min(inside, self.maximum) if self.ends_before(inside) else inside

    def ends_before(self, offset: int) -> bool:
        """Whether the queue has certainly become shorter than it was."""
        return offset > self.maximum and not self.is_of_slave


class Loss(NamedTuple):
    """Messages of a queue that can no longer be read, from our offset to the present range of the queue."""

    queue: MessageQueue
    expected: int
    found: Reach

    def __str__(self) -> str:
        if self.expected < self.found.minimum:
            what = f"messages {self.expected} to {self.found.minimum - 1} were deleted before they were read"
        else:
            what = (
                f"message {self.expected} was to be read, but the queue ends at {self.found.maximum}: it is a new queue"
            )
        return f"{self.queue.topic} on {self.queue.broker_name} queue {self.queue.queue_id}: {what}"


def ranges(start: Offsets, end: Offsets) -> list[QueueRange]:
    """The messages between two offsets. A queue that is not in `start` is new: all of it is read."""
    return [
        QueueRange(queue, start.get(queue, 0), stop, is_new=queue not in start)
        for queue, stop in sorted(end.items())
        if stop > start.get(queue, 0)
    ]


def losses(start: Offsets, reach: Mapping[MessageQueue, Reach]) -> list[Loss]:
    """The queues that no longer have the next message to read."""
    return [
        Loss(queue, offset, found)
        for queue, offset in sorted(start.items())
        if (found := reach.get(queue)) is not None and (offset < found.minimum or found.ends_before(offset))
    ]


def latest(start: Offsets, reach: Mapping[MessageQueue, Reach]) -> Offsets:
    """The ends of all queues. Queues whose broker is away, or has only a slave that is behind, stay at their offset.

    A queue that was created again ends before our offset: we go back to its beginning, where the next batch starts.
    """
    found = dict(start)
    for queue, there in reach.items():
        known = start.get(queue)
        if known is None:
            found[queue] = there.maximum
        else:
            found[queue] = there.minimum if there.ends_before(known) else max(known, there.maximum)
    return found


def waiting(start: Offsets, end: Offsets) -> int:
    return sum(one.size for one in ranges(start, end))


def limited(start: Offsets, end: Offsets, most: int, begin: Mapping[MessageQueue, int] | None = None) -> Offsets:
    """`end`, reduced so that at most `most` messages lie before it, in proportion to the backlog of each queue.

    `begin` has the first offsets of queues that are not in `start`.
    """
    known = {**(begin or {}), **start}
    sizes = {queue: max(0, stop - known.get(queue, 0)) for queue, stop in end.items()}
    total = sum(sizes.values())
    if total <= most:
        return end
    cut = {}
    rest = most
    remaining = total
    # Each queue takes its share of what is left, so that the whole numbers add up to `most`.
    for queue, size in sorted(sizes.items()):
        share = min(size, -(-rest * size // remaining)) if remaining else 0
        share = min(share, rest)
        rest -= share
        remaining -= size
        cut[queue] = known.get(queue, 0) + share if size else end[queue]
    return cut


def capped(end: Offsets, target: Offsets) -> Offsets:
    """`end`, but not beyond `target`, the ends of the queues when Trigger.AvailableNow began."""
    return {queue: min(offset, target[queue]) for queue, offset in end.items() if queue in target}


def tasks(
    wanted: Sequence[QueueRange], *, most: int | None = None, at_least: int | None = None
) -> list[tuple[QueueRange, ...]]:
    """`wanted` cut into tasks of about the same size, at most `most` messages each; small batches are one task."""
    total = sum(one.size for one in wanted)
    if not total:
        return []
    if most is None:
        most = min(max(total // _MANY_TASKS, _SMALL_TASK), _LARGE_TASK)
    number = min(total, max(at_least or 1, -(-total // most)))
    found: list[tuple[QueueRange, ...]] = []
    current: list[QueueRange] = []
    done = 0
    for one in wanted:
        start = one.start
        while start < one.stop:
            # The end of the current task, counted in messages from the first of all, so that roundings do not add up.
            room = total * (len(found) + 1) // number - done
            taken = min(room, one.stop - start)
            current.append(one._replace(start=start, stop=start + taken))
            start += taken
            done += taken
            if taken == room:
                found.append(tuple(current))
                current = []
    return found


def whole_queue_tasks(wanted: Sequence[QueueRange], number: int) -> list[tuple[QueueRange, ...]]:
    """`wanted` as at most `number` tasks of about the same size, each queue in one task: its messages stay in order."""
    found: list[list[QueueRange]] = [[] for _ in range(min(number, len(wanted)))]
    sizes = [0] * len(found)
    for one in sorted(wanted, key=lambda one: (-one.size, one.queue)):
        smallest = sizes.index(min(sizes))
        found[smallest].append(one)
        sizes[smallest] += one.size
    return [tuple(sorted(part)) for part in found]
