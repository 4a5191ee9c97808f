"""Half messages, ends of transactions and delayed messages: what is answered, stored and counted.

Requests of one chunk are stored and answered together. It must not show: `compare` feeds another broker the same
requests one by one.
"""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from downrange.broker.transactions.half_messages import HalfMessages
from downrange.model.message import TopicQueue
from downrange.model.message_id import pack_host, parse_offset_message_id
from downrange.model.topics import HALF_TOPIC, OP_HALF_TOPIC
from downrange.protocol.bodies.fields import encode_fields
from downrange.protocol.bodies.send import SendMessageRequest, SendMessageResponse
from downrange.protocol.bodies.transactions import EndTransactionRequest
from downrange.protocol.codes import RequestCode, ResponseCode, SerializeType
from downrange.protocol.command import Command
from downrange.protocol.framing import FrameDecoder, encode
from downrange.store.config import FlushDiskType
from tests.unit.broker.served import ServedBroker
from tests.unit.broker.test_sends import counts, files, flushed
from tests.unit.store.small_store import FailingFiles, read_all

ID = "7F0000011A2B18B4AAC20000{:08X}"
HALF = "UNIQ_KEY\x01" + ID + "\x02WAIT\x01true\x02TRAN_MSG\x01true\x02PGROUP\x01payers\x02TAGS\x01TagA\x02"
DELAYED = "UNIQ_KEY\x01" + ID + "\x02WAIT\x01true\x02DELAY\x013\x02KEYS\x01one two"
PLAIN = "UNIQ_KEY\x01" + ID + "\x02WAIT\x01true\x02"
COMMIT, ROLLBACK, UNKNOWN = 8, 12, 0
JSON, BINARY = SerializeType.JSON, SerializeType.ROCKETMQ


class Shop(ServedBroker):
    """A broker whose producers send half messages and delayed ones. Its queues are there: one has a message in each."""

    def __init__(self, root: Path, **options: Any) -> None:
        super().__init__(root, **options)
        self.half_messages = self.broker.half_messages
        self.delayed: set[int] = set()
        self.broker.writer.on_delayed = lambda queue_id, due_millis: self.delayed.add(queue_id)
        self.feed(send(9000, HALF), *[send(9001 + n, PLAIN, queue_id=n) for n in range(4)])
        self.feed(end((0, 0), COMMIT), send(9005, DELAYED))

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
        known: dict[str, object] = {
            "waiting": dict(self.half_messages.waiting),
            "offsets": list(self.half_messages.offsets_waiting()),
            "delayed": self.delayed,
            "aborted": self.transport.is_aborted,
        }
        return known | counts(self) | files(self)


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


def compare(root: Path, chunks: Sequence[Sequence[bytes] | Chunk], **options: Any) -> Shop:
    """Feed one broker chunks and another one the same requests one by one; return the first, closed.

    A chunk may be made of what was stored so far.
    """
    alone = Shop(root / "alone", accelerated=False, **dict(options))
    together = Shop(root / "together", **dict(options))
    stored: Halves = []
    for chunk in chunks:
        frames = chunk(stored) if callable(chunk) else chunk
        expected = b"".join([alone.feed(frame) for frame in frames])
        assert together.feed(*frames) == expected
        stored += Shop.halves(expected)
    seen = together.seen()
    for name, value in alone.seen().items():
        assert seen.pop(name) == value, name
    assert not seen
    return together


@pytest.mark.parametrize("kind", [JSON, BINARY])
async def test_transactions_of_one_chunk_are_stored_and_answered_together(tmp_path: Path, kind: SerializeType) -> None:
    shop = compare(
        tmp_path,
        [
            [send(n, kind=kind, queue_id=n % 4) for n in range(20)],
            lambda halves: [end(half, (COMMIT, ROLLBACK)[half[0] % 3 == 0], kind) for half in halves],
        ],
    )
    assert shop.half_messages.waiting.total() == 0


async def test_half_messages_ends_delayed_and_plain_messages_may_be_mixed(tmp_path: Path) -> None:
    def mixed(halves: Halves) -> list[bytes]:
        frames = []
        for number, half in enumerate(halves, 100):
            frames += [send(number, PLAIN), end(half, COMMIT), send(number + 50, DELAYED), send(number + 80)]
        return frames

    shop = compare(tmp_path, [[send(n) for n in range(10)], mixed])
    assert shop.half_messages.waiting == {"TopicA": 10}
    assert shop.broker.statistics.delays.counts[0] == 11


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
    compare(tmp_path, [[send(n, text) for n in range(5)], lambda halves: [end(half, COMMIT) for half in halves]])


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
async def test_what_is_unusual_or_refused_changes_nothing_beside_it(
    tmp_path: Path, text: str, fields: dict[str, Any], kind: SerializeType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "randrange", lambda stop: stop - 1)  # a queue id of -1 takes any queue
    odd = send(3, text, kind=kind, **fields)
    shop = compare(tmp_path, [[send(1, kind=kind), odd, send(4, kind=kind)]])
    assert shop.half_messages.waiting["TopicA"] >= 2


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

    assert compare(tmp_path, [[send(1), send(2)], ends]).half_messages.waiting == {"TopicA": 1}


async def test_a_transaction_ends_once_however_often_a_chunk_says_so(tmp_path: Path) -> None:
    def ends(halves: Halves) -> list[bytes]:
        return [end(halves[0], COMMIT), end(halves[1], ROLLBACK), *[end(half, COMMIT, oneway=False) for half in halves]]

    shop = compare(tmp_path, [[send(1), send(2)], ends, ends])
    assert (shop.broker.statistics.commits, shop.broker.statistics.rollbacks) == ({"TopicA": 2}, {"TopicA": 1})


async def test_the_second_end_of_a_transaction_in_one_chunk_is_refused(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    (half,) = shop.halves(shop.feed(send(1)))
    before = shop.broker.store.max_offset_of("TopicA", 1)
    answers = FrameDecoder().feed(shop.feed(*[end(half, COMMIT, oneway=False)] * 3))
    assert [reply.code for reply in answers] == [0, ResponseCode.SYSTEM_ERROR, ResponseCode.SYSTEM_ERROR]
    assert answers[1].remark == "The transaction has ended, or a later copy of its message is being checked"
    assert shop.broker.store.max_offset_of("TopicA", 1) == before + 1
    assert counts(shop)["answers"] == {(310, 0): 7, (37, 0): 2, (37, 1): 2}
    shop.broker.close()


async def test_the_notes_that_transactions_ended_that_one_failed_append_leaves_out_can_be_made_later(
    tmp_path: Path,
) -> None:
    disk = FailingFiles()
    shop = Shop(tmp_path, files=disk, mapped_file_size_commit_log=4096)
    halves: list[Any] = []
    while len(halves) < 12:
        halves += shop.halves(shop.feed(send(len(halves) + 1, body=b"x" * 200)))
    disk.fail["create"] = errno.EIO
    codes = [
        reply.code for reply in FrameDecoder().feed(shop.feed(*[end(half, COMMIT, oneway=False) for half in halves]))
    ]
    assert codes == sorted(codes), "those that fit before the next file, which could not be made"
    assert 0 in codes
    assert ResponseCode.SYSTEM_ERROR in codes
    ended = codes.count(0)
    assert shop.half_messages.waiting == {"TopicA": 12 - ended}
    disk.fail.clear()
    shop.broker.clock.tick(1)
    again = FrameDecoder().feed(shop.feed(*[end(half, COMMIT, oneway=False) for half in halves]))
    assert [reply.code for reply in again] == [1] * ended + [0] * (12 - ended)
    assert not shop.half_messages.waiting
    stored = [message.prepared_transaction_offset for message in read_all(shop.broker.store, "TopicA", 1)]
    assert stored[2:] == [half[1] for half in halves], "each once"
    shop.broker.close()


@pytest.mark.parametrize("kind", [JSON, BINARY])
async def test_answers_keep_the_order_of_the_requests(tmp_path: Path, kind: SerializeType) -> None:
    def mixed(halves: Halves) -> list[bytes]:
        ends = [end(half, COMMIT, kind, oneway=half[0] % 3 == 0) for half in halves]
        return [*ends[:2], send(50), *ends[2:4], send(51), send(52), ends[4], ends[5], send(53, oneway=True)]

    compare(tmp_path, [[send(n) for n in range(6)], mixed])


async def test_under_sync_flush_an_end_is_answered_when_it_is_on_disk(tmp_path: Path) -> None:
    shop = Shop(tmp_path, flush_disk_type=FlushDiskType.SYNC_FLUSH)
    start = shop.broker.store.max_offset
    shop.feed(send(1))
    assert shop.feed(end((1, start), COMMIT, oneway=False)) == b"", "nothing is promised before it is on disk"
    assert shop.half_messages.waiting.total() == 0
    replies = await flushed(shop, 8)
    assert [(reply.opaque, reply.code) for reply in replies[-2:]] == [(1, 0), (1, 0)]
    shop.broker.close()


async def test_an_end_that_is_not_on_disk_in_time_says_so(tmp_path: Path) -> None:
    shop = Shop(tmp_path, flush_disk_type=FlushDiskType.SYNC_FLUSH)
    start = shop.broker.store.max_offset
    shop.feed(send(1))
    shop.feed(end((1, start), COMMIT, oneway=False))
    shop.broker.flusher.close()  # nobody will be told that anything is safe
    for _ in range(5):
        await asyncio.sleep(0)
    last = FrameDecoder().feed(shop.transport.taken())[-1]
    assert (last.code, last.opaque, last.ext_fields) == (ResponseCode.FLUSH_DISK_TIMEOUT, 1, {})
    shop.broker.store.close()


async def test_an_end_that_guesses_where_a_message_of_its_own_chunk_will_lie_ends_nothing(tmp_path: Path) -> None:
    before = Shop(tmp_path / "before")
    (half,) = before.halves(before.feed(send(1)))
    before.broker.close()
    shop = Shop(tmp_path / "now")
    answers = FrameDecoder().feed(shop.feed(send(1), end(half, COMMIT, oneway=False), send(2)))
    assert [(reply.code, reply.opaque) for reply in answers] == [(0, 1), (1, 1), (0, 2)]
    assert shop.feed(end(half, COMMIT)) == b""
    assert shop.half_messages.waiting == {"TopicA": 1}, "the producer that has its answer can end it"
    shop.broker.close()


async def test_a_message_that_was_checked_ends_by_the_place_that_its_producer_knows(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    first, second = shop.halves(shop.feed(send(1), send(2)))
    stored = shop.half_messages.read(first[0])
    assert stored is not None
    shop.half_messages.put_back(stored, {"TRANSACTION_CHECK_TIMES": "1"})
    shop.feed(end(first, COMMIT), end(second, COMMIT))
    assert shop.half_messages.waiting.total() == 0
    shop.broker.close()


async def test_a_batch_that_does_not_fit_its_file_goes_on_in_the_next(tmp_path: Path) -> None:
    shop = Shop(tmp_path, mapped_file_size_commit_log=64 * 1024)
    bodies = [bytes([n % 251]) * (n * 37 % 3000) for n in range(200)]
    halves: Halves = []
    for first in range(0, 200, 20):
        halves += shop.halves(shop.feed(*[send(n, body=bodies[n]) for n in range(first, first + 20)]))
    shop.feed(*[end(half, COMMIT) for half in halves])
    assert [message.body for message in read_all(shop.broker.store, HALF_TOPIC, 0)[1:]] == bodies
    assert [message.body for message in read_all(shop.broker.store, "TopicA", 1)[2:]] == bodies
    assert shop.broker.store.max_offset > 8 * shop.broker.store.config.mapped_file_size_commit_log
    shop.broker.close()


async def test_an_end_that_a_full_disk_refuses_can_be_told_again(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    (half,) = shop.halves(shop.feed(send(1)))
    shop.broker.store.set_disk_full(True)
    (reply,) = FrameDecoder().feed(shop.feed(end(half, COMMIT), send(2)))
    assert reply.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert shop.half_messages.waiting == {"TopicA": 1}
    shop.broker.store.set_disk_full(False)
    shop.feed(end(half, COMMIT))
    assert not shop.half_messages.waiting
    shop.broker.close()


async def test_a_waiting_pull_is_woken_by_a_commit(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    halves = shop.halves(shop.feed(send(1), send(2, queue_id=2)))

    class Everything:
        def matches(self, tags_code: int, properties: str) -> bool:
            return "TagA" in properties

    queue = TopicQueue("TopicA", 1)
    offset = shop.broker.store.max_offset_of("TopicA", 1)
    later = shop.broker.wait_for(queue, offset, Everything(), shop.connection)  # type: ignore[arg-type]
    shop.feed(*[end(half, COMMIT) for half in halves])
    await asyncio.wait_for(later, 30)
    shop.broker.close()


async def test_under_sync_flush_half_messages_are_answered_after_one_flush(tmp_path: Path) -> None:
    shop = Shop(tmp_path / "sync", flush_disk_type=FlushDiskType.SYNC_FLUSH)
    await flushed(shop, 6)  # those that made the queues
    assert shop.feed(*[send(n) for n in range(8)]) == b"", "nothing is promised before it is on disk"
    assert [(reply.opaque, reply.code) for reply in await flushed(shop, 8)] == [(n, 0) for n in range(8)]
    shop.broker.close()


async def test_senders_that_a_flush_leaves_waiting_are_told_that_it_took_too_long(tmp_path: Path) -> None:
    shop = Shop(tmp_path, flush_disk_type=FlushDiskType.SYNC_FLUSH)
    shop.feed(send(1), send(2))
    shop.broker.flusher.close()  # nobody will be told that anything is safe
    for _ in range(5):  # from flush to reply to socket
        await asyncio.sleep(0)
    replies = FrameDecoder().feed(shop.transport.taken())
    assert {reply.code for reply in replies} == {ResponseCode.FLUSH_DISK_TIMEOUT}
    assert len(replies) == 8
    shop.broker.store.close()


async def test_a_change_of_the_configuration_counts_at_once(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    config = shop.broker.config
    replies = b""
    for change in ({"region_id": "elsewhere"}, {"reject_transaction_message": True}, {"broker_permission": 4}):
        config.broker = replace(config.broker, **change)
        replies += shop.feed(send(2))
    first, second, third = FrameDecoder().feed(replies)
    assert (first.code, first.ext_fields["MSG_REGION"]) == (0, "elsewhere")
    assert second.code == third.code == ResponseCode.NO_PERMISSION
    assert second.remark == "the broker[10.0.0.1] sending transaction message is forbidden"
    shop.broker.close()


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_comes_requests_do_not_change_each_other(tmp_path: Path, seed: int) -> None:
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

    compare(tmp_path, [chunk] * 20)


async def test_what_ended_together_has_ended_after_a_crash(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    halves = shop.halves(shop.feed(*[send(n) for n in range(6)]))
    shop.feed(*[end(half, COMMIT) for half in halves[:2]], *[end(half, ROLLBACK) for half in halves[2:4]])
    parts = shop.broker
    again = HalfMessages(parts.store, parts.writer, parts.offsets, pack_host("10.0.0.1", 40911))
    assert (
        list(again.offsets_waiting()) == [half[0] for half in halves[4:]] == list(shop.half_messages.offsets_waiting())
    )
    assert again.waiting == shop.half_messages.waiting == {"TopicA": 2}
    assert [op.body for op in read_all(parts.store, OP_HALF_TOPIC, 0)][1:] == [b"%d" % half[0] for half in halves[:4]]
    committed = read_all(parts.store, "TopicA", 1)[-2:]
    assert [message.prepared_transaction_offset for message in committed] == [half[1] for half in halves[:2]]
    assert parts.store.max_offset_of(HALF_TOPIC, 0) == 7
    shop.broker.close()
