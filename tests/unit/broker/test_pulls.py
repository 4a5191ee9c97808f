"""Plain pulls go a way of their own. It must not show: same replies, same offsets, same counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from downrange.broker.pull_checks import PullChecks
from downrange.broker.pulls import Pulls
from downrange.broker.routes import pulls_of_old_transport
from downrange.protocol.bodies.pull_frames import parse_pull
from hypothesis import given, settings
from hypothesis import strategies as st

from downrange.compiled import steps
from downrange.model.topics import SubscriptionGroupConfig
from downrange.protocol.bodies.fields import encode_fields
from downrange.protocol.bodies.pull import PullMessageRequest
from downrange.protocol.codes import RequestCode, ResponseCode, SerializeType
from downrange.protocol.command import Command
from downrange.protocol.framing import FrameDecoder, decode_frame, encode
from downrange.transport.connection import Connection
from downrange.transport.limits import Limits, Usage
from tests.unit.broker.fake_transport import FakeTransport
from tests.unit.broker.test_plain_sends import send
from tests.unit.broker.way import Way

BINARY, JSON = SerializeType.ROCKETMQ, SerializeType.JSON
COMMIT, SUSPEND, SUBSCRIPTION = 1, 2, 4


class SlowTransport(FakeTransport):
    """Pauses its protocol after so many bytes, until it is told to go on."""

    def __init__(self, pause_after: int) -> None:
        super().__init__()
        self._pause_after = pause_after
        self.protocol: Connection | None = None

    def writelines(self, pieces: Any) -> None:
        super().writelines(pieces)
        self._look()

    def write(self, data: bytes | memoryview) -> None:
        super().write(data)
        self._look()

    def _look(self) -> None:
        if len(self.written) > self._pause_after and self.protocol is not None and self.protocol.is_writable:
            self.protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return len(self.written)

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class PullWay(Way):
    """A broker with messages in two queues, which is pulled from over one connection."""

    transport: SlowTransport

    def __init__(self, root: Path, *, pause_after: int = 1 << 30, limits: Limits | None = None, **options: Any) -> None:
        options.setdefault("mapped_file_size_commit_log", 1 << 20)
        super().__init__(root, **options)
        parts = self.broker
        checks = PullChecks(parts.config, parts.topics, parts.groups, parts.consumers, parts.filters)
        self.pulls = Pulls(parts.config, checks, parts.offsets, parts.store, parts.waiting, parts.writer)
        express, routes = pulls_of_old_transport(self.pulls, parts.flow)  # TEMPORARY
        self.transport = SlowTransport(pause_after)
        self.usage = Usage()
        self.connect(self.sends.routes, routes, lanes=(self.plain.take, express), usage=self.usage, limits=limits)
        self.transport.protocol = self.connection

    def feed_quietly(self, frames: Sequence[bytes]) -> None:
        """What is answered at once stays in the transport, with what is answered later."""
        self.connection.data_received(b"".join(frames))

    def fill(self, *, count: int = 200, queues: int = 2, size: int = 100) -> None:
        for number in range(count):
            self.feed(send(number, body=bytes([number % 251]) * size, queue_id=number % queues))

    def counts(self) -> object:
        statistics = self.broker.statistics
        got = {key: (tally.calls, tally.messages, tally.bytes) for key, tally in statistics.gets()}
        pulls = {key: sum(histogram.counts) for key, histogram in statistics.rpcs.items() if key[0] == 11}
        return got, pulls, statistics.missed_gets, self.broker.offsets.of("TopicA", "group")


def pull(number: int, offset: int, kind: int = JSON, *, flag: int = 0, **fields: Any) -> bytes:
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
    command = Command(RequestCode.PULL_MESSAGE, number, flag, encode_fields(request), serialize_type=int(kind))
    return encode(command)


def compare(
    root: Path, chunks: Sequence[Sequence[bytes]], *, filled: dict[str, int] | None = None, **options: Any
) -> PullWay:
    """Feed the same chunks to both ways; return the one with the short cut, closed."""
    general = PullWay(root / "general", plain=False, **dict(options))
    plain = PullWay(root / "plain", plain=True, **dict(options))
    for way in (general, plain):
        way.fill(**(filled or {}))
    for chunk in chunks:
        expected = general.feed(*chunk)
        assert plain.feed(*chunk) == expected
    assert plain.counts() == general.counts()
    assert len(plain.broker.held) == len(general.broker.held)
    for way in (general, plain):
        way.broker.close()
    return plain


@pytest.mark.parametrize("kind", [JSON, BINARY])
@pytest.mark.parametrize("queues", [1, 2])
async def test_draining_a_backlog_is_plain(tmp_path: Path, kind: SerializeType, queues: int) -> None:
    filled = {"queues": queues, "count": 50 * queues, "size": 100}
    chunks = [[pull(n, n * 10, kind, max_msg_nums=10, queue_id=queues - 1) for n in range(5)]]
    assert compare(tmp_path, chunks, filled=filled, mapped_file_size_consume_queue=6000).taken == 5


@pytest.mark.parametrize("kind", [JSON, BINARY])
@pytest.mark.parametrize("opaque", [0, 1, -1, 2_147_483_647])
async def test_opaques_and_offsets_of_any_size_are_answered_alike(
    tmp_path: Path, kind: SerializeType, opaque: int
) -> None:
    chunks = [[pull(opaque, offset, kind, commit_offset=commit)] for offset in (0, 9) for commit in (0, 5, 1 << 58, -1)]
    assert compare(tmp_path, chunks).taken == len(chunks)


@pytest.mark.parametrize("kind", [JSON, BINARY])
@pytest.mark.parametrize(
    ("offset", "fields"),
    [
        (100, {}),  # nothing new
        (5000, {}),
        (-1, {}),
        (0, {"queue_id": 3}),
        (0, {"queue_id": 4}),
        (0, {"queue_id": -1}),
        (0, {"topic": "Unknown"}),
        (0, {"consumer_group": "not a group"}),
        (0, {"subscription": "other"}),
        (0, {"subscription": "a = 1", "expression_type": "SQL92"}),
        (0, {"subscription": "x", "expression_type": "NONE"}),
        (0, {"sys_flag": 0}),  # no heartbeat told what this group wants
        (0, {"flag": 2}),
        (0, {"bulk": True}),
        (100, {"sys_flag": SUBSCRIPTION}),
        (101, {"sys_flag": SUBSCRIPTION | SUSPEND}),
        (-1, {"sys_flag": SUBSCRIPTION | SUSPEND, "queue_id": 3}),
    ],
)
async def test_what_is_not_plain_is_left_to_the_handler(
    tmp_path: Path, offset: int, fields: dict[str, Any], kind: SerializeType
) -> None:
    odd = pull(2, offset, kind, **fields)
    assert compare(tmp_path, [[pull(1, 3, kind), odd, pull(3, 4, kind)]]).taken == 2


@pytest.mark.parametrize("kind", [JSON, BINARY])
@pytest.mark.parametrize("max_msg_nums", [-1, 0, 1, 31, 32, 33, 1000])
async def test_any_number_of_messages_may_be_asked_for(tmp_path: Path, kind: SerializeType, max_msg_nums: int) -> None:
    chunks = [[pull(n, offset, kind, max_msg_nums=max_msg_nums)] for n, offset in enumerate((0, 50, 95, 99))]
    compare(tmp_path, chunks)


async def test_messages_in_several_files_are_answered_alike(tmp_path: Path) -> None:
    chunks = [[pull(n, n * 7, max_msg_nums=7)] for n in range(28)]
    plain = compare(tmp_path, chunks, mapped_file_size_commit_log=8192)
    assert 0 < plain.taken < 28


async def test_messages_that_are_no_longer_in_memory_are_plain_unless_some_are(tmp_path: Path) -> None:
    chunks = [[pull(n, n * 10, max_msg_nums=count)] for n in range(10) for count in (1, 7, 8, 9, 32)]
    broker = {"slave_read_enable": True}
    assert compare(tmp_path / "old", chunks[:40], memory_bytes=1000, broker=broker).taken == 40
    assert 0 < compare(tmp_path / "both", chunks, memory_bytes=50_000, broker=broker).taken < 50


@pytest.mark.parametrize("kind", [JSON, BINARY])
@pytest.mark.parametrize("memory_bytes", [1000, 1 << 40])
@pytest.mark.parametrize("subscription", ["TagA || TagB", "TagB || TagA || TagC", "a", "nothing"])
async def test_pulls_by_tag_are_plain_if_they_find_something(
    tmp_path: Path, kind: SerializeType, subscription: str, memory_bytes: int
) -> None:
    chunks = [[pull(n, n * 20, kind, subscription=subscription, max_msg_nums=5)] for n in range(5)]
    found = 5 if "TagA" in subscription else 0
    assert compare(tmp_path, chunks, memory_bytes=memory_bytes).taken == found


@pytest.mark.parametrize("kind", [JSON, BINARY])
async def test_pulls_by_expression_are_plain_where_there_is_a_compiled_way(tmp_path: Path, kind: SerializeType) -> None:
    fields: dict[str, Any] = {"expression_type": "SQL92", "subscription": "TAGS = 'TagA' AND nothing IS NULL"}
    broker = {"enable_property_filter": True}
    chunks = [[pull(n, n * 20, kind, **fields)] for n in range(5)]
    assert compare(tmp_path, chunks, broker=broker).taken == (0 if steps is None else 5)


async def test_a_queue_with_extension_is_left_to_the_handler(tmp_path: Path) -> None:
    chunks = [[pull(1, 0, subscription="TagA"), pull(2, 0)]]
    assert compare(tmp_path, chunks, enable_consume_queue_ext=True).taken == 1


@pytest.mark.parametrize(
    "broker", [{"broker_permission": 2}, {"slave_read_enable": True}, {"auto_create_subscription_group": False}]
)
async def test_the_configuration_counts(tmp_path: Path, broker: dict[str, Any]) -> None:
    compare(tmp_path, [[pull(0, 0), pull(1, 32)]], broker=broker)


async def test_a_group_that_may_not_consume_is_refused(tmp_path: Path) -> None:
    way = PullWay(tmp_path, plain=True)
    way.fill(count=10)
    way.broker.groups.put(SubscriptionGroupConfig("group", consume_enable=False))
    (reply,) = FrameDecoder().feed(way.feed(pull(0, 0)))
    assert (reply.code, way.taken) == (ResponseCode.NO_PERMISSION, 0)
    way.broker.close()


async def test_sends_and_pulls_of_one_chunk_are_answered_in_order(tmp_path: Path) -> None:
    chunk = [send(900, queue_id=1), pull(1, 0), pull(2, 90, max_msg_nums=99), send(901, queue_id=1), pull(3, 99)]
    assert compare(tmp_path, [chunk]).taken == 3


@pytest.mark.parametrize("pause_after", [1, 5000, 300_000])
async def test_a_peer_that_does_not_read_is_not_answered_further(tmp_path: Path, pause_after: int) -> None:
    filled = {"size": 3000}
    replies = []
    for plain in (False, True):
        way = PullWay(tmp_path / str(plain), plain=plain)
        way.fill(**filled)
        way.transport._pause_after = pause_after
        answered = way.feed(*[pull(n, n, max_msg_nums=20) for n in range(40)])
        assert not way.connection.is_writable
        assert len(answered) < 400_000, "what one chunk asks for must not be held all at once"
        while way.connection._unanswered:
            way.connection.resume_writing()
            answered += way.transport.taken()
        replies.append(answered)
        way.broker.close()
    assert replies[0] == replies[1]


async def test_a_broker_that_is_busy_leaves_pulls_to_the_handler(tmp_path: Path) -> None:
    way = PullWay(tmp_path, plain=True)
    way.fill(count=10)
    way.broker.flow.last_tick = asyncio.get_running_loop().time() - 60
    (reply,) = FrameDecoder().feed(way.feed(pull(0, 0)))
    assert (reply.code, way.taken) == (ResponseCode.SYSTEM_BUSY, 0)
    way.broker.close()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def waiting(number: int, offset: int, kind: int = JSON, **fields: Any) -> bytes:
    return pull(number, offset, kind, **({"sys_flag": COMMIT | SUSPEND | SUBSCRIPTION} | fields))


async def compare_waiting(
    root: Path, chunks: Sequence[Sequence[bytes]], *, taken: int, end: Callable[[PullWay], object] | None = None
) -> None:
    """Feed the same chunks to both ways, with turns of the loop between them."""
    ways = [PullWay(root / str(plain), plain=plain, broker={"enable_property_filter": True}) for plain in (False, True)]
    for way in ways:
        way.fill()
    steps: list[Callable[[PullWay], object]] = [partial(PullWay.feed_quietly, frames=frames) for frames in chunks]
    for step in (*steps, *([end] if end is not None else [])):
        replies = []
        for way in ways:
            step(way)
            await settled()
            replies.append(way.transport.taken())
        assert replies[0] == replies[1]
    general, plain = ways
    assert plain.counts() == general.counts()
    assert len(plain.broker.held) == len(general.broker.held)
    assert repr(plain.connection) == repr(general.connection), "both say how many are being answered"
    assert plain.usage.requests == general.usage.requests == len(plain.broker.held)
    assert plain.taken == taken
    for way in ways:
        way.broker.held.drop(way.connection)
        await settled()
        assert way.usage.requests == 0
        way.broker.close()


@pytest.mark.parametrize("kind", [JSON, BINARY])
async def test_a_pull_that_waits_gets_what_arrives(tmp_path: Path, kind: SerializeType) -> None:
    chunks = [
        [waiting(1, 100, kind, commit_offset=77)],
        [send(900, queue_id=0)],
        [send(901, queue_id=1), send(902, queue_id=1)],
        [waiting(2, 102, kind), waiting(3, 102, kind), waiting(4, 101, kind)],
        [send(903, queue_id=1), waiting(5, 103, kind)],
        [waiting(6, 0, kind, queue_id=3)],  # has never had a message
        [send(904, queue_id=3)],
    ]
    await compare_waiting(tmp_path, chunks, taken=6)


@pytest.mark.parametrize("kind", [JSON, BINARY])
@pytest.mark.parametrize(
    "fields",
    [
        {"subscription": "TagA || x"},
        {"subscription": "x"},
        {"subscription": "TAGS = 'TagA'", "expression_type": "SQL92"},
        {"subscription": "TAGS = 'x'", "expression_type": "SQL92"},
    ],
)
async def test_a_pull_that_waits_gets_what_it_wants(
    tmp_path: Path, kind: SerializeType, fields: dict[str, Any]
) -> None:
    chunks = [[waiting(1, 100, kind, **fields)], [send(900, queue_id=1)], [waiting(2, 101, kind, **fields)]]
    await compare_waiting(tmp_path, chunks, taken=2)


@pytest.mark.parametrize("kind", [JSON, BINARY])
async def test_a_pull_that_waited_in_vain_is_told_so(tmp_path: Path, kind: SerializeType) -> None:
    chunks = [[waiting(1, 100, kind), waiting(2, 100, kind, subscription="x")]]
    await compare_waiting(tmp_path, chunks, taken=2, end=lambda way: way.broker.held.notify_all())


async def test_a_pull_that_waits_for_no_time_is_answered_soon(tmp_path: Path) -> None:
    way = PullWay(tmp_path, plain=True)
    way.fill(count=10)
    assert way.feed(waiting(7, 5, suspend_timeout_millis=0)) == b""
    assert way.taken == 1
    while not way.transport.written:
        await asyncio.sleep(0.001)
    (reply,) = FrameDecoder().feed(way.transport.taken())
    assert (reply.code, reply.opaque) == (ResponseCode.PULL_NOT_FOUND, 7)
    way.broker.close()


async def test_an_error_is_the_answer_to_a_pull_that_waited(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    way = PullWay(tmp_path, plain=True)
    way.fill(count=10)
    way.feed(waiting(7, 5))
    way.broker.close()
    way.broker.held.notify_all()
    await settled()
    (reply,) = FrameDecoder().feed(way.transport.taken())
    assert (reply.code, reply.opaque) == (ResponseCode.SYSTEM_ERROR, 7)
    assert way.usage.requests == 0


async def test_more_pulls_than_may_wait_are_refused(tmp_path: Path) -> None:
    chunk = [waiting(number, 100) for number in range(8)]
    replies = []
    for plain in (False, True):
        way = PullWay(tmp_path / str(plain), plain=plain, limits=Limits(max_requests_per_connection=5))
        way.fill()
        replies.append(way.feed(*chunk))
        assert len(way.broker.held) == 5
        way.broker.held.drop(way.connection)
        way.broker.close()
    assert replies[0] == replies[1]
    assert [reply.code for reply in FrameDecoder().feed(replies[1])] == [ResponseCode.SYSTEM_BUSY] * 3


async def test_nobody_is_answered_when_the_connection_is_gone(tmp_path: Path) -> None:
    way = PullWay(tmp_path, plain=True)
    way.fill(count=10)
    way.feed(waiting(7, 5), waiting(8, 5))
    assert way.usage.requests == 2
    way.transport.is_aborted = True
    way.broker.held.notify_all()
    await settled()
    assert (way.transport.taken(), way.usage.requests, len(way.broker.held)) == (b"", 0, 0)
    way.broker.close()


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
