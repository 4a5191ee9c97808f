"""Heartbeats, leaving, consumer lists, checks of subscriptions and queue locks, as requests and replies."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from downrange.broker.handlers.clients import GATHERING_SECONDS, MAX_LENIENT_BYTES
from downrange.model.topics import SubscriptionGroupConfig, TopicConfig
from downrange.protocol.bodies.groups import ConsumerGroupRequest, UnregisterClientRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request
from downrange.protocol.framing import FrameDecoder
from tests.support.golden import Row, scenarios
from tests.unit.broker.wired import FakeConnection, WiredBroker, wire


@pytest.fixture
async def broker(tmp_path: Path) -> Any:
    wired = wire(tmp_path)
    yield wired
    wired.close()


def heartbeat(*, client: str = "10.0.0.9@1", groups: tuple[str, ...] = ("g",), **changes: Any) -> Command:
    consumers = [
        {
            "groupName": group,
            "consumeType": "CONSUME_PASSIVELY",
            "messageModel": "CLUSTERING",
            "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
            "subscriptionDataSet": [{"topic": "orders", "subString": "*", "subVersion": 1}],
            "unitMode": False,
            **changes,
        }
        for group in groups
    ]
    body = {"clientID": client, "consumerDataSet": consumers, "producerDataSet": [{"groupName": "p"}]}
    return request(RequestCode.HEART_BEAT, body=msgspec.json.encode(body))


def codes_told(connection: FakeConnection) -> list[int]:
    return [command.code for command in connection.told]


# --- what the genuine broker answered ---------------------------------------------------------------------------

REPLAYED = {14, 15, 34, 35, 38, 41, 42}


def decode(row: Row) -> Command:
    (command,) = FrameDecoder().feed(row.frame)
    return command


def exchanges(scenario: str) -> Iterator[tuple[Row, Row | None]]:
    """Requests of clients to the broker with their replies, in the order of the requests."""
    rows = [row for row in scenarios()[scenario] if {row.sender, row.receiver} == {"client", "broker"}]
    replies = {(row.connection, row.opaque): row for row in rows if row.is_response and row.sender == "broker"}
    for row in rows:
        if row.sender == "client" and not row.is_response:
            yield row, replies.get((row.connection, row.opaque))


def content(command: Command) -> tuple[Any, ...]:
    body: Any = json.loads(command.body_bytes) if command.body_bytes else None
    if isinstance(body, dict) and "consumerIdList" in body:
        body["consumerIdList"].sort()  # in no particular order
    ext = None if command.raw_ext is None else dict(command.ext_fields)
    return command.code, command.flag, command.opaque, command.version, ext, command.remark, body


@pytest.mark.parametrize(
    "name",
    [
        "498-json/push_concurrent",
        "498-json/push_orderly",
        "498-json/rebalance_two",
        "498-json/broadcasting",
        "498-json/send_delay",
        "498-binary/push_concurrent",
        "498-binary/push_orderly",
    ],
)
async def test_replies_and_notices_are_those_of_the_genuine_broker(name: str, broker: WiredBroker) -> None:
    connections: defaultdict[int, FakeConnection] = defaultdict(FakeConnection)
    compared = 0
    for asked, answered in exchanges(name):
        command = decode(asked)
        if command.code == RequestCode.PULL_MESSAGE and int(command.ext_fields["sysFlag"]) & 1:
            fields = command.ext_fields
            broker.offsets.commit(
                fields["topic"], fields["consumerGroup"], int(fields["queueId"]), int(fields["commitOffset"])
            )
        if command.code not in REPLAYED:
            continue
        reply = broker.handle(command, connections[asked.connection])
        if answered is not None:
            assert reply is not None
            theirs = content(decode(answered))
            ours = content(reply)
            if name.startswith("498-binary"):  # there, no fields and an empty set of fields are the same bytes
                theirs, ours = (tuple(part or None for part in side) for side in (theirs, ours))
            assert ours == theirs, asked.place
            compared += 1
    assert compared >= 3
    notices = Counter(row.connection for row in scenarios()[name] if row.code == 40 and not row.is_response)
    assert {number: len(fake.told) for number, fake in connections.items() if fake.told} == dict(notices)
    for fake in connections.values():
        assert all(told.is_oneway and told.code == 40 for told in fake.told)


async def test_wrong_requests_are_refused_in_the_same_words(broker: WiredBroker) -> None:
    rows = {
        asked.note: (decode(asked), decode(answered))
        for asked, answered in exchanges("498-json/wrong_requests")
        if answered
    }
    asked, answered = rows["request; consumer list of nobody"]
    assert content(broker.ask(asked)) == content(answered)
    asked, answered = rows["request; heartbeat with an unreadable body"]
    reply = broker.ask(asked)
    assert (reply.code, reply.raw_ext) == (answered.code, answered.raw_ext)
    assert reply.remark is not None
    assert reply.remark.startswith("HeartbeatData: ")


async def test_a_consumer_of_an_unknown_group_is_a_member_without_a_retry_topic(broker: WiredBroker) -> None:
    broker.config.broker = replace(broker.config.broker, auto_create_subscription_group=False)
    connection = FakeConnection()
    (asked,) = [
        decode(asked)
        for asked, _ in exchanges("498-json/wrong_requests")
        if asked.note == "request; heartbeat: unknown group, no auto creation"
    ]
    reply = broker.ask(asked, connection)
    assert (reply.code, reply.raw_ext) == (0, None)
    assert codes_told(connection) == [40]
    assert broker.groups.get("gscg_unknown") is None
    assert "%RETRY%gscg_unknown" not in broker.topics
    assert broker.consumers.get("gscg_unknown") is not None


@pytest.mark.parametrize("scenario", ["533-client-498-server/push_concurrent", "533/push_orderly"])
async def test_heartbeats_of_5_x_clients_are_understood(scenario: str, broker: WiredBroker) -> None:
    seen = 0
    for asked, _ in exchanges(scenario):
        if asked.code == RequestCode.HEART_BEAT:
            assert broker.ask(decode(asked)).code == 0, asked.place
            seen += 1
    assert seen
    assert any(group.subscriptions for group in broker.consumers)


# --- heartbeats -------------------------------------------------------------------------------------------------


async def test_a_heartbeat_makes_the_group_and_its_retry_topic(broker: WiredBroker) -> None:
    connection = FakeConnection()
    reply = broker.ask(msgspec.structs.replace(heartbeat(), version=395, language=0), connection)
    assert (reply.code, reply.version, reply.raw_ext) == (0, 409, None)
    assert broker.groups.get("g") == SubscriptionGroupConfig("g")
    assert broker.topics.get("%RETRY%g") == TopicConfig("%RETRY%g", 1, 1, 6)
    group = broker.consumers.get("g")
    assert group is not None
    (client,) = group.members.values()
    assert (client.client_id, client.version, client.language) == ("10.0.0.9@1", 395, 0)
    assert client.heard_millis == broker.clock.now()
    producers = broker.producers.get("p")
    assert producers == [client]


async def test_the_retry_topic_is_as_the_group_says(broker: WiredBroker) -> None:
    broker.groups.put(replace(SubscriptionGroupConfig("g"), retry_queue_nums=3))
    broker.ask(heartbeat(unitMode=True))
    assert broker.topics.get("%RETRY%g") == TopicConfig("%RETRY%g", 3, 3, 6, topic_sys_flag=2)


async def test_a_group_with_an_illegal_name_gets_no_topic(broker: WiredBroker) -> None:
    assert broker.ask(heartbeat(groups=("../x",))).code == 0
    assert "%RETRY%../x" not in broker.topics


async def test_every_heartbeat_renews_all_groups_of_a_client(broker: WiredBroker) -> None:
    connection = FakeConnection()
    broker.ask(heartbeat(groups=("g", "h")), connection)
    broker.clock.tick(100)
    broker.ask(heartbeat(groups=("g", "h")), connection)
    now = broker.clock.now()
    assert broker.consumers.expire(now + 120_000) == []
    assert broker.producers.expire(now + 120_000) == []
    assert codes_told(connection) == [40, 40]


async def test_all_members_are_told_of_a_change_and_a_lost_one_is_passed_over(broker: WiredBroker) -> None:
    lost, known, new = (FakeConnection(f"10.0.0.9:{port}") for port in (1, 2, 3))
    broker.ask(heartbeat(client="a"), lost)
    broker.ask(heartbeat(client="b"), known)
    for connection in (lost, known):
        connection.told.clear()
    lost.is_up = False
    broker.ask(heartbeat(client="c"), new)
    assert codes_told(known) == codes_told(new) == [40]
    assert known.told[0].header(ConsumerGroupRequest) == ConsumerGroupRequest("g")
    assert known.told[0].is_oneway
    broker.consumers.drop(lost)
    assert codes_told(known) == [40, 40]


@pytest.mark.parametrize("switch", ["broker", "group"])
async def test_nobody_is_told_where_notices_are_switched_off(switch: str, broker: WiredBroker) -> None:
    if switch == "broker":
        broker.config.broker = replace(broker.config.broker, notify_consumer_ids_changed_enable=False)
    else:
        broker.groups.put(replace(SubscriptionGroupConfig("g"), notify_consumer_ids_changed_enable=False))
    connection = FakeConnection()
    broker.ask(heartbeat(), connection)
    other = FakeConnection("10.0.0.9:2")
    broker.ask(heartbeat(client="b"), other)
    broker.consumers.drop(other)
    assert connection.told == []


@pytest.mark.parametrize("body", [b"", b"[]", b'{"clientID":1,"consumerDataSet":7}', b'{"clientID":"c"'])
async def test_an_unreadable_heartbeat_changes_nothing(body: bytes, broker: WiredBroker) -> None:
    reply = broker.ask(request(RequestCode.HEART_BEAT, body=body))
    assert reply.code == 1
    assert reply.remark
    assert len(broker.consumers) == 0


async def test_a_long_body_must_be_standard_json(broker: WiredBroker) -> None:
    padding = b'"' + b"x" * MAX_LENIENT_BYTES + b'"'
    standard = b'{"clientID":"c","padding":' + padding + b"}"
    assert broker.ask(request(RequestCode.HEART_BEAT, body=standard)).code == 0
    lenient = b'{"clientID":"c","table":{0:1},"padding":"x"}'
    assert broker.ask(request(RequestCode.HEART_BEAT, body=lenient)).code == 0
    reply = broker.ask(request(RequestCode.HEART_BEAT, body=b'{"clientID":"c",0:' + padding + b"}"))
    assert reply.code == 1
    assert "not standard JSON" in (reply.remark or "")


async def test_a_heartbeat_that_waited_too_long_is_refused(broker: WiredBroker) -> None:
    broker.keep_waiting(60)
    reply = broker.ask(heartbeat())
    assert reply.code == 2
    assert (reply.remark or "").startswith("[TIMEOUT_CLEAN_QUEUE]")


# --- leaving and lists ------------------------------------------------------------------------------------------


async def test_a_client_leaves_the_groups_it_names(broker: WiredBroker) -> None:
    leaving, staying = FakeConnection("10.0.0.9:1"), FakeConnection("10.0.0.9:2")
    broker.ask(heartbeat(client="a"), leaving)
    broker.ask(heartbeat(client="b"), staying)
    staying.told.clear()
    header = UnregisterClientRequest(client_id="a", consumer_group="g")
    reply = broker.ask(request(RequestCode.UNREGISTER_CLIENT, header), leaving)
    assert (reply.code, reply.raw_ext is None, reply.ext_fields) == (0, False, {})
    assert codes_told(staying) == [40]
    assert len(broker.producers.get("p") or []) == 2
    header = UnregisterClientRequest(client_id="a", producer_group="p")
    broker.ask(request(RequestCode.UNREGISTER_CLIENT, header), leaving)
    assert [client.client_id for client in broker.producers.get("p") or []] == ["b"]


async def test_leaving_what_one_is_not_in_is_no_error(broker: WiredBroker) -> None:
    header = UnregisterClientRequest(client_id="a", producer_group="p", consumer_group="g")
    assert broker.ask(request(RequestCode.UNREGISTER_CLIENT, header)).code == 0
    assert broker.ask(request(RequestCode.UNREGISTER_CLIENT)).code == 0


async def test_a_consumer_list_has_one_entry_per_connection(broker: WiredBroker) -> None:
    members = [FakeConnection(f"10.0.0.9:{port}") for port in (1, 2)]
    for member in members:
        broker.ask(heartbeat(client="same"), member)
    reply = broker.ask(request(RequestCode.GET_CONSUMER_LIST_BY_GROUP, ConsumerGroupRequest("g")), members[0])
    assert json.loads(reply.body_bytes) == {"consumerIdList": ["same", "same"]}
    assert (reply.raw_ext is None, reply.ext_fields) == (False, {})


# --- checks of subscriptions ------------------------------------------------------------------------------------


def check(expression: str, kind: str | None) -> Command:
    body = {
        "clientId": "c",
        "group": "g",
        "subscriptionData": {"topic": "orders", "subString": expression, "expressionType": kind},
    }
    return request(RequestCode.CHECK_CLIENT_CONFIG, body=msgspec.json.encode(body))


@pytest.mark.parametrize("kind", ["TAG", "", None])
async def test_tags_can_always_be_filtered_by(kind: str | None, broker: WiredBroker) -> None:
    reply = broker.ask(check("a || b", kind))
    assert (reply.code, reply.raw_ext) == (0, None)


async def test_filters_that_are_switched_off_are_refused(broker: WiredBroker) -> None:
    broker.config.broker = replace(broker.config.broker, enable_property_filter=False)
    reply = broker.ask(check("a > 1", "SQL92"))
    assert (reply.code, reply.remark) == (1, "The broker does not support consumer to filter message by SQL92")


async def test_an_expression_is_compiled(broker: WiredBroker) -> None:
    assert broker.ask(check("a > 1", "SQL92")).code == 0
    reply = broker.ask(check("a > 'x' AND", "SQL92"))
    assert (reply.code, reply.remark) == (23, "position 5: the string 'x' cannot be compared by >: only numbers can")
    reply = broker.ask(check("a", "LUA"))
    assert (reply.code, reply.remark) == (23, "unknown expression type LUA: expected TAG or SQL92")


# --- queue locks ------------------------------------------------------------------------------------------------


def locks(code: RequestCode, client: str, *queue_ids: int) -> Command:
    queues = [{"topic": "orders", "brokerName": "broker-a", "queueId": queue_id} for queue_id in queue_ids]
    body = {"consumerGroup": "g", "clientId": client, "mqSet": queues, "onlyThisBroker": False}
    return request(code, body=msgspec.json.encode(body))


def locked(reply: Command) -> list[int]:
    assert reply.code == 0
    return [queue["queueId"] for queue in json.loads(reply.body_bytes)["lockOKMQSet"]]


async def test_queues_are_locked_for_one_client_until_it_lets_go_or_falls_silent(broker: WiredBroker) -> None:
    lock, unlock = RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ
    assert locked(broker.ask(locks(lock, "a", 1, 0))) == [0, 1]
    assert locked(broker.ask(locks(lock, "b", 0, 1, 2))) == [2]
    reply = broker.ask(locks(unlock, "a", 0))
    assert (reply.code, reply.raw_ext, reply.body_bytes) == (0, None, b"")
    assert locked(broker.ask(locks(lock, "b", 0, 1))) == [0]
    broker.clock.tick(60.001)
    assert locked(broker.ask(locks(lock, "c", 0, 1, 2))) == [0, 1, 2]


@pytest.mark.parametrize("code", [RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ])
async def test_a_lock_request_must_name_its_group(code: RequestCode, broker: WiredBroker) -> None:
    reply = broker.ask(request(code, body=b'{"clientId":"a","mqSet":[]}'))
    assert reply.code == 1
    assert "consumerGroup" in (reply.remark or "")


async def test_after_a_kill_members_keep_their_queues_until_all_of_them_were_heard(broker: WiredBroker) -> None:
    """Without a list a client keeps what it has; with one that lacks it, it gives up all its queues."""
    ask = request(RequestCode.GET_CONSUMER_LIST_BY_GROUP, ConsumerGroupRequest("g"))

    def answer(connection: FakeConnection) -> tuple[int, list[str]]:
        reply = broker.handle(ask, connection)
        assert reply is not None
        return reply.code, json.loads(reply.body_bytes)["consumerIdList"] if reply.body_bytes else []

    first, second, gone = FakeConnection(), FakeConnection(), FakeConnection()
    broker.handle(heartbeat(client="first"), first)
    assert answer(second) == (0, ["first"]), "a broker that was not killed has no members to wait for"
    broker.clients.was_killed = True
    assert answer(first) == (0, ["first"]), "nobody else was seen"
    assert answer(second) == answer(gone) == (1, []), "they have sent no heartbeat to this broker"
    assert answer(first) == (1, []), "the list would not be complete"
    gone.is_up = False
    broker.handle(heartbeat(client="second"), second)
    assert answer(first) == answer(second) == (0, ["first", "second"])
    stranger = FakeConnection()
    assert answer(stranger) == (1, [])
    await broker.clock.advance(GATHERING_SECONDS + 1)
    assert answer(stranger) == answer(first) == (0, ["first", "second"]), "members had the time for a heartbeat"
