"""Commands that try something out, or show a thing again and again, against a real broker; and `shutdown` by name."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from downrange import Message, MessageQueue, PushConsumer
from downrange.cli.main import app
from downrange.testing import EmbeddedBroker, broker
from tests.support.processes import Running, running


@pytest.fixture(scope="module")
def mq() -> Iterator[EmbeddedBroker]:
    with broker() as started:
        started.create_topic("orders", 2)
        producer = started.producer()
        for number in range(6):
            queue = MessageQueue("orders", "broker-a", number % 2)
            producer.send(Message("orders", b"%d" % number, tags="a"), queue=queue)
        yield started


def ask(mq: EmbeddedBroker, *arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments, "-n", mq.namesrv])
    assert result.exit_code == 0, result.output
    return result.output


def test_sends_are_measured(mq: EmbeddedBroker) -> None:
    tried = json.loads(ask(mq, "topic", "send-rt", "trial", "--count", "3", "--size", "10", "--json"))
    assert (tried["successCount"], tried["failCount"]) == (3, 0)
    assert [len(message.body) for message in mq.messages("trial")] == [10, 10, 10]
    everywhere = json.loads(ask(mq, "cluster", "rt", "--count", "2", "--json"))
    assert [(row["broker"], row["successCount"]) for row in everywhere["brokers"]] == [("broker-a", 2)]
    assert "SuccessCount" in ask(mq, "mqadmin", "checkMsgSendRT", "-t", "trial", "-a", "1", "-s", "5")
    assert "SuccessCount" in ask(mq, "mqadmin", "sendMsgStatus", "-b", "broker-a", "-c", "1")


def test_queues_are_shared_out_on_paper(mq: EmbeddedBroker) -> None:
    found = json.loads(ask(mq, "group", "allocate", "orders", "-i", "one,two", "--json"))
    assert {row["client"]: row["queueId"] for row in found["queues"]} == {"one": 0, "two": 1}
    assert "broker-a" in ask(mq, "mqadmin", "allocateMQ", "-t", "orders", "-i", "10.0.0.1,10.0.0.2")


def test_entries_of_a_queue_are_shown(mq: EmbeddedBroker) -> None:
    found = json.loads(ask(mq, "mqadmin", "queryCq", "-t", "orders", "-q", "0", "-i", "1", "-b", "broker-a", "--json"))
    assert (found["minQueueIndex"], found["maxQueueIndex"]) == (0, 3)
    assert [entry["index"] for entry in found["entries"]] == [1, 2]
    assert {entry["tagsCode"] for entry in found["entries"]} == {97}


def test_the_order_configuration_is_put_shown_and_deleted(mq: EmbeddedBroker) -> None:
    ask(mq, "mqadmin", "updateOrderConf", "-t", "orders", "-m", "put", "-v", "broker-a:2")
    assert ask(mq, "topic", "order-conf", "orders") == "broker-a:2\n"
    ask(mq, "mqadmin", "updateOrderConf", "-t", "orders", "-m", "delete")


@pytest.mark.parametrize(
    ("name", "expected"), [("exportMetadata", "orders"), ("exportConfigs", "brokerName"), ("exportMetrics", "putTps")]
)
def test_what_a_cluster_knows_is_copied_into_a_file(
    mq: EmbeddedBroker, tmp_path: Path, name: str, expected: str
) -> None:
    ask(mq, "mqadmin", name, "-f", str(tmp_path / "new"))
    (file,) = (tmp_path / "new").iterdir()
    assert expected in file.read_text()
    assert json.loads(file.read_text()).keys() == {"broker-a"}


def test_queues_and_offsets_are_chosen(mq: EmbeddedBroker) -> None:
    assert ask(mq, "consume", "orders", "--queue", "1").split() == ["1", "3", "5"]
    assert ask(mq, "consume", "orders", "-q", "broker-a:0", "--offset", "1").split() == ["2", "4"]
    assert ask(mq, "mqadmin", "consumeMessage", "-t", "orders", "-b", "broker-a", "-i", "1", "-o", "2").split() == ["5"]
    assert ask(mq, "mqadmin", "printMsgByQueue", "-t", "orders", "-a", "broker-a", "-i", "0").split() == ["0", "2", "4"]
    assert ask(mq, "mqadmin", "printMsg", "-t", "orders").count("broker-a") == 6
    wrong = CliRunner().invoke(app, ["consume", "orders", "-q", "7", "-n", mq.namesrv])
    assert "has the queues broker-a:0, broker-a:1" in str(wrong.exception)


def test_messages_are_read_up_to_a_time_in_their_encoding_and_counted_by_tag(mq: EmbeddedBroker) -> None:
    first = mq.producer().send(Message("told", "中文".encode("gbk"), tags="cn", keys="k1"))
    stored = json.loads(ask(mq, "message", "view", first.message_id, "-t", "told", "--json"))["storeTimestamp"]
    assert ask(mq, "consume", "told", "--to", str(stored)) == "downrange: no messages\n"
    shown = ask(mq, "mqadmin", "printMsgByQueue", "-t", "told", "-a", "broker-a", "-i", str(first.queue.queue_id),
                "-c", "GBK", "-f", "true", "-e", str(stored + 1))  # fmt: skip
    assert shown.splitlines() == ["中文", "Tag: cn                   Count: 1"]
    assert "中文" in ask(mq, "mqadmin", "printMsg", "-t", "told", "-c", "GBK", "-d", "true")
    assert "中文" not in ask(mq, "mqadmin", "printMsg", "-t", "told", "-c", "GBK", "-d", "false")
    wrong = CliRunner().invoke(app, ["consume", "told", "--charset", "klingon", "-n", mq.namesrv])
    assert "no such encoding" in str(wrong.exception)


def test_a_message_is_sent_again_and_all_of_its_copies_are_shown(mq: EmbeddedBroker) -> None:
    sent = mq.producer().send(Message("again", b"x", tags="a", keys="k1 k2", properties={"colour": "red"}))
    assert "SEND_OK" in ask(mq, "mqadmin", "queryMsgById", "-i", sent.offset_message_id or "", "-s", "true")
    one, other = mq.messages("again")
    assert one.message_id != other.message_id
    assert (one.body, one.tags, one.keys) == (other.body, other.tags, other.keys) == (b"x", "a", ["k1", "k2"])
    assert other.properties["colour"] == "red"
    found = json.loads(ask(mq, "mqadmin", "queryMsgByUniqueKey", "-i", sent.message_id, "-t", "again", "-a", "--json"))
    assert [message["offsetMsgId"] for message in found["messages"]] == [sent.offset_message_id]


def test_options_of_mqadmin_reach_the_broker(mq: EmbeddedBroker, tmp_path: Path) -> None:
    ask(mq, "mqadmin", "updateTopic", "-t", "units", "-c", "DefaultCluster", "-u", "true", "-s", "true")
    assert json.loads(ask(mq, "topic", "route", "units", "--json"))["brokers"][0]["topicSysFlag"] == 3
    assert "SEND_OK" in ask(mq, "mqadmin", "sendMessage", "-t", "units", "-p", "x", "-b", "broker-a", "-m", "true")
    assert len(mq.messages("RMQ_SYS_TRACE_TOPIC")) == 1
    ask(mq, "mqadmin", "exportMetadata", "-b", "broker-a", "-g", "-f", str(tmp_path))
    assert json.loads((tmp_path / "metadata.json").read_text())["broker-a"].keys() == {"groups"}
    ask(mq, "group", "create", "members")
    ask(mq, "group", "skip", "members", "orders")
    with PushConsumer("members", mq.namesrv) as consumer:
        consumer.subscribe("orders")
        deadline = time.monotonic() + 60
        while "@" not in (shown := ask(mq, "mqadmin", "consumerProgress", "-g", "members", "-s", "true")):
            assert time.monotonic() < deadline, shown
        assert "ClientId" in ask(mq, "mqadmin", "consumerConnection", "-g", "members", "-b", mq.address)
    behind = ("mqadmin", "brokerConsumeStats", "-b", "broker-a", "-t", "5000", "--json", "-l")
    assert json.loads(ask(mq, *behind, "0"))["queues"]
    assert json.loads(ask(mq, *behind, "1000000"))["queues"] == []


def test_the_help_of_an_mqadmin_command(mq: EmbeddedBroker) -> None:
    for line in (["mqadmin", "help", "clusterList"], ["cluster", "list", "-h"]):
        result = CliRunner().invoke(app, line)
        assert result.exit_code == 0
        assert "--watch" in result.output


def test_a_list_is_shown_again_and_again_until_it_is_stopped(mq: EmbeddedBroker) -> None:
    with running("mqadmin", "clusterList", "-i", "0.1", "-n", mq.namesrv) as process:
        for _ in range(3):
            process.wait_for("broker-a")
            process.output.clear()
        process.signal(signal.SIGINT)
        assert process.wait() == 0


def test_a_server_is_stopped_by_its_port_name_or_directory(tmp_path: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(tmp_path / "run")}
    ports = ("--namesrv-port", "0", "--broker-port", "0", "--metrics-port", "-1", "--grpc-port", "-1")
    for number in range(3):
        server = Running("standalone", "-d", str(tmp_path / f"data-{number}"), *ports, env=env)
        try:
            port = server.wait_for(r"^  broker +\S+:(\d+)")[1]
            server.wait_for("Stop with")
            which = (port, str(tmp_path / "data-1"), "broker-a")[number]
            for name, code in (("nobody", 1), (which, 0)):
                with running("shutdown", "broker", name, env={**os.environ, **env}) as stopping:
                    assert stopping.wait(60) == code, stopping.errors
            assert server.wait() == 0
        finally:
            server.close()


def test_messages_that_consume_wrote_are_sent_again(mq: EmbeddedBroker, tmp_path: Path) -> None:
    original = Message("before", b"text", "paid", "k1 k2", properties={"colour": "red"})
    mq.producer().send(original)
    mq.producer().send(Message("before", b"\xff\x00"))
    written = tmp_path / "messages"
    written.write_text(ask(mq, "consume", "before", "--json"))
    ask(mq, "produce", "after", "--from-json", "-f", str(written))
    text, other = sorted(mq.messages("after"), key=lambda message: message.body)
    assert (text.body, text.tags, text.keys, text.properties["colour"]) == (b"text", "paid", ["k1", "k2"], "red")
    assert other.body == b"\xff\x00"
    written.write_text("no JSON\n")
    wrong = CliRunner().invoke(app, ["produce", "after", "--from-json", "-f", str(written), "-n", mq.namesrv])
    assert (wrong.exit_code, "not a line of `consume --json`" in wrong.output) == (1, True)


def test_topics_of_brokers_and_pipelines_are_listed_only_if_asked_for(mq: EmbeddedBroker) -> None:
    mq.create_topic("DOWNRANGE_PIPELINES", 1)
    listed, every = (ask(mq, "topic", "list", *options).split() for options in ((), ("--all",)))
    assert "orders" in listed
    kept = {"SCHEDULE_TOPIC_XXXX", "DefaultCluster", "DefaultCluster_REPLY_TOPIC", "broker-a", "DOWNRANGE_PIPELINES"}
    assert kept.isdisjoint(listed)
    assert {"orders", "SCHEDULE_TOPIC_XXXX", "DOWNRANGE_PIPELINES"} <= set(every)
    assert set(every) == set(ask(mq, "mqadmin", "topicList").split())


def test_lag_in_time_is_the_age_of_the_oldest_message_that_waits(mq: EmbeddedBroker) -> None:
    ask(mq, "consume", "orders", "--group", "slow", "--limit", "1")
    stored = {(one.queue_id, one.queue_offset): one.store_timestamp for one in mq.messages("orders")}
    before = int(time.time() * 1000)
    rows = json.loads(ask(mq, "group", "progress", "slow", "--json"))["queues"]
    after = int(time.time() * 1000)
    waiting = [row for row in rows if row["topic"] == "orders"]
    assert sorted(row["diff"] for row in waiting) == [2, 3]
    for row in waiting:
        oldest = stored[row["queueId"], row["consumerOffset"]]
        assert before - oldest <= row["behindMillis"] <= after - oldest
    assert all(row["behindMillis"] is None for row in rows if row["diff"] == 0)
    assert "Behind" in ask(mq, "group", "progress", "slow")
