"""Reading from our own broker many messages at a time, and from any other as ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from downrange import Message
from downrange.model.message import MessageQueue
from downrange.protocol.bodies.body import encode_body
from downrange.protocol.bodies.pull import PullMessageRequest, PullMessageResponse
from downrange.protocol.bodies.routes import BrokerData, QueueData, TopicRouteData
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command
from downrange.protocol.errors import NoPermission
from downrange.spark.brokers import Brokers
from downrange.spark.cluster import Cluster
from downrange.spark.options import parse_options
from downrange.spark.planner import QueueRange
from downrange.spark.wire_reader import WireReader
from downrange.spark.worker_loop import WorkerLoop
from downrange.testing import EmbeddedBroker, broker
from downrange.transport.connection import Connection
from downrange.transport.limits import Limits
from downrange.transport.server import Server
from downrange.transport.serving import serve_commands
from tests.unit.broker.admin_broker import golden_reply

QUEUE = MessageQueue("orders", "broker-a", 0)
OURS = frozenset({"broker-a"})


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
        for queue_id in range(2):
            for first in range(0, 10_000, 1000):
                producer.send_batch(
                    [Message("orders", b"%d" % n, tags="ab"[n % 2]) for n in range(first, first + 1000)],
                    queue=QUEUE._replace(queue_id=queue_id),
                )
        yield running


class GenuineBroker:
    """Answers as RocketMQ 4.9.8 does, as far as a reader asks; name server and broker in one. Keeps the pulls."""

    def __init__(self) -> None:
        self.address = ""
        self.asked = 0
        self.pulls: list[Command] = []
        self.may_be_asked = True

    def handle(self, command: Command, connection: Connection) -> Command:
        match command.code:
            case RequestCode.GET_ROUTEINFO_BY_TOPIC:
                data = BrokerData(cluster="c", broker_name="broker-a", broker_addrs={0: self.address})
                queues = QueueData(broker_name="broker-a", read_queue_nums=1, write_queue_nums=1, perm=6)
                return command.reply(body=encode_body(TopicRouteData(broker_datas=(data,), queue_datas=(queues,))))
            case RequestCode.GET_BROKER_CONFIG:
                self.asked += 1
                if not self.may_be_asked:
                    raise NoPermission("not for you")
                return command.reply(body=golden_reply("498-json/cluster_admin", 26).body_bytes)
            case _:
                self.pulls.append(command)
                header = PullMessageResponse(suggest_which_broker_id=0, next_begin_offset=7, min_offset=0, max_offset=7)
                return command.reply(ResponseCode.PULL_NOT_FOUND, header=header)


@contextmanager
def genuine() -> Iterator[GenuineBroker]:
    answers = GenuineBroker()
    started, stop = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        async with Server(serve_commands(answers.handle), limits=Limits(drain_seconds=0.1)) as server:
            answers.address = f"127.0.0.1:{server.port}"
            loops.append(asyncio.get_running_loop())
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(30)
    yield answers
    loops[0].call_soon_threadsafe(stop.set)
    thread.join()


def test_our_broker_says_so_and_is_asked_once(mq: EmbeddedBroker, loop: WorkerLoop) -> None:
    cluster = Cluster(parse_options({"namesrv": mq.namesrv, "subscribe": "orders"}), loop)
    assert cluster.bulk_brokers(cluster.queues()) == OURS
    assert cluster.bulk_brokers([]) == frozenset()


def test_our_broker_may_be_told_not_to(loop: WorkerLoop) -> None:
    with broker({"maxTransferBytesOnBulkPull": "0"}) as running:
        running.create_topic("orders", 1)
        cluster = Cluster(parse_options({"namesrv": running.namesrv, "subscribe": "orders"}), loop)
        assert cluster.bulk_brokers(cluster.queues()) == frozenset()


def test_a_genuine_broker_gets_nothing_it_does_not_know(loop: WorkerLoop) -> None:
    with genuine() as other:
        options = parse_options({"namesrv": other.address, "subscribe": "orders"})
        cluster = Cluster(options, loop)
        for _ in range(2):
            assert cluster.bulk_brokers([QUEUE]) == frozenset()
        assert other.asked == 1
        pulled = loop.run(Brokers(loop.session(options.client_config()), group="lake").pull(QUEUE, 7, 100))
        assert pulled.next_offset == 7
        (pull,) = other.pulls
        assert "bulk" not in pull.ext_fields
        assert pull.header(PullMessageRequest) == PullMessageRequest(
            consumer_group="lake",
            topic="orders",
            queue_id=0,
            queue_offset=7,
            max_msg_nums=100,
            sys_flag=4,
            commit_offset=0,
            suspend_timeout_millis=0,
            subscription="*",
            sub_version=0,
            bname="broker-a",
        )


def test_a_broker_that_does_not_tell_is_asked_again(loop: WorkerLoop) -> None:
    with genuine() as other:
        other.may_be_asked = False
        cluster = Cluster(parse_options({"namesrv": other.address, "subscribe": "orders"}), loop)
        for _ in range(2):
            assert cluster.bulk_brokers([QUEUE]) == frozenset()
        assert other.asked == 2


def read(mq: EmbeddedBroker, loop: WorkerLoop, wanted: list[QueueRange], **options: str) -> list[tuple[int, int]]:
    """Where each piece that was fetched begins, and how many messages it has."""
    given = parse_options({"namesrv": mq.namesrv, "subscribe": "orders", **options})
    found = []
    for fetched in WireReader(given, loop, OURS).read(wanted):
        queue_offsets = [
            int.from_bytes(fetched.buffer[start + 20 : start + 28], "big") for start in fetched.starts.tolist()
        ]
        assert queue_offsets == sorted(set(queue_offsets))
        found.append((queue_offsets[0], len(queue_offsets)))
    return found


def test_a_queue_takes_few_pulls(mq: EmbeddedBroker, loop: WorkerLoop) -> None:
    # 32 to see how large messages are, then as many as one answer holds; those are not joined with others.
    assert read(mq, loop, [QueueRange(QUEUE, 0, 10_000)]) == [(0, 32), (32, 4096), (4128, 4096), (8224, 1776)]


@pytest.mark.parametrize("in_flight", ["1", "16"])
def test_ranges_are_read_whole(mq: EmbeddedBroker, loop: WorkerLoop, in_flight: str) -> None:
    other = QUEUE._replace(queue_id=1)
    wanted = [QueueRange(QUEUE, 3, 9000), QueueRange(other, 0, 1), QueueRange(other, 10, 9999)]
    total = sum(one.size for one in wanted)
    assert sum(count for _, count in read(mq, loop, wanted, pullsInFlight=in_flight)) == total
    tagged = read(mq, loop, wanted, pullsInFlight=in_flight, tags="a")
    assert sum(count for _, count in tagged) == 4498 + 1 + 4995
    assert read(mq, loop, wanted, pullsInFlight=in_flight, sqlFilter="TAGS = 'nobody'") == []
