"""The messages that consumers hold: popped, not acknowledged, not yet visible again. Pure: no clock, no I/O.

A pop makes one `Lease` for each queue that it took messages from. An acknowledgement ends the lease of one message; so
does a change of its invisible time, which gives the message a lease of its own. When a lease is due, its messages that
were not acknowledged are put into the retry topic by whoever owns the `Leases`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from downrange.compiled import accelerated
from downrange.protocol.bodies.pop import offsets_of

MOST_SPAN: Final = 1 << 13
"""The offsets of one lease are less than so far apart: a read that passes over more messages gives none of them."""


class LeaseKey(NamedTuple):
    """What a receipt handle says about its pop; `topic` is the topic that was read, perhaps a retry topic."""

    topic: str
    group: str
    queue_id: int
    start_offset: int
    pop_time: int


def bits_of(start: int, offsets: Iterable[int]) -> int:
    """The bit set of some offsets; those that no lease from `start` on can have are left out."""
    bits = 0
    for offset in offsets:
        if 0 <= offset - start < MOST_SPAN:
            bits |= 1 << (offset - start)
    return bits


class Lease:
    """The messages of one queue that one pop took.

    `held` has a bit for each of them that was not acknowledged: bit n for the offset `key.start_offset + n`.
    `revive_queue` and `revive_offset` are the place of the record that makes the lease last over a crash.
    """

    __slots__ = ("held", "invisible_time", "key", "revive_offset", "revive_queue", "visible_at")

    def __init__(
        self, key: LeaseKey, held: int, invisible_time: int, revive_queue: int, revive_offset: int = -1
    ) -> None:
        self.key = key
        self.held = held
        self.invisible_time = invisible_time
        self.revive_queue = revive_queue
        self.revive_offset = revive_offset
        self.visible_at = key[4] + invisible_time
        """When the messages that were not acknowledged come again."""

    def __repr__(self) -> str:
        return f"<Lease {'@'.join(map(str, self.key))} left={self.left} until={self.visible_at}>"

    @property
    def left(self) -> list[int]:
        """The offsets that were not acknowledged."""
        return offsets_of(self.key.start_offset, self.held)

    def bit_of(self, offset: int) -> int:
        """The bit of a message in `held`; 0 when this lease does not hold it, or not any more."""
        return bits_of(self.key.start_offset, (offset,)) & self.held


Table = dict[tuple[str, str, int, int, int], Lease]
"""Leases by their keys."""
InFlight = dict[tuple[str, str, int], int]
"""How many messages are held, by topic, group and queue."""
Due = list[tuple[int, int, Lease]]
"""A heap of leases: when they end, a number that no other has, and the lease."""


@accelerated
def hold_leases(table: Table, in_flight: InFlight, due: Due, number: int, leases: list[Lease]) -> int:
    """Enter leases, whose keys nobody has; they are numbered from `number` on. Return the next number."""
    for lease in leases:
        table[lease.key] = lease
        queue = lease.key[:3]
        in_flight[queue] = in_flight.get(queue, 0) + lease.held.bit_count()
        heappush(due, (lease.visible_at, number, lease))
        number += 1
    return number


@accelerated
def end_leases(table: Table, in_flight: InFlight, ended: list[tuple[Lease, int]]) -> int:
    """Messages, named by bits, are not held any more. Return how many leases left the table: they hold nothing."""
    over = 0
    for lease, bits in ended:
        taken = lease.held & bits
        lease.held -= taken
        if taken and table.get(lease.key) is lease:
            queue = lease.key[:3]
            in_flight[queue] -= taken.bit_count()
            if not in_flight[queue]:
                del in_flight[queue]
            if not lease.held:
                del table[lease.key]
                over += 1
    return over


class Leases:
    """All leases of a broker.

    Holds always: a lease in the table has a message that was not acknowledged. `in_flight` counts exactly those.
    """

    def __init__(self) -> None:
        self._table: Table = {}
        self._due: Due = []
        self._number = 0
        self._in_flight: InFlight = {}
        self.ended = 0
        """Leases that are over since the start: all their messages were acknowledged, or came again."""

    def clear(self) -> None:
        self._table.clear()
        self._due.clear()
        self._in_flight.clear()

    def __len__(self) -> int:
        return len(self._table)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._table.values())

    def __repr__(self) -> str:
        return f"<Leases leases={len(self)} messages={self.messages}>"

    def __contains__(self, key: tuple[str, str, int, int, int]) -> bool:
        return key in self._table

    def isdisjoint(self, keys: Iterable[LeaseKey]) -> bool:
        """Whether no lease has one of these keys."""
        return self._table.keys().isdisjoint(keys)

    def get(self, key: tuple[str, str, int, int, int]) -> Lease | None:
        return self._table.get(key)

    @property
    def messages(self) -> int:
        """How many messages consumers hold."""
        return sum(self._in_flight.values())

    def in_flight(self, topic: str, group: str, queue_id: int) -> int:
        """How many messages of a queue the consumers of a group hold."""
        return self._in_flight.get((topic, group, queue_id), 0)

    def add(self, leases: list[Lease]) -> None:
        """Add leases, which hold messages; one with the key of another, whose record was written again, replaces it."""
        table = self._table
        known = [(table[lease.key], -1) for lease in leases if lease.key in table]
        if known:
            self.end(known)
        self._number = hold_leases(table, self._in_flight, self._due, self._number, leases)

    def end(self, ended: list[tuple[Lease, int]]) -> None:
        """End the leases of messages; bits as those of `Lease.held`, of which others have no effect."""
        over = end_leases(self._table, self._in_flight, ended)
        if over:
            self.ended += over
            # Entries of leases that are over stay in the heap until their time; with long times they would fill it.
            if len(self._due) > 1000 and len(self._due) > 4 * len(self._table):
                self._due = [entry for entry in self._due if self._table.get(entry[2].key) is entry[2]]
                heapify(self._due)

    def due(self, now: int, most: int) -> list[Lease]:
        """Leases whose time is over, oldest first. They stay until they are ended; `postpone` brings them again."""
        found: list[Lease] = []
        while self._due and len(found) < most and self._due[0][0] <= now:
            _, _, lease = heappop(self._due)
            if self._table.get(lease.key) is lease:
                found.append(lease)
        return found

    def postpone(self, lease: Lease, until: int) -> None:
        """Let `due` name a lease again, because it could not be ended now."""
        heappush(self._due, (until, self._number, lease))
        self._number += 1

    @property
    def next_due(self) -> int | None:
        """When the next lease is due; None without any."""
        while self._due and self._table.get(self._due[0][2].key) is not self._due[0][2]:
            heappop(self._due)
        return self._due[0][0] if self._due else None

    def oldest_records(self) -> dict[int, int]:
        """For each revive queue with leases the offset of the first record that is still needed."""
        oldest: dict[int, int] = {}
        for lease in self._table.values():
            queue_id, offset = lease.revive_queue, lease.revive_offset
            if offset < oldest.get(queue_id, offset + 1):
                oldest[queue_id] = offset
        return oldest
