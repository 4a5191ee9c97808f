"""Filters, bit maps and pulls as the genuine broker left them in a store directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from downrange.broker.bloom_filter import BloomFilter
from downrange.broker.compiled_sql import compiled
from downrange.broker.filter_data import ConsumerFilters
from downrange.broker.filtering import MessageFilter, group_filter, sql_filter
from downrange.broker.json_file import JsonFile
from downrange.clock import ManualClock
from downrange.model.record import decode_record
from downrange.model.sql.expression import SqlExpression
from downrange.protocol import java_json
from downrange.store.message_store import MessageStore
from downrange.store.queue.consume_queue import ENTRY
from tests.interop.test_store_golden import config_of
from tests.support.golden_store import GoldenStore, unpack


@pytest.fixture
def golden(tmp_path: Path) -> GoldenStore:
    return unpack("ext", tmp_path)


@pytest.fixture
def filters(golden: GoldenStore) -> ConsumerFilters:
    file = JsonFile(golden.root / "config" / "consumerFilter.json")
    return ConsumerFilters(file, BloomFilter.sized_for(32, 20), ManualClock(1_794_733_600_000))


def test_the_file_is_read_and_written_as_it_was(golden: GoldenStore, filters: ConsumerFilters) -> None:
    assert {(known.topic, known.group): known.expression.text for known in filters} == {
        ("gsAlpha", "gscg_sql1"): "a > 5 AND color = 'red'",
        ("gsAlpha", "gscg_sql2"): "a BETWEEN 2 AND 8 OR TAGS IN ('TagA')",
        ("gsBeta", "gscg_sql3"): "b IS NOT NULL",
    }
    path = golden.root / "config" / "consumerFilter.json"
    before = path.read_text()
    filters.mark_unsaved()
    filters.save()
    after = path.read_text()
    assert java_json.loads(after.encode()) == java_json.loads(before.encode())
    # The order of a Java map is nobody's business; commas move with it.
    assert sorted(after.replace(",", "").splitlines()) == sorted(before.replace(",", "").splitlines())


def test_every_bit_map_is_the_one_we_make(golden: GoldenStore, filters: ConsumerFilters) -> None:
    compared = 0
    with MessageStore.open(config_of(golden), read_only=True) as store:
        for message in golden.records():
            born_times = [known.born_time for known in filters if known.topic == message.topic]
            state = store.queues.get(message.topic, message.queue_id)
            if not born_times or message.store_timestamp <= max(born_times):
                continue
            assert state is not None
            assert state.ext is not None
            _, _, address = ENTRY.unpack(state.queue.read(message.queue_offset, 1))
            unit = state.ext.get(address)
            assert unit is not None
            properties = message.properties_text.encode()
            assert unit.bitmap == filters.bitmap_of(message.topic, properties, message.store_timestamp)
            compared += 1
    assert compared == 150


def test_every_pull_finds_the_same_messages(golden: GoldenStore, filters: ConsumerFilters) -> None:
    with_bit_maps = 0
    with MessageStore.open(config_of(golden), read_only=True) as store:
        for pull in golden.manifest["sqlPulls"]:
            expression = compiled(pull["expression"])
            assert isinstance(expression, SqlExpression)
            ways = [sql_filter(expression)]
            ways += [group_filter(known, filters) for known in filters if known.expression == expression]
            with_bit_maps += len(ways) - 1
            for wanted in ways:
                assert read(store, pull["topic"], pull["queueId"], wanted) == pull["matchedOffsets"]
    assert with_bit_maps == 5


def read(store: MessageStore, topic: str, queue_id: int, wanted: MessageFilter) -> list[int]:
    """The queue offsets a consumer gets that pulls one message at a time."""
    found: list[int] = []
    offset = 0
    while offset < store.max_offset_of(topic, queue_id):
        result = store.read(
            topic, queue_id, offset, 1, matches=wanted.matches_entry, matches_record=wanted.matches_record
        )
        found += [decode_record(part).queue_offset for part in result.slices]
        offset = result.next_begin_offset
    return found
