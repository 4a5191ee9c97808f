"""A broker under a controller as Apache RocketMQ's: which requests it sends, and which role it takes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from downrange.broker.config import BrokerConfig
from downrange.broker.controller.controller_requests import ReplicaInfo
from downrange.broker.controller.controllers import Controllers
from downrange.broker.controller.identity import IdentityFiles
from downrange.broker.controller.replicas_manager import Lease, ReplicasManager
from downrange.broker.live_config import LiveConfig
from downrange.broker.replication.auto_switch import HaRole, Propose
from downrange.clock import SystemClock
from downrange.protocol.codes import RequestCode
from downrange.store.config import StoreConfig
from downrange.transport.pool import Pool
from tests.support.golden import scenarios
from tests.support.java_controller import JavaController, java_controller
from tests.support.replay import decode
from tests.support.replicas import until

ADDRESS = "127.0.0.1:27711"


@dataclass
class ToldReplication:
    """A replication that only notes its role."""

    seen_epoch: int = 0
    role: HaRole = HaRole.FENCED
    epoch: int = -1
    max_offset: int = 0
    confirm_offset: int = 0
    sync_state_set: frozenset[int] = frozenset()
    sync_state_set_epoch: int = 0
    lease_left_seconds: float = 0.0
    broker_id: int | None = None
    propose: Propose | None = None

    def __post_init__(self) -> None:
        self.on_given_up: Callable[[], object] = lambda: None

    def renewed(self, sent_at: float, lease_millis: int, epoch: int) -> None: ...

    def sync_state_set_committed(self, sync_state_set: frozenset[int], sync_state_set_epoch: int) -> None:
        self.sync_state_set, self.sync_state_set_epoch = sync_state_set, sync_state_set_epoch

    def take(self, role: HaRole, epoch: int) -> None:
        self.role, self.epoch, self.seen_epoch = role, epoch, max(epoch, self.seen_epoch)


@dataclass
class ToldOffice:
    replication: ToldReplication
    roles: list[tuple[str, int]] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)

    async def become_master(self, info: ReplicaInfo, lease: Lease) -> None:
        self.roles.append(("master", info.master_epoch))
        self.leases.append(lease)
        self.replication.take(HaRole.MASTER, info.master_epoch)

    async def become_slave(self, info: ReplicaInfo, broker_id: int) -> None:
        self.roles.append((f"slave of {info.master_address}", info.master_epoch))
        self.replication.take(HaRole.SLAVE, info.master_epoch)

    async def resign(self) -> None:
        self.replication.role = HaRole.FENCED


@dataclass
class Member:
    manager: ReplicasManager
    replication: ToldReplication
    office: ToldOffice


@asynccontextmanager
async def member(
    directory: Path, controller: JavaController, *, address: str = ADDRESS, seen_epoch: int = 0
) -> AsyncIterator[Member]:
    os.makedirs(directory, exist_ok=True)
    host, _, port = address.rpartition(":")
    broker = BrokerConfig(
        broker_name="broker-a",
        broker_ip1=host,
        listen_port=int(port),
        enable_controller_mode=True,
        controller_addr=controller.address,
        sync_broker_metadata_period=20,
        broker_heartbeat_interval=20,
    )
    live = LiveConfig(broker, StoreConfig(store_path_root_dir=directory))
    replication, pool = ToldReplication(seen_epoch), Pool()
    office = ToldOffice(replication)
    files = IdentityFiles(directory, broker.broker_cluster_name, broker.broker_name)
    manager = ReplicasManager(live, Controllers(live, pool), files, replication, office, SystemClock())
    task = asyncio.create_task(manager.run())
    try:
        yield Member(manager, replication, office)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await pool.close()


def master_in(one: Member, epoch: int) -> Callable[[], bool]:
    return lambda: one.replication.role is HaRole.MASTER and one.replication.epoch == epoch


async def test_the_first_broker_asks_as_java_did(tmp_path: Path) -> None:
    captured = [
        decode(row.frame)
        for row in scenarios("controller-533.tar.xz")["controller-533/ctl_first_broker"]
        if row.receiver == "controller" and not row.is_response and row.sender == "broker1"
    ]
    async with java_controller() as controller, member(tmp_path, controller) as one:
        await until(master_in(one, 1))
        await until(lambda: 904 in controller.asked(without=()))
        expected = [command.code for command in captured if command.code != 904][:5]
        assert controller.asked() == expected == [1005, 1012, 1013, 1003, 1002]
        for code in {*expected, 904}:
            ours = next(command for command in controller.requests if command.code == code)
            java = next(command for command in captured if command.code == code)
            assert ours.ext_fields.keys() == java.ext_fields.keys(), RequestCode(code).name
        heartbeat = next(command for command in controller.requests if command.code == 904)
        assert heartbeat.is_oneway
        assert one.office.leases[0].millis > 1 << 50, "this controller grants no leases: the role is for ever"
    assert (tmp_path / "brokerIdentity").read_text() == "DefaultCluster#broker-a#1"
    assert not (tmp_path / "brokerIdentity-temp").exists()


async def test_a_lost_answer_burns_no_id(tmp_path: Path) -> None:
    async with java_controller() as controller:
        controller.loses_answers_to = {int(RequestCode.CONTROLLER_APPLY_BROKER_ID)}
        async with member(tmp_path, controller) as one:
            await until(master_in(one, 1))
        assert controller.next_id == 2
        applied = [command for command in controller.requests if command.code == 1013]
        assert len(applied) == 2
        assert applied[0].ext_fields == applied[1].ext_fields


async def test_a_second_broker_follows_and_is_elected(tmp_path: Path) -> None:
    async with java_controller() as controller, member(tmp_path / "1", controller) as one:
        await until(master_in(one, 1))
        async with member(tmp_path / "2", controller, address="127.0.0.1:27712") as two:
            await until(lambda: two.replication.role is HaRole.SLAVE)
            assert two.office.roles == [(f"slave of {ADDRESS}", 1)]
            controller.elect(2)
            two.manager.notified(2)
            await until(master_in(two, 2))
            await until(lambda: one.replication.role is HaRole.SLAVE)
            assert one.office.roles[-1] == ("slave of 127.0.0.1:27712", 2)
            assert two.manager.elections_won == 1


async def test_an_older_epoch_than_was_seen_changes_nothing(tmp_path: Path) -> None:
    async with java_controller() as controller, member(tmp_path, controller, seen_epoch=3) as one:
        await until(lambda: 1002 in controller.asked())
        assert one.replication.role is HaRole.FENCED
        controller.epoch = 3
        controller.elect(1)
        await until(master_in(one, 4))


@pytest.mark.parametrize("is_silent", [True, False])
async def test_a_master_goes_on_when_its_poll_fails(tmp_path: Path, is_silent: bool) -> None:
    async with java_controller() as controller, member(tmp_path, controller) as one:
        await until(master_in(one, 1))
        if is_silent:
            controller.loses_answers_to = {1004}
            await until(lambda: not controller.loses_answers_to)
        polls = len(controller.requests)
        await until(lambda: len(controller.requests) > polls + 5)
        assert one.office.roles == [("master", 1)]


async def test_a_broker_whose_id_was_cleaned_gets_another_one(tmp_path: Path) -> None:
    async with java_controller() as controller, member(tmp_path / "1", controller) as one:
        await until(master_in(one, 1))
        (tmp_path / "2").mkdir()
        (tmp_path / "2" / "brokerIdentity").write_text("DefaultCluster#broker-a#7")
        controller.loses_answers_to = {int(RequestCode.CONTROLLER_APPLY_BROKER_ID)}
        async with member(tmp_path / "2", controller, address="127.0.0.1:27712") as two:
            await until(lambda: two.replication.role is HaRole.SLAVE)
            assert (two.manager.broker_id, two.replication.broker_id) == (2, 2)
        assert sorted(controller.codes) == [1, 2], "an answer that was lost burnt no id"
    assert (tmp_path / "2" / "brokerIdentity").read_text() == "DefaultCluster#broker-a#2"


async def test_a_broker_whose_set_was_cleaned_says_what_to_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "brokerIdentity").write_text("DefaultCluster#broker-a#7")
    async with java_controller() as controller, member(tmp_path, controller) as one:
        await until(lambda: controller.asked().count(1003) > 2)
        assert one.replication.role is HaRole.FENCED
        assert not controller.codes, "it applied for no id"
    said = [record.getMessage() for record in caplog.records if "brokerIdentity" in record.getMessage()]
    assert len(said) == 1, "once for many attempts"
    assert "whose id was 7" in said[0]
