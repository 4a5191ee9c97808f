"""What a read answers: the table of statuses, the limits, the filters, and the searches."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from downrange.clock import ManualClock
from downrange.model.hashing import tags_code
from downrange.model.record import decode_record, decode_records
from downrange.store.config import BrokerRole
from downrange.store.errors import StoreClosed
from downrange.store.message_reader import physical_memory
from downrange.store.message_store import MessageStore
from downrange.store.queue.consume_queue_ext import ExtUnit
from downrange.store.read_result import GetMessageStatus, ReadResult
from tests.support.stores import append
from tests.unit.store.small_store import NOW, new_message, open_store, put, small_config

BIG = {"mapped_file_size_commit_log": 1 << 20}


def filled(root: Path, count: int, **changes: object) -> MessageStore:
    store = open_store(root, **(BIG | changes))
    for number in range(count):
        put(store, b"%d" % number, properties={"TAGS": "even" if number % 2 == 0 else "odd"})
    return store


def answer(result: ReadResult) -> tuple[str, int, int]:
    return result.status.name, result.message_count, result.next_begin_offset


def offsets(result: ReadResult) -> list[int]:
    return [message.queue_offset for part in result.slices for message in decode_records(part)]


def test_the_answers_of_rocketmq(tmp_path: Path) -> None:
    # 50 entries in a queue file: a scan never crosses its end.
    with filled(tmp_path, 70) as store:
        assert answer(store.read("TopicTest", 0, 0, 100)) == ("FOUND", 32, 32)
        assert answer(store.read("TopicTest", 0, 40, 100)) == ("FOUND", 10, 50)
        assert answer(store.read("TopicTest", 0, 50, 100)) == ("FOUND", 20, 70)
        assert answer(store.read("TopicTest", 0, 70, 100)) == ("OFFSET_OVERFLOW_ONE", 0, 70)
        assert answer(store.read("TopicTest", 0, 71, 100)) == ("OFFSET_OVERFLOW_BADLY", 0, 70)
        assert answer(store.read("TopicTest", 0, -1, 100)) == ("OFFSET_TOO_SMALL", 0, 0)
        assert answer(store.read("TopicTest", 9, 9, 100)) == ("NO_MESSAGE_IN_QUEUE", 0, 0)
        assert answer(store.read("TopicTest", 0, 5, 3)) == ("FOUND", 3, 8)
        assert answer(store.read("TopicTest", 0, 5, 0)) == ("FOUND", 1, 6)
        result = store.read("TopicTest", 0, 3, 4)
        assert offsets(result) == [3, 4, 5, 6]
        assert (result.min_offset, result.max_offset) == (0, 70)
        assert result.byte_count == sum(len(part) for part in result.slices)


def test_records_that_lie_next_to_each_other_come_as_one_slice(tmp_path: Path) -> None:
    with open_store(tmp_path, **BIG) as store:
        for topic in ("TopicTest",) * 4 + ("Other", "TopicTest"):
            put(store, topic=topic, body=bytes(20_000))
        result = store.read("TopicTest", 0, 0, 32)
        assert [len(list(decode_records(part))) for part in result.slices] == [4, 1]


def test_small_records_that_lie_apart_come_as_one_copy(tmp_path: Path) -> None:
    with filled(tmp_path, 4) as store:
        put(store, topic="Other")
        put(store)
        result = store.read("TopicTest", 0, 0, 32)
        assert [len(list(decode_records(part))) for part in result.slices] == [5]


def test_asking_for_an_unknown_queue_does_not_make_one(tmp_path: Path) -> None:
    with filled(tmp_path, 1) as store:
        store.read("Nobody", 0, 0, 1)
        assert store.offset_by_time("Nobody", 0, NOW) == 0
        assert store.max_offset_of("Nobody", 0) == 0
        assert store.earliest_store_time_of("Nobody", 0) == -1
        assert len(store.queues) == 1


def test_a_slave_leaves_offsets_alone_unless_told(tmp_path: Path) -> None:
    filled(tmp_path, 3).close()
    with open_store(tmp_path, **BIG, broker_role=BrokerRole.SLAVE) as slave:
        assert answer(slave.read("TopicTest", 0, 9, 1)) == ("OFFSET_OVERFLOW_BADLY", 0, 9)
        assert answer(slave.read("TopicTest", 0, -4, 1)) == ("OFFSET_TOO_SMALL", 0, -4)
        assert answer(slave.read("Nobody", 0, 7, 1)) == ("NO_MESSAGE_IN_QUEUE", 0, 7)
    with open_store(tmp_path, **BIG, broker_role=BrokerRole.SLAVE, offset_check_in_slave=True) as slave:
        assert answer(slave.read("TopicTest", 0, 9, 1)) == ("OFFSET_OVERFLOW_BADLY", 0, 3)


def test_a_filter_by_tag_counts_what_it_passed_over(tmp_path: Path) -> None:
    with filled(tmp_path, 20) as store:
        odd = tags_code("odd")
        result = store.read("TopicTest", 0, 0, 5, matches=lambda code, unit: code == odd)
        assert offsets(result) == [1, 3, 5, 7, 9]
        # That the batch is full is noticed before the next entry is looked at.
        assert result.next_begin_offset == 10
        nothing = store.read("TopicTest", 0, 0, 5, matches=lambda code, unit: False)
        assert answer(nothing) == ("NO_MATCHED_MESSAGE", 0, 20)


def test_a_filter_by_record_sees_the_whole_record(tmp_path: Path) -> None:
    with filled(tmp_path, 20) as store:
        result = store.read("TopicTest", 0, 0, 32, matches_record=lambda view: decode_record(view).body in (b"3", b"7"))
        assert offsets(result) == [3, 7]
        assert result.next_begin_offset == 20


def test_a_scan_looks_at_eight_hundred_entries(tmp_path: Path) -> None:
    with filled(tmp_path, 900, mapped_file_size_consume_queue=40_000) as store:
        assert answer(store.read("TopicTest", 0, 0, 5, matches=lambda c, u: False)) == ("NO_MATCHED_MESSAGE", 0, 800)


def test_transfer_limits_for_recent_and_for_old_messages(tmp_path: Path) -> None:
    with open_store(tmp_path, **BIG) as store:
        for _ in range(40):
            put(store, bytes(10_000))
        # 262,144 bytes: 25 records of 10,100 bytes fit.
        assert answer(store.read("TopicTest", 0, 0, 32)) == ("FOUND", 25, 25)
        assert not store.read("TopicTest", 0, 0, 32).suggest_pulling_from_slave
    with open_store(tmp_path, **BIG) as store:
        assert store.memory_limit == physical_memory() * 40 // 100
        store.memory_limit = 0  # nothing is in memory any more: 65,536 bytes, 6 records
        result = store.read("TopicTest", 0, 0, 32)
        assert answer(result) == ("FOUND", 6, 6)
        assert result.suggest_pulling_from_slave
        for _ in range(20):
            put(store, b"small")
        assert answer(store.read("TopicTest", 0, 40, 32)) == ("FOUND", 8, 48)


def test_a_message_larger_than_the_transfer_limit_is_read_alone(tmp_path: Path) -> None:
    with open_store(tmp_path, **BIG, max_transfer_bytes_on_message_in_memory=1000) as store:
        put(store, bytes(5000))
        put(store, b"small")
        assert answer(store.read("TopicTest", 0, 0, 32)) == ("FOUND", 1, 1)


def test_a_read_of_messages_that_are_being_removed(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for _ in range(6):
            put(store, bytes(1500))  # two in a file
        store.remove_files(store.take_oldest_files(1))
        # The queue was not corrected yet.
        assert answer(store.read("TopicTest", 0, 0, 1)) == ("FOUND", 1, 3)
        store.remove_files(store.take_oldest_files(1))
        assert answer(store.read("TopicTest", 0, 0, 1, matches=lambda c, u: True)) == ("FOUND", 1, 5)


def test_only_removed_messages_say_so(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, bytes(1500))
        put(store, bytes(3000), topic="Other")
        store.remove_files(store.take_oldest_files(1))
        assert answer(store.read("TopicTest", 0, 0, 1)) == ("MESSAGE_WAS_REMOVING", 0, 1)


def test_a_slice_outlives_the_file_it_came_from(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for number in range(6):
            put(store, b"%d" % number * 1500)
        [part] = store.read("TopicTest", 0, 0, 1).slices
        taken = store.take_oldest_files(1)
        store.remove_files(taken)
        assert not taken[0].exists()
        assert decode_record(part).body == b"0" * 1500
    assert decode_record(part).body == b"0" * 1500


def test_idle_mappings_are_given_back_and_made_again(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for _ in range(6):
            put(store, bytes(1500))
        store.flush_commit_log()
        store.release_idle()
        assert store._segments.release_idle() == 2
        assert answer(store.read("TopicTest", 0, 0, 1)) == ("FOUND", 1, 1)


def test_a_message_is_found_by_time(tmp_path: Path) -> None:
    clock = ManualClock(NOW)
    with open_store(tmp_path, clock=clock, **BIG) as store:
        for _ in range(70):
            put(store)
            clock.tick(0.007)
        store.write_pending()
        first, second = sorted((tmp_path / "consumequeue" / "TopicTest" / "0").iterdir())
        os.utime(first, ns=(0, (NOW + 60 * 7) * 1_000_000))
        assert store.offset_by_time("TopicTest", 0, NOW + 3) == 0
        assert store.offset_by_time("TopicTest", 0, NOW + 4) == 1
        assert store.offset_by_time("TopicTest", 0, NOW - 1000) == 0
        assert store.offset_by_time("TopicTest", 0, NOW + 10_000_000) == 69
        # Belongs to the second file, but the first was changed later than that.
        assert store.offset_by_time("TopicTest", 0, NOW + 55 * 7) == 49
        assert store.earliest_store_time_of("TopicTest", 0) == NOW
        assert store.store_time_of("TopicTest", 0, 69) == NOW + 69 * 7
        assert store.store_time_of("TopicTest", 0, 70) == -1
        assert second.exists()


def test_messages_are_found_by_key_and_time(tmp_path: Path) -> None:
    clock = ManualClock(NOW)
    with open_store(tmp_path, clock=clock, **BIG) as store:
        for number in range(5):
            put(store, b"%d" % number, properties={"UNIQ_KEY": f"U{number}", "KEYS": f"order{number % 2} all"})
            clock.tick(60)
        every = store.query("TopicTest", "all", 32, 0, 1 << 60)
        assert [decode_record(part).body for part in every.slices] == [b"0", b"1", b"2", b"3", b"4"]
        assert every.index_last_update_timestamp == NOW + 4 * 60_000
        assert len(store.query("TopicTest", "all", 2, 0, 1 << 60).slices) == 2
        assert len(store.query("TopicTest", "order1", 32, 0, 1 << 60).slices) == 2
        assert len(store.query("TopicTest", "all", 32, NOW + 60_000, NOW + 120_000).slices) == 2
        assert len(store.query("TopicTest", "U3", 32, 0, 1 << 60).slices) == 1
        assert store.query("Other", "all", 32, 0, 1 << 60).slices == []


def test_a_query_looks_past_messages_that_are_gone(tmp_path: Path) -> None:
    clock = ManualClock(NOW)
    with open_store(tmp_path, clock=clock) as store:
        put(store, bytes(3500), properties={"KEYS": "k"})
        clock.tick(60)
        put(store, bytes(3500), properties={"KEYS": "k"})
        store.remove_files(store.take_oldest_files(1))
        assert len(store.query("TopicTest", "k", 32, 0, 1 << 60).slices) == 1


def test_without_index_there_is_nothing_to_query(tmp_path: Path) -> None:
    with open_store(tmp_path, message_index_enable=False) as store:
        put(store, properties={"KEYS": "k"})
        assert store.query("TopicTest", "k", 32, 0, 1 << 60).slices == []
    assert not (tmp_path / "index").exists()


def test_no_record_begins_in_the_middle_of_one(tmp_path: Path) -> None:
    with filled(tmp_path, 3) as store:
        assert store.record_at(5) is None
        assert store.record_at(store.max_offset) is None
        assert store.record_at(1 << 40) is None
        assert store.record_at(-1) is None


def test_bit_maps_are_kept_beside_the_queue(tmp_path: Path) -> None:
    seen: list[ExtUnit | None] = []

    def remember(code: int | None, unit: ExtUnit | None) -> bool:
        assert code == tags_code("odd") or code == tags_code("even")
        seen.append(unit)
        return True

    options = {"enable_consume_queue_ext": True, "mapped_file_size_consume_queue_ext": 1024}
    with filled(tmp_path, 60, bitmap_of=lambda topic, properties, time: b"\x05\x06", **options) as store:
        store.read("TopicTest", 0, 0, 2, matches=remember)
    with open_store(tmp_path, **BIG, **options) as store:
        store.read("TopicTest", 0, 49, 2, matches=remember)
    assert len(seen) == 3
    assert {unit.bitmap for unit in seen if unit is not None} == {b"\x05\x06"}
    assert {unit.store_timestamp for unit in seen if unit is not None} == {NOW}


def test_a_delayed_message_has_its_due_time_in_the_queue(tmp_path: Path) -> None:
    due: list[int | None] = []

    def remember(code: int | None, unit: ExtUnit | None) -> bool:
        due.append(code)
        return True

    with open_store(tmp_path) as store:
        for level in ("3", "99", "0", "x"):
            put(store, topic="SCHEDULE_TOPIC_XXXX", queue_id=2, properties={"DELAY": level, "TAGS": "TagA"})
        store.read("SCHEDULE_TOPIC_XXXX", 2, 0, 9, matches=remember)
    assert due == [NOW + 10_000, NOW + 7_200_000, tags_code("TagA"), tags_code("TagA")]


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store)
    store.close()
    store.close()
    with pytest.raises(StoreClosed, match="shut down"):
        store.read("TopicTest", 0, 0, 1)
    with pytest.raises(StoreClosed):
        store.record_at(0)
    assert append(store, new_message()).status.name == "SERVICE_NOT_AVAILABLE"
    assert "shut down" in repr(store)


def test_a_directory_can_be_read_while_a_broker_writes_it(tmp_path: Path) -> None:
    with open_store(tmp_path) as writer:
        for number in range(30):
            put(writer, b"%d" % number * 100)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        with MessageStore.open(small_config(tmp_path), read_only=True) as reader:
            # The queue may lag behind: its newest entries wait in the writer's memory. The log does not.
            assert reader.max_offset == writer.max_offset
            assert append(reader, new_message()).reason == "the store is open for reading only"
            writer.write_pending()
        with MessageStore.open(small_config(tmp_path), read_only=True) as reader:
            assert reader.max_offset_of("TopicTest", 0) == 30
            assert answer(reader.read("TopicTest", 0, 0, 5)) == ("FOUND", 5, 5)
        assert {path: path.read_bytes() for path in before if "consumequeue" not in str(path)} == {
            path: data for path, data in before.items() if "consumequeue" not in str(path)
        }
        put(writer)


def test_every_status_has_the_name_of_rocketmq() -> None:
    assert {status.value for status in GetMessageStatus} == {status.name for status in GetMessageStatus}
