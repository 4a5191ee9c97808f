"""Controllers as processes on real etcd: leaders are killed and stopped, leases and quorums are lost."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from downrange.controller.coordination import Delete
from downrange.controller.sets import Keys
from downrange.model.errors import MQError
from downrange.protocol.bodies.controller import (
    GetMetadataInfoResponse,
    GetReplicaInfoResponse,
    RegisterBrokerToControllerResponse,
)
from downrange.protocol.codes import RequestCode as R
from downrange.protocol.codes import ResponseCode
from downrange.protocol.command import request
from tests.support.controllers import LonelyBroker, running_controller, until
from tests.support.etcd import EtcdCluster, etcd
from tests.support.lasting_port import lasting_port
from tests.support.processes import Running

PREFIX = "/downrange/controller"


class Controllers:
    """Controller processes of one group, and a broker that asks whichever leads."""

    def __init__(self, cluster: EtcdCluster, directory: Path) -> None:
        self._etcd = cluster
        self._directory = directory
        self.running: dict[str, Running] = {}

    def start(self, count: int) -> None:
        for _ in range(count):
            address = f"127.0.0.1:{lasting_port()}"
            self.running[address] = Running(
                *("controller", "--listen", address, "--etcd", self._etcd.endpoints),
                *("--data", str(self._directory / address)),
            )
        for process in self.running.values():
            process.wait_for("controller ready on")

    async def leader(self, broker: LonelyBroker, seconds: float = 40.0) -> str:
        """The controller that leads now; the broker asks it from now on."""
        async with asyncio.timeout(seconds):
            while True:
                for address in self.running:
                    try:
                        asked = request(R.CONTROLLER_GET_METADATA_INFO)
                        reply = await broker.pool.request(address, asked, 1.0)
                    except MQError:
                        continue
                    if reply.header(GetMetadataInfoResponse).is_leader:
                        broker.controller = address
                        return address
                await asyncio.sleep(0.02)

    async def beat(self, *brokers: LonelyBroker) -> None:
        """Heartbeats to all controllers, as brokers send them, for ever."""
        while True:
            for broker in brokers:
                own = broker.controller
                for address in self.running:
                    broker.controller = address
                    try:
                        await broker.heartbeat()
                    except (MQError, AssertionError):
                        continue
                    finally:
                        broker.controller = own
            await asyncio.sleep(0.2)


@asynccontextmanager
async def controllers(directory: Path, *, nodes: int, count: int) -> AsyncIterator[tuple[EtcdCluster, Controllers]]:
    async with etcd(directory, nodes) as cluster:
        group = Controllers(cluster, directory)
        try:
            group.start(count)
            yield cluster, group
        finally:
            for process in group.running.values():
                process.close()


async def test_a_killed_controller_is_replaced_and_nothing_is_forgotten(tmp_path: Path) -> None:
    async with controllers(tmp_path, nodes=1, count=2) as (_, group), LonelyBroker("") as broker:
        first = await group.leader(broker)
        await broker.join()
        began = time.monotonic()
        group.running.pop(first).close()
        second = await group.leader(broker)
        assert second != first
        assert time.monotonic() - began < 15.0  # some 0.1 s, and what a busy machine adds
        await until(lambda: "leader gone" in group.running[second].errors)  # it did not wait for the lease to end
        info = (await broker.info()).header(GetReplicaInfoResponse)
        assert (info.master_broker_id, info.master_epoch) == (1, 1)  # it has grace: no election


async def test_a_stopped_controller_resumes_and_does_not_lead(tmp_path: Path) -> None:
    async with controllers(tmp_path, nodes=1, count=2) as (_, group), LonelyBroker("") as broker:
        first = await group.leader(broker)
        await broker.join()
        paused = group.running.pop(first)
        try:
            paused.signal(signal.SIGSTOP)
            await group.leader(broker)
            assert (await broker.register()).header(RegisterBrokerToControllerResponse).master_epoch == 2
            broker.controller = first
            waiting = asyncio.create_task(broker.register())
            await asyncio.sleep(0.2)  # its request lies in the socket of the stopped process
            paused.signal(signal.SIGCONT)
            assert (await waiting).code == ResponseCode.NOT_LEADER
        finally:
            group.running[first] = paused


async def test_a_master_and_the_leading_controller_and_the_etcd_leader_die_together(tmp_path: Path) -> None:
    async with (
        controllers(tmp_path, nodes=3, count=3) as (cluster, group),
        LonelyBroker("", broker_id=2) as second,
    ):
        master = LonelyBroker("")
        await master.__aenter__()
        await group.leader(master)
        await group.leader(second)
        await master.join()
        await second.join()
        assert (await master.alter(1, 2, epoch=1, set_epoch=1)).code == 0
        beats = [asyncio.create_task(group.beat(broker)) for broker in (master, second)]
        await asyncio.sleep(0.5)
        beats[0].cancel()
        leader = await group.leader(second)
        began = time.monotonic()
        (await cluster.leader()).kill()
        group.running.pop(leader).close()
        await master.die()
        await until(lambda: bool(second.heard) and second.heard[-1][0].master_broker_id == 2, 60)
        assert time.monotonic() - began < 25.0  # 2 s lease + election of etcd, on a busy machine
        await group.leader(second)
        info = (await second.info()).header(GetReplicaInfoResponse)
        assert (info.master_broker_id, info.master_epoch) == (2, 2)
        beats[1].cancel()
        await asyncio.gather(*beats, return_exceptions=True)


async def test_without_a_quorum_of_etcd_nobody_leads_and_it_comes_back(tmp_path: Path) -> None:
    async with controllers(tmp_path, nodes=3, count=2) as (cluster, group), LonelyBroker("") as broker:
        first = await group.leader(broker)
        await broker.join()
        down = cluster.nodes[:2]
        for node in down:
            node.kill()
        broker.timeout_millis = 60_000
        assert (await broker.register()).code in (ResponseCode.SYSTEM_ERROR, ResponseCode.NOT_LEADER)
        async with asyncio.timeout(30):
            while (await broker.heartbeat()).lease_millis is not None:
                await asyncio.sleep(0.1)
            while (await broker.info()).code != ResponseCode.NOT_LEADER:
                await asyncio.sleep(0.1)
        for node in down:
            cluster.start(node)
        await group.leader(broker)
        assert first in group.running
        info = (await broker.info()).header(GetReplicaInfoResponse)
        assert info.master_broker_id == 1
        assert info.master_epoch in (1, 2)  # the registration without a known outcome may have happened


async def test_two_controllers_that_both_believe_to_lead_on_etcd(tmp_path: Path) -> None:
    async with etcd(tmp_path) as cluster:
        stores = [cluster.client(), cluster.client()]
        async with (
            running_controller(tmp_path, stores[0], controller_dleger_self_id="n0") as first,
            running_controller(tmp_path, stores[1], controller_dleger_self_id="n1") as second,
            LonelyBroker(first.address) as broker,
        ):
            await broker.join()
            # As if etcd had ended the lease: the key is gone, and the first does not know.
            assert (await stores[1].txn([], [Delete(Keys(PREFIX).leader)])).is_done
            await until(lambda: second.parts.leadership.term is not None)
            assert first.parts.leadership.term is not None
            assert (await broker.register()).code == ResponseCode.NOT_LEADER
            assert first.parts.sets.conflicts == 1
            broker.controller = second.address
            await broker.heartbeat()
            registered = (await broker.register()).header(RegisterBrokerToControllerResponse)
            assert registered.master_epoch == 2
        for store in stores:
            await store.close()
