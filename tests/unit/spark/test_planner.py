"""What a batch reads and how it is shared out: sums come out right whatever the queues hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from downrange.model.message import MessageQueue
from downrange.spark.offsets import Offsets
from downrange.spark.planner import (
    Loss,
    QueueRange,
    Reach,
    capped,
    latest,
    limited,
    losses,
    ranges,
    tasks,
    waiting,
)


def queue(number: int, topic: str = "orders", broker: str = "broker-a") -> MessageQueue:
    return MessageQueue(topic, broker, number)


offsets = st.dictionaries(st.integers(0, 9).map(queue), st.integers(0, 1000), max_size=8)


def test_ranges_lie_between_two_offsets() -> None:
    found = ranges({queue(0): 5, queue(1): 7}, {queue(0): 9, queue(1): 7, queue(2): 3})
    assert found == [QueueRange(queue(0), 5, 9), QueueRange(queue(2), 0, 3, is_new=True)]


def test_a_queue_that_went_back_is_not_read_in_this_batch() -> None:
    assert ranges({queue(0): 50}, {queue(0): 0}) == []


def test_latest_keeps_queues_whose_broker_is_away() -> None:
    assert latest({queue(0): 5, queue(1): 7}, {queue(0): Reach(0, 9)}) == {queue(0): 9, queue(1): 7}


def test_latest_begins_anew_with_a_queue_that_was_made_anew() -> None:
    assert latest({queue(0): 50}, {queue(0): Reach(2, 10)}) == {queue(0): 2}


def test_a_slave_that_is_behind_neither_takes_a_stream_back_nor_is_it_a_loss() -> None:
    behind = {queue(0): Reach(2, 10, is_of_slave=True)}
    assert latest({queue(0): 50}, behind) == {queue(0): 50}
    assert latest({queue(0): 5}, behind) == {queue(0): 10}
    assert latest({}, behind) == {queue(0): 10}
    assert losses({queue(0): 50}, behind) == []
    assert [loss.expected for loss in losses({queue(0): 1}, behind)] == [1], "what a slave has deleted is gone"
    assert [behind[queue(0)].nearest(offset) for offset in (0, 5, 50)] == [2, 5, 50]
    assert [Reach(2, 10).nearest(offset) for offset in (0, 5, 50)] == [2, 5, 10]


def test_losses_are_told_in_words() -> None:
    found = losses({queue(0): 5, queue(1): 50, queue(2): 3, queue(3): 1}, {
        queue(0): Reach(8, 20), queue(1): Reach(0, 10), queue(2): Reach(3, 3),
    })  # fmt: skip
    assert found == [Loss(queue(0), 5, Reach(8, 20)), Loss(queue(1), 50, Reach(0, 10))]
    assert str(found[0]) == "orders on broker-a queue 0: messages 5 to 7 were deleted before they were read"
    assert "message 50 was to be read, but the queue ends at 10: it is a new queue" in str(found[1])


def test_capped_leaves_out_what_came_later() -> None:
    assert capped({queue(0): 9, queue(1): 3}, {queue(0): 5}) == {queue(0): 5}


@given(offsets, offsets, st.integers(1, 3000))
def test_a_limit_is_kept_and_used_up(start: Offsets, more: Offsets, most: int) -> None:
    end = {one: start.get(one, 0) + size for one, size in {**dict.fromkeys(start, 0), **more}.items()}
    cut = limited(start, end, most)
    assert cut.keys() == end.keys()
    assert all(start.get(one, 0) <= cut[one] <= end[one] for one in end)
    assert waiting(start, cut) == min(most, waiting(start, end))


@given(offsets, st.integers(1, 50))
def test_batches_of_any_size_reach_the_end(end: Offsets, most: int) -> None:
    at: Offsets = dict.fromkeys(end, 0)
    for _ in range(-(-waiting(at, end) // most)):
        at = limited(at, end, most)
    assert at == end


def test_a_limit_counts_new_queues_from_where_they_begin() -> None:
    assert limited({}, {queue(0): 110}, 5, {queue(0): 100}) == {queue(0): 105}


wanted = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 500), st.integers(1, 300)), max_size=6)


@given(wanted, st.integers(1, 400), st.none() | st.integers(1, 20))
def test_tasks_are_whole_and_even(given_ranges: list[tuple[int, int, int]], most: int, at_least: int | None) -> None:
    whole = [QueueRange(queue(n), start, start + size) for n, start, size in given_ranges]
    found = tasks(whole, most=most, at_least=at_least)
    numbers = [(one.queue, offset) for one in whole for offset in range(one.start, one.stop)]
    assert [(one.queue, offset) for task in found for one in task for offset in range(one.start, one.stop)] == numbers
    sizes = [sum(one.size for one in task) for task in found]
    if sizes:
        assert max(sizes) <= most
        assert max(sizes) - min(sizes) <= 1
        assert len(found) == min(len(numbers), max(at_least or 1, -(-len(numbers) // most)))


def test_a_small_batch_is_one_task() -> None:
    small = [QueueRange(queue(number), 0, 10) for number in range(8)]
    assert len(tasks(small, most=100_000)) == 1
    assert tasks([], most=100) == []


def test_tasks_grow_with_what_there_is_to_read() -> None:
    def sizes(total: int) -> list[int]:
        return [sum(one.size for one in part) for part in tasks([QueueRange(queue(0), 0, total)])]

    assert sizes(100_000) == [100_000]
    assert sizes(1_000_000) == [100_000] * 10
    assert sizes(16_000_000) == [500_000] * 32
    assert sizes(100_000_000) == [1_000_000] * 100


def test_a_task_knows_that_its_queue_is_new() -> None:
    (first, second) = tasks([QueueRange(queue(0), 0, 10, is_new=True)], most=5)
    assert first[0].is_new
    assert second[0].is_new
