"""A broker with accounts of plain_acl.yml: real processes, our clients and commands."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from downrange import (
    ClientConfig,
    Later,
    LocalTransactionState,
    Message,
    Producer,
    PushConsumer,
    ReceivedMessage,
    SendFailed,
    TransactionProducer,
)
from tests.support.standalone_process import Standalone, standalone_process

ACCOUNTS = """
accounts:
- {accessKey: root-key, secretKey: root-secret, admin: true}
- accessKey: shop-key
  secretKey: shop-secret
  topicPerms: [orders=PUB]
- accessKey: billing-key
  secretKey: billing-secret
  topicPerms: [orders=SUB, audit=PUB]
  groupPerms: [billing=SUB]
"""
SECRETS = {"root-key": "root-secret", "shop-key": "shop-secret", "billing-key": "billing-secret"}
DELAY_LEVELS = "1s 1s " + "1s " * 16


class Shop:
    """A running broker with accounts, and the file with them."""

    def __init__(self, servers: Standalone, directory: Path) -> None:
        self.servers = servers
        self.file = directory / "plain_acl.yml"

    def client(self, key: str, secret: str | None = None) -> ClientConfig:
        return ClientConfig((self.servers.namesrv,), access_key=key, secret_key=secret or SECRETS[key])

    def send(self, topic: str, key: str, secret: str | None = None) -> str:
        """Send a message; `sent`, or the words of the refusal."""
        with Producer("shop", self.client(key, secret)) as producer:
            try:
                producer.send(Message(topic, b"order"))
            except SendFailed as error:
                return str(error)
        return "sent"

    def command(
        self, *arguments: str, key: str | None = "root-key", given: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a `downrange` command with an account of the environment."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ROCKETMQ_")}
        if key is not None:
            environment |= {"ROCKETMQ_ACCESS_KEY": key, "ROCKETMQ_SECRET_KEY": SECRETS[key]}
        return subprocess.run(
            [sys.executable, "-m", "downrange", *arguments, "-n", self.servers.namesrv],
            capture_output=True, text=True, timeout=60, input=given, env=environment,
        )  # fmt: skip

    def done(self, *arguments: str, key: str | None = "root-key", given: str = "") -> str:
        run = self.command(*arguments, key=key, given=given)
        assert run.returncode == 0, run.stderr
        return run.stdout


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    directory = tmp_path_factory.mktemp("acl")
    file = directory / "plain_acl.yml"
    file.write_text(ACCOUNTS)
    file.chmod(0o600)
    settings = {"aclEnable": "true", "messageDelayLevel": DELAY_LEVELS.strip(), "transactionTimeOut": 1000}
    with standalone_process(directory, settings, log_level="INFO") as running:
        made = Shop(running, directory)
        for topic in ("orders", "audit"):
            made.done("topic", "create", topic, "-r", "2", "-w", "2")
        yield made
        assert running.process.stop() == 0
        printed = "\n".join((*running.process.output, running.process.errors))
        for secret in (*SECRETS.values(), "new-secret", "another-secret"):
            assert secret not in printed


def until(condition: Callable[[], Any], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_those_who_may_send_and_receive_notice_nothing(shop: Shop) -> None:
    received: list[ReceivedMessage] = []
    enough = threading.Event()

    def listen(message: ReceivedMessage) -> Later | None:
        received.append(message)
        if len(received) >= 4:
            enough.set()
        return (
            None if message.reconsume_times else Later()
        )  # each message is refused once, and comes again over the retry topic

    with PushConsumer("billing", shop.client("billing-key"), on_message=listen) as consumer:
        consumer.subscribe("orders")
        with Producer("shop", shop.client("shop-key")) as producer:
            producer.send(Message("orders", b"first"))
            producer.send_batch([Message("orders", b"second")])
        assert enough.wait(40), received
    assert sorted((message.body, message.reconsume_times) for message in received) == [
        (b"first", 0), (b"first", 1), (b"second", 0), (b"second", 1),
    ]  # fmt: skip


def test_a_transaction_needs_the_right_to_send(shop: Shop) -> None:
    with TransactionProducer(
        "shop", shop.client("shop-key"), check=lambda message: LocalTransactionState.ROLLBACK
    ) as producer:
        sent = producer.send_in_transaction(
            Message("orders", b"in a transaction"), lambda message: LocalTransactionState.COMMIT
        )
    assert sent.state is LocalTransactionState.COMMIT


def test_what_an_account_may_not_is_refused_in_rocketmqs_words(shop: Shop) -> None:
    assert "No default permission for topic:audit" in shop.send("audit", "shop-key")
    assert "No default permission for topic:orders" in shop.send("orders", "billing-key")
    assert "Check signature failed for accessKey=shop-key" in shop.send("orders", "shop-key", "wrong-secret")
    assert "No acl config for stranger" in shop.send("orders", "stranger", "any-secret")
    assert shop.send("audit", "billing-key") == "sent"


@pytest.mark.parametrize(
    "arguments",
    [
        ("topic", "create", "more"),
        ("config", "get"),
        ("config", "update", "brokerPermission=4"),
        ("plain-acl", "update", "evil-key", "--admin"),
        ("plain-acl", "delete", "root-key"),
        ("plain-acl", "white-list", "*"),
        ("plain-acl", "versions"),
        ("mqadmin", "updateAclConfig", "-a", "evil-key", "-s", "evil-secret", "-m", "true"),
        ("group", "reset-offset", "billing", "orders", "--time", "0"),
        ("cluster", "clean-topics"),
    ],
    ids=" ".join,
)
def test_only_an_administrator_administers(shop: Shop, arguments: tuple[str, ...]) -> None:
    before = shop.file.read_bytes()
    refused = shop.command(*arguments, key="shop-key", given="evil-secret\n")
    assert refused.returncode == 1
    assert "but accessKey=shop-key is not" in refused.stderr
    anonymous = shop.command(*arguments, key=None, given="evil-secret\n")
    assert anonymous.returncode == 1
    assert "No accessKey is configured" in anonymous.stderr
    assert "evil-secret" not in refused.stderr + anonymous.stderr
    assert shop.file.read_bytes() == before


def test_accounts_are_changed_while_the_broker_runs(shop: Shop) -> None:
    shop.done("plain-acl", "update", "new-key", "--topics", "orders=PUB", given="new-secret\n")
    assert shop.send("orders", "new-key", "new-secret") == "sent"
    assert "No default permission for topic:audit" in shop.send("audit", "new-key", "new-secret")
    shop.done("mqadmin", "updateAclConfig", "-a", "new-key", "-s", "another-secret", "-t", "orders=PUB,audit=PUB")
    assert shop.send("audit", "new-key", "another-secret") == "sent"
    assert "Check signature failed" in shop.send("audit", "new-key", "new-secret")
    versions = shop.done("mqadmin", "clusterAclConfigVersion", "-c", "DefaultCluster")
    assert "plain_acl.yml" in versions
    assert str(shop.file.parent) not in versions
    shop.done("plain-acl", "delete", "new-key")
    assert "No acl config for new-key" in shop.send("orders", "new-key", "another-secret")
    twice = shop.command("mqadmin", "deleteAclConfig", "-a", "new-key")
    assert "The accesskey[new-key] corresponding to accessConfig has been deleted failed." in twice.stderr
    short = shop.command("plain-acl", "update", "new-key", given="short\n")
    assert "length should longer than 6" in short.stderr
    assert "short" not in short.stderr.replace("longer", "")
    assert shop.file.stat().st_mode & 0o777 == 0o600


def test_an_edited_file_is_in_force_soon(shop: Shop) -> None:
    text = shop.file.read_text()
    shop.file.write_text(text.replace("orders=PUB", "orders=DENY"))
    until(lambda: "No default permission for topic:orders" in shop.send("orders", "shop-key"))
    shop.file.write_text("accounts: [")  # half an edit changes nothing
    until(lambda: "access control file not used" in shop.servers.process.errors)
    assert "No default permission for topic:orders" in shop.send("orders", "shop-key")
    shop.file.write_text(text)
    until(lambda: shop.send("orders", "shop-key") == "sent")


def test_a_white_list_stands_in_for_signatures_but_not_for_an_administrator(shop: Shop) -> None:
    shop.done("mqadmin", "updateGlobalWhiteAddr", "-g", "10.1.2.{3,4},127.0.0.1")
    try:
        assert shop.send("audit", "stranger", "any-secret") == "sent"
        with Producer("shop", shop.servers.namesrv) as producer:
            producer.send(Message("audit", b"without a signature"))
        refused = shop.command("topic", "create", "more", key=None)
        assert "an address on a white list is not enough, sign the request" in refused.stderr
    finally:
        shop.done("plain-acl", "white-list", "10.1.2.3")
    assert "No acl config for stranger" in shop.send("audit", "stranger", "any-secret")
    refused = shop.command("plain-acl", "white-list", "*", "--file", "../other.yml")
    assert "is no file of this broker's access control" in refused.stderr
    refused = shop.command("plain-acl", "white-list", "nonsense")
    assert "'nonsense' is no address pattern" in refused.stderr


def test_commands_sign_with_the_account_of_tools_yml(shop: Shop, tmp_path: Path) -> None:
    tools = tmp_path / "conf" / "tools.yml"
    tools.parent.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROCKETMQ_")}
    line = [sys.executable, "-m", "downrange", "config", "get", "-n", shop.servers.namesrv]
    for text, code, words in (
        ("accessKey: root-key\nsecretKey: root-secret\n", 0, ""),
        ("accessKey: root-key\nsecretKey: 12345678\n", 1, "Check signature failed for accessKey=root-key"),
        ("accessKey: root-key\n", 2, "tools.yml: expected accessKey and secretKey, two texts"),
        ("accessKey: [root-secret", 2, "tools.yml: not YAML"),
        ("", 1, "No accessKey is configured"),
    ):
        tools.write_text(text)
        run = subprocess.run(
            line, capture_output=True, text=True, timeout=60, env={**environment, "ROCKETMQ_HOME": str(tmp_path)}
        )
        assert (run.returncode, words in run.stderr) == (code, True), run.stderr
        assert "root-secret" not in run.stderr


def test_a_wrong_account_stops_the_start_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "plain_acl.yml").write_text("accounts: [{accessKey: root-key, secretKey: abc123}]")
    (tmp_path / "broker.conf").write_text("aclEnable=true\n")
    line = ["standalone", "-c", str(tmp_path / "broker.conf"), "-d", str(tmp_path / "data"), "--namesrv-port", "0"]
    run = subprocess.run([sys.executable, "-m", "downrange", *line], capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert len(run.stderr.strip().splitlines()) == 1
    assert f"{tmp_path / 'plain_acl.yml'}: The accessKey=root-key and secretKey" in run.stderr
    assert "abc123" not in run.stderr
    assert not (tmp_path / "data" / "store").exists()


def test_without_access_control_accounts_are_refused_in_words(tmp_path: Path) -> None:
    with standalone_process(tmp_path) as running:
        plain = Shop(running, tmp_path)
        for arguments in (("update", "new-key"), ("delete", "new-key"), ("white-list", "*"), ("versions",)):
            run = plain.command("plain-acl", *arguments, key=None, given="new-secret\n")
            assert run.returncode == 1
            assert "this broker has no access control of 4.x: start it with aclEnable=true" in run.stderr
