"""Transactions from the producer to the consumer: real sockets, our client and our broker."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from downrange import (
    AsyncTransactionProducer,
    HalfSent,
    LocalTransactionState,
    Message,
    MessageQueue,
    ProducerConfig,
    SendStatus,
    TransactionProducer,
)
from downrange.broker.app import RunningBroker
from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.errors import ClientClosed, ClientError
from downrange.client.producer.outgoing import InvalidProperty
from downrange.client.session import Session
from downrange.model.topics import CHECK_MAX_TIME_TOPIC, HALF_TOPIC, OP_HALF_TOPIC
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError, NoPermission
from downrange.settings import ConfigError
from downrange.store.config import BrokerRole
from tests.support.broker_client import BrokerClient, client_of, standalone
from tests.support.golden import scenarios
from tests.support.processes import running
from tests.support.replay import decode

COMMIT, ROLLBACK, UNKNOWN = LocalTransactionState.COMMIT, LocalTransactionState.ROLLBACK, LocalTransactionState.UNKNOWN
TOPIC = "orders"
QUEUE = MessageQueue(TOPIC, "broker-a", 0)
GROUP = "payers"
SOON = {"transaction_time_out": 50, "transaction_check_interval": 20}
SECONDS = 20.0


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[RunningBroker]:
    async with standalone(tmp_path, broker_options=SOON) as started:
        yield started


@pytest.fixture
async def client(broker: RunningBroker) -> AsyncIterator[BrokerClient]:
    async with client_of(broker) as connected:
        yield connected


def namesrv_of(broker: RunningBroker) -> str:
    return broker.config.broker.namesrv_addresses[0]


def never_asked(message: ReceivedMessage) -> LocalTransactionState:
    raise AssertionError("nobody should ask")


def producer_of(broker: RunningBroker, check: Callable[..., Any], **options: Any) -> AsyncTransactionProducer:
    return AsyncTransactionProducer(GROUP, namesrv_of(broker), check=check, **options)


async def visible(client: BrokerClient, count: int) -> list[bytes]:
    """What consumers see in the queue, once there are so many messages."""
    bodies: list[bytes] = []
    while len(bodies) < count:
        messages, _ = await client.pull(TOPIC, offset=len(bodies), wait_millis=15_000)
        bodies += [message.body for message in messages]
    return bodies


async def test_only_what_is_committed_is_seen(broker: RunningBroker, client: BrokerClient) -> None:
    seen_during_work: list[int] = []

    def decide(state: LocalTransactionState) -> Callable[[HalfSent], LocalTransactionState]:
        def execute(half: HalfSent) -> LocalTransactionState:
            seen_during_work.append(broker.store.max_offset_of(TOPIC, 0))
            return state

        return execute

    async with producer_of(broker, never_asked) as producer:
        first = await producer.send_in_transaction(
            Message(TOPIC, b"one", tags="a", flag=3), decide(COMMIT), queue=QUEUE
        )
        assert await visible(client, 1) == [b"one"]
        await producer.send_in_transaction(Message(TOPIC, b"two"), decide(ROLLBACK), queue=QUEUE)
        last = await producer.send_in_transaction(Message(TOPIC, b"three"), decide(COMMIT), queue=QUEUE)
        assert await visible(client, 2) == [b"one", b"three"]
    assert seen_during_work == [0, 1, 1]
    assert (first.state, first.error, first.half.result.status) == (COMMIT, None, SendStatus.SEND_OK)
    (message, _), _ = await client.pull(TOPIC)
    assert (message.unique_key, message.tags, message.flag) == (first.transaction_id, "a", 3)
    assert last.half.result.queue == QUEUE


@pytest.mark.parametrize("kind", ["returns None", "raises", "returns nonsense", "async"])
async def test_what_is_not_decided_is_asked_about(broker: RunningBroker, client: BrokerClient, kind: str) -> None:
    asked: list[ReceivedMessage] = []

    def check(message: ReceivedMessage) -> LocalTransactionState:
        asked.append(message)
        return COMMIT if message.body == b"one" else ROLLBACK

    async def check_async(message: ReceivedMessage) -> LocalTransactionState:
        await asyncio.sleep(0)
        return check(message)

    def execute(half: HalfSent) -> Any:
        if kind == "raises":
            raise RuntimeError("the database is gone")
        return "committed" if kind == "returns nonsense" else None

    async with producer_of(broker, check_async if kind == "async" else check) as producer:
        result = await producer.send_in_transaction(Message(TOPIC, b"one", keys="k"), execute, queue=QUEUE)
        await producer.send_in_transaction(Message(TOPIC, b"two"), execute, queue=QUEUE)
        assert await visible(client, 1) == [b"one"]
    assert result.state is UNKNOWN
    assert type(result.error) is {"raises": RuntimeError, "returns nonsense": TypeError}.get(kind, type(None))
    question = next(each for each in asked if each.body == b"one")
    assert question.transaction_id == question.message_id == result.transaction_id
    assert (question.topic, question.queue_id, question.keys) == (TOPIC, 0, ["k"])


async def test_a_check_that_fails_is_repeated(broker: RunningBroker, client: BrokerClient) -> None:
    times = 0

    async def check(message: ReceivedMessage) -> LocalTransactionState | None:
        nonlocal times
        times += 1
        if times == 1:
            raise ConnectionError("the database is gone")
        return None if times == 2 else COMMIT

    async with producer_of(broker, check) as producer:
        await producer.send_half(Message(TOPIC, b"one"), QUEUE)
        assert await visible(client, 1) == [b"one"]
    assert times >= 3  # a busy broker asks once more before it reads the answer


async def test_another_producer_of_the_group_is_asked_after_a_restart(
    broker: RunningBroker, client: BrokerClient
) -> None:
    """It has not sent anything: it announces itself to the brokers all the same."""
    async with producer_of(broker, lambda message: UNKNOWN) as producer:
        half = await producer.send_half(Message(TOPIC, b"one"), QUEUE)
    async with producer_of(broker, lambda message: COMMIT if message.message_id == half.transaction_id else UNKNOWN):
        assert await visible(client, 1) == [b"one"]


async def test_a_transaction_can_be_ended_by_another_process(broker: RunningBroker, client: BrokerClient) -> None:
    async with producer_of(broker, never_asked) as producer:
        halves = [await producer.send_half(Message(TOPIC, body), QUEUE) for body in (b"one", b"two")]
    travelled: list[HalfSent] = pickle.loads(pickle.dumps(halves))  # noqa: S301  our own
    assert travelled == halves
    async with producer_of(broker, lambda message: UNKNOWN) as other:
        await other.end(travelled[0], COMMIT, confirm=True)
        await other.end(travelled[1], ROLLBACK, confirm=True)
        for half in travelled:
            with pytest.raises(BrokerError, match="has ended"):
                await other.end(half, COMMIT, confirm=True)
        await other.end(travelled[1], UNKNOWN, confirm=True)  # nobody answers that, and nobody waits for it
    assert await visible(client, 1) == [b"one"]
    assert broker.store.max_offset_of(TOPIC, 0) == 1


async def test_a_queue_known_only_from_a_half_message_is_there_after_a_crash(tmp_path: Path) -> None:
    last_queue = MessageQueue(TOPIC, "broker-a", 3)
    async with standalone(tmp_path, broker_options=SOON) as broker, producer_of(broker, never_asked) as producer:
        await producer.send_in_transaction(Message(TOPIC, b"one"), lambda half: COMMIT, queue=QUEUE)
        half = await producer.send_half(Message(TOPIC, b"two"), last_queue, check_immunity_seconds=1000)
    for file in (tmp_path / "store" / "config").glob("topics.json*"):
        file.unlink()  # the broker dies right after it made the topic
    async with standalone(tmp_path, broker_options=SOON) as broker, client_of(broker) as client:
        async with producer_of(broker, never_asked) as producer:
            moved = msgspec.structs.replace(half, broker_address=broker.config.broker.address)
            await producer.end(moved, COMMIT, confirm=True)
        (message,), _ = await client.pull(TOPIC, queue_id=3)
        assert message.body == b"two"


async def test_without_a_safe_half_message_nothing_is_done(tmp_path: Path) -> None:
    alone = {"broker_role": BrokerRole.SYNC_MASTER}
    async with standalone(tmp_path, store_options=alone) as broker, producer_of(broker, never_asked) as producer:
        result = await producer.send_in_transaction(Message(TOPIC, b"one"), never_asked)  # type: ignore[arg-type]
        assert result.half.result.status is not SendStatus.SEND_OK
        assert (result.state, result.error) == (ROLLBACK, None)
        with pytest.raises(BrokerError, match="has ended"):
            await producer.end(result.half, COMMIT, confirm=True)


async def test_a_refused_half_message_runs_no_work(tmp_path: Path) -> None:
    refusing = {"reject_transaction_message": True}
    async with standalone(tmp_path, broker_options=refusing) as broker, producer_of(broker, never_asked) as producer:
        with pytest.raises(ClientError) as failed:
            await producer.send_in_transaction(Message(TOPIC, b"one"), never_asked)  # type: ignore[arg-type]
    assert isinstance(failed.value.__cause__, NoPermission)


async def test_a_delay_is_taken_out_and_a_time_to_decide_put_in(broker: RunningBroker, client: BrokerClient) -> None:
    async with producer_of(broker, never_asked) as producer:
        message = Message(TOPIC, b"one", delay_level=3)
        half = await producer.send_half(message, QUEUE, check_immunity_seconds=100)
        assert message.delay_level == 3
        await producer.end(half, COMMIT)
        await visible(client, 1)
        with pytest.raises(InvalidProperty, match="check_immunity_seconds is -1"):
            await producer.send_half(message, check_immunity_seconds=-1)
    (seen,), _ = await client.pull(TOPIC)
    assert "DELAY" not in seen.properties
    assert seen.properties["CHECK_IMMUNITY_TIME_IN_SECONDS"] == "100"


async def test_a_namespace_is_on_the_wire_and_not_in_what_the_check_sees(broker: RunningBroker) -> None:
    asked: asyncio.Future[ReceivedMessage] = asyncio.get_running_loop().create_future()

    async def check(message: ReceivedMessage) -> LocalTransactionState:
        asked.set_result(message)
        return ROLLBACK

    config = ProducerConfig(namespace="shop")
    async with producer_of(broker, check, config=config) as producer:
        half = await producer.send_half(Message(TOPIC, b"one"))
        message = await asyncio.wait_for(asked, SECONDS)
    assert (half.topic, half.producer_group, half.result.queue.topic) == ("shop%orders", "shop%payers", TOPIC)
    assert (message.topic, message.queue.topic) == (TOPIC, "shop%orders")


async def test_closing_waits_for_work_and_for_checks(broker: RunningBroker, client: BrokerClient) -> None:
    working, asked, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def execute(half: HalfSent) -> LocalTransactionState:
        working.set()
        await go_on.wait()
        return COMMIT

    async def check(message: ReceivedMessage) -> LocalTransactionState:
        asked.set()
        await go_on.wait()
        return COMMIT if message.body == b"asked" else UNKNOWN

    producer = await producer_of(broker, check).start()
    await producer.send_half(Message(TOPIC, b"asked"), QUEUE)
    working_on = asyncio.create_task(
        producer.send_in_transaction(Message(TOPIC, b"working"), execute, queue=QUEUE, check_immunity_seconds=1000)
    )
    await working.wait()
    await asked.wait()
    closing = asyncio.create_task(producer.close())
    await asyncio.sleep(0)
    go_on.set()
    await closing
    assert (await working_on).state is COMMIT
    assert sorted(await visible(client, 2)) == [b"asked", b"working"]
    with pytest.raises(ClientClosed):
        await producer.send_half(Message(TOPIC, b"late"))


async def test_two_producers_of_one_group_cannot_share_a_session(broker: RunningBroker) -> None:
    async with Session(ClientConfig.of(namesrv_of(broker))) as session:
        async with AsyncTransactionProducer(GROUP, check=never_asked, session=session):
            with pytest.raises(ClientError, match="has a transaction producer of the group payers already"):
                await AsyncTransactionProducer(GROUP, check=never_asked, session=session).start()
            async with AsyncTransactionProducer("others", check=never_asked, session=session):
                pass
        async with AsyncTransactionProducer(GROUP, check=never_asked, session=session):
            pass


def test_wrong_arguments_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match="cannot be called"):
        TransactionProducer(GROUP, check="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_concurrent_checks"):
        AsyncTransactionProducer(GROUP, check=never_asked, max_concurrent_checks=0)


async def test_the_blocking_producer_does_the_work_on_the_callers_thread(
    broker: RunningBroker, client: BrokerClient
) -> None:
    threads: list[int] = []

    def execute(half: HalfSent) -> LocalTransactionState:
        threads.append(threading.get_ident())
        return COMMIT

    async def execute_async(half: HalfSent) -> LocalTransactionState:
        return ROLLBACK

    def fail(half: HalfSent) -> LocalTransactionState:
        raise ValueError("no")

    def use() -> list[LocalTransactionState]:
        threads.append(threading.get_ident())
        with TransactionProducer(GROUP, namesrv_of(broker), check=lambda message: COMMIT) as producer:
            states = [
                producer.send_in_transaction(Message(TOPIC, body), work, queue=QUEUE).state
                for body, work in ((b"one", execute), (b"two", execute_async), (b"three", fail))
            ]
            half = producer.send_half(Message(TOPIC, b"four"), QUEUE)
            producer.end(half, ROLLBACK, confirm=True)
            asyncio.run_coroutine_threadsafe(visible(client, 2), loop).result(SECONDS)  # b"three" by its check
            return states

    loop = asyncio.get_running_loop()
    assert await asyncio.to_thread(use) == [COMMIT, ROLLBACK, UNKNOWN]
    assert threads[0] == threads[1]
    assert await visible(client, 2) == [b"one", b"three"]


async def test_an_operator_lets_the_check_begin_anew(tmp_path: Path) -> None:
    knows = asyncio.Event()

    async def check(message: ReceivedMessage) -> LocalTransactionState:
        return COMMIT if knows.is_set() else UNKNOWN

    settings = {**SOON, "transaction_check_max": 2}
    async with (
        standalone(tmp_path, broker_options=settings) as broker,
        client_of(broker) as client,
        producer_of(broker, check) as producer,
    ):
        half = await producer.send_half(Message(TOPIC, b"one"), QUEUE)
        while not broker.store.max_offset_of(CHECK_MAX_TIME_TOPIC, 0):
            await asyncio.sleep(0.01)
        knows.set()
        told = await asyncio.to_thread(resume_check, namesrv_of(broker), half.transaction_id)
        assert told == f"{half.transaction_id} of {TOPIC} will be checked again"
        assert await visible(client, 1) == [b"one"]


def resume_check(namesrv: str, message_id: str) -> str:
    with running("message", "resume-check", message_id, "-n", namesrv) as process:
        assert process.wait() == 0, process.errors
        return "\n".join(process.output)


async def test_nobody_sends_to_the_topics_of_transactions(broker: RunningBroker, client: BrokerClient) -> None:
    async with producer_of(broker, never_asked) as producer:
        await producer.send_in_transaction(Message(TOPIC, b"one"), lambda half: COMMIT, queue=QUEUE)
        await visible(client, 1)
    for topic in (HALF_TOPIC, OP_HALF_TOPIC, CHECK_MAX_TIME_TOPIC):
        await client.ask(client.send_command(topic, b"x"), ResponseCode.NO_PERMISSION)
    await client.ask(client.pull_command(OP_HALF_TOPIC))  # readable, as in 5.x: it says which transactions have ended


async def test_the_fields_on_the_wire_are_those_of_the_genuine_client(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[Command] = []
    oneway = Session.oneway

    async def spy(self: Session, address: str, command: Command) -> None:
        ends.append(command)
        await oneway(self, address, command)

    monkeypatch.setattr(Session, "oneway", spy)
    async with producer_of(broker, never_asked) as producer:
        half = await producer.send_half(Message(TOPIC, b"one"), QUEUE)
        await producer.end(half, COMMIT)
    (ours,) = ends
    genuine = next(
        decode(row.frame) for row in scenarios()["533/transaction"] if row.code == RequestCode.END_TRANSACTION
    )
    assert ours.flag == genuine.flag
    assert sorted(ours.ext_fields) == sorted(genuine.ext_fields)
    assert ours.ext_fields["commitOrRollback"] == genuine.ext_fields["commitOrRollback"] == "8"


async def test_a_trace_tells_how_a_transaction_ended(tmp_path: Path) -> None:
    async with standalone(tmp_path, broker_options={**SOON, "trace_topic_enable": True}) as broker:
        async with (
            client_of(broker) as client,
            producer_of(broker, lambda message: COMMIT, config=ProducerConfig(trace=True)) as producer,
        ):
            result = await producer.send_in_transaction(
                Message(TOPIC, b"one", keys="k"), lambda half: None, queue=QUEUE
            )
            await visible(client, 1)
        async with Admin(ClientConfig.of(namesrv_of(broker))) as admin:
            trace = await admin.messages.trace(result.transaction_id)
    # On a slow machine the check is answered before the first end is noted, and may come twice.
    told = [(one.state, one.from_check) for one in trace.transactions]
    assert told.count(("UNKNOW", False)) == 1
    assert set(told) == {("UNKNOW", False), ("COMMIT_MESSAGE", True)}
    assert {one.transaction_id for one in trace.transactions} == {result.transaction_id}
    assert len(trace.sends) == 1


async def test_more_checks_than_can_wait_are_left_to_the_next_round(
    broker: RunningBroker, client: BrokerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("downrange.client.producer.transaction_producer.MAX_WAITING_CHECKS", 2)
    checks = most = 0
    two_at_once = asyncio.Event()

    async def check(message: ReceivedMessage) -> LocalTransactionState:
        nonlocal checks, most
        checks += 1
        most = max(most, checks)
        if checks == 2:
            two_at_once.set()
        await two_at_once.wait()  # the broker asks on meanwhile, about this half message or another one
        await asyncio.sleep(0.001)
        checks -= 1
        return COMMIT

    async with producer_of(broker, check, max_concurrent_checks=2) as producer:
        for number in range(10):
            await producer.send_half(Message(TOPIC, b"%d" % number), QUEUE)
        assert sorted(await visible(client, 10)) == [b"%d" % number for number in range(10)]
    assert most == 2
