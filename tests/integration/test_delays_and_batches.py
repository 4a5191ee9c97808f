"""Delayed messages, `again later` and batches from client to client, also with delay levels of the operator's own."""

from __future__ import annotations

import queue
from collections.abc import Callable

import pytest

from downrange import ConsumerConfig, Later, Message, MessageQueue, PushConsumer, ReceivedMessage, testing
from downrange.client.consumer.retry import Answer
from downrange.client.producer.outgoing import InvalidBatch, InvalidDelayLevel
from downrange.clock import ManualClock
from downrange.model.topics import SCHEDULE_TOPIC
from downrange.settings import ConfigError
from downrange.testing import EmbeddedBroker

TOPIC = "orders"
OWN_LEVELS = {"messageDelayLevel": "2s 5s 20s"}
LONGEST = 20


class Inbox:
    """A callback that hands over what it gets, and answers as told."""

    def __init__(self, answer: Callable[[ReceivedMessage], Answer] = lambda message: None) -> None:
        self._answer = answer
        self._messages: queue.SimpleQueue[ReceivedMessage] = queue.SimpleQueue()

    def __call__(self, message: ReceivedMessage) -> Answer:
        self._messages.put(message)
        return self._answer(message)

    def next(self) -> ReceivedMessage:
        return self._messages.get(timeout=60)

    @property
    def is_empty(self) -> bool:
        return self._messages.empty()


def waiting(mq: EmbeddedBroker, *, level: int, count: int = 1) -> bool:
    """Whether `count` messages of the delay topic are stored, the last of them for this level."""
    return mq.wait_for(SCHEDULE_TOPIC, count, timeout=30)[-1].queue_id == level - 1


# --- delays


@pytest.mark.parametrize(
    ("asked", "served", "seconds"), [(1, 1, 2), (2, 2, 5), (3, 3, LONGEST), (4, 3, LONGEST), (10_000, 3, LONGEST)]
)
def test_delay_levels_of_the_operator(asked: int, served: int, seconds: int) -> None:
    with testing.broker(OWN_LEVELS, clock=ManualClock()) as mq:
        mq.producer().send(Message(TOPIC, b"later", delay_level=asked))
        assert waiting(mq, level=served)
        mq.advance(seconds - 0.5)
        assert mq.messages(TOPIC) == []
        mq.advance(0.5)
        (message,) = mq.wait_for(TOPIC, 1, timeout=30)
        assert message.body == b"later"
        assert message.properties["DELAY"] == str(served)


def test_a_table_longer_than_rocketmqs() -> None:
    levels = " ".join(f"{number}s" for number in range(1, 26))
    with testing.broker({"messageDelayLevel": levels}, clock=ManualClock()) as mq:
        mq.producer().send(Message(TOPIC, b"later", delay_level=25))
        assert waiting(mq, level=25)
        mq.advance(25)
        assert mq.wait_for(TOPIC, 1, timeout=30)[0].body == b"later"


@pytest.mark.parametrize("table", ["", "1s soon", "1x", "s", "-1s", "1.5s"])
def test_a_table_that_cannot_be_read_stops_the_start(table: str) -> None:
    with pytest.raises(ConfigError, match="messageDelayLevel"), testing.broker({"messageDelayLevel": table}):
        pass


def test_a_negative_level_is_refused_before_it_is_sent() -> None:
    with testing.broker() as mq, pytest.raises(InvalidDelayLevel):
        mq.producer().send(Message(TOPIC, b"x", delay_level=-1))


# --- again later


@pytest.mark.parametrize(("level", "seconds"), [(1, 2), (2, 5), (99, LONGEST)])
def test_a_callback_says_when_it_wants_the_message_again(level: int, seconds: int) -> None:
    inbox = Inbox(lambda message: Later(level) if message.reconsume_times == 0 else None)
    with testing.broker(OWN_LEVELS, clock=ManualClock()) as mq:
        mq.producer().send(Message(TOPIC, b"x", keys="k"))
        with PushConsumer("billing", mq.namesrv, on_message=inbox) as consumer:
            consumer.subscribe(TOPIC)
            first = inbox.next()
            assert waiting(mq, level=min(level, 3))
            mq.advance(seconds - 0.5)
            mq.producer("other").send(Message(TOPIC, b"another"))
            assert inbox.next().body == b"another"
            mq.advance(0.5)
            again = inbox.next()
    assert (again.message_id, again.body, again.topic, again.keys) == (first.message_id, b"x", TOPIC, ["k"])
    assert (again.reconsume_times, again.queue.topic) == (1, "%RETRY%billing")


def test_without_a_level_the_pauses_grow() -> None:
    """RocketMQ's own table: the first retry waits for level 3, the next one level longer."""
    inbox = Inbox(lambda message: Later() if message.reconsume_times < 2 else None)
    with testing.broker(clock=ManualClock()) as mq:
        mq.producer().send(Message(TOPIC, b"x"))
        with PushConsumer("billing", mq.namesrv, on_message=inbox) as consumer:
            consumer.subscribe(TOPIC)
            inbox.next()
            assert waiting(mq, level=3)
            mq.advance(10)
            assert inbox.next().reconsume_times == 1
            assert waiting(mq, level=4, count=2)
            mq.advance(29.5)
            assert inbox.is_empty
            mq.advance(0.5)
            assert inbox.next().reconsume_times == 2


def test_a_loop_says_later_too() -> None:
    with testing.broker(OWN_LEVELS, clock=ManualClock()) as mq:
        mq.create_topic(TOPIC, queues=1)
        mq.producer().send_batch([Message(TOPIC, b"not now"), Message(TOPIC, b"now")])
        with PushConsumer("billing", mq.namesrv, ConsumerConfig(consume_threads=1)) as consumer:
            consumer.subscribe(TOPIC)
            for message in consumer:
                if message.body == b"now":
                    break
                consumer.later(message, delay_level=2)
            assert waiting(mq, level=2)
            mq.advance(5)
            (again,) = mq.wait_for("%RETRY%billing", 1, timeout=30)
    assert again.body == b"not now"


def test_level_minus_one_is_a_dead_letter_at_once() -> None:
    inbox = Inbox(lambda message: Later(-1))
    with testing.broker(clock=ManualClock()) as mq:
        mq.producer().send(Message(TOPIC, b"hopeless"))
        with PushConsumer("billing", mq.namesrv, on_message=inbox) as consumer:
            consumer.subscribe(TOPIC)
            inbox.next()
            (dead,) = mq.wait_for("%DLQ%billing", 1, timeout=30)
    assert dead.body == b"hopeless"


def test_an_orderly_queue_rests_and_the_same_message_comes_next() -> None:
    inbox = Inbox(lambda message: Later(suspend_seconds=0.05) if message.reconsume_times < 2 else None)
    with testing.broker() as mq:
        mq.create_topic(TOPIC, queues=1)
        mq.producer().send_batch([Message(TOPIC, b"1"), Message(TOPIC, b"2")])
        config = ConsumerConfig(orderly=True, suspend_current_queue_seconds=30)
        with PushConsumer("billing", mq.namesrv, config, on_message=inbox) as consumer:
            consumer.subscribe(TOPIC)
            got = [inbox.next() for _ in range(6)]
        assert mq.messages(SCHEDULE_TOPIC) == [], "order forbids that a message goes away and comes back"
    assert [(message.body, message.reconsume_times) for message in got] == [
        *((b"1", times) for times in range(3)),
        *((b"2", times) for times in range(3)),
    ]


# --- batches


def test_a_batch_is_messages_of_one_queue_with_everything_they_had() -> None:
    inbox = Inbox()
    with testing.broker() as mq:
        mq.create_topic(TOPIC, queues=4)
        members = [
            Message(TOPIC, b"%d" % number, tags="even" if number % 2 == 0 else "odd", keys=f"k{number}", flag=number)
            for number in range(10)
        ]
        members[3].properties["colour"] = "grün"
        results = mq.producer().send_batch(members)
        with PushConsumer("billing", mq.namesrv, on_message=inbox) as consumer:
            consumer.subscribe(TOPIC, "odd")
            got = sorted((inbox.next() for _ in range(5)), key=lambda message: message.queue_offset)
        stored = mq.messages(TOPIC)
    assert len({result.queue for result in results}) == 1
    assert [result.queue_offset for result in results] == list(range(10))
    assert [message.message_id for message in stored] == [result.message_id for result in results]
    assert [message.offset_message_id for message in stored] == [result.offset_message_id for result in results]
    assert [(message.body, message.keys, message.flag) for message in got] == [
        (b"%d" % number, [f"k{number}"], number) for number in (1, 3, 5, 7, 9)
    ]
    assert got[1].properties["colour"] == "grün"


def test_a_batch_to_a_queue_of_choice() -> None:
    with testing.broker() as mq:
        mq.create_topic(TOPIC, queues=4)
        chosen = MessageQueue(TOPIC, "broker-a", 2)
        results = mq.producer().send_batch([Message(TOPIC, b"1"), Message(TOPIC, b"2")], queue=chosen)
    assert {result.queue for result in results} == {chosen}


@pytest.mark.parametrize(
    "members",
    [
        [],
        [Message(TOPIC, b"1"), Message("elsewhere", b"2")],
        [Message(TOPIC, b"1"), Message(TOPIC, b"2", delay_level=1)],
        [Message(TOPIC, b"1"), Message(TOPIC, b"2", wait_store_msg_ok=False)],
        [Message("%RETRY%billing", b"1")],
    ],
)
def test_messages_that_cannot_share_a_batch_are_not_sent(members: list[Message]) -> None:
    with testing.broker() as mq:
        with pytest.raises(InvalidBatch):
            mq.producer().send_batch(members)
        assert mq.messages(TOPIC) == []
