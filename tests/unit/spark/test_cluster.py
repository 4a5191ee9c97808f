"""A cluster as the driver sees it, with connections that are cut while nobody looks at them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from downrange import Message
from downrange.client.admin.groups import GroupAdmin
from downrange.client.errors import NoRoute
from downrange.client.session import Session
from downrange.model.message import MessageQueue
from downrange.protocol.codes import ResponseCode
from downrange.spark.brokers import BrokerAway, Brokers, Pulled
from downrange.spark.cluster import Cluster
from downrange.spark.errors import DataLost
from downrange.spark.options import parse_options
from downrange.spark.planner import QueueRange, Reach
from downrange.spark.wire_reader import WireReader
from downrange.spark.worker_loop import WorkerLoop
from downrange.testing import EmbeddedBroker, broker
from tests.support.fault_proxy import FaultProxy


@pytest.fixture
def loop() -> Iterator[WorkerLoop]:
    running = WorkerLoop()
    yield running
    running.close()


@pytest.fixture(scope="module")
def mq() -> Iterator[EmbeddedBroker]:
    with broker() as running:
        running.create_topic("orders", 2)
        producer = running.producer()
        for number in range(100):
            queue = MessageQueue("orders", "broker-a", number % 2)
            producer.send(Message("orders", b"%d" % number, tags="ab"[number % 2]), queue=queue)
        yield running


class ProxyThread:
    """A proxy that runs on a loop of its own, as a server does."""

    def __init__(self, port: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.proxy = FaultProxy(("127.0.0.1", port))
        self.run(self.proxy.accept())

    def run(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)  # type: ignore[arg-type]

    def cut(self) -> None:
        async def cut() -> None:
            self.proxy.cut()

        self.run(cut())

    def close(self) -> None:
        self.run(self.proxy.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def test_a_connection_closed_between_two_batches_is_made_anew(
    mq: EmbeddedBroker, loop: WorkerLoop, caplog: pytest.LogCaptureFixture
) -> None:
    name_server = ProxyThread(int(mq.namesrv.rpartition(":")[2]))
    try:
        options = parse_options({"namesrv": f"127.0.0.1:{name_server.proxy.port}", "subscribePattern": "orders"})
        cluster = Cluster(options, loop)
        assert len(cluster.queues()) == 2
        name_server.cut()
        with caplog.at_level(logging.WARNING):
            assert len(cluster.queues()) == 2
        assert caplog.records == []
    finally:
        name_server.close()


def test_reach_times_and_commits(mq: EmbeddedBroker, loop: WorkerLoop) -> None:
    cluster = Cluster(parse_options({"namesrv": mq.namesrv, "subscribe": "orders", "group": "lake"}), loop)
    queues = cluster.queues()
    reach = cluster.reach(queues, must_answer=True)
    assert reach == dict.fromkeys(queues, Reach(0, 50))
    stored = {(message.queue, int(message.queue_offset)): message.store_timestamp for message in mq.messages("orders")}
    for queue in queues:
        for moment in {stored[queue, 0], stored[queue, 25], stored[queue, 49], stored[queue, 49] + 1}:
            wanted = sum(time < moment for (where, _), time in stored.items() if where == queue)
            assert cluster.at_time({queue: moment}, reach) == {queue: wanted}
    cluster.commit(dict.fromkeys(queues, 20))
    assert cluster.committed(queues) == dict.fromkeys(queues, 20)


def read(mq: EmbeddedBroker, loop: WorkerLoop, wanted: list[QueueRange], **options: str) -> int:
    given = parse_options({"namesrv": mq.namesrv, "subscribe": "orders", **options})
    return sum(len(fetched.starts) for fetched in WireReader(given, loop).read(wanted))


QUEUE = MessageQueue("orders", "broker-a", 0)


@pytest.mark.parametrize("is_of_slave", [True, False])
def test_a_slave_that_is_behind_is_waited_for(
    mq: EmbeddedBroker, loop: WorkerLoop, monkeypatch: pytest.MonkeyPatch, is_of_slave: bool
) -> None:
    right = Brokers.pull
    moved = iter([Pulled(ResponseCode.PULL_OFFSET_MOVED, b"", 7, 0, 7, 0, is_of_slave)] * 2)

    async def pull(self: Brokers, *arguments: Any, **options: Any) -> Pulled:
        return next(moved, None) or await right(self, *arguments, **options)

    monkeypatch.setattr(Brokers, "pull", pull)
    if is_of_slave:
        assert read(mq, loop, [QueueRange(QUEUE, 10, 50)]) == 40
    else:
        with pytest.raises(DataLost, match="it is a new queue"):
            read(mq, loop, [QueueRange(QUEUE, 10, 50)])


@pytest.mark.parametrize("is_of_slave", [True, False])
def test_messages_that_a_master_lost_after_a_batch_was_planned_do_not_stop_a_query_that_goes_on_without_them(
    mq: EmbeddedBroker, loop: WorkerLoop, is_of_slave: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Brokers.pull

    async def pull(self: Brokers, *arguments: Any, **options: Any) -> Pulled:
        return replace(await right(self, *arguments, **options), is_of_slave=is_of_slave)

    monkeypatch.setattr(Brokers, "pull", pull)
    wanted = [QueueRange(QUEUE, 40, 60)]  # the queue ends at 50
    if is_of_slave:
        with pytest.raises(BrokerAway, match="does not give message 50"):
            read(mq, loop, wanted, failOnDataLoss="false", retryTimeout="100ms")
    else:
        assert read(mq, loop, wanted, failOnDataLoss="false", retryTimeout="100ms") == 10


@pytest.mark.parametrize("in_flight", ["1", "2", "16"])
def test_ranges_are_read_whole(mq: EmbeddedBroker, loop: WorkerLoop, in_flight: str) -> None:
    other = QUEUE._replace(queue_id=1)
    wanted = [QueueRange(QUEUE, 3, 50), QueueRange(other, 0, 1), QueueRange(other, 10, 45)]
    assert read(mq, loop, wanted, pullsInFlight=in_flight) == 47 + 1 + 35
    assert read(mq, loop, wanted, pullsInFlight=in_flight, tags="a") == 47
    assert read(mq, loop, wanted, pullsInFlight=in_flight, tags="nobody") == 0
    assert read(mq, loop, []) == 0


def test_a_reader_that_is_given_up_leaves_nothing_under_way(mq: EmbeddedBroker, loop: WorkerLoop) -> None:
    given = parse_options({"namesrv": mq.namesrv, "subscribe": "orders"})
    reading = WireReader(given, loop).read([QueueRange(QUEUE, 0, 40), QueueRange(QUEUE._replace(queue_id=1), 0, 50)])
    assert len(next(reading).starts) > 0
    reading.close()
    assert read(mq, loop, [QueueRange(QUEUE, 0, 5)]) == 5


def test_an_offset_outside_the_queue(mq: EmbeddedBroker, loop: WorkerLoop) -> None:
    with pytest.raises(DataLost, match="the queue ends at 50"):
        read(mq, loop, [QueueRange(QUEUE, 60, 70)])
    assert read(mq, loop, [QueueRange(QUEUE, 60, 70)], failOnDataLoss="false") == 0


def test_a_group_that_only_spark_commits_for_has_a_retry_topic_and_no_members(
    mq: EmbeddedBroker, loop: WorkerLoop
) -> None:
    """Operators' tools find the brokers of a group by the route of its retry topic."""
    options = parse_options({"namesrv": mq.namesrv, "subscribe": "orders", "group": "archive"})
    cluster = Cluster(options, loop)
    queues = cluster.queues()
    cluster.commit(dict.fromkeys(queues, 7))
    session = loop.session(options.client_config())

    async def ask() -> None:
        async with asyncio.timeout(10):
            while not (route := await _route(session, "%RETRY%archive")):
                await asyncio.sleep(0.01)
        assert route == ["broker-a"]
        progress = await GroupAdmin(session).progress("archive")
        assert not progress.failed
        (stats,) = progress.done.values()
        assert {queue: stats.offset_table[queue].consumer_offset for queue in queues} == dict.fromkeys(queues, 7)
        assert set((await GroupAdmin(session).connections("archive")).done.values()) == {None}

    loop.run(ask())


async def _route(session: Session, topic: str) -> list[str]:
    try:
        return [broker.broker_name for broker in (await session.look_up_route(topic)).broker_datas]
    except NoRoute:
        return []
