"""A controller and brokers that speak to it: ids, elections, the sync-state set, leases, and what is refused."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from downrange.clock import BootClock
from downrange.controller.app import RunningController
from downrange.controller.config import ControllerConfig
from downrange.controller.liveness import ReplicaKey
from downrange.controller.memory_store import MemoryStore
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.controller import (
    BrokerReplicasInfo,
    CleanBrokerDataRequest,
    ElectMasterResponse,
    GetMetadataInfoResponse,
    GetNextBrokerIdRequest,
    GetNextBrokerIdResponse,
    GetReplicaInfoResponse,
    HeartbeatResponse,
    RegisterBrokerToControllerResponse,
    SyncStateSet,
    encode_broker_names,
)
from downrange.protocol.codes import RequestCode as R
from downrange.protocol.codes import ResponseCode
from downrange.protocol.command import request
from tests.support.controllers import LonelyBroker, running_controller, until

LEASE_MILLIS = ControllerConfig().lease_millis


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(BootClock())


@pytest.fixture
async def leader(tmp_path: Path, store: MemoryStore) -> AsyncIterator[RunningController]:
    async with running_controller(tmp_path, store) as running:
        yield running


@pytest.fixture
async def brokers(leader: RunningController) -> AsyncIterator[list[LonelyBroker]]:
    """Master 1 of epoch 1, and 2 and 3, all in the sync-state set."""
    made = [LonelyBroker(leader.address, broker_id=id_) for id_ in (1, 2, 3)]
    for broker in made:
        await broker.__aenter__()
        await broker.join()
    assert (await made[0].alter(1, 2, 3, epoch=1, set_epoch=1)).code == 0
    yield made
    for broker in made:
        await broker.die()


async def test_the_first_broker_of_a_set_gets_an_id_and_becomes_master(leader: RunningController) -> None:
    async with LonelyBroker(leader.address) as broker:
        view = (await broker.ask(R.CONTROLLER_GET_METADATA_INFO)).header(GetMetadataInfoResponse)
        assert (view.is_leader, view.controller_leader_address) == (True, leader.address)
        header = GetNextBrokerIdRequest(cluster_name="c", broker_name="b")
        reply = await broker.ask(R.CONTROLLER_GET_NEXT_BROKER_ID, header)
        assert reply.header(GetNextBrokerIdResponse).next_broker_id == 1
        assert (await broker.info()).code == ResponseCode.BROKER_METADATA_NOT_EXIST
        assert (await broker.register()).code == ResponseCode.BROKER_NEED_TO_BE_REGISTERED
        assert (await broker.elect()).code == ResponseCode.BROKER_NEED_TO_BE_REGISTERED
        assert (await broker.apply()).code == 0
        assert (await broker.apply()).code == 0
        registered = await broker.register()
        assert registered.header(RegisterBrokerToControllerResponse).master_broker_id is None
        assert decode_body(SyncStateSet, registered.body_bytes) == SyncStateSet()
        assert (await broker.heartbeat()).lease_millis is None
        elected = (await broker.elect()).header(ElectMasterResponse)
        assert (elected.master_broker_id, elected.master_epoch, elected.sync_state_set_epoch) == (1, 1, 1)
        await until(lambda: len(broker.heard) == 1)
        lease = await broker.heartbeat()
        assert lease == HeartbeatResponse(lease_millis=LEASE_MILLIS, master_epoch=1, sync_state_set_epoch=1)


async def test_a_slave_gets_no_lease(brokers: list[LonelyBroker]) -> None:
    assert (await brokers[1].heartbeat()).lease_millis is None
    assert (await brokers[0].heartbeat()).lease_millis == LEASE_MILLIS


async def test_a_killed_master_is_replaced_at_once_by_the_longest_log(brokers: list[LonelyBroker]) -> None:
    master, short, long = brokers
    long.max_offset, short.max_offset = 5 << 32, 1 << 31
    for broker in (master, short, long):
        broker.epoch = 1
        broker.timeout_millis = 600_000  # this test does not wait so long: only the lost connection tells of the death
        await broker.heartbeat()
    await master.die()
    await until(lambda: bool(long.heard) and long.heard[-1][0].master_epoch == 2)
    notice, members = long.heard[-1]
    assert (notice.master_broker_id, notice.master_address) == (3, long.address)
    assert members == SyncStateSet(sync_state_set=frozenset({3}), sync_state_set_epoch=3)
    await until(lambda: bool(short.heard) and short.heard[-1] == long.heard[-1])
    info = (await short.info()).header(GetReplicaInfoResponse)
    assert (info.master_broker_id, info.master_epoch) == (3, 2)


async def test_a_silent_master_is_replaced_after_its_timeout(brokers: list[LonelyBroker]) -> None:
    master, second, _ = brokers
    master.timeout_millis = 300
    await master.heartbeat()
    began = time.monotonic()
    await until(lambda: bool(second.heard) and second.heard[-1][0].master_epoch == 2)
    assert time.monotonic() - began > 0.25


async def test_a_connection_that_breaks_while_the_broker_lives_costs_nothing(brokers: list[LonelyBroker]) -> None:
    master = brokers[0]
    master.pool.drop(master.controller)
    await asyncio.sleep(0.4)  # two probes and several searches
    assert (await master.heartbeat()).master_epoch == 1
    await asyncio.sleep(0.4)
    assert (await master.heartbeat()).master_epoch == 1


async def test_without_members_there_is_no_master_until_one_comes_back(brokers: list[LonelyBroker]) -> None:
    master, second, third = brokers
    assert (await master.alter(1, epoch=1, set_epoch=2)).code == 0
    await master.die()
    reply = await second.info()
    async with asyncio.timeout(10):
        while (found := reply.header(GetReplicaInfoResponse)).master_epoch < 2:
            await asyncio.sleep(0.02)
            reply = await second.info()
    assert found.master_broker_id is None
    assert (await second.elect()).code == ResponseCode.ELECT_MASTER_FAILED
    async with LonelyBroker(second.controller) as again:
        registered = await again.register()
        assert registered.code == 0
        await again.heartbeat()
        await until(lambda: bool(third.heard) and third.heard[-1][0].master_epoch == 3)
        assert third.heard[-1][0].master_address == again.address


async def test_an_operator_may_elect_outside_of_the_set_and_it_is_logged(
    brokers: list[LonelyBroker], caplog: pytest.LogCaptureFixture
) -> None:
    master, second, _ = brokers
    assert (await master.alter(1, epoch=1, set_epoch=2)).code == 0
    await master.die()
    async with asyncio.timeout(10):
        while (await second.info()).header(GetReplicaInfoResponse).master_epoch < 2:
            await asyncio.sleep(0.02)
    assert (await second.elect(designate_elect=True)).code == ResponseCode.ELECT_MASTER_FAILED
    elected = await second.elect(designate_elect=True, unclean_elect=True)
    assert elected.header(ElectMasterResponse).master_broker_id == 2
    assert "LOST" in caplog.text


async def test_a_master_that_registers_again_gets_a_new_epoch_and_the_same_set(brokers: list[LonelyBroker]) -> None:
    master, second, _ = brokers
    registered = await master.register()
    fields = registered.header(RegisterBrokerToControllerResponse)
    assert (fields.master_broker_id, fields.master_epoch, fields.sync_state_set_epoch) == (1, 2, 3)
    members = decode_body(SyncStateSet, registered.body_bytes)
    assert members.sync_state_set == {1, 2, 3}
    await until(lambda: bool(second.heard) and second.heard[-1][0].master_epoch == 2)
    assert (await master.alter(1, epoch=1, set_epoch=2)).code == ResponseCode.FENCED_MASTER_EPOCH
    assert (await master.alter(1, epoch=2, set_epoch=3)).code == 0


async def test_operators_see_and_clean_sets(brokers: list[LonelyBroker]) -> None:
    master, _, third = brokers

    async def table(*names: str) -> BrokerReplicasInfo:
        reply = await master.ask(R.CONTROLLER_GET_SYNC_STATE_DATA, body=encode_broker_names(names))
        return decode_body(BrokerReplicasInfo, reply.body_bytes)

    info = (await table("b", "unknown")).replicas_info_table["b"]
    assert [one.broker_id for one in info.in_sync_replicas] == [1, 2, 3]
    assert (await table()).replicas_info_table.keys() == {"b"}
    assert (await master.ask(R.CONTROLLER_GET_SYNC_STATE_DATA)).code == ResponseCode.SYSTEM_ERROR

    async def clean(ids: str | None, *, living: bool = False, cluster: str = "c") -> int:
        header = CleanBrokerDataRequest(
            cluster_name=cluster, broker_name="b", broker_controller_ids_to_clean=ids, is_clean_living_broker=living
        )
        return (await master.ask(R.CONTROLLER_CLEAN_BROKER_DATA, header)).code

    wrong = ResponseCode.INVALID_CLEAN_BROKER_METADATA
    assert [await clean("3"), await clean(None), await clean("3;x"), await clean("3", cluster="d")] == [wrong] * 4
    assert await clean("3", living=True) == 0
    assert (await third.register()).code == ResponseCode.BROKER_NEED_TO_BE_REGISTERED
    forgotten = await third.ask(R.BROKER_HEARTBEAT, third.heartbeat_request())
    assert forgotten.code == ResponseCode.BROKER_NEED_TO_BE_REGISTERED
    assert await clean(None, living=True) == 0
    assert (await table("b")).replicas_info_table == {}


async def test_an_unknown_outcome_is_no_definite_answer(brokers: list[LonelyBroker], store: MemoryStore) -> None:
    master = brokers[0]
    store.loses_next_answer = True
    lost = await master.alter(1, 2, epoch=1, set_epoch=2)
    assert lost.code == ResponseCode.SYSTEM_ERROR  # none of the codes that say what became of a proposal
    seen = decode_body(SyncStateSet, (await master.info()).body_bytes)
    assert seen == SyncStateSet(sync_state_set=frozenset({1, 2}), sync_state_set_epoch=3)


async def test_an_election_whose_outcome_was_unknown_is_told_to_brokers_and_gives_no_lease(
    brokers: list[LonelyBroker], store: MemoryStore, leader: RunningController
) -> None:
    master, second, _ = brokers
    store.loses_next_answer = True
    lost = await second.elect(designate_elect=True)
    assert lost.code == ResponseCode.SYSTEM_ERROR
    assert (await master.heartbeat()).lease_millis is None  # it may be master no longer
    assert (await second.info()).header(GetReplicaInfoResponse).master_broker_id == 2
    assert (await master.heartbeat()).lease_millis is None
    assert (await second.heartbeat()).master_epoch == 2


async def test_a_oneway_heartbeat_promises_nothing(brokers: list[LonelyBroker], leader: RunningController) -> None:
    name = "elsewhere"
    assert leader.parts.liveness.leased_until(name) == float("-inf")
    async with LonelyBroker(leader.address, name) as broker:
        await broker.apply()
        await broker.elect()
        asked = broker.heartbeat_request()
        await broker.pool.oneway(broker.controller, request(R.BROKER_HEARTBEAT, asked, oneway=True))
        await broker.info()  # behind it on the same connection
        assert leader.parts.liveness.leased_until(name) == float("-inf")
        await broker.heartbeat()
        assert leader.parts.liveness.leased_until(name) > 0


async def test_an_id_whose_application_was_not_answered_is_got_by_the_same_application(
    leader: RunningController, store: MemoryStore
) -> None:
    async with LonelyBroker(leader.address) as broker:
        store.loses_next_answer = True
        assert (await broker.apply()).code == ResponseCode.SYSTEM_ERROR
        assert (await broker.apply()).code == 0
        assert (await broker.register()).code == 0


async def test_a_controller_without_its_store_fails_requests_and_stops_to_lead(
    brokers: list[LonelyBroker], store: MemoryStore, leader: RunningController
) -> None:
    master = brokers[0]
    store.is_down = True
    assert (await master.info()).code == ResponseCode.SYSTEM_ERROR
    assert (await master.heartbeat()).lease_millis == LEASE_MILLIS  # its own lease goes on for a while
    await until(lambda: leader.parts.leadership.term is None)
    assert (await master.info()).code == ResponseCode.NOT_LEADER
    assert (await master.heartbeat()).lease_millis is None
    store.is_down = False
    await until(lambda: leader.parts.leadership.term is not None)
    assert (await master.heartbeat()).master_epoch == 1


def leads(controller: RunningController) -> bool:
    return controller.parts.leadership.term is not None


async def test_two_controllers_that_both_believe_to_lead(tmp_path: Path, store: MemoryStore) -> None:
    async with (
        running_controller(tmp_path, store, controller_dleger_self_id="n0") as first,
        running_controller(tmp_path, store, controller_dleger_self_id="n1") as second,
    ):
        async with LonelyBroker(second.address) as broker:
            assert (await broker.info()).code == ResponseCode.NOT_LEADER
            view = (await broker.ask(R.CONTROLLER_GET_METADATA_INFO)).header(GetMetadataInfoResponse)
            assert (view.is_leader, view.controller_leader_address) == (False, first.address)
        async with LonelyBroker(first.address) as broker:
            await broker.join()
            assert leads(first)
            # etcd ends the lease although it was renewed: the first goes on to believe in it.
            store.revoke(next(iter(lease for lease, (_, _, keys) in store._leases.items() if keys)))
            await until(lambda: second.parts.leadership.term is not None)
            assert leads(first)
            assert (await broker.alter(1, 2, epoch=1, set_epoch=1)).code == ResponseCode.INVALID_REPLICAS
            assert (await broker.register()).code == ResponseCode.NOT_LEADER  # its transaction failed
            assert not leads(first)
            broker.controller = second.address
            await broker.heartbeat()
            registered = (await broker.register()).header(RegisterBrokerToControllerResponse)
            assert registered.master_epoch == 2


@pytest.mark.parametrize("refuses", [True, False])
async def test_brokers_that_may_lose_messages_are_named_or_refused(
    tmp_path: Path, refuses: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        running_controller(tmp_path, refuse_unsafe_brokers=refuses) as leader,
        LonelyBroker(leader.address) as broker,
    ):
        broker.bodies[R.GET_BROKER_CONFIG] = b"allAckInSyncStateSet=false\n"
        assert (await broker.apply()).code == 0
        reply = await broker.register()
        assert reply.code == (ResponseCode.SYSTEM_ERROR if refuses else 0)
        await until(lambda: "set allAckInSyncStateSet=true" in caplog.text)
        broker.bodies[R.GET_BROKER_CONFIG] = b"allAckInSyncStateSet=true\n"
        assert (await broker.register()).code == 0
        await until(lambda: not leader.parts.overseer.unsafe)


async def test_a_master_that_acknowledges_alone_is_replaced_after_its_lease_only(tmp_path: Path) -> None:
    async with running_controller(tmp_path, lease_millis=1500) as leader:
        made = [LonelyBroker(leader.address, broker_id=id_) for id_ in (1, 2)]
        for broker in made:
            broker.bodies[R.GET_BROKER_CONFIG] = b"allAckInSyncStateSet=false\n"
            await broker.__aenter__()
            await broker.join()
        await until(lambda: len(leader.parts.overseer.unsafe) == 2)
        assert (await made[0].alter(1, 2, epoch=1, set_epoch=1)).code == 0
        assert (await made[0].heartbeat()).lease_millis == 1500
        began = time.monotonic()
        await made[0].die()
        await until(lambda: bool(made[1].heard) and made[1].heard[-1][0].master_broker_id == 2)
        assert time.monotonic() - began > 1.4
        await made[1].die()


async def test_a_new_leader_knows_which_masters_acknowledge_alone(tmp_path: Path, store: MemoryStore) -> None:
    async with AsyncExitStack() as stack, AsyncExitStack() as first_only:
        names = ({"controller_dleger_self_id": name, "lease_millis": 1500} for name in ("n0", "n1"))
        first = await first_only.enter_async_context(running_controller(tmp_path, store, **next(names)))
        second = await stack.enter_async_context(running_controller(tmp_path, store, **next(names)))
        made = [LonelyBroker(first.address, broker_id=id_) for id_ in (1, 2)]
        made[0].bodies[R.GET_BROKER_CONFIG] = b"allAckInSyncStateSet=false\n"
        for broker in made:
            await stack.enter_async_context(broker)
            await broker.join()
            broker.controller = second.address
            await broker.heartbeat()
        await until(lambda: second.parts.overseer.unsafe == {ReplicaKey("b", 1)})
        made[0].controller = first.address
        assert (await made[0].alter(1, 2, epoch=1, set_epoch=1)).code == 0
        assert (await made[0].heartbeat()).lease_millis == 1500
        began = time.monotonic()
        await made[0].die()
        liveness = second.parts.liveness
        await until(lambda: not liveness.is_alive(ReplicaKey("b", 1), BootClock().monotonic()))
        await first_only.aclose()
        await until(lambda: leads(second))
        while second.parts.overseer.elections == 0:
            await made[1].heartbeat()
            await asyncio.sleep(0.05)
        assert time.monotonic() - began > 1.4


async def test_settings_change_while_running_but_not_those_that_matter(leader: RunningController) -> None:
    async with LonelyBroker(leader.address) as broker:
        update, get = R.CONTROLLER_UPDATE_CONTROLLER_CONFIG, R.CONTROLLER_GET_CONTROLLER_CONFIG
        assert (await broker.ask(update, body=b"scanNotActiveBrokerInterval=3000\n")).code == 0
        assert b"scanNotActiveBrokerInterval=3000" in (await broker.ask(get)).body_bytes
        for wrong in (
            b"configStorePath=/tmp/x", b"rocketmqHome=/", b"configBlackList=", b"etcdEndpoints=http://evil:1",
            b"enableElectUncleanMaster=true", b"notifyBrokerRoleChanged=false\nlistenPort=1",
        ):  # fmt: skip
            assert (await broker.ask(update, body=wrong)).code == ResponseCode.NO_PERMISSION
        assert (await broker.ask(update, body=b"scanNotActiveBrokerInterval=-1")).code == ResponseCode.SYSTEM_ERROR
        assert (await broker.ask(update, body=b"\xff")).code == ResponseCode.SYSTEM_ERROR


async def test_other_requests_are_not_supported(leader: RunningController) -> None:
    async with LonelyBroker(leader.address) as broker:
        for code in (10, 103, 105, 1007, 1008, 1014, 1018, 9999):
            reply = await broker.ask(code)
            assert (reply.code, reply.remark) == (3, f" request type {code} not supported")
        assert (await broker.ask(R.BROKER_HEARTBEAT)).code == ResponseCode.SYSTEM_ERROR


async def test_senseless_requests_get_an_answer_and_change_nothing(brokers: list[LonelyBroker]) -> None:
    chance = random.Random(7)
    master = brokers[0]
    before = decode_body(SyncStateSet, (await master.info()).body_bytes)
    texts = ["", "b", "-1", "1", "9" * 20, "true", "null", "\x00", "../../x", "a;b", "ü" * 300, "1" * 5000]
    names = [
        *("clusterName", "brokerName", "brokerId", "masterBrokerId", "masterEpoch", "appliedBrokerId", "epoch"),
        *("registerCheckCode", "brokerAddress", "invokeTime", "brokerControllerIdsToClean", "isCleanLivingBroker"),
        *("brokerAddr", "maxOffset", "heartbeatTimeoutMills"),
    ]
    bodies = [b"", b"[]", b"{}", b"[1,2]", b'{"syncStateSet":[1],"syncStateSetEpoch":0}', b"\xff\x00", b"[" * 4000]
    codes = [904, *range(1001, 1007), *range(1009, 1014)]
    for _ in range(600):
        fields = {name: chance.choice(texts) for name in chance.sample(names, chance.randrange(len(names)))}
        fields["brokerName"] = chance.choice(["zz", *texts[:1], "x" * 300])
        asked = request(chance.choice(codes), ext_fields=fields, body=chance.choice(bodies))
        reply = await master.pool.request(master.controller, asked, 10.0)
        assert reply.is_response
    assert decode_body(SyncStateSet, (await master.info()).body_bytes) == before


async def test_hostile_bytes_end_their_connection_only(brokers: list[LonelyBroker], leader: RunningController) -> None:
    chance = random.Random(11)
    for hostile in (
        b"\x00\x00\x00\x04\x00\x00\x00\x00", b"\xff\xff\xff\xff" * 4, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" * 50,
        *(chance.randbytes(chance.randrange(1, 400)) for _ in range(50)),
    ):  # fmt: skip
        _, writer = await asyncio.open_connection("127.0.0.1", leader.server.port)
        writer.write(hostile)
        await writer.drain()
        writer.close()
    assert (await brokers[0].heartbeat()).master_epoch == 1
