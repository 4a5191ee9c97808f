"""The memory that all queues share: entries come out as they went in, and what is not needed goes back."""

from __future__ import annotations

from random import Random

import pytest

from downrange.store.queue.queue_entry import ENTRY, ENTRY_SIZE
from downrange.store.queue.queue_tails import AT, BLOCK, END, START, QueueTails


def entries_of(first: int, count: int) -> bytes:
    return b"".join(ENTRY.pack(number * 100, 100, number) for number in range(first, first + count))


def tail_of(tails: QueueTails, row: int) -> bytes:
    return tails.read(row, tails.rows[row + START], tails.rows[row + END]) if tails.rows[row + AT] else b""


@pytest.mark.parametrize("count", [1, 11, 12, 13, 24, 25, 100])
def test_every_part_of_a_tail_can_be_read(count: int) -> None:
    tails = QueueTails()
    row, other = tails.add_row(), tails.add_row()
    tails.rows[row + START] = tails.rows[row + END] = 7 * ENTRY_SIZE  # what is before has been written
    entries = entries_of(0, count)
    for at in range(0, len(entries), ENTRY_SIZE):
        tails.extend(row, entries[at : at + ENTRY_SIZE])
        tails.extend(other, entries_of(1000, 1))
    start = 7 * ENTRY_SIZE
    for first in range(count):
        for stop in range(first + 1, count + 1):
            found = tails.read(row, start + first * ENTRY_SIZE, start + stop * ENTRY_SIZE)
            assert found == entries[first * ENTRY_SIZE : stop * ENTRY_SIZE]


def test_blocks_that_were_freed_are_used_again() -> None:
    tails = QueueTails()
    rows = [tails.add_row() for _ in range(3)]
    for _ in range(50):
        for row in rows:
            tails.extend(row, entries_of(row, 30))
        for row in rows:
            assert tail_of(tails, row) == entries_of(row, 30)
            tails.free(row)
    assert tails.blocks == 0
    assert len(tails.memory) < 600 * BLOCK


def test_random_work_leaves_what_a_dictionary_would_hold() -> None:
    random = Random(5)
    tails = QueueTails()
    expected = {tails.add_row(): b"" for _ in range(20)}
    for step in range(3000):
        row = random.choice(list(expected))
        match random.randrange(20):
            case 0:
                tails.free(row)
                expected[row] = b""
            case 1:
                tails.remove_row(row)
                del expected[row]
                expected[tails.add_row()] = b""
            case _:
                more = entries_of(step, random.randrange(1, 30))
                tails.extend(row, more)
                expected[row] += more
    assert {row: tail_of(tails, row) for row in expected} == expected
    assert tails.blocks == sum(-(-len(entries) // (BLOCK - 16)) for entries in expected.values())


def test_memory_goes_back_when_little_of_it_is_in_use() -> None:
    tails = QueueTails()
    rows = [tails.add_row() for _ in range(10_000)]
    for row in rows:
        tails.extend(row, entries_of(row, 13))
    full = len(tails.memory)
    tails.shrink()
    assert len(tails.memory) == full > 2 * BLOCK * len(rows)
    for row in rows[5:]:
        tails.free(row)
    tails.shrink()
    assert len(tails.memory) < full / 20
    assert [tail_of(tails, row) for row in rows] == [entries_of(row, 13) if row in rows[:5] else b"" for row in rows]
    tails.extend(rows[0], entries_of(500, 2))
    assert tail_of(tails, rows[0]) == entries_of(rows[0], 13) + entries_of(500, 2)


def test_a_row_that_was_removed_begins_anew() -> None:
    tails = QueueTails()
    row = tails.add_row()
    tails.extend(row, entries_of(0, 3))
    tails.remove_row(row)
    assert tails.add_row() == row
    assert not any(tails.rows)
    assert tails.blocks == 0


def test_the_more_queues_there_are_the_less_each_may_keep() -> None:
    tails = QueueTails()
    rooms = []
    for count in (1, 1_000, 10_000, 40_000, 200_000):
        while tails.queues < count:
            tails.add_row()
        rooms.append(tails.room)
    assert rooms == sorted(rooms, reverse=True)
    assert rooms[0] == rooms[1] == 16_380
    assert 40_000 * rooms[3] <= 128 << 20
    assert rooms[4] == 4 * (BLOCK - 16)
    assert not any(room % ENTRY_SIZE for room in rooms)
