"""A push consumer between scripted brokers: what it asks, and what it makes of unusual answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from downrange.client.config import ClientConfig
from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.push import AsyncPushConsumer
from downrange.client.consumer.retry import Answer, Later
from downrange.client.errors import ClientClosed, ClientError, NoNameServer
from downrange.client.session import Session
from downrange.clock import ManualClock
from downrange.model.message import MessageQueue
from downrange.model.topics import TopicConfig
from downrange.protocol.bodies.body import decode_body, encode_body
from downrange.protocol.bodies.consumers import QueueOffsets
from downrange.protocol.bodies.groups import ConsumerIds, HeartbeatData, LockBatchBody, LockedQueues
from downrange.protocol.bodies.pull import PullMessageRequest, PullMessageResponse
from downrange.protocol.bodies.registration import RegisterBrokerBody, RegisterBrokerRequest
from downrange.protocol.bodies.send import SendMessageRequest
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command, request
from downrange.protocol.errors import BrokerError
from downrange.transport.connection import Connection
from downrange.transport.limits import Limits
from downrange.transport.server import Server
from downrange.transport.serving import serve_commands
from tests.unit.client.consumer.test_messages import record
from tests.unit.client.fake_cluster import GROUP, TOPIC, FakeBroker, FakeCluster, fake_cluster, reply
from tests.unit.client.scripted import sleeping, stored, until

RETRY = f"%RETRY%{GROUP}"


class PullableBroker:
    """Makes a fake broker one that a consumer can join. Pulls wait until `answer` is called."""

    def __init__(self, broker: FakeBroker) -> None:
        self.broker = broker
        self.members: list[str] = []
        self.committed: dict[tuple[str, int], int] = {}
        self.refuses_locks = False
        self.held: dict[tuple[str, int], list[tuple[Command, asyncio.Future[Command | None]]]] = {}
        broker.answers.update(
            {
                RequestCode.HEART_BEAT: self.heartbeat,
                RequestCode.UNREGISTER_CLIENT: reply(),
                RequestCode.GET_CONSUMER_LIST_BY_GROUP: lambda command: command.reply(
                    body=encode_body(ConsumerIds(tuple(self.members)))
                ),
                RequestCode.QUERY_CONSUMER_OFFSET: self.query_offset,
                RequestCode.UPDATE_CONSUMER_OFFSET: self.commit,
                RequestCode.PULL_MESSAGE: self.pull,
                RequestCode.LOCK_BATCH_MQ: self.lock,
                RequestCode.UNLOCK_BATCH_MQ: reply(),
                RequestCode.CONSUMER_SEND_MSG_BACK: reply(),
                RequestCode.SEND_MESSAGE_V2: stored,
            }
        )

    def heartbeat(self, command: Command) -> Command:
        client_id = decode_body(HeartbeatData, command.body_bytes).client_id
        if client_id not in self.members:
            self.members.append(client_id)
        return command.reply()

    def query_offset(self, command: Command) -> Command:
        key = command.ext_fields["topic"], int(command.ext_fields["queueId"])
        return command.reply(ext_fields={"offset": str(self.committed.get(key, 0))})

    def commit(self, command: Command) -> Command:
        fields = command.ext_fields
        self.committed[fields["topic"], int(fields["queueId"])] = int(fields["commitOffset"])
        return command.reply()

    def lock(self, command: Command) -> Command:
        wanted = decode_body(LockBatchBody, command.body_bytes).mq_set
        granted = frozenset() if self.refuses_locks else wanted
        return command.reply(body=encode_body(LockedQueues(granted)))

    def pull(self, command: Command) -> Command:
        header = command.header(PullMessageRequest)
        future: asyncio.Future[Command | None] = asyncio.get_running_loop().create_future()
        self.held.setdefault((header.topic, header.queue_id), []).append((command, future))
        return cast(Command, future)

    async def asked(self, queue_id: int = 0, topic: str = TOPIC) -> PullMessageRequest:
        """The pull that waits for an answer."""
        await until(lambda: self.held.get((topic, queue_id)))
        return self.held[topic, queue_id][-1][0].header(PullMessageRequest)

    async def answer(
        self,
        code: int = ResponseCode.SUCCESS,
        *,
        next_offset: int = 0,
        body: bytes = b"",
        suggested: int = 0,
        queue_id: int = 0,
        remark: str | None = None,
    ) -> None:
        await self.asked(queue_id)
        command, future = self.held[TOPIC, queue_id].pop()
        header = PullMessageResponse(
            suggest_which_broker_id=suggested, next_begin_offset=next_offset, min_offset=0, max_offset=100
        )
        future.set_result(command.reply(code, remark, header=header, body=body))

    def end(self) -> None:
        for held in self.held.values():
            for _, future in held:
                future.cancel()


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with fake_cluster(tmp_path, "broker-a") as running:
        await running.register(TopicConfig(TOPIC, 1, 1), TopicConfig(RETRY, 1, 1))
        yield running


@pytest.fixture
async def broker(cluster: FakeCluster) -> AsyncIterator[PullableBroker]:
    broker = PullableBroker(cluster.broker)
    yield broker
    broker.end()


class Seen(list[ReceivedMessage]):
    async def __call__(self, message: ReceivedMessage) -> None:
        self.append(message)


@asynccontextmanager
async def consuming(
    cluster: FakeCluster, callback: Any = None, *, clock: ManualClock | None = None, **settings: Any
) -> AsyncIterator[AsyncPushConsumer]:
    session = Session(ClientConfig((cluster.namesrv,)), clock=clock)
    on_message = Seen() if callback is None else callback
    consumer = AsyncPushConsumer(GROUP, config=ConsumerConfig(**settings), on_message=on_message, session=session)
    await consumer.subscribe(TOPIC)
    await consumer.start()
    try:
        yield consumer
    finally:
        await consumer.close(1)
        await session.close()


def records(*offsets: int) -> bytes:
    return b"".join(record(str(offset).encode(), offset=offset) for offset in offsets)


# --- asking


async def test_the_first_pull_asks_what_javas_asks(cluster: FakeCluster, broker: PullableBroker) -> None:
    async with consuming(cluster) as consumer:
        pull = await broker.asked()
        (version,) = (each.version for each in consumer.subscriptions if each.topic == TOPIC)
        assert pull.sub_version <= version  # raised once the brokers have heard that our queues changed
        assert dict(broker.held[TOPIC, 0][0][0].ext_fields) == {
            "consumerGroup": GROUP,
            "topic": TOPIC,
            "queueId": "0",
            "queueOffset": "0",
            "maxMsgNums": "32",
            "sysFlag": "2",
            "commitOffset": "0",
            "suspendTimeoutMillis": "15000",
            "subVersion": str(pull.sub_version),
            "expressionType": "TAG",
            "bname": "broker-a",
        }
        await broker.answer(ResponseCode.PULL_NOT_FOUND)
        assert (await broker.asked()).sub_version == version


async def test_one_pull_at_a_time_goes_on_from_the_answer_and_commits_on_the_way(
    cluster: FakeCluster, broker: PullableBroker
) -> None:
    seen = Seen()
    async with consuming(cluster, seen):
        await broker.answer(body=records(0, 1), next_offset=2)
        await until(lambda: len(seen) == 2)
        await broker.answer(ResponseCode.PULL_NOT_FOUND, next_offset=2)
        pull = await broker.asked()
        assert len(broker.held[TOPIC, 0]) == 1
        assert (pull.queue_offset, pull.commit_offset, pull.sys_flag) == (2, 2, 3)
    assert broker.committed[TOPIC, 0] == 2


async def test_the_group_is_announced_before_the_first_pull_and_left_at_the_end(
    cluster: FakeCluster, broker: PullableBroker
) -> None:
    async with consuming(cluster) as consumer:
        await broker.asked()
        beats = [command for command in cluster.broker.asked if command.code == RequestCode.HEART_BEAT]
        data = decode_body(HeartbeatData, beats[-1].body_bytes)
        assert data.client_id == consumer.session.client_id
        (group,) = data.consumer_data_set
        assert (group.group_name, group.consume_type) == (GROUP, "CONSUME_PASSIVELY")
        assert {each.topic for each in group.subscription_data_set} == {TOPIC, RETRY}
        codes = [command.code for command in cluster.broker.asked]
        assert codes.index(RequestCode.HEART_BEAT) < codes.index(RequestCode.PULL_MESSAGE)
    (left,) = cluster.broker.fields(RequestCode.UNREGISTER_CLIENT)
    assert (left["consumerGroup"], left["clientID"]) == (GROUP, data.client_id)
    codes = [command.code for command in cluster.broker.asked]
    assert codes[-1] == RequestCode.UNREGISTER_CLIENT


# --- unusual answers


async def test_what_was_filtered_out_is_committed_too(cluster: FakeCluster, broker: PullableBroker) -> None:
    async with consuming(cluster):
        await broker.answer(ResponseCode.PULL_RETRY_IMMEDIATELY, next_offset=800)
        pull = await broker.asked()
        assert (pull.queue_offset, pull.commit_offset) == (800, 800)


async def test_an_offset_outside_the_queue_is_corrected_and_committed(
    cluster: FakeCluster, broker: PullableBroker
) -> None:
    broker.committed[TOPIC, 0] = 500
    async with consuming(cluster):
        assert (await broker.asked()).queue_offset == 500
        await broker.answer(ResponseCode.PULL_OFFSET_MOVED, next_offset=40)
        await until(lambda: broker.held[TOPIC, 0])
        assert (await broker.asked()).queue_offset == 40
        assert broker.committed[TOPIC, 0] == 40


async def test_a_broker_that_keeps_moving_the_offset_is_not_asked_without_pause(
    cluster: FakeCluster, broker: PullableBroker
) -> None:
    clock = ManualClock()
    async with consuming(cluster, clock=clock):
        await broker.answer(ResponseCode.PULL_OFFSET_MOVED, next_offset=40)
        await broker.answer(ResponseCode.PULL_OFFSET_MOVED, next_offset=41)
        await sleeping(clock, 1)
        assert not broker.held[TOPIC, 0]
        await clock.advance(1)
        assert (await broker.asked()).queue_offset == 41


@pytest.mark.parametrize(
    ("code", "pause"),
    [(ResponseCode.SYSTEM_ERROR, 1.0), (ResponseCode.SYSTEM_BUSY, 1.0), (ResponseCode.FLOW_CONTROL, 0.02)],
)
async def test_after_an_error_the_next_pull_waits(
    cluster: FakeCluster, broker: PullableBroker, code: int, pause: float
) -> None:
    clock = ManualClock()
    async with consuming(cluster, clock=clock):
        await broker.answer(code, remark="no")
        await sleeping(clock, pause)
        assert not broker.held[TOPIC, 0]
        await clock.advance(pause * 0.9)
        await asyncio.sleep(0.02)
        assert not broker.held[TOPIC, 0]
        await clock.advance(pause * 0.2)
        assert (await broker.asked()).queue_offset == 0


async def test_a_broker_that_forgot_us_is_told_again(cluster: FakeCluster, broker: PullableBroker) -> None:
    async with consuming(cluster):
        await broker.asked()
        before = len(cluster.broker.fields(RequestCode.HEART_BEAT))
        await broker.answer(ResponseCode.SUBSCRIPTION_NOT_EXIST, remark="the consumer's group info not exist")
        await until(lambda: len(cluster.broker.fields(RequestCode.HEART_BEAT)) > before)


async def test_a_slave_that_sends_us_in_circles_is_not_asked_without_pause(
    cluster: FakeCluster, broker: PullableBroker
) -> None:
    clock = ManualClock()
    async with consuming(cluster, clock=clock):
        await broker.answer(ResponseCode.PULL_RETRY_IMMEDIATELY, next_offset=0)
        await sleeping(clock, 1)
        assert not broker.held[TOPIC, 0]
        await clock.advance(1)
        await broker.asked()


async def test_a_damaged_answer_is_asked_for_again_and_nothing_of_it_consumed(
    cluster: FakeCluster, broker: PullableBroker
) -> None:
    clock, seen = ManualClock(), Seen()
    async with consuming(cluster, seen, clock=clock):
        await broker.answer(body=records(0, 1)[:-1], next_offset=2)
        await sleeping(clock, 1)
        await clock.advance(1)
        assert (await broker.asked()).queue_offset == 0
        assert seen == []


async def test_the_suggested_slave_is_read_and_gets_no_commits(cluster: FakeCluster, broker: PullableBroker) -> None:
    second = FakeBroker("broker-a")
    slave = PullableBroker(second)
    async with Server(serve_commands(second), limits=Limits(drain_seconds=0.1)) as server:
        header = RegisterBrokerRequest(
            broker_name="broker-a",
            broker_addr=f"127.0.0.1:{server.port}",
            cluster_name="DefaultCluster",
            ha_server_addr="",
            broker_id=1,
        )
        command = request(RequestCode.REGISTER_BROKER, header, body=encode_body(RegisterBrokerBody()))
        assert (await cluster.connections["broker-a"].request(command, 5)).code == 0
        async with consuming(cluster):
            await broker.answer(body=records(0), next_offset=1, suggested=1)
            pull = await slave.asked()
            assert (pull.queue_offset, pull.sys_flag, pull.commit_offset) == (1, 2, 0)
            await slave.answer(body=records(1), next_offset=2, suggested=0)
            pull = await broker.asked()
            assert (pull.queue_offset, pull.sys_flag) == (2, 3)
        # Members announce themselves to slaves too, and leave them.
        assert {RequestCode.HEART_BEAT, RequestCode.UNREGISTER_CLIENT} <= {each.code for each in second.asked}
        assert broker.committed[TOPIC, 0] == 2
        assert slave.committed == {}
        slave.end()


# --- flow control


async def test_a_queue_that_holds_too_much_is_not_pulled_until_there_is_room(
    cluster: FakeCluster, broker: PullableBroker
) -> None:
    gate = asyncio.Event()

    async def callback(message: ReceivedMessage) -> None:
        await gate.wait()

    async with consuming(cluster, callback, pull_threshold_for_queue=2):
        await broker.answer(body=records(0, 1), next_offset=2)
        await broker.answer(body=records(2), next_offset=3)
        await asyncio.sleep(0.05)
        assert not broker.held[TOPIC, 0]
        gate.set()
        assert (await broker.asked()).queue_offset == 3


async def test_pausing_stops_pulls_and_nothing_else(cluster: FakeCluster, broker: PullableBroker) -> None:
    seen = Seen()
    async with consuming(cluster, seen) as consumer:
        await broker.asked()
        consumer.pause()
        await broker.answer(body=records(0), next_offset=1)
        await until(lambda: len(seen) == 1)
        assert not broker.held[TOPIC, 0]
        consumer.resume()
        assert (await broker.asked()).queue_offset == 1


# --- failures


async def test_when_sending_back_fails_the_message_is_sent_to_the_retry_topic(
    cluster: FakeCluster, broker: PullableBroker
) -> None:
    cluster.broker.answers[RequestCode.CONSUMER_SEND_MSG_BACK] = reply(ResponseCode.SYSTEM_ERROR, "look message failed")

    async def callback(message: ReceivedMessage) -> Answer:
        return Later()

    async with consuming(cluster, callback):
        await broker.answer(body=records(0), next_offset=1)
        await until(lambda: cluster.broker.fields(RequestCode.SEND_MESSAGE_V2))
        (sent,) = [command for command in cluster.broker.asked if command.code == RequestCode.SEND_MESSAGE_V2]
        header = sent.header(SendMessageRequest)
        assert (header.topic, header.reconsume_times, header.max_reconsume_times) == (RETRY, 4, 16)
    assert broker.committed[TOPIC, 0] == 1


# --- orderly


async def test_an_orderly_queue_is_locked_first_and_unlocked_at_the_end(
    cluster: FakeCluster, broker: PullableBroker
) -> None:
    async with consuming(cluster, orderly=True):
        await broker.asked()
        codes = [command.code for command in cluster.broker.asked]
        assert codes.index(RequestCode.LOCK_BATCH_MQ) < codes.index(RequestCode.PULL_MESSAGE)
    (unlock,) = [command for command in cluster.broker.asked if command.code == RequestCode.UNLOCK_BATCH_MQ]
    body = decode_body(LockBatchBody, unlock.body_bytes)
    assert {queue.topic for queue in body.mq_set} == {TOPIC, RETRY}


async def test_a_queue_somebody_else_holds_is_tried_again_soon(cluster: FakeCluster, broker: PullableBroker) -> None:
    clock = ManualClock()
    broker.refuses_locks = True
    async with consuming(cluster, clock=clock, orderly=True) as consumer:
        assert consumer.queues == ()
        assert not broker.held
        broker.refuses_locks = False
        await asyncio.sleep(0.02)
        await clock.advance(1)
        await broker.asked()


async def test_a_lock_that_is_lost_stops_pulls_and_callbacks_until_it_is_back(
    cluster: FakeCluster, broker: PullableBroker
) -> None:
    clock, seen = ManualClock(), Seen()
    async with consuming(cluster, seen, clock=clock, orderly=True, rebalance_seconds=10_000) as consumer:
        await broker.answer(body=records(0), next_offset=1)
        await until(lambda: len(seen) == 1)
        await broker.asked()
        broker.refuses_locks = True
        await clock.advance(20)
        await consumer._held.renew_locks()
        await clock.advance(11)  # 31 s since the lock was last granted
        await broker.answer(body=records(1), next_offset=2)
        await asyncio.sleep(0.05)
        assert len(seen) == 1
        assert not broker.held[TOPIC, 0]
        broker.refuses_locks = False
        await consumer._held.renew_locks()
        await clock.advance(1)
        await until(lambda: len(seen) == 2)
        assert (await broker.asked()).queue_offset == 2


# --- brokers ask


async def test_a_reset_drops_what_is_held_and_goes_on_where_told(cluster: FakeCluster, broker: PullableBroker) -> None:
    gate, seen = asyncio.Event(), Seen()

    async def callback(message: ReceivedMessage) -> None:
        seen.append(message)
        await gate.wait()

    async with consuming(cluster, callback, consume_threads=1) as consumer:
        await broker.answer(body=records(0, 1), next_offset=2)
        await until(lambda: len(seen) == 1)
        await broker.asked()
        broker.held[TOPIC, 0].clear()
        queue = MessageQueue(TOPIC, "broker-a", 0)
        other = MessageQueue(TOPIC, "broker-x", 0)
        command = request(
            RequestCode.RESET_CONSUMER_CLIENT_OFFSET,
            ext_fields={"topic": TOPIC, "group": GROUP, "timestamp": "-1", "isForce": "false"},
            body=encode_body(QueueOffsets({queue: 70, other: 5})),
        )
        consumer.session.handlers[RequestCode.RESET_CONSUMER_CLIENT_OFFSET](command, cast(Connection, None))
        assert (await broker.asked()).queue_offset == 70
        gate.set()
        await asyncio.sleep(0.02)
        assert len(seen) == 1  # the second message was never begun
        assert broker.committed[TOPIC, 0] == 70
    assert broker.committed[TOPIC, 0] == 70


async def test_a_group_that_is_not_here_is_told(cluster: FakeCluster, broker: PullableBroker) -> None:
    async with consuming(cluster) as consumer:
        command = request(RequestCode.GET_CONSUMER_RUNNING_INFO, ext_fields={"consumerGroup": "other", "clientId": "c"})
        with pytest.raises(BrokerError, match="other"):
            consumer.session.handlers[RequestCode.GET_CONSUMER_RUNNING_INFO](command, cast(Connection, None))


async def test_news_of_the_group_bring_commits_and_a_new_round(cluster: FakeCluster, broker: PullableBroker) -> None:
    seen = Seen()
    async with consuming(cluster, seen, rebalance_seconds=10_000, persist_consumer_offset_seconds=10_000) as consumer:
        await broker.answer(body=records(0), next_offset=1)
        await until(lambda: len(seen) == 1)
        broker.members.insert(0, "0-newcomer")  # sorts before us, and there is one queue
        notice = request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, ext_fields={"consumerGroup": GROUP}, oneway=True)
        consumer.session.handlers[RequestCode.NOTIFY_CONSUMER_IDS_CHANGED](notice, cast(Connection, None))
        await until(lambda: consumer.queues == ())
        assert broker.committed[TOPIC, 0] == 1


# --- starting


async def test_a_session_has_one_consumer_of_a_group(cluster: FakeCluster, broker: PullableBroker) -> None:
    async with consuming(cluster) as consumer:
        second = AsyncPushConsumer(GROUP, session=consumer.session)
        with pytest.raises(ClientError, match="already"):
            await second.start()
        assert consumer.session.members[GROUP] is consumer


async def test_a_consumer_starts_once(cluster: FakeCluster, broker: PullableBroker) -> None:
    async with consuming(cluster) as consumer:
        with pytest.raises(ClientClosed, match="started before"):
            await consumer.start()


async def test_no_name_server_is_told_at_the_start() -> None:
    consumer = AsyncPushConsumer(GROUP, "127.0.0.1:1")
    await consumer.subscribe(TOPIC)
    with pytest.raises(NoNameServer):
        await consumer.start()
