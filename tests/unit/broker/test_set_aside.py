"""Half messages, delayed ones and ends of transactions go a way of their own. It must not show."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from downrange.broker.handlers.set_aside import SetAside
from downrange.broker.handlers.transactions import TransactionHandlers
from downrange.broker.transactions.half_messages import HalfMessages
from downrange.model.message import TopicQueue
from downrange.model.message_id import pack_host, parse_offset_message_id
from downrange.model.topics import HALF_TOPIC, OP_HALF_TOPIC, TopicConfig
from downrange.protocol.bodies.fields import encode_fields
from downrange.protocol.bodies.send import SendMessageRequest, SendMessageResponse
from downrange.protocol.bodies.transactions import EndTransactionRequest
from downrange.protocol.codes import RequestCode, ResponseCode, SerializeType
from downrange.protocol.command import Command
from downrange.protocol.framing import FrameDecoder, encode
from downrange.store.config import FlushDiskType
from tests.support.store_files import files_of
from tests.unit.broker.way import Way
from tests.unit.store.small_store import FailingFiles, read_all

ID = "7F0000011A2B18B4AAC20000{:08X}"
HALF = "UNIQ_KEY\x01" + ID + "\x02WAIT\x01true\x02TRAN_MSG\x01true\x02PGROUP\x01payers\x02TAGS\x01TagA\x02"
DELAYED = "UNIQ_KEY\x01" + ID + "\x02WAIT\x01true\x02DELAY\x013\x02KEYS\x01one two"
PLAIN = "UNIQ_KEY\x01" + ID + "\x02WAIT\x01true\x02"
COMMIT, ROLLBACK, UNKNOWN = 8, 12, 0
JSON, BINARY = SerializeType.JSON, SerializeType.ROCKETMQ


class AsideWay(Way):
    """With or without the way for what is set aside."""

    def __init__(self, root: Path, *, short: bool, **options: Any) -> None:
        # One file: where messages are stored together, the next one may begin a little earlier.
        options.setdefault("mapped_file_size_commit_log", 1 << 21)
        super().__init__(root, **options)
        parts = self.broker
        self.delayed: list[int] = []
        parts.writer.on_delayed = self.delayed.append
        self.half_messages = HalfMessages(parts.store, parts.writer, parts.offsets, pack_host("10.0.0.1", 40911))
        self.sends.on_half = self.half_messages.stored
        ends = TransactionHandlers(parts.config, self.half_messages, parts.writer, parts.flusher, parts.flow)
        self.short = SetAside(
            parts.config, parts.topics, self.sends, ends, self.half_messages, parts.writer, parts.flow
        )  # fmt: skip
        self.connect(self.sends.routes, ends.routes, lanes=(self.plain.take, self.short.take) if short else ())
        # So that all queues are there; each is made by the first message in it.
        self.halves(self.feed(send(9000, HALF), *[send(9001 + n, PLAIN, queue_id=n) for n in range(4)]))
        self.feed(end((0, 0), COMMIT), send(9005, DELAYED))
        self.taken = 0

    @staticmethod
    def halves(replies: bytes) -> list[tuple[int, int]]:
        """Queue offset and physical offset of what was stored."""
        stored = [
            reply.header(SendMessageResponse)
            for reply in FrameDecoder().feed(replies)
            if reply.code == 0 and reply.ext_fields
        ]
        return [(each.queue_offset, parse_offset_message_id(each.msg_id).physical_offset) for each in stored]

    def seen(self) -> dict[str, object]:
        """Everything that a broker knows afterwards, in memory and on disk, but for the times that things took."""
        statistics = self.broker.statistics
        known: dict[str, object] = {
            "puts": {
                topic: [tally.calls, tally.messages, tally.bytes, tally.by_size] for topic, tally in statistics.puts()
            },
            "ended": (dict(statistics.commits), dict(statistics.rollbacks)),
            "delays": statistics.delays.counts,
            "answered": {codes: sum(histogram.counts) for codes, histogram in statistics.rpcs.items()},
            "failed": statistics.failed_puts,
            "waiting": dict(self.half_messages.waiting),
            "offsets": list(self.half_messages.offsets_waiting()),
            "delayed": self.delayed,
            "aborted": self.transport.is_aborted,
        }
        self.broker.close()
        return known | files_of(self.broker.store.config.store_path_root_dir)


def send(
    number: int, text: str = HALF, body: bytes = b"body", kind: int = JSON, *, oneway: bool = False, **fields: Any
) -> bytes:
    values: dict[str, Any] = {
        "producer_group": "payers",
        "topic": "TopicA",
        "queue_id": 1,
        "sys_flag": 4 if "TRAN_MSG\x01true" in text else 0,
        "born_timestamp": 1_790_000_000_000 + number,
        "properties": text.replace(ID, ID.format(number)),
    }
    header = SendMessageRequest(**(values | fields))
    return encode(
        Command(RequestCode.SEND_MESSAGE_V2, number, 2 * oneway, encode_fields(header), body, serialize_type=int(kind))
    )


def end(half: tuple[int, int], state: int, kind: int = JSON, *, oneway: bool = True, **fields: Any) -> bytes:
    values: dict[str, Any] = {
        "producer_group": "payers",
        "tran_state_table_offset": half[0],
        "commit_log_offset": half[1],
        "commit_or_rollback": state,
        "msg_id": "id",
        "transaction_id": "id",
    }
    header = EndTransactionRequest(**(values | fields))
    return encode(
        Command(RequestCode.END_TRANSACTION, half[0], 2 * oneway, encode_fields(header), serialize_type=int(kind))
    )


Halves = list[tuple[int, int]]
Chunk = Callable[[Halves], Sequence[bytes]]


def compare(root: Path, chunks: Sequence[Sequence[bytes] | Chunk], **options: Any) -> AsideWay:
    """Feed the same to both ways; a chunk may be made of what was stored so far. The one with the short cut, closed."""
    ways = [AsideWay(root / name, short=name == "short", **dict(options)) for name in ("general", "short")]
    stored: Halves = []
    for chunk in chunks:
        frames = chunk(stored) if callable(chunk) else chunk
        general, short = [way.feed(*frames) for way in ways]
        assert short == general
        stored += AsideWay.halves(short)
    general_seen, short_seen = [way.seen() for way in ways]
    for name, value in general_seen.items():
        assert short_seen.pop(name) == value, name
    assert not short_seen
    return ways[1]


@pytest.mark.parametrize("kind", [JSON, BINARY])
async def test_transactions_of_one_chunk_are_stored_and_answered_together(tmp_path: Path, kind: SerializeType) -> None:
    way = compare(
        tmp_path,
        [
            [send(n, kind=kind, queue_id=n % 4) for n in range(20)],
            lambda halves: [end(half, (COMMIT, ROLLBACK)[half[0] % 3 == 0], kind) for half in halves],
        ],
    )
    assert way.taken == 40
    assert way.half_messages.waiting.total() == 0


async def test_halves_ends_delayed_and_plain_messages_may_be_mixed(tmp_path: Path) -> None:
    def mixed(halves: Halves) -> list[bytes]:
        frames = []
        for number, half in enumerate(halves, 100):
            frames += [send(number, PLAIN), end(half, COMMIT), send(number + 50, DELAYED), send(number + 80)]
        return frames

    way = compare(tmp_path, [[send(n) for n in range(10)], mixed])
    assert way.taken == 10 + 30
    assert len(way.delayed) == 11


@pytest.mark.parametrize(
    "text",
    [
        HALF,
        HALF.removesuffix("\x02"),
        "TRAN_MSG\x01TRUE\x02PGROUP\x01payers",
        "CLUSTER\x01elsewhere\x02REAL_TOPIC\x01Stolen\x02REAL_QID\x017\x02" + HALF,
        "TAGS\x01a\x02TAGS\x01b\x02no value\x01\x02\x01no name\x02nothing\x02" + HALF,
        "KEYS\x01\u4e2d\u6587 ß\x02" + HALF,
        HALF + "CHECK_IMMUNITY_TIME_IN_SECONDS\x0130\x02",
        DELAYED,
        "DELAY\x0103",
        "DELAY\x0199\x02TAGS\x01ß",
        "DELAY\x012\x02DELAY\x014\x02TRAN_MSG\x01false",
    ],
)
async def test_any_properties_are_stored_alike(tmp_path: Path, text: str) -> None:
    way = compare(tmp_path, [[send(n, text) for n in range(5)], lambda halves: [end(half, COMMIT) for half in halves]])
    assert way.taken >= (10 if "TRAN_MSG\x01true" in text else 4)


@pytest.mark.parametrize("kind", [JSON, BINARY])
@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (HALF.replace("WAIT\x01true", "WAIT\x01false"), {}),
        (HALF + "DELAY\x013\x02", {}),
        (HALF, {"topic": "%RETRY%group"}),
        (HALF, {"topic": "New"}),
        (HALF, {"queue_id": 4}),
        (HALF, {"queue_id": -1}),
        (HALF, {"batch": True}),
        (HALF + "KEYS\x01" + "k" * 33_000, {}),
        (PLAIN, {"sys_flag": 4}),
        (DELAYED, {"sys_flag": 4}),
        ("DELAY\x01x", {}),
        ("TRAN_MSG\x01false\x02TAGS\x01a", {}),
    ],
)
async def test_what_is_unusual_is_left_to_the_handler(
    tmp_path: Path, text: str, fields: dict[str, Any], kind: SerializeType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "randrange", lambda stop: stop - 1)  # a queue id of -1 takes any queue
    odd = send(3, text, kind=kind, **fields)
    assert compare(tmp_path, [[send(1, kind=kind), odd, send(4, kind=kind)]]).taken == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"producer_group": "others"},
        {"tran_state_table_offset": 99},
        {"commit_log_offset": 3},
        {"commit_log_offset": 1 << 40},
        {"commit_log_offset": -1},
        {"commit_or_rollback": UNKNOWN},
        {"commit_or_rollback": 4},
    ],
)
@pytest.mark.parametrize("oneway", [True, False])
async def test_ends_that_end_nothing(tmp_path: Path, fields: dict[str, int], oneway: bool) -> None:
    def ends(halves: Halves) -> list[bytes]:
        return [end(halves[0], COMMIT, oneway=oneway, **fields), end(halves[1], COMMIT)]

    assert compare(tmp_path, [[send(1), send(2)], ends]).taken == 3


async def test_a_transaction_ends_once_however_often_a_chunk_says_so(tmp_path: Path) -> None:
    def ends(halves: Halves) -> list[bytes]:
        return [end(halves[0], COMMIT), end(halves[1], ROLLBACK), *[end(half, COMMIT) for half in halves]]

    way = compare(tmp_path, [[send(1), send(2)], ends, ends])
    assert way.taken == 4


@pytest.mark.parametrize("kind", [JSON, BINARY])
async def test_answers_keep_the_order_of_the_requests(tmp_path: Path, kind: SerializeType) -> None:
    def mixed(halves: Halves) -> list[bytes]:
        ends = [end(half, COMMIT, kind, oneway=half[0] % 3 == 0) for half in halves]
        return [*ends[:2], send(50), *ends[2:4], send(51), send(52), ends[4], ends[5], send(53, oneway=True)]

    assert compare(tmp_path, [[send(n) for n in range(6)], mixed]).taken == 16


async def test_under_sync_flush_who_wants_an_answer_gets_it_from_the_handler(tmp_path: Path) -> None:
    way = AsideWay(tmp_path, short=True, flush_disk_type=FlushDiskType.SYNC_FLUSH)
    start = way.broker.store.max_offset
    way.feed(send(1))
    assert way.feed(end((1, start), COMMIT, oneway=False)) == b"", "nothing is promised before it is on disk"
    assert (way.taken, way.half_messages.waiting.total()) == (1, 0)
    way.broker.close()


async def test_an_end_that_guesses_where_a_message_of_its_own_chunk_will_lie(tmp_path: Path) -> None:
    with_place = AsideWay(tmp_path / "before", short=True)
    (half,) = with_place.halves(with_place.feed(send(1)))
    with_place.broker.close()
    assert compare(tmp_path, [[send(1), end(half, COMMIT), send(2)]]).taken == 3


async def test_a_message_that_was_checked_is_left_to_the_handler(tmp_path: Path) -> None:
    way = AsideWay(tmp_path, short=True)
    first, second = way.halves(way.feed(send(1), send(2)))
    stored = way.half_messages.read(first[0])
    assert stored is not None
    way.half_messages.put_back(stored, {"TRANSACTION_CHECK_TIMES": "1"})
    way.taken = 0
    way.feed(end(first, COMMIT), end(second, COMMIT))
    assert way.taken == 1
    assert way.half_messages.waiting.total() == 0
    way.broker.close()


async def test_a_run_that_does_not_fit_its_file_begins_the_next(tmp_path: Path) -> None:
    way = AsideWay(tmp_path, short=True, mapped_file_size_commit_log=64 * 1024)
    bodies = [bytes([n % 251]) * (n * 37 % 3000) for n in range(200)]
    halves: Halves = []
    for first in range(0, 200, 20):
        halves += way.halves(way.feed(*[send(n, body=bodies[n]) for n in range(first, first + 20)]))
    way.feed(*[end(half, COMMIT) for half in halves])
    assert way.taken == 400
    assert [message.body for message in read_all(way.broker.store, HALF_TOPIC, 0)[1:]] == bodies
    assert [message.body for message in read_all(way.broker.store, "TopicA", 1)[2:]] == bodies
    assert way.broker.store.max_offset > 8 * way.broker.store.config.mapped_file_size_commit_log
    way.broker.close()


async def test_a_disk_that_refuses_is_answered_as_by_the_handler(tmp_path: Path) -> None:
    files = FailingFiles()
    way = AsideWay(tmp_path, short=True, files=files)
    (half,) = way.halves(way.feed(send(1)))
    way.broker.store.set_disk_full(True)
    (reply,) = FrameDecoder().feed(way.feed(end(half, COMMIT), send(2)))
    assert reply.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert (way.half_messages.waiting, way.taken) == ({"TopicA": 1}, 1)
    way.broker.store.set_disk_full(False)
    way.feed(end(half, COMMIT))
    assert not way.half_messages.waiting
    way.broker.close()


async def test_a_waiting_pull_is_woken_by_a_commit(tmp_path: Path) -> None:
    way = AsideWay(tmp_path, short=True)
    halves = way.halves(way.feed(send(1), send(2, queue_id=2)))

    class Everything:
        def matches(self, tags_code: int, properties: str) -> bool:
            return "TagA" in properties

    queue = TopicQueue("TopicA", 1)
    offset = way.broker.store.max_offset_of("TopicA", 1)
    later = way.broker.wait_for(queue, offset, Everything(), way.connection)  # type: ignore[arg-type]
    way.feed(*[end(half, COMMIT) for half in halves])
    await asyncio.wait_for(later, 30)
    assert way.taken == 4
    way.broker.close()


async def test_under_sync_flush_half_messages_are_answered_after_one_flush(tmp_path: Path) -> None:
    way = AsideWay(tmp_path / "sync", short=True, flush_disk_type=FlushDiskType.SYNC_FLUSH)
    running = asyncio.create_task(way.broker.flusher.run(lambda: None))
    while len(FrameDecoder().feed(way.transport.written)) < 6:  # those that made the queues
        await asyncio.sleep(0)
    way.transport.taken()
    assert way.feed(*[send(n) for n in range(8)]) == b"", "nothing is promised before it is on disk"
    while len(way.halves(way.transport.written)) < 8:
        await asyncio.sleep(0)
    assert way.taken == 8
    running.cancel()
    way.broker.close()


async def test_senders_that_a_flush_leaves_waiting_are_told_that_it_took_too_long(tmp_path: Path) -> None:
    way = AsideWay(tmp_path, short=True, flush_disk_type=FlushDiskType.SYNC_FLUSH)
    way.feed(send(1), send(2))
    way.broker.flusher.close()  # nobody will be told that anything is safe
    for _ in range(5):  # from flush to reply to socket
        await asyncio.sleep(0)
    replies = FrameDecoder().feed(way.transport.taken())
    assert {reply.code for reply in replies} == {ResponseCode.FLUSH_DISK_TIMEOUT}
    assert (way.taken, len(replies)) == (2, 8)
    way.broker.store.close()


async def test_a_change_of_the_configuration_counts_at_once(tmp_path: Path) -> None:
    ways = [AsideWay(tmp_path / str(short), short=short) for short in (False, True)]
    replies = []
    for way in ways:
        config = way.broker.config
        replies.append(b"")
        for change in ({"region_id": "elsewhere"}, {"reject_transaction_message": True}, {"broker_permission": 4}):
            config.broker = replace(config.broker, **change)
            replies[-1] += way.feed(send(2))
        way.broker.close()
    assert replies[0] == replies[1]
    assert ways[1].taken == 1


async def test_topics_whose_messages_have_several_tags_are_left_to_the_handler(tmp_path: Path) -> None:
    way = AsideWay(tmp_path, short=True)
    way.broker.topics.put(TopicConfig("TopicA", 4, 4, topic_filter_type="MULTI_TAG"))
    way.feed(send(1))
    assert way.taken == 0
    way.broker.close()


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_comes_both_ways_agree(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)

    def chunk(halves: Halves) -> list[bytes]:
        frames = []
        for _ in range(rng.randrange(1, 30)):
            number, kind = rng.randrange(5000), rng.choice((JSON, JSON, BINARY))
            text = rng.choice((HALF, HALF, DELAYED, PLAIN, HALF + "DELAY\x011\x02", "DELAY\x017", ""))
            if halves and rng.random() < 0.5:
                state = rng.choice((COMMIT, COMMIT, ROLLBACK, UNKNOWN))
                frames.append(end(rng.choice(halves), state, kind, oneway=rng.random() < 0.7))
            else:
                body = rng.randbytes(rng.choice((0, 10, 100, 5000)))
                frames.append(send(number, text, body, kind, queue_id=rng.randrange(4)))
        return frames

    way = compare(tmp_path, [chunk] * 20)
    assert way.taken > 50


async def test_what_ended_together_has_ended_after_a_crash(tmp_path: Path) -> None:
    way = AsideWay(tmp_path, short=True)
    halves = way.halves(way.feed(*[send(n) for n in range(6)]))
    way.feed(*[end(half, COMMIT) for half in halves[:2]], *[end(half, ROLLBACK) for half in halves[2:4]])
    parts = way.broker
    again = HalfMessages(parts.store, parts.writer, parts.offsets, pack_host("10.0.0.1", 40911))
    assert (
        list(again.offsets_waiting()) == [half[0] for half in halves[4:]] == list(way.half_messages.offsets_waiting())
    )
    assert again.waiting == way.half_messages.waiting == {"TopicA": 2}
    assert [op.body for op in read_all(parts.store, OP_HALF_TOPIC, 0)][1:] == [b"%d" % half[0] for half in halves[:4]]
    committed = read_all(parts.store, "TopicA", 1)[-2:]
    assert [message.prepared_transaction_offset for message in committed] == [half[1] for half in halves[:2]]
    assert parts.store.max_offset_of(HALF_TOPIC, 0) == 7
    way.broker.close()
