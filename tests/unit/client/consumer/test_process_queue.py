from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.flow_control import queue_limits, reason_to_wait
from downrange.client.consumer.process_queue import ProcessQueue
from tests.unit.client.consumer.received import QUEUE, message


def holding(*offsets: int, next_offset: int | None = None, size: int = 10) -> ProcessQueue:
    queue = ProcessQueue(QUEUE, offsets[0] if offsets else 0)
    queue.put([message(offset, b"x" * size) for offset in offsets], next_offset or offsets[-1] + 1)
    return queue


# --- how far the queue is done


def test_one_unfinished_message_holds_the_offset_back() -> None:
    queue = holding(5, 6, 7)
    queue.finish([message(6), message(7)])
    assert queue.done_offset == 5
    queue.finish([message(5)])
    assert queue.done_offset == 8


def test_what_was_filtered_out_counts_as_done() -> None:
    queue = holding(5, next_offset=40)
    assert queue.done_offset == 5
    queue.finish([message(5)])
    assert queue.done_offset == 40


def test_a_pull_without_messages_moves_the_offset_only_when_nothing_is_unfinished() -> None:
    queue = holding(5)
    queue.put((), 30)
    assert queue.done_offset == 5
    queue.finish([message(5)])
    assert queue.done_offset == 30


def test_finishing_twice_is_harmless() -> None:
    queue = holding(5, 6)
    queue.finish([message(5)])
    queue.finish([message(5)])
    assert (queue.message_count, queue.byte_count, queue.done_offset) == (1, 10, 6)


@given(st.permutations(range(20)), st.integers(0, 20))
def test_the_offset_is_the_smallest_unfinished_one(order: list[int], finished: int) -> None:
    queue = holding(*range(20))
    for offset in order[:finished]:
        queue.finish([message(offset)])
    left = order[finished:]
    assert queue.done_offset == (min(left) if left else 20)
    assert queue.message_count == len(left)
    assert queue.span == (19 - min(left) if left else 0)


# --- flow control


def test_pulling_pauses_above_each_limit_and_not_at_it() -> None:
    config = ConsumerConfig(
        pull_threshold_for_queue=3, pull_threshold_size_for_queue=100, consume_concurrently_max_span=50
    )
    limits = queue_limits(config, 1)
    assert reason_to_wait(holding(1, 2, 3), limits) is None
    assert reason_to_wait(holding(1, 2, 3, 4), limits) == "4 messages in memory, more than 3"
    assert reason_to_wait(holding(1, 2, size=50), limits) is None
    assert reason_to_wait(holding(1, 2, size=51), limits) == "102 bytes in memory, more than 100"
    assert reason_to_wait(holding(1, 51), limits) is None
    assert reason_to_wait(holding(1, 52), limits) == "messages over a span of 51 in memory, more than 50"


def test_the_defaults_are_rocketmqs() -> None:
    limits = queue_limits(ConsumerConfig(), 8)
    assert (limits.max_messages, limits.max_bytes, limits.max_span) == (1000, 100 * 1024 * 1024, 2000)


def test_orderly_consumers_have_no_span() -> None:
    assert reason_to_wait(holding(1, 100_000), queue_limits(ConsumerConfig(orderly=True), 1)) is None


@pytest.mark.parametrize(("queues", "messages", "size"), [(1, 100, 9000), (4, 25, 2250), (1000, 1, 9)])
def test_limits_of_a_topic_are_divided_among_its_queues(queues: int, messages: int, size: int) -> None:
    config = ConsumerConfig(pull_threshold_for_topic=100, pull_threshold_size_for_topic=9000)
    limits = queue_limits(config, queues)
    assert (limits.max_messages, limits.max_bytes) == (messages, size)


async def test_a_pull_that_waits_goes_on_when_something_is_finished() -> None:
    queue = holding(1, 2)
    waiting = asyncio.create_task(queue.wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    queue.finish([message(2)])
    await asyncio.wait_for(waiting, 30)


async def test_a_pull_that_waits_ends_with_its_queue() -> None:
    queue = holding(1, 2)
    waiting = asyncio.create_task(queue.wait_for_room())
    await asyncio.sleep(0)
    queue.drop()
    await asyncio.wait_for(waiting, 30)


# --- in order


def test_messages_are_taken_in_order_and_come_again_until_finished() -> None:
    queue = holding(1, 2, 3)
    assert [taken.queue_offset for taken in queue.take(2)] == [1, 2]
    assert queue.taken_reach == (2, 1, 2)
    queue.finish_first_taken(1)
    assert queue.done_offset == 2
    queue.replace(message(2, reconsume_times=1))
    assert [(taken.queue_offset, taken.reconsume_times) for taken in queue.take(9)] == [(2, 1), (3, 0)]


def test_a_message_that_left_the_middle_is_not_taken() -> None:
    queue = holding(1, 2, 3)
    queue.finish([message(2)])
    assert [taken.queue_offset for taken in queue.take(9)] == [1, 3]
