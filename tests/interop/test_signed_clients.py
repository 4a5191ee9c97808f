"""Clients of others, signed, against our broker with accounts: Apache's C++ client and `ali-ons` for JavaScript.

The accounts are those of plain_acl.yml, and the users that a migration to ACL 2.0 makes of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.model.topics import TopicConfig
from downrange.transport.loop import run
from tests.interop.test_cpp_client import SEND_OK, cpp
from tests.support.node import NodeClient, consumer, produce
from tests.support.standalone_process import Standalone, standalone_process

ACCOUNTS = """
accounts:
- {accessKey: root-key, secretKey: root-secret, admin: true}
- {accessKey: shop-key, secretKey: shop-secret, topicPerms: [orders=PUB]}
- {accessKey: billing-key, secretKey: billing-secret, topicPerms: [orders=SUB], defaultGroupPerm: SUB}
"""
SHOP, BILLING, WRONG = ("shop-key", "shop-secret"), ("billing-key", "billing-secret"), ("shop-key", "another-secret")
# Retries begin with level 3 and would take 10 s with RocketMQ's own levels.
DELAY_LEVELS = "1s 2s " + "1s " * 16
GENERATIONS = {
    "4.x": {"aclEnable": "true"},
    "2.0": dict.fromkeys(("authenticationEnabled", "authorizationEnabled", "migrateAuthFromV1Enabled"), "true"),
}


@pytest.fixture(scope="module", params=GENERATIONS)
def generation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, generation: str) -> Iterator[Standalone]:
    directory = tmp_path_factory.mktemp("signed")
    file = directory / "plain_acl.yml"
    file.write_text(ACCOUNTS)
    file.chmod(0o600)
    settings = {**GENERATIONS[generation], "messageDelayLevel": DELAY_LEVELS.strip()}
    with standalone_process(directory, settings, log_level="DEBUG") as running:
        run(create_topics(running))
        yield running
        assert running.process.stop() == 0


async def create_topics(servers: Standalone) -> None:
    config = ClientConfig((servers.namesrv,), access_key="root-key", secret_key="root-secret")  # noqa: S106
    async with Admin(config) as admin:
        for topic in ("orders", "audit"):
            await admin.topics.create(TopicConfig(topic, 2, 2))


def named(account: tuple[str, str]) -> dict[str, str]:
    return {"accessKey": account[0], "secretKey": account[1]}


def test_the_cpp_client_sends_and_receives_with_its_account(servers: Standalone, tmp_path: Path) -> None:
    messages = [{"topic": "orders", "body": f"order {number}"} for number in range(3)]
    with cpp(tmp_path, do="consume", namesrv=servers.namesrv, group="cppGroup", topic="orders", account=BILLING,
             fail_first=True) as reader:  # fmt: skip
        reader.wait_started()
        with cpp(tmp_path, do="produce", namesrv=servers.namesrv, messages=messages, account=SHOP) as sender:
            lines = sender.end()
        assert [line.get("status") for line in lines] == [SEND_OK] * 3 + [None]
        received = reader.wait_for(6)
    # Each was refused once: it went back to the broker, and came again.
    assert sorted({(line["body"], line["reconsume_times"]) for line in received}) == [
        (f"order {number}", times) for number in range(3) for times in (0, 1)
    ]


@pytest.mark.parametrize(("topic", "account"), [("audit", SHOP), ("orders", WRONG), ("orders", BILLING)])
def test_the_cpp_client_is_refused_what_its_account_may_not(
    servers: Standalone, tmp_path: Path, topic: str, account: tuple[str, str]
) -> None:
    message = {"topic": topic, "body": "not allowed"}
    with cpp(tmp_path, do="produce", namesrv=servers.namesrv, messages=[message], account=account) as sender:
        assert [line for line in sender.end() if "sent" in line] == []
        assert sender.process.returncode == 1


def test_ali_ons_sends_and_receives_with_its_account(servers: Standalone) -> None:
    messages = [{"topic": "orders", "body": f"from node {number}"} for number in range(3)]
    with consumer(namesrv=servers.namesrv, group="nodeGroup", topic="orders", account=named(BILLING)) as reader:
        sent = produce(servers.namesrv, *messages, account=named(SHOP))
        assert [line["sendStatus"] for line in sent] == ["SEND_OK"] * 3
        wanted = {message["body"] for message in messages}
        reader.wait_until(lambda: {line["body"] for line in reader.messages()} >= wanted)


@pytest.mark.parametrize(
    ("topic", "account", "words"),
    [
        ("audit", SHOP, {"4.x": "No default permission for topic:audit", "2.0": "no permission to access Topic:audit"}),
        ("orders", WRONG, {"4.x": "Check signature failed for accessKey=shop-key", "2.0": "check signature failed."}),
        ("orders", None, {"4.x": "No accessKey is configured", "2.0": "username cannot be null."}),
    ],
)
def test_ali_ons_is_refused_what_its_account_may_not(
    servers: Standalone, generation: str, topic: str, account: tuple[str, str] | None, words: dict[str, str]
) -> None:
    order = {"namesrv": servers.namesrv, "group": "nodeShop", "messages": [{"topic": topic, "body": "not allowed"}]}
    before = len(servers.process.errors)
    client = NodeClient("produce.js", {**order, "account": named(account) if account else None})
    try:
        assert client.wait(60) == 1
        assert words[generation] in servers.process.errors[before:]  # the client does not tell; our log does
    finally:
        client.close()
