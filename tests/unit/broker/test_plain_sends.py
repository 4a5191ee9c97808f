"""Plain sends go a way of their own. It must not show: same replies, same files, same counts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from downrange.model.message import TopicQueue
from downrange.model.topics import TopicConfig
from downrange.protocol.bodies.fields import encode_fields
from downrange.protocol.bodies.send import SendMessageRequest
from downrange.protocol.codes import RequestCode, ResponseCode, SerializeType
from downrange.protocol.command import Command
from downrange.protocol.framing import FrameDecoder, encode
from downrange.store.config import FlushDiskType
from tests.support.store_files import files_of
from tests.unit.broker.way import Way

ID = "7F0000011A2B18B4AAC20000{:08X}"
JAVA = "UNIQ_KEY\x01" + ID + "\x02WAIT\x01true\x02TAGS\x01TagA"
BINARY, JSON = SerializeType.ROCKETMQ, SerializeType.JSON


class SendWay(Way):
    """With or without the way for plain sends."""

    def __init__(self, root: Path, *, plain: bool, **options: Any) -> None:
        super().__init__(root, **options)
        self.connect(self.sends.routes, lanes=(self.plain.take,) if plain else ())

    def files(self) -> dict[str, bytes]:
        """Everything on disk but the times in it that are those of the machine."""
        self.broker.close()
        return files_of(self.broker.store.config.store_path_root_dir)

    def counts(self) -> dict[str, list[object]]:
        tallies = self.broker.statistics.puts()
        return {topic: [tally.calls, tally.messages, tally.bytes, tally.by_size] for topic, tally in tallies}


def send(
    number: int, text: str = JAVA, body: bytes = b"body", kind: int = JSON, *, oneway: bool = False, **fields: Any
) -> bytes:
    values: dict[str, Any] = {
        "producer_group": "group",
        "topic": "TopicA",
        "queue_id": number % 4,
        "born_timestamp": 1_790_000_000_000 + number,
        "properties": text.replace(ID, ID.format(number)),
    }
    request = SendMessageRequest(**(values | fields))
    return encode(
        Command(RequestCode.SEND_MESSAGE_V2, number, 2 * oneway, encode_fields(request), body, serialize_type=int(kind))
    )


def compare(root: Path, chunks: Sequence[Sequence[bytes]], **options: Any) -> SendWay:
    """Feed the same chunks to both ways; return the one with the short cut, closed."""
    general = SendWay(root / "general", plain=False, **dict(options))
    plain = SendWay(root / "plain", plain=True, **dict(options))
    for chunk in chunks:
        random.seed(7)  # a queue id of -1 takes any queue
        expected = general.feed(*chunk)
        random.seed(7)
        assert plain.feed(*chunk) == expected
    assert plain.counts() == general.counts()
    assert plain.transport.is_aborted == general.transport.is_aborted
    assert plain.files() == general.files()
    return plain


@pytest.mark.parametrize("kind", [JSON, BINARY])
async def test_what_a_java_client_sends_is_plain_from_the_second_message_of_a_queue_on(
    tmp_path: Path, kind: SerializeType
) -> None:
    chunks = [[send(n, kind=kind) for n in range(first, first + 25)] for first in range(0, 200, 25)]
    assert compare(tmp_path, chunks).taken == 200 - 4


@pytest.mark.parametrize("kind", [JSON, BINARY])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "TAGS\x01a",
        "TAGS\x01a\x02",
        "WAIT\x01true",
        "WAIT\x01true\x02",
        "TAGS\x01a\x02WAIT\x01true",
        "KEYS\x01one two  three\x02TAGS\x01ß\x02" + JAVA,
        "KEYS\x01\u4e2d\u6587\x02UNIQ_KEY\x01short",
        "UNIQ_KEY\x01\x02KEYS\x01\x02TAGS\x01",
        "MYTAGS\x01x\x02MYKEYS\x01y\x02MY_UNIQ_KEY\x01z",
        "TAGS\x01a\x02TAGS\x01b",
        "CLUSTER\x01elsewhere\x02" + JAVA,
        "no separator at all",
    ],
)
async def test_any_properties_are_stored_alike(tmp_path: Path, text: str, kind: SerializeType) -> None:
    frames = [send(n, text, kind=kind, queue_id=1) for n in range(6)]
    assert compare(tmp_path, [frames[:1], frames[1:]]).taken == 5


@pytest.mark.parametrize("kind", [JSON, BINARY])
@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("WAIT\x01false\x02TAGS\x01a", {}),
        ("WAIT\x01true\x02WAIT\x01true", {}),
        ("XWAIT\x01true\x02", {}),
        ("WAIT\x01truely\x02", {}),
        ("DELAY\x013\x02TAGS\x01a", {}),
        ("TRAN_MSG\x01false\x02TAGS\x01a", {}),
        (JAVA, {"topic": "%RETRY%group"}),
        (JAVA, {"topic": "New"}),
        (JAVA, {"topic": ""}),
        (JAVA, {"queue_id": 4}),
        (JAVA, {"queue_id": -1}),
        (JAVA, {"sys_flag": 8}),
        (JAVA, {"batch": True}),
        ("KEYS\x01" + "k" * 33_000, {}),
    ],
)
async def test_what_is_not_plain_is_left_to_the_handler(
    tmp_path: Path, text: str, fields: dict[str, Any], kind: SerializeType
) -> None:
    frames = [send(n, queue_id=1, kind=kind) for n in range(3)]
    odd = send(3, text, kind=kind, **{"queue_id": 1, **fields})
    assert compare(tmp_path, [[*frames, odd, send(4, queue_id=1, kind=kind)]]).taken == 3


@pytest.mark.parametrize("kind", [JSON, BINARY])
async def test_numbers_of_any_size_are_read_alike(tmp_path: Path, kind: SerializeType) -> None:
    fields: list[dict[str, Any]] = [
        {"sys_flag": 1 << 20, "flag": 12345},
        {"sys_flag": 3, "flag": 7},
        {"sys_flag": 48},
        {"flag": -2147483648, "born_timestamp": -1},
        {"born_timestamp": 9_223_372_036_854_775_807, "reconsume_times": 16, "max_reconsume_times": 3},
        {"bname": "broker-a", "unit_mode": True},
        {"default_topic_queue_nums": 8, "default_topic": "else"},
    ]
    frames = [send(n, queue_id=2, kind=kind, **values) for n, values in enumerate([{}, *fields, {}])]
    assert compare(tmp_path, [frames]).taken == len(frames) - 1


async def test_a_header_that_cannot_be_read_is_answered_alike(tmp_path: Path) -> None:
    good = send(1, queue_id=1)
    wrong = good.replace(b'"e":"1"', b'"e":"x"')
    missing = send(2, queue_id=1).replace(b'"b":', b'"z":')
    assert compare(tmp_path, [[good, wrong, missing, good]]).taken == 1


async def test_a_header_that_is_no_json_ends_the_connection_after_what_came_before(tmp_path: Path) -> None:
    good = send(1, queue_id=1)
    broken = send(2, queue_id=1).replace(b'"flag":0', b'"flag":?')
    assert compare(tmp_path, [[good], [good, broken, good]]).taken == 1


async def test_oneway_sends_get_no_reply(tmp_path: Path) -> None:
    chunk = [send(n, queue_id=1, oneway=n % 2 == 1) for n in range(9)]
    assert compare(tmp_path, [chunk]).taken == 8


async def test_a_chunk_may_go_to_many_topics_and_end_in_the_next_file(tmp_path: Path) -> None:
    topics = ("TopicA", "TopicB")
    chunks = [
        [send(n, topic=topics[n % 2], body=bytes([n % 251]) * (n * 37 % 2000)) for n in range(first, first + 20)]
        for first in range(0, 400, 20)
    ]
    way = compare(tmp_path, chunks)
    assert way.taken > 300
    assert way.broker.store.max_offset > 5 * way.broker.store.config.mapped_file_size_commit_log


async def test_topics_whose_messages_have_several_tags_are_left_to_the_handler(tmp_path: Path) -> None:
    way = SendWay(tmp_path, plain=True)
    way.broker.topics.put(TopicConfig("TopicA", 4, 4, topic_filter_type="MULTI_TAG"))
    way.feed(*[send(n, queue_id=1) for n in range(5)])
    assert way.taken == 0
    way.broker.close()


async def test_a_pull_that_waits_is_woken_by_a_plain_send(tmp_path: Path) -> None:
    way = SendWay(tmp_path, plain=True)
    way.feed(send(0, queue_id=1))
    arrived = asyncio.Event()

    class Everything:
        def matches(self, tags_code: int, properties: str) -> bool:
            arrived.set()
            return "TagA" in properties

    later = way.broker.wait_for(TopicQueue("TopicA", 1), 1, Everything(), way.connection)  # type: ignore[arg-type]
    way.feed(send(1, queue_id=1), send(2, queue_id=2))
    assert way.taken == 1
    await asyncio.wait_for(later, 30)
    assert arrived.is_set()
    way.broker.close()


async def test_under_sync_flush_the_replies_of_a_chunk_leave_together_after_one_flush(tmp_path: Path) -> None:
    way = SendWay(tmp_path / "plain", plain=True, flush_disk_type=FlushDiskType.SYNC_FLUSH)
    asynchronous = SendWay(tmp_path / "asynchronous", plain=True)
    chunk = [send(n, queue_id=1) for n in range(8)]
    asynchronous.feed(chunk[0])
    expected = asynchronous.feed(*chunk[1:])
    asynchronous.broker.close()
    assert way.feed(chunk[0]) == b""
    assert way.feed(*chunk[1:]) == b"", "nothing is promised before it is on disk"
    assert way.taken == 7
    running = asyncio.create_task(way.broker.flusher.run(lambda: None))
    while len(way.transport.written) <= len(expected):
        await asyncio.sleep(0)
    assert expected in way.transport.taken()  # beside the reply to the first, which needs a turn of the loop more
    running.cancel()
    way.broker.close()


async def test_senders_that_a_flush_leaves_waiting_are_told_that_it_took_too_long(tmp_path: Path) -> None:
    ways = [
        SendWay(tmp_path / str(plain), plain=plain, flush_disk_type=FlushDiskType.SYNC_FLUSH) for plain in (False, True)
    ]
    replies = []
    for way in ways:
        way.feed(send(0, queue_id=1))
        way.feed(send(1, queue_id=1), send(2, queue_id=1))
        way.broker.flusher.close()  # nobody will be told that anything is safe
        for _ in range(5):  # from flush to reply to socket
            await asyncio.sleep(0)
        replies.append(sorted(FrameDecoder().feed(way.transport.taken()), key=lambda reply: reply.opaque))
        way.broker.store.close()
    assert replies[0] == replies[1]
    assert [reply.code for reply in replies[1]] == [ResponseCode.FLUSH_DISK_TIMEOUT] * 3
    assert ways[1].taken == 2


async def test_a_bug_in_the_answer_to_one_sender_keeps_no_other_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    encode = SendReply.encode
    failed: list[Stored] = []

    def fail_once(reply: SendReply, stored: Stored) -> bytes:
        if failed:
            return encode(reply, stored)
        failed.append(stored)
        raise ZeroDivisionError("a bug")

    way = SendWay(tmp_path, plain=True, flush_disk_type=FlushDiskType.SYNC_FLUSH)
    way.feed(send(0, queue_id=1))
    way.feed(send(1, queue_id=1))
    way.feed(send(2, queue_id=1))
    assert way.taken == 2
    monkeypatch.setattr(SendReply, "encode", fail_once)
    way.broker.flusher.close()  # nobody will be told that anything is safe
    for _ in range(5):
        await asyncio.sleep(0)
    assert sorted(reply.opaque for reply in FrameDecoder().feed(way.transport.taken())) == [0, 2]
    assert "messages were stored and cannot be acknowledged messages=1" in caplog.text
    way.broker.store.close()


async def test_a_broker_that_is_busy_leaves_sends_to_the_handler(tmp_path: Path) -> None:
    way = SendWay(tmp_path, plain=True)
    way.feed(send(0, queue_id=1))
    way.broker.flow.last_tick = asyncio.get_running_loop().time() - 60
    (reply,) = FrameDecoder().feed(way.feed(send(1, queue_id=1)))
    assert (reply.code, way.taken) == (ResponseCode.SYSTEM_BUSY, 0)
    way.broker.close()


async def test_a_change_of_the_configuration_counts_at_once(tmp_path: Path) -> None:
    ways = [SendWay(tmp_path / str(plain), plain=plain) for plain in (False, True)]
    replies = []
    for way in ways:
        way.feed(send(0, queue_id=1))
        config = way.broker.config
        config.broker = replace(config.broker, region_id="elsewhere", trace_on=False)
        replies.append(way.feed(send(1, queue_id=1)))
        config.broker = replace(config.broker, broker_permission=4)
        replies[-1] += way.feed(send(2, queue_id=1))
        way.broker.close()
    assert replies[0] == replies[1]
    assert ways[1].taken == 1


PIECES = st.sampled_from(
    ["TAGS", "KEYS", "UNIQ_KEY", "WAIT", "DELAY", "TRAN_MSG", "CLUSTER", "\x01", "\x02", "true", "false", "3", " ", "é"]
)


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.lists(PIECES | st.just("UNIQ_KEY\x01" + ID), max_size=12).map("".join), min_size=1, max_size=8),
    kinds=st.lists(st.sampled_from([JSON, BINARY]), min_size=8, max_size=8),
    bodies=st.lists(st.binary(max_size=50), min_size=8, max_size=8),
)
def test_whatever_the_properties_both_ways_agree(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], kinds: list[SerializeType], bodies: list[bytes]
) -> None:
    frames = [send(n, text, bodies[n], kinds[n], queue_id=n % 2) for n, text in enumerate(texts)]

    async def run() -> None:
        compare(tmp_path_factory.mktemp("sends"), [[send(90, queue_id=0), send(91, queue_id=1)], frames])

    asyncio.run(run())
