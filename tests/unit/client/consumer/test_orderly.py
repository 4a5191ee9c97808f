from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.listener import Listener
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.offsets import OffsetTable
from downrange.client.consumer.orderly import OrderlyConsumption
from downrange.client.consumer.process_queue import ProcessQueue
from downrange.client.consumer.retry import Answer, Later
from downrange.client.consumer.statistics import ConsumeStatistics
from downrange.clock import ManualClock
from downrange.model.message import MessageQueue
from tests.unit.client.consumer.received import QUEUE, message
from tests.unit.client.consumer.test_concurrent import FakeRedelivery, kinds
from tests.unit.client.scripted import sleeping, until


class Consuming:
    """An orderly consumption with one locked queue."""

    def __init__(self, on_message: Callable[[ReceivedMessage], object], **settings: Any) -> None:
        self.config = ConsumerConfig(orderly=True, **settings)
        self.clock = ManualClock()
        self.offsets = OffsetTable()
        self.redelivery = FakeRedelivery()
        self.consumption = OrderlyConsumption(
            self.config,
            Listener(cast(Any, on_message), None, 1),
            self.offsets,
            self.redelivery,
            ConsumeStatistics(),
            self.clock,
        )
        self.queue = self.hold(QUEUE)

    def hold(self, name: MessageQueue) -> ProcessQueue:
        queue = ProcessQueue(name, 0)
        queue.locked_until = self.clock.monotonic() + 30
        self.consumption.begin(queue)
        return queue

    def pulled(self, *offsets: int, queue: ProcessQueue | None = None) -> None:
        target = queue or self.queue
        target.put([message(offset, queue=target.queue) for offset in offsets], offsets[-1] + 1)

    @property
    def offset(self) -> int | None:
        return self.offsets.get(QUEUE)

    async def end(self) -> None:
        self.queue.drop()
        await self.consumption.drain(1)
        await self.consumption.close()


async def test_messages_come_one_by_one_in_order() -> None:
    seen: list[int] = []

    def note(received: ReceivedMessage) -> None:
        seen.append(received.queue_offset)

    for callback in kinds(note):
        seen.clear()
        consuming = Consuming(callback)
        consuming.pulled(*range(100))
        consuming.pulled(*range(100, 130))
        await until(lambda: consuming.offset == 130)  # noqa: B023
        assert seen == list(range(130))
        await consuming.end()


async def test_a_failed_message_comes_again_after_a_rest_and_before_those_behind_it() -> None:
    seen: list[tuple[int, int]] = []

    async def callback(received: ReceivedMessage) -> Answer:
        seen.append((received.queue_offset, received.reconsume_times))
        return Later() if received.queue_offset == 1 and received.reconsume_times < 2 else None

    consuming = Consuming(callback)
    consuming.pulled(0, 1, 2)
    await sleeping(consuming.clock, 1)
    assert consuming.offset == 1
    await consuming.clock.advance(0.9)
    assert len(seen) == 2
    await consuming.clock.advance(0.2)
    await until(lambda: len(seen) == 3)
    await sleeping(consuming.clock, 1)
    await consuming.clock.advance(1.1)
    await until(lambda: consuming.offset == 3)
    assert seen == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0)]
    await consuming.end()


async def test_the_callback_may_choose_the_rest_within_limits() -> None:
    seen = 0

    async def callback(received: ReceivedMessage) -> Answer:
        nonlocal seen
        seen += 1
        return Later(suspend_seconds=1000) if seen == 1 else None

    consuming = Consuming(callback)
    consuming.pulled(0)
    await sleeping(consuming.clock, 30)
    consuming.queue.locked_until = consuming.clock.monotonic() + 1000
    await consuming.clock.advance(29.9)
    assert seen == 1
    await consuming.clock.advance(0.2)
    await until(lambda: consuming.offset == 1)
    await consuming.end()


async def test_a_message_at_its_limit_is_made_a_dead_letter_and_the_queue_goes_on() -> None:
    async def callback(received: ReceivedMessage) -> Answer:
        return Later() if received.queue_offset == 0 else None

    consuming = Consuming(callback, max_reconsume_times=1)
    consuming.pulled(0, 1)
    await sleeping(consuming.clock, 1)
    await consuming.clock.advance(1.1)
    await until(lambda: consuming.offset == 2)
    assert consuming.redelivery.dead == [0]
    await consuming.end()


async def test_a_callback_may_ask_for_a_dead_letter_at_once() -> None:
    async def callback(received: ReceivedMessage) -> Answer:
        return Later(-1) if received.queue_offset == 0 else None

    consuming = Consuming(callback)
    consuming.pulled(0, 1)
    await until(lambda: consuming.offset == 2)
    assert consuming.redelivery.dead == [0]
    await consuming.end()


async def test_a_dead_letter_no_broker_takes_holds_the_queue() -> None:
    calls = 0

    async def callback(received: ReceivedMessage) -> Answer:
        nonlocal calls
        calls += 1
        return Later()

    consuming = Consuming(callback, max_reconsume_times=0)
    consuming.redelivery.works = False
    consuming.pulled(0, 1)
    await sleeping(consuming.clock, 1)
    assert calls == 1
    assert consuming.queue.done_offset == 0
    consuming.redelivery.works = True
    await consuming.clock.advance(1.1)
    await until(lambda: consuming.redelivery.dead[-1] == 1)
    assert consuming.redelivery.dead == [0, 0, 1]
    await consuming.end()


# --- the lock


@pytest.mark.parametrize("is_async", [True, False])
async def test_nothing_is_begun_once_the_lock_is_not_to_be_trusted(is_async: bool) -> None:
    seen: list[int] = []

    def note(received: ReceivedMessage) -> None:
        seen.append(received.queue_offset)
        if received.queue_offset == 1:
            consuming.clock.tick(31)  # the lock was not renewed for half a minute

    consuming = Consuming(kinds(note)[1 if is_async else 0])
    consuming.pulled(*range(5))
    await sleeping(consuming.clock, 1)
    assert seen == [0, 1]
    # What ended after the lock had run out may be somebody else's already: it is not committed.
    assert consuming.offset is None
    consuming.queue.locked_until = consuming.clock.monotonic() + 30
    await consuming.clock.advance(1.1)
    await until(lambda: consuming.offset == 5)
    assert seen == [0, 1, 2, 3, 4]
    await consuming.end()


async def test_a_queue_being_given_up_ends_after_the_callback_that_runs() -> None:
    gate = threading.Event()
    seen: list[int] = []

    def callback(received: ReceivedMessage) -> None:
        seen.append(received.queue_offset)
        gate.wait(30)

    consuming = Consuming(callback)
    consuming.pulled(0, 1, 2)
    await until(lambda: seen)
    consuming.queue.drop()
    ending = asyncio.create_task(consuming.consumption.end_of(consuming.queue))
    await asyncio.sleep(0.01)
    assert not ending.done()
    gate.set()
    await asyncio.wait_for(ending, 30)
    assert seen == [0]
    assert consuming.offset == 1  # the lock is still ours, so the result counts
    await consuming.end()


async def test_the_same_queue_taken_again_waits_for_the_callback_of_its_predecessor() -> None:
    gate = asyncio.Event()
    running = most = 0

    async def callback(received: ReceivedMessage) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await gate.wait()
        running -= 1

    consuming = Consuming(callback)
    consuming.pulled(0)
    await until(lambda: running == 1)
    consuming.queue.drop()
    successor = consuming.hold(QUEUE)
    consuming.pulled(0, queue=successor)
    await asyncio.sleep(0.02)
    assert running == 1
    gate.set()
    await until(lambda: successor.message_count == 0)
    assert most == 1
    successor.drop()
    await consuming.end()


async def test_queues_do_not_wait_for_each_other() -> None:
    gate = asyncio.Event()

    async def callback(received: ReceivedMessage) -> None:
        if received.queue == QUEUE:
            await gate.wait()

    consuming = Consuming(callback)
    other = consuming.hold(MessageQueue("orders", "broker-a", 1))
    consuming.pulled(0)
    consuming.pulled(0, 1, queue=other)
    await until(lambda: consuming.offsets.get(other.queue) == 2)
    assert consuming.offset is None
    gate.set()
    await until(lambda: consuming.offset == 1)
    other.drop()
    await consuming.end()
