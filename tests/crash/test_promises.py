"""The last rows of docs/reference/promises.md: the machine of a master, or its disk, is lost for good."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from downrange import AsyncProducer, Message, ProducerConfig, PullConsumer, SendFailed, SendStatus
from downrange.cli.local_cluster import LocalCluster
from downrange.client.consumer.pull import PullStatus
from tests.support.checked_store import REPOSITORY
from tests.support.processes import DOWNRANGE
from tests.support.replica_processes import runtime_of

SENDERS = 16
TOPIC = "promises"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "cluster"
    cluster = LocalCluster.load(tmp_path / "cluster")
    for member in cluster.running if cluster else []:
        os.kill(member.pid, signal.SIGKILL)


@pytest.mark.parametrize("sync", [True, False], ids=["sync slave", "async slave"])
async def test_a_disk_that_is_lost_leaves_everything_on_the_slave(directory: Path, sync: bool) -> None:
    wanted = ("--brokers", "1", "--replicas", "2", "--namesrv-port", "0", *(["--sync"] if sync else []))
    await asyncio.to_thread(downrange, "cluster", "up", "--data", str(directory), *wanted)
    cluster = LocalCluster.load(directory)
    assert cluster is not None
    master = next(member for member in cluster.members if member.name == "broker-a")
    acknowledged = await send_until_killed(cluster.namesrv, master.pid, seconds=2.0)
    shutil.rmtree(directory / "data" / "broker-a")
    slave = next(member for member in cluster.members if member.broker_id == 1)
    async with asyncio.timeout(20):
        while (await runtime_of(slave.address))["haMaster"]:  # it has yet to take what the dead master had sent it
            await asyncio.sleep(0.05)

    kept = await read_all(cluster.namesrv)
    assert len(acknowledged) > 200
    lost = acknowledged - kept
    if sync:
        assert not lost
    else:
        # What was on its way when the master died: far less than a second's worth.
        assert len(lost) < len(acknowledged) / 4


def downrange(*arguments: str) -> None:
    done = subprocess.run([*DOWNRANGE, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


async def send_until_killed(namesrv: str, pid: int, seconds: float) -> set[bytes]:
    """Send until the master has been killed; the bodies acknowledged as SEND_OK."""
    acknowledged: set[bytes] = set()
    over = asyncio.Event()

    async def send(producer: AsyncProducer, sender: int) -> None:
        count = 0
        while not over.is_set():
            body = f"{sender}-{count}".encode()
            count += 1
            try:
                result = await producer.send(Message(TOPIC, body))
            except SendFailed:
                continue
            if result.status is SendStatus.SEND_OK:
                acknowledged.add(body)

    async with AsyncProducer("promisers", namesrv, ProducerConfig(send_timeout_seconds=2)) as producer:
        while (await producer.send(Message(TOPIC, b"first"))).status is not SendStatus.SEND_OK:
            await asyncio.sleep(0.1)  # until the slave is there
        acknowledged.add(b"first")
        async with asyncio.TaskGroup() as tasks:
            for sender in range(SENDERS):
                tasks.create_task(send(producer, sender))
            await asyncio.sleep(seconds)
            os.kill(pid, signal.SIGKILL)
            over.set()
    return acknowledged


async def read_all(namesrv: str) -> set[bytes]:
    """Every body of the topic, from whichever process still has it."""
    bodies: set[bytes] = set()
    async with PullConsumer("promise-readers", namesrv) as consumer:
        async with asyncio.timeout(20):
            while any(0 in data.broker_addrs for data in (await consumer.session.look_up_route(TOPIC)).broker_datas):
                await asyncio.sleep(0.05)  # the name server has not heard of the death yet
        for queue in await consumer.queues(TOPIC):
            offset = 0
            while True:
                result = await consumer.pull(queue, offset)
                if result.status is PullStatus.NO_NEW_MSG:
                    break
                bodies.update(bytes(message.body) for message in result.messages)
                offset = result.next_offset
    return bodies


def test_every_test_the_page_names_is_there() -> None:
    page = (REPOSITORY / "docs" / "reference" / "promises.md").read_text()
    named = re.findall(r"`(tests/\S+\.py)`", page)
    assert len(named) >= 6
    assert [path for path in named if not (REPOSITORY / path).exists()] == []
