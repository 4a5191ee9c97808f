"""Sends of single messages: what is answered, stored and counted.

Requests of one chunk are read, stored and answered together, and usual ones by the compiled step, where there is one.
Neither may show: `compare` feeds another broker the same requests one by one, without that step.
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
from hypothesis import given, settings
from hypothesis import strategies as st

from downrange.broker.handlers.send_reader import SendReader
from downrange.broker.handlers.sends import Sends
from downrange.compiled import steps
from downrange.model.message import SysFlag, TopicQueue
from downrange.model.topics import TopicConfig
from downrange.protocol.bodies.fields import encode_fields
from downrange.protocol.bodies.send import SendMessageRequest, SendMessageResponse
from downrange.protocol.bodies.send_replies import WHEN_SAFE
from downrange.protocol.codes import RequestCode, ResponseCode, SerializeType
from downrange.protocol.command import Command
from downrange.protocol.framing import FrameDecoder, encode
from downrange.store.config import FlushDiskType
from downrange.store.new_message import NewMessage, PutMessageStatus, Refusal
from downrange.store.new_messages import NewMessages
from tests.support.store_files import files_of
from tests.unit.broker.fake_transport import FakeTransport, SlowTransport
from tests.unit.broker.served import ServedBroker
from tests.unit.store.small_store import FailingFiles, read_all

ID = "7F0000011A2B18B4AAC20000{:08X}"
JAVA = "UNIQ_KEY\x01" + ID + "\x02WAIT\x01true\x02TAGS\x01TagA"
BINARY, JSON = SerializeType.ROCKETMQ, SerializeType.JSON


def usual(count: int) -> int:
    """How many requests the compiled step has read, if it reads so many where it was built."""
    return 0 if steps is None else count


def counts(served: ServedBroker) -> dict[str, object]:
    """Everything that a broker counts of sends, but for the times that things took."""
    statistics = served.broker.statistics
    return {
        "puts": {topic: [each.calls, each.messages, each.bytes, each.by_size] for topic, each in statistics.puts()},
        "all puts": (statistics.put_messages, statistics.put_bytes, statistics.failed_puts),
        "ends": (dict(statistics.commits), dict(statistics.rollbacks)),
        "delays": statistics.delays.counts,
        "answers": {codes: sum(histogram.counts) for codes, histogram in statistics.rpcs.items()},
    }


def files(served: ServedBroker) -> dict[str, bytes]:
    """Close the broker; everything on disk but the times in it that are those of the machine."""
    served.broker.close()
    return files_of(served.broker.store.config.store_path_root_dir)


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


def compare(root: Path, chunks: Sequence[Sequence[bytes]], **options: Any) -> ServedBroker:
    """Feed one broker chunks and another one the same requests one by one; return the first, closed."""
    alone = ServedBroker(root / "alone", accelerated=False, **dict(options))
    together = ServedBroker(root / "together", **dict(options))
    for chunk in chunks:
        random.seed(7)  # a queue id of -1 takes any queue
        expected = b"".join([alone.feed(frame) for frame in chunk])
        random.seed(7)
        assert together.feed(*chunk) == expected
    assert counts(together) == counts(alone)
    assert together.transport.is_aborted == alone.transport.is_aborted
    assert files(together) == files(alone)
    return together


@pytest.mark.parametrize("kind", [JSON, BINARY])
async def test_what_a_java_client_sends_is_usual_from_the_second_message_of_a_queue_on(
    tmp_path: Path, kind: SerializeType
) -> None:
    chunks = [[send(n, kind=kind) for n in range(first, first + 25)] for first in range(0, 200, 25)]
    assert compare(tmp_path, chunks).sends.accelerated == usual(200 - 4)


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
        "WAIT\x01false\x02TAGS\x01a",
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
    assert compare(tmp_path, [frames[:1], frames[1:]]).sends.accelerated == usual(5)


@pytest.mark.parametrize("kind", [JSON, BINARY])
@pytest.mark.parametrize(
    ("text", "fields"),
    [
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
async def test_what_is_not_usual_is_read_in_python(
    tmp_path: Path, text: str, fields: dict[str, Any], kind: SerializeType
) -> None:
    frames = [send(n, queue_id=1, kind=kind) for n in range(3)]
    odd = send(3, text, kind=kind, **{"queue_id": 1, **fields})
    assert compare(tmp_path, [[*frames, odd, send(4, queue_id=1, kind=kind)]]).sends.accelerated == usual(3)


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
    assert compare(tmp_path, [frames]).sends.accelerated == usual(len(frames) - 2)


async def test_a_header_that_cannot_be_read_is_answered_alike(tmp_path: Path) -> None:
    good = send(1, queue_id=1)
    wrong = good.replace(b'"e":"1"', b'"e":"x"')
    missing = send(2, queue_id=1).replace(b'"b":', b'"z":')
    assert compare(tmp_path, [[good, wrong, missing, good]]).sends.accelerated == usual(1)


async def test_a_header_that_is_no_json_ends_the_connection_after_what_came_before(tmp_path: Path) -> None:
    good = send(1, queue_id=1)
    broken = send(2, queue_id=1).replace(b'"flag":0', b'"flag":?')
    assert compare(tmp_path, [[good], [good, broken, good]]).sends.accelerated == usual(1)


async def test_oneway_sends_get_no_reply(tmp_path: Path) -> None:
    chunk = [send(n, queue_id=1, oneway=n % 2 == 1) for n in range(9)]
    assert compare(tmp_path, [chunk]).sends.accelerated == usual(8)


async def test_a_chunk_may_go_to_many_topics_and_end_in_the_next_file(tmp_path: Path) -> None:
    topics = ("TopicA", "TopicB")
    chunks = [
        [send(n, topic=topics[n % 2], body=bytes([n % 251]) * (n * 37 % 2000)) for n in range(first, first + 20)]
        for first in range(0, 400, 20)
    ]
    served = compare(tmp_path, chunks)
    assert served.sends.accelerated >= usual(300)
    assert served.broker.store.max_offset > 5 * served.broker.store.config.mapped_file_size_commit_log


async def test_messages_of_topics_with_several_tags_have_the_flag_that_says_so(tmp_path: Path) -> None:
    served = ServedBroker(tmp_path)
    served.broker.topics.put(TopicConfig("TopicA", 4, 4, topic_filter_type="MULTI_TAG"))
    served.feed(*[send(n, queue_id=1) for n in range(5)])
    assert {message.sys_flag for message in read_all(served.broker.store, "TopicA", 1)} == {SysFlag.MULTI_TAGS}
    assert served.sends.accelerated == 0
    served.broker.close()


async def test_the_first_message_of_a_topic_is_answered_when_the_name_servers_know_of_it(tmp_path: Path) -> None:
    served = ServedBroker(tmp_path)
    known, asked = asyncio.Event(), 0

    async def register() -> None:
        nonlocal asked
        asked += 1
        await known.wait()

    served.sends._register = register
    first = send(3, topic="New", queue_id=0)
    answers = served.feed(send(1), send(2, kind=BINARY), first, send(4, topic="New", queue_id=0), send(5))
    assert [reply.opaque for reply in FrameDecoder().feed(answers)] == [1, 2, 4, 5], "the others need not wait"
    assert served.usage.requests == 1
    await asyncio.sleep(0)
    known.set()
    while served.usage.requests:
        await asyncio.sleep(0)
    (reply,) = FrameDecoder().feed(served.transport.taken())
    assert (reply.opaque, reply.code, asked, served.usage.requests) == (3, 0, 1, 0)
    assert [message.born_timestamp % 10 for message in read_all(served.broker.store, "New", 0)] == [3, 4]
    served.broker.close()


async def test_the_first_message_of_a_topic_whose_sender_has_enough_to_read_is_deferred(tmp_path: Path) -> None:
    transport = SlowTransport(1)
    served = ServedBroker(tmp_path, transport=transport)
    transport.protocol = served.connection
    other_transport = FakeTransport()
    other = served.connect(other_transport)
    frames = FrameDecoder().frames(send(1) + send(2, topic="New", queue_id=0) + send(3))
    served.endpoint.deliver(frames, [served.connection, served.connection, other])
    assert [reply.opaque for reply in FrameDecoder().feed(transport.taken())] == [1]
    assert [reply.opaque for reply in FrameDecoder().feed(other_transport.taken())] == [3]
    served.connection.resume_writing()
    assert [reply.opaque for reply in FrameDecoder().feed(transport.taken())] == [2]
    stored = {topic: read_all(served.broker.store, topic, queue_id) for topic, queue_id in (("New", 0), ("TopicA", 3))}
    times = {topic: [message.born_timestamp % 10 for message in messages] for topic, messages in stored.items()}
    assert times == {"New": [2], "TopicA": [3]}
    served.broker.close()


async def test_a_pull_that_waits_is_woken_by_a_send(tmp_path: Path) -> None:
    served = ServedBroker(tmp_path)
    served.feed(send(0, queue_id=1))
    arrived = asyncio.Event()

    class Everything:
        def matches(self, tags_code: int, properties: str) -> bool:
            arrived.set()
            return "TagA" in properties

    woken = served.broker.wait_for(TopicQueue("TopicA", 1), 1, Everything(), served.connection)  # type: ignore[arg-type]
    served.feed(send(1, queue_id=1), send(2, queue_id=2))
    await asyncio.wait_for(woken, 30)
    assert arrived.is_set()
    served.broker.close()


# --- many connections -----------------------------------------------------------------------------------------------


async def test_requests_of_many_connections_are_stored_together_and_each_is_answered_where_it_came_from(
    tmp_path: Path,
) -> None:
    served = ServedBroker(tmp_path)
    transports = [FakeTransport(("10.0.0.3", 5000 + n)) for n in range(3)]
    connections = [served.connect(transport) for transport in transports]
    frames = FrameDecoder().frames(b"".join(send(n, kind=(JSON, BINARY)[n % 2], queue_id=1) for n in range(30)))
    appended: list[int] = []
    append = served.broker.store.append

    def append_counted(messages: NewMessages) -> Refusal | None:
        appended.append(len(messages))
        return append(messages)

    served.broker.store.append = append_counted
    served.endpoint.deliver(frames, [connections[n % 3] for n in range(30)])
    assert appended == [30]
    for number, transport in enumerate(transports):
        answers = FrameDecoder().feed(transport.taken())
        assert [(reply.opaque, reply.code) for reply in answers] == [(n, 0) for n in range(number, 30, 3)]
        assert [reply.header(SendMessageResponse).queue_offset for reply in answers] == list(range(number, 30, 3))
    hosts = [message.born_host for message in read_all(served.broker.store, "TopicA", 1)]
    assert hosts == [("10.0.0.3", 5000 + n % 3) for n in range(30)]
    served.broker.close()


@pytest.mark.parametrize("kind", [JSON, BINARY])
@pytest.mark.parametrize("code", [310, 36, 37])
async def test_a_header_that_cannot_be_read_closes_its_own_connection_only(
    tmp_path: Path, kind: SerializeType, code: int
) -> None:
    served = ServedBroker(tmp_path)
    transport = FakeTransport()
    other = served.connect(transport)
    served.feed(send(0, queue_id=1))
    good = [FrameDecoder().frames(send(n, kind=kind, queue_id=1))[0] for n in range(1, 5)]
    broken = FrameDecoder().frames(encode(Command(code, 9, 0, {"a": "b"}, serialize_type=int(kind))))[0]
    broken = broken[0], broken[1][:-3], broken[2]
    own = served.connection
    frames = [good[0], good[1], broken, good[2], good[3], good[2]]
    served.endpoint.deliver(frames, [own, other, own, own, other, own])
    assert (served.transport.is_aborted, transport.is_aborted) == (True, False)
    assert [reply.opaque for reply in FrameDecoder().feed(transport.taken())] == [2, 4]
    stored = [message.born_timestamp % 10 for message in read_all(served.broker.store, "TopicA", 1)]
    assert stored == [0, 1, 2, 4], "what came behind the broken frame is not carried out"
    served.broker.close()


async def test_a_bug_in_reading_one_request_is_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = ServedBroker(tmp_path, accelerated=False)
    message = SendReader.message

    def fail_for_second(reader: SendReader, header: SendMessageRequest, *more: Any) -> NewMessage:
        if header.born_timestamp % 10 == 2:
            raise ZeroDivisionError("a bug")
        return message(reader, header, *more)

    monkeypatch.setattr(SendReader, "message", fail_for_second)
    answers = FrameDecoder().feed(served.feed(*[send(n, queue_id=1) for n in range(1, 4)]))
    assert [(reply.opaque, reply.code) for reply in answers] == [(1, 0), (2, ResponseCode.SYSTEM_ERROR), (3, 0)]
    assert answers[1].remark == "ZeroDivisionError: a bug"
    assert [message.born_timestamp % 10 for message in read_all(served.broker.store, "TopicA", 1)] == [1, 3]
    served.broker.close()


async def test_what_is_refused_in_the_middle_of_a_chunk_is_answered_there(tmp_path: Path) -> None:
    served = ServedBroker(tmp_path)
    served.feed(send(0, queue_id=1))
    before = counts(served)["answers"]
    chunk = [
        send(1, queue_id=1),
        send(2, queue_id=99),
        send(3, "KEYS\x01" + "k" * 40_000, queue_id=1),
        send(4, queue_id=1),
        send(5, topic="bad topic!", queue_id=1, kind=BINARY),
        send(6, queue_id=1, kind=BINARY),
    ]
    answers = FrameDecoder().feed(served.feed(*chunk))
    assert [(reply.opaque, reply.code) for reply in answers] == [(1, 0), (2, 1), (3, 13), (4, 0), (5, 1), (6, 0)]
    assert all(reply.ext_fields["MSG_REGION"] == "DefaultRegion" for reply in answers), "refusals name the region too"
    assert [message.born_timestamp % 10 for message in read_all(served.broker.store, "TopicA", 1)] == [0, 1, 4, 6]
    assert before == {(310, 0): 1}
    assert counts(served)["answers"] == {(310, 0): 4, (310, 1): 2, (310, 13): 1}
    assert counts(served)["all puts"] == (4, served.broker.store.max_offset, 1)
    served.broker.close()


async def test_a_store_that_fails_in_the_middle_stores_nothing_twice(tmp_path: Path) -> None:
    files = FailingFiles()
    served = ServedBroker(tmp_path, files=files, mapped_file_size_commit_log=4096)
    served.feed(send(0, queue_id=1))
    files.fail["create"] = errno.EIO
    chunk = [send(n, queue_id=1, body=b"x" * 300, oneway=n == 20) for n in range(1, 25)]
    answers = FrameDecoder().feed(served.feed(*chunk))
    codes = [reply.code for reply in answers]
    stored = codes.count(0)
    assert 0 < stored < 24
    assert [reply.opaque for reply in answers] == [n for n in range(1, 25) if n != 20]
    assert codes == [0] * stored + [ResponseCode.SYSTEM_ERROR] * (23 - stored)
    assert answers[-1].remark == "create mapped file failed, server is busy or broken."
    assert [message.born_timestamp % 100 for message in read_all(served.broker.store, "TopicA", 1)] == list(
        range(stored + 1)
    )
    assert counts(served)["answers"] == {(310, 0): stored + 1, (310, 1): 24 - stored}
    assert served.broker.statistics.failed_puts == 24 - stored
    files.fail.clear()
    served.broker.close()


# --- when the sender is told ----------------------------------------------------------------------------------------


async def flushed(served: ServedBroker, replies: int) -> list[Command]:
    """So many replies that the flusher lets go."""
    running = asyncio.create_task(served.broker.flusher.run(lambda: None))
    while len(FrameDecoder().feed(served.transport.written)) < replies:
        await asyncio.sleep(0)
    running.cancel()
    return FrameDecoder().feed(served.transport.taken())


async def test_under_sync_flush_the_replies_of_a_chunk_leave_together_after_one_flush(tmp_path: Path) -> None:
    served = ServedBroker(tmp_path / "sync", flush_disk_type=FlushDiskType.SYNC_FLUSH)
    asynchronous = ServedBroker(tmp_path / "async")
    chunk = [send(n, queue_id=1) for n in range(8)]
    expected = asynchronous.feed(*chunk)
    asynchronous.broker.close()
    assert served.feed(*chunk) == b"", "nothing is promised before it is on disk"
    assert served.usage.requests == 8
    assert await flushed(served, 8) == FrameDecoder().feed(expected)
    assert served.usage.requests == 0
    served.broker.close()


@pytest.mark.parametrize("kind", [JSON, BINARY])
async def test_senders_that_do_not_wait_are_answered_at_once(tmp_path: Path, kind: SerializeType) -> None:
    """Whatever the broker promises the others: WAIT is false for consumers that send back and for those who say so."""
    served = ServedBroker(tmp_path, flush_disk_type=FlushDiskType.SYNC_FLUSH)
    impatient = "WAIT\x01false\x02" + JAVA.replace("WAIT\x01true\x02", "")
    chunk = [send(n, impatient if n % 3 == 0 else JAVA, kind=kind, queue_id=1) for n in range(9)]
    answers = FrameDecoder().feed(served.feed(*chunk))
    assert [(reply.opaque, reply.code) for reply in answers] == [(0, 0), (3, 0), (6, 0)]
    assert [reply.header(SendMessageResponse).queue_offset for reply in answers] == [0, 3, 6]
    late = await flushed(served, 6)
    assert [(reply.opaque, reply.code) for reply in late] == [(n, 0) for n in range(9) if n % 3]
    texts = [message.properties_text for message in read_all(served.broker.store, "TopicA", 1)]
    assert not any("WAIT" in text for text in texts)
    served.broker.close()


class Slaves:
    """Followers of a SYNC_MASTER that have copied nothing until a test says so."""

    def __init__(self, served: ServedBroker) -> None:
        self._waiting: list[Callable[[PutMessageStatus], None]] = []
        writer = served.broker.writer
        writer.makes_wait, writer._copied_by = True, self  # type: ignore[assignment]

    def tell_when_copied(self, end_offset: int, tell: Callable[[PutMessageStatus], None]) -> None:
        self._waiting.append(tell)

    def tell(self, status: PutMessageStatus) -> None:
        waiting, self._waiting = self._waiting, []
        for tell in waiting:
            tell(status)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (PutMessageStatus.PUT_OK, ResponseCode.SUCCESS),
        (PutMessageStatus.FLUSH_SLAVE_TIMEOUT, ResponseCode.FLUSH_SLAVE_TIMEOUT),
        (PutMessageStatus.SLAVE_NOT_AVAILABLE, ResponseCode.SLAVE_NOT_AVAILABLE),
    ],
)
async def test_senders_to_a_sync_master_wait_for_its_slaves_unless_they_say_otherwise(
    tmp_path: Path, status: PutMessageStatus, code: ResponseCode
) -> None:
    served = ServedBroker(tmp_path)
    served.feed(send(0, queue_id=1))
    slaves = Slaves(served)
    texts = (JAVA, "WAIT\x01false", JAVA, "WAIT\x01false\x02DELAY\x011", "DELAY\x011")
    answers = FrameDecoder().feed(served.feed(*[send(n, text, queue_id=1) for n, text in enumerate(texts)]))
    assert [(reply.opaque, reply.code) for reply in answers] == [(1, 0), (3, 0)]
    assert served.usage.requests == 5
    slaves.tell(status)
    answers = FrameDecoder().feed(served.transport.taken())
    assert [(reply.opaque, reply.code) for reply in answers] == [(0, code), (2, code), (4, code)]
    assert served.usage.requests == 0
    served.broker.close()


@pytest.mark.parametrize("accelerated", [True, False])
async def test_senders_that_a_flush_leaves_waiting_are_told_that_it_took_too_long(
    tmp_path: Path, accelerated: bool
) -> None:
    served = ServedBroker(tmp_path, accelerated=accelerated, flush_disk_type=FlushDiskType.SYNC_FLUSH)
    served.feed(send(0, queue_id=1))
    served.feed(send(1, queue_id=1), send(2, queue_id=1, kind=BINARY))
    served.broker.flusher.close()  # nobody will be told that anything is safe
    for _ in range(5):  # from flush to reply to socket
        await asyncio.sleep(0)
    replies = FrameDecoder().feed(served.transport.taken())
    assert [(reply.opaque, reply.code) for reply in replies] == [(n, ResponseCode.FLUSH_DISK_TIMEOUT) for n in range(3)]
    assert [reply.header(SendMessageResponse).queue_offset for reply in replies] == [0, 1, 2]
    served.broker.store.close()


async def test_a_bug_in_the_answer_to_one_batch_keeps_no_other_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    send_batch = Sends._send
    failed: list[Any] = []

    def fail_once(batch: Any, origins: Any, template: Any, which: int) -> None:
        if which == WHEN_SAFE and not failed:
            failed.append(batch)
            raise ZeroDivisionError("a bug")
        send_batch(batch, origins, template, which)

    served = ServedBroker(tmp_path, flush_disk_type=FlushDiskType.SYNC_FLUSH)
    for number in range(3):
        served.feed(send(number, queue_id=1))
    monkeypatch.setattr(Sends, "_send", staticmethod(fail_once))
    served.broker.flusher.close()  # nobody will be told that anything is safe
    for _ in range(5):
        await asyncio.sleep(0)
    assert sorted(reply.opaque for reply in FrameDecoder().feed(served.transport.taken())) == [1, 2]
    assert "messages were stored and cannot be acknowledged messages=1" in caplog.text
    served.broker.store.close()


async def test_a_busy_broker_refuses_sends(tmp_path: Path) -> None:
    served = ServedBroker(tmp_path)
    served.feed(send(0, queue_id=1))
    served.broker.keep_waiting(60)
    (reply,) = FrameDecoder().feed(served.feed(send(1, queue_id=1), send(2, queue_id=1, oneway=True)))
    assert (reply.opaque, reply.code) == (1, ResponseCode.SYSTEM_BUSY)
    assert (reply.remark or "").startswith("[TIMEOUT_CLEAN_QUEUE]broker busy, start flow control for a while, period")
    assert served.broker.store.max_offset_of("TopicA", 1) == 1
    served.broker.close()


async def test_a_header_that_cannot_be_read_closes_its_own_connection_of_a_busy_broker(tmp_path: Path) -> None:
    served = ServedBroker(tmp_path)
    transport = FakeTransport()
    other = served.connect(transport)
    served.broker.keep_waiting(60)
    (good,) = FrameDecoder().frames(send(1))
    (broken,) = FrameDecoder().frames(send(2, kind=BINARY))
    served.endpoint.deliver([good, (broken[0], broken[1][:-3], b""), good], [other, served.connection, other])
    assert (served.transport.is_aborted, transport.is_aborted) == (True, False)
    assert [reply.code for reply in FrameDecoder().feed(transport.taken())] == [ResponseCode.SYSTEM_BUSY] * 2
    served.broker.close()


async def test_a_change_of_the_configuration_counts_at_once(tmp_path: Path) -> None:
    replies = []
    for accelerated in (True, False):
        served = ServedBroker(tmp_path / str(accelerated), accelerated=accelerated)
        served.feed(send(0, queue_id=1))
        config = served.broker.config
        config.broker = replace(config.broker, region_id="elsewhere", trace_on=False)
        replies.append(served.feed(send(1, queue_id=1)))
        config.broker = replace(config.broker, broker_permission=4)
        replies[-1] += served.feed(send(2, queue_id=1))
        served.broker.close()
    assert replies[0] == replies[1]
    first, _ = FrameDecoder().feed(replies[0])
    assert (first.ext_fields["MSG_REGION"], first.ext_fields["TRACE_ON"]) == ("elsewhere", "false")


PIECES = st.sampled_from(
    ["TAGS", "KEYS", "UNIQ_KEY", "WAIT", "DELAY", "TRAN_MSG", "CLUSTER", "\x01", "\x02", "true", "false", "3", " ", "é"]
)


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.lists(PIECES | st.just("UNIQ_KEY\x01" + ID), max_size=12).map("".join), min_size=1, max_size=8),
    kinds=st.lists(st.sampled_from([JSON, BINARY]), min_size=8, max_size=8),
    bodies=st.lists(st.binary(max_size=50), min_size=8, max_size=8),
)
def test_whatever_the_properties_requests_do_not_change_each_other(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], kinds: list[SerializeType], bodies: list[bytes]
) -> None:
    frames = [send(n, text, bodies[n], kinds[n], queue_id=n % 2) for n, text in enumerate(texts)]

    async def run() -> None:
        compare(tmp_path_factory.mktemp("sends"), [[send(90, queue_id=0), send(91, queue_id=1)], frames])

    asyncio.run(run())
