"""Deliveries without Spark around them: what brokers that ask about half messages are told, and what they finish."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pytest

from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.producer.transaction_producer import LocalTransactionState
from downrange.clock import ManualClock, SystemClock
from downrange.spark.delivery import Marker, Step
from downrange.spark.sink import Delivery, TaskSent
from downrange.spark.sink_client import SinkClient
from downrange.spark.sink_options import sink_options
from downrange.testing import EmbeddedBroker, broker

ROWS = 20
ONCE = Counter(str(row) for row in range(ROWS))
STATE = LocalTransactionState


class WatchedClient(SinkClient):
    """Counts what brokers were told; `wait` returns when all of a number of questions are answered."""

    def __init__(self, mq: EmbeddedBroker) -> None:
        self.answers: Counter[LocalTransactionState] = Counter()
        self._changed = threading.Condition()
        options = {"namesrv": mq.namesrv, "topic": "orders", "deliveryLevel": "transactional", "checkAfter": "30s"}
        super().__init__(sink_options(options))

    async def check(self, message: ReceivedMessage) -> LocalTransactionState:
        state = await super().check(message)
        with self._changed:
            self.answers[state] += 1
            self._changed.notify_all()
        return state

    def wait(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.answers.total() >= count, timeout=60), self.answers


@pytest.fixture
def mq() -> Iterator[EmbeddedBroker]:
    # Half messages are as old as the difference between the client's clock and the broker's.
    with broker(clock=ManualClock(SystemClock().now())) as running:
        yield running


@pytest.fixture
def client(mq: EmbeddedBroker) -> Iterator[WatchedClient]:
    running = WatchedClient(mq)
    yield running
    running.close()


def bodies(mq: EmbeddedBroker) -> Counter[str]:
    return Counter(message.body.decode() for message in mq.messages("orders"))


def send(client: SinkClient, batch: int = 0) -> tuple[Delivery, TaskSent]:
    delivery = Delivery(client, "query", batch)
    rows = pa.record_batch({"body": [str(row) for row in range(ROWS)]})
    return delivery, delivery.send(iter([rows]), 0)


def decide(delivery: Delivery, sent: TaskSent) -> Marker:
    marker = delivery.perform(Step.DECIDE, None, [sent])
    assert marker is not None
    return marker


def let_broker_ask(mq: EmbeddedBroker) -> None:
    """Longer than `checkAfter`, and then the next round of questions."""
    mq.advance(31)
    mq.advance(60)


def test_halves_of_an_attempt_that_was_replaced_are_rolled_back(mq: EmbeddedBroker, client: WatchedClient) -> None:
    send(client)  # its driver was killed
    delivery, sent = send(client)
    delivery.commit([sent])
    assert bodies(mq) == ONCE
    let_broker_ask(mq)
    client.wait(ROWS)
    assert client.answers == {STATE.ROLLBACK: ROWS}
    assert bodies(mq) == ONCE


def test_halves_left_behind_by_a_closed_batch_are_committed(mq: EmbeddedBroker, client: WatchedClient) -> None:
    delivery, sent = send(client)
    marker = decide(delivery, sent)
    delivery.perform(Step.CLOSE, marker, [sent])  # as if every END had been lost on its way
    assert bodies(mq) == Counter()
    let_broker_ask(mq)
    mq.wait_for("orders", ROWS, timeout=30)
    assert client.answers == {STATE.COMMIT: ROWS}
    assert bodies(mq) == ONCE


def test_an_undecided_batch_is_left_open_and_can_still_be_committed(mq: EmbeddedBroker, client: WatchedClient) -> None:
    delivery, sent = send(client)
    let_broker_ask(mq)
    client.wait(ROWS)
    assert client.answers == {STATE.UNKNOWN: ROWS}
    # The broker asked, so it goes by copies of the halves now and refuses to end the first ones: the next check does.
    delivery.commit([sent])
    let_broker_ask(mq)
    mq.wait_for("orders", ROWS, timeout=30)
    assert bodies(mq) == ONCE


def test_a_batch_that_took_too_long_to_end_is_finished_by_the_check(mq: EmbeddedBroker, client: WatchedClient) -> None:
    delivery, sent = send(client)
    marker = decide(delivery, sent)
    let_broker_ask(mq)
    client.wait(ROWS)
    assert client.answers == {STATE.UNKNOWN: ROWS}, "while the marker is open the driver is at work"
    again = Delivery(client, "query", 0)
    rerun = TaskSent("query", 0, "another", 0)
    again.commit([rerun])  # SETTLE is refused, CLOSE leaves the rest to the check
    let_broker_ask(mq)
    mq.wait_for("orders", ROWS, timeout=30)
    assert bodies(mq) == ONCE
    newest = client.run(client.markers.newest("query"))
    assert newest == replace(marker, is_closed=True, written=newest.written if newest else 0)


def test_a_message_that_is_there_already_is_not_committed_again(mq: EmbeddedBroker, client: WatchedClient) -> None:
    """As a genuine broker asks about its copy of a half message whose first one was committed."""
    delivery, sent = send(client)
    delivery.commit([sent])
    message = mq.messages("orders")[0]
    assert client.run(client.check(message)) is STATE.ROLLBACK
