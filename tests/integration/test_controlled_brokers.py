"""A broker whose role changes while it runs: what starts, what stops, and what its clients see."""

from __future__ import annotations

from pathlib import Path

from downrange.broker.replication.auto_switch import HaRole
from tests.support.controlled import controlled, replication_of
from tests.support.replicas import log_bytes, until
from tests.support.requests import connected, create_topic


async def test_the_first_broker_is_elected_and_the_others_follow(tmp_path: Path) -> None:
    async with controlled(tmp_path) as cluster:
        assert await cluster.master() == 1
        assert [cluster.role(number) for number in (2, 3)] == [HaRole.SLAVE, HaRole.SLAVE]
        master = cluster.brokers[1]
        async with connected(master.config.broker.address) as client:
            await create_topic(client, "T", 4)
            sent = await client.send("T", b"hello")
        assert sent.queue_offset == 0
        await until(lambda: len({log_bytes(one.store) for one in cluster.brokers.values()}) == 1)
        await until(lambda: all("T" in one.topics for one in cluster.brokers.values()))
        assert replication_of(master).epoch == 1


async def test_another_broker_takes_over_from_a_master_that_stops(tmp_path: Path) -> None:
    async with controlled(tmp_path) as cluster:
        master = cluster.brokers[1]
        async with connected(master.config.broker.address) as client:
            await create_topic(client, "T", 1)
            for number in range(20):
                await client.send("T", b"%d" % number)
        await cluster.stop(1)
        successor = await cluster.master(members=2)
        new = cluster.brokers[successor]
        async with connected(new.config.broker.address) as client:
            await client.send("T", b"after")
            messages, _ = await client.pull("T")
        assert [message.body for message in messages] == [*(b"%d" % number for number in range(20)), b"after"]
        await cluster.start(1)
        await cluster.master(members=3)
        await until(lambda: len({log_bytes(one.store) for one in cluster.brokers.values()}) == 1)
        assert cluster.role(1) is HaRole.SLAVE
