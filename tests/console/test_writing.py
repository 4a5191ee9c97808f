"""Changes that an operator makes on pages: a group is moved, a broker left alone, a message handed over, and so on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from html import unescape
from typing import Any

import pytest

from downrange import LocalTransactionState, Message, PushConsumer, ReceivedMessage, TransactionProducer
from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.console.config import ConsoleConfig
from downrange.model.message import MessageQueue
from downrange.model.topics import Perm, SubscriptionGroupConfig
from downrange.testing.embedded import EmbeddedBroker, broker
from tests.support.console import QUICK, Browser, running_console

QUEUE = MessageQueue("orders", "broker-a", 0)
COMMITTED = {"ahead": 7, "moved": 2}
SOON = {"transactionTimeOut": "100", "transactionCheckInterval": "50", "transactionCheckMax": "2"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmbeddedBroker]:
    """Ten messages in one queue, and two groups that stand at different places in it."""
    with broker(SOON) as running:
        running.create_topic(QUEUE.topic, 1)
        producer = running.producer("shop")
        for number in range(10):
            producer.send(Message(QUEUE.topic, b"%d" % number, keys=f"order-{number}"))
        asyncio.run(commit(running))
        yield running


async def commit(running: EmbeddedBroker) -> None:
    async with Admin(ClientConfig.of(running.namesrv)) as admin:
        for group, offset in COMMITTED.items():
            await admin.groups.create(SubscriptionGroupConfig(group), broker=running.address)
            (await admin.offsets.move_queue(group, QUEUE, offset)).raise_if_none()


@pytest.fixture(scope="module")
def browser(cluster: EmbeddedBroker) -> Iterator[Browser]:
    config = ConsoleConfig({"local": ClientConfig.of(cluster.namesrv)}, port=0, pace=QUICK)
    with running_console(config) as running:
        one = running.browser()
        for group, offset in COMMITTED.items():
            until_at(one, group, offset)
        yield one


def until_at(browser: Browser, group: str, offset: int) -> None:
    """Wait until the page of a group shows where it stands."""

    def is_there(data: Any) -> bool:
        return [row["committed"] for row in data["progress"] if row["topic"] == QUEUE.topic] == [str(offset)]

    browser.until(f"/c/local/groups/{group}", is_there)


def audited(browser: Browser, action: str) -> list[str]:
    return [row["outcome"] for row in browser.json("/audit")["rows"] if row["action"] == action]


def test_a_group_goes_where_another_one_is_and_back_in_one_queue(browser: Browser) -> None:
    form = "/c/local/groups/moved/move"
    refused = browser.submit(form, {"topic": QUEUE.topic, "way": "clone", "source": ""}, form)
    assert refused.status == 400
    clone = browser.submit(form, {"topic": QUEUE.topic, "way": "clone", "source": "ahead"}, form)
    plan = browser.json(clone.location)
    assert [(one["before"], one["after"]) for one in plan["changes"]] == [("2", "7")]
    assert plan["destroys"], "five messages are skipped"
    assert browser.submit(f"{clone.location}/apply", {"name": "moved"}, clone.location).status == 303
    assert browser.json(clone.location)["state"] == "done"
    until_at(browser, "moved", 7)

    refused = browser.submit(form, {"topic": QUEUE.topic, "way": "queue", "queue": "broker-a/0", "offset": "x"}, form)
    assert refused.status == 400
    queue = browser.submit(form, {"topic": QUEUE.topic, "way": "queue", "queue": "broker-a/0", "offset": "4"}, form)
    plan = browser.json(queue.location)
    assert [(one["before"], one["after"]) for one in plan["changes"]] == [("7", "4")]
    assert not plan["destroys"], "three messages come again"
    assert browser.submit(f"{queue.location}/apply", {}, queue.location).status == 303
    until_at(browser, "moved", 4)


def test_producers_leave_a_broker_and_come_back(browser: Browser, cluster: EmbeddedBroker) -> None:
    async def permission() -> int:
        async with Admin(ClientConfig.of(cluster.namesrv)) as admin:
            route = await admin.session.look_up_route(QUEUE.topic)
            (queues,) = route.queue_datas
            return queues.perm

    page, path = "/c/local/brokers/broker-a", "/c/local/brokers/broker-a/write-permission"
    assert browser.submit(path, {"action": "wipe", "name": "another"}, page).status == 400
    assert asyncio.run(permission()) & Perm.WRITE
    assert browser.submit(path, {"action": "wipe", "name": "broker-a"}, page).location == page
    assert not asyncio.run(permission()) & Perm.WRITE
    assert audited(browser, "wipe write permission") == ["done"]
    assert browser.submit(path, {"action": "add"}, page).location == page
    assert asyncio.run(permission()) & Perm.WRITE


def test_a_message_is_handed_to_a_member(browser: Browser, cluster: EmbeddedBroker) -> None:
    taken: list[str] = []
    has_taken = threading.Event()

    def take(message: ReceivedMessage) -> None:
        taken.append(message.message_id)
        has_taken.set()

    message = cluster.messages(QUEUE.topic)[0].message_id
    page = f"/c/local/messages/{message}?topic={QUEUE.topic}"
    path = f"/c/local/messages/{message}/hand-over"
    with PushConsumer("takers", cluster.namesrv, on_message=take) as consumer:
        consumer.subscribe(QUEUE.topic)
        data = browser.until("/c/local/groups/takers?tab=members", lambda data: bool(data["members"]))
        member = data["members"][0]["member"]
        handed = browser.submit(path, {"topic": QUEUE.topic, "receiver": f"takers {member}"}, page)
        assert handed.status == 303, handed.text
        assert f"{member} of takers: CR_SUCCESS after" in unescape(browser.get(handed.location).text)
        assert has_taken.wait(10)
        assert message in taken
        nobody = browser.submit(path, {"topic": QUEUE.topic, "receiver": "takers nobody"}, page)
        assert nobody.status == 502
    assert sorted(audited(browser, "hand over")) == ["done", "failed"], "a failure is told as one"


def test_a_half_message_that_was_given_up_is_asked_about_again(browser: Browser, cluster: EmbeddedBroker) -> None:
    knows = threading.Event()

    def check(message: ReceivedMessage) -> LocalTransactionState:
        return LocalTransactionState.COMMIT if knows.is_set() else LocalTransactionState.UNKNOWN

    cluster.create_topic("payments", 1)
    with TransactionProducer("payers", cluster.namesrv, check=check) as producer:
        producer.send_half(Message("payments", b"one"))
        data = browser.until("/c/local/transactions", lambda data: bool(data["given_up"]))
        (given_up,) = data["given_up"]
        assert (given_up["topic"], given_up["group"]) == ("payments", "payers")
        knows.set()
        path = f"/c/local/transactions/{given_up['id']}/resume"
        asked = browser.submit(path, {}, "/c/local/transactions")
        assert asked.status == 303, asked.text
        assert [one.body for one in cluster.wait_for("payments", 1, 30)] == [b"one"]
    assert audited(browser, "resume check") == ["done"]
