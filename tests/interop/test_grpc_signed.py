"""The official gRPC clients with accounts: at the gRPC port of a broker, and at a proxy in front of it."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.model.topics import TopicConfig
from downrange.protocol.bodies.users import AclInfo, PolicyEntryInfo, PolicyInfo, UserInfo
from downrange.transport.loop import run
from tests.support.certificates import Certificates
from tests.support.grpc_clients import LANGUAGES, GrpcClient, Language, node_packages, produce, python_packages, receive
from tests.support.processes import running
from tests.support.standalone_process import standalone_process

ACCOUNTS = """
accounts:
- {accessKey: root-key, secretKey: root-secret, admin: true, defaultTopicPerm: PUB|SUB, defaultGroupPerm: PUB|SUB}
- {accessKey: shop-key, secretKey: shop-secret, topicPerms: [orders=PUB]}
- {accessKey: billing-key, secretKey: billing-secret, topicPerms: [orders=SUB], defaultGroupPerm: SUB}
"""
ROOT = {"accessKey": "root-key", "secretKey": "root-secret"}
SHOP = {"accessKey": "shop-key", "secretKey": "shop-secret"}
BILLING = {"accessKey": "billing-key", "secretKey": "billing-secret"}
WRONG = {"accessKey": "shop-key", "secretKey": "another-secret"}
PAIR = ("certPath", "keyPath")


# The same accounts as users of ACL 2.0, and the account with which servers sign.
INNER = {"accessKey": "servers-key", "secretKey": "servers-secret"}
USERS = {
    "authenticationEnabled": "true",
    "authorizationEnabled": "true",
    "initAuthenticationUser": json.dumps({"username": ROOT["accessKey"], "password": ROOT["secretKey"]}),
    "innerClientAuthenticationCredentials": json.dumps(INNER),
}
RIGHTS = {"shop-key": {"Topic:orders": ("Pub",)}, "billing-key": {"Topic:orders": ("Sub",), "Group:*": ("Sub",)}}


@pytest.fixture(scope="module", params=["broker", "proxy", "proxy with the brokers' users"])
def endpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where gRPC clients connect."""
    python_packages()
    node_packages()
    directory = tmp_path_factory.mktemp("signed")
    accounts = directory / "plain_acl.yml"
    accounts.write_text(ACCOUNTS)
    accounts.chmod(0o600)
    has_users = request.param == "proxy with the brokers' users"
    with standalone_process(directory, USERS if has_users else {"aclEnable": "true"}, grpc_port=0) as servers:
        run(create_topics(servers.namesrv))
        if has_users:
            env = {"ROCKETMQ_ACCESS_KEY": INNER["accessKey"], "ROCKETMQ_SECRET_KEY": INNER["secretKey"]}
            run(create_users(servers.namesrv))
            with running("proxy", "-n", servers.namesrv, "-p", "0", "--broker-accounts", env=env) as proxy:
                yield proxy.wait_for(r"gRPC server ready on (\S+),")[1]
            return
        if request.param == "broker":
            yield servers.grpc
            return
        account = {"ROCKETMQ_ACCESS_KEY": ROOT["accessKey"], "ROCKETMQ_SECRET_KEY": ROOT["secretKey"]}
        with running("proxy", "-n", servers.namesrv, "-p", "0", "--acl-file", str(accounts), env=account) as proxy:
            yield proxy.wait_for(r"gRPC server ready on (\S+),")[1]


async def create_topics(namesrv: str) -> None:
    config = ClientConfig((namesrv,), access_key=ROOT["accessKey"], secret_key=ROOT["secretKey"])
    async with Admin(config) as admin:
        for topic in ("orders", "audit"):
            await admin.topics.create(TopicConfig(topic, 2, 2))


async def create_users(namesrv: str) -> None:
    config = ClientConfig((namesrv,), access_key=ROOT["accessKey"], secret_key=ROOT["secretKey"])
    async with Admin(config) as admin:
        for user in (SHOP, BILLING):
            info = UserInfo(username=user["accessKey"], password=user["secretKey"])
            (await admin.users.create(info)).raise_if_none()
            entries = tuple(
                PolicyEntryInfo(resource=resource, actions=actions, decision="Allow")
                for resource, actions in RIGHTS[user["accessKey"]].items()
            )
            rules = AclInfo(subject=f"User:{user['accessKey']}", policies=(PolicyInfo(entries=entries),))
            (await admin.acls.put(rules)).raise_if_none()


@pytest.mark.parametrize("language", LANGUAGES)
def test_clients_send_and_receive_with_their_accounts(endpoints: str, language: Language) -> None:
    body = f"signed by {language}"
    (sent,) = produce(language, endpoints, {"topic": "orders", "body": body, "tag": language}, account=SHOP)
    assert sent["event"] == "sent"
    found = receive(language, endpoints, "orders", f"{language}Readers", 1, account=BILLING, filter=language)
    assert [one["body"] for one in found] == [body]


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize(
    ("topic", "account"), [("orders", WRONG), ("orders", {}), ("orders", BILLING), ("audit", SHOP)]
)
def test_clients_without_the_right_are_refused(
    endpoints: str, language: Language, topic: str, account: dict[str, str]
) -> None:
    order = {"endpoints": endpoints, "topics": [topic], "messages": [{"topic": topic, "body": "x"}], "account": account}
    client = GrpcClient(language, "produce", order)
    try:
        client.wait(60)
        assert not client.lines("sent")
    finally:
        client.close()


def test_a_proxy_that_others_can_reach_wants_accounts_and_takes_tls_only(tmp_path: Path) -> None:
    with running("proxy", "-n", "127.0.0.1:1", "-p", "0", "--bind", "0.0.0.0") as proxy:
        assert proxy.wait() == 2
        assert "set --acl-file or --broker-accounts, --tls-mode enforcing, or add --insecure" in proxy.errors
    certificates = Certificates.make(tmp_path / "tls")
    file, accounts = tmp_path / "tls.properties", tmp_path / "plain_acl.yml"
    file.write_text("".join(f"tls.server.{key}={path}\n" for key, path in zip(PAIR, certificates.server, strict=True)))
    accounts.write_text("accounts: []\n")
    options = ("-p", "0", "--acl-file", str(accounts), "--tls-config", str(file))
    with running("proxy", "-n", "127.0.0.1:1", *options, "--bind", "0.0.0.0") as permissive:
        assert permissive.wait() == 2
        assert "set --tls-mode enforcing, or add --insecure" in permissive.errors
    with running("proxy", "-n", "127.0.0.1:1", *options, "--tls-mode", "enforcing") as proxy:
        port = int(proxy.wait_for(r"gRPC server ready on 127\.0\.0\.1:(\d+)")[1])
        trust = ssl.create_default_context(cafile=certificates.ca)
        trust.set_alpn_protocols(["h2"])
        with socket.create_connection(("127.0.0.1", port), 20) as plain:
            plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            with suppress(ConnectionResetError):
                assert plain.recv(1) == b""
        with (
            socket.create_connection(("127.0.0.1", port), 20) as below,
            trust.wrap_socket(below, server_hostname="localhost") as encrypted,
        ):
            assert encrypted.selected_alpn_protocol() == "h2"
