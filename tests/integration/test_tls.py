"""A whole cluster with TLS: its ports, all clients, replication, certificates that change under load."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from downrange.broker.app import RunningBroker, load_config
from downrange.broker.services.replication import SlaveReplication
from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.lite_pull import AsyncLitePullConsumer
from downrange.client.consumer.lite_pull_config import LitePullConfig
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.push import AsyncPushConsumer
from downrange.client.errors import NoNameServer
from downrange.client.producer.blocking.producer import Producer
from downrange.client.producer.producer import AsyncProducer
from downrange.client.producer.send_result import SendStatus
from downrange.load import SendPlan, find_target, send_load
from downrange.model.message import Message
from downrange.namesrv.app import load_config as load_namesrv_config
from downrange.namesrv.app import name_server
from downrange.namesrv.config import NamesrvConfig
from downrange.protocol.bodies.groups import ConsumeFromWhere
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request
from downrange.settings import ConfigError
from downrange.store.config import BrokerRole
from downrange.transport.certificates import make_client
from downrange.transport.errors import TransportError
from downrange.transport.pool import connect
from downrange.transport.tls import ClientTls
from downrange.transport.tls_config import ClientAuth, TlsConfig, TlsMode, resolved
from tests.support.broker_client import BrokerClient, standalone
from tests.support.certificates import Certificates
from tests.support.processes import DOWNRANGE
from tests.support.replicas import caught_up, log_bytes, names, replica, until
from tests.support.standalone_process import standalone_process

FIRST = ConsumeFromWhere.FIRST_OFFSET


@pytest.fixture
def files(tmp_path: Path) -> Certificates:
    return Certificates.make(tmp_path / "tls")


@asynccontextmanager
async def secured(root: Path, files: Certificates, need: ClientAuth = ClientAuth.NONE) -> AsyncIterator[RunningBroker]:
    """Name server and broker that take TLS only."""
    async with standalone(root, tls=files.server_config(TlsMode.ENFORCING, need)) as running:
        assert running.registered_with == 1, "the broker itself connects with TLS"
        yield running


def client_of(running: RunningBroker, files: Certificates) -> ClientConfig:
    namesrv = str(running.config.broker.namesrv_addr)
    return ClientConfig((namesrv,), use_tls=True, tls=files.client_config(shows_certificate=True))


# --- ports and modes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "takes_tls", "takes_plain"),
    [(TlsMode.DISABLED, False, True), (TlsMode.PERMISSIVE, True, True), (TlsMode.ENFORCING, True, False)],
)
async def test_every_port_obeys_the_mode(
    files: Certificates, tmp_path: Path, mode: TlsMode, takes_tls: bool, takes_plain: bool
) -> None:
    async with standalone(tmp_path, tls=files.server_config(mode)) as running:
        broker = running.config.broker
        vip = f"127.0.0.1:{broker.listen_port - 2}"
        for address in (broker.address, vip, str(broker.namesrv_addr)):
            for tls, is_taken in ((ClientTls(files.client_config()), takes_tls), (None, takes_plain)):
                if is_taken:
                    assert await answers(address, tls)
                else:
                    with pytest.raises(TransportError):
                        await answers(address, tls)
        ha = running.config.ha_address
        for is_tls, is_taken in ((True, takes_tls), (False, takes_plain)):
            assert await takes_slave(ha, files if is_tls else None) is is_taken


async def answers(address: str, tls: ClientTls | None) -> bool:
    connection = await connect(address, tls=tls)
    try:
        reply = await connection.request(request(RequestCode.GET_BROKER_CLUSTER_INFO), 10)
        return reply.code in (0, 3)  # a broker does not know this code, but says so
    finally:
        connection.close()
        await connection.wait_closed()


async def takes_slave(address: str, files: Certificates | None) -> bool:
    """Report an empty log as a slave, and see whether a heartbeat comes."""
    context = None if files is None else ssl.create_default_context(cafile=str(files.ca))
    host, _, port = address.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    except OSError:
        return False
    writer.write(bytes(8))
    try:
        async with asyncio.timeout(20):
            return len(await reader.read(12)) == 12
    except OSError:
        return False
    finally:
        writer.transport.abort()


async def test_a_server_without_a_usable_certificate_does_not_start(files: Certificates, tmp_path: Path) -> None:
    files.server[1].write_text("no key")
    for mode in (TlsMode.PERMISSIVE, TlsMode.ENFORCING):
        with pytest.raises(ConfigError, match=r"tls\.server\.certPath=.*: not a certificate and its key"):
            async with standalone(tmp_path, tls=files.server_config(mode)):
                pass
        config = NamesrvConfig(listen_port=0, kv_config_path=tmp_path / "kv.json", tls=TlsConfig(server_mode=mode))
        with pytest.raises(ConfigError, match=r"tls\.server\.certPath is missing"):
            async with name_server(config):
                pass


def test_keys_of_configuration_files(files: Certificates, tmp_path: Path) -> None:
    cert, key = files.server
    extra = tmp_path / "tls.properties"
    extra.write_text(f"tls.server.certPath={cert}\ntls.server.keyPath={key}\n")
    conf = tmp_path / "broker.conf"
    conf.write_text(f"tls.server.mode=permissive\ntls.config.file={extra}\ntls.server.keyPassword=hush\nuseTLS=true\n")
    conf.chmod(0o644)
    assert load_config(conf, {})[2] == [f"others can read tls.server.keyPassword in {conf}: chmod 600 {conf}"]
    conf.chmod(0o600)
    config, _, warnings = load_config(conf, {})
    assert not warnings
    assert config.tls.server_mode is TlsMode.PERMISSIVE
    assert config.tls.enable is True
    assert resolved(config.tls).server_cert_path == cert
    assert "hush" not in repr(config)
    names, warnings = load_namesrv_config(conf, {})
    assert (names.tls, warnings) == (config.tls, [])
    conf.write_text("tls.server.mode=strict\n")
    with pytest.raises(ConfigError, match=r"tls\.server\.mode=strict: expected disabled or permissive or enforcing"):
        load_config(conf, {})


# --- clients ------------------------------------------------------------------------------------------------------


async def test_producers_and_consumers_of_all_kinds(files: Certificates, tmp_path: Path) -> None:
    async with secured(tmp_path, files, ClientAuth.REQUIRE) as running:
        config = client_of(running, files)
        got: list[bytes] = []

        def receive(message: ReceivedMessage) -> None:
            got.append(message.body)

        pushed = ConsumerConfig(consume_from_where=FIRST)
        pulled = LitePullConfig(consume_from_where=FIRST)
        async with AsyncProducer("producers", config) as producer:
            for number in range(20):
                result = await producer.send(Message("orders", b"%d" % number))
                assert result.status is SendStatus.SEND_OK
            await producer.send(Message("orders", bytes(100_000)))
            async with AsyncPushConsumer("pushed", config, pushed, on_message=receive) as push:
                await push.subscribe("orders")
                async with AsyncLitePullConsumer("pulled", config, pulled) as lite:
                    await lite.subscribe("orders")
                    polled: list[bytes] = []
                    async with asyncio.timeout(60):
                        while len(polled) < 21:
                            polled += [message.body for message in await lite.poll(0.5)]
                await until(lambda: len(got) == 21, 60)
        assert sorted(got) == sorted(polled)
        async with Admin(config) as admin:
            assert "orders" in await admin.topics.names()


async def test_the_blocking_producer_keeps_its_own_connections(files: Certificates, tmp_path: Path) -> None:
    async with secured(tmp_path, files, ClientAuth.REQUIRE) as running:
        config = client_of(running, files)
        threads = 4

        def work() -> tuple[int, list[str]]:
            with Producer("producers", config) as producer:
                producer.send(Message("orders", b"first"))

                def send() -> None:
                    bodies = [*(b"%d" % number for number in range(200)), bytes(200_000)]
                    done.extend(producer.send(Message("orders", body)).status for body in bodies)

                done: list[SendStatus] = []
                senders = [threading.Thread(target=send) for _ in range(threads)]
                for sender in senders:
                    sender.start()
                for sender in senders:
                    sender.join(60)
                assert done == [SendStatus.SEND_OK] * (threads * 201)
                assert producer._direct is not None
                opened = producer._direct._connections
                return len(opened), [type(each._connection._socket).__name__ for each in opened.values()]

        count, kinds = await asyncio.to_thread(work)
        assert count >= 1
        assert set(kinds) == {"SSLSocket"}


async def test_a_client_never_goes_on_without_tls(files: Certificates, tmp_path: Path) -> None:
    async with standalone(tmp_path) as running:  # plain
        config = client_of(running, files)
        async with AsyncProducer("producers", config) as producer:
            with pytest.raises(NoNameServer, match="during the TLS handshake"):
                await producer.send(Message("orders", b"secret"))
        assert running.store.max_offset == 0
    missing = replace(config, tls=TlsConfig(client_trust_cert_path=tmp_path / "missing.pem"))
    with pytest.raises(ConfigError, match=r"tls\.client\.trustCertPath=.*missing\.pem: no such file"):
        Producer("producers", missing)


async def test_a_client_is_kept_out_by_its_certificate(files: Certificates, tmp_path: Path) -> None:
    async with secured(tmp_path, files, ClientAuth.REQUIRE) as running:
        config = client_of(running, files)
        strangers = Certificates.make(tmp_path / "strangers")
        for cert, key in ((None, None), strangers.client):
            tls = TlsConfig(client_trust_cert_path=files.ca, client_cert_path=cert, client_key_path=key)
            async with Admin(replace(config, use_tls=True, tls=tls)) as admin:
                with pytest.raises(NoNameServer):
                    await admin.topics.names()


# --- replication --------------------------------------------------------------------------------------------------


async def test_a_slave_follows_over_tls(files: Certificates, tmp_path: Path) -> None:
    tls = files.server_config(TlsMode.ENFORCING, ClientAuth.REQUIRE)
    settings = {"tls": tls}
    async with (
        names(tmp_path, tls) as namesrv,
        replica(tmp_path, namesrv, BrokerRole.SYNC_MASTER, settings=settings) as master,
        replica(tmp_path, namesrv, BrokerRole.SLAVE, settings=settings) as slave,
    ):
        await until(lambda: len(master.replication.states()) == 1)
        trusted = ClientTls(files.client_config(shows_certificate=True))
        producer = BrokerClient(await connect(master.config.broker.address, tls=trusted), "client@1")
        for number in range(200):
            await producer.send("orders", b"%d" % number * 500)
        assert slave.store.max_offset == master.store.max_offset, "each send waited for the slave"
        await producer.connection.drain(1)
        await caught_up(master, slave)
        assert log_bytes(slave.store) == log_bytes(master.store)


async def test_a_plain_slave_is_turned_away_by_an_enforcing_master(files: Certificates, tmp_path: Path) -> None:
    enforcing = {"tls": files.server_config(TlsMode.ENFORCING, enable=False)}
    async with replica(tmp_path, None, BrokerRole.ASYNC_MASTER, settings=enforcing) as master:
        store = {"ha_master_address": master.config.ha_address}
        async with replica(tmp_path, None, BrokerRole.SLAVE, store=store) as slave:
            assert isinstance(slave.replication, SlaveReplication)
            follower = slave.replication.follower
            await until(lambda: follower.trouble is not None)
            assert follower.master is None
            assert not master.replication.states()


# --- certificates that change under load --------------------------------------------------------------------------


async def test_renewing_certificates_under_load_loses_no_message(files: Certificates, tmp_path: Path) -> None:
    async with secured(tmp_path, files, ClientAuth.REQUIRE) as running:
        config = client_of(running, files)
        sent: list[bytes] = []
        is_renewed = asyncio.Event()

        async def produce(number: int) -> None:
            """Clients that come and go, so that every certificate is used."""
            round_number = 0
            while not is_renewed.is_set():
                round_number += 1
                async with AsyncProducer(f"producers{number}", config) as producer:
                    for part in range(20):
                        body = b"%d/%d/%d" % (number, round_number, part)
                        result = await producer.send(Message("orders", body))
                        assert result.status is SendStatus.SEND_OK
                        sent.append(body)

        producers = [asyncio.create_task(produce(number)) for number in range(3)]
        for _ in range(5):
            enough = len(sent) + 100
            files.renew()
            files.write_client(make_client(files.authority, "renewed"))
            async with asyncio.timeout(60):
                while len(sent) < enough:
                    await asyncio.sleep(0.01)
        is_renewed.set()
        await asyncio.gather(*producers)
        got: set[bytes] = set()
        async with AsyncLitePullConsumer("pulled", config, LitePullConfig(consume_from_where=FIRST)) as lite:
            await lite.subscribe("orders")
            async with asyncio.timeout(60):
                while len(got) < len(sent):
                    got |= {message.body for message in await lite.poll(0.5)}
        assert got == set(sent)


# --- command line, load -------------------------------------------------------------------------------------------


def test_the_command_line(tmp_path: Path) -> None:
    def downrange(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*DOWNRANGE, *arguments], capture_output=True, text=True, timeout=60, env={**os.environ, **more}
        )

    made = downrange("tls", "init", str(tmp_path / "tls"))
    assert made.returncode == 0, made.stderr
    for name in ("ca.key", "server.key", "client.key"):
        assert (tmp_path / "tls" / name).stat().st_mode & 0o777 == 0o600
    again = downrange("tls", "init", str(tmp_path / "tls"))
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    settings = {"tls.server.mode": "enforcing", "tls.config.file": tmp_path / "tls" / "server.properties"}
    client = str(tmp_path / "tls" / "client.properties")
    with standalone_process(tmp_path, settings) as running:
        sent = downrange("--tls-config", client, "message", "send", "hello", "over TLS", "-n", running.namesrv)
        assert "SEND_OK" in sent.stdout, sent.stderr
        listed = downrange("topic", "list", "-n", running.namesrv, ROCKETMQ_TLS_CONFIG_FILE=client)
        assert "hello" in listed.stdout.split(), listed.stderr
        by_alias = downrange("--tls-config", client, "mqadmin", "topicList", "-n", running.namesrv)
        assert "hello" in by_alias.stdout.split(), by_alias.stderr
        loaded = downrange(
            "--tls-config", client, "bench", "send", "-n", running.namesrv, "--seconds", "0.2", "--warm-up", "0"
        )
        assert "messages/s" in loaded.stdout, loaded.stderr
        for options, words in (((), "it may take TLS only"), (("--tls",), "certificate is refused")):
            refused = downrange(*options, "topic", "list", "-n", running.namesrv)
            assert (refused.returncode, refused.stderr.count("\n")) == (1, 1), refused.stderr
            assert words in refused.stderr


def test_without_cryptography_certificates_are_an_error_of_one_line(tmp_path: Path) -> None:
    code = "import sys; sys.modules['cryptography'] = None; from downrange.cli.main import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", code, "tls", "init", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert ended.stderr == "downrange: the package cryptography is missing: pip install 'downrange[tls]'\n"


@pytest.mark.parametrize(("connections", "outstanding"), [(1, 1), (1, 16), (4, 4)])
def test_the_load_generator(files: Certificates, tmp_path: Path, connections: int, outstanding: int) -> None:
    cert, key = files.server
    settings = {"tls.server.mode": "permissive", "tls.server.certPath": cert, "tls.server.keyPath": key}
    with standalone_process(tmp_path, settings) as running:
        config = ClientConfig((running.namesrv,), use_tls=True, tls=files.client_config())
        target = asyncio.run(find_target(topic="load", queues=4, config=config))
        report = send_load(target, SendPlan(0.3, 0, connections=connections, outstanding=outstanding))
        assert report.messages > 0
        assert not report.refused
