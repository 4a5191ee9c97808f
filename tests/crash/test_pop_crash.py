"""Brokers are killed while consumers pop: what was acknowledged does not come again, and everything else does."""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from downrange.broker.app import RunningBroker, broker
from downrange.broker.config import BrokerConfig
from downrange.clock import ManualClock
from downrange.model.topics import TopicConfig
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request
from downrange.transport.errors import TransportError
from downrange.transport.pool import connect
from tests.support.broker_client import BrokerClient, store_config
from tests.support.checked_store import assert_clean
from tests.support.popper import Held, Popper, held, popper_of
from tests.support.process_cluster import Server
from tests.support.processes import namesrv
from tests.support.store_files import copied_at_once

TOPIC = "orders"
INVISIBLE = 10_000

# --- a copy of the directory at every step ------------------------------------------------------------------------


@asynccontextmanager
async def serving(root: Path, clock: ManualClock) -> AsyncIterator[RunningBroker]:
    config = BrokerConfig(broker_name="broker-a", broker_ip1="127.0.0.1", listen_port=0, metrics_port=-1)
    async with broker(config, store_config(root), clock) as running:
        if TOPIC not in running.topics:
            running.topics.put(TopicConfig(TOPIC, 1, 1))
        yield running


class Steps:
    """What a consumer does, one step after the other, and what it knows then."""

    def __init__(self, running: RunningBroker, popper: Popper, clock: ManualClock, *, is_orderly: bool) -> None:
        self.running = running
        self.popper = popper
        self.clock = clock
        self.is_orderly = is_orderly
        self.sent: list[bytes] = []
        self.acked: set[bytes] = set()
        self.held: dict[bytes, Held] = {}

    async def send(self, *bodies: bytes) -> None:
        for body in bodies:
            await self.popper.client.send(TOPIC, body)
            self.sent.append(body)

    async def pop(self, most: int) -> None:
        for each in await self.popper.pop(most=most, invisible=INVISIBLE, order=self.is_orderly):
            self.held[each.body] = each

    async def ack(self, *bodies: bytes) -> None:
        await self.popper.batch_ack([self.held.pop(body) for body in bodies])
        self.acked.update(bodies)

    async def change(self, body: bytes, millis: int) -> None:
        self.held[body] = await self.popper.change(self.held[body], millis)

    async def wait(self, seconds: float) -> None:
        await self.clock.advance(seconds)

    async def save(self) -> None:
        """Let offsets reach their file, as they do every few seconds."""
        self.running.pop.state.tables.offsets.save()

    async def save_orders(self) -> None:
        self.running.pop.state.orders.save()


async def what_comes(root: Path, now: int, *, is_orderly: bool) -> list[bytes]:
    """All messages that a broker gives away which begins with this directory, until nothing comes any more."""
    clock = ManualClock(now)
    found: list[bytes] = []
    async with serving(root, clock) as running, popper_of(running) as popper:
        for _ in range(6):
            while got := await popper.pop(invisible=INVISIBLE, order=is_orderly):
                found += [each.body for each in got]
                await popper.batch_ack(got)
            await clock.advance(2 * INVISIBLE / 1000)
        running.pop.state.check_invariants()
        assert len(running.pop.state.leases) == 0
    return found


def script(steps: Steps) -> list[Callable[[], Awaitable[None]]]:
    """Everything a consumer can do; files are saved now and then."""
    common: list[Callable[[], Awaitable[None]]] = [
        lambda: steps.send(b"a", b"b", b"c", b"d", b"e"),
        lambda: steps.pop(3),
        lambda: steps.ack(b"b"),
        steps.save,
        lambda: steps.ack(b"a"),
        lambda: steps.change(b"c", 15_000),
        steps.save_orders,
        lambda: steps.pop(1),
        lambda: steps.wait(1),
        lambda: steps.send(b"f"),
        lambda: steps.pop(32),
        steps.save,
    ]
    if steps.is_orderly:
        return [
            *common,
            lambda: steps.ack(b"c"),
            lambda: steps.pop(2),
            lambda: steps.ack(b"e"),
            lambda: steps.ack(b"d"),
            lambda: steps.wait(12),
            lambda: steps.pop(32),
            lambda: steps.ack(b"f"),
        ]
    return [
        *common,
        lambda: steps.ack(b"d", b"f"),
        lambda: steps.wait(9.5),  # e comes again
        lambda: steps.pop(32),
        lambda: steps.ack(b"e"),
        steps.save,
        lambda: steps.wait(6),  # and c
        lambda: steps.pop(32),
        lambda: steps.change(b"c", 0),
        lambda: steps.wait(1),
        lambda: steps.pop(32),
        lambda: steps.ack(b"c"),
    ]


@pytest.mark.parametrize("is_orderly", [False, True])
async def test_a_crash_after_any_step(tmp_path: Path, is_orderly: bool) -> None:
    clock = ManualClock(1_700_000_000_000)
    root = tmp_path / "store"
    async with serving(root, clock) as running, popper_of(running) as popper:
        steps = Steps(running, popper, clock, is_orderly=is_orderly)
        for number, step in enumerate(script(steps)):
            await step()
            # What the kernel has of the files is what a killed process leaves behind.
            copy = tmp_path / f"after-{number}"
            copied_at_once(root, copy)
            found = await what_comes(copy, clock.now(), is_orderly=is_orderly)
            expected = [body for body in steps.sent if body not in steps.acked]
            assert sorted(set(found)) == expected, f"step {number}"
            # A message that one consumer holds is not given to another: it comes once, when its time is over.
            assert len(found) == len(set(found)), f"step {number}: {found}"
            shutil.rmtree(copy)
        assert sorted(steps.acked) == steps.sent


# --- a power cut --------------------------------------------------------------------------------------------------


def after_power_cut(running: RunningBroker, target: Path) -> None:
    """What a disk holds of a broker's directory at least: the log as far as it was synced, and the saved tables."""
    root = running.store.config.store_path_root_dir
    copied_at_once(root, target)
    shutil.rmtree(target / "consumequeue", ignore_errors=True)
    shutil.rmtree(target / "index", ignore_errors=True)
    flushed = running.store.flushed_offset
    for path in (target / "commitlog").iterdir():
        safe = max(0, flushed - int(path.name))
        content = path.read_bytes()
        path.write_bytes(content[:safe].ljust(len(content), b"\0"))


async def test_a_power_cut_loses_no_message_that_a_consumer_holds(tmp_path: Path) -> None:
    """Under ASYNC_FLUSH: the offset of the group is never on disk before the checkpoint of what lies before it."""
    clock = ManualClock()
    config = BrokerConfig(
        broker_name="broker-a", broker_ip1="127.0.0.1", listen_port=0, metrics_port=-1,
        flush_consumer_offset_interval=100,
    )  # fmt: skip
    store = store_config(tmp_path / "store", flush_interval_commit_log=3_600_000)
    async with broker(config, store, clock) as running, popper_of(running) as popper:
        running.topics.put(TopicConfig(TOPIC, 1, 1))
        await popper.client.send(TOPIC, b"a")
        running.store.flush_commit_log()
        assert [each.body for each in await popper.pop(invisible=INVISIBLE)] == [b"a"]
        path = tmp_path / "store" / "config" / "consumerOffset.json"
        async with asyncio.timeout(100):
            while not path.exists() or f'"{TOPIC}@poppers":{{0:1' not in path.read_text():
                await clock.advance(0.1)
                await asyncio.sleep(0.005)
        after_power_cut(running, tmp_path / "cut")
    assert await what_comes(tmp_path / "cut", clock.now(), is_orderly=False) == [b"a"]


# --- a process that is killed -------------------------------------------------------------------------------------


def broker_of(directory: Path, namesrv_address: str, flush: str) -> Server:
    settings = {
        "brokerName": "broker-a",
        "namesrvAddr": namesrv_address,
        "brokerIP1": "127.0.0.1",
        "storePathRootDir": directory / "store",
        "mappedFileSizeCommitLog": 1 << 20,
        "metricsPort": -1,
        "grpcServerPort": -1,
        "waitTimeMillsInSendQueue": 2000,
        "defaultTopicQueueNums": 4,
        "flushDiskType": flush,
        "flushConsumerOffsetInterval": 300,
    }
    config = directory / "broker.conf"
    config.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    return Server("broker-a", ("broker", "--config", str(config)), r"ready on ([^\s,]+)")


class Consumers:
    """Consumers that pop, and acknowledge most of what they get; and what they know about every message."""

    def __init__(self, server: Server, chance: random.Random, *, is_orderly: bool) -> None:
        self._server = server
        self._chance = chance
        self._is_orderly = is_orderly
        self.acked: set[bytes] = set()
        self.asked: set[bytes] = set()
        """Messages whose acknowledgement was sent: without an answer, who knows."""
        self.delivered = 0
        self.again: list[bytes] = []
        """Messages that came after their acknowledgement was answered."""

    @property
    def numbers(self) -> set[bytes]:
        """The messages that came at least once and were acknowledged."""
        return {body.partition(b".")[0] for body in self.acked | self.asked}

    async def consume(self, name: str) -> None:
        while True:
            with suppress(TransportError):
                connection = await connect(self._server.address, timeout=1)
                try:
                    popper = Popper(BrokerClient(connection, name), TOPIC, "group")
                    while True:
                        await self._round(popper)
                finally:
                    connection.abort()
            await asyncio.sleep(0.02)

    async def _round(self, popper: Popper) -> None:
        chance = self._chance
        known = set(self.acked)
        reply = popper.pop_command(
            most=chance.choice((1, 4, 32)), invisible=chance.choice((400, 1500)), poll=300, order=self._is_orderly
        )
        answer = await popper.client.connection.request(reply, 5)
        if answer.code != 0:
            return
        found = held(answer)
        self.delivered += len(found)
        self.again += [each.body for each in found if each.body in known]
        kept = []
        for each in found:
            what = chance.random()
            if what < 0.1:
                continue  # forgotten
            if what < 0.2 and not self._is_orderly:
                kept.append(await popper.change(each, chance.choice((0, 800))))
            else:
                kept.append(each)
        self.asked.update(each.body for each in kept)
        if chance.random() < 0.5:
            answer = await popper.client.connection.request(
                request(RequestCode.BATCH_ACK_MESSAGE, body=popper.batch_body(kept)), 5
            )
            if answer.code == 0:
                self._note(kept)
        else:
            for each in kept:
                answer = await popper.client.connection.request(popper.ack_command(each.handle), 5)
                if answer.code == 0:
                    self._note([each])

    def _note(self, held: list[Held]) -> None:
        """Acknowledgements were answered; those that came too late have no effect."""
        now = time.time() * 1000
        self.acked.update(each.body for each in held if now < each.handle.pop_time + each.handle.invisible_time)


async def produce(server: Server, count: int) -> None:
    """Send numbered messages; one that was not acknowledged is sent again with another number of its attempt."""
    number = 0
    attempts = itertools.count()
    while number < count:
        with suppress(TransportError):
            connection = await connect(server.address, timeout=1)
            try:
                client = BrokerClient(connection, "producer@1")
                while number < count:
                    command = client.send_command(TOPIC, b"%d.%d" % (number, next(attempts)), queue_id=number % 4)
                    if (await connection.request(command, 3)).code == 0:
                        number += 1
            finally:
                connection.abort()
        await asyncio.sleep(0.02)


async def survive(directory: Path, *, messages: int, deaths: int, flush: str, is_orderly: bool) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    with namesrv(directory / "namesrv") as (_, address):
        server = broker_of(directory, address, flush)
        await _survive(server, random.Random(seed), messages=messages, deaths=deaths, is_orderly=is_orderly)
    assert_clean(directory / "store")


async def _survive(server: Server, chance: random.Random, *, messages: int, deaths: int, is_orderly: bool) -> None:
    await server.start()
    consumers = Consumers(server, chance, is_orderly=is_orderly)
    everything = {b"%d" % number for number in range(messages)}
    tasks = [asyncio.create_task(consumers.consume(f"consumer@{number}")) for number in range(3)]
    try:
        producing = asyncio.create_task(produce(server, messages))
        for _ in range(deaths):
            await asyncio.sleep(chance.uniform(0.3, 1.2))  # any moment will do
            await server.kill()
            await server.start()
        await producing
        while consumers.numbers < everything:
            await asyncio.sleep(0.05)
        last = -1
        while last < consumers.delivered:  # until nothing comes any more
            last = consumers.delivered
            await asyncio.sleep(3)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        exit_code = server.process.stop() if server.process is not None else 1
        server.close()
    print(f"{consumers.delivered} deliveries of {messages} messages")
    assert consumers.again == []
    assert consumers.numbers == everything
    assert len(consumers.acked) > 0.8 * messages
    assert exit_code == 0


@pytest.mark.parametrize("is_orderly", [False, True])
async def test_acknowledged_messages_stay_away_over_deaths(tmp_path: Path, is_orderly: bool) -> None:
    await survive(tmp_path, messages=400, deaths=3, flush="ASYNC_FLUSH", is_orderly=is_orderly)


@pytest.mark.slow
@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
@pytest.mark.parametrize("is_orderly", [False, True])
async def test_thousands_of_messages_over_many_deaths(tmp_path: Path, flush: str, is_orderly: bool) -> None:
    # A queue waits for every message that its consumer forgot.
    await survive(tmp_path, messages=800 if is_orderly else 3000, deaths=15, flush=flush, is_orderly=is_orderly)
