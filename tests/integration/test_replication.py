"""Masters and slaves over real sockets: what is copied, who may do what, and what happens when the two part."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from downrange.broker.app import RunningBroker
from downrange.broker.services.replication import SlaveReplication
from downrange.model.record import decode_records
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import request
from downrange.store.config import BrokerRole
from tests.support.broker_client import client_of
from tests.support.checked_store import assert_clean
from tests.support.lasting_port import lasting_port
from tests.support.replicas import caught_up, log_bytes, names, pair, replica, until

SYNC, SLAVE = BrokerRole.SYNC_MASTER, BrokerRole.SLAVE


async def test_a_slave_gets_the_log_and_serves_it(tmp_path: Path) -> None:
    async with pair(tmp_path) as (master, slave), client_of(master) as producer, client_of(slave) as consumer:
        for number in range(20):
            await producer.send("orders", b"order %d" % number, queue_id=number % 4)
        await caught_up(master, slave)
        assert log_bytes(slave.store) == log_bytes(master.store)
        found, reply = await consumer.pull("orders", queue_id=2)
        assert [message.body for message in found] == [b"order %d" % number for number in range(2, 20, 4)]
        assert reply.suggest_which_broker_id == 0


async def test_a_held_pull_of_a_slave_wakes_when_the_message_comes_over(tmp_path: Path) -> None:
    async with pair(tmp_path) as (master, slave), client_of(master) as producer, client_of(slave) as consumer:
        await producer.send("orders", b"first")
        await caught_up(master, slave)
        waiting = asyncio.create_task(consumer.pull("orders", offset=1, wait_millis=60_000))
        await until(lambda: not waiting.done())
        await producer.send("orders", b"second")
        found, _ = await asyncio.wait_for(waiting, 30)
        assert [message.body for message in found] == [b"second"]


async def test_a_sync_master_says_ok_only_when_its_slave_has_the_message(tmp_path: Path) -> None:
    async with names(tmp_path) as namesrv, replica(tmp_path, namesrv, SYNC) as master, client_of(master) as producer:
        alone = producer.send_command("orders", b"alone")
        await producer.ask(alone, ResponseCode.SLAVE_NOT_AVAILABLE)
        async with replica(tmp_path, namesrv, SLAVE) as slave:
            await until(lambda: len(master.replication.states()) == 1)
            for number in range(50):
                await producer.send("orders", b"%d" % number)
                assert slave.store.max_offset == master.store.max_offset
            # Who does not want to wait is not made to.
            await producer.send("orders", b"no hurry", properties={"WAIT": "false"})
        await until(lambda: not master.replication.states())
        await producer.ask(producer.send_command("orders", b"alone again"), ResponseCode.SLAVE_NOT_AVAILABLE)


async def test_several_slaves_follow_one_master(tmp_path: Path) -> None:
    async with (
        names(tmp_path) as namesrv,
        replica(tmp_path, namesrv, SYNC) as master,
        replica(tmp_path, namesrv, SLAVE, broker_id=1) as first,
        replica(tmp_path, namesrv, SLAVE, broker_id=2) as second,
        client_of(master) as producer,
    ):
        await until(lambda: len(master.replication.states()) == 2)
        for number in range(100):
            await producer.send("orders", b"%d" % number)
        await caught_up(master, first)
        await caught_up(master, second)
        assert log_bytes(first.store) == log_bytes(second.store) == log_bytes(master.store)


async def test_a_slave_that_was_away_gets_what_it_missed_across_files(tmp_path: Path) -> None:
    small = {"mapped_file_size_commit_log": 64 << 10}
    async with (
        names(tmp_path) as namesrv,
        replica(tmp_path, namesrv, BrokerRole.ASYNC_MASTER, store=small) as master,
        client_of(master) as producer,
    ):
        async with replica(tmp_path, namesrv, SLAVE, store=small) as slave:
            await producer.send("orders", b"seen")
            await caught_up(master, slave)
        for number in range(300):
            await producer.send("orders", b"%04d" % number * 250)
        async with replica(tmp_path, namesrv, SLAVE, store=small) as slave:
            await caught_up(master, slave)
            assert log_bytes(slave.store) == log_bytes(master.store)
            assert slave.store.max_offset_of("orders", 0) == 301
            assert len(slave.store.file_times()) > 3


async def test_an_empty_slave_begins_with_the_last_file(tmp_path: Path) -> None:
    small = {"mapped_file_size_commit_log": 64 << 10}
    async with names(tmp_path) as namesrv, replica(tmp_path, namesrv, BrokerRole.ASYNC_MASTER, store=small) as master:
        async with client_of(master) as producer:
            for number in range(100):
                await producer.send("orders", b"%04d" % number * 500)
        async with replica(tmp_path, namesrv, SLAVE, store=small) as slave:
            await caught_up(master, slave)
            start = slave.store.min_offset
            assert start == master.store.max_offset - master.store.max_offset % (64 << 10) > 0
            assert log_bytes(slave.store) == log_bytes(master.store, start)
            lowest = slave.store.min_offset_of("orders", 0)
            assert 0 < lowest < 100 == slave.store.max_offset_of("orders", 0)
            found = slave.store.read("orders", 0, lowest, 1)
            assert next(decode_records(found.slices[0])).body == b"%04d" % lowest * 500
        # It goes on where it stopped.
        async with replica(tmp_path, namesrv, SLAVE, store=small) as slave:
            assert slave.store.recovery.warnings == []
            assert slave.store.min_offset == start
    assert_clean(tmp_path / "store-1")


async def test_a_slave_ahead_of_its_master_is_refused_by_both(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with pair(tmp_path) as (master, slave), client_of(master) as producer:
        for number in range(10):
            await producer.send("orders", b"%d" % number)
        await caught_up(master, slave)
        kept = log_bytes(slave.store)
    # The master comes back from an older copy of its directory: here, from none.
    other = tmp_path / "other"
    async with names(tmp_path) as namesrv, replica(other, namesrv, BrokerRole.ASYNC_MASTER) as master:
        async with replica(tmp_path, namesrv, SLAVE) as slave:
            assert isinstance(slave.replication, SlaveReplication)
            follower = slave.replication.follower
            await until(lambda: "the master lost what this slave has" in (follower.trouble or ""))
            assert log_bytes(slave.store) == kept
        # A slave that does not ask first, as Java's: the master refuses it.
        reader, writer = await asyncio.open_connection("127.0.0.1", master.config.ha_port)
        writer.write(len(kept).to_bytes(8, "big"))
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        assert "it has what this master lost" in caplog.text


async def test_a_slave_with_another_log_of_the_same_length_is_not_continued(tmp_path: Path) -> None:
    """The stream has no checksums: without asking, the slave would go on with the other master's bytes."""
    async with pair(tmp_path) as (master, slave), client_of(master) as producer:
        await producer.send("orders", b"one")
        await caught_up(master, slave)
        kept = log_bytes(slave.store)
    other = tmp_path / "other"
    async with names(tmp_path) as namesrv, replica(other, namesrv, BrokerRole.ASYNC_MASTER) as master:
        async with client_of(master) as producer:
            await producer.send("orders", b"two")
            await producer.send("orders", b"three")
        async with replica(tmp_path, namesrv, SLAVE) as slave:
            assert isinstance(slave.replication, SlaveReplication)
            follower = slave.replication.follower
            await until(lambda: "went different ways" in (follower.trouble or ""))
            assert log_bytes(slave.store) == kept


async def test_a_slave_with_a_fixed_master_address_needs_no_name_server(tmp_path: Path) -> None:
    async with replica(tmp_path, None, BrokerRole.ASYNC_MASTER) as master, client_of(master) as producer:
        address = f"127.0.0.1:{master.config.ha_port}"
        async with replica(tmp_path, None, SLAVE, store={"ha_master_address": address}) as slave:
            await producer.send("orders", b"hello", queue_id=3)
            await caught_up(master, slave)
            # Its configuration comes from nowhere, but its messages are within reach.
            async with client_of(slave) as consumer:
                found, _ = await consumer.pull("orders", queue_id=3)
            assert [message.body for message in found] == [b"hello"]


async def test_a_slave_takes_no_messages_and_no_changes(tmp_path: Path) -> None:
    async with pair(tmp_path) as (master, slave), client_of(slave) as client:
        before = slave.store.max_offset
        for topic in ("TBW102", "made-up"):
            reply = await client.ask(client.send_command(topic, b"no"), ResponseCode.SERVICE_NOT_AVAILABLE)
            assert "slave" in (reply.remark or "")
        assert "made-up" not in slave.topics
        fields = {"topic": "t", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6, "defaultTopic": "TBW102",
                  "topicFilterType": "SINGLE_TAG", "order": False, "topicSysFlag": 0}  # fmt: skip
        await client.call(RequestCode.UPDATE_AND_CREATE_TOPIC, fields, expect=1)
        back = {"offset": 0, "group": "g", "delayLevel": 0}
        await client.call(RequestCode.CONSUMER_SEND_MSG_BACK, back, expect=ResponseCode.SERVICE_NOT_AVAILABLE)
        assert slave.store.max_offset == before
        assert master.config.broker.broker_id == 0


async def offset_is(running: RunningBroker, topic: str, queue_id: int, offset: int) -> None:
    """Wait until the group `readers` is so far on this broker."""
    fields = {"topic": topic, "consumerGroup": "readers", "queueId": str(queue_id), "setZeroIfNotFound": "false"}
    async with client_of(running) as client, asyncio.timeout(20):
        while True:
            reply = await client.connection.request(request(RequestCode.QUERY_CONSUMER_OFFSET, ext_fields=fields), 3)
            if reply.code == 0 and reply.ext_fields["offset"] == str(offset):
                return
            await asyncio.sleep(0.05)


async def test_a_slave_copies_topics_groups_and_offsets(tmp_path: Path) -> None:
    async with pair(tmp_path) as (master, slave), client_of(master) as client:
        config = next(iter(master.topics))
        master.topics.put(replace(config, topic_name="seven", read_queue_nums=7, write_queue_nums=7))
        fields = {"topic": "seven", "consumerGroup": "readers", "queueId": 6, "commitOffset": 42}
        await client.call(RequestCode.UPDATE_CONSUMER_OFFSET, fields)
        group = b'{"groupName":"readers","consumeEnable":true}'
        await client.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=group)
        mode = b'{"topic":"seven","consumerGroup":"readers","mode":"POP","popShareQueueNum":2}'
        await client.call(RequestCode.SET_MESSAGE_REQUEST_MODE, body=mode)
        await client.send("brand-new", b"ask soon", queue_id=0)  # a topic it does not know makes a slave ask
        await offset_is(slave, "seven", 6, 42)
        async with client_of(slave) as reader, asyncio.timeout(20):
            while b'"POP"' not in (await reader.call(RequestCode.GET_ALL_MESSAGE_REQUEST_MODE)).body_bytes:
                await asyncio.sleep(0.05)
            await reader.call(RequestCode.SET_MESSAGE_REQUEST_MODE, body=mode, expect=1)
        seven = slave.topics.get("seven")
        assert seven is not None
        assert seven.read_queue_nums == 7
        assert slave.topics.data_version == master.topics.data_version


async def test_offsets_committed_to_a_slave_alone_reach_the_master_that_returns(tmp_path: Path) -> None:
    port = lasting_port()
    async with names(tmp_path) as namesrv, AsyncExitStack() as lives:
        async with (
            replica(tmp_path, namesrv, BrokerRole.ASYNC_MASTER, listen_port=port) as master,
            client_of(master) as client,
        ):
            slave = await lives.enter_async_context(replica(tmp_path, namesrv, SLAVE))
            await client.send("orders", b"one")
            await client.send("orders", b"two")
            fields = {"topic": "orders", "consumerGroup": "readers", "queueId": 0, "commitOffset": 1}
            await client.call(RequestCode.UPDATE_CONSUMER_OFFSET, fields)
            await offset_is(slave, "orders", 0, 1)
        async with client_of(slave) as client:
            await client.call(RequestCode.UPDATE_CONSUMER_OFFSET, fields | {"commitOffset": 2})
        async with replica(tmp_path, namesrv, BrokerRole.ASYNC_MASTER, listen_port=port) as master:
            await offset_is(master, "orders", 0, 2)
            await offset_is(slave, "orders", 0, 2)


async def test_a_slave_becomes_master_by_its_configuration(tmp_path: Path) -> None:
    """There is no promotion by itself, as in RocketMQ 4: an operator changes brokerRole and brokerId, and starts it."""
    async with pair(tmp_path) as (master, slave), client_of(master) as producer:
        for number in range(5):
            await producer.send("orders", b"%d" % number)
        await producer.send("orders", b"later", properties={"DELAY": "1"})
        await caught_up(master, slave)
        await until(lambda: slave.topics.get("orders") == master.topics.get("orders"))
    (tmp_path / "store-0").rename(tmp_path / "lost")
    (tmp_path / "store-1").rename(tmp_path / "store-0")
    async with replica(tmp_path, None, BrokerRole.ASYNC_MASTER) as master, client_of(master) as producer:
        assert (await producer.send("orders", b"new", queue_id=1)).queue_offset == 0
        found, _ = await producer.pull("orders", offset=5, wait_millis=10_000)
        # Delivered here or copied from the old master; both, if that delivered it and had not yet said so to its slave.
        assert {message.body for message in found} == {b"later"}
        assert (await producer.send("orders", b"next")).queue_offset in (6, 7)


async def test_a_slave_delivers_no_delayed_messages(tmp_path: Path) -> None:
    async with pair(tmp_path, SYNC) as (master, slave), client_of(master) as producer:
        await producer.send("orders", b"later", properties={"DELAY": "1"})
        await until(lambda: slave.store.max_offset_of("orders", 0) == 1)
        await caught_up(master, slave)
        assert log_bytes(slave.store) == log_bytes(master.store)


async def test_a_consumer_far_behind_is_sent_to_the_slave(tmp_path: Path) -> None:
    old = {"access_message_in_memory_max_ratio": 0}  # nothing counts as recent
    reading = {"slave_read_enable": True}
    async with (
        names(tmp_path) as namesrv,
        replica(tmp_path, namesrv, BrokerRole.ASYNC_MASTER, store=old, settings=reading) as master,
        replica(tmp_path, namesrv, SLAVE, settings=reading) as slave,
        client_of(master) as client,
        client_of(slave) as reader,
    ):
        for number in range(20):
            await client.send("orders", b"%d" % number)
        await caught_up(master, slave)
        found, reply = await client.pull("orders", most=1)
        assert reply.suggest_which_broker_id == 1
        found, reply = await reader.pull("orders", offset=reply.next_begin_offset)
        assert [message.body for message in found] == [b"%d" % number for number in range(1, 20)]
        assert reply.suggest_which_broker_id == 0  # there is nothing left that the master does not have at hand


async def test_a_slave_that_lags_leaves_offsets_alone(tmp_path: Path) -> None:
    """A consumer that was further on the master than the slave is now: it waits, and loses and repeats nothing."""
    async with pair(tmp_path) as (master, slave), client_of(master) as producer, client_of(slave) as reader:
        await producer.send("orders", b"only")
        await until(lambda: slave.topics.get("orders") == master.topics.get("orders") is not None)
        await caught_up(master, slave)
        # RocketMQ's consumers ask again at once, so one that lets itself be held is, for a second.
        for queue_id, wait_millis in ((0, 0), (0, 15_000), (1, 15_000)):  # the second queue is empty
            start = asyncio.get_running_loop().time()
            options = {"queue_id": queue_id, "offset": 7, "wait_millis": wait_millis}
            _, reply = await reader.pull("orders", expect=ResponseCode.PULL_RETRY_IMMEDIATELY, **options)
            assert (reply.next_begin_offset, reply.suggest_which_broker_id) == (7, 0)
            assert asyncio.get_running_loop().time() - start >= (0.9 if wait_millis else 0)
