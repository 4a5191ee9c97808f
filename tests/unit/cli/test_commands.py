"""Every operator command, against a real name server and brokers that answer as genuine ones did."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from downrange.cli.output import Answer, Column, Table, is_behind, print_answer
from downrange.model.message import MessageQueue
from downrange.model.topics import SubscriptionGroupConfig, TopicConfig
from downrange.protocol.bodies.groups import Connection, ConsumerConnection, GroupList, SubscriptionGroupTable
from downrange.protocol.bodies.offsets import OffsetResponse
from downrange.protocol.bodies.pull import PullMessageResponse
from downrange.protocol.bodies.send import SendMessageResponse
from downrange.protocol.bodies.statistics import ConsumeStats, OffsetWrapper, TopicOffset, TopicStats
from downrange.protocol.bodies.topics import TopicConfigTable
from downrange.protocol.codes import RequestCode
from tests.unit.cli.conftest import Command
from tests.unit.client.fake_cluster import GROUP, TOPIC, FakeBroker, FakeCluster, genuine, reply
from tests.unit.client.test_admin_messages import ID, NONE_FOUND, found, record

MEMBER = "10.0.0.9@c54557"


def willing(broker: FakeBroker) -> None:
    """A broker that has an answer to everything operators ask."""
    queue = MessageQueue(TOPIC, broker.name, 0)
    config = SubscriptionGroupTable(subscription_group_table={GROUP: SubscriptionGroupConfig(GROUP)})
    members = ConsumerConnection(
        connection_set=(Connection(client_id=MEMBER, client_addr="10.0.0.9:1", language="JAVA", version=409),),
        consume_type="CONSUME_PASSIVELY",
    )
    stats = ConsumeStats(offset_table={queue: OffsetWrapper(broker_offset=9, consumer_offset=4)})
    reach = TopicStats(offset_table={queue: TopicOffset(min_offset=0, max_offset=9, last_update_timestamp=1)})
    for code in (17, 25, 200, 207, 215, 15, 306, 316, 329):
        broker.answers[code] = reply()
    broker.answers |= {
        RequestCode.GET_BROKER_RUNTIME_INFO: genuine("cluster_admin", 28),
        RequestCode.GET_ALL_TOPIC_CONFIG: reply(
            body=TopicConfigTable(topic_config_table={TOPIC: TopicConfig(TOPIC, 2, 2)})
        ),
        RequestCode.GET_BROKER_CONFIG: genuine("cluster_admin", 26),
        RequestCode.GET_BROKER_CONSUME_STATS: genuine("admin_consumer", 317),
        RequestCode.GET_ALL_PRODUCER_INFO: genuine("admin_consumer", 328),
        RequestCode.GET_PRODUCER_CONNECTION_LIST: genuine("admin_consumer", 204),
        RequestCode.GET_CONSUMER_CONNECTION_LIST: reply(body=members),
        RequestCode.GET_CONSUMER_RUNNING_INFO: genuine("admin_consumer", 307),
        RequestCode.CONSUME_MESSAGE_DIRECTLY: genuine("admin_consumer", 309),
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: reply(body=config),
        RequestCode.GET_CONSUME_STATS: reply(body=stats),
        RequestCode.GET_TOPIC_STATS_INFO: reply(body=reach),
        RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: reply(body=GroupList((GROUP,))),
        RequestCode.VIEW_BROKER_STATS_DATA: genuine("cluster_admin", 315),
        RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: reply(206, "offline"),
        RequestCode.GET_MAX_OFFSET: reply(header=OffsetResponse(9)),
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: reply(header=OffsetResponse(3)),
        RequestCode.QUERY_CONSUMER_OFFSET: reply(header=OffsetResponse(4)),
        RequestCode.VIEW_MESSAGE_BY_ID: reply(body=record(broker, "k1")),
        RequestCode.QUERY_MESSAGE: found(record(broker, "k1")),
        RequestCode.PULL_MESSAGE: reply(
            header=PullMessageResponse(suggest_which_broker_id=0, next_begin_offset=6, min_offset=0, max_offset=6),
            body=record(broker, "k1"),
        ),
        RequestCode.SET_MESSAGE_REQUEST_MODE: reply(),
        RequestCode.SEND_MESSAGE_V2: reply(header=SendMessageResponse(msg_id="0A" * 16, queue_id=1, queue_offset=42)),
    }


@pytest.fixture
def willing_cluster(cluster: FakeCluster) -> FakeCluster:
    for broker in cluster.brokers.values():
        willing(broker)
    cluster.brokers["broker-b"].answers[RequestCode.GET_CONSUMER_CONNECTION_LIST] = reply(206, "not online")
    return cluster


OFFSET = str(5)  # the queue offset of the captured record
LINES = [
    ("topic list", "orders"),
    ("topic list --groups", "billing"),
    ("topic list -c DefaultCluster", "orders"),
    ("topic route orders", "RW-"),
    ("topic status orders", "1970"),
    ("topic clusters orders", "DefaultCluster"),
    ("topic create fresh -r 4 -w 4 -p rw", "broker-b"),
    ("topic create fresh -b broker-a --order", "broker-a"),
    ("topic update orders --read-queues 9", "9"),
    ("topic perm orders 4", "R--"),
    ("topic delete orders", "deleted orders from broker broker-a"),
    ("topic stats", "#Accumulation"),
    ("topic stats orders -a", "billing"),
    ("group list", "V4_9_8"),
    ("group progress billing", "Diff Total: 10"),
    ("group progress billing -t orders", "#Consumer Offset"),
    ("group config billing", "retryMaxTimes"),
    ("group set-consume-mode billing orders --mode pop", "group billing consumes orders by POP on broker-a"),
    ("group create fresh --no-broadcast", "group fresh created on broker-a"),
    ("group delete billing --offsets --topics", "topic %RETRY%billing deleted"),
    ("group connections billing", "10.0.0.9@c54557"),
    ("group producers gspg_admin -t orders", "10.0.0.9@i602"),
    ("group status billing", "PROP_CONSUME_TYPE"),
    ("group status billing -i 10.0.0.9@c54557 --stack", "PROP_CONSUME_TYPE"),
    ("group reset-offset billing orders --time now", "written"),
    ("group reset-offset billing orders -s 2026-11-15T08:00 --no-force --dry-run", "dry run, online"),
    ("group skip billing orders", "written"),
    ("group clone billing other orders", "written"),
    ("cluster list", "V4_9_8"),
    ("cluster stats", "72"),
    ("cluster broker-status -b broker-a", "brokerVersionDesc"),
    ("cluster broker-status", "brokerVersionDesc"),
    ("cluster consume-stats broker-a", "gscg_admin"),
    ("cluster producers -b broker-a", "gspg_admin"),
    ("cluster clean-queues", "broker-b"),
    ("cluster clean-topics -b broker-a", "broker-a"),
    ("cluster delete-expired-log -c DefaultCluster", "broker-a"),
    ("config get", "shortPollingTimeMills"),
    ("config get shortPollingTimeMills -b broker-a", "1000"),
    ("config update a=1 b=2 -b broker-a", "settings updated on broker-a"),
    ("namesrv-admin config", "orderMessageEnable"),
    ("namesrv-admin update-config orderMessageEnable=true", "settings updated"),
    ("namesrv-admin wipe-write-perm broker-a", "4 topics of broker-a lost"),
    ("namesrv-admin add-write-perm broker-a", "4 topics of broker-a got"),
    ("namesrv-admin kv-put space key value", "space key set"),
    ("message view {id}", "OffsetID:"),
    (f"message view {ID} -t orders", "body"),
    (f"message at orders broker-a 1 {OFFSET}", "OffsetID:"),
    ("message query orders k1 --begin 0 --end 2026-11-15", ID),
    ("message send orders text --tags A --keys K --property x=y", "SEND_OK"),
    ("message consume-directly {id} -g billing -d 10.0.0.9@c54557", "CR_SUCCESS"),
]


def arguments(line: str, cluster: FakeCluster) -> list[str]:
    from downrange.model.record import decode_record

    broker = cluster.broker
    return line.format(id=decode_record(record(broker, "k1")).offset_message_id).split(" ")


@pytest.mark.parametrize(("line", "shown"), LINES)
def test_a_command_prints_tables_and_json(
    willing_cluster: FakeCluster, command: Command, line: str, shown: str
) -> None:
    words = arguments(line, willing_cluster)
    offline = line.startswith(("group clone", "group skip", "group reset-offset billing orders --time"))
    if offline:  # offsets are written only where nobody is running
        for broker in willing_cluster.brokers.values():
            broker.answers[RequestCode.GET_CONSUMER_CONNECTION_LIST] = reply(206, "not online")
    result = command(*words)
    assert (result.code, result.err) == (0, "")
    assert shown in result.out
    if line.startswith(("topic delete", "group delete")):
        return  # gone now
    result = command(*words, "--json")
    assert (result.code, result.err) == (0, "")
    assert result.document["failed"] == []


def test_values_come_back_from_the_key_value_store(willing_cluster: FakeCluster, command: Command) -> None:
    assert command("namesrv-admin", "kv-put", "space", "key", "a value").code == 0
    assert command("namesrv-admin", "kv-get", "space", "key").out == "a value\n"
    assert command("namesrv-admin", "kv-list", "space", "--json").document["items"] == [
        {"key": "key", "value": "a value"}
    ]
    assert command("namesrv-admin", "kv-delete", "space", "key").code == 0
    result = command("namesrv-admin", "kv-get", "space", "key")
    assert result.code == 1
    assert result.err == "downrange: QUERY_NOT_FOUND (22): No config item, Namespace: space Key: key\n"


def test_a_body_goes_to_and_comes_from_a_file(willing_cluster: FakeCluster, command: Command, tmp_path: Path) -> None:
    source, saved = tmp_path / "in", tmp_path / "out"
    source.write_bytes(b"\x00\xff")
    assert command("message", "send", TOPIC, "--file", str(source), "-b", "broker-a").code == 0
    assert willing_cluster.broker.asked[-1].body_bytes == b"\x00\xff"
    assert command("message", "view", ID, "-t", TOPIC, "--save", str(saved)).code == 0
    assert saved.read_bytes() == b"body"
    assert command("message", "view", ID, "-t", TOPIC, "--save", str(tmp_path / "no" / "dir")).code == 2


def test_a_trace_is_shown(willing_cluster: FakeCluster, command: Command) -> None:
    willing_cluster.broker.answers[RequestCode.QUERY_MESSAGE] = genuine("trace", RequestCode.QUERY_MESSAGE)
    willing_cluster.brokers["broker-b"].answers[RequestCode.QUERY_MESSAGE] = NONE_FOUND
    result = command("trace", "7F0000011ED04E0E2F2A49FCF42F002B", "--json")
    assert (result.code, result.err) == (0, "")
    assert [(one["group"], one["costMillis"], one["success"]) for one in result.document["sends"]] == [
        ("gspg_trace", 6, True)
    ]
    assert [(one["group"], one["costMillis"], one["code"]) for one in result.document["deliveries"]] == [
        ("gscg_trace", 0, "SUCCESS")
    ]
    assert "gscg_trace" in command("mqadmin", "queryMsgTraceById", "-i", "7F0000011ED04E0E2F2A49FCF42F002B").out


@pytest.mark.parametrize(("columns", "is_framed"), [("200", True), ("60", False)])
def test_on_a_terminal_no_id_is_cut(
    willing_cluster: FakeCluster,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    columns: str,
    is_framed: bool,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", columns)
    result = command("message", "query", TOPIC, "k1")
    assert result.code == 0
    assert result.out.count(ID) == 2
    assert ("──" in result.out) == is_framed


@pytest.mark.parametrize("columns", ["200", "60"])
def test_lag_is_coloured_on_a_terminal_however_narrow_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    wide = Column("Topic of this group", "topic"), Column("Diff", "diff", warns=is_behind)
    rows = [{"topic": "t" * 50, "diff": 3}, {"topic": "[red]", "diff": 0}]
    print_answer(Answer({}, [Table(list(wide), rows)]), as_json=False)
    printed = capsys.readouterr().out
    assert printed.count("\x1b[33m") == 1
    assert "\x1b[33m3" in printed
    assert "[red]" in printed


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "code", "text"),
    [
        ("topic route nothere", 1, "no broker serves the topic nothere"),
        ("topic create bad/name", 2, "illegal characters"),
        ("topic create fresh -b nobody", 1, "no broker nobody; brokers known"),
        ("topic create fresh -c nowhere", 1, "no cluster nowhere; clusters known"),
        ("topic create fresh -p 9", 2, "permission '9'"),
        ("topic update orders", 2, "nothing to change"),
        ("group progress typo", 1, "no broker knows the consumer group typo"),
        ("group set-consume-mode billing orders --mode push", 2, "--mode push: expected PULL or POP"),
        ("group config typo", 1, "no broker knows the consumer group typo"),
        ("group status billing -i nobody", 1, "has no member nobody"),
        ("group reset-offset billing orders --time yesterday", 2, "'yesterday' is not a time"),
        ("group reset-offset billing orders --time ²", 2, "'²' is not a time"),
        ("group reset-offset billing orders --time 0001-01-01", 2, "'0001-01-01' is not a time"),
        ("group clone billing billing orders", 2, "same group"),
        ("group delete typo", 1, "no broker knows the consumer group typo"),
        ("config get brokername", 2, "no broker has a setting brokername; did you mean brokerName"),
        ("config update novalue", 2, "'novalue' is not key=value"),
        ("message view abc", 1, "not an offset message id"),
        ("message send orders", 2, "either as an argument or with --file"),
        ("message send orders --file /no/such/file", 2, "cannot read /no/such/file"),
        ("message send orders text -b broker-a -i 77", 1, "no queue like the one asked for"),
        ("cluster list -c nowhere", 1, "no cluster nowhere"),
        ("topic list -n host", 2, "not an address: 'host'"),
        ("topic list -n 127.0.0.1:²", 2, "not an address: '127.0.0.1:²'"),
        (f"topic list -n {'x' * 300}:9876", 2, "no host can have this name"),
        ("topic list -n 127.0.0.1:1", 1, "no name server answers (cannot connect to 127.0.0.1:1"),
        ("mqadmin topikList", 2, "did you mean topicList"),
        ("trace 7F01 -t nothere", 1, "no trace was written yet: there is no topic nothere"),
        ("produce bad/name --count 1", 2, "illegal characters"),
        ("bench --rate 0", 2, "rate 0.0: expected 0.1 to 10000000"),
        ("bench --size 99999999999", 2, "size 99999999999: expected 16 to 4194304"),
        ("bench pull --connections 10001", 2, "connections 10001: expected 1 to 10000"),
        ("bench send --connections 10001 -b 127.0.0.1:1", 1, "cannot connect to 127.0.0.1:1"),
        ("simulate --rate nan", 2, "rate_per_producer must be positive: nan"),
        ("simulate --seconds 1e12", 2, "seconds must be at most 86400"),
        ("simulate --rate 1e9", 2, "sends are more than 100,000,000"),
        ("cluster status --data /no/such/directory", 2, "there is no local cluster in /no/such/directory"),
        ("cluster up --data /dev/null", 2, "/dev/null: Not a directory: give another directory with --data"),
        ("broker --id 1", 2, "--id 1 is the id of a slave: add --role SLAVE"),
        ("broker -n nonsense", 2, "namesrvAddr: not an address: 'nonsense'; expected host:port (command line)"),
        ("standalone --namesrv-port 99999", 2, "listenPort=99999: expected a whole number from 0 to 65535"),
    ],
)
def test_an_error_is_one_line_that_says_what_is_wrong(
    willing_cluster: FakeCluster, command: Command, line: str, code: int, text: str
) -> None:
    result = command(*line.split())
    assert result.code == code
    assert result.out == ""
    assert result.err.startswith("downrange: ")
    assert text in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("line", ["topic", "topic route", "topic create t -r many", "topic rout t", "nonsense"])
def test_wrong_usage_ends_with_2(command: Command, line: str) -> None:
    result = command(*line.split())
    assert result.code == 2
    assert "Traceback" not in result.err


def test_the_default_name_server_is_named_when_it_is_not_there(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    monkeypatch.setattr("downrange.client.config.DEFAULT_NAMESRV", "127.0.0.1:1")
    result = command("topic", "list")
    assert result.code == 1
    assert "the address is the default, set it with -n or NAMESRV_ADDR" in result.err


def test_a_broker_that_fails_is_reported_and_the_others_are_shown(
    willing_cluster: FakeCluster, command: Command
) -> None:
    willing_cluster.brokers["broker-b"].answers[RequestCode.GET_TOPIC_STATS_INFO] = reply(1, "first line\nsecond")
    result = command("topic", "status", TOPIC)
    assert result.code == 1
    assert "broker-a" in result.out
    address = willing_cluster.brokers["broker-b"].address
    assert result.err == f"downrange: broker-b ({address}): SYSTEM_ERROR (1): first line second\n"
    result = command("topic", "status", TOPIC, "--json")
    assert result.code == 1
    assert [row["broker"] for row in result.document["queues"]] == ["broker-a"]
    assert result.document["failed"] == [
        {"server": f"broker-b ({address})", "error": "SYSTEM_ERROR (1): first line second"}
    ]


def test_ids_are_never_cut_in_a_pipe(willing_cluster: FakeCluster, command: Command) -> None:
    result = command("message", "query", TOPIC, "k1")
    header, *rows = result.out.splitlines()
    assert header.split("  ")[0] == "#Message ID"
    assert [row.split()[0] for row in rows] == [ID, ID]


def test_a_message_does_not_steer_the_terminal(willing_cluster: FakeCluster, command: Command) -> None:
    evil = reply(1, "\x1b[2Jgone")
    for broker in willing_cluster.brokers.values():
        broker.answers[RequestCode.QUERY_MESSAGE] = found(record(broker, "k1 \x1b[31mred"))
    result = command("message", "view", ID, "-t", TOPIC)
    assert "\x1b" not in result.out
    assert "\N{REPLACEMENT CHARACTER}[31mred" in result.out
    assert command("message", "view", ID, "-t", TOPIC, "--json").document["keys"] == ["k1", "\x1b[31mred"]
    willing_cluster.broker.answers[RequestCode.GET_TOPIC_STATS_INFO] = evil
    assert "\x1b" not in command("topic", "status", TOPIC).err


# --- times ------------------------------------------------------------------------------------------------------------


def test_times_are_local(monkeypatch: pytest.MonkeyPatch) -> None:
    from downrange.cli.options import UsageError
    from downrange.cli.times import parse_time, time_text

    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        assert parse_time("1794732491499") == 1794732491499
        assert parse_time("2026-11-15 09:48:11.499") == 1794732491499
        assert parse_time("2026-11-15#09:48:11:499") == 1794732491499
        assert parse_time("2026-11-15T08:48:11+00:00") == 1794732491000
        assert parse_time("2026-07-01") == 1782856800000  # summer time
        assert time_text(1794732491499) == "2026-11-15 09:48:11,499"
        assert (time_text(0), time_text(-1), time_text(None)) == ("", "", "")
        assert time_text(1 << 62) == f"{1 << 62} ms"
        for unknown in ("soon", "\u00b2", "0001-01-01 00:00+23:00", "2026-13-01"):
            with pytest.raises(UsageError, match="is not a time"):
                parse_time(unknown)
    finally:
        monkeypatch.undo()
        time.tzset()


# --- the operators' page ----------------------------------------------------------------------------------------------


def test_the_program_in_the_operators_page_runs(
    willing_cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "operate.md").read_text("utf-8")
    (program,) = (part.split("```")[0] for part in page.split("```python\n")[1:])
    exec(compile(program, "operate.md", "exec"), {"__name__": "example"})  # noqa: S102  our own page
    assert capsys.readouterr().out == "10\n"
