"""Reading by tag or by expression, many entries at once, finds what reading one by one does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from downrange.broker.filtering import MessageFilter, sql_filter, tag_filter
from downrange.model.hashing import tags_code
from downrange.model.sql.expression import compile_sql
from downrange.model.subscription import subscribe
from downrange.store.config import StoreConfig
from downrange.store.message_store import MessageStore
from downrange.store.new_message import NewMessage
from downrange.store.queue.consume_queue_ext import UnitTest
from downrange.store.read_result import ReadResult
from tests.support.stores import append
from tests.unit.store.small_store import BORN_HOST, NOW, STORE_HOST, small_config

SEEDS = st.integers(0, 2**64).map(Random)
TAGS = ("a", "b", "c", "d")
FILTERS: tuple[MessageFilter, ...] = (
    tag_filter(subscribe("t", "a")),
    tag_filter(subscribe("t", "a || c || nothing")),
    tag_filter(subscribe("t", "nothing")),
    sql_filter(compile_sql("n > 3")),
    sql_filter(compile_sql("TAGS IN ('a', 'b') AND n <> 2")),
    sql_filter(compile_sql("nothing = 1")),
    MessageFilter(UnitTest(lambda unit: False), sql_filter(compile_sql("n > 3")).matches_record),
)


def config_of(random: Random, root: Path) -> StoreConfig:
    return small_config(
        root,
        mapped_file_size_commit_log=random.choice((4096, 1 << 16, 1 << 18)),
        mapped_file_size_consume_queue=random.choice((1000, 20_000)),
        max_transfer_count_on_message_in_memory=random.choice((1, 32)),
        max_transfer_count_on_message_in_disk=random.choice((1, 8, 40)),
        max_transfer_bytes_on_message_in_memory=random.choice((300, 2000, 256 * 1024)),
        max_transfer_bytes_on_message_in_disk=random.choice((300, 1000, 64 * 1024)),
        enable_consume_queue_ext=random.random() < 0.1,
    )


def fill(random: Random, store: MessageStore) -> None:
    for number in range(random.choice((5, 60, 300))):
        tag = random.choice(TAGS)
        properties = f"n\x01{number % 7}\x02TAGS\x01{tag}".encode() if random.random() < 0.9 else b""
        body = bytes(random.choice((0, 100, 100, 700)))
        append(store, NewMessage("t", random.choice((0, 0, 1)), body, properties, NOW, BORN_HOST, STORE_HOST))
    if random.random() < 0.3:
        store.remove_files(store.take_oldest_files(1))


def one_by_one(store: MessageStore, offset: int, count: int, wanted: MessageFilter) -> ReadResult:
    """As plain functions, which nobody can look into."""
    entry, record = wanted.matches_entry, wanted.matches_record
    return store.read(
        "t",
        0,
        offset,
        count,
        matches=None if entry is None else (lambda code, unit: entry(code, unit)),
        matches_record=None if record is None else _of(record),
    )


def _of(record: Callable[[memoryview], bool]) -> Callable[[memoryview], bool]:
    return lambda view: record(view)


def seen(result: ReadResult) -> tuple[object, ...]:
    return (
        result.status,
        result.next_begin_offset,
        result.min_offset,
        result.max_offset,
        b"".join(result.slices),
        result.message_count,
        result.byte_count,
        result.suggest_pulling_from_slave,
    )


@given(random=SEEDS)
@settings(max_examples=60, deadline=None)
def test_many_at_once_or_one_by_one_makes_no_difference(random: Random) -> None:
    with TemporaryDirectory() as root:
        config = config_of(random, Path(root))
        with MessageStore.open(config, disk_use=lambda path: 0.1) as store:
            store.memory_limit = random.choice((0, 2000, 16_000, 1 << 40))
            fill(random, store)
            end = store.max_offset_of("t", 0)
            for wanted in FILTERS:
                for _ in range(6):
                    offset, count = random.randrange(end + 1), random.choice((-1, 0, 1, 5, 32, 900))
                    found = store.read(
                        "t", 0, offset, count, matches=wanted.matches_entry, matches_record=wanted.matches_record
                    )
                    assert seen(found) == seen(one_by_one(store, offset, count, wanted))


@given(random=SEEDS)
@settings(max_examples=30, deadline=None)
def test_without_a_filter_old_messages_are_read_as_one_by_one(random: Random) -> None:
    with TemporaryDirectory() as root:
        config = config_of(random, Path(root))
        with MessageStore.open(config, disk_use=lambda path: 0.1) as store:
            store.memory_limit = random.choice((0, 2000, 16_000, 1 << 40))
            fill(random, store)
            for _ in range(20):
                offset, count = random.randrange(store.max_offset_of("t", 0) + 1), random.choice((0, 1, 5, 32, 900))
                expected = store.read("t", 0, offset, count, matches=lambda code, unit: True)
                assert seen(store.read("t", 0, offset, count)) == seen(expected)


def test_the_hash_of_a_tag_is_what_counts() -> None:
    wanted = tag_filter(subscribe("t", "Aa")).matches_entry
    assert wanted is not None
    assert tags_code("Aa") == tags_code("BB")
    assert wanted(tags_code("BB"), None)
    assert wanted(tags_code("Aa") + (5 << 32), None), "the low half counts: the rest may be a time"
    assert not wanted(tags_code("Ab"), None)
