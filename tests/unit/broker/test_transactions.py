from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from downrange.broker.transactions.records import operation
from downrange.model.properties import MAX_PROPERTIES_BYTES
from downrange.model.record import decode_record
from downrange.model.topics import CHECK_MAX_TIME_TOPIC, HALF_TOPIC, OP_HALF_TOPIC
from downrange.model.transaction_ops import ended_offsets
from downrange.protocol.bodies.send import BatchEntry, SendMessageRequest, SendMessageResponse, encode_batch
from downrange.protocol.bodies.transactions import CheckTransactionStateRequest, ResumeCheckHalfMessageRequest
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import request
from downrange.store.config import FlushDiskType
from tests.support.golden_store import unpack
from tests.unit.broker.transactional import COMMIT, GROUP, ROLLBACK, UNKNOWN, Half, TransactionalBroker, asked
from tests.unit.broker.wired import FakeConnection
from tests.unit.store.small_store import FailingFiles

NO_SPACE = 28
TIMEOUT = 6.0
A_CHECK_LATER = 60.0


@pytest.fixture
async def broker(tmp_path: Path) -> Any:
    made = TransactionalBroker(tmp_path)
    yield made
    made.close()


@pytest.fixture
async def make(tmp_path: Path) -> Any:
    brokers: list[TransactionalBroker] = []

    def maker(**options: Any) -> TransactionalBroker:
        brokers.append(TransactionalBroker(tmp_path, **options))
        return brokers[-1]

    yield maker
    for each in brokers:
        each.close()


# --- half messages ------------------------------------------------------------------------------------------------


async def test_a_half_message_is_stored_where_no_consumer_looks(broker: TransactionalBroker) -> None:
    reply = broker.try_to_send(TAGS="a").header(SendMessageResponse)
    assert broker.bodies() == []
    (half,) = broker.records(HALF_TOPIC)
    assert half.properties == {
        "UNIQ_KEY": "key1",
        "WAIT": "true",
        "TRAN_MSG": "true",
        "PGROUP": GROUP,
        "TAGS": "a",
        "CLUSTER": "DefaultCluster",
        "REAL_TOPIC": "orders",
        "REAL_QID": "1",
    }
    assert (half.sys_flag, half.flag, half.body) == (0, 7, b"pay")
    assert (reply.queue_id, reply.queue_offset, reply.msg_id) == (1, 0, half.offset_message_id)
    assert broker.waiting == {"orders": 1}
    config = broker.parts.topics.get(HALF_TOPIC)
    assert config is not None
    assert (config.read_queue_nums, config.write_queue_nums, config.perm) == (1, 1, 6)


@pytest.mark.parametrize(
    ("settings", "properties", "code", "remark"),
    [
        ({"reject_transaction_message": True}, {}, 16, "the broker[10.0.0.1] sending transaction message is forbidden"),
        ({}, {"DELAY": "3"}, 13, "a transactional message cannot be delayed"),
    ],
)
async def test_half_messages_that_are_refused(
    make: Any, settings: dict[str, Any], properties: dict[str, str], code: int, remark: str
) -> None:
    broker = make(broker=settings)
    reply = broker.try_to_send(**properties)
    assert (reply.code, reply.remark) == (code, remark)
    assert broker.records(HALF_TOPIC) == []
    assert broker.waiting == {}


async def test_a_batch_cannot_be_transactional(broker: TransactionalBroker) -> None:
    header = SendMessageRequest(
        producer_group=GROUP, topic="orders", queue_id=1, sys_flag=4, born_timestamp=0, properties="", batch=True
    )
    reply = broker.ask(
        request(RequestCode.SEND_BATCH_MESSAGE, header, body=encode_batch([BatchEntry(0, b"one", "TRAN_MSG\x01true")]))
    )
    assert reply.code == ResponseCode.MESSAGE_ILLEGAL
    assert broker.waiting == {}


# --- the end ------------------------------------------------------------------------------------------------------


async def test_a_commit_makes_the_message_visible_as_it_was_sent(broker: TransactionalBroker) -> None:
    half = broker.send(TAGS="a")
    assert broker.end(half, COMMIT).code == 0
    (message,) = broker.records("orders", 1)
    (before,) = broker.records(HALF_TOPIC)
    assert (message.body, message.flag, message.properties_text) == (b"pay", 7, before.properties_text)
    assert (message.sys_flag, message.prepared_transaction_offset) == (COMMIT, half.commit_log_offset)
    assert (message.born_timestamp, message.born_host) == (before.born_timestamp, before.born_host)
    (op,) = broker.records(OP_HALF_TOPIC)
    assert (op.body, op.properties_text, op.born_host) == (b"0", "WAIT\x01true\x02TAGS\x01d", op.store_host)
    assert broker.waiting == {}
    assert dict(broker.parts.statistics.commits) == {"orders": 1}


async def test_a_rollback_leaves_only_a_note(broker: TransactionalBroker) -> None:
    broker.send()
    half = broker.send()
    assert broker.end(half, ROLLBACK).code == 0
    assert broker.bodies() == []
    assert [op.body for op in broker.records(OP_HALF_TOPIC)] == [b"1"]
    assert broker.waiting == {"orders": 1}
    assert dict(broker.parts.statistics.rollbacks) == {"orders": 1}


@pytest.mark.parametrize("state", [UNKNOWN, 4, 99, -1])
@pytest.mark.parametrize("from_check", [False, True])
async def test_an_end_that_is_none_gets_no_answer(broker: TransactionalBroker, state: int, from_check: bool) -> None:
    half = broker.send()
    assert broker.handle(broker.end_command(half, state, from_transaction_check=from_check)) is None
    assert broker.waiting == {"orders": 1}


@pytest.mark.parametrize("state", [COMMIT, ROLLBACK])
@pytest.mark.parametrize(
    ("changes", "remark"),
    [
        ({"commit_log_offset": 1 << 40}, "Find prepared transaction message failed"),
        ({"commit_log_offset": -1}, "Find prepared transaction message failed"),
        ({"commit_log_offset": 1}, "Find prepared transaction message failed"),
        ({"producer_group": "others"}, "The producer group wrong"),
        ({"tran_state_table_offset": 1}, "The transaction state table offset wrong"),
    ],
)
async def test_ends_that_are_refused(
    broker: TransactionalBroker, state: int, changes: dict[str, Any], remark: str
) -> None:
    reply = broker.end(broker.send(), state, **changes)
    assert (reply.code, reply.remark) == (ResponseCode.SYSTEM_ERROR, remark)
    assert broker.bodies() == []
    assert broker.waiting == {"orders": 1}


async def test_a_message_that_is_visible_is_no_half_message(broker: TransactionalBroker) -> None:
    broker.end(broker.send(), COMMIT)
    (visible,) = broker.records("orders", 1)
    reply = broker.end(Half("key1", visible.queue_offset, visible.physical_offset), COMMIT)
    assert reply.remark == "Find prepared transaction message failed"
    assert broker.bodies() == [b"pay"]


@pytest.mark.parametrize("first", [COMMIT, ROLLBACK])
@pytest.mark.parametrize("second", [COMMIT, ROLLBACK])
async def test_a_transaction_ends_once(broker: TransactionalBroker, first: int, second: int) -> None:
    half = broker.send()
    assert broker.end(half, first).code == 0
    reply = broker.end(half, second)
    assert reply.code == ResponseCode.SYSTEM_ERROR
    assert "has ended" in (reply.remark or "")
    assert len(broker.bodies()) == (first == COMMIT)
    assert len(broker.records(OP_HALF_TOPIC)) == 1


async def test_a_commit_that_cannot_be_stored_leaves_the_transaction_open(make: Any) -> None:
    files = FailingFiles()
    broker = make(files=files, mapped_file_size_commit_log=4096)
    half = broker.send(b"x" * 3000)
    files.fail = {"create": NO_SPACE, "reserve": NO_SPACE}
    reply = broker.end(half, COMMIT)
    assert reply.code in (ResponseCode.SYSTEM_ERROR, ResponseCode.SERVICE_NOT_AVAILABLE)
    assert broker.waiting == {"orders": 1}
    files.fail = {}
    broker.parts.store.prepare_next_file()
    assert broker.half_messages.current(half.state_table_offset) == half.state_table_offset


async def test_who_wants_an_answer_gets_it_when_the_end_is_on_disk(make: Any) -> None:
    broker = make(flush_disk_type=FlushDiskType.SYNC_FLUSH)
    producer = FakeConnection()
    assert broker.parts.handle(broker.end_command(_stored_half(broker), COMMIT), producer) is None
    broker.parts.flusher.close()  # the disk will never answer
    await asyncio.sleep(0)
    assert [reply.code for reply in producer.replies()] == [ResponseCode.FLUSH_DISK_TIMEOUT]


def _stored_half(broker: TransactionalBroker) -> Half:
    """A half message whose sender still waits."""
    header = SendMessageRequest(
        producer_group=GROUP,
        topic="orders",
        queue_id=1,
        sys_flag=4,
        born_timestamp=0,
        properties=f"TRAN_MSG\x01true\x02PGROUP\x01{GROUP}",
    )
    broker.handle(request(RequestCode.SEND_MESSAGE_V2, header, body=b"pay"))
    (stored,) = broker.records(HALF_TOPIC)
    return Half("", stored.queue_offset, stored.physical_offset)


# --- the check ----------------------------------------------------------------------------------------------------


async def test_a_producer_is_asked_about_a_half_message_that_grew_old(broker: TransactionalBroker) -> None:
    producer = broker.producer()
    broker.send(TAGS="a")
    await broker.check_after(TIMEOUT - 0.001)
    assert asked(producer) == []
    await broker.check_after(0.001)
    (command,) = producer.told
    assert command.is_oneway
    header = command.header(CheckTransactionStateRequest)
    first, copy = broker.records(HALF_TOPIC)
    assert (header.tran_state_table_offset, header.commit_log_offset) == (1, copy.physical_offset)
    assert (header.msg_id, header.transaction_id, header.offset_msg_id) == ("key1", "key1", copy.offset_message_id)
    assert copy.properties == {**first.properties, "TRANSACTION_CHECK_TIMES": "1"}
    assert (copy.flag, copy.born_timestamp) == (first.flag, first.born_timestamp)
    shown = decode_record(command.body_bytes, check_crc=True)
    assert (shown.topic, shown.queue_id, shown.body) == ("orders", 1, b"pay")
    assert shown.properties == {**copy.properties, "WAIT": "false"}
    assert (shown.queue_offset, shown.physical_offset) == (1, copy.physical_offset)
    assert broker.waiting == {"orders": 1}


@pytest.mark.parametrize(("state", "bodies"), [(COMMIT, [b"pay"]), (ROLLBACK, [])])
async def test_the_answer_to_a_check_ends_the_transaction(
    broker: TransactionalBroker, state: int, bodies: list[bytes]
) -> None:
    producer = broker.producer()
    broker.send()
    await broker.check_after(TIMEOUT)
    (question,) = asked(producer)
    assert broker.end(question, state, from_transaction_check=True).code == 0
    await broker.check_after(A_CHECK_LATER)
    assert asked(producer) == []
    assert broker.bodies() == bodies
    assert broker.waiting == {}


async def test_who_does_not_know_is_asked_again(broker: TransactionalBroker) -> None:
    producer = broker.producer()
    broker.send()
    for times in range(1, 4):
        await broker.check_after(A_CHECK_LATER)
        (question,) = asked(producer)
        assert question.state_table_offset == times
        assert broker.handle(broker.end_command(question, UNKNOWN, from_transaction_check=True)) is None


async def test_any_producer_of_the_group_is_asked(broker: TransactionalBroker) -> None:
    two = [broker.producer(peer=f"10.0.0.9:{port}") for port in (1, 2)]
    other = broker.producer("others", "10.0.0.9:3")
    for _ in range(4):
        broker.send()
    await broker.check_after(TIMEOUT)
    assert [len(asked(producer)) for producer in two] == [2, 2]
    two[0].is_up = False
    await broker.check_after(A_CHECK_LATER)
    assert [len(asked(producer)) for producer in (*two, other)] == [0, 4, 0]


async def test_an_end_that_comes_after_the_check_counts_and_counts_once(broker: TransactionalBroker) -> None:
    producer = broker.producer()
    half = broker.send()
    await broker.check_after(TIMEOUT)
    await broker.check_after(A_CHECK_LATER)
    first, second = asked(producer)
    assert broker.end(half, COMMIT).code == 0
    for late in (first, second, half):
        assert broker.end(late, COMMIT, from_transaction_check=True).code == ResponseCode.SYSTEM_ERROR
    await broker.check_after(A_CHECK_LATER)
    assert asked(producer) == []
    assert broker.bodies() == [b"pay"]


async def test_a_producer_may_ask_for_more_time(broker: TransactionalBroker) -> None:
    producer = broker.producer()
    patient = broker.send(b"patient", CHECK_IMMUNITY_TIME_IN_SECONDS="3000")
    broker.send(b"other")
    for _ in range(40):  # far more rounds than checks are allowed
        await broker.check_after(A_CHECK_LATER)
        (question,) = asked(producer)
        broker.handle(broker.end_command(question, UNKNOWN))
        if question.state_table_offset > 20:
            broker.end(question, ROLLBACK)
            break
    assert broker.waiting == {"orders": 1}
    newest = broker.records(HALF_TOPIC)[-2]
    assert newest.properties["TRAN_PREPARED_QUEUE_OFFSET"] == "0"
    assert "TRANSACTION_CHECK_TIMES" not in newest.properties
    assert broker.end(patient, COMMIT).code == 0
    assert broker.bodies() == [b"patient"]
    await broker.check_after(3000)
    assert asked(producer) == []


@pytest.mark.parametrize(("value", "seconds"), [("30", 30), ("-1", 6), ("soon", 6), ("0", 1)])
async def test_how_long_a_half_message_is_left_in_peace(broker: TransactionalBroker, value: str, seconds: int) -> None:
    producer = broker.producer()
    broker.send(CHECK_IMMUNITY_TIME_IN_SECONDS=value)
    await broker.check_after(seconds - 0.001)
    assert (asked(producer) == []) == (value != "0")
    await broker.check_after(0.001)
    assert len(asked(producer)) == 1


async def test_a_half_message_of_a_producer_whose_clock_is_ahead_is_asked_about(broker: TransactionalBroker) -> None:
    producer = broker.producer()
    broker.send(born_in_seconds=3600)
    await broker.check_after(0.001)
    assert len(asked(producer)) == 1


async def test_what_nobody_can_decide_is_kept_for_an_operator(make: Any) -> None:
    broker = make(broker={"transaction_check_max": 3})
    producer = broker.producer()
    half = broker.send()
    for _ in range(3):
        await broker.check_after(A_CHECK_LATER)
    assert len(asked(producer)) == 3
    assert broker.waiting == {"orders": 1}, "the last answer must be waited for"
    await broker.check_after(A_CHECK_LATER)
    assert asked(producer) == []
    assert broker.waiting == {}
    (kept,) = broker.records(CHECK_MAX_TIME_TOPIC)
    assert (kept.body, kept.properties["TRANSACTION_CHECK_TIMES"], kept.flag) == (b"pay", "3", 7)
    assert broker.end(half, COMMIT).code == ResponseCode.SYSTEM_ERROR
    reply = broker.ask(
        request(RequestCode.RESUME_CHECK_HALF_MESSAGE, ResumeCheckHalfMessageRequest(kept.offset_message_id))
    )
    assert reply.code == 0, reply.remark
    assert broker.waiting == {"orders": 1}
    await broker.check_after(A_CHECK_LATER)
    (question,) = asked(producer)
    assert broker.end(question, COMMIT).code == 0
    assert broker.bodies() == [b"pay"]


@pytest.mark.parametrize("extra", [{}, {"CHECK_IMMUNITY_TIME_IN_SECONDS": "100"}])
async def test_a_half_message_that_cannot_be_put_back_does_not_hold_up_the_others(
    make: Any, extra: dict[str, str]
) -> None:
    broker = make(mapped_file_size_commit_log=1 << 20)
    producer = broker.producer()
    broker.end(broker.send(note="x", **extra), ROLLBACK)
    room = MAX_PROPERTIES_BYTES - len(broker.records(HALF_TOPIC)[0].properties_text)
    broker.send(b"full", note="x" * (1 + room), **extra)
    assert broker.try_to_send(note="x" * (2 + room), **extra).code == ResponseCode.MESSAGE_ILLEGAL
    other = broker.send(b"other")
    await broker.check_after(TIMEOUT)
    assert broker.bodies(CHECK_MAX_TIME_TOPIC, 0) == [b"full"]
    assert [question.key for question in asked(producer)] == [other.key]


async def test_a_half_message_as_old_as_the_files_is_given_up(broker: TransactionalBroker) -> None:
    producer = broker.producer()
    broker.send()
    await broker.check_after(broker.parts.store.config.file_reserved_time * 3600 + 1)
    assert asked(producer) == []
    assert broker.bodies(CHECK_MAX_TIME_TOPIC, 0) == [b"pay"]


@pytest.mark.parametrize(
    "message_id", ["", "no id", "0A00000100009FCF0000000000000000", "0A00000100009FCF00000000FF000000"]
)
async def test_only_what_was_given_up_can_be_resumed(broker: TransactionalBroker, message_id: str) -> None:
    broker.send()
    reply = broker.ask(request(RequestCode.RESUME_CHECK_HALF_MESSAGE, ResumeCheckHalfMessageRequest(message_id)))
    assert reply.code == ResponseCode.SYSTEM_ERROR
    assert reply.remark
    assert broker.waiting == {"orders": 1}


async def test_a_half_message_whose_file_has_expired_is_let_go(make: Any) -> None:
    broker = make(mapped_file_size_commit_log=4096)
    producer = broker.producer()
    broker.send(b"x" * 3000)
    broker.send(b"y" * 3000)
    broker.parts.store.remove_files(broker.parts.store.take_oldest_files(1))
    await broker.check_after(TIMEOUT)
    assert len(asked(producer)) == 1
    assert broker.waiting == {"orders": 1}
    broker.flush()
    broker.half_messages.settle()
    assert broker.half_messages.first == 2


async def test_a_half_message_that_cannot_be_read_waits_on(broker: TransactionalBroker, monkeypatch: Any) -> None:
    producer = broker.producer()
    broker.send(b"one")
    two = broker.send(b"two")
    with monkeypatch.context() as patched:
        at = broker.half_messages.at
        patched.setattr(broker.half_messages, "at", lambda offset: at(offset) if offset else None)
        await broker.check_after(TIMEOUT)
    assert [question.key for question in asked(producer)] == [two.key]
    await broker.check_after(A_CHECK_LATER)
    assert [question.key for question in asked(producer)] == ["key1", two.key]


# --- progress -----------------------------------------------------------------------------------------------------


async def test_what_has_ended_is_never_looked_at_again(broker: TransactionalBroker, monkeypatch: Any) -> None:
    for _ in range(50):
        broker.end(broker.send(), COMMIT)
    broker.flush()
    broker.half_messages.settle()
    assert (broker.offset_of(HALF_TOPIC), broker.offset_of(OP_HALF_TOPIC)) == (50, 50)

    def forbidden(physical_offset: int) -> None:
        raise AssertionError(f"read {physical_offset}")

    monkeypatch.setattr(broker.half_messages, "at", forbidden)
    await broker.check_after(A_CHECK_LATER)


async def test_a_message_that_waits_does_not_hold_up_those_behind_it(broker: TransactionalBroker) -> None:
    broker.send()
    for _ in range(10):
        broker.end(broker.send(), ROLLBACK)
    broker.flush()
    broker.half_messages.settle()
    assert broker.offset_of(HALF_TOPIC) is None
    await broker.check_after(TIMEOUT)
    broker.flush()
    broker.half_messages.settle()
    assert broker.offset_of(HALF_TOPIC) == 11
    assert broker.offset_of(OP_HALF_TOPIC) == 11
    assert broker.waiting == {"orders": 1}


async def test_progress_waits_for_the_disk(broker: TransactionalBroker) -> None:
    broker.end(broker.send(), COMMIT)
    broker.half_messages.settle()
    assert broker.offset_of(HALF_TOPIC) is None
    broker.flush()
    broker.half_messages.settle()
    assert broker.offset_of(HALF_TOPIC) == 1


# --- restarts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [True, False])
async def test_after_a_restart_what_ended_has_ended_and_the_rest_waits(broker: TransactionalBroker, save: bool) -> None:
    ended = [broker.send() for _ in range(3)]
    open_ = broker.send(b"open")
    for half in ended:
        broker.end(half, COMMIT)
    await broker.check_after(TIMEOUT)
    for _ in range(2):
        broker.restart(save=save)
        assert broker.waiting == {"orders": 1}
        for half in ended:
            assert broker.end(half, COMMIT).code == ResponseCode.SYSTEM_ERROR
    assert broker.end(open_, COMMIT).code == ResponseCode.SYSTEM_ERROR  # a later copy is being checked
    producer = broker.producer()
    await broker.check_after(A_CHECK_LATER)
    (question,) = asked(producer)
    assert question.key == open_.key
    assert broker.end(question, COMMIT).code == 0
    assert broker.bodies() == [b"pay", b"pay", b"pay", b"open"]


async def test_a_message_with_more_time_can_be_ended_after_a_restart(broker: TransactionalBroker) -> None:
    half = broker.send(CHECK_IMMUNITY_TIME_IN_SECONDS="3000")
    await broker.check_after(A_CHECK_LATER)
    await broker.check_after(A_CHECK_LATER)
    broker.restart()
    assert broker.end(half, COMMIT).code == 0
    assert broker.bodies() == [b"pay"]
    assert broker.waiting == {}


async def test_offsets_beyond_the_end_of_a_cut_log_are_corrected(broker: TransactionalBroker) -> None:
    broker.send()
    for topic in (HALF_TOPIC, OP_HALF_TOPIC):
        broker.parts.offsets.commit(topic, "CID_RMQ_SYS_TRANS", 0, 1000)
    broker.restart()
    half = broker.send()
    assert broker.end(half, COMMIT).code == 0
    assert broker.bodies() == [b"pay"]


async def test_a_store_of_the_genuine_broker_goes_on_where_it_was(tmp_path: Path) -> None:
    golden = unpack("clean", tmp_path / "golden")
    config = golden.root / "config"
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "consumerOffset.json").write_bytes((config / "consumerOffset.json").read_bytes())
    golden.root.rename(tmp_path / "store")
    halves = [each for each in replace(golden, root=tmp_path / "store").records() if each.topic == HALF_TOPIC]
    broker = TransactionalBroker(
        tmp_path,
        mapped_file_size_commit_log=golden.setting("mappedFileSizeCommitLog"),
        mapped_file_size_consume_queue=golden.setting("mappedFileSizeConsumeQueue"),
        max_hash_slot_num=golden.setting("maxHashSlotNum"),
        max_index_num=golden.setting("maxIndexNum"),
    )
    broker.parts.clock.set(halves[-1].born_timestamp + 60_000)
    assert broker.waiting == {"gsBeta": 1}
    producer = broker.producer("gspg_tx")
    await broker.service.check()
    (question,) = asked(producer)
    assert question.key == "7F0000011E2C4E0E2F2A49F6EF960065"
    assert broker.end(question, COMMIT, producer_group="gspg_tx").code == 0
    assert broker.bodies("gsBeta", 0)[-1].startswith(b"line 524 of a text")
    broker.close()


@pytest.mark.parametrize(
    ("body", "tag", "offsets"),
    [
        (b"17", "d", [17]),
        (b"3,5,12,", "d", [3, 5, 12]),
        (b"3,x,-1,12", "d", [3, 12]),
        (b"", "d", []),
        (b"17", "other", []),
    ],
)
def test_op_messages_of_both_releases_are_read(body: bytes, tag: str, offsets: list[int]) -> None:
    assert ended_offsets(tag, body) == offsets


async def test_ops_that_5x_wrote_in_one_count_after_a_restart(broker: TransactionalBroker) -> None:
    for _ in range(3):
        broker.send()
    op = operation(0, 0, 0, b"\x0a\0\0\1\0\0\0\1")
    op.body = b"0,2,"
    broker.parts.writer.append_one(op)
    broker.restart()
    assert list(broker.half_messages.offsets_waiting()) == [1]


# --- everything at once -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(25))
async def test_whatever_happens_each_transaction_ends_as_decided(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    broker = TransactionalBroker(tmp_path, broker={"transaction_check_max": 1000}, mapped_file_size_commit_log=1 << 20)
    producer = broker.producer()
    decided: dict[str, int] = {}
    sent: dict[str, Half] = {}

    def decision(key: str) -> int:
        return decided.setdefault(key, chance.choice([COMMIT, ROLLBACK]))

    for _ in range(80):
        match chance.randrange(7):
            case 0 | 1:
                extra = (
                    {"CHECK_IMMUNITY_TIME_IN_SECONDS": str(chance.choice([0, 20, 200]))}
                    if chance.random() < 0.3
                    else {}
                )
                half = broker.send(f"key{broker.sent + 1}".encode(), **extra)
                sent[half.key] = half
            case 2 | 3 if sent:
                half = chance.choice(list(sent.values()))
                broker.handle(broker.end_command(half, decision(half.key)))
            case 4:
                await broker.check_after(chance.choice([1, 10, 60]))
                for question in asked(producer):
                    state = decision(question.key) if chance.random() < 0.5 else UNKNOWN
                    broker.handle(broker.end_command(question, state, from_transaction_check=True))
            case 5:
                broker.flush()
                broker.half_messages.settle()
            case 6 if chance.random() < 0.3:
                broker.restart(save=chance.random() < 0.5)
                producer = broker.producer()
            case _:
                pass
        visible = Counter(body.decode() for body in broker.bodies())
        assert all(decided.get(key) == COMMIT for key in visible), "visible before its commit"
        assert max(visible.values(), default=1) == 1, "visible twice"
    for _ in range(6):
        await broker.check_after(100)
        for question in asked(producer):
            broker.handle(broker.end_command(question, decision(question.key), from_transaction_check=True))
    assert broker.waiting == {}
    assert {body.decode() for body in broker.bodies()} == {key for key in sent if decided[key] == COMMIT}
    broker.flush()
    broker.half_messages.settle()
    assert broker.half_messages.first == broker.half_messages.end
    broker.close()
