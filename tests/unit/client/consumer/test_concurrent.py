from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import pytest

from downrange.client.consumer.concurrent import ConcurrentConsumption
from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.listener import Listener, OnMessage
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.offsets import OffsetTable
from downrange.client.consumer.process_queue import ProcessQueue
from downrange.client.consumer.redelivery import Redelivery
from downrange.client.consumer.retry import Acknowledged, Answer, Later
from downrange.client.consumer.statistics import ConsumeStatistics
from downrange.clock import ManualClock
from downrange.protocol.bodies.groups import MessageModel
from downrange.settings import ConfigError
from tests.unit.client.consumer.received import QUEUE, message
from tests.unit.client.scripted import until


class FakeRedelivery(Redelivery):
    """Takes messages back while it works, and remembers them."""

    def __init__(self) -> None:
        self.works = True
        self.sent_back: list[tuple[int, int]] = []
        self.dead: list[int] = []

    async def deliver_again(self, message: ReceivedMessage, delay_level: int) -> bool:
        self.sent_back.append((message.queue_offset, delay_level))
        return self.works

    async def make_dead_letter(self, message: ReceivedMessage) -> bool:
        self.dead.append(message.queue_offset)
        return self.works


class Consuming:
    """A consumption with a queue of its own, and everything a test looks at."""

    def __init__(
        self,
        on_message: Callable[[ReceivedMessage], object] | None = None,
        *,
        on_batch: Callable[[Sequence[ReceivedMessage]], object] | None = None,
        **settings: Any,
    ) -> None:
        self.config = ConsumerConfig(**settings)
        self.clock = ManualClock()
        self.offsets = OffsetTable()
        self.redelivery = FakeRedelivery()
        listener = Listener(cast(Any, on_message), cast(Any, on_batch), self.config.consume_message_batch_max_size)
        self.consumption = ConcurrentConsumption(
            self.config, listener, self.offsets, self.redelivery, ConsumeStatistics(), self.clock
        )
        self.queue = ProcessQueue(QUEUE, 0)

    def pulled(self, *offsets: int) -> None:
        messages = [message(offset) for offset in offsets]
        self.queue.put(messages, offsets[-1] + 1)
        self.consumption.accept(self.queue, messages)

    @property
    def offset(self) -> int | None:
        return self.offsets.get(QUEUE)


def kinds(function: Callable[[ReceivedMessage], Answer]) -> list[OnMessage]:
    """The same callback as a plain and as an async function."""

    async def asynchronous(received: ReceivedMessage) -> Answer:
        return function(received)

    return [function, asynchronous]


# --- success


async def test_what_succeeds_moves_the_offset() -> None:
    for callback in kinds(lambda received: None):
        consuming = Consuming(callback)
        consuming.pulled(0, 1, 2)
        await until(lambda: consuming.offset == 3)  # noqa: B023
        assert consuming.queue.message_count == 0
        await consuming.consumption.close()


async def test_the_oldest_unfinished_message_holds_the_offset_back() -> None:
    gate = asyncio.Event()

    async def callback(received: ReceivedMessage) -> None:
        if received.queue_offset == 1:
            await gate.wait()

    consuming = Consuming(callback)
    consuming.pulled(0, 1, 2, 3)
    await until(lambda: consuming.offset == 1)
    assert consuming.queue.message_count == 1
    gate.set()
    await until(lambda: consuming.offset == 4)
    await consuming.consumption.close()


async def test_no_more_callbacks_run_at_once_than_allowed() -> None:
    running = most = 0

    async def callback(received: ReceivedMessage) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    consuming = Consuming(callback, consume_threads=3)
    consuming.pulled(*range(50))
    await until(lambda: consuming.offset == 50)
    assert most == 3
    await consuming.consumption.close()


async def test_plain_functions_run_beside_each_other() -> None:
    together = threading.Barrier(4, timeout=5)

    def callback(received: ReceivedMessage) -> None:
        together.wait()

    consuming = Consuming(callback, consume_threads=4)
    consuming.pulled(0, 1, 2, 3)
    await until(lambda: consuming.offset == 4)
    assert consuming.redelivery.sent_back == []
    await consuming.consumption.close()


async def test_an_async_callback_that_never_waits_leaves_the_loop_some_time() -> None:
    turns = turns_before_the_last = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def callback(received: ReceivedMessage) -> None:
        nonlocal turns_before_the_last
        consuming.clock.tick(0.001)
        turns_before_the_last = turns

    consuming = Consuming(callback, consume_threads=1)
    counting = asyncio.create_task(count_turns())
    consuming.pulled(*range(100))
    await until(lambda: consuming.offset == 100)
    assert turns_before_the_last > 10
    counting.cancel()
    await consuming.consumption.close()


# --- failure


async def test_failed_messages_are_sent_back_and_count_as_finished() -> None:
    def callback(received: ReceivedMessage) -> Answer:
        match received.queue_offset:
            case 0:
                return Later()
            case 1:
                return Later(delay_level=5)
            case 2:
                raise RuntimeError("no")
            case 3:
                return cast(Answer, "a wrong answer")
            case _:
                return None

    for each in kinds(callback):
        consuming = Consuming(each)
        consuming.pulled(0, 1, 2, 3, 4)
        await until(lambda: consuming.offset == 5)  # noqa: B023
        assert sorted(consuming.redelivery.sent_back) == [(0, 0), (1, 5), (2, 0), (3, 0)]
        await consuming.consumption.close()


async def test_a_batch_may_be_acknowledged_in_part() -> None:
    sizes = []

    def callback(messages: Sequence[ReceivedMessage]) -> Answer:
        sizes.append(len(messages))
        return Acknowledged(2, Later(3)) if messages[0].queue_offset == 0 else None

    consuming = Consuming(on_batch=callback, consume_message_batch_max_size=4)
    consuming.pulled(*range(10))
    await until(lambda: consuming.offset == 10)
    assert sorted(sizes) == [2, 4, 4]
    assert consuming.redelivery.sent_back == [(2, 3), (3, 3)]
    await consuming.consumption.close()


async def test_a_message_no_broker_takes_back_is_consumed_here_again_one_older() -> None:
    seen: list[int] = []

    async def callback(received: ReceivedMessage) -> Answer:
        seen.append(received.reconsume_times)
        return Later() if received.reconsume_times == 0 else None

    consuming = Consuming(callback)
    consuming.redelivery.works = False
    consuming.pulled(0, 1)
    await until(lambda: len(consuming.clock.sleeping) == 2)
    assert consuming.offset is None  # nothing is done yet
    await consuming.clock.advance(5)
    await until(lambda: consuming.offset == 2)
    assert seen == [0, 0, 1, 1]
    await consuming.consumption.close()


async def test_broadcasting_gives_failed_messages_up() -> None:
    consuming = Consuming(lambda received: Later(), message_model=MessageModel.BROADCASTING)
    consuming.pulled(0)
    await until(lambda: consuming.offset == 1)
    assert consuming.redelivery.sent_back == []
    await consuming.consumption.close()


# --- too late


async def test_a_message_that_takes_too_long_is_sent_back_and_its_late_success_ignored() -> None:
    gate = asyncio.Event()
    begun: list[int] = []

    async def callback(received: ReceivedMessage) -> None:
        begun.append(received.queue_offset)
        await gate.wait()

    consuming = Consuming(callback, consume_timeout_seconds=900)
    consuming.pulled(0)
    await until(lambda: begun)
    consuming.clock.tick(900)
    consuming.consumption.give_up_late(consuming.clock.monotonic())
    assert consuming.redelivery.sent_back == []
    consuming.clock.tick(1)
    consuming.consumption.give_up_late(consuming.clock.monotonic())
    consuming.consumption.give_up_late(consuming.clock.monotonic())
    await until(lambda: consuming.offset == 1)
    assert consuming.redelivery.sent_back == [(0, 3)]
    gate.set()
    assert await consuming.consumption.drain(5)
    await consuming.consumption.close()


async def test_a_result_for_a_queue_that_was_given_up_does_not_count() -> None:
    gate = asyncio.Event()
    begun: list[int] = []

    async def callback(received: ReceivedMessage) -> Answer:
        begun.append(received.queue_offset)
        await gate.wait()
        return Later()

    consuming = Consuming(callback, consume_threads=1)
    consuming.pulled(0, 1)
    await until(lambda: begun)
    consuming.queue.drop()
    gate.set()
    assert await consuming.consumption.drain(5)
    assert consuming.offset is None
    assert consuming.redelivery.sent_back == []
    await consuming.consumption.close()


# --- the end


async def test_draining_waits_for_what_runs_and_begins_nothing_more() -> None:
    gate = threading.Event()
    begun: list[int] = []

    def callback(received: ReceivedMessage) -> None:
        begun.append(received.queue_offset)
        gate.wait(30)

    consuming = Consuming(callback, consume_threads=2)
    consuming.pulled(*range(10))
    await until(lambda: len(begun) == 2)
    draining = asyncio.create_task(consuming.consumption.drain(5))
    await asyncio.sleep(0)
    gate.set()
    assert await draining
    assert sorted(begun) == [0, 1]
    assert consuming.offset == 2
    await consuming.consumption.close()


async def test_draining_ends_in_time_when_a_callback_does_not(caplog: pytest.LogCaptureFixture) -> None:
    begun: list[int] = []

    async def callback(received: ReceivedMessage) -> None:
        begun.append(received.queue_offset)
        await asyncio.Event().wait()

    consuming = Consuming(callback)
    consuming.pulled(0)
    await until(lambda: begun)
    assert not await consuming.consumption.drain(0.01)
    assert "still running" in caplog.text
    await consuming.consumption.close()
    assert consuming.offset is None


async def test_draining_does_not_wait_for_retries_that_are_not_due() -> None:
    consuming = Consuming(lambda received: Later())
    consuming.redelivery.works = False
    consuming.pulled(0)
    await until(lambda: consuming.redelivery.sent_back)
    assert await consuming.consumption.drain(5)
    assert consuming.queue.done_offset == 0
    await consuming.consumption.close()


# --- callbacks


async def call_me(received: ReceivedMessage) -> None:
    pass


class Callable1:
    async def __call__(self, received: ReceivedMessage) -> None:
        pass


def test_async_callbacks_are_told_from_plain_ones() -> None:
    from functools import partial

    def plain(received: ReceivedMessage) -> None:
        pass

    assert [Listener(each, None, 1).is_async for each in (call_me, partial(call_me), Callable1(), plain)] == [
        True,
        True,
        True,
        False,
    ]


def test_a_consumer_has_one_callback() -> None:
    both = cast(Callable[[Any], Awaitable[None]], call_me)
    for callback in (None, both):
        with pytest.raises(ConfigError, match="either on_message or on_batch"):
            Listener(callback, callback, 1)
    with pytest.raises(ConfigError, match="cannot be called"):
        Listener(cast(Any, "text"), None, 1)
