"""Messages of a task on their way, with a producer that does as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from downrange.client.config import ProducerConfig
from downrange.client.errors import FailedAttempt, SendFailed
from downrange.client.producer.producer import AsyncProducer
from downrange.client.producer.send_result import SendResult, SendStatus
from downrange.client.producer.transaction_producer import AsyncTransactionProducer, HalfSent, LocalTransactionState
from downrange.model.errors import MQError
from downrange.model.message import Message, MessageQueue
from downrange.protocol.errors import InternalError, NoPermission, SystemBusy
from downrange.spark import sink_sending
from downrange.spark.half_message_lists import Half
from downrange.spark.half_sending import end_halves
from downrange.spark.sink_sending import NotSafelyStored, Sending
from downrange.transport.errors import ConnectionLost

QUEUES = tuple(MessageQueue("t", "broker-a", number) for number in range(4))


def failed(error: MQError, stored: int = 0) -> SendFailed:
    problem = SendFailed("t", (FailedAttempt(QUEUES[0], 1.0, error),), 1.0)
    problem.stored = tuple(result() for _ in range(stored))
    return problem


def result(status: SendStatus = SendStatus.SEND_OK) -> SendResult:
    return SendResult(status, "id", "offset id", QUEUES[0], 0)


class ScriptedProducer:
    """Records requests; each waits for `gate`, then takes the next of `script`: an error to raise, or nothing."""

    def __init__(self, *script: MQError | SendStatus | None) -> None:
        self.config = ProducerConfig(send_timeout_seconds=5.0)
        self.script = list(script)
        self.requests: list[tuple[MessageQueue | None, list[bytes]]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.on_their_way = self.most_on_their_way = 0

    async def send(self, message: Message, *, queue: MessageQueue | None = None) -> SendResult:
        return (await self.send_batch([message], queue=queue))[0]

    async def send_batch(self, messages: list[Message], *, queue: MessageQueue | None = None) -> list[SendResult]:
        self.requests.append((queue, [message.body for message in messages]))
        self.on_their_way += 1
        self.most_on_their_way = max(self.most_on_their_way, self.on_their_way)
        try:
            await self.gate.wait()
            await asyncio.sleep(0)
        finally:
            self.on_their_way -= 1
        happens = self.script.pop(0) if self.script else None
        if isinstance(happens, MQError):
            raise happens
        return [result(happens or SendStatus.SEND_OK) for _ in messages]

    async def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        return QUEUES


def sending(producer: ScriptedProducer, batch_bytes: int = 1000, max_in_flight: int = 8) -> Sending:
    return Sending(cast(AsyncProducer, producer), batch_bytes=batch_bytes, max_in_flight=max_in_flight)


def messages(*bodies: bytes, **more: Any) -> list[Message]:
    return [Message("t", body, **more) for body in bodies]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_sending, "FIRST_PAUSE_SECONDS", 0.0001)


async def test_rows_go_out_in_requests_of_a_certain_size() -> None:
    producer = ScriptedProducer()
    task = sending(producer, batch_bytes=1000)
    await task.put(messages(*[b"x" * 300] * 5))
    await task.finish()
    assert [len(bodies) for _, bodies in producer.requests] == [2, 2, 1]


async def test_delayed_large_and_retry_messages_go_alone() -> None:
    producer = ScriptedProducer()
    task = sending(producer, batch_bytes=100_000)
    large = b"x" * producer.config.compress_over_bytes
    rows = [*messages(b"a", large), *messages(b"late", delay_level=3), *messages(b"b")]
    await task.put([*rows, Message("%RETRY%group", b"again"), Message("%RETRY%group", b"again")])
    await task.finish()
    assert sorted(bodies for _, bodies in producer.requests) == sorted(
        [[b"a"], [large], [b"late"], [b"b"], [b"again"], [b"again"]]
    )


async def test_of_one_queue_only_one_request_is_on_its_way() -> None:
    producer = ScriptedProducer()
    producer.gate.clear()
    task = sending(producer, batch_bytes=200)
    putting = asyncio.create_task(task.put(messages(b"1", b"2", b"3", sharding_key="key")))
    await putting
    assert [bodies for _, bodies in producer.requests] == [[b"1"]]
    producer.gate.set()
    await task.finish()
    assert [bodies for _, bodies in producer.requests] == [[b"1"], [b"2"], [b"3"]]
    assert len({queue for queue, _ in producer.requests}) == 1
    assert producer.most_on_their_way == 1


async def test_no_more_requests_are_on_their_way_than_allowed() -> None:
    producer = ScriptedProducer()
    task = sending(producer, batch_bytes=200, max_in_flight=3)
    await task.put(messages(*[b"x"] * 20))
    await task.finish()
    assert len(producer.requests) == 20
    assert producer.most_on_their_way == 3


async def test_an_error_stops_what_has_not_begun_and_is_raised_when_all_are_back() -> None:
    producer = ScriptedProducer(None, failed(NoPermission("not yours")))
    task = sending(producer, batch_bytes=200, max_in_flight=1)
    with pytest.raises(SendFailed, match="not yours"):
        await task.put(messages(*[b"x"] * 20))
    with pytest.raises(SendFailed, match="not yours"):
        await task.finish()
    assert len(producer.requests) == 2
    assert producer.on_their_way == 0


async def test_after_an_error_the_rest_of_a_queue_is_not_sent() -> None:
    producer = ScriptedProducer(failed(NoPermission("not yours")))
    producer.gate.clear()
    task = sending(producer, batch_bytes=200)
    await task.put(messages(b"1", b"2", b"3", sharding_key="key"))
    producer.gate.set()
    with pytest.raises(SendFailed, match="not yours"):
        await task.finish()
    assert len(producer.requests) == 1


async def test_giving_up_sends_nothing_more() -> None:
    producer = ScriptedProducer()
    task = sending(producer)
    await task.put(messages(b"waits for others"))
    await task.give_up()
    assert producer.requests == []


async def test_a_busy_broker_is_asked_again_for_what_it_did_not_take() -> None:
    busy = failed(SystemBusy("later"), stored=1)
    producer = ScriptedProducer(busy, failed(SystemBusy("later")))
    task = sending(producer)
    await task.put(messages(b"1", b"2", b"3"))
    await task.finish()
    assert [bodies for _, bodies in producer.requests] == [[b"1", b"2", b"3"], [b"2", b"3"], [b"2", b"3"]]


async def test_after_a_lost_connection_a_busy_broker_is_not_asked_again() -> None:
    """The message may be stored: in a transaction a second one of the same attempt would be delivered, too."""
    attempts = (
        FailedAttempt(QUEUES[0], 1.0, ConnectionLost("gone")),
        FailedAttempt(QUEUES[1], 1.0, SystemBusy("later")),
    )
    producer = ScriptedProducer(SendFailed("t", attempts, 2.0))
    task = sending(producer)
    await task.put(messages(b"1"))
    with pytest.raises(SendFailed, match="gone"):
        await task.finish()
    assert len(producer.requests) == 1


async def test_a_broker_that_stays_busy_fails_the_task() -> None:
    producer = ScriptedProducer(*[failed(SystemBusy("later"))] * 1000)
    producer.config = ProducerConfig(send_timeout_seconds=0.01)
    task = sending(producer)
    await task.put(messages(b"1"))
    with pytest.raises(SendFailed, match="later"):
        await task.finish()


async def test_stored_is_not_enough_if_it_is_not_safe() -> None:
    task = sending(ScriptedProducer(SendStatus.FLUSH_DISK_TIMEOUT))
    await task.put(messages(b"1"))
    with pytest.raises(NotSafelyStored, match="broker-a has the message id of t, but not safely: FLUSH_DISK_TIMEOUT"):
        await task.finish()


# --- ends of transactions -----------------------------------------------------------------------------------------


class EndingProducer:
    """Records which transactions it was told to end; `happens` says what comes of one."""

    def __init__(self, happens: Callable[[int], MQError | None] = lambda number: None) -> None:
        self.config = ProducerConfig(send_timeout_seconds=5.0)
        self.ended: list[int] = []
        self._happens = happens

    async def end(self, half: HalfSent, state: LocalTransactionState, *, confirm: bool) -> None:
        assert confirm
        await asyncio.sleep(0)
        error = self._happens(half.state_table_offset)
        if error is not None:
            raise error
        self.ended.append(half.state_table_offset)


def half(number: int, queue_id: int = 0, *, is_ordered: bool = False) -> Half:
    sent = SendResult(SendStatus.SEND_OK, str(number), "", QUEUES[queue_id], number)
    return Half(
        HalfSent(result=sent, producer_group="g", topic="t", broker_address="", commit_log_offset=number), is_ordered
    )


async def end(producer: EndingProducer, halves: list[Half]) -> int:
    return await end_halves(cast(AsyncTransactionProducer, producer), halves, LocalTransactionState.COMMIT)


async def test_ordered_halves_are_ended_in_the_order_they_were_sent() -> None:
    producer = EndingProducer()
    assert await end(producer, [half(number, number % 2, is_ordered=True) for number in reversed(range(10))]) == 10
    assert [number for number in producer.ended if number % 2 == 0] == [0, 2, 4, 6, 8]
    assert [number for number in producer.ended if number % 2] == [1, 3, 5, 7, 9]


async def test_what_a_broker_refuses_to_end_is_left_to_the_check() -> None:
    producer = EndingProducer(lambda number: InternalError("it is being checked") if number == 1 else None)
    assert await end(producer, [half(number) for number in range(3)]) == 2
    assert sorted(producer.ended) == [0, 2]


async def test_a_broker_that_is_gone_is_an_error() -> None:
    producer = EndingProducer(lambda number: ConnectionLost("gone"))
    with pytest.raises(ConnectionLost):
        await end(producer, [half(number) for number in range(3)])


async def test_a_busy_broker_is_told_the_end_again() -> None:
    answers = [SystemBusy("later"), SystemBusy("later")]
    producer = EndingProducer(lambda number: answers.pop() if answers else None)
    assert await end(producer, [half(7)]) == 1
    assert producer.ended == [7]
