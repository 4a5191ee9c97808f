"""Brokers are killed under consumers that pop: what was acknowledged does not come again, and everything else does."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from downrange import (
    AsyncProducer,
    AsyncPushConsumer,
    AsyncSimpleConsumer,
    ConsumerConfig,
    Later,
    Message,
    PoppedMessage,
    ReceivedMessage,
    SimpleConsumerConfig,
)
from downrange.client.admin import Admin
from downrange.client.config import ClientConfig, ProducerConfig
from downrange.client.errors import AckFailed, SendFailed
from downrange.model.errors import MQError
from downrange.model.topics import SubscriptionGroupConfig, TopicConfig
from downrange.protocol.bodies.groups import ConsumeFromWhere
from tests.support.process_cluster import ProcessCluster, process_cluster

TOPIC = "orders"
MESSAGES = 600
CONFIG = SimpleConsumerConfig(consume_from_where=ConsumeFromWhere.FIRST_OFFSET, retry_seconds=20)


class Reader:
    """Receives and acknowledges most messages, forgets some and changes some; notes what it knows of each."""

    def __init__(self, chance: random.Random, done: set[bytes]) -> None:
        self._chance = chance
        self.done = done
        """Acknowledged by any reader, in time and with the broker's word."""
        self.asked: set[bytes] = set()
        self.again: list[bytes] = []
        """Came again after they were done."""
        self.received = 0

    async def run(self, consumer: AsyncSimpleConsumer) -> None:
        while True:
            known = set(self.done)
            try:
                found = await consumer.receive(self._chance.choice((1, 8, 40)), self._chance.choice((2, 6)), 5)
            except MQError:
                await asyncio.sleep(0.05)  # no broker could be asked
                continue
            self.received += len(found)
            self.again += [message.body for message in found if message.body in known]
            await self._handle(consumer, found)

    async def _handle(self, consumer: AsyncSimpleConsumer, found: list[PoppedMessage]) -> None:
        kept = []
        for message in found:
            what = self._chance.random()
            if what < 0.05:
                continue
            if what < 0.15:
                with suppress(MQError):
                    await consumer.change_invisible_duration(message, self._chance.choice((0, 3)))
            kept.append(message)
        self.asked.update(message.body for message in kept)
        failed: set[PoppedMessage] = set()
        if self._chance.random() < 0.5:
            try:
                await consumer.ack_many(kept)
            except AckFailed as error:
                failed = set(error.failed)
        else:
            for message in kept:
                try:
                    await consumer.ack(message)
                except MQError:
                    failed.add(message)
        now = time.time() * 1000
        self.done.update(
            message.body for message in kept if message not in failed and now < message.receipt_handle.visible_at
        )


async def produce(namesrv: str) -> None:
    async with AsyncProducer("producers", namesrv, ProducerConfig(send_timeout_seconds=10)) as producer:
        for number in range(MESSAGES):
            attempt = 0
            while True:
                try:
                    await producer.send(Message(TOPIC, b"%d.%d" % (number, attempt)))
                    break
                except SendFailed:
                    attempt += 1


async def survive(cluster: ProcessCluster, readers: list[Reader], chance: random.Random) -> None:
    producing = asyncio.create_task(produce(cluster.namesrv))
    for broker in (*cluster.brokers, cluster.brokers[0]):
        await asyncio.sleep(chance.uniform(0.3, 1.0))  # any moment will do
        await broker.kill()
        await asyncio.sleep(chance.uniform(0, 0.5))
        await broker.start()
    await producing
    everything = {b"%d" % number for number in range(MESSAGES)}

    def numbers() -> set[bytes]:
        return {body.partition(b".")[0] for reader in readers for body in reader.asked}

    while numbers() < everything:
        await asyncio.sleep(0.05)
    quiet = 0
    last = -1
    while quiet < 2:  # until nothing comes any more
        await asyncio.sleep(4)
        total = sum(reader.received for reader in readers)
        quiet = quiet + 1 if total == last else 0
        last = total


async def test_brokers_are_killed_under_simple_consumers(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    async with process_cluster(tmp_path, brokers=2, namesrvs=1) as cluster:
        async with Admin(ClientConfig.of(cluster.namesrv)) as admin:
            await admin.topics.create(TopicConfig(TOPIC, 4, 4))
        done: set[bytes] = set()
        readers = [Reader(chance, done) for _ in range(2)]
        async with (
            AsyncSimpleConsumer("readers", cluster.namesrv, CONFIG) as one,
            AsyncSimpleConsumer("readers", cluster.namesrv, CONFIG) as two,
        ):
            tasks = []
            for reader, consumer in zip(readers, (one, two), strict=True):
                await consumer.subscribe(TOPIC)
                tasks.append(asyncio.create_task(reader.run(consumer)))
            try:
                async with asyncio.timeout(150):
                    await survive(cluster, readers, chance)
            finally:
                for task in tasks:
                    task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results), results
        print(f"{sum(reader.received for reader in readers)} deliveries of {MESSAGES} messages")
        assert [body for reader in readers for body in reader.again] == []
        assert len(done) > 0.8 * MESSAGES


async def test_a_broker_is_killed_under_push_consumers_that_pop(tmp_path: Path) -> None:
    """Every message comes, and the broker's death costs at most what was on its way."""
    seen: Counter[bytes] = Counter()

    async def listen(message: ReceivedMessage) -> Later | None:
        await asyncio.sleep(0.001)
        number = message.body.partition(b".")[0]
        if int(number) % 50 == 7 and not message.reconsume_times:
            return Later(delay_level=1)
        seen[number] += 1
        return None

    config = ConsumerConfig(
        client_rebalance=False,
        consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
        rebalance_seconds=1,
        pop_invisible_seconds=5,
        pull_delay_when_exception_seconds=0.1,
    )
    async with process_cluster(tmp_path, brokers=1, namesrvs=1) as cluster:
        async with Admin(ClientConfig.of(cluster.namesrv)) as admin:
            await admin.topics.create(TopicConfig(TOPIC, 4, 4))
            await admin.groups.create(SubscriptionGroupConfig("readers"))
            await admin.groups.set_consume_mode("readers", TOPIC, "POP")
        async with (
            AsyncPushConsumer("readers", cluster.namesrv, config, on_message=listen) as one,
            AsyncPushConsumer("readers", cluster.namesrv, config, on_message=listen) as two,
        ):
            for consumer in (one, two):
                await consumer.subscribe(TOPIC)
            producing = asyncio.create_task(produce(cluster.namesrv))
            async with asyncio.timeout(100):
                while len(seen) < MESSAGES // 3:
                    await asyncio.sleep(0.01)
                await cluster.brokers[0].kill()
                await cluster.brokers[0].start()
                await producing
                while len(seen) < MESSAGES:
                    await asyncio.sleep(0.02)
            assert {queue.queue_id for queue in one.queues if queue.topic == TOPIC} == {-1}
    again = sum(times - 1 for times in seen.values())
    print(f"{again} messages came again")
    # Messages that were being consumed, or sent, when the broker died; everything else was acknowledged.
    assert again <= 2 * (config.pop_threshold_for_queue + config.pop_batch_nums)
