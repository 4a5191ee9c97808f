"""Store directories of the genuine broker, opened here: every answer is the one the genuine broker gave."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest

from downrange.clock import ManualClock
from downrange.model.message import StoredMessage
from downrange.model.message_id import pack_host, parse_offset_message_id
from downrange.model.record import decode_record, decode_records
from downrange.settings import Property, configure
from downrange.store.config import StoreConfig
from downrange.store.message_store import MessageStore
from downrange.store.new_message import NewMessage, PutMessageStatus
from tests.support.golden_store import GoldenStore, files_under, unpack
from tests.support.stores import append

STORES = ("clean", "killed", "torn", "ext")
PATH_KEYS = ("storePathRootDir", "storePathCommitLog")


def config_of(golden: GoldenStore) -> StoreConfig:
    given = {key: Property(value) for key, value in golden.manifest["config"].items() if key not in PATH_KEYS}
    return dataclasses.replace(configure(StoreConfig, given), store_path_root_dir=golden.root)


def open_golden(golden: GoldenStore, **options: Any) -> MessageStore:
    return MessageStore.open(config_of(golden), **options)


def plain_body(message: StoredMessage) -> bytes:
    return zlib.decompress(message.body) if message.sys_flag & 1 else message.body


def read_queue(store: MessageStore, topic: str, queue_id: int) -> list[StoredMessage]:
    messages: list[StoredMessage] = []
    offset = 0
    while offset < store.max_offset_of(topic, queue_id):
        result = store.read(topic, queue_id, offset, 32)
        messages += [message for part in result.slices for message in decode_records(part)]
        offset = result.next_begin_offset
    return messages


@pytest.mark.parametrize("name", STORES)
def test_every_message_is_there_and_as_it_was_sent(name: str, tmp_path: Path) -> None:
    golden = unpack(name, tmp_path)
    with open_golden(golden) as store:
        for expected in golden.manifest["messages"]:
            record = store.record_at(parse_offset_message_id(expected["msgId"]).physical_offset)
            assert record is not None
            message = decode_record(record, check_crc=True)
            assert message.physical_offset == expected["physicalOffset"]
            got = {
                "topic": message.topic,
                "queueId": message.queue_id,
                "queueOffset": message.queue_offset,
                "storeSize": message.store_size,
                "msgId": message.offset_message_id,
                "flag": message.flag,
                "sysFlag": message.sys_flag,
                "bodyCRC": message.body_crc,
                "bodySha1": hashlib.sha1(plain_body(message)).hexdigest(),  # noqa: S324
                "bornTimestamp": message.born_timestamp,
                "bornHost": str(message.born_host),
                "storeTimestamp": message.store_timestamp,
                "storeHost": str(message.store_host),
                "reconsumeTimes": message.reconsume_times,
                "preparedTransactionOffset": message.prepared_transaction_offset,
                "properties": message.properties,
            }
            assert got == {key: expected[key] for key in got}
            if "via" not in expected:
                at = store.physical_offset_of(message.topic, message.queue_id, message.queue_offset)
                assert at == message.physical_offset


@pytest.mark.parametrize("name", STORES)
def test_every_queue_reads_from_end_to_end(name: str, tmp_path: Path) -> None:
    golden = unpack(name, tmp_path)
    with open_golden(golden) as store:
        for queue in golden.manifest["queues"]:
            key = queue["topic"], queue["queueId"]
            assert store.min_offset_of(*key) == queue["minOffset"]
            assert store.max_offset_of(*key) == queue["maxOffset"]
            assert store.earliest_store_time_of(*key) == queue["earliestStoreTime"]
            assert store.store_time_of(*key, queue["maxOffset"] - 1) == queue["lastUpdateTimestamp"]
            assert [message.queue_offset for message in read_queue(store, *key)] == list(range(queue["maxOffset"]))


@pytest.mark.parametrize("name", STORES)
def test_every_lookup_by_key(name: str, tmp_path: Path) -> None:
    golden = unpack(name, tmp_path)
    with open_golden(golden) as store:
        for lookup in golden.manifest["keyLookups"]:
            found = store.query(lookup["topic"], lookup["key"], 32, 0, (1 << 63) - 1)
            messages = [decode_record(part) for part in found.slices]
            hits = {
                message.physical_offset
                for message in messages
                if message.topic == lookup["topic"]
                and lookup["key"] in ([message.unique_key] if lookup["uniqueKey"] else message.keys)
            }
            expected = {hit["physicalOffset"] for hit in lookup["hits"]}
            if lookup["uniqueKey"]:  # the client that asked shows one message only
                assert expected <= hits
            else:
                assert hits == expected


@pytest.mark.parametrize("name", STORES)
def test_every_search_by_time(name: str, tmp_path: Path) -> None:
    golden = unpack(name, tmp_path)
    with open_golden(golden) as store:
        for search in golden.manifest["offsetByTimestamp"]:
            found = store.offset_by_time(search["topic"], search["queueId"], search["timestamp"])
            assert found == search["offset"], search


def test_opening_a_clean_store_and_closing_it_changes_nothing(tmp_path: Path) -> None:
    golden = unpack("clean", tmp_path)
    before = files_under(golden.root)
    open_golden(golden).close()
    assert files_under(golden.root) == before


def test_reading_only_touches_nothing(tmp_path: Path) -> None:
    for name in STORES:
        golden = unpack(name, tmp_path / name)
        before = files_under(golden.root)
        with open_golden(golden, read_only=True) as store:
            for queue in golden.manifest["queues"]:
                assert store.max_offset_of(queue["topic"], queue["queueId"]) >= queue["maxOffset"]
        assert files_under(golden.root) == before


def test_queues_and_index_built_from_the_log_are_the_same_bytes(tmp_path: Path) -> None:
    golden = unpack("clean", tmp_path)
    queues, index = golden.files_under("consumequeue"), golden.files_under("index")
    shutil.rmtree(golden.root / "consumequeue")
    shutil.rmtree(golden.root / "index")
    open_golden(golden, clock=ManualClock(1_794_732_134_198)).close()
    assert golden.files_under("consumequeue") == queues
    # Index files are named after the time they were made, which a rebuild cannot know.
    assert list(golden.files_under("index").values()) == list(index.values())


def test_the_torn_record_is_gone_and_its_place_is_zero(tmp_path: Path) -> None:
    killed, torn = unpack("killed", tmp_path / "killed"), unpack("torn", tmp_path / "torn")
    with open_golden(killed) as store:
        last = max(message["physicalOffset"] for message in killed.manifest["messages"])
        assert store.record_at(last) is not None
        end = store.max_offset
    with open_golden(torn) as store:
        assert store.max_offset == last
        assert any("cut" in warning for warning in store.recovery.warnings)
        path = torn.root / "commitlog" / f"{last // 65536 * 65536:020d}"
        assert not any(path.read_bytes()[last % 65536 :])
        assert end > last


@pytest.mark.parametrize("name", STORES)
def test_a_store_goes_on_where_java_left_it(name: str, tmp_path: Path) -> None:
    golden = unpack(name, tmp_path)
    host = pack_host("10.0.0.1", 40911)
    with open_golden(golden) as store:
        queues = {key: state.queue.max_offset for key, state in store.queues.states.items()}
        for (topic, queue_id), next_offset in queues.items():
            message = NewMessage(topic, queue_id, b"x" * 3000, b"KEYS\x01more\x02TAGS\x01T", 1, host, host)
            result = append(store, message)
            assert result.status is PutMessageStatus.PUT_OK
            assert result.queue_offset == next_offset
    with open_golden(golden) as store:
        assert store.recovery.clean
        for (topic, queue_id), next_offset in queues.items():
            assert store.max_offset_of(topic, queue_id) == next_offset + 1
            assert len(store.query(topic, "more", 64, 0, (1 << 63) - 1).slices) >= 1
