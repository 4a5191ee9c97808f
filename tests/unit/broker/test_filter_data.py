from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from downrange.broker.bloom_filter import BloomFilter
from downrange.broker.compiled_sql import compiled
from downrange.broker.filter_data import ConsumerFilters
from downrange.broker.filtering import group_filter, retry_filter, tag_filter
from downrange.broker.json_file import JsonFile
from downrange.broker.services.housekeeping import clean_filters
from downrange.clock import ManualClock
from downrange.model.hashing import tags_code
from downrange.model.message import QueueOffset
from downrange.model.message_id import pack_host
from downrange.model.properties import encode_properties
from downrange.model.sql.errors import SqlError
from downrange.model.sql.expression import SqlExpression
from downrange.model.subscription import SQL92, Subscription, subscribe
from downrange.store.message_store import MessageStore
from downrange.store.new_message import NewMessage
from downrange.store.queue.consume_queue import ENTRY
from downrange.store.queue.consume_queue_ext import ExtUnit
from downrange.transport.running_services import running_services
from tests.support.stores import append
from tests.unit.broker.wired import wire
from tests.unit.store.small_store import small_config

NOW = 1_700_000_000_000
BLOOM = BloomFilter.sized_for(32, 20)


class Filters:
    """A table of filters, its clock and its file."""

    def __init__(self, directory: Path, *, bloom: BloomFilter = BLOOM, now: int = NOW) -> None:
        self.clock = ManualClock(now)
        self.path = directory / "consumerFilter.json"
        self.table = ConsumerFilters(JsonFile(self.path), bloom, self.clock)

    def heartbeat(self, group: str, *subscriptions: Subscription) -> None:
        self.table.register(group, subscriptions)

    def texts(self) -> dict[tuple[str, str], str]:
        return {(known.topic, known.group): known.expression.text for known in self.table}


@pytest.fixture
def filters(tmp_path: Path) -> Filters:
    return Filters(tmp_path)


def sql(topic: str, expression: str, version: int = 1) -> Subscription:
    return subscribe(topic, expression, SQL92, version)


# --- from heartbeats to filters


def test_a_heartbeat_brings_a_filter_for_each_topic_with_an_expression(filters: Filters) -> None:
    filters.heartbeat("g", sql("orders", "a = 1"), sql("bills", "b = 2"), subscribe("%RETRY%g", "*"))
    assert filters.texts() == {("orders", "g"): "a = 1", ("bills", "g"): "b = 2"}
    known = filters.table.get("orders", "g")
    assert known is not None
    assert (known.client_version, known.born_time, known.is_dead) == (1, NOW, False)
    assert filters.table.get("orders", "other") is None
    assert filters.table.get("else", "g") is None


def test_a_newer_version_of_the_same_expression_is_the_same_filter(filters: Filters) -> None:
    filters.heartbeat("g", sql("orders", "a = 1", 1))
    filters.clock.tick(5)
    filters.heartbeat("g", sql("orders", "a = 1", 7))
    known = filters.table.get("orders", "g")
    assert known is not None
    assert (known.client_version, known.born_time) == (7, NOW)


def test_a_changed_expression_is_born_again(filters: Filters) -> None:
    filters.heartbeat("g", sql("orders", "a = 1", 1))
    filters.clock.tick(5)
    filters.heartbeat("g", sql("orders", "a = 2", 2))
    known = filters.table.get("orders", "g")
    assert known is not None
    assert (known.expression.text, known.born_time) == ("a = 2", NOW + 5000)


@pytest.mark.parametrize("version", [4, 5])
def test_an_older_or_equally_old_expression_changes_nothing(version: int, filters: Filters) -> None:
    filters.heartbeat("g", sql("orders", "a = 1", 5))
    filters.heartbeat("g", sql("orders", "a = 2", version))
    assert filters.texts() == {("orders", "g"): "a = 1"}


def test_an_expression_that_does_not_compile_leaves_no_filter(filters: Filters) -> None:
    filters.heartbeat("g", sql("orders", "a >"))
    assert not filters.texts()
    filters.heartbeat("g", sql("orders", "a = 1", 2))
    filters.heartbeat("g", sql("orders", "a >", 3))
    assert not filters.texts()
    filters.heartbeat("g", subscribe("orders", "a", "LUA", 4))
    assert not filters.texts()


def test_a_filter_dies_with_its_group_and_lives_again_with_it(filters: Filters) -> None:
    filters.heartbeat("g", sql("orders", "a = 1"))
    filters.clock.tick(1)
    filters.table.retire("g")
    filters.table.retire("unknown")
    known = filters.table.get("orders", "g")
    assert known is not None
    assert (known.is_dead, known.dead_time) == (True, NOW + 1000)
    filters.clock.tick(1)
    filters.table.retire("g")
    known = filters.table.get("orders", "g")
    assert known is not None
    assert known.dead_time == NOW + 1000
    filters.heartbeat("g", sql("orders", "a = 1"))
    known = filters.table.get("orders", "g")
    assert known is not None
    assert (known.is_dead, known.born_time) == (False, NOW)


def test_a_topic_given_up_loses_its_filter_only(filters: Filters) -> None:
    filters.heartbeat("g", sql("orders", "a = 1"), sql("bills", "b = 2"))
    filters.heartbeat("g", sql("bills", "b = 2"), subscribe("orders", "*"))
    assert {known.topic: known.is_dead for known in filters.table} == {"orders": True, "bills": False}


async def test_a_filter_is_forgotten_when_it_has_been_dead_for_long(tmp_path: Path) -> None:
    broker = wire(tmp_path)
    broker.filters.register("gone", [sql("orders", "a = 1")])
    broker.filters.register("here", [sql("orders", "a = 1")])
    broker.filters.retire("gone")
    async with running_services(cleaning=clean_filters(broker.filters, broker.config, broker.clock)):
        for hours, left in ((23, {"gone", "here"}), (1, {"here"})):
            for _ in range(hours * 60):
                await broker.clock.advance(60)
            assert {known.group for known in broker.filters} == left
    broker.close()


# --- the file


def test_filters_survive_a_restart_dead_until_their_group_is_back(tmp_path: Path) -> None:
    before = Filters(tmp_path)
    before.heartbeat("g", sql("orders", "a = 1", 7))
    before.table.save()
    after = Filters(tmp_path, now=NOW + 60_000)
    known = after.table.get("orders", "g")
    assert known is not None
    assert (known.expression.text, known.client_version, known.born_time) == ("a = 1", 7, NOW)
    assert (known.is_dead, known.dead_time) == (True, NOW + 60_000)
    after.heartbeat("g", sql("orders", "a = 1", 7))
    known = after.table.get("orders", "g")
    assert known is not None
    assert (known.is_dead, known.born_time) == (False, NOW)


def test_another_size_of_the_bit_maps_invalidates_the_file(tmp_path: Path) -> None:
    before = Filters(tmp_path)
    before.heartbeat("g", sql("orders", "a = 1"))
    before.table.save()
    after = Filters(tmp_path, bloom=BloomFilter.sized_for(64, 20))
    assert not after.texts()


def test_a_saved_expression_that_does_not_compile_is_left_out(tmp_path: Path) -> None:
    before = Filters(tmp_path)
    before.heartbeat("g", sql("orders", "a = 1"), sql("bills", "b = 2"))
    before.table.save()
    path = tmp_path / "consumerFilter.json"
    path.write_text(path.read_text().replace('"a = 1"', '"a ="'))
    assert Filters(tmp_path).texts() == {("bills", "g"): "b = 2"}


# --- from filters to messages


def test_a_bit_map_spares_the_expression_only_what_it_surely_does_not_want(filters: Filters) -> None:
    filters.heartbeat("g", sql("orders", "a = 1"))
    known = filters.table.get("orders", "g")
    assert known is not None
    matches = group_filter(known, filters.table).matches_entry
    assert matches is not None
    yes = filters.table.bitmap_of("orders", b"a\x011", NOW)
    no = filters.table.bitmap_of("orders", b"a\x012", NOW)
    assert filters.table.bitmap_of("else", b"a\x011", NOW) == b""
    assert matches(0, ExtUnit(0, NOW + 1, yes))
    assert not matches(0, ExtUnit(0, NOW + 1, no))
    assert matches(0, ExtUnit(0, NOW, no))  # as old as the filter: the bit map may speak of a former one
    assert matches(0, ExtUnit(0, NOW + 1, b""))
    assert matches(0, ExtUnit(0, NOW + 1, no[:-1]))
    assert matches(0, None)


def test_bit_maps_are_made_when_messages_are_stored_and_again_when_they_are_replayed(tmp_path: Path) -> None:
    filters = Filters(tmp_path)
    filters.heartbeat("g", sql("orders", "a = 1"))
    config = small_config(tmp_path / "store", enable_consume_queue_ext=True)
    host = pack_host("127.0.0.1", 1)
    units: list[list[ExtUnit | None]] = []
    for _ in range(2):
        with MessageStore.open(config, clock=filters.clock, bitmap_of=filters.table.bitmap_of) as store:
            if not units:
                for value in (b"1", b"2"):
                    filters.clock.tick(1)
                    append(store, NewMessage("orders", 0, b"body", b"a\x01" + value, 1, host, host))
            state = store.queues.get("orders", 0)
            assert state is not None
            assert state.ext is not None
            units.append(
                [state.ext.get(address) for _, _, address in ENTRY.iter_unpack(state.queue.read(QueueOffset(0), 2))]
            )
        for name in ("consumequeue", "consumequeue_ext"):
            (tmp_path / "store" / name).rename(tmp_path / f"{name}.{len(units)}")
    known = filters.table.get("orders", "g")
    assert known is not None
    assert [unit is not None and unit.bitmap for unit in units[0]] == [BLOOM.bitmap(known.mask), bytes(14)]
    assert units[1] == units[0]


def test_a_retry_topic_is_filtered_as_the_topic_the_message_came_from(filters: Filters) -> None:
    filters.heartbeat("g", sql("orders", "a = 1"))
    wanted = retry_filter(subscribe("%RETRY%g", "*"), "g", filters.table)
    for properties, expected in (
        ({"RETRY_TOPIC": "orders", "a": "1"}, True),
        ({"RETRY_TOPIC": "orders", "a": "2"}, False),
        ({"RETRY_TOPIC": "else", "a": "2"}, True),
        ({"a": "2"}, True),
    ):
        assert wanted.matches(0, encode_properties(properties)) is expected
    by_tag = retry_filter(subscribe("%RETRY%g", "t"), "g", filters.table)
    assert by_tag.matches(tags_code("t"), "a\x011\x02RETRY_TOPIC\x01orders")
    assert not by_tag.matches(tags_code("u"), "a\x011\x02RETRY_TOPIC\x01orders")


def test_tags_are_compared_without_looking_at_properties() -> None:
    wanted = tag_filter(subscribe("orders", "a || b"))
    assert wanted.matches_record is None
    assert [wanted.matches(tags_code(tag), "") for tag in "abc"] == [True, True, False]


# --- what the log says


def test_what_is_odd_about_an_expression_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert isinstance(compiled("once = 1 LIKE 'x%'"), SqlExpression)
            assert isinstance(compiled("once >"), SqlError)
            compiled("once = 1")
    assert [record.getMessage() for record in caplog.records] == [
        "SQL92 expression ends early, the rest is ignored rest=\"LIKE 'x%'\" expression=\"once = 1 LIKE 'x%'\"",
        "SQL92 expression cannot be used reason=position 7: a value or a property is expected, not the end "
        "expression='once >'",
    ]


def test_a_very_long_expression_is_compiled_and_not_remembered() -> None:
    text = "a IN ('" + "x" * 20_000 + "')"
    first = compiled(text)
    assert isinstance(first, SqlExpression)
    assert compiled(text) is not first


def test_the_table_as_it_is_saved(filters: Filters) -> None:
    filters.heartbeat("g", sql("orders", "a = 1", 7))
    assert msgspec.to_builtins(filters.table.table()) == {
        "filterDataByTopic": {
            "orders": {
                "topic": "orders",
                "groupFilterData": {
                    "g": {
                        "topic": "orders",
                        "consumerGroup": "g",
                        "expression": "a = 1",
                        "expressionType": "SQL92",
                        "clientVersion": 7,
                        "bornTime": NOW,
                        "deadTime": 0,
                        "dead": False,
                        "bloomFilterData": {"bitNum": 112, "bitPos": BLOOM.positions("g#orders")},
                    }
                },
            }
        }
    }
