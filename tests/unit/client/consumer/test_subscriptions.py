"""Versions of subscriptions: brokers take the higher one, and pulls must not be ahead of what brokers were told."""

from __future__ import annotations

import pytest

from downrange.client.config import ClientConfig
from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.subscriptions import Subscriptions
from downrange.client.session import Session
from downrange.clock import ManualClock
from downrange.model.errors import MessageError
from downrange.model.subscription import SQL92, TAG
from downrange.protocol.bodies.groups import ConsumeType


@pytest.fixture
def session() -> Session:
    return Session(ClientConfig(("127.0.0.1:1",)), clock=ManualClock())


async def test_what_replaces_a_subscription_has_a_higher_version_though_the_clock_stands_still(
    session: Session,
) -> None:
    subscriptions = Subscriptions(session, "billing")
    first = subscriptions.table["orders"] = subscriptions.new("orders", "paid || refunded", None)
    second = subscriptions.new("orders", "*", "amount > 3")
    assert (first.expression_type, sorted(first.tags)) == (TAG, ["paid", "refunded"])
    assert (second.expression_type, second.expression) == (SQL92, "amount > 3")
    assert second.version == first.version + 1
    assert list(subscriptions) == [first], "it is the caller who puts it into the table"


@pytest.mark.parametrize("sql", ["", "  "])
async def test_a_blank_expression_is_refused(session: Session, sql: str) -> None:
    with pytest.raises(MessageError, match="blank"):
        Subscriptions(session, "billing").new("orders", "*", sql)


async def test_a_callback_in_the_place_of_tags_is_refused(session: Session) -> None:
    with pytest.raises(MessageError, match="not a function; a consumer is made with its callback"):
        Subscriptions(session, "billing").new("orders", lambda message: None, None)  # type: ignore[arg-type]


async def test_brokers_are_told_of_a_version_before_pulls_name_it(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscriptions = Subscriptions(session, "billing")
    for topic in ("orders", "returns"):
        subscriptions.table[topic] = subscriptions.new(topic, "*", None)
    before = subscriptions.table["orders"].version
    told: dict[str, int] = {}
    pulled: dict[str, int] = {}

    async def beat() -> None:
        member = subscriptions.describe(ConsumeType.PASSIVELY, ConsumerConfig())
        told.update({each.topic: each.version for each in member.subscription_data_set})
        pulled.update({each.topic: each.version for each in subscriptions})
        del subscriptions.table["returns"]  # the user unsubscribes meanwhile

    monkeypatch.setattr(session.heartbeats, "beat", beat)
    await subscriptions.announce(["orders", "returns", "unknown"])
    assert told == {"orders": before + 1, "returns": before + 1}
    assert pulled == {"orders": before, "returns": before}
    assert {each.topic: each.version for each in subscriptions} == {"orders": before + 1}
