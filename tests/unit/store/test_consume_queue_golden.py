"""The same records through our classes give the very bytes that RocketMQ wrote, and the same answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from downrange.model.hashing import tags_code
from downrange.model.message import TRANSACTION_MASK, PhysicalOffset, StoredMessage, SysFlag, TopicQueue
from downrange.model.properties import DELAY
from downrange.store.files import OS_FILES
from downrange.store.queue.consume_queue import ENTRY, ConsumeQueue
from downrange.store.queue.consume_queue_ext import ConsumeQueueExt, ExtUnit
from tests.support.golden_store import GoldenStore, files_under, unpack

DELAYS_SECONDS = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)


def tags_code_of(message: StoredMessage) -> int:
    if message.topic == "SCHEDULE_TOPIC_XXXX" and (level := message.properties.get(DELAY)):
        return message.store_timestamp + 1000 * DELAYS_SECONDS[int(level) - 1]
    return tags_code(message.tags or "")


def is_queued(message: StoredMessage) -> bool:
    return message.sys_flag & TRANSACTION_MASK in (0, SysFlag.TRANSACTION_COMMIT)


def open_queues(root: Path, file_size: int) -> dict[TopicQueue, ConsumeQueue]:
    queues = {}
    for directory in sorted((root / "consumequeue").glob("*/*")):
        key = TopicQueue(directory.parent.name, int(directory.name))
        queues[key] = ConsumeQueue(directory, key, file_size, OS_FILES)
        queues[key].load()
    return queues


def test_the_same_records_give_the_same_queue_files(tmp_path: Path) -> None:
    golden = unpack("clean", tmp_path)
    queues: dict[TopicQueue, ConsumeQueue] = {}
    for message in golden.records():
        if is_queued(message):
            key = TopicQueue(message.topic, message.queue_id)
            if key not in queues:
                directory = tmp_path / "ours" / message.topic / str(message.queue_id)
                queues[key] = ConsumeQueue(directory, key, golden.setting("mappedFileSizeConsumeQueue"), OS_FILES)
            queues[key].put(message.queue_offset, message.physical_offset, message.store_size, tags_code_of(message))
    for queue in queues.values():
        queue.write_pending()
    theirs = golden.files_under("consumequeue")
    assert len(theirs) == 19
    assert files_under(tmp_path / "ours") == theirs


def test_the_same_records_give_the_same_extension_files(tmp_path: Path) -> None:
    golden = unpack("ext", tmp_path)
    theirs = open_queues(golden.root, golden.setting("mappedFileSizeConsumeQueue"))
    assert len(theirs) == 3
    bitmaps = 0
    for key, queue in theirs.items():
        queue.recover()
        their_ext, our_ext = (
            ConsumeQueueExt(
                root / key.topic / str(key.queue_id), golden.setting("mappedFileSizeConsumeQueueExt"), OS_FILES
            )
            for root in (golden.root / "consumequeue_ext", tmp_path / "ours_ext")
        )
        their_ext.load()
        their_ext.recover()
        ours = ConsumeQueue(tmp_path / "ours" / key.topic / str(key.queue_id), key, 1000, OS_FILES)
        for message in golden.records():
            if (message.topic, message.queue_id) == key:
                # The bitmap is the broker's own computation; everything else comes from the record.
                address = ENTRY.unpack(queue.read(message.queue_offset, 1))[2]
                their_unit = their_ext.get(address)
                assert their_unit is not None
                assert their_unit[:2] == (tags_code_of(message), message.store_timestamp)
                bitmaps += bool(their_unit.bitmap)
                ours.put(message.queue_offset, message.physical_offset, message.store_size, our_ext.put(*their_unit))
        ours.write_pending()
        assert ours.max_offset == queue.max_offset
        assert our_ext.max_address == their_ext.max_address
    assert bitmaps > 100
    assert files_under(tmp_path / "ours") == golden.files_under("consumequeue")
    assert files_under(tmp_path / "ours_ext") == golden.files_under("consumequeue_ext")


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("name", ["clean", "ext"])
def test_a_loaded_queue_answers_as_the_genuine_broker(tmp_path: Path, name: str, clean: bool) -> None:
    golden = unpack(name, tmp_path)
    before = golden.files_under("consumequeue")
    queues = open_queues(golden.root, golden.setting("mappedFileSizeConsumeQueue"))
    for queue in queues.values():
        queue.recover(clean=clean)
        queue.correct_min_offset(PhysicalOffset(0))
    for row in golden.manifest["queues"]:
        known = queues.get(TopicQueue(row["topic"], row["queueId"]))
        assert (row["minOffset"], row["maxOffset"]) == ((known.min_offset, known.max_offset) if known else (0, 0))
    check_times(golden, queues)
    assert golden.files_under("consumequeue") == before


def check_times(golden: GoldenStore, queues: dict[TopicQueue, ConsumeQueue]) -> None:
    times = {int(message.physical_offset): message.store_timestamp for message in golden.records()}
    asked = 0
    for row in golden.manifest["offsetByTimestamp"]:
        queue = queues.get(TopicQueue(row["topic"], row["queueId"]))
        if queue is not None:
            found = queue.search_by_time(
                row["timestamp"], PhysicalOffset(0), lambda physical_offset: times[physical_offset]
            )
            assert found == row["offset"], row
            asked += 1
    assert asked > 50


def test_the_last_entry_of_every_queue_ends_within_the_log(tmp_path: Path) -> None:
    golden = unpack("clean", tmp_path)
    queues = open_queues(golden.root, golden.setting("mappedFileSizeConsumeQueue"))
    ends: dict[TopicQueue, int] = {}
    for message in golden.records():
        if is_queued(message):
            ends[TopicQueue(message.topic, message.queue_id)] = message.physical_offset + message.store_size
    for key, queue in queues.items():
        queue.recover()
        assert queue.max_physical_offset == ends[key]


def test_a_unit_round_trips(tmp_path: Path) -> None:
    ext = ConsumeQueueExt(tmp_path / "ext", 1024, OS_FILES)
    address = ext.put(2598919, 1_700_000_000_000, b"\x01\x02")
    assert ext.is_ext_address(address)
    assert ext.get(address) == ExtUnit(2598919, 1_700_000_000_000, b"\x01\x02")
