from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from downrange.client.config import ClientConfig
from downrange.client.consumer.addresses import find_address
from downrange.client.consumer.offsets import LocalOffsets, OffsetTable, RemoteOffsets, start_offset
from downrange.client.session import Session
from downrange.model.errors import MQError
from downrange.model.message import MessageQueue
from downrange.protocol.bodies.groups import ConsumeFromWhere
from downrange.protocol.bodies.routes import BrokerData, TopicRouteData
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command
from downrange.settings import ConfigError
from tests.unit.client.fake_cluster import GROUP, TOPIC, FakeCluster, reply

QUEUE = MessageQueue(TOPIC, "broker-a", 1)
RETRY = MessageQueue(f"%RETRY%{GROUP}", "broker-a", 0)
HALF_PAST = 1_700_000_000_000

LAST, FIRST, TIMESTAMP = (
    ConsumeFromWhere.LAST_OFFSET,
    ConsumeFromWhere.FIRST_OFFSET,
    ConsumeFromWhere.TIMESTAMP,
)


@pytest.fixture
async def session(cluster: FakeCluster) -> AsyncIterator[Session]:
    async with Session(ClientConfig((cluster.namesrv,))) as session:
        yield session


# --- in memory


def test_offsets_may_be_kept_from_going_back() -> None:
    table = OffsetTable()
    table.update(QUEUE, 10)
    table.update(QUEUE, 7, increase_only=True)
    assert table.get(QUEUE) == 10
    table.update(QUEUE, 7)
    assert table.get(QUEUE) == 7


def test_only_changes_are_told_and_only_once() -> None:
    table = OffsetTable()
    table.remember(RETRY, 3)
    table.update(QUEUE, 10)
    assert table.take_changed() == {QUEUE: 10}
    assert table.take_changed() == {}
    table.update(QUEUE, 10)
    assert table.take_changed() == {}
    table.put_back(QUEUE)
    table.update(RETRY, 4)
    assert table.take_changed([RETRY]) == {RETRY: 4}
    assert table.take_changed() == {QUEUE: 10}


def test_a_forgotten_queue_is_not_told_any_more() -> None:
    table = OffsetTable()
    table.update(QUEUE, 10)
    table.forget(QUEUE)
    table.put_back(QUEUE)
    assert table.take_changed() == {}
    assert table.get(QUEUE) is None


# --- at the broker


async def test_commits_say_what_javas_say(cluster: FakeCluster, session: Session) -> None:
    cluster.broker.answers[RequestCode.UPDATE_CONSUMER_OFFSET] = reply()
    offsets = RemoteOffsets(session, GROUP)
    offsets.table.update(QUEUE, 42)
    assert await offsets.persist(confirmed=True)
    assert cluster.broker.fields(RequestCode.UPDATE_CONSUMER_OFFSET) == [
        {"consumerGroup": GROUP, "topic": TOPIC, "queueId": "1", "commitOffset": "42", "bname": "broker-a"}
    ]
    assert not cluster.broker.asked[-1].is_oneway
    offsets.table.update(QUEUE, 43)
    assert await offsets.persist()
    async with asyncio.timeout(30):
        while len(cluster.broker.fields(RequestCode.UPDATE_CONSUMER_OFFSET)) < 2:
            await asyncio.sleep(0.001)
    assert cluster.broker.asked[-1].is_oneway


async def test_a_commit_that_failed_is_tried_again(cluster: FakeCluster, session: Session) -> None:
    offsets = RemoteOffsets(session, GROUP)
    offsets.table.update(QUEUE, 42)
    cluster.broker.answers[RequestCode.UPDATE_CONSUMER_OFFSET] = reply(ResponseCode.SYSTEM_ERROR, "no")
    assert not await offsets.persist(confirmed=True)
    cluster.broker.answers[RequestCode.UPDATE_CONSUMER_OFFSET] = reply()
    assert await offsets.persist(confirmed=True)
    assert len(cluster.broker.fields(RequestCode.UPDATE_CONSUMER_OFFSET)) == 2


async def test_what_is_committed_is_asked_of_the_broker(cluster: FakeCluster, session: Session) -> None:
    offsets = RemoteOffsets(session, GROUP)
    cluster.broker.answers[RequestCode.QUERY_CONSUMER_OFFSET] = lambda command: command.reply(
        ext_fields={"offset": "17"}
    )
    assert await offsets.load(QUEUE) == 17
    cluster.broker.answers[RequestCode.QUERY_CONSUMER_OFFSET] = reply(ResponseCode.QUERY_NOT_FOUND, "Not found")
    assert await offsets.load(QUEUE) is None
    # Any other failure says nothing about the offset: to begin elsewhere could skip messages.
    cluster.broker.answers[RequestCode.QUERY_CONSUMER_OFFSET] = reply(ResponseCode.SYSTEM_ERROR, "busy")
    with pytest.raises(MQError):
        await offsets.load(QUEUE)


# --- where to begin


@pytest.mark.parametrize("where", list(ConsumeFromWhere))
async def test_a_committed_offset_comes_first(session: Session, where: ConsumeFromWhere) -> None:
    assert await start_offset(session, QUEUE, 5, where, HALF_PAST) == 5


@pytest.mark.parametrize(
    ("where", "queue", "expected"),
    [
        (LAST, QUEUE, 100),
        (LAST, RETRY, 0),
        (FIRST, QUEUE, 0),
        (FIRST, RETRY, 0),
        (TIMESTAMP, QUEUE, 50),
        (TIMESTAMP, RETRY, 100),
    ],
)
async def test_a_new_group_begins_where_it_says(
    cluster: FakeCluster, session: Session, where: ConsumeFromWhere, queue: MessageQueue, expected: int
) -> None:
    def by_time(command: Command) -> Command:
        assert command.ext_fields["timestamp"] == str(HALF_PAST)
        return command.reply(ext_fields={"offset": "50"})

    cluster.broker.answers[RequestCode.GET_MAX_OFFSET] = lambda command: command.reply(ext_fields={"offset": "100"})
    cluster.broker.answers[RequestCode.SEARCH_OFFSET_BY_TIMESTAMP] = by_time
    assert await start_offset(session, queue, None, where, HALF_PAST) == expected


# --- in a file


async def test_the_file_is_javas(tmp_path: Path) -> None:
    offsets = LocalOffsets(tmp_path, "10.0.0.9@DEFAULT", "groupA")
    offsets.table.update(MessageQueue("TopicA", "broker-a", 0), 7)
    offsets.table.update(MessageQueue("TopicA", "broker-a", 1), 8)
    assert await offsets.persist()
    path = tmp_path / "10.0.0.9@DEFAULT" / "groupA" / "offsets.json"
    assert path.read_text() == (
        '{\n\t"offsetTable":{{\n\t\t\t"brokerName":"broker-a",\n\t\t\t"queueId":0,\n\t\t\t"topic":"TopicA"\n\t\t}:7,'
        '{\n\t\t\t"brokerName":"broker-a",\n\t\t\t"queueId":1,\n\t\t\t"topic":"TopicA"\n\t\t}:8\n\t}\n}'
    )
    again = LocalOffsets(tmp_path, "10.0.0.9@DEFAULT", "groupA")
    assert await again.load(MessageQueue("TopicA", "broker-a", 1)) == 8
    assert await again.load(MessageQueue("TopicA", "broker-a", 2)) is None


async def test_a_file_java_wrote_is_read(tmp_path: Path) -> None:
    offsets = LocalOffsets(tmp_path, "c", "g")
    offsets.path.parent.mkdir(parents=True)
    offsets.path.write_text('{"offsetTable":{{"brokerName":"broker-a","queueId":0,"topic":"TopicA"}:7}}')
    assert await offsets.load(MessageQueue("TopicA", "broker-a", 0)) == 7


async def test_the_state_before_helps_when_the_file_is_damaged(tmp_path: Path) -> None:
    offsets = LocalOffsets(tmp_path, "c", "g")
    for value in (7, 8):
        offsets.table.update(QUEUE, value)
        await offsets.persist()
    offsets.path.write_text("{")
    assert await LocalOffsets(tmp_path, "c", "g").load(QUEUE) == 7


async def test_two_damaged_files_are_told_not_guessed(tmp_path: Path) -> None:
    offsets = LocalOffsets(tmp_path, "c", "g")
    offsets.path.parent.mkdir(parents=True)
    offsets.path.write_text("{")
    offsets.path.with_name("offsets.json.bak").write_text("x")
    with pytest.raises(ConfigError, match="repair them, or delete both"):
        await LocalOffsets(tmp_path, "c", "g").load(QUEUE)


async def test_a_file_that_cannot_be_written_is_written_later(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("in the way")
    offsets = LocalOffsets(tmp_path, "c", "g")
    offsets.table.update(QUEUE, 7)
    assert not await offsets.persist()
    (tmp_path / "c").unlink()
    assert await offsets.persist()
    assert await LocalOffsets(tmp_path, "c", "g").load(QUEUE) == 7


# --- which process to ask


def route(**addresses: dict[int, str]) -> TopicRouteData:
    return TopicRouteData(
        broker_datas=tuple(
            BrokerData(cluster="c", broker_name=name, broker_addrs=found) for name, found in addresses.items()
        )
    )


@pytest.mark.parametrize(
    ("known", "wanted_id", "expected"),
    [
        ({0: "m", 1: "s1"}, 0, 0),
        ({0: "m", 1: "s1"}, 1, 1),
        ({0: "m", 2: "s2"}, 1, 2),
        ({0: "m"}, 1, 0),
        ({1: "s1"}, 0, 1),
        ({3: "s3"}, 1, 3),
    ],
)
def test_the_suggested_process_or_the_next_or_any(known: dict[int, str], wanted_id: int, expected: int) -> None:
    found = find_address(route(b=known), "b", wanted_id)
    assert found is not None
    assert (found.address, found.broker_id, found.is_master) == (known[expected], expected, expected == 0)


def test_a_broker_the_route_does_not_name() -> None:
    assert find_address(route(b={0: "m"}), "c") is None
