"""The port for slaves, with real masters and slaves: by address, by login, and what a stranger gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from downrange.broker.app import RunningBroker
from downrange.broker.replication.login import SlaveLogin
from downrange.broker.replication.wire import REPORT
from downrange.broker.services.replication import SlaveReplication
from downrange.protocol.codes import ResponseCode
from downrange.store.config import BrokerRole
from tests.support.broker_client import client_of
from tests.support.replicas import caught_up, log_bytes, names, replica, until

SYNC, SLAVE = BrokerRole.SYNC_MASTER, BrokerRole.SLAVE
SECRET = "a secret of many characters"  # noqa: S105  for tests


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    file = tmp_path / "ha-secret"
    file.write_text(SECRET + "\n")
    file.chmod(0o600)
    return file


class Stranger:
    """A connection to the port for slaves, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def is_closed(self) -> bool:
        """Whether the master closes the connection without another byte."""
        async with asyncio.timeout(20):
            try:
                return await self.reader.read(1) == b""
            except ConnectionError:
                return True


@asynccontextmanager
async def stranger(master: RunningBroker) -> AsyncIterator[Stranger]:
    reader, writer = await asyncio.open_connection("127.0.0.1", master.config.store.ha_listen_port)
    try:
        yield Stranger(reader, writer)
    finally:
        writer.close()


async def test_a_slave_with_the_secret_follows_and_acknowledges(tmp_path: Path, secret_file: Path) -> None:
    options = {"ha_secret_file": secret_file}
    async with (
        names(tmp_path) as namesrv,
        replica(tmp_path, namesrv, SYNC, store=options) as master,
        replica(tmp_path, namesrv, SLAVE, store=options) as slave,
        client_of(master) as producer,
    ):
        await until(lambda: len(master.replication.states()) == 1)
        for number in range(20):
            await producer.send("orders", b"%d" % number)
        await caught_up(master, slave)
        assert log_bytes(slave.store) == log_bytes(master.store)


@pytest.mark.parametrize("given", ["another secret, as long", None], ids=["wrong", "none"])
async def test_a_slave_without_the_secret_gets_nothing_and_says_why(
    tmp_path: Path, secret_file: Path, given: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, object] = {}
    if given is not None:
        other = tmp_path / "other-secret"
        other.write_text(given)
        options = {"ha_secret_file": other}
    async with (
        names(tmp_path) as namesrv,
        replica(tmp_path, namesrv, SYNC, store={"ha_secret_file": secret_file}) as master,
        client_of(master) as producer,
        replica(tmp_path, namesrv, SLAVE, store=options) as slave,
    ):
        assert isinstance(slave.replication, SlaveReplication)
        follower = slave.replication.follower
        await until(lambda: follower.trouble is not None)
        assert ("another haSecretFile" if given else "its own log says why") in (follower.trouble or "")
        await producer.ask(producer.send_command("orders", b"alone"), ResponseCode.SLAVE_NOT_AVAILABLE)
        assert master.replication.states() == []
        assert slave.store.max_offset == 0
    for secret in filter(None, (SECRET, given)):
        assert secret not in caplog.text


async def test_a_stranger_neither_reads_nor_acknowledges(tmp_path: Path, secret_file: Path) -> None:
    async with (
        replica(tmp_path, None, SYNC, store={"ha_secret_file": secret_file}) as master,
        client_of(master) as producer,
    ):
        await producer.ask(producer.send_command("orders", b"secret words"), ResponseCode.SLAVE_NOT_AVAILABLE)
        end = master.store.max_offset
        async with stranger(master) as reporter:
            reporter.writer.write(REPORT.pack(end))
            assert await reporter.is_closed()
        async with stranger(master) as guesser:
            guesser.writer.write(SlaveLogin(b"a wrong secret, long", 1, b"n" * 32).greeting)
            assert len(await guesser.reader.readexactly(64)) == 64
            guesser.writer.write(b"x" * 32 + REPORT.pack(end))
            assert await guesser.is_closed()
        await producer.ask(producer.send_command("orders", b"more"), ResponseCode.SLAVE_NOT_AVAILABLE)
        assert master.replication.states() == []


async def test_silent_strangers_take_no_place_of_a_slave(tmp_path: Path, secret_file: Path) -> None:
    options = {"ha_secret_file": secret_file}
    async with replica(tmp_path, None, SYNC, store=options) as master:
        port = master.config.store.ha_listen_port
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
        address = {"ha_master_address": f"127.0.0.1:{port}"}
        async with replica(tmp_path, None, SLAVE, store={**options, **address}):
            await until(lambda: len(master.replication.states()) == 1)
        for _, writer in silent:
            writer.close()


async def test_addresses_decide_where_nobody_logs_in(tmp_path: Path) -> None:
    """So do slaves of RocketMQ, which cannot log in: this stranger speaks as they do."""

    @asynccontextmanager
    async def allowing(addresses: str) -> AsyncIterator[tuple[RunningBroker, Stranger]]:
        options = {"ha_allowed_slave_addresses": addresses}
        async with replica(tmp_path, None, SYNC, store=options) as master, stranger(master) as peer:
            yield master, peer

    async with allowing("10.1.2.3") as (_, refused):
        assert await refused.is_closed()
    async with allowing("127.0.0.1") as (master, allowed):
        allowed.writer.write(REPORT.pack(0))
        assert len(await allowed.reader.readexactly(12)) == 12
        await until(lambda: len(master.replication.states()) == 1)


async def test_an_allowed_address_needs_no_login_beside_slaves_that_log_in(tmp_path: Path, secret_file: Path) -> None:
    options = {"ha_secret_file": secret_file, "ha_allowed_slave_addresses": "127.0.0.1"}
    async with replica(tmp_path, None, SYNC, store=options) as master, stranger(master) as java:
        java.writer.write(REPORT.pack(0))
        await until(lambda: len(master.replication.states()) == 1)
        address = {"ha_master_address": f"127.0.0.1:{master.config.store.ha_listen_port}"}
        async with replica(tmp_path, None, SLAVE, store={"ha_secret_file": secret_file, **address}):
            await until(lambda: len(master.replication.states()) == 2)


async def test_a_slave_that_comes_again_replaces_its_older_connection(tmp_path: Path, secret_file: Path) -> None:
    async with (
        replica(tmp_path, None, SYNC, store={"ha_secret_file": secret_file}) as master,
        stranger(master) as older,
        stranger(master) as newer,
        stranger(master) as other,
    ):
        for peer, broker_id in ((older, 1), (other, 2), (newer, 1)):
            login = SlaveLogin(SECRET.encode(), broker_id, b"n" * 32)
            peer.writer.write(login.greeting)
            proof = login.feed(await peer.reader.readexactly(64))
            assert proof is not None
            peer.writer.write(proof + REPORT.pack(0))
            assert len(await peer.reader.readexactly(12)) == 12
        assert await older.is_closed()
        await until(lambda: len(master.replication.states()) == 2)


async def test_a_report_beyond_the_end_of_the_log_ends_its_connection(tmp_path: Path) -> None:
    async with replica(tmp_path, None, SYNC) as master, stranger(master) as false:
        false.writer.write(REPORT.pack(0))
        assert len(await false.reader.readexactly(12)) == 12
        false.writer.write(REPORT.pack(master.store.max_offset + 1))
        assert await false.is_closed()
        await until(lambda: not master.replication.states())
