"""Bytes of records and files, with the vectors of the format."""

from __future__ import annotations

import errno
import struct
from pathlib import Path

import pytest

from downrange.clock import ManualClock
from downrange.model.message import PhysicalOffset, QueueOffset
from downrange.model.message_id import offset_message_id, pack_host, parse_offset_message_id
from downrange.model.record import MAGIC_BLANK, MAGIC_V2, decode_record
from downrange.store.config import BrokerRole
from downrange.store.errors import StoreCorrupt, StoreError
from downrange.store.message_store import MessageStore
from downrange.store.new_message import AppendResult, PutMessageStatus, Refusal
from downrange.store.new_messages import NewMessages
from downrange.store.queue.consume_queue import ENTRY
from tests.support.stores import append, append_group
from tests.unit.store.small_store import (
    NOW,
    STORE_HOST,
    FailingFiles,
    bodies,
    new_message,
    open_store,
    put,
    read_all,
)

VECTOR = (
    "0000008adaa320a720e809f1000000000000000000000000000000000000000000000000000000000000018bcfe56800"
    "0a0102030000c350000001a1de1297730a09080700002a9f0000000000000000000000000000000768656c6c6f203009"
    "546f70696354657374001f4b455953016b30207802554e49515f4b455901553002544147530154616741"
)


def test_a_record_has_exactly_these_bytes(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        result = put(store, b"hello 0", properties={"KEYS": "k0 x", "UNIQ_KEY": "U0", "TAGS": "TagA"})
        record = store.record_at(0)
        assert record is not None
        assert bytes(record).hex() == VECTOR
        assert (result.physical_offset, result.size, result.queue_offset) == (0, 138, 0)
        assert store.commit_log.store_timestamp_at(PhysicalOffset(0)) == NOW
        assert offset_message_id(STORE_HOST, 0) == "0A09080700002A9F0000000000000000"
        found = store.record_at(parse_offset_message_id("0A09080700002A9F0000000000000000").physical_offset)
        assert found == record
        state = store.queues.get("TopicTest", 0)
        assert state is not None
        assert ENTRY.unpack(state.queue.read(QueueOffset(0), 1)) == (0, 138, 2598919)


def test_prepared_and_rolled_back_messages_take_no_place_in_a_queue(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, b"first")
        prepared = put(store, b"prepared", properties={"UNIQ_KEY": "P"}, sys_flag=4)
        rolled_back = put(store, b"rolled back", properties={"UNIQ_KEY": "R"}, sys_flag=12)
        committed = put(store, b"committed", sys_flag=8)
        assert (prepared.queue_offset, rolled_back.queue_offset, committed.queue_offset) == (0, 0, 1)
        assert bodies(store) == [b"first", b"committed"]
        assert len(store.query("TopicTest", "P", 32, 0, 1 << 60).slices) == 1
        assert store.query("TopicTest", "R", 32, 0, 1 << 60).slices == []


def test_a_blank_record_ends_a_file_that_has_no_room(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, b"a" * 2425)  # 2525 bytes with 100 of record and topic
        assert store.max_offset == 2525
        result = put(store, b"b" * 1500)
        assert (result.physical_offset, result.size) == (4096, 1600)
        first = (tmp_path / "commitlog" / "00000000000000000000").read_bytes()
        assert struct.unpack_from(">iI", first, 2525) == (1571, MAGIC_BLANK)
        assert not any(first[2533:])
        assert bodies(store) == [b"a" * 2425, b"b" * 1500]


@pytest.mark.parametrize("free", [7, 8, 9])
def test_eight_bytes_stay_free_at_the_end_of_a_file(tmp_path: Path, free: int) -> None:
    with open_store(tmp_path) as store:
        result = put(store, bytes(4096 - 100 - free)) if free >= 8 else None
        if result is None:
            refused = append(store, new_message(bytes(4096 - 100 - free)))
            assert refused.status is PutMessageStatus.MESSAGE_ILLEGAL
            assert "4089 bytes, at most 4088" in refused.reason
        else:
            assert put(store, b"next").physical_offset == 4096


def test_an_ipv6_born_host_makes_a_record_longer(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        result = put(store, b"v6", born_host=pack_host("2001:db8::1", 50001))
        assert result.size == 114
        [message] = read_all(store)
        assert message.sys_flag == 16
        assert message.born_host == ("2001:db8::1", 50001)
        assert store.store_time_of("TopicTest", 0, 0) == NOW
        both = put(store, b"", born_host=pack_host("::1", 1), store_host=pack_host("::2", 2))
        record = store.record_at(both.physical_offset)
        assert record is not None
        decoded = decode_record(record)
        assert (decoded.sys_flag, decoded.store_host, len(decoded.offset_message_id)) == (48, ("::2", 2), 56)


def test_the_host_bits_of_the_sender_are_not_believed(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, b"x", sys_flag=48)
        assert read_all(store)[0].sys_flag == 0


def test_a_group_lies_in_one_file(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, bytes(3700))
        group = [new_message(f"unit {n}".encode(), properties={"KEYS": f"k{n}"}, flag=n) for n in range(3)]
        results = append_group(store, *group)
        assert not isinstance(results, Refusal)
        assert results[0].physical_offset == 4096
        assert results[-1].end_offset == store.max_offset
        messages = read_all(store)[1:]
        assert [message.queue_offset for message in messages] == [1, 2, 3]
        assert [message.physical_offset for message in messages] == [result.physical_offset for result in results]
        assert [message.flag for message in messages] == [0, 1, 2]
        assert len(store.query("TopicTest", "k2", 32, 0, 1 << 60).slices) == 1


def test_a_group_that_fits_no_file_is_refused_as_a_whole(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        refused = append_group(store, *[new_message(bytes(1300))] * 3)
        assert isinstance(refused, Refusal)
        assert refused.status is PutMessageStatus.MESSAGE_ILLEGAL
        assert store.max_offset == 0


def test_limits_of_body_and_properties(tmp_path: Path) -> None:
    with open_store(tmp_path, mapped_file_size_commit_log=1 << 20, max_message_size=1000) as store:
        assert append(store, new_message(bytes(1001))).status is PutMessageStatus.MESSAGE_ILLEGAL
        assert append(store, new_message(bytes(1000))).status is PutMessageStatus.PUT_OK
        assert append(store, new_message(properties=b"x" * 32768)).status is PutMessageStatus.MESSAGE_ILLEGAL
        wide = ("ü" * 20_000).encode()
        assert append(store, new_message(properties=wide)).status is PutMessageStatus.PROPERTIES_SIZE_EXCEEDED
        assert append(store, new_message(properties=b"x" * 32767)).status is PutMessageStatus.PUT_OK
        store.set_max_message_size(2000)
        assert append(store, new_message(bytes(1001))).status is PutMessageStatus.PUT_OK
        store.set_max_message_size(9)
        assert store.max_message_size == 2000


@pytest.mark.parametrize("topic", ["", "..", "a/b", "a\0b", "\ud800", "x" * 128, "ü" * 64], ids=range(7))
def test_a_topic_that_cannot_be_stored_is_refused(tmp_path: Path, topic: str) -> None:
    with open_store(tmp_path / "root") as store:
        assert append(store, new_message(topic=topic)).status is PutMessageStatus.MESSAGE_ILLEGAL
        assert append(store, new_message(queue_id=-1)).status is PutMessageStatus.MESSAGE_ILLEGAL
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
    assert list((tmp_path / "root" / "consumequeue").iterdir()) == []


def test_store_times_do_not_follow_a_clock_that_slips_back(tmp_path: Path) -> None:
    clock = ManualClock(NOW)
    with open_store(tmp_path, clock=clock) as store:
        put(store)
        clock.set(NOW - 500)
        assert stored_at(store, put(store)) == NOW
        clock.set(NOW - 3_600_000)
        assert stored_at(store, put(store)) == NOW - 3_600_000


def stored_at(store: MessageStore, result: AppendResult) -> int:
    return store.commit_log.store_timestamp_at(PhysicalOffset(result.physical_offset))


def test_without_a_new_file_the_message_is_refused_and_the_log_stays_usable(tmp_path: Path) -> None:
    files = FailingFiles()
    with open_store(tmp_path, files=files) as store:
        put(store, bytes(3000))
        files.fail["create"] = errno.EIO
        refused = append(store, new_message(bytes(2000)))
        assert refused.status is PutMessageStatus.CREATE_MAPEDFILE_FAILED
        assert "Input/output error" in refused.reason
        put(store, b"small enough")
        files.fail.clear()
        assert put(store, bytes(2000)).physical_offset == 4096
        assert len(bodies(store)) == 3


def test_a_full_disk_refuses_a_message_instead_of_killing_the_process(tmp_path: Path) -> None:
    files = FailingFiles()
    with open_store(tmp_path, files=files) as store:
        files.fail["reserve"] = errno.ENOSPC
        refused = append(store, new_message())
        assert refused.status is PutMessageStatus.SERVICE_NOT_AVAILABLE
        assert "No space left" in refused.reason
        files.fail.clear()
        assert put(store).physical_offset == 0


def test_a_walk_reads_records_of_both_versions_and_names_damage(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, b"one", properties={"TAGS": "T"})
        record = bytes(store.record_at(0) or b"")
        body_end = 88 + 3
        long_topic = b"%RETRY%" + b"g" * 130
        v2 = bytearray(record[:body_end] + len(long_topic).to_bytes(2, "big") + long_topic + b"\0\0")
        v2[0:8] = struct.pack(">iI", len(v2), MAGIC_V2)
        v2[28:36] = len(record).to_bytes(8, "big")
        store.append_data(store.max_offset, bytes(v2))
        walk = store.commit_log.walk(PhysicalOffset(0), check_crc=True)
        assert [(item.physical_offset, item.topic) for item in walk] == [(0, b"TopicTest"), (len(record), long_topic)]
        assert (walk.damage, walk.end) == (None, store.max_offset)

        bad_crc = bytearray(record)
        bad_crc[88] ^= 1
        bad_crc[28:36] = store.max_offset.to_bytes(8, "big")
        store.append_data(store.max_offset, bytes(bad_crc))
        walk = store.commit_log.walk(PhysicalOffset(0), check_crc=True)
        assert len(list(walk)) == 2
        assert walk.damage is not None
        assert "checksum" in walk.damage
        assert len(list(store.commit_log.walk(PhysicalOffset(0)))) == 3


@pytest.mark.parametrize(
    ("position", "value", "words"),
    [
        (0, struct.pack(">i", 5000), "says 5000 bytes"),
        (0, struct.pack(">i", 12), "says 12 bytes"),
        (4, b"\x01\x02\x03\x04", "magic number 0x01020304"),
        (84, struct.pack(">i", -5), "body of -5 bytes"),
        (84, struct.pack(">i", 4000), "body of 4000 bytes"),
        (93, b"\x7f", "do not add up"),
    ],
)
def test_a_walk_stops_at_a_record_that_contradicts_itself(
    tmp_path: Path, position: int, value: bytes, words: str
) -> None:
    with open_store(tmp_path) as store:
        put(store, b"hello")
        second = put(store, b"hello")
    path = tmp_path / "commitlog" / "00000000000000000000"
    data = bytearray(path.read_bytes())
    at = second.physical_offset + position
    data[at : at + len(value)] = value
    path.write_bytes(data)
    with open_store(tmp_path, read_only=True) as store:
        store._segments.cut(PhysicalOffset(4096))
        walk = store.commit_log.walk(PhysicalOffset(0))
        assert len(list(walk)) == 1
        assert walk.end == second.physical_offset
        assert walk.damage is not None
        assert words in walk.damage


def test_files_are_spread_over_several_directories(tmp_path: Path) -> None:
    fill = {"a": 0.5, "b": 0.5}
    root = tmp_path / "root"
    options = {
        "store_path_commit_log": f"{tmp_path / 'b'},{tmp_path / 'a'}",
        "disk_use": lambda path: fill.get(path.name, 0.1),
    }
    with open_store(root, **options) as store:
        for _ in range(3):
            put(store, bytes(3000))
        fill["a"] = 0.9
        put(store, bytes(3000))
        put(store, bytes(3000))
    assert sorted(int(path.name) // 4096 for path in (tmp_path / "a").iterdir()) == [0, 2]
    assert sorted(int(path.name) // 4096 for path in (tmp_path / "b").iterdir()) == [1, 3, 4]
    with open_store(root, **options) as store:
        assert len(bodies(store)) == 5


def test_log_bytes_of_a_master_continue_the_log_and_show_up_in_queues(tmp_path: Path) -> None:
    with open_store(tmp_path / "master") as master:
        for number in range(20):
            put(master, f"message {number}".encode() * 20, properties={"TAGS": "T"})
        log = b"".join(path.read_bytes() for path in sorted((tmp_path / "master" / "commitlog").iterdir()))[
            : master.max_offset
        ]
        expected = bodies(master)
        with open_store(tmp_path / "slave", broker_role=BrokerRole.SLAVE) as slave:
            assert append(slave, new_message()).status is PutMessageStatus.SERVICE_NOT_AVAILABLE
            grown: list[NewMessages] = []
            for start in range(0, len(log), 700):
                slave.append_data(start, log[start : start + 700])
                slave.dispatch_pending(grown.append)
            assert [place[2] for batch in grown for place in batch.places] == list(range(20))
            assert grown[0].properties(0) == b"TAGS\x01T"
            assert bodies(slave) == expected
            with pytest.raises(StoreError, match="do not continue"):
                slave.append_data(5, b"x")


def test_a_slave_may_begin_in_the_middle(tmp_path: Path) -> None:
    with open_store(tmp_path / "master") as master:
        for _ in range(5):
            put(master, bytes(1500))
        start = 4096
        record = master.commit_log.slice(PhysicalOffset(start), master.commit_log.segments.file_size - 8)
        assert record is not None
        with open_store(tmp_path / "slave") as slave:
            slave.append_data(start, bytes(record))
            slave.dispatch_pending()
            assert slave.min_offset == 4096
            assert slave.min_offset_of("TopicTest", 0) == 2
            assert [message.queue_offset for message in read_all(slave)] == [2, 3]


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("notes.txt", 10, "does not belong into a commit log"),
        ("00000000000000008192", 100, "has 100 bytes, but mappedFileSizeCommitLog=4096"),
        ("00000000000000004097", 4096, "not a multiple"),
    ],
)
def test_a_foreign_file_stops_the_start(tmp_path: Path, name: str, size: int, words: str) -> None:
    with open_store(tmp_path) as store:
        put(store)
    (tmp_path / "commitlog" / name).write_bytes(bytes(size))
    with pytest.raises(StoreCorrupt, match=words):
        open_store(tmp_path)
    # The failed start gave the directory back.
    (tmp_path / "commitlog" / name).unlink()
    open_store(tmp_path).close()


def test_an_empty_last_file_is_what_a_crash_left(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store)
    left = tmp_path / "commitlog" / "00000000000000004096"
    left.touch()
    with open_store(tmp_path) as store:
        assert any("is empty" in warning for warning in store.recovery.warnings)
        assert bodies(store) == [b"hello"]
    assert not left.exists()


def test_the_name_of_a_file_is_safe_before_there_is_another(tmp_path: Path) -> None:
    safe: set[Path] = set()

    class Watched(FailingFiles):
        def create(self, path: Path | str, size: int) -> None:
            log = Path(path).parent
            if log.name == "commitlog":
                assert safe.issuperset(log.iterdir())
            super().create(path, size)

        def sync_directory(self, path: Path) -> None:
            super().sync_directory(path)
            safe.update(path.iterdir())

    with open_store(tmp_path, files=Watched()) as store:
        for _ in range(10):
            put(store, bytes(2000))
            store.prepare_next_file()
        assert len(list((tmp_path / "commitlog").iterdir())) > 5


def test_a_file_made_ahead_while_appends_made_it_themselves_is_left_alone(tmp_path: Path) -> None:
    class Meanwhile(FailingFiles):
        """Just when appends make the next file, a worker has finished the same."""

        store: MessageStore | None = None

        def create(self, path: Path | str, size: int) -> None:
            store, self.store = self.store, None
            if store is not None and Path(path).parent.name == "commitlog":
                store.prepare_next_file()
            super().create(path, size)
            self.store = store

    files = Meanwhile()
    with open_store(tmp_path, files=files) as store:
        files.store = store
        sent = [bytes([number]) * 1500 for number in range(9)]
        for body in sent:
            put(store, body)
            while (stretch := store.next_stretch()) is not None:
                store.prepare_stretch(stretch)
        assert bodies(store) == sent
    with open_store(tmp_path) as store:
        assert bodies(store) == sent
