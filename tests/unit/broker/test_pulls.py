"""Pulls of all kinds: which bytes answer them, and what is counted and committed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from downrange.compiled import steps
from downrange.model.topics import OFFSET_MOVED_TOPIC, SubscriptionGroupConfig
from downrange.protocol.bodies.fields import encode_fields
from downrange.protocol.bodies.pull import PullMessageRequest, PullMessageResponse
from downrange.protocol.bodies.pull_frames import parse_pull
from downrange.protocol.codes import ResponseCode, SerializeType
from downrange.protocol.command import Command
from downrange.protocol.framing import FrameDecoder, decode_frame, encode
from downrange.store.config import BrokerRole
from downrange.store.read_result import ReadResult
from downrange.transport.connection import Connection
from downrange.transport.limits import Limits
from tests.unit.broker.fake_transport import FakeTransport, SlowTransport
from tests.unit.broker.served import ServedBroker
from tests.unit.broker.test_sends import send

BINARY, JSON = SerializeType.ROCKETMQ, SerializeType.JSON
COMMIT, SUSPEND, SUBSCRIPTION = 1, 2, 4


class PullWay(ServedBroker):
    """A broker with messages in two queues, which is pulled from over one connection."""

    transport: SlowTransport

    def __init__(self, root: Path, **options: Any) -> None:
        options.setdefault("mapped_file_size_commit_log", 1 << 20)
        options.setdefault("mapped_file_size_consume_queue", 20_000)
        super().__init__(root, transport=SlowTransport(1 << 30), **options)
        self.transport.protocol = self.connection

    def feed_quietly(self, frames: Sequence[bytes]) -> None:
        """What is answered at once stays in the transport, with what is answered later."""
        self.connection.data_received(b"".join(frames))

    def fill(self, *, count: int = 200, queues: int = 2, size: int = 100) -> None:
        for number in range(count):
            self.feed(send(number, body=bytes([number % 251]) * size, queue_id=number % queues))

    def counts(self) -> tuple[dict[Any, Any], dict[Any, int], int, dict[int, int]]:
        """Messages that groups got, answered pulls by request and response code, pulls that missed, offsets."""
        statistics = self.broker.statistics
        got = {key: (tally.calls, tally.messages, tally.bytes) for key, tally in statistics.gets()}
        pulls = {key: sum(histogram.counts) for key, histogram in statistics.rpcs.items() if key[0] in (11, 361)}
        return got, pulls, statistics.missed_gets, self.broker.offsets.of("TopicA", "group")


def pull(number: int, offset: int, kind: int = JSON, *, flag: int = 0, code: int = 11, **fields: Any) -> bytes:
    values: dict[str, Any] = {
        "consumer_group": "group",
        "topic": "TopicA",
        "queue_id": 1,
        "queue_offset": offset,
        "max_msg_nums": 32,
        "sys_flag": COMMIT | SUBSCRIPTION,
        "commit_offset": offset,
        "suspend_timeout_millis": 15_000,
        "subscription": "*",
        "sub_version": 1_790_000_000_000,
        "expression_type": "TAG",
    }
    request = PullMessageRequest(**(values | fields))
    command = Command(code, number, flag, encode_fields(request), serialize_type=int(kind))
    return encode(command)


def reply(
    number: int,
    kind: int,
    code: int,
    remark: str,
    numbers: tuple[int, int, int, int] | None = None,
    body: bytes = b"",
) -> bytes:
    """As a `Command` is encoded. `numbers`: suggested broker, next offset, smallest, largest."""
    fields = {}
    if numbers is not None:
        suggested, next_offset, low, high = numbers
        fields = encode_fields(
            PullMessageResponse(
                suggest_which_broker_id=suggested, next_begin_offset=next_offset, min_offset=low, max_offset=high
            )
        )
    return encode(Command(code, number, 1, fields, body, remark=remark, serialize_type=int(kind)))


def records(way: PullWay, offset: int, stop: int, queue_id: int = 1) -> bytes:
    """The records of a queue, read one by one out of the log."""
    store = way.broker.store
    found = [store.record_at(store.physical_offset_of("TopicA", queue_id, number)) for number in range(offset, stop)]
    return b"".join(record for record in found if record is not None)


def found(way: PullWay, number: int, offset: int, stop: int, kind: int = JSON, *, end: int = 100, **more: int) -> bytes:
    """The reply with the records from `offset` up to `stop`."""
    body = records(way, offset, stop, more.get("queue_id", 1))
    next_offset = more.get("next_offset", stop)
    return reply(number, kind, 0, "FOUND", (more.get("suggested", 0), next_offset, 0, end), body)


@pytest.fixture
async def way(tmp_path: Path) -> AsyncIterator[PullWay]:
    """Two queues with a hundred messages each."""
    made = PullWay(tmp_path, broker={"enable_property_filter": True})
    made.fill()
    yield made
    made.broker.waiting.check()
    made.broker.close()


@pytest.mark.parametrize("code", [11, 361])
@pytest.mark.parametrize("kind", [JSON, BINARY])
@pytest.mark.parametrize("queues", [1, 2])
async def test_draining_a_backlog(tmp_path: Path, kind: SerializeType, queues: int, code: int) -> None:
    way = PullWay(tmp_path, mapped_file_size_consume_queue=6000)
    way.fill(queues=queues, count=50 * queues)
    queue_id = queues - 1
    chunk = [pull(n, n * 10, kind, max_msg_nums=10, queue_id=queue_id, code=code) for n in range(5)]
    expected = [found(way, n, n * 10, n * 10 + 10, kind, end=50, queue_id=queue_id) for n in range(5)]
    assert way.feed(*chunk) == b"".join(expected)
    got, pulls, missed, committed = way.counts()
    assert got == {("TopicA", "group"): (5, 50, len(records(way, 0, 50, queue_id)))}
    assert (pulls, missed, committed) == ({(code, 0): 5}, 0, {queue_id: 40})
    assert (way.pulls.accelerated, way.pulls.not_accelerated) == ((0, 5) if steps is None else (5, 0))
    way.broker.close()


@pytest.mark.parametrize("kind", [JSON, BINARY])
@pytest.mark.parametrize("opaque", [0, 1, -1, 2_147_483_647])
async def test_opaques_and_offsets_may_have_any_size(way: PullWay, kind: SerializeType, opaque: int) -> None:
    for offset in (0, 9):
        for commit in (0, 5, 1 << 58, -1):
            wanted = found(way, opaque, offset, offset + 32, kind)
            assert way.feed(pull(opaque, offset, kind, commit_offset=commit)) == wanted
            assert way.broker.offsets.of("TopicA", "group") == {1: commit}


FAQ = "\nSee http://rocketmq.apache.org/docs/faq/ for further details."
ILLEGAL = "queueId[{}] is illegal, topic:[TopicA] topicConfig.readQueueNums:[4] consumer:[/10.0.0.2:42911]"
SUSPENDED = SUBSCRIPTION | SUSPEND


@pytest.mark.parametrize("code", [11, 361])
@pytest.mark.parametrize("kind", [JSON, BINARY])
@pytest.mark.parametrize(
    ("offset", "fields", "answer"),
    [
        (100, {}, (19, "OFFSET_OVERFLOW_ONE", (0, 100, 0, 100))),
        (100, {"bulk": True}, (19, "OFFSET_OVERFLOW_ONE", (0, 100, 0, 100))),
        (5000, {}, (21, "OFFSET_OVERFLOW_BADLY", (0, 100, 0, 100))),
        (5000, {"sys_flag": SUSPENDED}, (21, "OFFSET_OVERFLOW_BADLY", (0, 100, 0, 100))),
        (-1, {}, (21, "OFFSET_TOO_SMALL", (0, 0, 0, 100))),
        (0, {"queue_id": 3}, (19, "NO_MESSAGE_IN_QUEUE", (0, 0, 0, 0))),
        (5, {"queue_id": 3}, (21, "NO_MESSAGE_IN_QUEUE", (0, 0, 0, 0))),
        (-1, {"queue_id": 3, "sys_flag": SUSPENDED}, (21, "NO_MESSAGE_IN_QUEUE", (0, 0, 0, 0))),
        (0, {"subscription": "other"}, (20, "NO_MATCHED_MESSAGE", (0, 100, 0, 100))),
        (0, {"subscription": "a = 1", "expression_type": "SQL92"}, (20, "NO_MATCHED_MESSAGE", (0, 100, 0, 100))),
        (0, {"queue_id": 4}, (1, ILLEGAL.format(4))),
        (0, {"queue_id": -1}, (1, ILLEGAL.format(-1))),
        (0, {"topic": "Unknown"}, (17, f"topic[Unknown] not exist, apply first please! {FAQ}")),
        (0, {"consumer_group": "not a group"}, (26, f"subscription group [not a group] does not exist, {FAQ}")),
        (
            0,
            {"subscription": "x", "expression_type": "NONE"},
            (23, "unknown expression type NONE: expected TAG or SQL92"),
        ),
        (0, {"sys_flag": 0}, (24, f"the consumer's group info not exist{FAQ}")),  # no heartbeat told what it wants
    ],
)
async def test_a_pull_that_finds_nothing_is_told_why(
    way: PullWay, offset: int, fields: dict[str, Any], answer: tuple[Any, ...], kind: SerializeType, code: int
) -> None:
    odd = pull(2, offset, kind, code=code, **fields)
    expected = found(way, 1, 3, 35, kind), reply(2, kind, *answer), found(way, 3, 4, 36, kind)
    assert way.feed(pull(1, 3, kind), odd, pull(3, 4, kind)) == b"".join(expected)
    _, pulls, missed, _ = way.counts()
    assert pulls == {(11, 0): 2, (code, answer[0]): 1}
    assert missed == (len(answer) == 3)
    moved = answer[0] == ResponseCode.PULL_OFFSET_MOVED
    assert way.broker.store.max_offset_of(OFFSET_MOVED_TOPIC, 0) == moved, "an operator can see who was moved"


@pytest.mark.parametrize("kind", [JSON, BINARY])
async def test_a_header_without_a_field_is_an_error(way: PullWay, kind: SerializeType) -> None:
    fields = dict(decode_frame(FrameDecoder().frames(pull(1, 0))[0]).ext_fields)
    del fields["topic"]
    broken = encode(Command(11, 1, 0, fields, serialize_type=int(kind)))
    first, second = FrameDecoder().feed(way.feed(broken, pull(2, 0, kind)))
    assert (first.code, first.opaque, "topic" in (first.remark or "")) == (ResponseCode.SYSTEM_ERROR, 1, True)
    assert (second.code, second.opaque) == (ResponseCode.SUCCESS, 2)


async def test_a_header_that_cannot_be_read_closes_its_connection(way: PullWay) -> None:
    (frame,) = FrameDecoder().frames(pull(1, 0, BINARY))
    broken = frame[0], frame[1][:-3], frame[2]
    (good,) = FrameDecoder().frames(pull(2, 0, BINARY))
    other = Connection()
    transport = FakeTransport()
    other.connection_made(transport)  # type: ignore[arg-type]
    way.pulls.take([broken, good, good], [way.connection, way.connection, other], 0, 3)
    assert way.transport.is_aborted
    assert way.broker.statistics.found_gets == 1, "frames behind the broken one are not trusted"
    assert not transport.is_aborted
    other.close()
    assert transport.taken() == found(way, 2, 0, 32, BINARY)


async def test_frames_before_and_behind_the_run_are_left_alone(way: PullWay) -> None:
    frames = FrameDecoder().frames(b"".join(pull(n, n) for n in range(4)))
    way.pulls.take(frames, [way.connection] * 4, 1, 3)
    way.connection.close()
    assert way.transport.taken() == found(way, 1, 1, 33) + found(way, 2, 2, 34)


async def test_a_reply_is_no_pull(way: PullWay) -> None:
    frames = FrameDecoder().frames(pull(1, 0, flag=1) + pull(2, 0, flag=1, code=361))
    way.pulls.take(frames, [way.connection] * 2, 0, 2)
    way.connection.close()
    assert way.transport.taken() == b""
    assert way.counts()[0] == {}


async def test_a_oneway_pull_gets_no_reply_but_is_carried_out(way: PullWay) -> None:
    assert way.feed(pull(1, 7, flag=2), pull(2, 0, flag=2, topic="Unknown"), pull(3, 0, flag=2, max_msg_nums=1)) == b""
    assert way.counts()[3] == {1: 0}
    way.feed(waiting(4, 100, flag=2))
    assert way.usage.requests == len(way.broker.waiting) == 1
    assert way.feed(send(900, queue_id=1)) != b""
    await settled()
    assert (way.transport.taken(), way.usage.requests) == (b"", 0)


@pytest.mark.parametrize("kind", [JSON, BINARY])
@pytest.mark.parametrize("max_msg_nums", [-1, 0, 1, 31, 32, 33, 1000])
async def test_any_number_of_messages_may_be_asked_for(way: PullWay, kind: SerializeType, max_msg_nums: int) -> None:
    for number, offset in enumerate((0, 50, 95, 99)):
        stop = min(100, offset + min(32, max(1, max_msg_nums)))
        expected = found(way, number, offset, stop, kind)
        assert way.feed(pull(number, offset, kind, max_msg_nums=max_msg_nums)) == expected


@pytest.mark.parametrize("size", [100, 3000])
async def test_a_bulk_pull_gets_as_much_as_it_asks_for(tmp_path: Path, size: int) -> None:
    way = PullWay(tmp_path, broker={"max_transfer_bytes_on_bulk_pull": 200_000})
    way.fill(size=size)
    for kind in (JSON, BINARY):
        stop = 70 if size == 100 else 200_000 // (len(records(way, 0, 1)))
        assert way.feed(pull(1, 0, kind, bulk=True, max_msg_nums=70)) == found(way, 1, 0, stop, kind)
    way.broker.close()


async def test_messages_in_several_files(tmp_path: Path) -> None:
    way = PullWay(tmp_path, mapped_file_size_commit_log=8192)
    way.fill()
    for number in range(14):
        stop = min(100, number * 7 + 7)
        assert way.feed(pull(number, number * 7, max_msg_nums=7)) == found(way, number, number * 7, stop)
    if steps is not None:
        assert way.pulls.accelerated > 0, "those in one file"
    assert way.pulls.not_accelerated > 0
    way.broker.close()


@pytest.mark.parametrize("memory_limit", [400, 20_000])
async def test_messages_that_are_no_longer_in_memory_come_from_the_slave(tmp_path: Path, memory_limit: int) -> None:
    way = PullWay(tmp_path, broker={"slave_read_enable": True})
    way.broker.store.memory_limit = memory_limit
    way.fill()
    limit = way.broker.store.max_offset - memory_limit
    for number in range(10):
        for count in (1, 7, 8, 9, 32):
            answer = way.feed(pull(number, number * 10, max_msg_nums=count))
            (command,) = FrameDecoder().feed(answer)
            stop = command.header(PullMessageResponse).next_begin_offset
            ends = [way.broker.store.physical_offset_of("TopicA", 1, at) for at in (stop - 1, min(stop, 99))]
            assert 0 < stop - number * 10 <= (count if ends[1] >= limit else min(8, count))
            suggested = command.header(PullMessageResponse).suggest_which_broker_id
            assert suggested == (1 if ends[1] < limit else 0), "the first message that did not fit decides"
            assert answer == found(way, number, number * 10, stop, suggested=suggested)
    way.broker.close()


@pytest.mark.parametrize("kind", [JSON, BINARY])
@pytest.mark.parametrize("ext", [False, True])
@pytest.mark.parametrize("subscription", ["TagA || TagB", "TagB || TagA || TagC"])
async def test_pulls_by_tag(tmp_path: Path, kind: SerializeType, subscription: str, ext: bool) -> None:
    way = PullWay(tmp_path, enable_consume_queue_ext=ext)
    way.fill()
    for number in range(5):
        offset = number * 20
        expected = found(way, number, offset, offset + 5, kind)
        assert way.feed(pull(number, offset, kind, subscription=subscription, max_msg_nums=5)) == expected
    assert (way.pulls.accelerated == 5) == (steps is not None and not ext)
    way.broker.close()


@pytest.mark.parametrize("kind", [JSON, BINARY])
async def test_pulls_by_expression(way: PullWay, kind: SerializeType) -> None:
    expression = "TAGS = 'TagA' AND nothing IS NULL"
    for number in range(5):
        offset = number * 15
        expected = found(way, number, offset, offset + 32, kind)
        assert way.feed(pull(number, offset, kind, expression_type="SQL92", subscription=expression)) == expected


@pytest.mark.parametrize(
    ("broker", "answer"),
    [
        ({"broker_permission": 2}, (16, "the broker[10.0.0.1] pulling message is forbidden")),
        (
            {"auto_create_subscription_group": False},
            (26, f"subscription group [group] does not exist, {FAQ}"),
        ),
    ],
)
async def test_the_configuration_counts(tmp_path: Path, broker: dict[str, Any], answer: tuple[int, str]) -> None:
    way = PullWay(tmp_path, broker=broker)
    assert way.feed(pull(0, 0)) == reply(0, JSON, *answer)
    way.broker.close()


async def test_a_group_that_may_not_consume_is_refused(way: PullWay) -> None:
    way.broker.groups.put(SubscriptionGroupConfig("group", consume_enable=False))
    assert way.feed(pull(0, 0)) == reply(0, JSON, 16, "subscription group no permission, group")


async def test_sends_and_pulls_of_one_chunk_are_answered_in_order(way: PullWay) -> None:
    chunk = [send(900, queue_id=1), pull(1, 0), pull(2, 90, max_msg_nums=99), send(901, queue_id=1), pull(3, 99)]
    answers = FrameDecoder().feed(way.feed(*chunk))
    assert [answer.opaque for answer in answers] == [900, 1, 2, 901, 3]
    ends = [answer.header(PullMessageResponse).next_begin_offset for answer in answers if answer.opaque < 900]
    assert ends == [32, 101, 102]


@pytest.mark.parametrize("pause_after", [1, 5000, 300_000])
async def test_a_peer_that_does_not_read_is_not_answered_further(tmp_path: Path, pause_after: int) -> None:
    way = PullWay(tmp_path)
    way.fill(size=3000)
    expected = b"".join(found(way, n, n, n + 20) for n in range(40))
    way.transport._pause_after = pause_after
    answered = way.feed(*[pull(n, n, max_msg_nums=20) for n in range(40)])
    assert not way.connection.is_writable
    assert len(answered) < 400_000, "what one chunk asks for must not be held all at once"
    while len(answered) < len(expected):
        way.connection.resume_writing()
        more = way.transport.taken()
        assert more, "the pulls that were deferred are answered"
        answered += more
    assert answered == expected
    way.broker.close()


async def test_an_error_is_the_answer_to_a_pull_and_the_next_is_answered(
    way: PullWay, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = way.broker.store.read

    def fail_first(topic: str, queue_id: int, offset: int, *more: Any, **options: Any) -> ReadResult:
        if offset == 0:
            raise ZeroDivisionError("a bug")
        return read(topic, queue_id, offset, *more, **options)

    monkeypatch.setattr(way.broker.store, "read", fail_first)
    expected = encode(Command(1, 1, 1, remark="ZeroDivisionError: a bug"))
    assert way.feed(pull(1, 0), pull(2, 5)) == expected + found(way, 2, 5, 37)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def waiting(number: int, offset: int, kind: int = JSON, **fields: Any) -> bytes:
    return pull(number, offset, kind, **({"sys_flag": COMMIT | SUSPEND | SUBSCRIPTION} | fields))


async def later(way: PullWay, *frames: bytes) -> bytes:
    """What is answered to these, but for sends, at once or in the next turns of the loop."""
    way.feed_quietly(frames)
    await settled()
    way.broker.waiting.check()
    assert way.usage.requests == len(way.broker.waiting), "waiting pulls count as requests that are being answered"
    answers = FrameDecoder().frames(way.transport.taken())
    decoded = [decode_frame(frame) for frame in answers]
    return b"".join(encode(command) for command in decoded if command.opaque < 900)


@pytest.mark.parametrize("code", [11, 361])
@pytest.mark.parametrize("kind", [JSON, BINARY])
async def test_a_pull_that_waits_gets_what_arrives(way: PullWay, kind: SerializeType, code: int) -> None:
    assert await later(way, waiting(1, 100, kind, commit_offset=77, code=code)) == b""
    assert way.counts()[2:] == (1, {1: 77})
    assert await later(way, send(900, queue_id=0)) == b""
    both = await later(way, send(901, queue_id=1), send(902, queue_id=1))
    assert both == found(way, 1, 100, 102, kind, end=102)
    late = await later(way, waiting(2, 102, kind), waiting(3, 102, kind), waiting(4, 101, kind))
    assert late == found(way, 4, 101, 102, kind, end=102)
    one = await later(way, send(903, queue_id=1), waiting(5, 103, kind))
    assert one == found(way, 2, 102, 103, kind, end=103) + found(way, 3, 102, 103, kind, end=103)
    assert await later(way, waiting(6, 0, kind, queue_id=3)) == b"", "it has never had a message"
    assert await later(way, send(904, queue_id=3)) == found(way, 6, 0, 1, kind, end=1, queue_id=3)
    assert len(way.broker.waiting) == 1
    way.broker.waiting.drop(way.connection)
    assert way.usage.requests == 0


@pytest.mark.parametrize("kind", [JSON, BINARY])
@pytest.mark.parametrize(
    ("wants", "fields"),
    [
        (True, {"subscription": "TagA || x"}),
        (False, {"subscription": "x"}),
        (True, {"subscription": "TAGS = 'TagA'", "expression_type": "SQL92"}),
        (False, {"subscription": "TAGS = 'x'", "expression_type": "SQL92"}),
    ],
)
async def test_a_pull_that_waits_gets_what_it_wants(
    way: PullWay, kind: SerializeType, wants: bool, fields: dict[str, Any]
) -> None:
    assert await later(way, waiting(1, 100, kind, **fields)) == b""
    woken = await later(way, send(900, queue_id=1))
    assert woken == (found(way, 1, 100, 101, kind, end=101) if wants else b"")
    way.broker.waiting.drop(way.connection)


@pytest.mark.parametrize("kind", [JSON, BINARY])
async def test_a_pull_that_waited_in_vain_is_told_so(way: PullWay, kind: SerializeType) -> None:
    way.feed(waiting(1, 100, kind), waiting(2, 100, kind, subscription="x"))
    way.broker.waiting.notify_all()
    expected = [reply(number, kind, 19, "OFFSET_OVERFLOW_ONE", (0, 100, 0, 100)) for number in (1, 2)]
    assert await later(way) == b"".join(expected)
    assert way.counts()[1:3] == ({}, 4), "each has missed twice, and its wait is no time that an answer took"


async def test_a_pull_that_waits_for_no_time_is_answered_soon(way: PullWay) -> None:
    assert way.feed(waiting(7, 100, suspend_timeout_millis=0)) == b""
    while not way.transport.written:
        await asyncio.sleep(0.001)
    assert way.transport.taken() == reply(7, JSON, 19, "OFFSET_OVERFLOW_ONE", (0, 100, 0, 100))


async def test_a_slave_lets_a_pull_beyond_its_end_wait_for_a_second_at_most(tmp_path: Path) -> None:
    PullWay(tmp_path).broker.close()
    way = PullWay(tmp_path, broker_role=BrokerRole.SLAVE)
    assert await later(way, waiting(1, 5000, suspend_timeout_millis=30_000)) == b""
    ((one,),) = way.broker.waiting.queues.values()
    assert one.timer is not None
    assert one.timer.when() - asyncio.get_running_loop().time() < 2
    way.broker.waiting.notify_all()
    assert await later(way) == reply(1, JSON, 20, "NO_MESSAGE_IN_QUEUE", (0, 5000, 0, 0))
    assert way.counts()[3] == {}, "a slave commits nothing"
    way.broker.close()


async def test_an_error_is_the_answer_to_a_pull_that_waited(tmp_path: Path) -> None:
    way = PullWay(tmp_path)
    way.fill(count=10)
    way.feed(waiting(7, 5))
    way.broker.close()
    way.broker.waiting.notify_all()
    await settled()
    (answer,) = FrameDecoder().feed(way.transport.taken())
    assert (answer.code, answer.opaque) == (ResponseCode.SYSTEM_ERROR, 7)
    assert way.usage.requests == 0


async def test_more_pulls_than_may_wait_are_refused(tmp_path: Path) -> None:
    way = PullWay(tmp_path, limits=Limits(max_requests_per_connection=5))
    way.fill()
    answered = way.feed(*[waiting(number, 100) for number in range(8)])
    busy = "[OVERLOAD]system busy, start flow control for a while"
    assert answered == b"".join(encode(Command(2, number, 1, remark=busy)) for number in (5, 6, 7))
    assert len(way.broker.waiting) == 5
    way.broker.waiting.drop(way.connection)
    way.broker.close()


async def test_nobody_is_answered_when_the_connection_is_gone(way: PullWay) -> None:
    way.feed(waiting(7, 100), waiting(8, 100))
    assert way.usage.requests == 2
    way.transport.is_aborted = True
    way.broker.waiting.notify_all()
    await settled()
    assert (way.transport.taken(), way.usage.requests, len(way.broker.waiting)) == (b"", 0, 0)


NUMBERS = st.sampled_from([0, 1, 9, 10, 99, 12_345, 1 << 31, 1 << 62, -1, -(1 << 63)])


@settings(max_examples=100, deadline=None)
@given(
    offset=NUMBERS,
    commit=NUMBERS,
    subscription=st.text(max_size=20) | st.just("\0\x0bqueueOffset\0\0\0\x019") | st.none(),
    kind=st.sampled_from([JSON, BINARY]),
    fields=st.sets(st.sampled_from(["max_msg_bytes", "request_source", "bname", "proxy_forward_client_id"])),
)
def test_a_header_is_read_as_a_command_reads_it(
    offset: int, commit: int, subscription: str | None, kind: SerializeType, fields: set[str]
) -> None:
    more: dict[str, Any] = {name: "b" if name in ("bname", "proxy_forward_client_id") else 7 for name in fields}
    wire_bytes = pull(7, offset, kind, commit_offset=commit, subscription=subscription, **more)
    (frame,) = FrameDecoder().frames(wire_bytes)
    expected = decode_frame(frame).header(PullMessageRequest)
    for _ in range(2):  # what was remembered is used the second time
        found = parse_pull(frame)
        assert found is not None
        opaque, flag, request, queue_offset, commit_offset = found
        assert (opaque, flag, queue_offset, commit_offset) == (7, 0, offset, commit)
        for name in PullMessageRequest.__struct_fields__:
            if name not in ("queue_offset", "commit_offset"):
                assert getattr(request, name) == getattr(expected, name)


@pytest.mark.parametrize("kind", [JSON, BINARY])
def test_a_header_that_is_cut_or_changed_is_never_misread(kind: SerializeType) -> None:
    (frame,) = FrameDecoder().frames(pull(7, 12, kind))
    serialize_type, header, body = frame
    for at in range(len(header)):
        for other in (header[:at], header[:at] + bytes([header[at] ^ 1]) + header[at + 1 :]):
            changed = serialize_type, other, body
            found = parse_pull(changed)
            if found is not None:
                command = decode_frame(changed)
                request = command.header(PullMessageRequest)
                assert found[0] == command.opaque
                assert found[3:] == (request.queue_offset, request.commit_offset)
                assert found[2].topic == request.topic
