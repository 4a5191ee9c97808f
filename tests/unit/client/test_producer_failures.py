"""What a producer does when brokers refuse, hang, disappear or answer with errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from downrange.client.config import ProducerConfig
from downrange.client.errors import BrokerNotFound, ClientClosed, ClientCode, SendFailed, TooManySends
from downrange.client.producer.fault import StrategyName
from downrange.client.producer.producer import AsyncProducer
from downrange.client.producer.send_result import SendResult, SendStatus
from downrange.clock import ManualClock
from downrange.model.errors import MQError
from downrange.model.message import Message, MessageQueue
from downrange.model.topics import TopicConfig
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command
from downrange.protocol.errors import SystemBusy
from downrange.transport.connection import Connection
from downrange.transport.errors import RequestTimedOut
from downrange.transport.server import Server
from downrange.transport.serving import serve_commands
from tests.unit.client.fake_cluster import TOPIC, FakeCluster, reply
from tests.unit.client.scripted import (
    SEND,
    Silence,
    answer_sends,
    in_turn,
    producer_of,
    scripted_namesrv,
    sends,
    stored,
    stored_with,
    until,
    where_sends_went,
)

RETRIABLE = (1, 14, 16, 17, 204, 205)
NOBODY = "127.0.0.1:1"
MESSAGE = Message(TOPIC, b"body")
AS_ROCKETMQ = ProducerConfig(fault_strategy="round_robin")
"""A send fails when its attempts are used up, whatever time is left."""


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No test may leave a thread behind."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.fixture
async def silence(cluster: FakeCluster) -> AsyncIterator[Silence]:
    silent = Silence()
    yield silent
    silent.end()


# --- error replies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", RETRIABLE)
async def test_a_code_another_broker_may_not_give_is_retried_there(cluster: FakeCluster, code: int) -> None:
    answer_sends(cluster, in_turn(reply(code, "no"), stored))
    async with producer_of(cluster.namesrv) as producer:
        result = await producer.send(MESSAGE)
    assert result.status is SendStatus.SEND_OK
    assert where_sends_went(cluster) == {"broker-a": 1, "broker-b": 1}
    assert [len(sends(broker)) for broker in cluster.brokers.values()] == [1, 1]


@pytest.mark.parametrize("code", [2, 13, 26, 215, 999])
async def test_a_code_every_broker_would_give_and_flow_control_are_final(cluster: FakeCluster, code: int) -> None:
    answer_sends(cluster, reply(code, "no"))
    async with producer_of(cluster.namesrv) as producer:
        with pytest.raises(SendFailed) as caught:
            await producer.send(MESSAGE)
    assert caught.value.code == code
    assert len(caught.value.attempts) == 1
    assert sum(where_sends_went(cluster).values()) == 1
    assert "no" in str(caught.value)


async def test_the_final_error_lists_attempts_cost_and_brokers(cluster: FakeCluster) -> None:
    answer_sends(cluster, reply(ResponseCode.SERVICE_NOT_AVAILABLE, "disk full"))
    async with producer_of(cluster.namesrv, config=AS_ROCKETMQ) as producer:
        with pytest.raises(SendFailed, match=r"orders .* 3 attempts in \d+ ms.*disk full") as caught:
            await producer.send(MESSAGE)
    error = caught.value
    first, second, third = error.brokers
    assert {first, second} == {"broker-a", "broker-b"}  # the next attempt avoids the broker that failed
    assert third == first
    assert error.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert error.retriable
    assert error.cost_millis >= sum(attempt.cost_millis for attempt in error.attempts) > 0
    assert error.__cause__ is error.attempts[-1].error


async def test_flow_control_is_not_called_retriable(cluster: FakeCluster) -> None:
    answer_sends(cluster, reply(ResponseCode.SYSTEM_BUSY, "[REJECTREQUEST]"))
    async with producer_of(cluster.namesrv) as producer:
        with pytest.raises(SendFailed) as caught:
            await producer.send(MESSAGE)
    assert isinstance(caught.value.error, SystemBusy)
    assert caught.value.retriable is SystemBusy.retriable


async def test_all_attempts_carry_one_unique_id(cluster: FakeCluster) -> None:
    answer_sends(cluster, in_turn(reply(1), reply(1), stored))
    async with producer_of(cluster.namesrv) as producer:
        result = await producer.send(MESSAGE)
    texts = {request.properties for broker in cluster.brokers.values() for request in sends(broker)}
    assert len(texts) == 1
    assert f"UNIQ_KEY\x01{result.message_id}\x02" in texts.pop()


async def test_retries_can_be_switched_off(cluster: FakeCluster) -> None:
    answer_sends(cluster, reply(1))
    async with producer_of(cluster.namesrv, config=ProducerConfig(retry_times_when_send_failed=0)) as producer:
        with pytest.raises(SendFailed, match="1 attempt in"):
            await producer.send(MESSAGE)


async def test_a_given_queue_is_tried_once(cluster: FakeCluster) -> None:
    answer_sends(cluster, reply(1))
    async with producer_of(cluster.namesrv) as producer:
        with pytest.raises(SendFailed) as caught:
            await producer.send(MESSAGE, queue=MessageQueue(TOPIC, "broker-b", 1))
    assert caught.value.brokers == ("broker-b",)
    assert where_sends_went(cluster) == {"broker-a": 0, "broker-b": 1}


# --- stored, but not safely -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (10, SendStatus.FLUSH_DISK_TIMEOUT),
        (11, SendStatus.SLAVE_NOT_AVAILABLE),
        (12, SendStatus.FLUSH_SLAVE_TIMEOUT),
    ],
)
async def test_stored_but_not_safely_is_a_result(cluster: FakeCluster, code: int, status: SendStatus) -> None:
    answer_sends(cluster, stored_with(code))
    async with producer_of(cluster.namesrv) as producer:
        assert (await producer.send(MESSAGE)).status is status
    assert sum(where_sends_went(cluster).values()) == 1


async def test_stored_but_not_safely_is_tried_elsewhere_if_asked_for(cluster: FakeCluster) -> None:
    config = ProducerConfig(retry_another_broker_when_not_store_ok=True)
    answer_sends(cluster, in_turn(stored_with(10), stored))
    async with producer_of(cluster.namesrv, config=config) as producer:
        assert (await producer.send(MESSAGE)).status is SendStatus.SEND_OK
        assert where_sends_went(cluster) == {"broker-a": 1, "broker-b": 1}
        # What is stored beats an error of a later attempt.
        answer_sends(cluster, in_turn(stored_with(11), reply(13)))
        assert (await producer.send(MESSAGE)).status is SendStatus.SLAVE_NOT_AVAILABLE


# --- the connection ---------------------------------------------------------------------------------------------------


async def dead(cluster: FakeCluster, *names: str) -> None:
    """Make the route name an address where nobody listens."""
    for name in names:
        cluster.brokers[name].address = NOBODY
        await cluster.register(TopicConfig(TOPIC, 2, 2), on=name)


async def test_a_broker_that_refuses_connections_costs_no_message(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)
    await dead(cluster, "broker-b")
    async with producer_of(cluster.namesrv) as producer:
        results = [await producer.send(MESSAGE) for _ in range(8)]
    assert {result.queue.broker_name for result in results} == {"broker-a"}


async def test_when_no_broker_can_be_reached_the_code_says_connect(cluster: FakeCluster) -> None:
    await dead(cluster, "broker-a", "broker-b")
    async with producer_of(cluster.namesrv, config=AS_ROCKETMQ) as producer:
        with pytest.raises(SendFailed, match="3 attempts") as caught:
            await producer.send(MESSAGE)
        assert caught.value.code == ClientCode.CONNECT_BROKER_EXCEPTION
        assert caught.value.retriable
        with pytest.raises(SendFailed, match="1 attempt in"):
            await producer.send_oneway(MESSAGE)


async def test_a_silent_broker_takes_all_the_time_unless_an_attempt_is_limited(
    cluster: FakeCluster, silence: Silence
) -> None:
    answer_sends(cluster, in_turn(silence, stored))
    async with producer_of(cluster.namesrv, config=AS_ROCKETMQ) as producer:
        await producer.queues(TOPIC)
        await producer.session.heartbeats.beat()  # connected to both
        with pytest.raises(SendFailed, match="1 attempt in") as caught:
            await producer.send(MESSAGE, timeout=0.1)
        assert caught.value.code == ClientCode.ACCESS_BROKER_TIMEOUT
        assert isinstance(caught.value.error, RequestTimedOut)
    answer_sends(cluster, in_turn(silence, stored))
    config = ProducerConfig(attempt_timeout_seconds=0.3, send_timeout_seconds=10)
    async with producer_of(cluster.namesrv, config=config) as producer:
        assert (await producer.send(MESSAGE)).status is SendStatus.SEND_OK


async def test_the_time_of_all_attempts_together_is_limited(cluster: FakeCluster, silence: Silence) -> None:
    answer_sends(cluster, silence)
    config = ProducerConfig(attempt_timeout_seconds=0.08, retry_times_when_send_failed=50, send_timeout_seconds=0.2)
    async with producer_of(cluster.namesrv, config=config) as producer:
        await producer.queues(TOPIC)
        await producer.session.heartbeats.beat()  # connected to both
        with pytest.raises(SendFailed) as caught:
            await producer.send(MESSAGE)
    # Busy machines make an attempt longer, never the number of attempts larger.
    assert 1 <= len(caught.value.attempts) <= 4
    assert caught.value.cost_millis >= 190


async def test_a_connection_that_breaks_during_a_send_is_retried(cluster: FakeCluster) -> None:
    broken: list[Command] = []

    def cut(command: Command, connection: Connection) -> Command | None:
        if command.code != SEND:
            return command.reply()
        broken.append(command)
        connection.abort()
        return None

    answer_sends(cluster, stored, "broker-a")
    async with Server(serve_commands(cut)) as server:
        cluster.brokers["broker-b"].address = f"127.0.0.1:{server.port}"
        await cluster.register(TopicConfig(TOPIC, 2, 2), on="broker-b")
        async with producer_of(cluster.namesrv) as producer:
            results = [await producer.send(MESSAGE) for _ in range(4)]
    assert len(results) == 4
    assert len(broken) >= 1
    assert len(sends(cluster.brokers["broker-a"])) == 4


async def test_a_broker_without_an_address_is_looked_up_again_and_named(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)
    async with producer_of(cluster.namesrv) as producer:
        with pytest.raises(SendFailed, match="broker-x") as caught:
            await producer.send(MESSAGE, queue=MessageQueue(TOPIC, "broker-x", 0))
    assert isinstance(caught.value.error, BrokerNotFound)
    assert caught.value.code == ClientCode.BROKER_NOT_EXIST
    assert where_sends_went(cluster) == {"broker-a": 0, "broker-b": 0}


# --- asynchronous sends -----------------------------------------------------------------------------------------------


async def test_async_retries_a_lost_connection_on_the_same_broker_only(cluster: FakeCluster) -> None:
    tries: list[int] = []

    def cut_twice(command: Command, connection: Connection) -> Command | None:
        if command.code != SEND:
            return command.reply()
        tries.append(int(command.ext_fields["e"]))
        if len(tries) < 3:
            connection.abort()
            return None
        return stored(command)

    answer_sends(cluster, stored, "broker-a")
    async with Server(serve_commands(cut_twice)) as server:
        cluster.brokers["broker-b"].address = f"127.0.0.1:{server.port}"
        await cluster.register(TopicConfig(TOPIC, 2, 2), on="broker-b")
        async with producer_of(cluster.namesrv) as producer:
            result = await producer.send_async(MESSAGE, queue=MessageQueue(TOPIC, "broker-b", 1))
    assert result.queue == MessageQueue(TOPIC, "broker-b", 1)
    assert tries == [1, 1, 1]
    assert sends(cluster.brokers["broker-a"]) == []


async def test_async_does_not_retry_what_a_broker_answered(cluster: FakeCluster) -> None:
    answer_sends(cluster, reply(ResponseCode.SYSTEM_ERROR))
    heard: list[tuple[SendResult | None, MQError | None]] = []
    async with producer_of(cluster.namesrv) as producer:
        future = producer.send_async(MESSAGE, lambda result, error: heard.append((result, error)))
        with pytest.raises(SendFailed, match="1 attempt in"):
            await future
        answer_sends(cluster, stored)
        second = await producer.send_async(MESSAGE, lambda result, error: heard.append((result, error)))
        await until(lambda: len(heard) == 2)
    assert heard[0][0] is None
    assert isinstance(heard[0][1], SendFailed)
    assert heard[1] == (second, None)


async def test_async_sends_are_limited(cluster: FakeCluster, silence: Silence) -> None:
    answer_sends(cluster, silence)
    async with producer_of(cluster.namesrv, config=ProducerConfig(max_async_sends=2)) as producer:
        futures = [producer.send_async(MESSAGE, timeout=0.1) for _ in range(2)]
        with pytest.raises(TooManySends, match="max_async_sends"):
            producer.send_async(MESSAGE)
        await asyncio.gather(*futures, return_exceptions=True)
        answer_sends(cluster, stored)
        await producer.send_async(MESSAGE)


# --- fault strategies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["latency", "adaptive"])
async def test_a_broker_that_failed_is_left_alone_afterwards(cluster: FakeCluster, name: StrategyName) -> None:
    answer_sends(cluster, stored, "broker-a")
    answer_sends(cluster, reply(ResponseCode.SERVICE_NOT_AVAILABLE), "broker-b")
    clock = ManualClock()
    producer = producer_of(cluster.namesrv, config=ProducerConfig(fault_strategy=name), clock=clock)
    async with producer.session, producer:
        for _ in range(20):
            assert (await producer.send(MESSAGE)).queue.broker_name == "broker-a"
    assert where_sends_went(cluster) == {"broker-a": 20, "broker-b": 1}


async def test_adaptive_probes_a_broker_before_it_sends_to_it_again(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored, "broker-a")
    answer_sends(cluster, reply(ResponseCode.SERVICE_NOT_AVAILABLE), "broker-b")
    probes = RequestCode.GET_MAX_OFFSET
    healthy = cluster.brokers["broker-b"].answers[probes]
    cluster.brokers["broker-b"].answers[probes] = reply(ResponseCode.SYSTEM_ERROR)
    clock = ManualClock()
    producer = producer_of(cluster.namesrv, config=ProducerConfig(fault_strategy="adaptive"), clock=clock)
    broker = cluster.brokers["broker-b"]

    async def let_time_pass(seconds: float, *, sending: bool = False) -> None:
        """Move the clock in small steps and wait for the answer of each probe that falls due."""
        for _ in range(round(seconds / 0.1)):
            due = producer.chooser.next_probe_at()
            await clock.advance(0.1)
            if due is not None and due <= clock.monotonic() * 1000:
                await until(lambda due=due: producer.chooser.next_probe_at() != due)  # type: ignore[misc]
            if sending:
                await producer.send(MESSAGE)

    async with producer.session, producer:
        for _ in range(8):
            await producer.send(MESSAGE)
        await let_time_pass(3)
        assert len(broker.fields(probes)) >= 2
        for _ in range(8):
            await producer.send(MESSAGE)
        assert len(sends(broker)) == 1  # probes fail: no message goes there
        answer_sends(cluster, stored, "broker-b")
        broker.answers[probes] = healthy
        await let_time_pass(10, sending=True)
        before = len(sends(broker))
        for _ in range(40):
            await producer.send(MESSAGE)
        assert len(sends(broker)) - before > 10


# --- giving up and closing --------------------------------------------------------------------------------------------


async def test_a_cancelled_send_leaves_no_task(cluster: FakeCluster, silence: Silence) -> None:
    answer_sends(cluster, silence)
    before = asyncio.all_tasks()
    async with producer_of(cluster.namesrv) as producer:
        sending = asyncio.create_task(producer.send(MESSAGE))
        await until(lambda: silence.waiting)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert "on_their_way=0" in repr(producer)
    assert asyncio.all_tasks() == before


async def test_close_waits_for_sends_on_their_way_and_refuses_new_ones(cluster: FakeCluster, silence: Silence) -> None:
    answer_sends(cluster, silence)
    before = asyncio.all_tasks()
    producer = await producer_of(cluster.namesrv).start()
    sending = producer.send_async(MESSAGE)
    await until(lambda: silence.waiting)
    closing = asyncio.create_task(producer.close())
    await asyncio.sleep(0)
    with pytest.raises(ClientClosed, match="closed"):
        await producer.send(MESSAGE)
    assert not closing.done()
    (command,) = [c for broker in cluster.brokers.values() for c in broker.asked if c.code == SEND]
    silence.waiting[0].set_result(stored(command))
    assert (await sending).status is SendStatus.SEND_OK
    await closing
    await producer.close()  # once more does no harm
    assert asyncio.all_tasks() == before


async def test_drain_says_whether_all_ended_and_close_ends_the_rest(cluster: FakeCluster, silence: Silence) -> None:
    answer_sends(cluster, silence)
    before = asyncio.all_tasks()
    heard: list[MQError | None] = []
    producer = await producer_of(cluster.namesrv).start()
    background = producer.send_async(MESSAGE, lambda result, error: heard.append(error), timeout=60)
    waiting = asyncio.create_task(producer.send(MESSAGE, timeout=60))
    await until(lambda: len(silence.waiting) == 2)
    assert await producer.drain(timeout=0.05) is False
    await producer.close(timeout=0.05)
    with pytest.raises(SendFailed):
        await waiting
    assert background.cancelled()
    assert isinstance(heard[0], ClientClosed)
    assert asyncio.all_tasks() == before


async def test_a_close_that_is_cancelled_still_leaves_nothing(cluster: FakeCluster, silence: Silence) -> None:
    answer_sends(cluster, silence)
    before = asyncio.all_tasks()
    producer = await producer_of(cluster.namesrv, config=ProducerConfig(trace=True)).start()
    sending = producer.send_async(MESSAGE, timeout=60)
    await until(lambda: silence.waiting)
    closing = asyncio.create_task(producer.close(timeout=60))
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    assert sending.cancelled()
    assert asyncio.all_tasks() == before


async def test_a_producer_is_used_where_it_was_started(cluster: FakeCluster) -> None:
    producer = producer_of(cluster.namesrv)
    with pytest.raises(ClientClosed, match="not started"):
        await producer.send(MESSAGE)
    await producer.close()  # never started: nothing to close
    async with producer_of(cluster.namesrv) as started:
        with pytest.raises(ClientClosed, match="started before"):
            await started.start()

        def elsewhere() -> None:
            asyncio.run(started.send(MESSAGE))

        with pytest.raises(ClientClosed, match="another event loop"):
            await asyncio.get_running_loop().run_in_executor(None, elsewhere)
        await asyncio.get_running_loop().shutdown_default_executor()


async def test_a_broken_hook_does_not_break_a_send(cluster: FakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def before_send(self, context: object) -> None:
            raise ValueError("mine")

        after_send = before_send

    answer_sends(cluster, stored)
    async with AsyncProducer("producers", cluster.namesrv, hooks=[Broken()]) as producer:
        assert (await producer.send(MESSAGE)).status is SendStatus.SEND_OK
    assert caplog.text.count("send hook failed") == 2


async def test_sends_go_on_while_the_name_server_is_down(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)
    addresses = {name.replace("-", "_"): broker.address for name, broker in cluster.brokers.items()}
    clock = ManualClock()
    async with scripted_namesrv(**addresses) as (namesrv, server):
        producer = producer_of(namesrv.address, clock=clock)
        async with producer.session, producer:
            await producer.send(MESSAGE)
            await server.stop()
            await clock.advance(31)
            await producer.session.refresh_followed()
            assert (await producer.send(MESSAGE)).status is SendStatus.SEND_OK
