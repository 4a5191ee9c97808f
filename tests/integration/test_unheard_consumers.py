"""Consumers that would wait or lose messages in silence: of topics that do not exist, or with members that differ."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from downrange import (
    AsyncLitePullConsumer,
    AsyncPushConsumer,
    AsyncSimpleConsumer,
    ConsumerConfig,
    Message,
    MessageError,
)
from downrange.cli.main import app
from downrange.client.admin.group_verdicts import DIFFERENT_SUBSCRIPTION, REBALANCE_OK, SAME_SUBSCRIPTION
from downrange.client.consumer.messages import ReceivedMessage
from downrange.testing import EmbeddedBroker, broker


@pytest.fixture
def mq() -> Iterator[EmbeddedBroker]:
    with broker() as running:
        running.create_topic("orders", 2)
        running.create_topic("payments", 2)
        yield running


SHARES_OFTEN = ConsumerConfig(rebalance_seconds=0.1)


async def done(message: ReceivedMessage) -> None:
    return None


async def logged(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    """Wait for a line with this text; all such lines."""
    async with asyncio.timeout(20):
        while not (found := [record.getMessage() for record in caplog.records if text in record.getMessage()]):
            await asyncio.sleep(0.02)
    return found


async def test_a_topic_that_does_not_exist_is_told_once_with_the_nearest(
    mq: EmbeddedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with AsyncPushConsumer("billing", mq.namesrv, on_message=done) as consumer:
            await consumer.subscribe("order")
            await consumer.subscribe("order")
        expected = "group billing waits for the topic order, which does not exist yet; did you mean orders?"
        assert await logged(caplog, "waits for") == [expected]
        caplog.clear()
        async with AsyncLitePullConsumer("reading", mq.namesrv) as reader:
            await reader.subscribe("paymets")
        assert (await logged(caplog, "waits for"))[0].endswith("did you mean payments?")
        caplog.clear()
        async with AsyncSimpleConsumer("leasing", mq.namesrv) as leasing:
            await leasing.subscribe("quite-another-thing")
        assert (await logged(caplog, "waits for"))[0].endswith("does not exist yet")


async def test_members_that_subscribe_differently_say_so(mq: EmbeddedBroker, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with (
            AsyncPushConsumer("billing", mq.namesrv, SHARES_OFTEN, on_message=done) as one,
            AsyncPushConsumer("billing", mq.namesrv, SHARES_OFTEN, on_message=done) as other,
        ):
            await one.subscribe("orders", "A")
            await other.subscribe("orders", "B")
            told, *_ = await logged(caplog, "subscribe differently")
            assert told.startswith("members of group billing subscribe differently and lose messages: orders with ")
            status = await ask(mq, "group", "status", "billing")
            assert DIFFERENT_SUBSCRIPTION in status
            connections = await ask(mq, "group", "connections", "billing")
            assert connections.count("orders") == 3  # once as the broker knows it, and once for each member


async def test_members_that_fit_are_called_fitting(mq: EmbeddedBroker) -> None:
    async with (
        AsyncPushConsumer("billing", mq.namesrv, on_message=done) as one,
        AsyncPushConsumer("billing", mq.namesrv, on_message=done) as other,
    ):
        await one.subscribe("orders", "A")
        await other.subscribe("orders", "A")
        async with asyncio.timeout(20):
            while REBALANCE_OK not in (status := await ask(mq, "mqadmin", "consumerStatus", "-g", "billing")):
                await asyncio.sleep(0.02)
        assert SAME_SUBSCRIPTION in status


async def ask(mq: EmbeddedBroker, *arguments: str) -> str:
    result = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "-n", mq.namesrv])
    assert result.exit_code == 0, result.output
    return result.output


async def test_tags_and_sql_together_are_refused(mq: EmbeddedBroker) -> None:
    async with AsyncPushConsumer("billing", mq.namesrv, on_message=done) as consumer:
        with pytest.raises(MessageError, match="cannot be combined"):
            await consumer.subscribe("orders", "A", sql="a > 1")


def test_a_delay_level_that_no_broker_has_is_capped_and_told_once(
    mq: EmbeddedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    producer = mq.producer()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            producer.send(Message("orders", b"late", delay_level=99))
    assert [record.getMessage() for record in caplog.records if "delay level 99" in record.getMessage()] == [
        "delay level 99: brokers have 18 levels unless messageDelayLevel names more; the last, of 2 h, counts"
    ]
    assert len(mq.messages("SCHEDULE_TOPIC_XXXX")) == 2
