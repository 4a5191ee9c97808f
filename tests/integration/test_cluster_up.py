"""`downrange cluster up|status|down` as a user runs it: real processes, masters and slaves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from downrange.cli.local_cluster import LocalCluster, Member, _letters
from tests.support.processes import DOWNRANGE, running
from tests.support.replica_processes import runtime_of


def downrange(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DOWNRANGE, *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "cluster"
    yield directory
    cluster = LocalCluster.load(directory)
    for member in cluster.running if cluster else []:
        os.kill(member.pid, signal.SIGKILL)


def up(data: Path, *arguments: str) -> str:
    done = downrange("cluster", "up", "--data", str(data), "--namesrv-port", "0", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def status(data: Path) -> dict[str, Any]:
    done = downrange("cluster", "status", "--data", str(data), "--json")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def member(data: Path, name: str) -> Member:
    cluster = LocalCluster.load(data)
    assert cluster is not None
    return next(one for one in cluster.members if one.name == name)


def loaded(data: Path) -> LocalCluster:
    cluster = LocalCluster.load(data)
    assert cluster is not None
    return cluster


def wait_for_slaves(data: Path) -> None:
    """A cluster is ready when all of its processes are; a moment later its masters know their slaves."""
    masters = [one.address for one in loaded(data).members if one.broker and one.broker_id == 0]
    deadline = time.monotonic() + 20
    while not all("haSlaves" in asyncio.run(runtime_of(address)) for address in masters):
        assert time.monotonic() < deadline


def test_a_cluster_comes_up_replicates_and_goes_down(data: Path) -> None:
    assert "cluster ready" in up(data, "--brokers", "2", "--replicas", "2", "--sync")
    namesrv = loaded(data).namesrv
    wait_for_slaves(data)
    for number in range(6):
        sent = downrange("message", "send", "orders", f"body {number}", "-n", namesrv)
        assert sent.returncode == 0, sent.stderr
        assert "SEND_OK" in sent.stdout  # with --sync: a slave has it
    deadline = time.monotonic() + 20
    while any(row["lagBytes"] for row in status(data)["brokers"]):
        assert time.monotonic() < deadline, "the slaves do not catch up"
    rows = status(data)["brokers"]
    assert [(row["broker"], row["brokerId"], row["role"]) for row in rows] == [
        ("broker-a", 0, "SYNC_MASTER"),
        ("broker-a", 1, "SLAVE"),
        ("broker-b", 0, "SYNC_MASTER"),
        ("broker-b", 1, "SLAVE"),
    ]
    assert sum(row["maxOffset"] for row in rows if row["brokerId"]) > 0

    again = downrange("cluster", "up", "--data", str(data))
    assert again.returncode == 2
    assert "runs already" in again.stderr

    stopped = downrange("cluster", "down", "--data", str(data))
    assert stopped.returncode == 0, stopped.stderr
    assert "broker-a-s" in stopped.stdout
    assert not loaded(data).running


def test_a_stopped_cluster_comes_back_where_it_was_with_its_messages(data: Path) -> None:
    up(data, "--brokers", "1", "--replicas", "1")
    before = loaded(data)
    assert all(one.port < 32_768 for one in before.members)  # from there on the system gives ports to anybody
    assert downrange("message", "send", "orders", "kept", "-n", before.namesrv).returncode == 0
    assert downrange("cluster", "down", "--data", str(data)).returncode == 0
    stopped = downrange("cluster", "status", "--data", str(data))
    assert stopped.returncode == 1
    assert "is stopped" in stopped.stderr

    assert "starting it again" in up(data, "--brokers", "5")
    after = loaded(data)
    assert [(one.name, one.port) for one in after.members] == [(one.name, one.port) for one in before.members]
    topic = downrange("topic", "status", "orders", "-n", after.namesrv, "--json")
    assert sum(queue["maxOffset"] for queue in json.loads(topic.stdout)["queues"]) == 1

    deleted = downrange("cluster", "down", "--data", str(data), "--delete")
    assert deleted.returncode == 0
    assert not data.exists()


def test_every_server_of_a_cluster_may_take_tls_only(data: Path, tmp_path: Path) -> None:
    assert downrange("tls", "init", str(tmp_path / "tls")).returncode == 0
    certificates = str(tmp_path / "tls" / "server.properties")
    said = up(data, "--brokers", "1", "--replicas", "2", "--sync", "--tls-config", certificates)
    assert f"downrange --tls-config {certificates} message send" in said
    client = ("--tls-config", str(tmp_path / "tls" / "client.properties"))
    deadline = time.monotonic() + 60
    while True:  # until the slave, which follows over TLS, has it too
        sent = downrange(*client, "message", "send", "orders", "over TLS", "-n", loaded(data).namesrv)
        if "SEND_OK" in sent.stdout:
            break
        assert time.monotonic() < deadline, sent.stdout + sent.stderr
    assert "it may take TLS only" in downrange("cluster", "status", "--data", str(data)).stderr


def test_a_killed_member_is_named_and_started_again(data: Path) -> None:
    up(data, "--brokers", "2", "--replicas", "1")
    os.kill(member(data, "broker-b").pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while member(data, "broker-b").is_running:
        assert time.monotonic() < deadline
    assert downrange("cluster", "status", "--data", str(data), "--json").returncode in (0, 1)
    survivor = member(data, "broker-a").pid
    up(data)
    assert member(data, "broker-b").is_running
    assert member(data, "broker-a").pid == survivor


def test_a_member_that_cannot_start_is_one_clear_line_and_leaves_nothing_running(data: Path) -> None:
    up(data, "--brokers", "1", "--replicas", "1")
    assert downrange("cluster", "down", "--data", str(data)).returncode == 0
    with (data / "conf" / "broker-a.conf").open("a") as conf:
        conf.write("flushDiskType=SOMETIMES\n")
    failed = downrange("cluster", "up", "--data", str(data))
    assert failed.returncode == 1
    assert "broker-a did not start" in failed.stderr
    assert "flushDiskType" in failed.stderr
    assert len(failed.stderr.strip().splitlines()) == 1
    assert not loaded(data).running


def test_a_port_in_use_leaves_no_trace_that_hinders_the_next_try(data: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        failed = downrange("cluster", "up", "--data", str(data), "--brokers", "1", "--namesrv-port", port)
    assert failed.returncode == 1
    assert "namesrv did not start" in failed.stderr
    assert LocalCluster.load(data) is None
    assert "cluster ready" in up(data, "--brokers", "1", "--replicas", "1")


def test_ctrl_c_while_it_starts_leaves_nothing_running(data: Path) -> None:
    wanted = ("--data", str(data), "--brokers", "6", "--replicas", "1", "--namesrv-port", "0")
    starting = subprocess.Popen([*DOWNRANGE, "cluster", "up", *wanted], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not (data / "logs" / "broker-c.log").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    starting.send_signal(signal.SIGINT)
    starting.communicate(timeout=30)
    assert starting.returncode != 0
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(data).encode() in _text(path)]
    assert left == []  # not even one that was started in the very moment
    assert LocalCluster.load(data) is None


def _text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["cluster", "down"], "there is no local cluster"),
        (["cluster", "up", "--brokers", "60", "--replicas", "2"], "more than 64 processes"),
        (["cluster", "up", "--brokers", "0"], "Invalid value for '--brokers'"),
    ],
)
def test_what_cannot_be_done_is_refused(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    done = downrange(*arguments, "--data", str(tmp_path / "nothing"))
    assert done.returncode == 2
    assert complaint in done.stderr
    assert not (tmp_path / "nothing").exists()


def test_a_damaged_cluster_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text("{")
    done = downrange("cluster", "down", "--data", str(tmp_path))
    assert done.returncode == 2
    assert "cluster.json" in done.stderr


def test_brokers_are_named_as_letters_go_on() -> None:
    assert [_letters(number) for number in (0, 1, 25, 26, 27, 701, 702)] == ["a", "b", "z", "aa", "ab", "zz", "aaa"]


def test_only_a_running_process_of_the_cluster_is_killed(data: Path) -> None:
    nowhere = downrange("cluster", "kill", "broker-a", "--data", str(data))
    assert (nowhere.returncode, "there is no local cluster in" in nowhere.stderr) == (2, True)
    up(data, "--brokers", "1", "--replicas", "1")
    unknown = downrange("cluster", "kill", "broker-z", "--data", str(data))
    assert (unknown.returncode, "running: namesrv, broker-a" in unknown.stderr) == (2, True), unknown.stderr
    killed = downrange("cluster", "kill", "broker-a", "--data", str(data))
    assert killed.stdout.startswith("killed: broker-a (process ")
    with running("cluster", "status", "--data", str(data), "--watch", "0.1") as watching:
        deadline = time.monotonic() + 60
        while sum("not running: broker-a" in line for line in watching.output) < 2:
            assert time.monotonic() < deadline, watching.errors
            time.sleep(0.02)
