"""A broker whose role changes while it runs: what starts, what stops, and what its clients see."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from downrange.broker.app import RunningBroker
from downrange.broker.replication.auto_switch import HaRole
from downrange.model.topics import HALF_TOPIC
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.controller import CleanBrokerDataRequest, ElectMasterRequest, EpochEntryCache
from downrange.protocol.bodies.groups import LockedQueues
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command, request
from downrange.transport.connection import Connection
from downrange.transport.tls_config import TlsMode
from tests.support.broker_client import client_of
from tests.support.certificates import Certificates
from tests.support.controlled import Controlled, controlled, replication_of
from tests.support.popper import Popper
from tests.support.replicas import log_bytes, until
from tests.support.requests import connected, create_topic, max_offset


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


async def with_topic(cluster: Controlled, queues: int = 1) -> RunningBroker:
    """The master, which has the topic T."""
    master = cluster.brokers[await cluster.master()]
    async with client_of(master) as client:
        await create_topic(client, "T", queues)
    return master


async def test_a_deposed_master_sends_producers_away(tmp_path: Path) -> None:
    async with controlled(tmp_path) as cluster:
        old = await with_topic(cluster)
        new = await cluster.elect(2)
        async with client_of(old) as client:
            reply = await client.connection.request(client.send_command("T", b"late"), 5)
        assert (reply.code, reply.remark) == (
            ResponseCode.SYSTEM_BUSY,
            "[REJECTREQUEST]system busy, start flow control for a while",
        )
        assert cluster.role(1) is HaRole.SLAVE
        assert (old.config.broker.broker_id, new.config.broker.broker_id) == (1, 0)
        async with client_of(new) as client:
            epochs = decode_body(
                EpochEntryCache, (await client.call(RequestCode.CONTROLLER_GET_BROKER_EPOCH_CACHE)).body_bytes
            )
        assert epochs.broker_id == 0
        assert [entry.epoch for entry in epochs.epoch_list][-1] == 2


async def test_a_role_goes_round(tmp_path: Path) -> None:
    async with controlled(tmp_path) as cluster:
        await with_topic(cluster)
        for turn, number in enumerate((2, 3, 1, 2, 1)):
            async with client_of(await cluster.elect(number)) as client:
                assert (await client.send("T", b"%d" % turn)).queue_offset == turn
        await until(lambda: len({log_bytes(one.store) for one in cluster.brokers.values()}) == 1)


async def test_committed_offsets_and_groups_follow_at_once(tmp_path: Path) -> None:
    async with controlled(tmp_path) as cluster:
        old = await with_topic(cluster)
        async with client_of(old) as client:
            await client.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=b'{"groupName":"G"}')
            fields = {"topic": "T", "consumerGroup": "G", "queueId": 0, "commitOffset": 42}
            await client.call(RequestCode.UPDATE_CONSUMER_OFFSET, fields)
        others = [cluster.brokers[2], cluster.brokers[3]]
        assert all("T" in one.topics for one in others)
        await until(lambda: all(one.pop.state.tables.offsets.get("T", "G", 0) == 42 for one in others), seconds=2)
        assert all(one.pop.state.tables.groups.get("G") is not None for one in others)


async def test_delayed_messages_come_once(tmp_path: Path) -> None:
    async with controlled(tmp_path) as cluster:
        old = await with_topic(cluster)
        async with client_of(old) as client:
            await client.send("T", b"early", properties={"DELAY": "1"})
            await until(lambda: old.store.max_offset_of("T", 0) == 1)
            await client.send("T", b"late", properties={"DELAY": "1"})
        new = await cluster.elect(2)
        await until(lambda: new.store.max_offset_of("T", 0) >= 2)
        await asyncio.sleep(0.2)  # one that comes twice is delivered with the others
        async with client_of(new) as client:
            messages, _ = await client.pull("T")
        assert [message.body for message in messages] == [b"early", b"late"]


async def test_timer_messages_come_once(tmp_path: Path) -> None:
    async with controlled(tmp_path) as cluster:
        old = await with_topic(cluster)
        async with client_of(old) as client:
            await client.send("T", b"early", properties={"UNIQ_KEY": "A", "TIMER_DELAY_MS": "300"})
            await until(lambda: old.store.max_offset_of("T", 0) == 1)
            await client.send("T", b"late", properties={"UNIQ_KEY": "B", "TIMER_DELAY_MS": "2000"})
        new = await cluster.elect(2)
        await until(lambda: new.store.max_offset_of("T", 0) >= 2)
        async with client_of(new) as client:
            messages, _ = await client.pull("T")
        assert [message.body for message in messages] == [b"early", b"late"]


async def test_half_messages_are_checked_by_the_new_master(tmp_path: Path) -> None:
    soon = {"transaction_time_out": 50, "transaction_check_interval": 50}
    asked: list[Command] = []

    def note(command: Command, connection: Connection) -> None:
        asked.append(command)

    async with controlled(tmp_path, store={"file_reserved_time": 1 << 20}, settings=soon) as cluster:
        old = await with_topic(cluster)
        async with client_of(old) as client:
            properties = {"TRAN_MSG": "true", "PGROUP": "payers", "UNIQ_KEY": "K"}
            await client.send("T", b"half", properties=properties, sys_flag=4)
        new = await cluster.elect(3)
        async with client_of(new, handler=note) as client:
            await client.heartbeat(produce=("payers",))
            await until(lambda: bool(asked))
            assert await max_offset(client, "T", 0) == 0
        assert RequestCode(asked[0].code) is RequestCode.CHECK_TRANSACTION_STATE
        assert new.store.max_offset_of(HALF_TOPIC, 0) >= 2


async def test_pop_consumers_keep_what_they_hold(tmp_path: Path) -> None:
    async with controlled(tmp_path) as cluster:
        old = await with_topic(cluster)
        async with client_of(old) as client:
            await client.send("T", b"acknowledged")
            await client.send("T", b"held")
            popper = Popper(client, "T")
            first, second = await popper.pop(init_mode=0, invisible=3000)
        new = await cluster.elect(2)
        async with client_of(new) as client:
            popper = Popper(client, "T")
            assert await popper.pop() == [], "the other consumer still holds both"
            await popper.ack(first)
            again: list[bytes] = []
            async with asyncio.timeout(20):
                while not again:
                    again = [each.body for each in await popper.pop(poll=1000)]
        assert again == [second.body]


async def test_a_master_without_a_controller_gives_up_and_comes_back_in_another_epoch(tmp_path: Path) -> None:
    async with controlled(tmp_path) as cluster:
        master = await with_topic(cluster)
        await cluster.stop_controller()
        await until(lambda: cluster.role(1) is HaRole.FENCED)
        async with client_of(master) as client:
            reply = await client.connection.request(client.send_command("T", b"lost"), 5)
        assert reply.code == ResponseCode.SERVICE_NOT_AVAILABLE
        await cluster.start_controller()
        number = await cluster.master(members=3)
        new = cluster.brokers[number]
        assert replication_of(new).epoch > 1
        async with client_of(new) as client:
            assert (await client.send("T", b"kept")).queue_offset == 0


async def test_brokers_sign_what_they_ask_of_their_controller(tmp_path: Path) -> None:
    (tmp_path / "plain_acl.yml").write_text("accounts: [{accessKey: inner-key, secretKey: inner-secret, admin: true}]")
    inner = '{"accessKey":"inner-key","secretKey":"inner-secret"}'
    of_controller = {
        "acl_enable": True,
        "acl_file": tmp_path / "plain_acl.yml",
        "inner_client_authentication_credentials": inner,
    }
    settings = {
        "authentication_enabled": True,
        "authorization_enabled": True,
        "init_authentication_user": '{"username":"root","password":"root-secret"}',
        "inner_client_authentication_credentials": inner,
    }
    async with controlled(tmp_path, 2, controller_settings=of_controller, settings=settings) as cluster:
        header = ElectMasterRequest(cluster_name="DefaultCluster", broker_name="broker-a", broker_id=2)
        async with connected(cluster.controller) as stranger:
            reply = await stranger.connection.request(request(RequestCode.CONTROLLER_ELECT_MASTER, header), 5)
        assert reply.code != 0, "an election without an account"
        await cluster.stop(1)
        assert await cluster.master() == 2


async def test_controller_and_stream_are_encrypted(tmp_path: Path) -> None:
    tls = Certificates.make(tmp_path / "certificates").server_config(TlsMode.ENFORCING, enable=True)
    async with controlled(tmp_path, 2, tls=tls) as cluster:
        await cluster.stop(1)
        assert await cluster.master() == 2


async def test_a_lock_is_kept_by_the_new_master_and_given_by_no_slave(tmp_path: Path) -> None:
    def wanted(client: str) -> bytes:
        queue = '{"brokerName":"broker-a","queueId":0,"topic":"T"}'
        return f'{{"clientId":"{client}","consumerGroup":"G","mqSet":[{queue}]}}'.encode()

    async def held(of: RunningBroker, client: str) -> int:
        async with client_of(of) as asking:
            reply = await asking.call(RequestCode.LOCK_BATCH_MQ, body=wanted(client))
        return len(decode_body(LockedQueues, reply.body_bytes).lock_ok_mq_set)

    async with controlled(tmp_path) as cluster:
        old = await with_topic(cluster)
        assert await held(old, "first") == 1
        new = await cluster.elect(2)
        assert await held(old, "second") == 0
        assert await held(new, "second") == 0
        assert await held(new, "first") == 1


@pytest.mark.parametrize("number", [1, 3], ids=["master", "slave"])
async def test_a_broker_that_was_cleaned_while_it_lives_comes_back_with_another_id(tmp_path: Path, number: int) -> None:
    async with controlled(tmp_path) as cluster:
        master = await with_topic(cluster)
        async with connected(master.config.broker.address) as client:
            await client.send("T", b"before")
        cleaned = replication_of(cluster.brokers[number])
        header = CleanBrokerDataRequest(
            broker_name="broker-a", broker_controller_ids_to_clean=str(cleaned.broker_id), is_clean_living_broker=True
        )
        async with connected(cluster.controller) as client:
            reply = await client.connection.request(request(RequestCode.CONTROLLER_CLEAN_BROKER_DATA, header), 5)
        assert reply.code == 0, reply
        await until(lambda: cleaned.broker_id == 4)
        new = cluster.brokers[await cluster.master(members=3)]
        await until(lambda: replication_of(new).sync_state_set == {1, 2, 3, 4} - {number})
        async with connected(new.config.broker.address) as client:
            await client.send("T", b"after")
            messages, _ = await client.pull("T")
        assert [message.body for message in messages] == [b"before", b"after"]
        await until(lambda: len({log_bytes(one.store) for one in cluster.brokers.values()}) == 1)
