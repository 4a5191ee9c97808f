"""A bad network between a SYNC_MASTER and its slave: what senders are told, and that both logs end the same."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from downrange.broker.app import RunningBroker
from downrange.protocol.codes import ResponseCode
from downrange.store.config import BrokerRole
from tests.support.broker_client import BrokerClient, client_of
from tests.support.fault_proxy import FaultProxy
from tests.support.replicas import caught_up, log_bytes, names, replica, until

OK = int(ResponseCode.SUCCESS)
LATE = int(ResponseCode.FLUSH_SLAVE_TIMEOUT)
ALONE = int(ResponseCode.SLAVE_NOT_AVAILABLE)
# Short, so that a fault shows soon, but not so short that a busy machine is one; in the proportions of the defaults.
TIMES = {"slave_timeout": 800, "ha_send_heartbeat_interval": 800, "ha_housekeeping_interval": 3200}


class Apart(NamedTuple):
    """A master and a slave that meet in a proxy, and somebody who sends."""

    master: RunningBroker
    slave: RunningBroker
    proxy: FaultProxy
    client: BrokerClient

    async def send(self, body: bytes = b"x" * 1000) -> int:
        """The code of the reply."""
        return (await self.client.connection.request(self.client.send_command("orders", body), 10)).code

    async def until_answered(self, code: int) -> None:
        async with asyncio.timeout(20):
            while await self.send() != code:
                await asyncio.sleep(0.02)

    async def assert_healed(self) -> None:
        await self.until_answered(OK)
        await caught_up(self.master, self.slave)
        assert log_bytes(self.slave.store) == log_bytes(self.master.store)
        await until(lambda: self.slave.store.max_offset_of("orders", 0) == self.master.store.max_offset_of("orders", 0))


@pytest.fixture
async def apart(tmp_path: Path) -> AsyncIterator[Apart]:
    async with meeting_in_a_proxy(tmp_path) as found:
        yield found


@asynccontextmanager
async def meeting_in_a_proxy(root: Path) -> AsyncIterator[Apart]:
    async with (
        names(root) as namesrv,
        replica(root, namesrv, BrokerRole.SYNC_MASTER, store=TIMES) as master,
        FaultProxy(("127.0.0.1", master.config.ha_port)) as proxy,
        client_of(master) as client,
    ):
        settings = {**TIMES, "ha_master_address": f"127.0.0.1:{proxy.port}"}
        async with replica(root, namesrv, BrokerRole.SLAVE, store=settings) as slave:
            await until(lambda: len(master.replication.states()) == 1)
            found = Apart(master, slave, proxy, client)
            assert await found.send() == OK
            yield found
            proxy.thaw()


async def test_a_cut_connection_is_made_again(apart: Apart) -> None:
    codes: Counter[int] = Counter()
    for number in range(60):
        if number % 20 == 10:
            apart.proxy.cut()
        codes[await apart.send()] += 1
    assert codes[OK] > 0
    assert codes.keys() <= {OK, LATE, ALONE}
    await apart.assert_healed()


async def test_without_a_way_to_the_master_senders_are_told_that_there_is_no_slave(apart: Apart) -> None:
    await apart.proxy.refuse()
    apart.proxy.cut()
    await apart.until_answered(ALONE)
    assert {await apart.send() for _ in range(10)} == {ALONE}
    await apart.proxy.accept()
    await apart.assert_healed()


FREEZES: dict[str, Callable[[FaultProxy], None]] = {
    "both ways": FaultProxy.freeze,
    "the log": lambda proxy: proxy.to_client.freeze(),
    "the reports": lambda proxy: proxy.to_server.freeze(),
}


@pytest.mark.parametrize("way", FREEZES)
async def test_a_frozen_connection_makes_senders_time_out(apart: Apart, way: str) -> None:
    FREEZES[way](apart.proxy)
    end = apart.master.store.max_offset
    assert await apart.send() == LATE
    assert (apart.slave.store.max_offset > end) == (way == "the reports")
    if way != "the log":  # the master hears nothing any more
        await apart.until_answered(ALONE)
    apart.proxy.thaw()
    await apart.assert_healed()


async def test_a_slow_connection_delays_and_loses_nothing(apart: Apart) -> None:
    apart.proxy.to_client.bytes_per_second = 100_000
    codes = [await apart.send(b"x" * 10_000) for _ in range(5)]
    assert codes == [OK] * 5  # a tenth of a second each
    apart.proxy.to_client.bytes_per_second = 25_000
    together = await asyncio.gather(*(apart.send(b"y" * 10_000) for _ in range(20)))
    assert set(together) <= {OK, LATE}
    assert together.count(LATE) >= 10  # these had to wait for the others
    assert apart.master.replication.states()[0].sent_offset == apart.master.store.max_offset
    apart.proxy.to_client.bytes_per_second = None
    await apart.assert_healed()
