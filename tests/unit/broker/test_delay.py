from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from downrange.broker.delayed import delayed
from downrange.broker.filtering import tag_filter
from downrange.broker.json_file import JsonFile
from downrange.broker.services.delay import DelayService
from downrange.model.hashing import tags_code
from downrange.model.message import TopicQueue
from downrange.model.properties import decode_properties
from downrange.model.subscription import subscribe
from downrange.model.topics import HALF_TOPIC, SCHEDULE_TOPIC
from downrange.protocol.bodies.offsets import DelayOffsets
from downrange.store.config import BrokerRole
from tests.support.golden_store import unpack
from tests.unit.broker.wired import FakeConnection, WiredBroker, wire
from tests.unit.store.small_store import bodies, new_message, read_all

# A turn of the service is never more than this behind a message that is due.
LATEST_SECONDS = 0.006


@pytest.fixture
async def broker(tmp_path: Path) -> Any:
    wired = wire(tmp_path)
    yield wired
    wired.close()


def send(broker: WiredBroker, body: bytes = b"hello", level: int = 1, topic: str = "orders", **changes: Any) -> None:
    """Store a delayed message as the send handler does."""
    message = new_message(body, topic, **changes)
    properties = decode_properties(message.properties.decode())
    result = broker.writer.append_one(delayed(message, properties, level, broker.writer.max_delay_level))
    assert result.status.value == "PUT_OK", result


@asynccontextmanager
async def running(service: DelayService) -> AsyncIterator[DelayService]:
    task = asyncio.create_task(service.run())
    await settle()
    try:
        yield service
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


# --- when -------------------------------------------------------------------------------------------------------


async def test_a_message_comes_when_it_is_due_and_not_before(broker: WiredBroker) -> None:
    async with running(broker.delay_service()):
        send(broker, level=2)
        await broker.clock.advance(4.999)
        assert bodies(broker.store, "orders") == []
        await broker.clock.advance(0.001 + LATEST_SECONDS)
        assert bodies(broker.store, "orders") == [b"hello"]
        await broker.clock.advance(60)
        assert bodies(broker.store, "orders") == [b"hello"]


async def test_every_level_has_its_own_time(broker: WiredBroker) -> None:
    delays = broker.store.config.delay_level_millis()
    assert len(delays) == 18
    start = broker.clock.now()
    async with running(broker.delay_service()):
        for level in range(1, 19):
            send(broker, str(level).encode(), level)
        for level, delay in enumerate(delays, 1):
            await broker.clock.advance((start + delay - broker.clock.now()) / 1000 - 0.001)
            assert len(bodies(broker.store, "orders")) == level - 1
            await broker.clock.advance(0.001 + LATEST_SECONDS)
            assert bodies(broker.store, "orders")[-1] == str(level).encode()
    late = [
        message.store_timestamp - start - delays[int(message.body) - 1] for message in read_all(broker.store, "orders")
    ]
    assert 0 <= min(late) <= max(late) <= 1000 * LATEST_SECONDS


async def test_a_message_in_an_empty_queue_ends_the_sleep(tmp_path: Path) -> None:
    broker = wire(tmp_path, message_delay_level="0s 1h")
    async with running(broker.delay_service()):
        send(broker, b"later", 2)
        await settle()
        send(broker, b"at once", 1)
        await settle()
        assert bodies(broker.store, "orders") == [b"at once"]
    broker.close()


async def test_a_sleep_that_was_ended_is_not_ended_again(broker: WiredBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    service = broker.delay_service()
    turns = 0
    deliver = service.deliver

    def counted() -> float:
        nonlocal turns
        turns += 1
        return deliver()

    monkeypatch.setattr(service, "deliver", counted)
    async with running(service):
        turns = 0
        send(broker)
        for _ in range(10):
            await settle()
        assert turns == 1


async def test_messages_that_come_by_way_of_the_transient_pool_end_the_sleep_too(tmp_path: Path) -> None:
    broker = wire(tmp_path, message_delay_level="0s", transient_store_pool_enable=True, transient_store_pool_size=2)
    assert broker.store.config.uses_transient_pool
    async with running(broker.delay_service()):
        send(broker)
        await settle()
        assert bodies(broker.store, "orders") == []
        broker.store.commit()
        broker.writer.dispatched()
        await settle()
        broker.store.commit()
        broker.writer.dispatched()
        assert bodies(broker.store, "orders") == [b"hello"]
    broker.close()


async def test_a_message_behind_another_disturbs_nobody(broker: WiredBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    service = broker.delay_service()
    send(broker)
    assert service.deliver() == 1.0
    looked = 0
    entries = broker.store.entries

    def counted(*arguments: Any) -> Any:
        nonlocal looked
        looked += 1
        return entries(*arguments)

    monkeypatch.setattr(broker.store, "entries", counted)
    async with running(service):
        looked = 0
        for _ in range(100):
            send(broker)
            await settle()
        assert looked == 0
    service.wake(17, None)
    service.wake(99, None)


async def test_messages_of_a_level_keep_their_order(broker: WiredBroker) -> None:
    async with running(broker.delay_service()):
        for number in range(20):
            send(broker, str(number).encode())
            await broker.clock.advance(0.05)
        await broker.clock.advance(1)
    assert bodies(broker.store, "orders") == [str(number).encode() for number in range(20)]


# --- a clock that is set ----------------------------------------------------------------------------------------


async def test_a_clock_set_forward_is_noticed(broker: WiredBroker) -> None:
    async with running(broker.delay_service()):
        send(broker, level=18)
        await settle()
        broker.clock.set(broker.clock.now() + 2 * 3600 * 1000)
        await broker.clock.advance(0)
        assert bodies(broker.store, "orders") == [b"hello"]


async def test_a_clock_set_far_back_does_not_hold_messages_for_ever(broker: WiredBroker) -> None:
    service = broker.delay_service()
    send(broker, level=3)
    broker.clock.set(broker.clock.now() - 24 * 3600 * 1000)
    service.deliver()
    assert bodies(broker.store, "orders") == [b"hello"]


async def test_a_clock_set_back_a_little_makes_nothing_early(broker: WiredBroker) -> None:
    start = broker.clock.now()
    service = broker.delay_service()
    send(broker, b"before", level=3)
    broker.clock.set(start - 30_000)
    send(broker, b"after", level=3)
    service.deliver()
    assert bodies(broker.store, "orders") == []
    broker.clock.set(start + 10_000)
    service.deliver()
    assert bodies(broker.store, "orders") == [b"before", b"after"]


# --- what -------------------------------------------------------------------------------------------------------


async def test_what_is_delivered_is_what_was_sent(broker: WiredBroker) -> None:
    service = broker.delay_service()
    wanted = tag_filter(subscribe("orders", "t"))
    waiting = broker.wait_for(TopicQueue("orders", 3), 0, wanted, FakeConnection())
    send(broker, b"\x00\xff", 1, properties={"KEYS": "k", "TAGS": "t"}, queue_id=3, flag=5, reconsume_times=2)
    broker.clock.tick(1)
    service.deliver()
    (waited,) = read_all(broker.store, SCHEDULE_TOPIC, 0)
    (message,) = read_all(broker.store, "orders", 3)
    moved = {
        "topic": "orders",
        "queue_id": 3,
        "physical_offset": message.physical_offset,
        "store_timestamp": broker.clock.now(),
        "store_size": message.store_size,
    }
    assert message == replace(waited, **moved)  # type: ignore[arg-type]
    assert message.properties == {
        "KEYS": "k",
        "TAGS": "t",
        "DELAY": "1",
        "REAL_TOPIC": "orders",
        "REAL_QID": "3",
    }
    (entry,) = broker.store.entries("orders", 3, 0, 9)
    assert entry.tags_code == tags_code("t")
    await settle()
    assert waiting.done()


async def test_delivery_is_byte_for_byte_that_of_the_genuine_broker(tmp_path: Path) -> None:
    golden = unpack("clean", tmp_path)
    records = {record.physical_offset: record for record in golden.records()}
    keys = ("mappedFileSizeCommitLog", "mappedFileSizeConsumeQueue", "maxHashSlotNum", "maxIndexNum")
    log_size, queue_size, slots, entries = (golden.setting(key) for key in keys)
    broker = wire(
        tmp_path,
        mapped_file_size_commit_log=log_size,
        mapped_file_size_consume_queue=queue_size,
        max_hash_slot_num=slots,
        max_index_num=entries,
    )
    broker.root = golden.root / "config"
    service = broker.delay_service()
    assert service.table() == DelayOffsets(offset_table={1: 4, 2: 1})
    service.take_over(DelayOffsets(offset_table={1: 2, 2: 1}))
    broker.clock.set(1_900_000_000_000)
    service.deliver()
    ours = read_all(broker.store, "%RETRY%gscg_retry")[-2:]
    for message, theirs in zip(ours, (records[100225], records[100621]), strict=True):  # type: ignore[index]
        changed = {
            "queue_offset": theirs.queue_offset,
            "physical_offset": theirs.physical_offset,
            "store_timestamp": theirs.store_timestamp,
        }
        assert replace(message, **changed) == theirs  # type: ignore[arg-type]
    # Those of the levels 16, 17 and 18 were still waiting when the genuine broker stopped.
    assert service.table() == DelayOffsets(offset_table={1: 4, 2: 1, 16: 1, 17: 1, 18: 1})
    broker.close()


async def test_what_belongs_nowhere_is_dropped(broker: WiredBroker, caplog: pytest.LogCaptureFixture) -> None:
    service = broker.delay_service()
    send(broker, b"half", topic=HALF_TOPIC)
    broker.writer.append_one(new_message(b"homeless", SCHEDULE_TOPIC, 0, {"DELAY": "1"}))
    send(broker, b"good")
    broker.clock.tick(1)
    service.deliver()
    assert bodies(broker.store, "orders") == [b"good"]
    assert bodies(broker.store, HALF_TOPIC) == []
    assert service.table().offset_table == {1: 3}
    assert caplog.text.count("delayed message dropped level=1") == 2


async def test_a_message_whose_record_has_expired_is_passed_over(tmp_path: Path) -> None:
    broker = wire(tmp_path, mapped_file_size_commit_log=4096)
    service = broker.delay_service()
    send(broker, b"lost" * 500)
    send(broker, b"kept" * 500)
    broker.store.remove_files(broker.store.take_oldest_files(1))
    broker.clock.tick(1)
    service.deliver()
    assert bodies(broker.store, "orders") == [b"kept" * 500]
    broker.close()


async def test_a_beginning_that_has_expired_is_passed_over(tmp_path: Path) -> None:
    broker = wire(tmp_path, mapped_file_size_commit_log=4096)
    service = broker.delay_service()
    for number in range(30):
        send(broker, b"%d" % number + b"x" * 500)
    broker.store.remove_files(broker.store.take_oldest_files(2))
    broker.store.delete_dependents()
    first = broker.store.min_offset_of(SCHEDULE_TOPIC, 0)
    assert first > 0
    broker.clock.tick(1)
    service.deliver()
    assert len(bodies(broker.store, "orders")) == 30 - first
    broker.close()


# --- how much at a time -----------------------------------------------------------------------------------------


async def test_a_turn_is_bounded_and_shared_among_the_levels(tmp_path: Path) -> None:
    broker = wire(tmp_path, mapped_file_size_consume_queue=20_000)
    service = broker.delay_service()
    for _ in range(250):
        send(broker, b"a", 1, "first")
        send(broker, b"b", 2, "second")
    broker.clock.tick(5)
    assert service.deliver() == 0
    assert [broker.store.max_offset_of(topic, 0) for topic in ("first", "second")] == [100, 100]
    turns = 1
    while service.deliver() == 0:
        turns += 1
    assert [broker.store.max_offset_of(topic, 0) for topic in ("first", "second")] == [250, 250]
    assert turns == 2
    broker.close()


async def test_large_messages_fill_a_turn_sooner(tmp_path: Path) -> None:
    broker = wire(tmp_path, mapped_file_size_commit_log=1 << 24)
    service = broker.delay_service()
    for _ in range(10):
        send(broker, b"x" * 400_000)
    broker.clock.tick(1)
    assert service.deliver() == 0
    assert broker.store.max_offset_of("orders", 0) == 3
    broker.close()


async def test_others_get_their_turn_while_a_backlog_is_delivered(broker: WiredBroker) -> None:
    for _ in range(300):
        send(broker, b"")
    service = broker.delay_service()
    broker.clock.tick(1)
    task = asyncio.create_task(service.run())
    seen = set()
    while broker.store.max_offset_of("orders", 0) < 300:
        seen.add(broker.store.max_offset_of("orders", 0))
        await asyncio.sleep(0)
    task.cancel()
    assert 200 in seen


# --- failures ---------------------------------------------------------------------------------------------------


async def test_a_message_that_cannot_be_stored_is_tried_again(
    broker: WiredBroker, caplog: pytest.LogCaptureFixture
) -> None:
    service = broker.delay_service()
    async with running(service):
        send(broker, b"first")
        send(broker, b"second")
        broker.store.set_disk_full(True)
        await broker.clock.advance(2)
        assert service.table().offset_table == {}
        broker.store.set_disk_full(False)
        await broker.clock.advance(0.1 + LATEST_SECONDS)
        assert bodies(broker.store, "orders") == [b"first", b"second"]
    assert caplog.text.count("delayed message cannot be delivered") == 1
    assert broker.statistics.failed_puts == pytest.approx(10, abs=2)


async def test_a_level_that_is_stuck_does_not_stop_the_others(broker: WiredBroker) -> None:
    service = broker.delay_service()
    send(broker, b"far too long by then", 1)
    send(broker, b"short", 2)
    broker.store.set_max_message_size(10)
    broker.clock.tick(5)
    assert 0 < service.deliver() <= 0.1
    assert bodies(broker.store, "orders") == [b"short"]
    broker.store.set_max_message_size(1000)
    broker.clock.tick(0.1)
    service.deliver()
    assert bodies(broker.store, "orders") == [b"short", b"far too long by then"]


# --- offsets ----------------------------------------------------------------------------------------------------


def with_file(broker: WiredBroker, file: JsonFile) -> DelayService:
    return DelayService(broker.store, broker.writer, file, broker.clock)


async def test_a_restart_goes_on_from_the_saved_offsets(broker: WiredBroker) -> None:
    async with running(with_file(broker, JsonFile(broker.root / "delayOffset.json"))) as service:
        send(broker)
        send(broker, level=2)
        await broker.clock.advance(10)
        service.save()
        assert (broker.root / "delayOffset.json").read_text() == '{\n\t"offsetTable":{1:1,2:1\n\t}\n}'
        assert service.progress() == {1: (1, 1), 2: (1, 1)}
        send(broker)
    again = broker.delay_service()
    broker.clock.tick(1)
    again.deliver()
    assert len(bodies(broker.store, "orders")) == 3
    again.save()
    assert broker.delay_service().table().offset_table == {1: 2, 2: 1}


async def test_unchanged_offsets_are_not_written(broker: WiredBroker) -> None:
    service = broker.delay_service()
    service.save()
    assert not (broker.root / "delayOffset.json").exists()
    send(broker)
    broker.clock.tick(1)
    service.deliver()
    service.save()
    (broker.root / "delayOffset.json").unlink()
    service.save()
    assert not (broker.root / "delayOffset.json").exists()


@pytest.mark.parametrize(("saved", "expected"), [(-5, 0), (0, 0), (2, 2), (3, 3), (99, 3)])
async def test_saved_offsets_are_brought_into_the_queue(saved: int, expected: int, broker: WiredBroker) -> None:
    for _ in range(3):
        send(broker)
    JsonFile(broker.root / "delayOffset.json").save(DelayOffsets(offset_table={1: saved, 2: 7}))
    service = broker.delay_service()
    assert service.table().offset_table == {1: expected, 2: 0}
    broker.clock.tick(1)
    service.deliver()
    assert len(bodies(broker.store, "orders")) == 3 - expected


async def test_levels_that_are_not_configured_keep_their_offsets(tmp_path: Path) -> None:
    broker = wire(tmp_path, message_delay_level="1s 2s")
    JsonFile(broker.root / "delayOffset.json").save(DelayOffsets(offset_table={18: 5}))
    service = broker.delay_service()
    send(broker, level=9)
    broker.clock.tick(2)
    service.deliver()
    service.save()
    assert broker.delay_service().table().offset_table == {2: 1, 18: 5}
    broker.close()


async def test_a_slave_delivers_nothing_and_keeps_its_master_s_offsets(
    broker: WiredBroker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    send(broker)
    broker.config.store = replace(broker.config.store, broker_role=BrokerRole.SLAVE)
    file = JsonFile(broker.root / "delayOffset.json")
    async with running(with_file(broker, file)) as service:
        service.take_over(DelayOffsets(offset_table={1: 1, 3: 8}))
        await broker.clock.advance(10)
        service.save()
    assert bodies(broker.store, "orders") == []
    assert file.load(DelayOffsets) == DelayOffsets(offset_table={1: 1, 3: 8})
    assert repr(service) == "<DelayService levels=18 waiting=0 offsets={1: 1, 3: 8}>"


# --- after another master --------------------------------------------------------------------------------------------


async def test_messages_that_the_last_master_delivered_are_not_delivered_again(
    broker: WiredBroker, tmp_path: Path
) -> None:
    for number in range(5):
        send(broker, b"%d" % number, level=1 + number % 2)
    async with running(broker.delay_service()):
        await broker.clock.advance(1.01)  # the first level is due, the second is not
    assert bodies(broker.store, "orders") == [b"0", b"2", b"4"]
    send(broker, b"5", level=1)
    send(broker, b"0", level=1)  # looks as the first one does, and is another message
    elected = DelayService(broker.store, broker.writer, JsonFile(tmp_path / "elected.json"), broker.clock)
    assert elected.table().offset_table == {}, "as if the record with the offset had not come"
    await broker.clock.advance(0.5)
    elected.skip_delivered()
    assert elected.table().offset_table == {1: 3}
    async with running(elected):
        await broker.clock.advance(5)
    assert sorted(bodies(broker.store, "orders")) == [b"0", b"0", b"1", b"2", b"3", b"4", b"5"]
