"""`downrange controller …` as operators run it, and mqadmin's names for it, against a real controller process."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from downrange.cli.local_cluster import Kind, Layout, LocalCluster
from downrange.protocol.bodies.body import encode_body
from downrange.protocol.bodies.controller import EpochEntry, EpochEntryCache, HAConnectionInfo, HARuntimeInfo
from downrange.protocol.codes import RequestCode as R
from tests.support.controllers import LonelyBroker
from tests.support.etcd import EtcdCluster, etcd
from tests.support.lasting_port import lasting_port
from tests.support.processes import DOWNRANGE, Running

METRICS = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[EtcdCluster]:
    async with etcd(tmp_path) as made:
        yield made


@pytest.fixture
async def controller(cluster: EtcdCluster, tmp_path: Path) -> AsyncIterator[str]:
    """The address of a controller that leads."""
    address = f"127.0.0.1:{lasting_port()}"
    process = Running(
        *("controller", "--listen", address, "--etcd", cluster.endpoints, "--data", str(tmp_path / "c")),
        *("--id", "n7", "--metrics-port", str(lasting_port())),
    )
    try:
        await asyncio.to_thread(process.wait_for, "controller ready on")
        yield address
        assert await asyncio.to_thread(process.stop) == 0, process.errors
    finally:
        process.close()


@pytest.fixture
async def brokers(controller: str) -> AsyncIterator[list[LonelyBroker]]:
    made = [LonelyBroker(controller, "broker-a", id_) for id_ in (1, 2, 3)]
    async with asyncio.timeout(20):
        while (await made[0].info()).code == 2007:  # it does not lead yet
            await asyncio.sleep(0.02)
    for broker in made:
        broker.timeout_millis = 60_000
        await broker.__aenter__()
        await broker.join()
    assert (await made[0].alter(1, 2, epoch=1, set_epoch=1)).code == 0
    yield made
    for broker in made:
        await broker.die()


async def downrange(*arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run, [*DOWNRANGE, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


async def answer(*arguments: str) -> Any:
    done = await downrange(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


async def test_an_operator_sees_elects_and_cleans(controller: str, brokers: list[LonelyBroker]) -> None:
    seen = await answer("controller", "status", "-a", f"127.0.0.1:1;{controller}")
    assert seen["leader"] == controller
    assert [(row["brokerId"], row["role"], row["inSync"], row["alive"]) for row in seen["replicas"]] == [
        (1, "master", True, True),
        (2, "slave", True, True),
        (3, "slave", False, True),
    ]
    elected = await answer("controller", "elect", "broker-a", "2", "-a", controller, "-c", "c")
    assert (elected["masterBrokerId"], elected["masterEpoch"], elected["isNew"]) == (2, 2, True)
    again = await downrange("controller", "elect", "broker-a", "2", "-a", controller, "-c", "c")
    assert again.stdout == f"broker-a 2 is master already: {brokers[1].address}, epoch 2\n"
    refused = await downrange("controller", "elect", "broker-a", "3", "-a", controller, "-c", "c")
    assert refused.returncode == 1
    assert refused.stderr == "downrange: ELECT_MASTER_FAILED (2012): Failed to elect a new master\n"
    refused = await downrange("controller", "clean", "broker-a", "--ids", "3", "-a", controller)
    assert refused.returncode == 1
    assert "still alive" in refused.stderr
    await answer("controller", "clean", "broker-a", "--ids", "3", "--living", "-a", controller)
    seen = await answer("controller", "status", "broker-a", "-a", controller)
    assert [row["brokerId"] for row in seen["replicas"]] == [1, 2]


async def test_the_names_of_mqadmin(controller: str, brokers: list[LonelyBroker]) -> None:
    (row,) = (await answer("mqadmin", "getControllerMetaData", "-a", controller))["controllers"]
    assert (row["leaderId"], row["leaderAddress"], row["isLeader"]) == ("n7", controller, True)
    seen = await answer("mqadmin", "getSyncStateSet", "-a", controller, "-b", "broker-a")
    assert len(seen["replicas"]) == 3
    elected = await answer("mqadmin", "electMaster", "-a", controller, "-b", "2", "-n", "broker-a", "-c", "c")
    assert elected["masterBrokerId"] == 2
    clean = ("-b", "3", "-bn", "broker-a", "-c", "c", "-l", "true")
    await answer("mqadmin", "cleanBrokerMetadata", "-a", controller, *clean)
    interval = "scanNotActiveBrokerInterval"
    await answer("mqadmin", "updateControllerConfig", "-a", controller, "-k", interval, "-v", "300")
    (settings,) = (await answer("mqadmin", "getControllerConfig", "-a", controller))["controllers"]
    assert settings["config"][interval] == "300"
    master = brokers[0]
    epochs = EpochEntryCache(
        broker_id=0, broker_name="broker-a", cluster_name="c", max_offset=90,
        epoch_list=(EpochEntry(end_offset=40, epoch=1, start_offset=0), EpochEntry(epoch=2, start_offset=40)),
    )  # fmt: skip
    master.bodies[R.CONTROLLER_GET_BROKER_EPOCH_CACHE] = encode_body(epochs)
    link = HAConnectionInfo(addr="h:1", diff=5, in_sync=True, slave_ack_offset=85)
    status = HARuntimeInfo(master=True, master_commit_log_max_offset=90, ha_connection_info=(link,))
    master.bodies[R.GET_BROKER_HA_STATUS] = encode_body(status)
    rows = (await answer("mqadmin", "getBrokerEpoch", "-b", master.address))["epochs"]
    assert [(row["epoch"], row["startOffset"], row["endOffset"]) for row in rows] == [(1, 0, 40), (2, 40, 90)]
    own, slave = (await answer("mqadmin", "haStatus", "-b", master.address))["replication"]
    assert (own["role"], own["maxOffset"], slave["slave"], slave["diff"]) == ("master", 90, "h:1", 5)


async def test_wrong_input_gets_one_line(tmp_path: Path) -> None:
    nobody = f"127.0.0.1:{lasting_port()}"
    for line, code, words in (
        (("status", "-a", nobody), 1, f"cannot connect to {nobody}"),
        (("status", "-a", ";"), 2, "--controller: expected host:port"),
        (("--listen", "9878"), 2, "--listen 9878: expected host:port"),
        (("--etcd", "nonsense"), 2, "'nonsense' is not an address of etcd"),
        (("--etcd", ";"), 2, "etcdEndpoints is empty"),
        (
            ("--listen", "0.0.0.0:0"),
            2,
            "set aclEnable=true or authenticationEnabled=true, tls.server.mode=enforcing, or",
        ),
        (("--config", str(tmp_path / "none.conf")), 2, "cannot read configuration file"),
    ):
        done = await downrange("controller", *line)
        assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
        assert words in done.stderr
    conf = tmp_path / "controller.conf"
    conf.write_text('etcdPrefix=x\netcdPassword=very-secret\ninnerClientAuthenticationCredentials={"accessKey":1}\n')
    done = await downrange("controller", "--config", str(conf))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "very-secret" not in done.stderr


async def test_a_controller_tells_its_figures(cluster: EtcdCluster, tmp_path: Path) -> None:
    port = lasting_port()
    address = f"127.0.0.1:{lasting_port()}"
    process = Running(
        *("controller", "--listen", address, "--etcd", cluster.endpoints, "--data", str(tmp_path / "m")),
        *("--metrics-port", str(port)),
    )
    try:
        await asyncio.to_thread(process.wait_for, "controller ready on")
        async with LonelyBroker(address, 'odd "name"') as broker:
            async with asyncio.timeout(20):
                while (await broker.info()).code == 2007:
                    await asyncio.sleep(0.02)
            await broker.join()
            page = await asyncio.to_thread(read, f"http://127.0.0.1:{port}/metrics")
            health = json.loads(await asyncio.to_thread(read, f"http://127.0.0.1:{port}/healthz"))
    finally:
        process.close()
    assert health == {"status": "ok", "isLeader": True, "leader": address}
    names = set(re.findall(r"^# TYPE (\S+) ", page, re.MULTILINE))
    documented = METRICS.read_text("utf-8").partition("## Metrics of a controller")[2].partition("\n## ")[0]
    assert names == set(re.findall(r"^\| `(\w+)` \|", documented, re.MULTILINE))
    assert re.search(r'^active_broker_num\{.*broker_set="odd \\"name\\""\} 1$', page, re.MULTILINE)
    assert re.search(r"^role\{.*\} 3$", page, re.MULTILINE)
    assert re.search(r"^downrange_controller_master_epoch\{.*\} 1$", page, re.MULTILINE)


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as reply:  # noqa: S310  a server of this test
        text: str = reply.read().decode()
    return text


def test_a_local_cluster_starts_etcd_and_controllers(tmp_path: Path) -> None:
    data = tmp_path / "cluster"
    layout = LocalCluster.create(data, Layout(0, 0, controllers=2, etcd_nodes=3))
    kinds = [member.role for member in layout.members]
    assert kinds == [Kind.NAMESRV, *[Kind.ETCD] * 3, *[Kind.CONTROLLER] * 2]
    started = subprocess.run(
        [*DOWNRANGE, "cluster", "up", "--data", str(data)], capture_output=True, text=True, timeout=60, check=False
    )
    assert started.returncode == 0, started.stderr
    cluster = LocalCluster.load(data)
    assert cluster is not None
    try:
        done = subprocess.run(
            [*DOWNRANGE, "controller", "status", "-a", ";".join(cluster.controllers), "--json"],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["leader"] in cluster.controllers
    finally:
        stopped = cluster.stop(30)
    assert len(stopped) == len(cluster.members)


def test_brokers_of_a_local_cluster_know_the_controllers(tmp_path: Path) -> None:
    cluster = LocalCluster.create(tmp_path, Layout(2, 3, controllers=2, etcd_nodes=1))
    replicas = [member for member in cluster.members if member.broker]
    assert [member.name for member in replicas[:3]] == ["broker-a-1", "broker-a-2", "broker-a-3"]
    text = (tmp_path / "conf" / "broker-b-2.conf").read_text()
    assert "enableControllerMode=true\n" in text
    assert f"controllerAddr={';'.join(cluster.controllers)}\n" in text
    assert "brokerRole" not in text
