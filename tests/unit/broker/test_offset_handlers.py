from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from downrange.protocol.bodies.offsets import (
    GetMaxOffsetRequest,
    QueryConsumerOffsetRequest,
    QueueRequest,
    SearchOffsetRequest,
    UpdateConsumerOffsetRequest,
)
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request
from downrange.protocol.framing import FrameDecoder
from tests.support.golden import scenarios
from tests.unit.broker.wired import WiredBroker, wire
from tests.unit.store.small_store import NOW, put

NOT_FOUND = "Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first"


@pytest.fixture
async def broker(tmp_path: Path) -> Any:
    wired = wire(tmp_path)
    yield wired
    wired.close()


def query(topic: str = "orders", queue_id: int = 0, zero: bool | None = None) -> Command:
    header = QueryConsumerOffsetRequest(consumer_group="g", topic=topic, queue_id=queue_id, set_zero_if_not_found=zero)
    return request(RequestCode.QUERY_CONSUMER_OFFSET, header)


def commit(offset: int, *, topic: str = "orders", group: str = "g", queue_id: int = 0) -> Command:
    header = UpdateConsumerOffsetRequest(consumer_group=group, topic=topic, queue_id=queue_id, commit_offset=offset)
    return request(RequestCode.UPDATE_CONSUMER_OFFSET, header)


def queue(code: RequestCode, topic: str = "orders", queue_id: int = 0) -> Command:
    return request(code, QueueRequest(topic=topic, queue_id=queue_id))


def search(timestamp: int) -> Command:
    return request(
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, SearchOffsetRequest(topic="orders", queue_id=0, timestamp=timestamp)
    )


async def test_requests_for_an_unknown_topic_are_answered_as_by_the_genuine_broker(broker: WiredBroker) -> None:
    rows = [row for row in scenarios()["498-json/offsets"] if row.note.endswith("unknown topic: raw requests")]
    commands = [next(iter(FrameDecoder().feed(row.frame))) for row in rows]
    replies = {command.opaque: command for command in commands if command.is_response}
    asked = [command for command in commands if not command.is_response and command.code in (14, 29, 30, 31, 32)]
    assert len(asked) == 5
    for command in asked:
        ours, theirs = broker.ask(command), replies[command.opaque]
        assert (ours.code, dict(ours.ext_fields), ours.remark) == (theirs.code, dict(theirs.ext_fields), theirs.remark)


# --- committed --------------------------------------------------------------------------------------------------


async def test_a_commit_is_found_again(broker: WiredBroker) -> None:
    reply = broker.ask(commit(7))
    assert (reply.code, reply.raw_ext is None, reply.ext_fields) == (0, False, {})
    assert broker.ask(query()).ext_fields == {"offset": "7"}
    broker.ask(commit(3))
    assert broker.ask(query()).ext_fields == {"offset": "3"}


async def test_a_new_group_on_a_young_queue_starts_at_its_beginning(broker: WiredBroker) -> None:
    assert broker.ask(query("unknown")).ext_fields == {"offset": "0"}
    for _ in range(3):
        put(broker.store, topic="orders")
    assert broker.ask(query()).ext_fields == {"offset": "0"}
    broker.ask(commit(-1))
    assert broker.ask(query()).ext_fields == {"offset": "0"}


async def test_a_5_x_client_may_forbid_that(broker: WiredBroker) -> None:
    reply = broker.ask(query(zero=False))
    assert (reply.code, reply.remark, reply.raw_ext is None, reply.ext_fields) == (22, NOT_FOUND, False, {})
    assert broker.ask(query(zero=True)).code == 0
    broker.ask(commit(4))
    assert broker.ask(query(zero=False)).ext_fields == {"offset": "4"}


async def test_nothing_is_found_when_the_first_message_lies_beyond_memory(tmp_path: Path) -> None:
    broker = wire(tmp_path)
    broker.store.memory_limit = 400
    put(broker.store, topic="orders")
    put(broker.store, topic="others")
    assert broker.ask(query()).code == 0
    put(broker.store, b"x" * 400, topic="others")
    reply = broker.ask(query())
    assert (reply.code, reply.remark) == (22, NOT_FOUND)
    assert broker.ask(query("unknown")).code == 0
    broker.close()


async def test_nothing_is_found_when_the_first_message_is_gone(tmp_path: Path) -> None:
    broker = wire(tmp_path, mapped_file_size_commit_log=4096)
    for _ in range(60):
        put(broker.store, b"x" * 100, topic="orders")
    broker.store.remove_files(broker.store.take_oldest_files(1))
    broker.store.delete_dependents()
    assert broker.store.min_offset_of("orders", 0) > 0
    assert broker.ask(query()).code == 22
    broker.close()


@pytest.mark.parametrize(("topic", "group"), [("a@b", "g"), ("orders", "g@h")])
async def test_names_the_file_could_not_hold_are_refused(topic: str, group: str, broker: WiredBroker) -> None:
    reply = broker.ask(commit(1, topic=topic, group=group))
    assert reply.code == 1
    assert "'@' is not allowed" in (reply.remark or "")
    assert broker.offsets.table().offset_table == {}


async def test_a_missing_or_wrong_field_is_named(broker: WiredBroker) -> None:
    fields = {"consumerGroup": "g", "topic": "orders", "queueId": "0"}
    reply = broker.ask(request(RequestCode.UPDATE_CONSUMER_OFFSET, ext_fields=fields))
    assert (reply.code, reply.remark) == (1, "missing required field 'commitOffset'")
    reply = broker.ask(request(RequestCode.QUERY_CONSUMER_OFFSET, ext_fields={**fields, "queueId": "x"}))
    assert reply.code == 1
    assert "queueId" in (reply.remark or "")


async def test_all_commits_are_told_to_slaves(broker: WiredBroker) -> None:
    reply = broker.ask(request(RequestCode.GET_ALL_CONSUMER_OFFSET))
    assert (reply.code, reply.raw_ext, reply.body_bytes) == (0, None, b'{"offsetTable":{}}')
    broker.ask(commit(7, queue_id=2))
    broker.ask(commit(1, topic="%RETRY%g"))
    body = broker.ask(request(RequestCode.GET_ALL_CONSUMER_OFFSET)).body_bytes
    assert json.loads(body) == {"offsetTable": {"orders@g": {"2": 7}, "%RETRY%g@g": {"0": 1}}}


# --- of queues --------------------------------------------------------------------------------------------------


async def test_the_ends_of_a_queue(broker: WiredBroker) -> None:
    for _ in range(4):
        put(broker.store, topic="orders")
        broker.clock.tick(1)
    header = GetMaxOffsetRequest(topic="orders", queue_id=0, committed=True, bname="broker-a")
    assert broker.ask(request(RequestCode.GET_MAX_OFFSET, header)).ext_fields == {"offset": "4"}
    assert broker.ask(queue(RequestCode.GET_MIN_OFFSET)).ext_fields == {"offset": "0"}
    assert broker.ask(queue(RequestCode.GET_EARLIEST_MSG_STORETIME)).ext_fields == {"timestamp": str(NOW)}
    assert broker.ask(queue(RequestCode.GET_EARLIEST_MSG_STORETIME, queue_id=1)).ext_fields == {"timestamp": "-1"}


async def test_an_offset_is_found_by_time(broker: WiredBroker) -> None:
    for _ in range(4):
        put(broker.store, topic="orders")
        broker.clock.tick(1)
    found = {time: broker.ask(search(NOW + time)).ext_fields["offset"] for time in (-5000, 0, 1000, 1400, 1600, 9000)}
    assert found == {-5000: "0", 0: "0", 1000: "1", 1400: "1", 1600: "2", 9000: "3"}
