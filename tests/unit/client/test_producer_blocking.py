"""The blocking producer: one loop thread for all, threads, forks, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

import downrange
from downrange.client import background_loop
from downrange.client.config import ProducerConfig
from downrange.client.errors import ClientClosed, SendFailed, TooManySends
from downrange.client.producer.blocking import direct_sends
from downrange.client.producer.blocking.direct_sends import DirectSends
from downrange.client.producer.blocking.producer import Producer
from downrange.client.producer.hooks import SendContext
from downrange.client.producer.outgoing import BodyMissing, InvalidGroup
from downrange.client.producer.send_result import SendResult, SendStatus
from downrange.model.errors import MQError
from downrange.model.message import Message, MessageQueue
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.groups import HeartbeatData
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command
from downrange.settings import ConfigError
from downrange.transport.errors import ConnectFailed, RequestTimedOut
from tests.unit.client.fake_cluster import TOPIC, FakeCluster, fake_cluster, reply
from tests.unit.client.scripted import Silence, answer_sends, sends, stored

MESSAGE = Message(TOPIC, b"body")


class Running:
    """A fake cluster on a loop of its own, so that a blocking client can be tested from this thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake cluster")

    def __enter__(self) -> FakeCluster:
        self._thread.start()
        return asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._context.__aexit__(None, None, None), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> FakeCluster:
        self._context = fake_cluster(self._directory, "broker-a", "broker-b")
        return await self._context.__aenter__()


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[FakeCluster]:
    with Running(tmp_path) as cluster:
        answer_sends(cluster, stored)
        before = set(threading.enumerate())
        yield cluster
        assert set(threading.enumerate()) <= before  # the last producer took the background thread with it


def all_sends(cluster: FakeCluster) -> int:
    return sum(len(sends(broker)) for broker in cluster.brokers.values())


def test_every_way_of_sending(brokers: FakeCluster) -> None:
    heard: list[tuple[SendResult | None, MQError | None]] = []
    with Producer("producers", brokers.namesrv) as producer:
        assert producer.send(MESSAGE).status is SendStatus.SEND_OK
        assert len(producer.send_batch([MESSAGE, MESSAGE])) == 2
        kinds = [type(each) for each in producer.send_all(iter((MESSAGE, Message(TOPIC, b""), MESSAGE)))]
        assert kinds == [SendResult, BodyMissing, SendResult]
        producer.send_oneway(MESSAGE)
        future = producer.send_async(MESSAGE, lambda result, error: heard.append((result, error)))
        assert future.result(30).status is SendStatus.SEND_OK
        queue = producer.queues(TOPIC)[-1]
        assert producer.send(MESSAGE, queue=queue).queue == queue
        assert producer.send(MESSAGE, selector=lambda queues, message: queues[0]).queue.broker_name == "broker-a"
        with pytest.raises(BodyMissing):
            producer.send(Message(TOPIC, b""))
        with pytest.raises(BodyMissing):
            producer.send_async(Message(TOPIC, b"")).result(30)
        assert producer.drain(1)
    assert heard == [(future.result(), None)]
    assert all_sends(brokers) == 8
    with pytest.raises(ClientClosed, match="closed"):
        producer.send(MESSAGE)
    producer.close()


def test_the_queues_take_turns_from_the_first_send_on(brokers: FakeCluster) -> None:
    with Producer("producers", brokers.namesrv) as producer:
        went_to = [producer.send(MESSAGE).queue for _ in range(8)]  # the first has to find the route
        queues = producer.queues(TOPIC)
    first = queues.index(went_to[0])
    assert went_to == [queues[(first + number) % len(queues)] for number in range(8)]


def test_threads_that_wait_have_connections_of_their_own(brokers: FakeCluster) -> None:
    with Producer("producers", brokers.namesrv) as producer:
        for queue in producer.queues(TOPIC) * 2:
            assert producer.send(MESSAGE, queue=queue).queue == queue
        assert set(direct_of(producer)._connections) == {(broker.address, 0) for broker in brokers.brokers.values()}
        beats = {connection for connection, code in brokers.broker.came_by if code == RequestCode.HEART_BEAT}
        sent = [connection for connection, code in brokers.broker.came_by if code == RequestCode.SEND_MESSAGE_V2]
        assert sent[-1] not in beats, "what a broker asks a client must reach the loop"
    assert all_sends(brokers) == 8


def test_a_broker_that_closed_an_idle_connection_costs_no_attempt(brokers: FakeCluster) -> None:
    with Producer("producers", brokers.namesrv) as producer:
        queue = producer.queues(TOPIC)[0]  # a send to a given queue has one attempt
        for _ in range(2):
            producer.send(MESSAGE, queue=queue)
        for _ in range(3):
            (turns,) = direct_of(producer)._connections.values()
            turns.abort()
            assert producer.send(MESSAGE, queue=queue).status is SendStatus.SEND_OK
            assert turns not in direct_of(producer)._connections.values()
    assert all_sends(brokers) == 5


def test_a_direct_send_that_fails_is_tried_elsewhere_within_its_time(brokers: FakeCluster) -> None:
    silence = Silence()
    with Producer("producers", brokers.namesrv, ProducerConfig(attempt_timeout_seconds=0.05)) as producer:
        for queue in producer.queues(TOPIC) * 2:
            producer.send(MESSAGE, queue=queue)
        answer_sends(brokers, silence, "broker-a")
        before = len(sends(brokers.brokers["broker-b"]))
        for _ in range(4):
            assert producer.send(MESSAGE, timeout=5).queue.broker_name == "broker-b"
        assert silence.waiting
        assert len(sends(brokers.brokers["broker-b"])) == before + 4
        with pytest.raises(SendFailed) as failed:
            producer.send(MESSAGE, queue=producer.queues(TOPIC)[0])
        assert [type(attempt.error) for attempt in failed.value.attempts] == [RequestTimedOut]


def test_a_send_that_is_not_answered_does_not_hold_up_the_others(brokers: FakeCluster) -> None:
    silence = Silence()
    with Producer("producers", brokers.namesrv) as producer, ThreadPoolExecutor(1) as pool:
        queue = producer.queues(TOPIC)[0]
        for _ in range(2):
            producer.send(MESSAGE, queue=queue)
        answer_sends(brokers, lambda command: silence(command) if command.body_bytes == b"slow" else stored(command))
        slow = pool.submit(producer.send, Message(TOPIC, b"slow"), queue=queue, timeout=1)
        while not silence.waiting:
            time.sleep(0.001)
        for _ in range(3):
            assert producer.send(MESSAGE, queue=queue, timeout=5).status is SendStatus.SEND_OK
        with pytest.raises(SendFailed):
            slow.result(10)


def test_two_threads_have_a_connection_each_and_more_take_turns(brokers: FakeCluster) -> None:
    silence = Silence()
    with Producer("producers", brokers.namesrv) as producer, ThreadPoolExecutor(2) as pool:
        queue = producer.queues(TOPIC)[0]
        for _ in range(2):
            producer.send(MESSAGE, queue=queue)
        assert len(direct_of(producer)._connections) == 1, "one thread needs no more"
        answer_sends(brokers, lambda command: silence(command) if command.body_bytes == b"slow" else stored(command))

        def begin_slow(count: int) -> Future[SendResult]:
            slow = pool.submit(producer.send, Message(TOPIC, b"slow"), queue=queue, timeout=2)
            while len(silence.waiting) < count:
                time.sleep(0.001)
            return slow

        first = begin_slow(1)
        producer.send(MESSAGE, queue=queue)
        second = begin_slow(2)
        one, other = direct_of(producer)._connections.values()
        assert [len(one.requests), len(other.requests)] == [1, 1]
        producer.send(MESSAGE, queue=queue)
        assert [*direct_of(producer)._connections.values()] == [one, other]
        for slow in (first, second):
            with pytest.raises(SendFailed):
                slow.result(10)


def test_a_broker_that_takes_no_second_connection_is_not_asked_again(
    brokers: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence = Silence()
    tried = []

    def refuse(address: str, *_: object) -> None:
        tried.append(address)
        raise ConnectFailed(f"cannot connect to {address}")

    with Producer("producers", brokers.namesrv) as producer, ThreadPoolExecutor(1) as pool:
        queue = producer.queues(TOPIC)[0]
        for _ in range(2):
            producer.send(MESSAGE, queue=queue)
        monkeypatch.setattr(direct_sends, "DirectConnection", refuse)
        answer_sends(brokers, lambda command: silence(command) if command.body_bytes == b"slow" else stored(command))
        slow = pool.submit(producer.send, Message(TOPIC, b"slow"), queue=queue, timeout=1)
        while not silence.waiting:
            time.sleep(0.001)
        for _ in range(3):
            assert producer.send(MESSAGE, queue=queue, timeout=5).status is SendStatus.SEND_OK
        with pytest.raises(SendFailed):
            slow.result(10)
    assert len(tried) == 1


def test_close_waits_for_a_direct_send(brokers: FakeCluster) -> None:
    asked, going_on = threading.Event(), threading.Event()

    def slow(command: Command) -> Command:
        asked.set()
        assert going_on.wait(10)
        return stored(command)

    producer = Producer("producers", brokers.namesrv).start()
    queue = producer.queues(TOPIC)[0]
    for _ in range(2):
        producer.send(MESSAGE, queue=queue)
    answer_sends(brokers, slow)
    with ThreadPoolExecutor(2) as pool:
        sending = pool.submit(producer.send, MESSAGE, queue=queue)
        assert asked.wait(10)
        closing = pool.submit(producer.close)
        while producer._is_open:
            time.sleep(0.001)
        with pytest.raises(ClientClosed, match="closed"):
            producer.send(MESSAGE)
        going_on.set()
        assert sending.result(10).status is SendStatus.SEND_OK
        closing.result(10)


def test_a_direct_send_that_does_not_end_in_time_fails_when_the_producer_is_closed(brokers: FakeCluster) -> None:
    silence = Silence()
    producer = Producer("producers", brokers.namesrv).start()
    queue = producer.queues(TOPIC)[0]
    for _ in range(2):
        producer.send(MESSAGE, queue=queue)
    answer_sends(brokers, silence)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(producer.send, MESSAGE, queue=queue, timeout=60)
        while not silence.waiting:
            time.sleep(0.001)
        assert not producer.drain(0.01)
        producer.close(0.01)
        with pytest.raises((ClientClosed, SendFailed)):
            sending.result(10)


def test_what_threads_send_at_once_arrives_once(brokers: FakeCluster) -> None:
    def sender(number: int) -> list[str]:
        return [producer.send(Message(TOPIC, b"%d-%d" % (number, count))).message_id for count in range(50)]

    with Producer("producers", brokers.namesrv) as producer, ThreadPoolExecutor(8) as pool:
        ids = [message_id for some in pool.map(sender, range(8)) for message_id in some]
    assert len(set(ids)) == 400
    bodies = [command.body_bytes for broker in brokers.brokers.values() for command in broker.asked if command.body]
    arrived = [body for body in bodies if b"-" in body and len(body) < 6]
    assert sorted(arrived) == sorted(b"%d-%d" % (number, count) for number in range(8) for count in range(50))


def direct_of(producer: Producer) -> DirectSends:
    assert producer._direct is not None
    return producer._direct


def test_an_error_reaches_the_caller(brokers: FakeCluster) -> None:
    answer_sends(brokers, reply(13, "no"))
    with Producer("producers", brokers.namesrv) as producer:
        with pytest.raises(SendFailed, match="no"):
            producer.send(MESSAGE)
        with pytest.raises(SendFailed, match="no"):
            producer.send_async(MESSAGE).result(30)


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    """A process that a shell started in the background ignores SIGINT, and so would the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c")
def test_ctrl_c_gives_up_the_send_and_leaves_the_producer_usable(brokers: FakeCluster) -> None:
    silence = Silence()
    with Producer("producers", brokers.namesrv) as producer:
        for queue in producer.queues(TOPIC):  # connects to all
            producer.send(MESSAGE, queue=queue)
        answer_sends(brokers, silence)
        main = threading.get_ident()

        def interrupt() -> None:
            while not silence.waiting:
                time.sleep(0.001)
            signal.pthread_kill(main, signal.SIGINT)

        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            producer.send(MESSAGE, timeout=30)
        interrupting.join()
        answer_sends(brokers, stored)
        assert producer.send(MESSAGE).status is SendStatus.SEND_OK
        assert producer.drain(1), "what was given up is not on its way any more"
        (unanswered,) = silence.waiting
        unanswered.get_loop().call_soon_threadsafe(silence.end)


def test_wrong_arguments_are_told_where_they_are_given() -> None:
    with pytest.raises(InvalidGroup):
        Producer("bad group", "127.0.0.1:1")
    with pytest.raises(ConfigError):
        Producer("g", "nowhere")
    with pytest.raises(ClientClosed, match="not started"):
        Producer("g", "127.0.0.1:1").send(MESSAGE)


def test_threads_share_a_producer_and_producers_share_a_thread(brokers: FakeCluster) -> None:
    before = set(threading.enumerate())
    with Producer("one", brokers.namesrv) as one, Producer("two", brokers.namesrv) as two:
        assert len(set(threading.enumerate()) - before) == 1
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda number: (one if number % 2 else two).send(MESSAGE), range(200)))
        assert len({result.message_id for result in results}) == 200
        one.close()
        assert two.send(MESSAGE).status is SendStatus.SEND_OK  # the thread lives while anybody needs it
    assert set(threading.enumerate()) <= before
    assert all_sends(brokers) == 201


def test_a_callback_that_would_wait_for_itself_is_told(brokers: FakeCluster) -> None:
    problems: list[ClientClosed] = []
    done = threading.Event()

    def callback(result: SendResult | None, error: MQError | None) -> None:
        try:
            producer.send(MESSAGE)
        except ClientClosed as problem:
            problems.append(problem)
        done.set()

    with Producer("producers", brokers.namesrv) as producer:
        producer.send_async(MESSAGE, callback)
        assert done.wait(30)
    assert "wait for itself" in str(problems[0])


def test_too_many_asynchronous_sends_wait_for_room_and_then_say_so(brokers: FakeCluster) -> None:
    silence = Silence()
    answer_sends(brokers, silence)
    config = ProducerConfig(max_async_sends=2, send_timeout_seconds=0.3)
    with Producer("producers", brokers.namesrv, config) as producer:
        futures = [producer.send_async(MESSAGE) for _ in range(2)]
        with pytest.raises(TooManySends):
            producer.send_async(MESSAGE, timeout=0.01)
        third = producer.send_async(MESSAGE, timeout=2)  # waits until one of the first two has timed out
        assert any(future.done() for future in futures)
        assert third.exception(5) is not None
    loops = {future.get_loop() for future in silence.waiting}
    for loop in loops:
        loop.call_soon_threadsafe(silence.end)


def test_hooks_see_every_attempt(brokers: FakeCluster) -> None:
    seen: list[tuple[str, str, bool, bool]] = []

    class Watching:
        def before_send(self, context: SendContext) -> None:
            context.notes["mine"] = context.message_ids[0]
            seen.append(("before", context.broker_address, bool(context.results), context.error is not None))

        def after_send(self, context: SendContext) -> None:
            assert context.notes["mine"] == context.message_ids[0]
            seen.append(("after", context.broker_address, bool(context.results), context.error is not None))

    answer_sends(brokers, reply(1), "broker-a")
    with Producer("producers", brokers.namesrv, hooks=[Watching()]) as producer:
        while len(seen) < 4:  # until round robin tries broker-a first
            seen.clear()
            producer.send(MESSAGE)
    a, b = (broker.address for broker in brokers.brokers.values())
    assert seen == [
        ("before", a, False, False),
        ("after", a, False, True),
        ("before", b, False, False),
        ("after", b, True, False),
    ]


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked child; its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_connects_anew_and_leaves_the_parent_alone(brokers: FakeCluster) -> None:
    def child() -> None:
        for _ in range(3):
            assert producer.send(MESSAGE).status is SendStatus.SEND_OK
        assert producer.send_async(MESSAGE).result(30).status is SendStatus.SEND_OK
        producer.close()
        assert threading.active_count() == 1

    with Producer("producers", brokers.namesrv) as producer:
        producer.send(MESSAGE)
        assert in_child(child) == 0
        for _ in range(3):
            assert producer.send(MESSAGE).status is SendStatus.SEND_OK
    assert all_sends(brokers) == 8
    beats = [
        decode_body(HeartbeatData, command.body_bytes).client_id
        for broker in brokers.brokers.values()
        for command in broker.asked
        if command.code == RequestCode.HEART_BEAT
    ]
    assert len(set(beats)) == 2  # two processes, two clients


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_that_does_not_use_the_producer_can_close_it(brokers: FakeCluster) -> None:
    with Producer("producers", brokers.namesrv) as producer:
        producer.send(MESSAGE)
        assert in_child(producer.close) == 0
        assert producer.send(MESSAGE).status is SendStatus.SEND_OK


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_producer_that_was_not_open_is_not_opened_by_a_fork(brokers: FakeCluster) -> None:
    def child() -> None:
        with pytest.raises(ClientClosed, match="not started"):
            producer.send(MESSAGE)

    producer = Producer("producers", brokers.namesrv)
    assert in_child(child) == 0


def test_the_loop_is_gone_when_a_start_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: Producer) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(Producer, "_open", fail)
    with pytest.raises(RuntimeError, match="no"):
        Producer("producers", "127.0.0.1:1").start()
    assert background_loop._current is None


def test_names_are_imported_when_asked_for() -> None:
    assert downrange.Producer is Producer
    assert downrange.Message is Message
    assert downrange.MessageQueue is MessageQueue
    assert set(downrange.__all__) <= set(dir(downrange))
    for name in downrange.__all__:
        assert getattr(downrange, name).__name__ == name
    with pytest.raises(AttributeError, match="Produzent"):
        downrange.Produzent  # noqa: B018
