"""Push consumers whose brokers say that they pop: leases, renewal, failures, order, dead letters, changes of mode."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from downrange import (
    AsyncProducer,
    AsyncPushConsumer,
    AsyncSimpleConsumer,
    ConsumeFromWhere,
    ConsumerConfig,
    Later,
    Message,
    PoppedMessage,
    Producer,
    PushConsumer,
    ReceivedMessage,
    SimpleConsumerConfig,
)
from downrange.broker.app import RunningBroker
from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.client.consumer.pop import holding
from downrange.client.session import Session
from downrange.model.topics import SubscriptionGroupConfig, TopicConfig, pop_retry_topic
from downrange.settings import ConfigError
from downrange.testing import broker as embedded_broker
from tests.integration.test_simple_consumer import WrongClock
from tests.support.broker_client import standalone
from tests.support.two_brokers import two_brokers

TOPIC, GROUP = "orders", "readers"


def config(**options: Any) -> ConsumerConfig:
    settings: dict[str, Any] = {
        "client_rebalance": False,
        "consume_from_where": ConsumeFromWhere.FIRST_OFFSET,
        "rebalance_seconds": 0.2,
        **options,
    }
    return ConsumerConfig(**settings)


async def until(condition: Callable[[], object], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def set_mode(namesrv: str, mode: str, *, queues: int = 4, share: int = 0) -> None:
    async with Admin(ClientConfig.of(namesrv)) as admin:
        for outcomes in (
            await admin.topics.create(TopicConfig(TOPIC, queues, queues)),
            await admin.groups.create(SubscriptionGroupConfig(GROUP)),
            await admin.groups.set_consume_mode(GROUP, TOPIC, mode, share=share),
        ):
            assert not outcomes.failed, "a broker that was not told pulls, and the test would wait for nothing"


@asynccontextmanager
async def popping(
    root: Path, *, mode: str = "POP", queues: int = 4
) -> AsyncIterator[tuple[str, AsyncProducer, RunningBroker]]:
    async with standalone(root) as running:
        namesrv = str(running.config.broker.namesrv_addr)
        await set_mode(namesrv, mode, queues=queues)
        async with AsyncProducer("producers", namesrv) as producer:
            yield namesrv, producer, running


async def send(producer: AsyncProducer, count: int, *, first: int = 0, **options: Any) -> None:
    for number in range(first, first + count):
        await producer.send(Message(TOPIC, b"%d" % number, **options))


class Seen:
    """A callback that notes what it gets, and answers what it is told to."""

    def __init__(self, answer: Callable[[ReceivedMessage], Later | None] = lambda message: None) -> None:
        self.messages: list[ReceivedMessage] = []
        self.attempts: list[int] = []
        self._answer = answer

    async def __call__(self, message: ReceivedMessage) -> Later | None:
        self.messages.append(message)
        self.attempts.append(message.reconsume_times)
        return self._answer(message)

    @property
    def numbers(self) -> list[int]:
        return sorted(int(message.body) for message in self.messages)


async def test_brokers_say_that_the_group_pops(tmp_path: Path) -> None:
    async with popping(tmp_path) as (namesrv, producer, running):
        seen = Seen()
        async with AsyncPushConsumer(GROUP, namesrv, config(), on_message=seen) as consumer:
            await consumer.subscribe(TOPIC)
            await until(lambda: any(queue.queue_id == -1 for queue in consumer.queues))
            await send(producer, 100, tags="T")
            await until(lambda: len(seen.messages) == 100)
            assert isinstance(seen.messages[0], PoppedMessage)
            info = consumer.running_info(with_stacks=False)
            assert info.mq_pop_table
        assert seen.numbers == list(range(100))
        assert len(running.pop.state.leases) == 0


async def test_more_members_than_queues_all_get_messages(tmp_path: Path) -> None:
    async with popping(tmp_path, queues=1) as (namesrv, producer, running):
        members = [Seen() for _ in range(3)]
        consumers = [AsyncPushConsumer(GROUP, namesrv, config(pop_batch_nums=1), on_message=one) for one in members]
        for consumer in consumers:
            await consumer.start()
            await consumer.subscribe(TOPIC)
        try:
            sent = 0
            async with asyncio.timeout(20):
                while not all(one.messages for one in members):
                    await send(producer, 10, first=sent)
                    sent += 10
            await until(lambda: sum(len(one.messages) for one in members) == sent)
            assert sorted(number for one in members for number in one.numbers) == list(range(sent))
        finally:
            for consumer in consumers:
                await consumer.close()
        assert len(running.pop.state.leases) == 0


async def test_a_failed_message_comes_again_and_counts(tmp_path: Path) -> None:
    async with popping(tmp_path) as (namesrv, producer, _):
        seen = Seen(lambda message: Later(delay_level=1) if message.reconsume_times < 2 else None)
        async with AsyncPushConsumer(GROUP, namesrv, config(), on_message=seen) as consumer:
            await consumer.subscribe(TOPIC)
            await send(producer, 1)
            await until(lambda: len(seen.messages) == 3)
            assert seen.attempts == [0, 1, 2]
            assert {message.topic for message in seen.messages} == {TOPIC}


def test_a_message_waits_longer_each_time() -> None:
    assert [holding.retry_seconds(times) for times in (0, 1, 2, 15, 99)] == [10, 30, 60, 7200, 7200]
    assert [holding.retry_seconds(7, level) for level in (1, 2, 3, 18, 99)] == [1, 5, 10, 7200, 7200]


async def test_dead_letters(tmp_path: Path) -> None:
    async with popping(tmp_path) as (namesrv, producer, running):
        seen = Seen(lambda message: Later(delay_level=-1 if message.tags == "now" else 1))
        settings = config(max_reconsume_times=1)
        async with AsyncPushConsumer(GROUP, namesrv, settings, on_message=seen) as consumer:
            await consumer.subscribe(TOPIC)
            await send(producer, 1, tags="now")
            await until(lambda: running.pop.state.store.max_offset_of(f"%DLQ%{GROUP}", 0) == 1)
            assert seen.attempts == [0]
            await send(producer, 1)
            await until(lambda: running.pop.state.store.max_offset_of(f"%DLQ%{GROUP}", 0) == 2)
            assert seen.attempts == [0, 0, 1]
            await until(lambda: len(running.pop.state.leases) == 0)


async def test_leases_are_renewed_while_the_callback_works(tmp_path: Path) -> None:
    async with popping(tmp_path, queues=1) as (namesrv, producer, running):
        release = asyncio.Event()
        calls: list[bytes] = []

        async def slow(message: ReceivedMessage) -> None:
            calls.append(message.body)
            await release.wait()

        settings = config(pop_invisible_seconds=5, consume_threads=1)
        async with AsyncPushConsumer(GROUP, namesrv, settings, on_message=slow) as consumer:
            await consumer.subscribe(TOPIC)
            await send(producer, 3)  # the second and third wait for the first
            begun = time.monotonic()
            await until(lambda: messages_held(consumer) == 3)
            await until(lambda: time.monotonic() - begun > 8, 30)  # longer than a lease
            assert (calls, messages_held(consumer)) == ([b"0"], 3)
            release.set()
            await until(lambda: len(calls) == 3)
            await until(lambda: len(running.pop.state.leases) == 0)
        assert calls == [b"0", b"1", b"2"]


def messages_held(consumer: AsyncPushConsumer) -> int:
    table = consumer.running_info(with_stacks=False).mq_pop_table or {}
    return sum(queue.wait_ack_count for queue in table.values())


@pytest.mark.parametrize("seconds", [-60, 60])
async def test_clocks_may_differ(tmp_path: Path, seconds: float) -> None:
    async with popping(tmp_path) as (namesrv, producer, running):
        seen = Seen()
        session = Session(ClientConfig.of(namesrv), clock=WrongClock(seconds))
        consumer = AsyncPushConsumer(GROUP, config=config(), on_message=seen, session=session)
        async with session, consumer:
            await consumer.subscribe(TOPIC)
            await send(producer, 50)
            await until(lambda: len(seen.messages) == 50)
        assert len(running.pop.state.leases) == 0


async def test_messages_that_were_not_begun_are_given_back(tmp_path: Path) -> None:
    async with popping(tmp_path, queues=1) as (namesrv, producer, _):
        release = asyncio.Event()
        first = Seen()

        async def slow(message: ReceivedMessage) -> None:
            await first(message)
            await release.wait()

        consumer = AsyncPushConsumer(GROUP, namesrv, config(consume_threads=1), on_message=slow)
        await consumer.start()
        await consumer.subscribe(TOPIC)
        await send(producer, 20)
        await until(lambda: first.messages)
        closing = asyncio.create_task(consumer.close())
        await until(lambda: "draining" in repr(consumer) or "closed" in repr(consumer))
        release.set()
        await closing
        second = Seen()
        async with AsyncPushConsumer(GROUP, namesrv, config(), on_message=second) as other:
            await other.subscribe(TOPIC)
            await until(lambda: len(first.messages) + len(second.messages) >= 20)
        assert Counter(first.numbers + second.numbers) == Counter(range(20))


async def test_orderly(tmp_path: Path) -> None:
    async with popping(tmp_path, queues=3) as (namesrv, producer, running):
        queues = await producer.queues(TOPIC)
        for number in range(30):
            for queue in queues:
                await producer.send(Message(TOPIC, b"%d" % number), queue=queue)
        lock = threading.Lock()
        order: dict[int, list[int]] = {}
        busy: Counter[int] = Counter()
        failed: set[tuple[int, int]] = set()

        def listen(message: ReceivedMessage) -> Later | None:
            with lock:
                busy[message.queue_id] += 1
                assert busy[message.queue_id] == 1
            try:
                place = message.queue_id, int(message.body)
                if place[1] % 7 == 3 and place not in failed:
                    failed.add(place)
                    return Later(suspend_seconds=0.01)
                assert message.reconsume_times == (1 if place in failed else 0)
                with lock:
                    order.setdefault(place[0], []).append(place[1])
                return None
            finally:
                with lock:
                    busy[message.queue_id] -= 1

        settings = config(orderly=True, pop_batch_nums=4)
        one = AsyncPushConsumer(GROUP, namesrv, settings, on_message=listen)
        two = AsyncPushConsumer(GROUP, namesrv, settings, on_message=listen)
        for consumer in (one, two):
            await consumer.start()
            await consumer.subscribe(TOPIC)
        try:
            await until(lambda: sum(map(len, order.values())) == 90, 60)
        finally:
            await one.close()
            await two.close()
        assert order == {queue.queue_id: list(range(30)) for queue in queues}
        assert [running.pop.looking.backlog(TOPIC, GROUP, queue.queue_id) for queue in queues] == [0, 0, 0]


async def test_orderly_dead_letters_do_not_stop_the_queue(tmp_path: Path) -> None:
    async with popping(tmp_path, queues=1) as (namesrv, producer, running):
        seen = Seen(lambda message: Later(suspend_seconds=0.01) if message.body == b"1" else None)
        settings = config(orderly=True, max_reconsume_times=2)
        async with AsyncPushConsumer(GROUP, namesrv, settings, on_message=seen) as consumer:
            await consumer.subscribe(TOPIC)
            await send(producer, 3)
            await until(lambda: len(seen.messages) == 5)
            assert [message.body for message in seen.messages] == [b"0", b"1", b"1", b"1", b"2"]
            assert seen.attempts == [0, 0, 1, 2, 0]
            await until(lambda: running.pop.state.store.max_offset_of(f"%DLQ%{GROUP}", 0) == 1)


async def test_an_operator_changes_the_mode(tmp_path: Path) -> None:
    async with popping(tmp_path, mode="PULL") as (namesrv, producer, _):
        seen = Seen()
        async with AsyncPushConsumer(GROUP, namesrv, config(), on_message=seen) as consumer:
            await consumer.subscribe(TOPIC)
            sent = 0
            for mode, ids in (("PULL", {0, 1, 2, 3}), ("POP", {-1}), ("PULL", {0, 1, 2, 3})):
                await set_mode(namesrv, mode)
                while {queue.queue_id for queue in consumer.queues if queue.topic == TOPIC} != ids:
                    await asyncio.sleep(0.005)
                await send(producer, 20, first=sent)
                sent += 20
                while len(set(seen.numbers)) < sent:
                    await asyncio.sleep(0.005)


@pytest.mark.parametrize("version", [1, 2])
async def test_what_came_again_while_the_group_popped_is_pulled_afterwards(tmp_path: Path, version: int) -> None:
    retries = pop_retry_topic(GROUP, TOPIC, version=version)
    async with popping(tmp_path) as (namesrv, producer, running):
        store = running.pop.state.store
        running.config.broker = replace(running.config.broker, enable_retry_topic_v2=version == 2)
        simple = SimpleConsumerConfig(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
        async with AsyncSimpleConsumer(GROUP, namesrv, simple) as first, Admin(ClientConfig.of(namesrv)) as admin:
            await first.subscribe(TOPIC)
            await send(producer, 3)
            leased: list[ReceivedMessage] = []
            while len(leased) < 3:
                leased += await first.receive(3, 0.5)
            await until(lambda: store.max_offset_of(retries, 0) == 3)
            (status,) = (await admin.groups.progress(GROUP)).done.values()
            waiting = [queue.behind for place, queue in status.offset_table.items() if place.topic == retries]
            assert waiting == [3], "what waits there counts while the group is online"
        await set_mode(namesrv, "PULL")
        seen = Seen(lambda message: Later(delay_level=1) if message.reconsume_times == 1 else None)
        async with AsyncPushConsumer(GROUP, namesrv, config(), on_message=seen) as consumer:
            await consumer.subscribe(TOPIC)
            await until(lambda: len(seen.messages) == 6)
            assert {message.topic for message in seen.messages} == {TOPIC}
            assert seen.numbers == [0, 0, 1, 1, 2, 2]
            assert sorted(seen.attempts) == [1, 1, 1, 2, 2, 2]
            await set_mode(namesrv, "POP")
            await until(lambda: {queue.topic for queue in consumer.queues} == {TOPIC, f"%RETRY%{GROUP}"})
            assert retries not in {one.topic for one in consumer.subscriptions}


async def test_two_brokers(tmp_path: Path) -> None:
    async with two_brokers(tmp_path) as cluster:
        await set_mode(cluster.namesrv, "POP", queues=2)
        seen = Seen()
        async with (
            AsyncPushConsumer(GROUP, cluster.namesrv, config(), on_message=seen) as consumer,
            AsyncProducer("producers", cluster.namesrv) as producer,
        ):
            await consumer.subscribe(TOPIC)
            await until(lambda: {q.broker_name for q in consumer.queues if q.queue_id < 0} == {"broker-a", "broker-b"})
            await send(producer, 40)
            await until(lambda: len(seen.messages) == 40)
            assert {message.broker_name for message in seen.messages} == {"broker-a", "broker-b"}


async def test_a_loop_over_messages(tmp_path: Path) -> None:
    async with popping(tmp_path) as (namesrv, producer, running):
        await send(producer, 5)
        seen = []
        async with AsyncPushConsumer(GROUP, namesrv, config()) as consumer:
            await consumer.subscribe(TOPIC)
            async for message in consumer:
                seen.append(int(message.body))
                if len(seen) == 5:
                    break
        assert sorted(set(seen)) == list(range(5))
        assert running.pop.state.store.max_offset_of(f"%DLQ%{GROUP}", 0) == 0


def test_blocking() -> None:
    with embedded_broker() as running:
        asyncio.run(set_mode(running.namesrv, "POP"))
        seen: list[bytes] = []
        with (
            PushConsumer(GROUP, running.namesrv, config(), on_message=lambda message: seen.append(message.body)) as one,
            Producer("producers", running.namesrv) as producer,
        ):
            one.subscribe(TOPIC)
            for number in range(10):
                producer.send(Message(TOPIC, b"%d" % number))
            end = time.monotonic() + 20
            while len(seen) < 10 and time.monotonic() < end:
                time.sleep(0.01)
            assert any(queue.queue_id == -1 for queue in one.queues)
        assert sorted(seen) == [b"%d" % number for number in range(10)]


def test_settings() -> None:
    for wrong in ({"pop_invisible_seconds": 4}, {"pop_invisible_seconds": 301}, {"pop_batch_nums": 33}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            ConsumerConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="pop_threshold_for_queue"):
        ConsumerConfig(pop_threshold_for_queue=0)
