"""A SYNC_MASTER is killed under load, again and again: what it acknowledged is on its slave, and stays on both."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from downrange.client.config import ClientConfig
from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.push import AsyncPushConsumer
from downrange.model.errors import MQError
from downrange.protocol.bodies.groups import ConsumeFromWhere
from downrange.protocol.bodies.offsets import QueryConsumerOffsetRequest
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import request
from tests.support.broker_client import BrokerClient
from tests.support.checked_store import assert_clean
from tests.support.replica_processes import ReplicaProcesses, following, log_of, replica_processes
from tests.support.requests import connected, create_topic, drain

TOPIC, QUEUES, SENDERS = "orders", 4, 8


async def send_until_dead(cluster: ReplicaProcesses, first: int, wanted: int) -> set[int]:
    """Send as fast as the master takes it, kill it when so many were acknowledged; the numbers that were."""
    acknowledged: set[int] = set()
    numbers = iter(range(first, first + 1_000_000))
    has_enough = asyncio.Event()

    async def send(client: BrokerClient) -> None:
        for number in numbers:
            command = client.send_command(TOPIC, b"%d " % number * 20, queue_id=number % QUEUES)
            try:
                reply = await client.connection.request(command, 10)
            except MQError:
                return  # dead
            if reply.code == ResponseCode.SUCCESS:
                acknowledged.add(number)
            if len(acknowledged) >= wanted:
                has_enough.set()

    async with connected(cluster.master.address) as client, asyncio.TaskGroup() as senders:
        for _ in range(SENDERS):
            senders.create_task(send(client))
        await has_enough.wait()
        await cluster.master.kill()
    return acknowledged


def number_of(body: bytes) -> int:
    return int(body.split()[0])


class Consumed:
    """What a group got; a callback of push consumers."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()

    async def __call__(self, message: ReceivedMessage) -> None:
        self.numbers.add(number_of(message.body))

    async def until(self, wanted: set[int]) -> None:
        try:
            async with asyncio.timeout(100):
                while not wanted <= self.numbers:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"not consumed: {sorted(wanted - self.numbers)[:10]}") from None


@asynccontextmanager
async def consuming(cluster: ReplicaProcesses, group: str) -> AsyncIterator[Consumed]:
    consumed = Consumed()
    settings = ConsumerConfig(
        consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
        pull_delay_when_exception_seconds=0.1,
        rebalance_seconds=0.5,
        broker_suspend_seconds=2,
        persist_consumer_offset_seconds=0.3,
    )
    client = ClientConfig((cluster.namesrv.address,), route_seconds=0.5, heartbeat_seconds=0.5)
    async with AsyncPushConsumer(group, client, settings, on_message=consumed) as consumer:
        await consumer.subscribe(TOPIC)
        yield consumed


async def survive(directory: Path, rounds: int, seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    acknowledged: set[int] = set()
    async with replica_processes(directory) as cluster:
        async with connected(cluster.master.address) as client:
            await create_topic(client, TOPIC, QUEUES)
        async with consuming(cluster, "all-along") as along:
            for number in range(rounds):
                acknowledged |= await send_until_dead(cluster, number * 1_000_000, chance.randint(50, 600))
                async with connected(cluster.slave.address) as client:
                    on_slave = {number_of(message.body) for message in await drain(client, TOPIC, QUEUES)}
                assert acknowledged <= on_slave
                await along.until(acknowledged)
                # This group sees nothing but the slave, until its master is back and gets to know how far it is.
                async with consuming(cluster, f"group-{number}") as late:
                    await late.until(acknowledged)
                    await cluster.master.start()
                    await following(cluster)
                    await until_committed(cluster, f"group-{number}")
            async with connected(cluster.master.address) as client:
                on_master = [number_of(message.body) for message in await drain(client, TOPIC, QUEUES)]
            assert acknowledged <= set(on_master)
            assert len(on_master) == len(set(on_master))
            await along.until(set(on_master))
            await until_committed(cluster, "all-along")
        stop(cluster)
    assert log_of(directory / "slave") == log_of(directory / "master")
    for name in ("master", "slave"):
        assert_clean(directory / name)


async def until_committed(cluster: ReplicaProcesses, group: str) -> None:
    """The consumer is back: it tells the master how far it is, not the slave."""
    async with connected(cluster.master.address) as client, asyncio.timeout(100):
        for queue_id in range(QUEUES):
            fields = {"topic": TOPIC, "queueId": queue_id}
            end = (await client.call(RequestCode.GET_MAX_OFFSET, fields)).ext_fields["offset"]
            question = request(
                RequestCode.QUERY_CONSUMER_OFFSET,
                QueryConsumerOffsetRequest(consumer_group=group, topic=TOPIC, queue_id=queue_id),
            )
            while (await client.connection.request(question, 5)).ext_fields.get("offset") != end:
                await asyncio.sleep(0.05)


def stop(cluster: ReplicaProcesses) -> None:
    """In order, the master first: its slave gets the end of the log."""
    for server in (cluster.master, cluster.slave):
        assert server.process is not None
        assert server.process.stop() == 0


async def test_a_slave_killed_again_and_again_while_it_catches_up_ends_with_the_same_log(tmp_path: Path) -> None:
    async with replica_processes(tmp_path, "ASYNC_MASTER") as cluster:
        async with connected(cluster.master.address) as client:
            await create_topic(client, TOPIC, QUEUES)
            await client.send(TOPIC, b"0")
            await following(cluster)
            for _ in range(3):
                await cluster.slave.kill()
                commands = [client.send_command(TOPIC, b"%d " % n * 2000, queue_id=n % QUEUES) for n in range(500)]
                await asyncio.gather(*(client.ask(command) for command in commands))
                await cluster.slave.start()  # and killed again in the middle of what follows, but for the last time
            await following(cluster)
        stop(cluster)
    assert log_of(tmp_path / "slave") == log_of(tmp_path / "master")
    assert_clean(tmp_path / "slave")


async def test_what_a_killed_master_acknowledged_is_on_its_slave(tmp_path: Path) -> None:
    await survive(tmp_path, rounds=3, seed=8)


@pytest.mark.slow
async def test_the_same_fifty_times(tmp_path: Path) -> None:
    await survive(tmp_path, rounds=50, seed=random.randrange(1 << 32))
