"""Many producers and consumers at once, while the broker is killed and started again under their hands."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from downrange.model.message import StoredMessage
from downrange.model.record import decode_records
from downrange.protocol.codes import ResponseCode
from downrange.transport.errors import TransportError
from downrange.transport.pool import Pool
from tests.support.broker_client import BrokerClient
from tests.support.lasting_port import lasting_port
from tests.support.requests import connected, create_topic, drain, max_offset
from tests.support.standalone_process import Standalone, standalone_process

MIB = 1 << 20
TOPIC = "load"
PRODUCERS = 64
QUEUES = CONSUMERS = 8
PAUSE_SECONDS = 0.05


class Load:
    """Producers and consumers of one topic, and what they know: each message has an id of its own.

    A message is sent until it is acknowledged; one that was sent again may be there twice, all others may not.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._is_over = asyncio.Event()
        self.acknowledged: set[str] = set()
        self.sent_again: set[str] = set()
        self.received: list[Counter[str]] = [Counter() for _ in range(CONSUMERS)]
        self.consumed_to = [0] * CONSUMERS

    async def produce(self, number: int) -> None:
        pool = Pool()
        count = 0
        while not self._is_over.is_set():
            count += 1
            await self._send(pool, f"{number}-{count}", queue_id=count % QUEUES)
        await pool.close()

    async def _send(self, pool: Pool, key: str, queue_id: int) -> None:
        while True:
            try:
                client = BrokerClient(await pool.get(self._address), key)
                command = client.send_command(TOPIC, b"x" * 200, queue_id=queue_id, properties={"UNIQ_KEY": key})
                reply = await client.connection.request(command, 3)
            except TransportError:
                self.sent_again.add(key)
            else:
                if reply.code == ResponseCode.SUCCESS:
                    self.acknowledged.add(key)
                    return
                assert reply.code == ResponseCode.SYSTEM_BUSY, reply.remark  # refused for now, and not stored
            await asyncio.sleep(PAUSE_SECONDS)

    async def consume(self, queue_id: int) -> None:
        pool = Pool()
        while not self._is_over.is_set() or self.consumed_to[queue_id] < await self._end_of(pool, queue_id):
            try:
                client = BrokerClient(await pool.get(self._address), f"consumer-{queue_id}")
                command = client.pull_command(
                    TOPIC, queue_id=queue_id, offset=self.consumed_to[queue_id], wait_millis=500
                )
                reply = await client.connection.request(command, 3)
            except TransportError:
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            if reply.code == ResponseCode.SUCCESS:
                messages = list(decode_records(reply.body_bytes))
                self.received[queue_id].update(key_of(message) for message in messages)
                self.consumed_to[queue_id] = messages[-1].queue_offset + 1
        await pool.close()

    async def _end_of(self, pool: Pool, queue_id: int) -> int:
        return await max_offset(BrokerClient(await pool.get(self._address), "end"), TOPIC, queue_id)

    def end(self) -> None:
        """Producers finish what they are at, consumers read to the end."""
        self._is_over.set()


def key_of(message: StoredMessage) -> str:
    assert message.unique_key is not None
    return message.unique_key


async def watch_memory(servers: Standalone, seconds: float) -> int:
    """The most private memory the process had."""
    peak = 0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        peak = max(peak, servers.resident_bytes)
        await asyncio.sleep(0.2)
    return peak


async def run_load(directory: Path, seconds: float) -> None:
    """A third of the time on each of three broker processes; the first two are killed."""
    with ExitStack() as processes:
        namesrv_port, broker_port = lasting_port(), lasting_port()

        async def start() -> Standalone:
            starting = standalone_process(directory, namesrv_port=namesrv_port, broker_port=broker_port)
            return await asyncio.to_thread(processes.enter_context, starting)  # clients go on trying meanwhile

        servers = await start()
        async with connected(servers.broker) as client:
            await create_topic(client, TOPIC, QUEUES)
        load = Load(servers.broker)
        async with asyncio.TaskGroup() as clients:
            for number in range(PRODUCERS):
                clients.create_task(load.produce(number))
            for queue_id in range(QUEUES):
                clients.create_task(load.consume(queue_id))
            peaks = [await watch_memory(servers, seconds / 3)]
            for _ in range(2):
                servers.process.kill()
                servers = await start()
                peaks.append(await watch_memory(servers, seconds / 3))
            load.end()
        async with connected(servers.broker) as client:
            stored = Counter(key_of(message) for message in await drain(client, TOPIC, QUEUES))
        assert servers.process.stop() == 0

    received = sum(load.received, Counter[str]())
    assert len(load.acknowledged) > 100 * seconds, "hardly anything was sent: this proves nothing"
    assert load.sent_again, "the kills hit nobody: this proves nothing"
    assert not load.acknowledged - stored.keys(), "acknowledged, and lost"
    assert not load.acknowledged - received.keys(), "acknowledged, and never received"
    assert {key for key, count in stored.items() if count > 1} <= load.sent_again, "stored twice, sent once"
    assert received == stored, "what was received while it arrived is not what a later reader gets"
    assert peaks[2] < peaks[1] + 24 * MIB, f"memory grows: {[f'{peak / MIB:.0f} MiB' for peak in peaks]}"


async def test_nothing_acknowledged_is_lost_when_the_broker_is_killed_under_load(tmp_path: Path) -> None:
    await run_load(tmp_path, seconds=12)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_nothing_acknowledged_is_lost_in_a_minute_of_load(tmp_path: Path) -> None:
    await run_load(tmp_path, seconds=60)
