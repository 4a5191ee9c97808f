"""ACL 2.0 of a running broker: users and rules by command, real clients, live connections, restarts, slaves."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from downrange.auth.account_sync import AccountSync
from downrange.auth.user_access_control import UserAccessControl
from downrange.broker.app import RunningBroker
from downrange.client.admin import Admin
from downrange.client.admin.users import (
    AclInfo,
    DeleteAclRequest,
    ListAclsRequest,
    PolicyEntryInfo,
    PolicyInfo,
    UserInfo,
)
from downrange.client.config import ClientConfig, ProducerConfig
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.push import AsyncPushConsumer
from downrange.client.errors import SendFailed
from downrange.client.producer.producer import AsyncProducer
from downrange.model.message import Message
from downrange.model.topics import TopicConfig
from downrange.namesrv.app import name_server
from downrange.namesrv.config import NamesrvConfig
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.send import SendMessageRequest
from downrange.protocol.bodies.users import UsernameRequest
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command, request
from downrange.protocol.errors import BrokerError, NoPermission
from downrange.protocol.framing import Frame, decode_frame
from downrange.protocol.sealing import SealError, seal
from downrange.protocol.signing import Signer, is_signed_with
from downrange.settings import MASK, parse_properties
from downrange.store.config import BrokerRole
from downrange.transport.connection import Connection
from downrange.transport.pool import Pool
from downrange.transport.server import Server
from downrange.transport.serving import serve_commands
from downrange.transport.signed_pool import SignedPool
from downrange.transport.tls import ClientTls
from tests.support.broker_client import standalone
from tests.support.certificates import Certificates
from tests.support.replicas import names, replica, until
from tests.support.user_requests import INNER, ROOT, SECRETS, UserDesk

ACCESS = {
    "authentication_enabled": True,
    "authorization_enabled": True,
    "init_authentication_user": ROOT,
    "inner_client_authentication_credentials": INNER,
}
TOPIC = "orders"


def account(running: RunningBroker, name: str, secret: str | None = None) -> ClientConfig:
    (namesrv,) = running.config.broker.namesrv_addresses
    return ClientConfig((namesrv,), access_key=name, secret_key=secret or SECRETS.get(name, f"{name}Secret"))


def rules(name: str, *entries: tuple[str, str], decision: str = "Allow") -> AclInfo:
    found = tuple(
        PolicyEntryInfo(resource=resource, actions=tuple(actions.split(",")), decision=decision)
        for resource, actions in entries
    )
    return AclInfo(subject=f"User:{name}", policies=(PolicyInfo(entries=found),))


async def make(admin: Admin, name: str, *entries: tuple[str, str]) -> None:
    """A user with the password `{name}Secret` and these rules."""
    (await admin.users.create(UserInfo(username=name, password=f"{name}Secret"))).raise_if_none()
    if entries:
        (await admin.acls.put(rules(name, *entries))).raise_if_none()


@asynccontextmanager
async def guarded(root: Path, **more: object) -> AsyncIterator[tuple[RunningBroker, Admin]]:
    """A name server, a broker with ACL 2.0 and the topic, and the first user at its desk."""
    async with standalone(root, broker_options={**ACCESS, **more}) as running, Admin(account(running, "root")) as admin:
        (await admin.topics.create(TopicConfig(TOPIC, 2, 2))).raise_if_none()
        yield running, admin


async def send(config: ClientConfig, topic: str = TOPIC) -> None:
    async with AsyncProducer("shop", config, ProducerConfig(retry_times_when_send_failed=0)) as producer:
        await producer.send(Message(topic, b"signed"))


async def test_clients_with_an_account_notice_nothing_and_others_get_nowhere(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (running, admin):
        await make(admin, "shop", (f"Topic:{TOPIC}", "Pub"))
        await make(admin, "billing", (f"Topic:{TOPIC}", "Sub"), ("Group:billing", "Sub"))
        received: list[bytes] = []

        async def listen(message: ReceivedMessage) -> None:
            received.append(bytes(message.body))

        async with AsyncPushConsumer("billing", account(running, "billing"), on_message=listen) as consumer:
            await consumer.subscribe(TOPIC)
            for _ in range(3):
                await send(account(running, "shop"))
            await until(lambda: len(received) == 3)
        end = running.store.max_offset
        for config in (
            account(running, "billing"),
            account(running, "shop", "wrong"),
            account(running, "nosuch"),
            ClientConfig(running.config.broker.namesrv_addresses),
        ):
            with pytest.raises(SendFailed):
                await send(config)
        with pytest.raises(SendFailed):
            await send(account(running, "shop"), "RMQ_SYS_TRACE_TOPIC")
        assert running.store.max_offset == end


async def test_a_change_bites_on_live_connections(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (running, admin):
        await make(admin, "shop", (f"Topic:{TOPIC}", "Pub"))
        pool, signer, address = Pool(), Signer("shop", "shopSecret"), running.config.broker.address
        header = SendMessageRequest(producer_group="g", topic=TOPIC, queue_id=0, born_timestamp=1)

        async def answer() -> tuple[int, str]:
            """The answer to a signed send, always over one connection."""
            command = signer.sign(request(RequestCode.SEND_MESSAGE_V2, header, body=b"x"))
            reply = await pool.request(address, command, 5)
            return reply.code, (reply.remark or "").rpartition(", ")[2]

        assert await answer() == (0, "")
        assert await answer() == (0, "")  # by the quick way, which remembers the decision
        steps = [
            (admin.acls.put(rules("shop", ("Topic:ord*", "All"))), 0, ""),
            (admin.acls.put(rules("shop", (f"Topic:{TOPIC}", "Pub"), decision="Deny")), 16, "the decision is deny."),
            (admin.acls.put(rules("shop", (f"Topic:{TOPIC}", "Pub"))), 0, ""),
            (admin.users.update(UserInfo(username="shop", user_status="disable")), 16, "User:shop is disabled."),
            (admin.users.update(UserInfo(username="shop", user_status="enable")), 0, ""),
            (admin.users.update(UserInfo(username="shop", password="another")), 16, "check signature failed."),  # noqa: S106
            (admin.users.update(UserInfo(username="shop", password="shopSecret")), 0, ""),  # noqa: S106
            (admin.acls.delete(DeleteAclRequest(subject="User:shop")), 16, "no matched policies."),
            (admin.users.update(UserInfo(username="shop", user_type="Super")), 0, ""),
            (admin.users.delete("shop"), 16, "User:shop is not found."),
        ]
        connection = pool.connected(address)
        for change, code, remark in steps:
            (await change).raise_if_none()
            assert await answer() == (code, remark)
        assert pool.connected(address) is connection
        await pool.close()


async def test_a_oneway_request_without_a_right_has_no_effect(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (running, admin):
        await make(admin, "nobody")
        end = running.store.max_offset
        pool, address = Pool(), running.config.broker.address
        header = SendMessageRequest(producer_group="g", topic=TOPIC, queue_id=0, born_timestamp=1)
        create = request(RequestCode.AUTH_DELETE_USER, ext_fields={"username": "root"}, oneway=True)
        for command in (request(RequestCode.SEND_MESSAGE_V2, header, body=b"x", oneway=True), create):
            await pool.oneway(address, command)
            await pool.oneway(address, Signer("nobody", "nobodySecret").sign(command))
        # An answer to a later request on the connection: the others were looked at before it.
        reply = await pool.request(address, Signer("nobody", "nobodySecret").sign(request(26)), 5)
        assert reply.code == ResponseCode.NO_PERMISSION
        assert running.store.max_offset == end
        assert {user.username for user in await listed(admin)} >= {"root", "nobody"}
        await pool.close()


async def listed(admin: Admin) -> tuple[UserInfo, ...]:
    (users,) = (await admin.users.list()).done.values()
    return users


async def test_users_and_rules_are_administered_from_afar(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (_, admin):
        await make(admin, "shop", (f"Topic:{TOPIC}", "Pub"), ("Group:g", "Sub"))
        assert {user.username: user.user_type for user in await listed(admin)} == {
            "brokers": "Super",
            "root": "Super",
            "shop": "Normal",
        }
        assert all(user.password is None for user in await listed(admin))
        (shop,) = (await admin.users.get("shop")).done.values()
        assert shop == UserInfo(username="shop", user_type="Normal", user_status="enable")
        assert list((await admin.users.get("nosuch")).done.values()) == [None]
        (filtered,) = (await admin.users.list("sho")).done.values()
        assert [user.username for user in filtered] == ["shop"]
        (acl,) = (await admin.acls.get("User:shop")).done.values()
        assert acl is not None
        assert [entry.resource for policy in acl.policies for entry in policy.entries] == [f"Topic:{TOPIC}", "Group:g"]
        (acls,) = (await admin.acls.list(ListAclsRequest(resource_filter="Group"))).done.values()
        assert [entry.resource for one in acls for policy in one.policies for entry in policy.entries] == ["Group:g"]
        (failed,) = (await admin.users.create(UserInfo(username="shop", password="x"))).failed.values()  # noqa: S106
        assert "The user is existed" in str(failed)


async def test_a_user_with_the_right_of_the_cluster_administers_all_but_super_users(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (running, root):
        await make(root, "ops", ("Cluster:DefaultCluster", "Get,Update"))
        await make(root, "other", ("Cluster:AnotherCluster", "Get,Update"), ("Topic:*", "All"), ("Group:*", "All"))
        async with Admin(account(running, "ops")) as ops, Admin(account(running, "other")) as other:
            await make(ops, "shop", (f"Topic:{TOPIC}", "Pub"))
            (error,) = (await ops.users.delete("root")).failed.values()
            assert "The super user can only be delete by super user" in str(error)
            (error,) = (await other.users.list()).failed.values()
            assert isinstance(error, NoPermission)
            assert "no permission to access Cluster:DefaultCluster" in str(error)


async def test_the_configuration_shows_no_secret_and_opens_no_door(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (running, _):
        pool, address = Pool(), running.config.broker.address
        root = Signer("root", "rootSecret")
        reply = await pool.request(address, root.sign(request(RequestCode.GET_BROKER_CONFIG)), 5)
        shown = {key: given.value for key, given in parse_properties(reply.body_bytes.decode()).items()}
        assert shown["initAuthenticationUser"] == shown["innerClientAuthenticationCredentials"] == MASK
        assert b"Secret" not in reply.body_bytes
        before = shown
        for line in (
            "authenticationEnabled=false",
            "authorizationEnabled=false",
            "authenticationWhitelist=310",
            'initAuthenticationUser={"username":"eve","password":"x"}',
            "authenticationProvider=x",
            "migrateAuthFromV1Enabled=true",
        ):
            body = f"brokerPermission=4\n{line}\n".encode()
            reply = await pool.request(address, root.sign(request(RequestCode.UPDATE_BROKER_CONFIG, body=body)), 5)
            assert reply.code == ResponseCode.NO_PERMISSION, line
        reply = await pool.request(address, root.sign(request(RequestCode.GET_BROKER_CONFIG)), 5)
        assert {key: given.value for key, given in parse_properties(reply.body_bytes.decode()).items()} == before
        await pool.close()


async def test_users_survive_a_restart(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (running, admin):
        await make(admin, "shop", (f"Topic:{TOPIC}", "Pub"))
        (await admin.users.update(UserInfo(username="root", password="changed"))).raise_if_none()  # noqa: S106
    async with standalone(tmp_path, broker_options=ACCESS) as running:
        await send(account(running, "shop"))
        async with Admin(account(running, "root")) as old, Admin(account(running, "root", "changed")) as new:
            assert not (await old.users.list()).done
            assert (await new.users.list()).done


async def test_without_authorization_a_signature_is_enough(tmp_path: Path) -> None:
    async with guarded(tmp_path, authorization_enabled=False) as (running, admin):
        await make(admin, "shop")
        await send(account(running, "shop"))
        with pytest.raises(SendFailed):
            await send(account(running, "shop", "wrong"))
        async with Admin(account(running, "shop")) as shop:
            assert not (await shop.users.list()).done


async def test_requests_on_a_white_list_pass_without_signature(tmp_path: Path) -> None:
    async with guarded(tmp_path, authentication_whitelist="30", authorization_whitelist="30") as (running, _):
        pool, address = Pool(), running.config.broker.address
        fields = {"topic": TOPIC, "queueId": "0"}
        assert (await pool.request(address, request(30, ext_fields=fields), 5)).code == 0
        assert (await pool.request(address, request(31, ext_fields=fields), 5)).code == ResponseCode.NO_PERMISSION
        await pool.close()


# --- slaves ---------------------------------------------------------------------------------------------------------


def accounts_of(running: RunningBroker) -> UserAccessControl:
    assert running.access.users is not None
    return running.access.users


@asynccontextmanager
async def pair(root: Path, **slave_settings: object) -> AsyncIterator[tuple[RunningBroker, RunningBroker, Admin]]:
    async with (
        names(root) as namesrv,
        replica(root, namesrv, BrokerRole.ASYNC_MASTER, settings=ACCESS) as master,
        Admin(account(master, "root")) as admin,
        replica(root, namesrv, BrokerRole.SLAVE, settings={**ACCESS, **slave_settings}) as slave,
    ):
        yield master, slave, admin


async def test_a_slave_has_the_users_of_its_master_after_a_failover(tmp_path: Path) -> None:
    async with names(tmp_path) as namesrv:
        async with replica(tmp_path, namesrv, BrokerRole.SLAVE, settings=ACCESS) as slave:
            async with (
                replica(tmp_path, namesrv, BrokerRole.ASYNC_MASTER, settings=ACCESS) as master,
                Admin(account(master, "root")) as admin,
            ):
                await make(admin, "shop", (f"Topic:{TOPIC}", "Get,Pub"))
                (await admin.users.update(UserInfo(username="root", password="changed"))).raise_if_none()  # noqa: S106
                theirs = accounts_of(master).accounts
                await until(lambda: accounts_of(slave).accounts.users == theirs.users, 30)
                await until(lambda: accounts_of(slave).accounts.acls == theirs.acls, 30)
            # The master is gone. Its users sign on here, with the passwords they have now.
            pool = Pool()
            fields = {"topic": TOPIC, "queueId": "0"}
            ask = request(RequestCode.GET_MAX_OFFSET, ext_fields=fields)
            for signer, code in (
                (Signer("shop", "shopSecret"), ResponseCode.SUCCESS),
                (Signer("root", "changed"), ResponseCode.SUCCESS),
                (Signer("root", "rootSecret"), ResponseCode.NO_PERMISSION),
            ):
                reply = await pool.request(slave.config.broker.address, signer.sign(ask), 5)
                assert reply.code == code, f"{signer}: {reply.remark}"
            delete = request(RequestCode.AUTH_DELETE_USER, ext_fields={"username": "shop"})
            reply = await pool.request(slave.config.broker.address, Signer("root", "changed").sign(delete), 5)
            assert "please execute it from master" in (reply.remark or "")
            await pool.close()
        # The slave's own file has them, too.
        saved = json.loads((tmp_path / "store-1" / "config" / "auth.json").read_text())
        assert [user["username"] for user in saved["users"]] == ["brokers", "root", "shop"]


async def test_a_slave_with_another_secret_learns_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    other = '{"accessKey":"brokers","secretKey":"anotherSecret"}'
    async with pair(tmp_path, inner_client_authentication_credentials=other) as (_, slave, admin):
        await make(admin, "shop")
        await until(lambda: "cannot copy tables" in caplog.text)
        assert "check signature failed" in caplog.text
        assert "shop" not in accounts_of(slave).accounts.users
        assert "Secret" not in caplog.text


async def test_a_forged_master_cannot_give_a_slave_users(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A server in the master's place that accepts every signature, but does not know the secret."""
    table = b'{"users":[{"username":"eve","password":"x","userType":"Super"}],"acls":[]}'
    answers = [b"", table, b"[" + table + b"]", b"x" * 100]

    def answer(command: Command, origin: Connection) -> Command:
        challenge = command.ext_fields["challenge"]
        forged = seal(table, b"a guess", challenge, bytes(16))
        return command.reply(body=[*answers, forged][attempt])

    desk = UserDesk(tmp_path, BrokerRole.SLAVE)
    assert desk.access is not None
    before = desk.access.generation
    server = Server(serve_commands(answer), "127.0.0.1", 0)
    await server.start()
    pool = Pool()
    sync = AccountSync(desk.access, pool.request)
    for attempt in range(len(answers) + 1):  # noqa: B007  `answer` reads it
        with pytest.raises(SealError):
            await sync.copy(f"127.0.0.1:{server.port}")
    assert desk.access.generation == before
    await pool.close()
    await server.stop()


async def test_a_recorded_answer_cannot_bring_back_a_user(tmp_path: Path) -> None:
    master, slave = UserDesk(tmp_path / "m"), UserDesk(tmp_path / "s", BrokerRole.SLAVE)
    assert slave.access is not None
    assert master.ask(3001, {"username": "shop"}, b'{"password":"x"}').code == 0
    recorded: list[Command] = []

    def answer(command: Command, origin: Connection) -> Command:
        if recorded:
            return command.reply(body=recorded[0].body_bytes)
        recorded.append(master.answer(command))
        return recorded[0]

    server = Server(serve_commands(answer), "127.0.0.1", 0)
    await server.start()
    pool = SignedPool(Signer("brokers", "innerSecret"))
    sync = AccountSync(slave.access, pool.request)
    address = f"127.0.0.1:{server.port}"
    await sync.copy(address)
    assert "shop" in slave.access.accounts.users
    slave.access.accounts.delete_user("shop")
    with pytest.raises(SealError):
        await sync.copy(address)
    assert "shop" not in slave.access.accounts.users
    await pool.close()
    await server.stop()


async def test_users_and_rules_are_copied_between_brokers(tmp_path: Path) -> None:
    async with (
        guarded(tmp_path / "a") as (here, admin),
        standalone(tmp_path / "b", broker_options=ACCESS) as there,
    ):
        await make(admin, "shop", (f"Topic:{TOPIC}", "Pub"))
        await make(admin, "billing")
        source, target = here.config.broker.address, there.config.broker.address
        with pytest.raises(BrokerError, match="passwords are for the account of innerClientAuthenticationCredentials"):
            await admin.users.copy(source, target)
        async with Admin(account(here, "brokers")) as brokers:
            assert await brokers.users.copy(source, target, ["shop"]) == ("shop",)
            assert await brokers.acls.copy(source, target) == ("User:shop",)
            assert await brokers.users.copy(source, target, ["shop", "billing"]) == ("shop", "billing")
        ours, theirs = accounts_of(here).accounts, accounts_of(there).accounts
        assert theirs.users["shop"] == ours.users["shop"]
        assert theirs.acls == ours.acls


async def test_a_proxy_of_rocketmq_gets_the_password_of_a_user_over_tls(tmp_path: Path) -> None:
    certificates = Certificates.make(tmp_path / "tls")
    tls = ClientTls(certificates.client_config())
    asked = request(RequestCode.AUTH_GET_USER, UsernameRequest("root"))
    found = []
    async with guarded(tmp_path, tls=certificates.server_config()) as (running, _):
        for name, secret in (("brokers", "innerSecret"), ("root", SECRETS["root"])):
            for way in (tls, None):
                pool = SignedPool(Signer(name, secret), way)
                reply = await pool.request(running.config.broker.address, asked, 20)
                found.append(decode_body(UserInfo, reply.body_bytes).password)
                await pool.close()
    assert found == [SECRETS["root"], None, None, None]


async def test_a_broker_signs_its_own_requests(tmp_path: Path) -> None:
    """Registration with a name server that looks at signatures."""
    config = NamesrvConfig(listen_port=0, kv_config_path=tmp_path / "kv", config_store_path=tmp_path / "ns")
    async with name_server(config) as namesrv:
        serve = namesrv.serve
        seen: dict[int, list[bool]] = {}

        def look(frames: list[Frame], origins: list[Connection]) -> None:
            for frame in frames:
                command = decode_frame(frame)
                seen.setdefault(command.code, []).append(is_signed_with(command, b"innerSecret"))
            serve(frames, origins)

        namesrv.serve = look
        async with replica(tmp_path, f"127.0.0.1:{namesrv.port}", BrokerRole.ASYNC_MASTER, settings=ACCESS):
            await until(lambda: RequestCode.REGISTER_BROKER in seen)
    assert RequestCode.UNREGISTER_BROKER in seen
    assert all(all(signed) for signed in seen.values())
