"""The official gRPC clients of RocketMQ 5 for Python and Node.js against our gRPC port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path

import pytest

from downrange import Message, Producer
from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.model.topics import MESSAGE_TYPE, SubscriptionGroupConfig, TopicConfig, dlq_topic
from tests.support.grpc_clients import (
    LANGUAGES,
    GrpcClient,
    Language,
    node_packages,
    produce,
    python_packages,
    receive,
    started,
)
from tests.support.lasting_port import lasting_port
from tests.support.standalone_process import Standalone, standalone_process

TOPICS = {
    "Basics": "NORMAL", "Tags": "NORMAL", "Retry": "NORMAL", "Dead": "NORMAL", "Nack": "NORMAL", "Large": "NORMAL",
    "Ordered": "FIFO", "OrderedDead": "FIFO", "OrderedPush": "FIFO", "Transactions": "TRANSACTION", "Mixed": "MIXED",
}  # fmt: skip


async def create(servers: Standalone, topics: dict[str, str], *groups: SubscriptionGroupConfig) -> None:
    async with Admin(ClientConfig.of(servers.namesrv)) as admin:
        for language in LANGUAGES:
            for topic, kind in topics.items():
                await admin.topics.create(TopicConfig(f"{language}{topic}", 4, 4, attributes={MESSAGE_TYPE: kind}))
        for group in groups:
            await admin.groups.create(group)


@pytest.fixture(scope="session", autouse=True)
def _installed() -> None:
    python_packages()
    node_packages()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    settings = {"transactionCheckInterval": 1000, "transactionTimeOut": 1000}
    with standalone_process(tmp_path_factory.mktemp("grpc"), settings, grpc_port=0) as running:
        groups = [
            config
            for language in LANGUAGES
            for config in (
                SubscriptionGroupConfig(f"{language}DeadGroup", retry_max_times=1),
                SubscriptionGroupConfig(f"{language}OrderedGroup", consume_message_orderly=True),
                SubscriptionGroupConfig(f"{language}OrderedPushGroup", consume_message_orderly=True, retry_max_times=2),
            )
        ]
        asyncio.run(create(running, TOPICS, *groups))
        yield running
        assert running.process.stop() == 0
        assert running.process.errors == ""


@pytest.fixture(params=LANGUAGES)
def language(request: pytest.FixtureRequest) -> Language:
    found: Language = request.param
    return found


def test_what_was_sent_with_tag_keys_and_properties_arrives_so(servers: Standalone, language: Language) -> None:
    topic = f"{language}Basics"
    (sent,) = produce(
        language,
        servers.grpc,
        {"topic": topic, "body": "grüße, 世界", "tag": "TagA", "keys": "order-1", "properties": {"colour": "blue"}},
    )
    assert sent["event"] == "sent"
    for reader in LANGUAGES:  # each client reads what the other wrote
        (message,) = receive(reader, servers.grpc, topic, f"{reader}Reads{topic}", 1)
        assert message["body"] == "grüße, 世界"
        assert (message["tag"], message["keys"]) == ("TagA", ["order-1"])
        assert message["properties"] == {"colour": "blue"}
        assert message["messageId"] == sent["messageId"]
        assert message["attempt"] == 1
        assert not message["corrupted"]


def test_what_remoting_producers_compressed_is_read(servers: Standalone, language: Language) -> None:
    topic = f"{language}Large"
    body = "compressible " * 1000

    with Producer("remotingProducers", servers.namesrv) as producer:
        producer.send(Message(topic, body.encode(), tags="T"))
    (message,) = receive(language, servers.grpc, topic, f"{language}LargeGroup", 1)
    assert message["body"] == body
    assert not message["corrupted"]


def test_a_simple_consumer_gets_only_messages_with_its_tags(servers: Standalone, language: Language) -> None:
    topic = f"{language}Tags"
    messages = [{"topic": topic, "body": tag, "tag": tag, "properties": {"size": size}} for tag, size in
                (("A", "1"), ("B", "5"), ("C", "9"))]  # fmt: skip
    produce(language, servers.grpc, *messages)
    found = receive(language, servers.grpc, topic, f"{language}ByTag", 2, filter="A || C")
    assert sorted(one["body"] for one in found) == ["A", "C"]
    found = receive(language, servers.grpc, topic, f"{language}BySql", 2, filter="size > 2", sql=True)
    assert sorted(one["body"] for one in found) == ["B", "C"]


def test_a_message_that_failed_comes_again_soon_with_the_next_attempt(servers: Standalone, language: Language) -> None:
    topic = f"{language}Retry"
    order = {"endpoints": servers.grpc, "topic": topic, "group": f"{language}RetryGroup", "fail": {"fails": 1}}
    with started(language, "push", **order) as consumer:
        produce(language, servers.grpc, {"topic": topic, "body": "fails"}, {"topic": topic, "body": "fits"})
        consumer.wait_until(lambda: len(consumer.lines("consumed")) == 2)
        attempts = [line for line in consumer.messages() if line["body"] == "fails"]
        assert [line["attempt"] for line in attempts] == [1, 2]
        # Python asks for it after a second, Node.js at once; a waiting receive must not make it wait longer.
        assert attempts[1]["time"] - attempts[0]["time"] < 4
        consumer.end_input()
        assert consumer.wait() == 0


def test_a_simple_consumer_changes_the_invisible_time(servers: Standalone, language: Language) -> None:
    topic = f"{language}Nack"
    produce(language, servers.grpc, {"topic": topic, "body": "later"})
    found = receive(language, servers.grpc, topic, f"{language}NackGroup", 2, nack=2, invisible=30)
    assert [(one["body"], one["attempt"]) for one in found] == [("later", 1), ("later", 2)]
    assert 1.5 < found[1]["time"] - found[0]["time"] < 10


def test_a_message_that_fails_too_often_is_a_dead_letter(servers: Standalone, language: Language) -> None:
    topic, group = f"{language}Dead", f"{language}DeadGroup"
    with started(language, "push", endpoints=servers.grpc, topic=topic, group=group, fail={"bad": 99}) as consumer:
        (sent,) = produce(language, servers.grpc, {"topic": topic, "body": "bad"})
        consumer.wait_for_messages(2)
        (dead,) = receive(language, servers.grpc, dlq_topic(group), f"{language}ReadsDead", 1)
        assert [line["attempt"] for line in consumer.messages()] == [1, 2]
    assert (dead["body"], dead["messageId"]) == ("bad", sent["messageId"])


def test_messages_of_a_group_arrive_in_order(servers: Standalone, language: Language) -> None:
    topic = f"{language}Ordered"
    messages = [{"topic": topic, "body": f"{group}{number}", "group": group} for number in range(6) for group in "ab"]
    produce(language, servers.grpc, *messages)
    found = receive(language, servers.grpc, topic, f"{language}OrderedGroup", 12, batch=4)
    for group in "ab":
        own = [one["body"] for one in found if one["group"] == group]
        assert own == [f"{group}{number}" for number in range(6)]


def test_an_ordered_push_consumer_buries_what_fails_too_often(servers: Standalone, language: Language) -> None:
    topic, group = f"{language}OrderedPush", f"{language}OrderedPushGroup"
    order = {"endpoints": servers.grpc, "topic": topic, "group": group, "fail": {"a1": 99}}
    with started(language, "push", **order) as consumer:
        produce(language, servers.grpc, *({"topic": topic, "body": f"a{n}", "group": "a"} for n in range(4)))
        consumer.wait_until(lambda: len(consumer.lines("consumed")) == 3)
        assert consumer.bodies("consumed") == ["a0", "a2", "a3"]
        first = [body for at, body in enumerate(consumer.bodies()) if body not in consumer.bodies()[:at]]
        assert first == ["a0", "a1", "a2", "a3"]
        (dead,) = receive(language, servers.grpc, dlq_topic(group), f"{language}ReadsOrderedDead", 1)
    assert dead["body"] == "a1"


def test_transactions_are_committed_rolled_back_and_asked_about(servers: Standalone, language: Language) -> None:
    topic = f"{language}Transactions"
    messages = [{"topic": topic, "body": end, "transaction": end} for end in ("commit", "rollback", "unknown")]
    order = {"endpoints": servers.grpc, "topics": [topic], "messages": messages, "check": "commit", "stay": True}
    with started(language, "produce", **order) as producer:
        assert [line["event"] for line in producer.lines()] == ["sent", "sent", "sent", "done"]
        found = receive(language, servers.grpc, topic, f"{language}TransactionsGroup", 2)
        assert sorted(one["body"] for one in found) == ["commit", "unknown"]
        assert producer.bodies("check") == ["unknown"]
        assert all(one["properties"] == {} for one in found)


def test_a_message_of_the_wrong_type_is_refused(servers: Standalone, language: Language) -> None:
    (refused,) = produce(language, servers.grpc, {"topic": f"{language}Basics", "body": "x", "group": "g"})
    assert refused["event"] == "refused"
    sent = produce(
        language,
        servers.grpc,
        {"topic": f"{language}Mixed", "body": "x", "group": "g"},
        {"topic": f"{language}Mixed", "body": "y"},
    )
    assert [line["event"] for line in sent] == ["sent", "sent"]


@pytest.mark.slow
def test_a_slow_listener_keeps_its_message(servers: Standalone, language: Language) -> None:
    topic, group = f"{language}Basics", f"{language}SlowGroup"
    order = {"endpoints": servers.grpc, "topic": topic, "group": group, "sleep": 75, "filter": "slow"}
    with started(language, "push", **order) as consumer:
        produce(language, servers.grpc, {"topic": topic, "body": "slow", "tag": "slow"})
        consumer.wait_until(lambda: consumer.lines("consumed"), 110)
        time.sleep(3)  # what should not happen needs time to happen
        assert consumer.bodies() == ["slow"]


def test_clients_go_on_after_the_server_was_killed(tmp_path: Path, language: Language) -> None:
    numbers = [lasting_port() for _ in range(3)]

    def server() -> AbstractContextManager[Standalone]:
        return standalone_process(tmp_path, namesrv_port=numbers[0], broker_port=numbers[1], grpc_port=numbers[2])

    topic = f"{language}Basics"
    with ExitStack() as stack:
        with server() as first:
            asyncio.run(create(first, {"Basics": "NORMAL"}))
            consumer = stack.enter_context(
                started(language, "push", endpoints=first.grpc, topic=topic, group=f"{language}Group")
            )
            messages = [{"topic": topic, "body": f"m{number}"} for number in range(2000)]
            order = {"endpoints": first.grpc, "topics": [topic], "messages": messages, "pause": 0.1, "stay": True}
            producer = stack.enter_context(closing(GrpcClient(language, "produce", order)))
            producer.wait_until(lambda: len(producer.lines("sent")) >= 20)
            first.process.kill()
        with server():
            producer.wait_until(lambda: len(producer.lines("sent")) >= 50, 90)
            sent = set(producer.bodies("sent"))
            consumer.wait_until(lambda: sent <= set(consumer.bodies()), 90)
