"""Transactions whose broker and producers are killed at any step: what became of each."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from downrange.model.record import decode_records
from downrange.model.topics import CHECK_MAX_TIME_TOPIC, HALF_TOPIC, TRANSACTION_GROUP
from downrange.protocol.bodies.offsets import GetMaxOffsetRequest, OffsetResponse, QueryConsumerOffsetRequest
from downrange.protocol.bodies.pull import PullMessageResponse
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request
from downrange.transport.errors import TransportError
from downrange.transport.pool import connect
from tests.support.broker_client import BrokerClient
from tests.support.checked_store import REPOSITORY, assert_clean
from tests.support.history import Event
from tests.support.process_cluster import Server, broker_server
from tests.support.processes import Running, namesrv
from tests.support.transaction_sender import TOPIC, Journal

QUEUES = 4
SETTLE_SECONDS = 300.0


class Reader:
    """Reads everything that becomes visible, and knows at that moment whether it may be."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._next = [0] * QUEUES
        self.places: dict[tuple[int, int], str] = {}
        self.too_early: list[str] = []

    async def read(self, address: str) -> None:
        """Up to the end of every queue; fails when the broker does."""
        connection = await connect(address, timeout=1)
        try:
            client = BrokerClient(connection, "reader@1")
            for queue_id in range(QUEUES):
                await self._read_queue(client, queue_id)
        finally:
            connection.abort()

    async def _read_queue(self, client: BrokerClient, queue_id: int) -> None:
        while True:
            pull = client.pull_command(TOPIC, queue_id=queue_id, offset=self._next[queue_id])
            reply = await client.connection.request(pull, 2)
            if reply.code != 0:
                return
            for message in decode_records(reply.body_bytes):
                key = message.body.decode()
                self.places[queue_id, message.queue_offset] = key
                if self._journal.decision(key) != "commit":
                    self.too_early.append(key)
            self._next[queue_id] = reply.header(PullMessageResponse).next_begin_offset

    @property
    def seen(self) -> Counter[str]:
        return Counter(self.places.values())

    async def follow(self, broker: Server) -> None:
        """Read on for as long as it goes."""
        while True:
            with suppress(TransportError):
                await self.read(broker.address)
            await asyncio.sleep(0.05)


def broker_of(directory: Path, namesrv_address: str, flush: str) -> Server:
    settings = {
        "mappedFileSizeCommitLog": 1 << 20,
        "flushDiskType": flush,
        "flushIntervalCommitLog": 100,
        "flushCommitLogLeastPages": 0,
        "flushConsumerOffsetInterval": 200,
        "transactionTimeOut": 300,
        "transactionCheckInterval": 200,
        "transactionCheckMax": 1_000_000,
    }
    return broker_server(directory, "broker-a", namesrv_address, settings)


async def progress(client: BrokerClient) -> tuple[int, int]:
    """How far the check is with the half queue, and where that ends."""
    where = {"topic": HALF_TOPIC, "queue_id": 0}
    ask = QueryConsumerOffsetRequest(consumer_group=TRANSACTION_GROUP, **where)  # type: ignore[arg-type]
    reply = await client.connection.request(request(RequestCode.QUERY_CONSUMER_OFFSET, ask), 5)
    first = reply.header(OffsetResponse).offset if reply.code == 0 else 0
    end = await client.ask(request(RequestCode.GET_MAX_OFFSET, GetMaxOffsetRequest(**where)))  # type: ignore[arg-type]
    return first, end.header(OffsetResponse).offset


async def until_all_have_ended(broker: Server) -> None:
    connection = await connect(broker.address)
    try:
        async with asyncio.timeout(SETTLE_SECONDS):
            while True:
                first, end = await progress(BrokerClient(connection, "watcher@1"))
                if first == end:
                    return
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"orphans: half messages {first} to {end} wait for ever") from None
    except TransportError as error:
        assert broker.process is not None
        raise AssertionError(f"{error}; the broker says: {broker.process.errors}") from None
    finally:
        connection.abort()


@dataclass(frozen=True, slots=True)
class Survived:
    """What a run of `survive` saw."""

    lives: int
    """Of producers; each but the last ended by `kill -9`."""
    events: list[Event]


async def survive(
    directory: Path, seed: int, *, transactions: int, broker_deaths: int, flush: str = "ASYNC_FLUSH"
) -> Survived:
    print(f"seed {seed}")
    chance = random.Random(seed)
    journal = Journal(directory / "journal")
    with namesrv(directory / "namesrv") as (_, address):
        broker = broker_of(directory, address, flush)
        await broker.start()
        program = (sys.executable, "-m", "tests.support.transaction_sender")
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        arguments = (address, str(directory / "journal"), str(seed))
        senders = Running(*arguments, program=program, env={"PYTHONPATH": path})
        reader = Reader(journal)
        following = asyncio.create_task(reader.follow(broker))
        try:
            # The first death comes when the topic has just been made.
            deaths_at = [1, *sorted(chance.sample(range(10, transactions), broker_deaths - 1))]
            while (count := len(journal.acknowledged())) < transactions or len(senders.output) < 2:
                if deaths_at and count >= deaths_at[0]:
                    deaths_at.pop(0)
                    await broker.kill()
                    await broker.start()
                await asyncio.sleep(0.01)
            (directory / "journal" / "enough").touch()
            await until_all_have_ended(broker)
            following.cancel()
            await reader.read(broker.address)
            at_the_end = Reader(journal)
            await at_the_end.read(broker.address)
            assert await kept_for_an_operator(broker) == 0
        finally:
            following.cancel()
            senders.stop()
            errors = senders.errors
            lives = len(senders.output)
            senders.close()
            assert broker.process is not None
            exit_code = broker.process.stop()
            broker.close()
    acknowledged = journal.acknowledged()
    committed = {key for key in acknowledged if journal.decision(key) == "commit"}
    print(f"{len(acknowledged)} half messages, {lives} lives of producers, {broker_deaths + 1} of the broker,")
    print(f"{len(committed)} committed, {reader.seen.total() - len(reader.seen)} seen twice")
    changed = {place: (key, at_the_end.places.get(place)) for place, key in reader.places.items()}
    assert {place: keys for place, keys in changed.items() if keys[0] != keys[1]} == {}, "seen, and not there any more"
    assert not reader.too_early, f"seen before their commit: {reader.too_early[:10]}"
    assert [key for key in acknowledged if journal.decision(key) is None] == [], errors
    assert committed - reader.seen.keys() == set(), "committed and never seen"
    assert 0 < len(committed) < len(acknowledged)
    assert lives > 1
    assert exit_code == 0
    assert_clean(directory / "broker-a")
    return Survived(lives, _history(journal, reader))


def _history(journal: Journal, reader: Reader) -> list[Event]:
    """For the history checker. The reader itself looked whether a message that it saw had been decided by then."""
    events = []
    for key in journal.acknowledged():
        known: dict[str, Any] = {"topic": TOPIC, "id": key, "process": "producer"}
        events += [Event(time=1, op="half", phase="invoke", **known), Event(time=2, op="half", phase="ok", **known)]
        if (outcome := journal.decision(key)) is not None:
            events.append(Event(time=3, op="decide", phase="invoke", outcome=outcome, id=key, process="producer"))
    for (queue_id, offset), key in reader.places.items():
        where: dict[str, Any] = {"topic": TOPIC, "queue": f"broker-a/{queue_id}", "offset": offset, "id": key}
        events.append(Event(time=4, process="reader", op="read", phase="ok", **where))
    return sorted(events, key=lambda event: event.time)


async def kept_for_an_operator(broker: Server) -> int:
    connection = await connect(broker.address)
    try:
        ask = GetMaxOffsetRequest(topic=CHECK_MAX_TIME_TOPIC, queue_id=0)
        reply = await connection.request(request(RequestCode.GET_MAX_OFFSET, ask), 5)
        return reply.header(OffsetResponse).offset
    finally:
        connection.abort()
