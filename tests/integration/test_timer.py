"""Timer messages from client to client: sent with a time, recalled, on the command line, and copied to a slave."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from downrange import AsyncProducer, Message, testing
from downrange.client.errors import SendFailed
from downrange.client.producer.outgoing import InvalidBatch, InvalidDeliveryTime, InvalidHandle
from downrange.clock import ManualClock
from downrange.model.message import StoredMessage
from downrange.model.topics import TIMER_TOPIC
from downrange.protocol.errors import BrokerError, NoPermission
from downrange.store.config import BrokerRole
from tests.support.broker_client import client_of
from tests.support.processes import DOWNRANGE
from tests.support.replicas import caught_up, names, pair, replica, until
from tests.support.standalone_process import standalone_process
from tests.unit.store.small_store import read_all

TOPIC = "orders"
RECALLS = {"recallMessageEnable": "true"}
NOW = 1_700_000_000_000


def test_a_message_comes_at_its_time() -> None:
    with testing.broker(clock=ManualClock(NOW)) as mq:
        producer = mq.producer()
        due = datetime.fromtimestamp(NOW / 1000, UTC) + timedelta(seconds=5, milliseconds=300)
        producer.send(Message(TOPIC, b"at a time", deliver_at=due))
        producer.send(Message(TOPIC, b"at milliseconds", deliver_at=NOW + 5200))
        producer.send(Message(TOPIC, b"after seconds", deliver_after=5.1))
        producer.send(Message(TOPIC, b"after a span", deliver_after=timedelta(seconds=5)))
        assert producer.send(Message(TOPIC, b"over", deliver_at=NOW - 5)).recall_handle is None
        assert [message.body for message in mq.messages(TOPIC)] == [b"over"]
        assert len(mq.wait_for(TIMER_TOPIC, 4, timeout=30)) == 4
        mq.advance(4.9)
        assert len(mq.messages(TOPIC)) == 1
        mq.advance(0.1)
        assert b"after a span" in {message.body for message in mq.wait_for(TOPIC, 2, timeout=30)}
        mq.advance(1)
        assert len(mq.wait_for(TOPIC, 5, timeout=30)) == 5


def test_a_recalled_message_does_not_come() -> None:
    with testing.broker(RECALLS, clock=ManualClock(NOW)) as mq:
        producer = mq.producer()
        result = producer.send(Message(TOPIC, b"recalled", deliver_after=5))
        producer.send(Message(TOPIC, b"kept", deliver_after=5))
        assert result.recall_handle is not None
        assert producer.recall(result.recall_handle) == result.message_id
        mq.wait_for(TIMER_TOPIC, 3, timeout=30)
        mq.advance(7)
        (message,) = mq.wait_for(TOPIC, 1, timeout=30)
        assert message.body == b"kept"
        with pytest.raises(BrokerError, match="timestamp invalid"):
            producer.recall(result.recall_handle)
        with pytest.raises(InvalidHandle, match="is no recall handle"):
            producer.recall("nonsense")


def test_recalls_are_off_unless_the_operator_turns_them_on() -> None:
    with testing.broker(clock=ManualClock(NOW)) as mq:
        result = mq.producer().send(Message(TOPIC, b"one", deliver_after=5))
        with pytest.raises(NoPermission, match="operation is forbidden"):
            mq.producer().recall(result.recall_handle or "")


def test_times_that_cannot_be_are_told_before_anything_is_sent() -> None:
    with testing.broker(clock=ManualClock(NOW)) as mq:
        producer = mq.producer()
        wrong = [
            (Message(TOPIC, b"x", deliver_at=datetime(2030, 1, 1)), "give it a time zone"),  # noqa: DTZ001
            (Message(TOPIC, b"x", deliver_at=-1), "milliseconds since 1970"),
            (Message(TOPIC, b"x", deliver_at="soon"), "milliseconds since 1970"),  # type: ignore[arg-type]
            (Message(TOPIC, b"x", deliver_after=-1), "not negative"),
            (Message(TOPIC, b"x", deliver_after=float("nan")), "not negative"),
            (Message(TOPIC, b"x", deliver_at=NOW, deliver_after=5), "only one of"),
            (Message(TOPIC, b"x", deliver_after=5, delay_level=1), "only one of"),
        ]
        for message, text in wrong:
            with pytest.raises(InvalidDeliveryTime, match=text):
                producer.send(message)
        with pytest.raises(InvalidBatch, match="delayed messages cannot be sent in a batch"):
            producer.send_batch([Message(TOPIC, b"x", deliver_after=5)])
        with pytest.raises(SendFailed, match="should not be bigger than the max delay"):
            producer.send(Message(TOPIC, b"x", deliver_after=4 * 86_400))


async def test_the_command_line(tmp_path: Path) -> None:
    with standalone_process(tmp_path, {"timerPrecisionMs": 100}) as servers:
        sent = time.time()
        done = await run("produce", TOPIC, "--delay", "700ms", "--json", "-n", servers.namesrv)
        assert "recallHandle" in json.loads(done)
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(sent + 2))
        await run("produce", TOPIC, "--deliver-at", at, "-n", servers.namesrv)
        await run("consume", TOPIC, "--from", "first", "--follow", "--limit", "2", "-n", servers.namesrv)
        assert time.time() >= int(sent + 2)


async def run(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *DOWNRANGE, *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate(b"hello\n")
    assert process.returncode == 0
    return output.decode()


# --- slaves and crashes


async def test_a_slave_delivers_nothing_and_continues_where_its_master_ended(tmp_path: Path) -> None:
    async with pair(tmp_path) as (master, slave), client_of(master) as producer:
        for number in range(6):
            properties = {"UNIQ_KEY": f"ID{number}", "TIMER_DELAY_MS": str(300 + 600 * number)}
            await producer.send(TOPIC, b"%d" % number, properties=properties)
        await until(lambda: master.store.max_offset_of(TOPIC, 0) >= 2)
        await caught_up(master, slave)
        await until(lambda: slave.timer.index.queue_offset == 6)
        assert read_bodies(slave.store.read(TOPIC, 0, 0, 32)) == read_bodies(master.store.read(TOPIC, 0, 0, 32))
    (tmp_path / "store-0").rename(tmp_path / "lost")
    (tmp_path / "store-1").rename(tmp_path / "store-0")
    async with replica(tmp_path, None, BrokerRole.ASYNC_MASTER) as promoted:
        await until(lambda: promoted.store.max_offset_of(TOPIC, 0) >= 6)
        assert Counter(bodies_of(read_all(promoted.store, TOPIC))) == Counter(b"%d" % number for number in range(6))


async def test_a_slave_without_an_index_makes_one_of_the_log(tmp_path: Path) -> None:
    async with names(tmp_path) as namesrv, replica(tmp_path, namesrv, BrokerRole.ASYNC_MASTER) as master:
        async with client_of(master) as producer:
            for number in range(4):
                properties = {"UNIQ_KEY": f"ID{number}", "TIMER_DELAY_MS": str(200 + 100 * number)}
                await producer.send(TOPIC, b"%d" % number, properties=properties)
            await producer.send(TOPIC, b"far", properties={"UNIQ_KEY": "F", "TIMER_DELAY_SEC": "60"})
        await until(lambda: master.store.max_offset_of(TOPIC, 0) == 4)
        async with replica(tmp_path, namesrv, BrokerRole.SLAVE) as slave:
            await caught_up(master, slave)
            await until(lambda: slave.timer.index.queue_offset == 5)
    (tmp_path / "store-0").rename(tmp_path / "lost")
    (tmp_path / "store-1").rename(tmp_path / "store-0")
    async with replica(tmp_path, None, BrokerRole.ASYNC_MASTER) as promoted:
        await until(lambda: promoted.timer.read_behind_millis == 0)
        assert bodies_of(read_all(promoted.store, TOPIC)) == [b"%d" % number for number in range(4)]
        assert promoted.timer.count_within(120) == 1


async def test_a_broker_that_is_killed_delivers_everything_once(tmp_path: Path) -> None:
    settings = {"timerPrecisionMs": 100, "autoCreateTopicEnable": "true", "defaultTopicQueueNums": 1}
    sent: set[bytes] = set()
    for life in range(4):
        with standalone_process(tmp_path, settings) as servers:
            async with AsyncProducer("timers", servers.namesrv) as producer:
                for number in range(60):
                    body = b"%d/%d" % (life, number)
                    await producer.send(Message(TOPIC, body, deliver_after=0.02 * number))
                    sent.add(body)
            servers.process.kill()
    with standalone_process(tmp_path, settings) as servers:
        async with AsyncProducer("timers", servers.namesrv) as producer:
            await producer.send(Message(TOPIC, b"last", deliver_after=1.0))
        follow = ("--from", "first", "--follow", "--limit", str(len(sent) + 1))
        await run("consume", TOPIC, *follow, "-n", servers.namesrv)
        found = (await run("consume", TOPIC, "-n", servers.namesrv)).encode().splitlines()
    assert Counter(found) == Counter([*sent, b"last"])


def bodies_of(messages: list[StoredMessage]) -> list[bytes]:
    return [message.body for message in messages]


def read_bodies(result: object) -> list[bytes]:
    from downrange.model.record import decode_records
    from downrange.store.read_result import ReadResult

    assert isinstance(result, ReadResult)
    return [message.body for part in result.slices for message in decode_records(part)]
