"""Operator actions on brokers and name servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from downrange.client.admin import Admin
from downrange.client.admin.chosen_brokers import ClusterNotChosen
from downrange.client.admin.runtime import BrokerRuntime
from downrange.client.config import ClientConfig
from downrange.client.errors import BrokerNotFound
from downrange.protocol.bodies.kv_config import KVTable
from downrange.protocol.codes import RequestCode
from downrange.protocol.errors import NoPermission, QueryNotFound, RequestCodeNotSupported
from downrange.transport.errors import ConnectFailed
from tests.unit.client.fake_cluster import TOPIC, FakeCluster, fake_cluster, genuine, mqadmin_sent, reply


async def test_every_broker_is_asked_how_it_does(cluster: FakeCluster, admin: Admin) -> None:
    cluster.brokers["broker-a"].answers[RequestCode.GET_BROKER_RUNTIME_INFO] = genuine("cluster_admin", 28)
    cluster.brokers["broker-b"].answers[RequestCode.GET_BROKER_RUNTIME_INFO] = reply(1, "not now")
    status = await admin.cluster.status()
    ((broker, runtime),) = status.done.items()
    assert (broker.name, broker.cluster, broker.broker_id) == ("broker-a", "DefaultCluster", 0)
    assert runtime.version == "V4_9_8"
    assert runtime.disk_ratio == 0.35
    assert (runtime.in_today, runtime.out_today) == (50, 72)
    assert runtime.in_tps == 0.0
    assert runtime.earliest_message_timestamp is None  # the broker says -1
    ((failed, error),) = status.failed.items()
    assert (failed.name, str(error)) == ("broker-b", "SYSTEM_ERROR (1): not now")


async def test_one_broker_is_asked_by_name_or_address(cluster: FakeCluster, admin: Admin) -> None:
    cluster.broker.answers[RequestCode.GET_BROKER_RUNTIME_INFO] = reply(body=KVTable({"brokerVersionDesc": "V1"}))
    for wanted in ("broker-a", cluster.broker.address):
        status = await admin.cluster.broker_status(broker=wanted)
        assert [runtime.version for runtime in status.done.values()] == ["V1"]
    assert cluster.brokers["broker-b"].asked == []
    with pytest.raises(BrokerNotFound):
        await admin.cluster.broker_status(broker="broker-z")


def test_figures_a_broker_does_not_send_are_unknown() -> None:
    runtime = BrokerRuntime({"putTps": "", "sendThreadPoolQueueSize": "many", "earliestMessageTimeStamp": "5"})
    assert BrokerRuntime({"commitLogDiskRatio": "-1.0"}).disk_ratio is None
    assert runtime.in_tps is None
    assert runtime.out_tps is None
    assert runtime.send_queue_size is None
    assert runtime.in_today is None
    assert runtime.earliest_message_timestamp == 5


async def test_settings_are_read_with_their_version(cluster: FakeCluster, admin: Admin) -> None:
    cluster.broker.answers[RequestCode.GET_BROKER_CONFIG] = genuine("cluster_admin", 26)
    settings = await admin.cluster.config()
    ((_, found),) = settings.done.items()
    assert found.table["shortPollingTimeMills"] == "1000"
    assert found.version is not None
    assert found.version.timestamp == 1794732390346
    assert isinstance(next(iter(settings.failed.values())), RequestCodeNotSupported)  # broker-b


async def test_settings_are_sent_as_properties_and_a_refusal_is_kept(cluster: FakeCluster, admin: Admin) -> None:
    cluster.brokers["broker-a"].answers[RequestCode.UPDATE_BROKER_CONFIG] = reply()
    cluster.brokers["broker-b"].answers[RequestCode.UPDATE_BROKER_CONFIG] = reply(16, "Can not update")
    outcomes = await admin.cluster.update_config({"flushConsumerOffsetInterval": "5000", "x": "a\\b"})
    assert cluster.broker.asked[-1].body_bytes == b"flushConsumerOffsetInterval=5000\nx=a\\\\b\n"
    assert [broker.name for broker in outcomes.done] == ["broker-a"]
    assert [(broker.name, type(error)) for broker, error in outcomes.failed.items()] == [("broker-b", NoPermission)]


@pytest.mark.parametrize(
    ("method", "code"),
    [("clean_expired_queues", 306), ("clean_unused_topics", 316), ("delete_expired_commit_log", 329)],
)
async def test_housekeeping_is_told_to_the_chosen_brokers(
    cluster: FakeCluster, admin: Admin, method: str, code: int
) -> None:
    for broker in cluster.brokers.values():
        broker.answers[code] = reply()
    assert len((await getattr(admin.cluster, method)(cluster="DefaultCluster")).done) == 2
    assert len((await getattr(admin.cluster, method)(broker="broker-b")).done) == 1
    assert [len(broker.fields(code)) for broker in cluster.brokers.values()] == [1, 2]


async def test_groups_and_producers_of_a_broker(cluster: FakeCluster, admin: Admin) -> None:
    cluster.broker.answers[RequestCode.GET_BROKER_CONSUME_STATS] = genuine("admin_consumer", 317)
    cluster.broker.answers[RequestCode.GET_ALL_PRODUCER_INFO] = genuine("admin_consumer", 328)
    stats = await admin.cluster.consume_stats("broker-a")
    assert cluster.broker.fields(317) == [mqadmin_sent("admin_consumer", 317)]
    assert any("gscg_admin" in groups for groups in stats.consume_stats_list)
    producers = await admin.cluster.producers(broker="broker-a")
    (table,) = producers.done.values()
    assert "gspg_admin" in table.data


async def test_without_a_broker_there_is_nothing_to_choose(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path, "broker-a") as cluster:
        await cluster.connections["broker-a"].drain(1)  # the name server forgets a broker with its connection
        async with Admin(ClientConfig((cluster.namesrv,))) as admin:
            while (await admin.session.cluster_info()).broker_addr_table:
                pass
            with pytest.raises(ClusterNotChosen, match="no broker is registered"):
                await admin.cluster.clean_unused_topics()


# --- name servers -----------------------------------------------------------------------------------------------------


async def test_the_key_value_store_is_written_to_every_name_server(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    async with fake_cluster(tmp_path / "one") as one, fake_cluster(tmp_path / "two") as two:
        both = ClientConfig((one.namesrv, two.namesrv, "127.0.0.1:1"))
        async with Admin(both) as admin:
            put = await admin.namesrv.put_kv("space", "key", "wert äöü")
            assert set(put.done) == {one.namesrv, two.namesrv}
            assert [(address, type(error)) for address, error in put.failed.items()] == [("127.0.0.1:1", ConnectFailed)]
        for address in (one.namesrv, two.namesrv):
            async with Admin(ClientConfig((address,))) as admin:
                assert await admin.namesrv.get_kv("space", "key") == "wert äöü"
                assert await admin.namesrv.list_kv("space") == {"key": "wert äöü"}
                assert not (await admin.namesrv.delete_kv("space", "key")).failed
                with pytest.raises(QueryNotFound):
                    await admin.namesrv.get_kv("space", "key")
                with pytest.raises(QueryNotFound):
                    await admin.namesrv.list_kv("elsewhere")


async def test_name_server_settings_are_read_and_changed(cluster: FakeCluster, admin: Admin) -> None:
    before = (await admin.namesrv.config()).done[cluster.namesrv]
    assert before["orderMessageEnable"] == "false"
    assert not (await admin.namesrv.update_config({"orderMessageEnable": "true"})).failed
    assert (await admin.namesrv.config()).done[cluster.namesrv]["orderMessageEnable"] == "true"
    refused = await admin.namesrv.update_config({"kvConfigPath": "x"})
    assert isinstance(refused.failed[cluster.namesrv], NoPermission)


async def test_write_permission_is_taken_and_given_back(cluster: FakeCluster, admin: Admin) -> None:
    assert (await admin.namesrv.wipe_write_perm("broker-a")).done == {cluster.namesrv: 4}
    perms = {data.broker_name: data.perm for data in (await admin.topics.route(TOPIC)).queue_datas}
    assert perms == {"broker-a": 4, "broker-b": 6}
    assert (await admin.namesrv.add_write_perm("broker-a")).done == {cluster.namesrv: 4}
    assert {data.perm for data in (await admin.topics.route(TOPIC)).queue_datas} == {6}
    assert (await admin.namesrv.wipe_write_perm("nobody")).done == {cluster.namesrv: 0}
