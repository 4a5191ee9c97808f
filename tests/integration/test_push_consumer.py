"""Push consumers against a whole broker in this process."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from downrange.broker.app import RunningBroker
from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.client.consumer.blocking import PushConsumer
from downrange.client.consumer.concurrent import ConcurrentConsumption
from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.push import AsyncPushConsumer
from downrange.client.consumer.retry import Answer, Later
from downrange.client.errors import ClientClosed
from downrange.client.producer.outgoing import InvalidGroup, InvalidTopic
from downrange.client.producer.producer import AsyncProducer
from downrange.model.errors import MessageError
from downrange.model.message import Message, MessageQueue
from downrange.protocol.bodies.groups import ConsumeFromWhere, MessageModel
from downrange.protocol.errors import BrokerError, SubscriptionParseFailed
from tests.support.broker_client import standalone
from tests.support.dead_letters import dead_letters_are_known

FIRST = ConsumeFromWhere.FIRST_OFFSET


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[RunningBroker]:
    async with standalone(tmp_path) as running:
        yield running


@pytest.fixture
def namesrv(broker: RunningBroker) -> str:
    return str(broker.config.broker.namesrv_addr)


@pytest.fixture
async def producer(namesrv: str) -> AsyncIterator[AsyncProducer]:
    async with AsyncProducer("producers", namesrv) as running:
        yield running


async def until(condition: Callable[[], object], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def send(producer: AsyncProducer, topic: str, count: int, *, first: int = 0, **options: Any) -> None:
    for number in range(first, first + count):
        await producer.send(Message(topic, str(number).encode(), **options))


class Seen:
    """A callback that notes what it gets."""

    def __init__(self) -> None:
        self.messages: list[ReceivedMessage] = []
        self._lock = threading.Lock()

    def __call__(self, message: ReceivedMessage) -> None:
        with self._lock:
            self.messages.append(message)

    @property
    def numbers(self) -> list[int]:
        return sorted(int(message.body) for message in self.messages)

    def __len__(self) -> int:
        return len(self.messages)


# --- receiving


@pytest.mark.parametrize("orderly", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
async def test_a_callback_gets_every_message(
    namesrv: str, producer: AsyncProducer, orderly: bool, is_async: bool
) -> None:
    await send(producer, "orders", 50)
    seen = Seen()

    async def asynchronous(message: ReceivedMessage) -> None:
        seen(message)

    callback = asynchronous if is_async else seen
    async with AsyncPushConsumer("billing", namesrv, ConsumerConfig(orderly=orderly), on_message=callback) as consumer:
        await consumer.subscribe("orders")
        await until(lambda: len(seen) == 50)
        await send(producer, "orders", 50, first=50)
        await until(lambda: len(seen) == 100)
    assert seen.numbers == list(range(100))
    assert {message.topic for message in seen.messages} == {"orders"}


async def test_messages_one_by_one_in_a_loop(namesrv: str, producer: AsyncProducer) -> None:
    await send(producer, "orders", 30)
    numbers = []
    async with AsyncPushConsumer("billing", namesrv) as consumer:
        await consumer.subscribe("orders")
        async for message in consumer:
            numbers.append(int(message.body))
            if len(numbers) == 30:
                break
    assert sorted(numbers) == list(range(30))
    # The last one was never said to be done: it comes again, and nothing else does.
    async with AsyncPushConsumer("billing", namesrv) as consumer:
        await consumer.subscribe("orders")
        again = await anext(aiter(consumer))
        assert int(again.body) == numbers[-1]


def test_the_blocking_face(tmp_path: Path) -> None:
    """In a thread of its own, because the broker needs the loop."""
    ready: list[str] = []
    stop = threading.Event()
    started = threading.Event()

    async def serve() -> None:
        async with standalone(tmp_path) as running:
            ready.append(str(running.config.broker.namesrv_addr))
            async with AsyncProducer("producers", ready[0]) as producer:
                await send(producer, "orders", 20)
            started.set()
            while not stop.is_set():
                await asyncio.sleep(0.01)

    server = threading.Thread(target=lambda: asyncio.run(serve()))
    server.start()
    try:
        assert started.wait(20)
        numbers = []
        with PushConsumer("looping", ready[0]) as consumer:
            consumer.subscribe("orders")
            for message in consumer:
                if int(message.body) == 7 and not message.reconsume_times:
                    consumer.later(message, delay_level=1)
                    continue
                numbers.append(int(message.body))
                if len(numbers) == 20:
                    break
        assert sorted(numbers) == list(range(20))
        assert numbers[-1] == 7
        seen = Seen()
        calling = PushConsumer("calling", ready[0], on_message=seen)
        calling.subscribe("orders")
        with calling:
            for _ in range(1000):
                if len(seen) == 20:
                    break
                threading.Event().wait(0.01)
        assert seen.numbers == list(range(20))
        with pytest.raises(ClientClosed):
            calling.drain()
    finally:
        stop.set()
        server.join(20)


# --- what to consume


async def test_only_the_tags_asked_for(namesrv: str, producer: AsyncProducer) -> None:
    # "Aa" and "BB" have one hash: the broker sends both, the client tells them apart.
    for tags in ("Aa", "BB", "C", None):
        await send(producer, "orders", 5, tags=tags)
    seen = Seen()
    async with AsyncPushConsumer("billing", namesrv, on_message=seen) as consumer:
        await consumer.subscribe("orders", "Aa || C")
        await until(lambda: len(seen) == 10)
        await send(producer, "orders", 5, tags="BB")
        await send(producer, "orders", 1, tags="C")
        await until(lambda: len(seen) == 11)
    assert {message.tags for message in seen.messages} == {"Aa", "C"}


async def test_an_sql_expression_chooses_messages(namesrv: str, producer: AsyncProducer) -> None:
    for number in range(10):
        await producer.send(Message("orders", str(number).encode(), properties={"price": str(number)}))
    seen = Seen()
    consumer = AsyncPushConsumer("billing", namesrv, on_message=seen)
    await consumer.subscribe("orders", sql="price > 6 OR price = 2")
    async with consumer:
        await until(lambda: len(seen) == 4)
    assert seen.numbers == [2, 7, 8, 9]


async def test_a_broker_that_does_not_filter_by_sql_says_so_at_the_start(tmp_path: Path) -> None:
    async with standalone(tmp_path, broker_options={"enable_property_filter": False}) as running:
        namesrv = str(running.config.broker.namesrv_addr)
        async with AsyncProducer("producers", namesrv) as producer:
            await send(producer, "orders", 1)
        consumer = AsyncPushConsumer("billing", namesrv, on_message=Seen())
        await consumer.subscribe("orders", sql="price > 6")
        with pytest.raises(BrokerError, match="does not support consumer to filter message by SQL92"):
            await consumer.start()


async def test_several_topics_and_changes_while_running(namesrv: str, producer: AsyncProducer) -> None:
    for topic in ("orders", "payments", "later"):
        await send(producer, topic, 5)
    seen = Seen()
    consumer = AsyncPushConsumer("billing", namesrv, on_message=seen)
    await consumer.subscribe("orders")
    await consumer.subscribe("payments")
    async with consumer:
        await until(lambda: len(seen) == 10)
        await consumer.subscribe("later")
        await until(lambda: len(seen) == 15)
        await consumer.unsubscribe("payments")
        await send(producer, "payments", 5)
        await consumer.subscribe("orders", "special")
        await send(producer, "orders", 5)
        await send(producer, "orders", 1, tags="special")
        await until(lambda: len(seen) == 16)
        assert {queue.topic for queue in consumer.queues} == {"orders", "later", "%RETRY%billing"}
    counts = Counter(message.topic for message in seen.messages)
    assert counts == {"orders": 6, "payments": 5, "later": 5}


async def test_a_topic_that_does_not_exist_yet_is_waited_for(namesrv: str, producer: AsyncProducer) -> None:
    seen = Seen()
    async with AsyncPushConsumer("billing", namesrv, on_message=seen) as consumer:
        await consumer.subscribe("tomorrow")
        await send(producer, "tomorrow", 5)
        await until(lambda: len(seen) == 5)


async def test_wrong_arguments_are_told_at_once(namesrv: str, producer: AsyncProducer) -> None:
    await send(producer, "orders", 1)
    with pytest.raises(InvalidGroup):
        AsyncPushConsumer("bad group", namesrv)
    with pytest.raises(InvalidGroup, match="placeholder"):
        AsyncPushConsumer("DEFAULT_CONSUMER", namesrv)
    async with AsyncPushConsumer("billing", namesrv, on_message=Seen()) as consumer:
        with pytest.raises(InvalidTopic):
            await consumer.subscribe("bad topic")
        with pytest.raises(SubscriptionParseFailed):
            await consumer.subscribe("orders", sql="price >")
        with pytest.raises(MessageError, match="blank"):
            await consumer.subscribe("orders", sql=" ")
        with pytest.raises(ClientClosed, match="has a callback"):
            aiter(consumer)
        assert [subscription.topic for subscription in consumer.subscriptions] == ["%RETRY%billing"]


# --- where to begin


async def test_a_group_goes_on_where_it_stopped(namesrv: str, producer: AsyncProducer) -> None:
    for first in (0, 20, 40):
        await send(producer, "orders", 20, first=first)
        seen = Seen()
        async with AsyncPushConsumer("billing", namesrv, on_message=seen) as consumer:
            await consumer.subscribe("orders")
            await until(lambda: len(seen) == 20)  # noqa: B023
        assert seen.numbers == list(range(first, first + 20))


async def test_a_new_group_gets_all_of_a_young_queue_even_if_it_asks_for_the_end(
    namesrv: str, producer: AsyncProducer
) -> None:
    await send(producer, "orders", 10)
    seen = Seen()
    config = ConsumerConfig(consume_from_where=ConsumeFromWhere.LAST_OFFSET)
    async with AsyncPushConsumer("billing", namesrv, config, on_message=seen) as consumer:
        await consumer.subscribe("orders")
        await until(lambda: len(seen) == 10)


# --- broadcasting


async def test_broadcasting_gives_everything_to_everybody_and_remembers_in_a_file(
    tmp_path: Path, namesrv: str, producer: AsyncProducer
) -> None:
    await send(producer, "orders", 10)

    def config(name: str) -> ConsumerConfig:
        return ConsumerConfig(
            message_model=MessageModel.BROADCASTING,
            consume_from_where=FIRST,
            instance_name=name,
            local_offset_store_dir=tmp_path / "offsets",
        )

    first, second, again = Seen(), Seen(), Seen()
    async with (
        AsyncPushConsumer("news", namesrv, config("one"), on_message=first) as one,
        AsyncPushConsumer("news", namesrv, config("two"), on_message=second) as two,
    ):
        await one.subscribe("orders")
        await two.subscribe("orders")
        await until(lambda: len(first) == 10 and len(second) == 10)
    assert first.numbers == second.numbers == list(range(10))
    assert len(list((tmp_path / "offsets").glob("*@one/news/offsets.json"))) == 1
    await send(producer, "orders", 3, first=10)
    async with AsyncPushConsumer("news", namesrv, config("one"), on_message=again) as one:
        await one.subscribe("orders")
        await until(lambda: len(again) == 3)
    assert again.numbers == [10, 11, 12]


# --- failures


async def test_a_message_that_fails_comes_again_counted_and_ends_as_a_dead_letter(
    namesrv: str, producer: AsyncProducer
) -> None:
    await send(producer, "orders", 1, tags="A", keys="k")
    seen, dead = Seen(), Seen()

    def callback(message: ReceivedMessage) -> Answer:
        seen(message)
        return Later(delay_level=1)

    config = ConsumerConfig(max_reconsume_times=2)
    async with AsyncPushConsumer("billing", namesrv, config, on_message=callback) as consumer:
        await consumer.subscribe("orders", "A")
        await until(lambda: len(seen) == 3)
        assert [message.reconsume_times for message in seen.messages] == [0, 1, 2]
        assert {message.topic for message in seen.messages} == {"orders"}
        assert [message.queue.topic for message in seen.messages] == ["orders"] + ["%RETRY%billing"] * 2
        assert len({message.message_id for message in seen.messages}) == 1
        await dead_letters_are_known(consumer.session)
        async with AsyncPushConsumer("undertaker", namesrv, on_message=dead) as other:
            await other.subscribe("%DLQ%billing")
            await until(lambda: len(dead) == 1)
    (letter,) = dead.messages
    assert (letter.body, letter.tags, letter.keys) == (b"0", "A", ["k"])
    assert letter.properties["RETRY_TOPIC"] == "orders"


async def test_an_orderly_message_at_its_limit_is_a_dead_letter_and_the_queue_goes_on(
    namesrv: str, producer: AsyncProducer
) -> None:
    for number in range(3):
        await producer.send(Message("orders", str(number).encode(), sharding_key="one"))
    seen, dead = Seen(), Seen()

    async def callback(message: ReceivedMessage) -> Answer:
        seen(message)
        return Later(suspend_seconds=0.01) if message.body == b"1" else None

    config = ConsumerConfig(orderly=True, max_reconsume_times=2)
    async with AsyncPushConsumer("billing", namesrv, config, on_message=callback) as consumer:
        await consumer.subscribe("orders")
        await until(lambda: len(seen) == 5)
        await dead_letters_are_known(consumer.session)
        async with AsyncPushConsumer("undertaker", namesrv, on_message=dead) as other:
            await other.subscribe("%DLQ%billing")
            await until(lambda: len(dead) == 1)
    assert [(message.body, message.reconsume_times) for message in seen.messages] == [
        (b"0", 0),
        (b"1", 0),
        (b"1", 1),
        (b"1", 2),
        (b"2", 0),
    ]
    assert [message.body for message in dead.messages] == [b"1"]


# --- groups


async def test_members_share_the_queues_and_hand_them_over(namesrv: str, producer: AsyncProducer) -> None:
    await send(producer, "orders", 1)
    seen = [Seen() for _ in range(4)]
    consumers = [AsyncPushConsumer("billing", namesrv, on_message=each) for each in seen]

    def shares() -> list[int]:
        return [sum(queue.topic == "orders" for queue in consumer.queues) for consumer in consumers]

    for consumer in consumers:
        await consumer.subscribe("orders")
    sending = asyncio.create_task(send(producer, "orders", 2000, first=1))
    await consumers[0].start()
    await until(lambda: shares() == [4, 0, 0, 0])
    await consumers[1].start()
    await until(lambda: shares() == [2, 2, 0, 0])
    await consumers[2].start()
    await consumers[3].start()
    await until(lambda: shares() == [1, 1, 1, 1])
    held = [queue for consumer in consumers for queue in consumer.queues if queue.topic == "orders"]
    assert sorted(held) == [MessageQueue("orders", "broker-a", number) for number in range(4)]
    await sending
    await consumers[0].close()
    await consumers[2].close()
    await until(lambda: sorted(shares()[number] for number in (1, 3)) == [2, 2])
    await send(producer, "orders", 100, first=2001)
    await until(lambda: len({number for each in seen for number in each.numbers}) == 2101)
    for consumer in consumers:
        await consumer.close()
    times = Counter(number for each in seen for number in each.numbers)
    # Twice only what was on its way when queues changed hands.
    assert sum(times.values()) - 2101 < 200


async def test_orderly_members_never_consume_one_queue_at_the_same_time(namesrv: str, producer: AsyncProducer) -> None:
    total = 600
    running: Counter[MessageQueue] = Counter()
    overlaps: list[MessageQueue] = []
    order: dict[MessageQueue, list[int]] = {}

    async def callback(message: ReceivedMessage) -> None:
        running[message.queue] += 1
        if running[message.queue] > 1:
            overlaps.append(message.queue)
        order.setdefault(message.queue, []).append(message.queue_offset)
        await asyncio.sleep(0.001)
        running[message.queue] -= 1

    consumers = [
        AsyncPushConsumer("billing", namesrv, ConsumerConfig(orderly=True), on_message=callback) for _ in range(3)
    ]
    for consumer in consumers:
        await consumer.subscribe("orders")
    await send(producer, "orders", total)
    for consumer in consumers:
        await consumer.start()
        await asyncio.sleep(0.05)
    await consumers[0].close()
    await until(lambda: sum(len(set(offsets)) for offsets in order.values()) == total)
    for consumer in consumers:
        await consumer.close()
    assert overlaps == []
    # A hand-over in order waits for the callback that runs and commits it: nothing comes twice, nothing out of turn.
    assert all(offsets == list(range(len(offsets))) for offsets in order.values())


async def test_draining_finishes_what_was_begun_and_leaves_the_rest(namesrv: str, producer: AsyncProducer) -> None:
    await send(producer, "orders", 100)
    gate = asyncio.Event()
    begun, rest = Seen(), Seen()

    async def slow(message: ReceivedMessage) -> None:
        begun(message)
        await gate.wait()

    consumer = AsyncPushConsumer("billing", namesrv, ConsumerConfig(consume_threads=4), on_message=slow)
    await consumer.subscribe("orders")
    await consumer.start()
    await until(lambda: len(begun) == 4)
    draining = asyncio.create_task(consumer.drain(10))
    consumption = consumer._consumption
    assert isinstance(consumption, ConcurrentConsumption)
    await until(lambda: consumption._is_stopping)
    assert not draining.done()
    gate.set()
    assert await draining
    await consumer.close()
    assert len(begun) == 4
    async with AsyncPushConsumer("billing", namesrv, on_message=rest) as other:
        await other.subscribe("orders")
        await until(lambda: len({*begun.numbers, *rest.numbers}) == 100)
    # What was finished behind an unfinished message of its queue comes again: three at most.
    assert len(rest) <= 99


# --- operators


async def test_an_operator_looks_into_a_consumer_and_steers_it(namesrv: str, producer: AsyncProducer) -> None:
    await send(producer, "orders", 40, keys="k")
    seen = Seen()
    async with (
        AsyncPushConsumer("billing", namesrv, on_message=seen) as consumer,
        Admin(ClientConfig.of(namesrv)) as admin,
    ):
        await consumer.subscribe("orders")
        await until(lambda: len(seen) == 40)
        client_id = consumer.session.client_id

        async with asyncio.timeout(30):  # the messages may be consumed before the retry queues are assigned
            while True:
                info = await admin.groups.running_info("billing", client_id, with_stack=True)
                if {queue.topic for queue in info.mq_table} == {"orders", "%RETRY%billing"}:
                    break
        assert info.properties["PROP_CONSUME_TYPE"] == "CONSUME_PASSIVELY"
        assert info.status_table["orders"].consume_ok_tps > 0
        assert "_pull_for_ever" in (info.jstack or "")
        where = await admin.groups.offsets_in_members("billing", "orders", client_id)
        (status,) = where.done.values()
        assert sum(status.consumer_table[client_id].values()) == 40

        result = await admin.messages.consume_directly("billing", client_id, seen.messages[0].offset_message_id)
        assert (result.consume_result, result.order) == ("CR_SUCCESS", False)
        await until(lambda: len(seen) == 41)

        # Everything once more, while the consumer runs.
        assert await consumer.commit()
        moved = await admin.offsets.reset("billing", "orders", 0)
        assert not moved.failed
        await until(lambda: len(seen) == 81)
        assert seen.numbers == sorted([*range(40), *range(40), int(seen.messages[0].body)])


async def test_a_callback_that_fails_when_consumed_directly_is_told(namesrv: str, producer: AsyncProducer) -> None:
    await send(producer, "orders", 1)
    seen = Seen()

    def callback(message: ReceivedMessage) -> Answer:
        seen(message)
        if len(seen) == 2:
            raise RuntimeError("not today")
        return None if len(seen) == 1 else Later()

    async with (
        AsyncPushConsumer("billing", namesrv, on_message=callback) as consumer,
        Admin(ClientConfig.of(namesrv)) as admin,
    ):
        await consumer.subscribe("orders")
        await until(lambda: len(seen) == 1)
        message_id = seen.messages[0].offset_message_id
        client_id = consumer.session.client_id
        failed = await admin.messages.consume_directly("billing", client_id, message_id)
        assert (failed.consume_result, failed.remark) == ("CR_THROW_EXCEPTION", "RuntimeError: not today")
        later = await admin.messages.consume_directly("billing", client_id, message_id)
        assert later.consume_result == "CR_LATER"
