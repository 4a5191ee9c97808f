"""The operator's commands against a real name server and broker."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from downrange.cli.main import main
from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.model.message import Message, MessageQueue
from downrange.model.subscription import subscribe
from downrange.model.topics import TopicConfig
from downrange.protocol.bodies.body import decode_body, encode_body
from downrange.protocol.bodies.consumers import ConsumeMessageDirectlyResult, ConsumerRunningInfo, QueueOffsets
from downrange.protocol.bodies.groups import ConsumerData, HeartbeatData
from downrange.protocol.bodies.offsets import UpdateConsumerOffsetRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request
from downrange.transport.connection import Connection
from downrange.transport.pool import connect
from downrange.transport.serving import Endpoint, serve_commands
from tests.support.processes import namesrv, running


@dataclass(frozen=True)
class Ended:
    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Shell:
    """Runs `downrange` commands with NAMESRV_ADDR set, as an operator's shell does."""

    namesrv: str

    def run(self, *arguments: str) -> Ended:
        """In this process: starting Python takes longer than everything else together."""
        out, err = io.StringIO(), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            patch.setenv("NAMESRV_ADDR", self.namesrv)
            patch.setattr(sys, "argv", ["downrange", *arguments])
            with pytest.raises(SystemExit) as ended:
                main()
        assert isinstance(ended.value.code, int)
        return Ended(ended.value.code, out.getvalue(), err.getvalue())

    def run_process(self, *arguments: str) -> Ended:
        ended = subprocess.run(
            [sys.executable, "-m", "downrange.cli.main", *arguments],
            env={**os.environ, "NAMESRV_ADDR": self.namesrv},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return Ended(ended.returncode, ended.stdout, ended.stderr)

    def document(self, *arguments: str) -> dict[str, Any]:
        ended = self.run(*arguments, "--json")
        assert ended.returncode == 0, ended.stderr
        document = json.loads(ended.stdout)
        assert isinstance(document, dict)
        return document

    def create_topic(self, topic: str, queues: int) -> dict[str, Any]:
        """Create a topic and ask until the name server knows it: the broker may answer before it does."""
        document = self.document("topic", "create", topic, "-r", str(queues), "-w", str(queues))
        while self.run("topic", "route", topic).returncode:
            pass
        return document


@dataclass(frozen=True)
class Cluster:
    namesrv: str
    broker: str


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A name server and the broker broker-a, as one process."""
    with running(
        *("standalone", "--data", str(tmp_path_factory.mktemp("standalone"))),
        *("--namesrv-port", "0", "--broker-port", "0", "--metrics-port", "-1", "--grpc-port", "-1"),
    ) as process:
        yield Cluster(process.wait_for(r"name server +(\S+)")[1], process.wait_for(r"broker +(\S+) \(broker-a\)")[1])


@pytest.fixture
def shell(cluster: Cluster) -> Shell:
    return Shell(cluster.namesrv)


def test_a_group_pops_because_an_operator_says_so(shell: Shell) -> None:
    shell.create_topic("popped", 1)
    shell.document("group", "create", "poppers")
    (done,) = shell.document("group", "set-consume-mode", "poppers", "popped", "--mode", "POP", "--share", "2")["done"]
    assert done["broker"] == "broker-a"
    (row,) = shell.document("group", "config", "poppers")["brokers"]
    assert row["consumeModes"] == [{"topic": "popped", "mode": "POP", "popShareQueueNum": 2}]
    assert "consumeMode of popped" in shell.run("group", "config", "poppers").stdout
    shell.document("mqadmin", "setConsumeMode", "-t", "popped", "-g", "poppers", "-m", "PULL", "-b", "broker-a")
    (row,) = shell.document("group", "config", "poppers")["brokers"]
    assert [mode["mode"] for mode in row["consumeModes"]] == ["PULL"]
    refused = shell.run("group", "set-consume-mode", "poppers", "nowhere", "--mode", "POP")
    assert (refused.returncode, "topic[nowhere] not exist" in refused.stderr) == (1, True)


def test_a_topic_lives_from_create_to_delete(shell: Shell, cluster: Cluster) -> None:
    created = shell.create_topic("life", 2)["created"]
    assert [(row["broker"], row["address"]) for row in created] == [("broker-a", cluster.broker)]
    assert "life" in shell.document("topic", "list")["topics"]
    (row,) = shell.document("topic", "update", "life", "--read-queues", "3")["updated"]
    assert (row["readQueueNums"], row["writeQueueNums"], row["perm"]) == (3, 2, 6)
    shell.document("mqadmin", "updateTopicPerm", "-t", "life", "-b", "broker-a", "-p", "4")
    while (row := shell.document("topic", "route", "life")["brokers"][0])["perm"] != 4:
        pass  # until the broker has told the name server
    assert (row["readQueueNums"], row["writeQueueNums"]) == (3, 2)
    refused = shell.run("message", "send", "life", "text")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "no queue that may be written" in refused.stderr
    shell.document("topic", "delete", "life")
    assert "life" not in shell.document("topic", "list")["topics"]
    assert shell.run("topic", "route", "life").returncode == 1


def test_a_message_is_found_by_every_way_to_name_it(shell: Shell) -> None:
    shell.create_topic("lookup", 1)
    sent = shell.document("message", "send", "lookup", "Grüße", "--tags", "A", "--keys", "k1 k2", "--property", "x=y")
    assert sent["sendStatus"] == "SEND_OK"
    for arguments in (
        ("message", "view", sent["offsetMsgId"]),
        ("message", "view", sent["msgId"], "-t", "lookup"),
        ("message", "at", "lookup", "broker-a", "0", "0"),
        ("mqadmin", "queryMsgByUniqueKey", "-i", sent["msgId"], "-t", "lookup"),
    ):
        message = shell.document(*arguments)
        assert (message["body"], message["tags"], message["keys"]) == ("Grüße", "A", ["k1", "k2"])
        assert (message["msgId"], message["properties"]["x"]) == (sent["msgId"], "y")
    (row,) = shell.document("message", "query", "lookup", "k2")["messages"]
    assert row["msgId"] == sent["msgId"]
    assert shell.document("message", "query", "lookup", "k3")["messages"] == []
    missing = shell.run("message", "view", sent["offsetMsgId"][:-1] + "9")
    assert missing.returncode == 1
    assert missing.stderr.count("\n") == 1


def test_an_offline_group_is_moved_by_writing_its_offsets(shell: Shell) -> None:
    shell.create_topic("replay", 1)
    for number in range(3):
        shell.document("message", "send", "replay", str(number))
    refused = shell.run("group", "skip", "nobody", "replay")
    assert refused.returncode == 1
    assert "unknown on this broker" in refused.stderr
    shell.document("group", "create", "readers")
    (row,) = shell.document("group", "skip", "readers", "replay", "--dry-run")["queues"]
    assert (row["brokerOffset"], row["resetOffset"], row["how"]) == (3, 3, "dry run, offline")
    assert shell.document("group", "progress", "readers")["queues"] == []
    assert shell.document("group", "skip", "readers", "replay")["queues"][0]["how"] == "written"
    (row,) = shell.document("group", "progress", "readers")["queues"]
    assert (row["consumerOffset"], row["diff"]) == (3, 0)
    shell.document("group", "reset-offset", "readers", "replay", "--time", "2020-01-01")
    assert shell.document("group", "progress", "readers")["diffTotal"] == 3
    shell.document("group", "clone", "readers", "followers", "replay")
    assert {"readers"} <= {row["group"] for row in shell.document("group", "list")["groups"]}
    shell.document("group", "delete", "readers", "--offsets", "--topics")
    assert shell.run("group", "progress", "readers").returncode == 1


def test_settings_are_changed_while_the_broker_runs(shell: Shell) -> None:
    shell.document("config", "update", "flushConsumerOffsetInterval=4321")
    (row,) = shell.document("config", "get", "flushConsumerOffsetInterval")["brokers"]
    assert row["config"] == {"flushConsumerOffsetInterval": "4321"}
    refused = shell.run("config", "update", "storePathRootDir=/elsewhere")
    assert refused.returncode == 1
    assert "NO_PERMISSION" in refused.stderr


@pytest.mark.parametrize(
    "line",
    [
        "mqadmin clusterList",
        "mqadmin clusterList -m",
        "mqadmin brokerStatus -b broker-a",
        "mqadmin statsAll",
        "mqadmin topicList -c",
        "mqadmin consumerProgress",
        "mqadmin getBrokerConfig -b broker-a",
        "mqadmin getNamesrvConfig",
        "mqadmin wipeWritePerm -b broker-a",
        "mqadmin addWritePerm -b broker-a",
        "mqadmin cleanExpiredCQ",
        "mqadmin cleanUnusedTopic -c DefaultCluster",
        "mqadmin deleteExpiredCommitLog -b broker-a",
        "mqadmin brokerConsumeStats -b broker-a",
        "mqadmin producer -b broker-a",
    ],
)
def test_the_broker_serves_what_operators_ask(shell: Shell, line: str) -> None:
    assert shell.document(*line.split())["failed"] == []


def test_as_a_process_it_prints_one_document(shell: Shell) -> None:
    ended = shell.run_process("cluster", "list", "--json")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [row["broker"] for row in json.loads(ended.stdout)["brokers"]] == ["broker-a"]


# --- a running consumer -----------------------------------------------------------------------------------------------


class Consumer:
    """As much of a consumer as the broker can see: it is connected and answers what the broker hands on."""

    ID = "10.0.0.9@test"

    def __init__(self, group: str, topic: str) -> None:
        self.group = group
        self.topic = topic
        self.reset: asyncio.Future[QueueOffsets] = asyncio.get_running_loop().create_future()

    async def start(self, broker: str) -> Connection:
        connection = await connect(broker, Endpoint(serve_commands(self.answer)))
        heartbeat = HeartbeatData(
            client_id=self.ID,
            consumer_data_set=(
                ConsumerData(group_name=self.group, subscription_data_set=(subscribe(self.topic, "*", version=1),)),
            ),
        )
        beat = await connection.request(request(RequestCode.HEART_BEAT, body=encode_body(heartbeat)), 5)
        assert beat.code == 0, beat.remark
        return connection

    def answer(self, command: Command, connection: Connection) -> Command | None:
        match command.code:
            case RequestCode.GET_CONSUMER_RUNNING_INFO:
                info = ConsumerRunningInfo(properties={"PROP_CONSUME_TYPE": "CONSUME_PASSIVELY"}, jstack="stack text")
                return command.reply(body=encode_body(info))
            case RequestCode.CONSUME_MESSAGE_DIRECTLY:
                result = ConsumeMessageDirectlyResult(consume_result="CR_LATER", spent_time_mills=3)
                return command.reply(body=encode_body(result))
            case RequestCode.RESET_CONSUMER_CLIENT_OFFSET:
                self.reset.set_result(decode_body(QueueOffsets, command.body_bytes))
        return None


async def test_running_members_are_looked_at_and_moved(cluster: Cluster) -> None:
    async with Admin(ClientConfig((cluster.namesrv,))) as admin:
        await admin.topics.create(TopicConfig("live", 1, 1))
        while "live" not in await admin.topics.names():
            pass
        sent = await admin.messages.send(Message("live", b"text"))
        consumer = Consumer("running", "live")
        connection = await consumer.start(cluster.broker)
        commit = UpdateConsumerOffsetRequest(consumer_group="running", topic="live", queue_id=0, commit_offset=1)
        assert (await connection.request(request(RequestCode.UPDATE_CONSUMER_OFFSET, commit), 5)).code == 0

        while "%RETRY%running" not in await admin.topics.names():
            pass
        connections = await admin.groups.connections("running")
        (online,) = connections.done.values()
        assert online is not None
        assert [member.client_id for member in online.connection_set] == [Consumer.ID]
        info = await admin.groups.running_info("running", Consumer.ID, with_stack=True)
        assert info.jstack == "stack text"
        handed = await admin.messages.consume_directly("running", Consumer.ID, sent.offset_message_id)
        assert handed.consume_result == "CR_LATER"

        moved = await admin.offsets.reset("running", "live", 0)
        (moves,) = moved.done.values()
        assert (moves.online, [move.target for move in moves.moves]) == (True, [0])
        told = await asyncio.wait_for(consumer.reset, 10)
        assert told.offset_table == {MessageQueue("live", "broker-a", 0): 0}
        await connection.drain(1)


# --- without a broker -------------------------------------------------------------------------------------------------


def test_a_cluster_without_brokers_is_said_to_be_one(tmp_path: Path) -> None:
    with namesrv(tmp_path) as (_, address):
        shell = Shell(address)
        assert shell.document("cluster", "list")["brokers"] == []
        assert shell.document("topic", "list")["topics"] == []
        for line in ("topic create x", "group create g", "config get"):
            ended = shell.run(*line.split())
            assert (ended.returncode, ended.stdout) == (1, "")
            assert ended.stderr == f"downrange: no broker is registered with name server {address}; start one first\n"


@pytest.mark.parametrize("line", ["topic list", "message query a b", "mqadmin topicList"])
def test_an_unreachable_name_server_is_one_line(line: str) -> None:
    ended = Shell("127.0.0.1:1").run_process(*line.split())
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == (
        "downrange: no name server answers (cannot connect to 127.0.0.1:1: Connection refused); "
        "the address is from NAMESRV_ADDR, set it with -n or NAMESRV_ADDR\n"
    )
