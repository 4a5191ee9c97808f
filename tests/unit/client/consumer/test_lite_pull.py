"""A lite pull consumer against scripted brokers and a clock that stands still."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from downrange.client.config import ClientConfig
from downrange.client.consumer.assigned_queue import AssignedQueue
from downrange.client.consumer.lite_pull import AsyncLitePullConsumer
from downrange.client.consumer.lite_pull_config import LitePullConfig
from downrange.client.errors import CommitFailed
from downrange.client.session import Session
from downrange.clock import ManualClock
from downrange.model.message import MessageQueue, PhysicalOffset, QueueOffset, StoredMessage
from downrange.model.message_id import HostPort, pack_host
from downrange.model.record import encode_record
from downrange.protocol.bodies.offsets import OffsetResponse
from downrange.protocol.bodies.pull import PullMessageRequest, PullMessageResponse
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command
from downrange.settings import ConfigError
from tests.unit.client.fake_cluster import TOPIC, FakeCluster, fake_cluster, reply
from tests.unit.client.scripted import Silence, sleeping, until

QUEUE = MessageQueue(TOPIC, "broker-a", 0)
HOST = HostPort("127.0.0.1", 10911)


def record(offset: int, size: int) -> bytes:
    packed = pack_host(*HOST)
    message = StoredMessage(
        topic=TOPIC, queue_id=0, queue_offset=QueueOffset(offset), physical_offset=PhysicalOffset(offset * 1000),
        body=b"x" * size, properties_text="", sys_flag=0, flag=0, born_timestamp=1, born_host=HOST, store_timestamp=1,
        store_host=HOST, reconsume_times=0, prepared_transaction_offset=0, body_crc=0, store_size=0,
    )  # fmt: skip
    return encode_record(message, packed, packed)


class ScriptedQueue:
    """Queue 0 of broker-a: `length` messages, then silence, as a broker keeps it that holds the pull."""

    def __init__(self, length: int, size: int = 10) -> None:
        self.length = length
        self.size = size
        self.silence = Silence()
        self.committed: list[int] = []
        self.offsets_asked: list[int] = []

    def pull(self, command: Command) -> Command:
        asked = command.header(PullMessageRequest)
        self.offsets_asked.append(asked.queue_offset)
        stop = min(self.length, asked.queue_offset + asked.max_msg_nums)
        if stop <= asked.queue_offset:
            return self.silence(command)
        header = PullMessageResponse(
            suggest_which_broker_id=0, next_begin_offset=stop, min_offset=0, max_offset=self.length
        )
        body = b"".join(record(offset, self.size) for offset in range(asked.queue_offset, stop))
        return command.reply(header=header, body=body)

    def commit(self, command: Command) -> Command:
        self.committed.append(int(command.ext_fields["commitOffset"]))
        return command.reply()

    def serve(self, cluster: FakeCluster) -> None:
        cluster.broker.answers.update(
            {
                RequestCode.PULL_MESSAGE: self.pull,
                RequestCode.UPDATE_CONSUMER_OFFSET: self.commit,
                RequestCode.QUERY_CONSUMER_OFFSET: reply(header=OffsetResponse(0)),
                RequestCode.HEART_BEAT: reply(),
                RequestCode.UNREGISTER_CLIENT: reply(),
            }
        )


class Stage:
    """A cluster, a clock, and consumers that run on both."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.clock = ManualClock()

    def consumer(self, **settings: object) -> AsyncLitePullConsumer:
        session = Session(ClientConfig((self.cluster.namesrv,)), clock=self.clock)
        return AsyncLitePullConsumer("readers", config=LitePullConfig(**settings), session=session)  # type: ignore[arg-type]


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with fake_cluster(tmp_path) as cluster:
        yield Stage(cluster)


async def close(consumer: AsyncLitePullConsumer, queue: ScriptedQueue) -> None:
    await consumer.close()
    await consumer.session.close()
    queue.silence.end()


@pytest.mark.parametrize(
    ("settings", "size", "fetched"),
    [
        ({"pull_threshold_for_queue": 25}, 10, 30),
        ({"pull_threshold_size_for_queue": 2500}, 18, 30),  # a record of 18 body bytes takes 115
        ({"consume_max_span": 25}, 10, 30),
        ({"pull_threshold_for_all": 25}, 10, 30),
        ({"pull_batch_size": 32, "pull_threshold_for_queue": 25}, 10, 32),
        ({}, 10, 1010),
    ],
)
async def test_fetching_rests_at_each_limit_and_goes_on_when_there_is_room(
    stage: Stage, settings: dict[str, int], size: int, fetched: int
) -> None:
    queue = ScriptedQueue(5000, size)
    queue.serve(stage.cluster)
    consumer = await stage.consumer(**settings).start()
    await consumer.assign([QUEUE])
    batch = settings.get("pull_batch_size", 10)
    await until(lambda: len(queue.offsets_asked) * batch >= fetched)
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert len(queue.offsets_asked) * batch == fetched
    seen: list[int] = []
    while len(seen) < 200:
        seen += [message.queue_offset for message in await consumer.poll(5)]
    assert seen == list(range(len(seen)))
    assert queue.offsets_asked == sorted(set(queue.offsets_asked))
    await close(consumer, queue)


async def test_what_is_done_is_committed_every_five_seconds(stage: Stage) -> None:
    queue = ScriptedQueue(30)
    queue.serve(stage.cluster)
    consumer = await stage.consumer().start()
    await consumer.assign([QUEUE])
    await consumer.poll(5)
    await stage.clock.advance(5)
    assert queue.committed == []  # the user may still be at it
    await consumer.poll(5)
    await stage.clock.advance(4.9)
    assert queue.committed == []
    await stage.clock.advance(0.2)
    await until(lambda: queue.committed == [10])
    await stage.clock.advance(20)
    assert queue.committed == [10]  # nothing new
    await close(consumer, queue)
    assert queue.committed == [10, 20]


async def test_without_auto_commit_nothing_is_committed_unasked(stage: Stage) -> None:
    queue = ScriptedQueue(30)
    queue.serve(stage.cluster)
    consumer = await stage.consumer(auto_commit=False).start()
    await consumer.assign([QUEUE])
    await consumer.poll(5)
    await consumer.poll(5)
    await stage.clock.advance(60)
    await consumer.commit()
    await consumer.poll(5)
    await close(consumer, queue)
    assert queue.committed == [20]


async def test_a_commit_that_fails_is_told_and_made_up_for(stage: Stage) -> None:
    queue = ScriptedQueue(30)
    queue.serve(stage.cluster)
    stage.cluster.broker.answers[RequestCode.UPDATE_CONSUMER_OFFSET] = reply(ResponseCode.SYSTEM_BUSY, "busy")
    consumer = await stage.consumer().start()
    await consumer.assign([QUEUE])
    await consumer.poll(5)
    with pytest.raises(CommitFailed, match="readers"):
        await consumer.commit()
    queue.serve(stage.cluster)
    await consumer.commit()
    assert queue.committed == [10]
    await close(consumer, queue)


async def test_after_an_error_the_queue_is_asked_again_a_second_later(stage: Stage) -> None:
    queue = ScriptedQueue(10)
    queue.serve(stage.cluster)
    failing = reply(ResponseCode.SYSTEM_BUSY, "busy")
    stage.cluster.broker.answers[RequestCode.PULL_MESSAGE] = failing
    consumer = await stage.consumer().start()
    await consumer.assign([QUEUE])
    asked = stage.cluster.broker.fields
    await sleeping(stage.clock, 1)
    await stage.clock.advance(0.9)
    assert len(asked(RequestCode.PULL_MESSAGE)) == 1
    queue.serve(stage.cluster)
    waiting = asyncio.create_task(consumer.poll(5))
    await asyncio.sleep(0)
    await stage.clock.advance(0.2)
    assert len(await waiting) == 10
    await close(consumer, queue)


async def test_an_offset_outside_the_queue_is_corrected_at_once(stage: Stage) -> None:
    queue = ScriptedQueue(10)
    queue.serve(stage.cluster)
    moved = PullMessageResponse(suggest_which_broker_id=0, next_begin_offset=4, min_offset=4, max_offset=10)
    stage.cluster.broker.answers[RequestCode.QUERY_CONSUMER_OFFSET] = reply(header=OffsetResponse(77))

    def pull(command: Command) -> Command:
        if command.header(PullMessageRequest).queue_offset == 77:
            return command.reply(ResponseCode.PULL_OFFSET_MOVED, header=moved)
        return queue.pull(command)

    stage.cluster.broker.answers[RequestCode.PULL_MESSAGE] = pull
    consumer = await stage.consumer().start()
    await consumer.assign([QUEUE])
    assert [message.queue_offset for message in await consumer.poll(5)] == [4, 5, 6, 7, 8, 9]
    await close(consumer, queue)
    assert queue.committed == [10]


async def test_a_defect_in_the_background_is_not_waited_for(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = ScriptedQueue(10)
    queue.serve(stage.cluster)
    monkeypatch.setattr(AssignedQueue, "add", lambda self, result: 1 / 0)
    consumer = await stage.consumer().start()
    await consumer.assign([QUEUE])
    with pytest.raises(ZeroDivisionError):
        await consumer.poll(5)
    await close(consumer, queue)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"pull_batch_size": 0}, "pull_batch_size is 0; it must be positive"),
        ({"auto_commit_interval_seconds": 0.5}, "at least 1"),
        ({"poll_timeout_seconds": -1.0}, "must not be negative"),
        ({"pull_threshold_for_all": 0}, "pull_threshold_for_all"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, float], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        LitePullConfig(**settings)  # type: ignore[arg-type]


def test_defaults_are_those_of_rocketmq() -> None:
    config = LitePullConfig()
    assert (config.pull_batch_size, config.pull_threshold_for_queue, config.consume_max_span) == (10, 1000, 2000)
    assert (config.pull_threshold_size_for_queue, config.pull_threshold_for_all) == (100 << 20, 10_000)
    assert (config.broker_suspend_seconds, config.auto_commit_interval_seconds, config.poll_timeout_seconds) == (
        20,
        5,
        5,
    )


@pytest.mark.parametrize("by", ["poll", "iteration"])
async def test_a_reader_that_never_waits_lets_others_run(stage: Stage, by: str) -> None:
    queue = ScriptedQueue(1000)
    queue.serve(stage.cluster)
    consumer = await stage.consumer().start()
    await consumer.assign([QUEUE])
    await until(lambda: len(queue.offsets_asked) == 101)  # everything waits here, and the broker holds one pull
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    task = asyncio.create_task(others())
    if by == "poll":
        for _ in range(50):
            assert len(await consumer.poll(0)) == 10
            stage.clock.tick(0.02)
    else:
        count = 0
        async for _ in consumer:
            stage.clock.tick(0.02)
            count += 1
            if count == 50:
                break
    assert turns >= 45
    task.cancel()
    await close(consumer, queue)
