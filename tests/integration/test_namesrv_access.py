"""Access control of a name server, over real sockets: accounts, addresses of brokers, and what stays open."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from downrange.auth.needs import NAMESRV_NEEDS
from downrange.broker.app import broker
from downrange.broker.config import BrokerConfig
from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.clock import SystemClock
from downrange.namesrv.access import OF_BROKERS, READS
from downrange.namesrv.app import load_config, name_server
from downrange.namesrv.config import NamesrvConfig
from downrange.namesrv.handlers import NamesrvHandlers
from downrange.namesrv.kv_config import KVConfig
from downrange.namesrv.route_table import RouteTable
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command, request
from downrange.protocol.signing import Signer
from downrange.settings import ConfigError, Property
from downrange.store.config import StoreConfig
from downrange.transport.pool import connect
from downrange.transport.server import Server
from tests.integration.test_namesrv import registration

ACCOUNTS = """
globalWhiteRemoteAddresses: [127.0.0.1]
accounts:
- {accessKey: root-key, secretKey: root-secret, admin: true}
- {accessKey: shop-key, secretKey: shop-secret, defaultTopicPerm: PUB|SUB, defaultGroupPerm: SUB}
"""
ROOT, SHOP = Signer("root-key", "root-secret"), Signer("shop-key", "shop-secret")
WRONG = Signer("root-key", "another-secret")
REFUSED = {ResponseCode.SYSTEM_ERROR, ResponseCode.NO_PERMISSION}
PUT = request(RequestCode.PUT_KV_CONFIG, ext_fields={"namespace": "n", "key": "k", "value": "v"})


@asynccontextmanager
async def served(directory: Path, accounts: str | None = ACCOUNTS, **settings: object) -> AsyncIterator[Server]:
    if accounts is not None:
        (directory / "plain_acl.yml").write_text(accounts)
        settings |= {"acl_enable": True, "acl_file": directory / "plain_acl.yml"}
    config = NamesrvConfig(
        listen_port=0,
        kv_config_path=directory / "kv.json",
        config_store_path=directory / "ns.properties",
        failed_login_wait_mills=0,
        **settings,  # type: ignore[arg-type]
    )
    async with name_server(config) as server:
        yield server


async def ask(server: Server, *commands: Command) -> list[Command]:
    connection = await connect(f"127.0.0.1:{server.port}")
    try:
        return [await connection.request(command, 5) for command in commands]
    finally:
        connection.close()


def is_refused(reply: Command) -> bool:
    remark = reply.remark or ""
    return reply.code in REFUSED and ("AclException" in remark or "allowedBrokerAddresses" in remark)


def test_every_code_of_a_name_server_has_a_row_and_reads_are_those_that_every_account_may_ask(tmp_path: Path) -> None:
    config = NamesrvConfig(kv_config_path=tmp_path / "kv.json")
    handlers = NamesrvHandlers(RouteTable(), KVConfig(config.kv_config_path), config, SystemClock())
    codes = {int(code) for code in RequestCode if code in handlers.codes}
    assert codes - NAMESRV_NEEDS.keys() == set()
    assert codes - OF_BROKERS - READS == {100, 101, 102, 205, 216, 219, 318, 319, 327}


async def test_only_an_admin_account_changes_anything_and_reads_stay_open(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        for code in sorted(int(code) for code in RequestCode):
            for command in (request(code), SHOP.sign(request(code)), WRONG.sign(request(code))):
                (reply,) = await ask(server, command)
                is_open = code in READS or code not in NAMESRV_NEEDS
                assert is_refused(reply) != is_open, f"{code}: {reply}"
        register = registration("broker-a", "127.0.0.1:10911", "orders")
        assert [is_refused(reply) for reply in await ask(server, register, SHOP.sign(register), PUT)] == [True] * 3
        route = request(RequestCode.GET_ROUTEINFO_BY_TOPIC, ext_fields={"topic": "orders"})
        assert [reply.code for reply in await ask(server, route)] == [ResponseCode.TOPIC_NOT_EXIST]
        replies = await ask(server, ROOT.sign(register), ROOT.sign(PUT), route)
        assert [reply.code for reply in replies] == [0, 0, 0]


async def test_reads_may_need_an_account_too(tmp_path: Path) -> None:
    async with served(tmp_path, ACCOUNTS.replace("127.0.0.1", "10.1.2.3"), anonymous_read_enable=False) as server:
        read = request(RequestCode.GET_BROKER_CLUSTER_INFO)
        replies = await ask(server, read, WRONG.sign(read), SHOP.sign(read))
        assert [is_refused(reply) for reply in replies] == [True, True, False]


async def test_brokers_that_do_not_sign_register_from_their_addresses(tmp_path: Path) -> None:
    register = registration("broker-a", "127.0.0.1:10911", "orders")
    async with served(tmp_path, allowed_broker_addresses="10.1.*.*;127.0.0.1") as server:
        replies = await ask(server, register, PUT)
        assert [is_refused(reply) for reply in replies] == [False, True]


async def test_the_list_works_without_accounts(tmp_path: Path) -> None:
    register = registration("broker-a", "127.0.0.1:10911", "orders")
    async with served(tmp_path, None, allowed_broker_addresses="10.1.2.3") as server:
        replies = await ask(server, register, PUT, request(RequestCode.GET_BROKER_CLUSTER_INFO))
        assert [reply.code for reply in replies] == [ResponseCode.NO_PERMISSION, 0, 0]
        assert "allowedBrokerAddresses" in (replies[0].remark or "")
        assert b"broker-a" not in replies[2].body_bytes
    async with served(tmp_path, None, allowed_broker_addresses="127.0.0.1") as server:
        assert [reply.code for reply in await ask(server, register)] == [0]


async def test_our_broker_registers_from_its_address_and_an_operator_signs(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"access_key": "root-key", "secret_key": "root-secret"}
    async with served(tmp_path, allowed_broker_addresses="127.0.0.1", audit_log_file=tmp_path / "audit.log") as server:
        address = f"127.0.0.1:{server.port}"
        config = BrokerConfig(namesrv_addr=address, broker_name="broker-a", listen_port=0, metrics_port=-1)
        store = StoreConfig(store_path_root_dir=tmp_path / "store", mapped_file_size_commit_log=1 << 20)
        async with broker(config, store) as running:
            assert running.registered_with == 1
            async with Admin(ClientConfig((address,), **keys)) as admin:
                assert not (await admin.namesrv.wipe_write_perm("broker-a")).failed
            async with Admin(ClientConfig((address,))) as admin:
                (error,) = (await admin.namesrv.wipe_write_perm("broker-a")).failed.values()
                assert "AclException" in str(error)
    lines = [line.split(" ", 2)[2] for line in (tmp_path / "audit.log").read_text().splitlines()]
    assert [line.split()[:3] for line in lines] == [
        ["outcome=passed", "code=205", "name=WIPE_WRITE_PERM_OF_BROKER"],
        ["outcome=refused", "code=205", "name=WIPE_WRITE_PERM_OF_BROKER"],
        ["outcome=passed", "code=104", "name=UNREGISTER_BROKER"],
    ]


@pytest.mark.parametrize(("secret", "is_known"), [("root-secret", True), ("another-secret", False), (None, False)])
async def test_our_broker_registers_with_the_account_of_the_brokers(
    tmp_path: Path, secret: str | None, is_known: bool
) -> None:
    async with served(tmp_path) as server:
        inner = f'{{"accessKey":"root-key","secretKey":"{secret}"}}' if secret is not None else ""
        config = BrokerConfig(
            namesrv_addr=f"127.0.0.1:{server.port}",
            broker_name="broker-a",
            listen_port=0,
            metrics_port=-1,
            inner_client_authentication_credentials=inner,
        )
        store = StoreConfig(store_path_root_dir=tmp_path / "store", mapped_file_size_commit_log=1 << 20)
        async with broker(config, store) as running:
            assert running.registered_with == is_known
            (members,) = await ask(server, request(RequestCode.GET_BROKER_CLUSTER_INFO))
            assert (b"broker-a" in members.body_bytes) == is_known
        (members,) = await ask(server, request(RequestCode.GET_BROKER_CLUSTER_INFO))
        assert b"broker-a" not in members.body_bytes  # it unregistered, signed too


INNER = '{"accessKey":"brokers","secretKey":"inner-secret"}'
USERS: dict[str, Any] = {
    "authentication_enabled": True,
    "init_authentication_user": '{"username":"root-key","password":"root-secret"}',
    "inner_client_authentication_credentials": INNER,
}


async def test_the_users_of_its_configuration_change_what_a_name_server_knows(tmp_path: Path) -> None:
    inner = Signer("brokers", "inner-secret")
    async with served(tmp_path, None, **USERS) as server:
        register = registration("broker-a", "127.0.0.1:10911", "orders")
        refused = await ask(server, PUT, SHOP.sign(PUT), WRONG.sign(PUT), register)
        assert [(reply.code, reply.remark) for reply in refused] == [
            (ResponseCode.NO_PERMISSION, "username cannot be null."),
            (ResponseCode.NO_PERMISSION, "User:shop-key is not found."),
            (ResponseCode.NO_PERMISSION, "check signature failed."),
            (ResponseCode.NO_PERMISSION, "username cannot be null."),
        ]
        route = request(RequestCode.GET_ROUTEINFO_BY_TOPIC, ext_fields={"topic": "orders"})
        replies = await ask(server, ROOT.sign(PUT), inner.sign(register), route)
        assert [reply.code for reply in replies] == [0, 0, 0]
        (shown,) = await ask(server, ROOT.sign(request(RequestCode.GET_NAMESRV_CONFIG)))
        assert b"authenticationEnabled=true" in shown.body_bytes
        assert b"-secret" not in shown.body_bytes


def test_wrong_settings_stop_the_start_with_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"allowedBrokerAddresses: '10\.1\.2' is no address pattern"):
        load_config(None, {"allowedBrokerAddresses": Property("10.1.2")})
    file = tmp_path / "namesrv.conf"
    file.write_text("aclEnable=true\n")
    config, _ = load_config(file, {})
    assert config.acl_file == tmp_path / "plain_acl.yml"
    for settings, problem in (
        ({"aclEnable": "true", "authenticationEnabled": "true"}, "choose one of the two"),
        ({"authenticationEnabled": "true"}, "needs initAuthenticationUser, innerClientAuthenticationCredentials"),
        ({"initAuthenticationUser": "root:words"}, "initAuthenticationUser: expected"),
        ({"aclEnable": "true"}, "aclEnable=true needs aclFile"),
    ):
        with pytest.raises(ConfigError, match=problem):
            load_config(None, {key: Property(value) for key, value in settings.items()})
