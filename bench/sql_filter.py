"""SQL92 filters: compiling, evaluating, and scanning a queue, beside the same scan by tag."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.report import Figure, alternate, table
from bench.storing import append
from downrange.broker.bloom_filter import BloomFilter
from downrange.broker.filter_data import ConsumerFilters
from downrange.broker.filtering import EVERYTHING, MessageFilter, group_filter, sql_filter, tag_filter
from downrange.broker.json_file import JsonFile
from downrange.clock import ManualClock
from downrange.model.message_id import pack_host
from downrange.model.properties import find_property
from downrange.model.sql.expression import SqlExpression, compile_sql
from downrange.model.subscription import SQL92, subscribe
from downrange.store.config import StoreConfig
from downrange.store.message_store import MessageStore
from downrange.store.new_message import NewMessage

TEXT = "KEYS\x01order-1234\x02UNIQ_KEY\x017F0000010ABC18B4AAC2000000000001\x02CLUSTER\x01DefaultCluster\x02"
TEXT += "color\x01green\x02a\x0112\x02price\x0119.95\x02WAIT\x01true\x02TAGS\x01TagA"
EXPRESSIONS = {
    "a number": "a > 5",
    "a list": "color IN ('red', 'green', 'blue')",
    "five conditions": "a BETWEEN 2 AND 20 AND color <> 'red' AND (price > 10.5 OR region IS NULL)",
}
EVALUATIONS = 20_000
MESSAGES = 8_000
# Every 16th message is wanted: what a filter saves is what it need not hand out.
SELECTIVE = "a = 3"


def run() -> list[Figure]:
    works: dict[str, Callable[[], int]] = {}
    for name, text in EXPRESSIONS.items():
        works[f"compile {name}"] = partial(compiling, text)
        works[f"evaluate {name}"] = partial(evaluating, compile_sql(text))
    figures = [Figure(name, rate, "expressions/s") for name, rate in alternate(works).items()]
    with TemporaryDirectory() as directory:
        figures += scans(Path(directory))
    return figures


def compiling(text: str) -> int:
    for _ in range(500):
        compile_sql(text)
    return 500


def evaluating(expression: SqlExpression) -> int:
    matches = expression.matches
    for _ in range(EVALUATIONS):
        matches(partial(find_property, TEXT))
    return EVALUATIONS


def scans(directory: Path) -> list[Figure]:
    clock = ManualClock()
    bloom = BloomFilter.sized_for(32, 20)
    filters = ConsumerFilters(JsonFile(directory / "consumerFilter.json"), bloom, clock)
    filters.register("g", [subscribe("orders", SELECTIVE, SQL92, 1)])
    known = filters.get("orders", "g")
    assert known is not None
    clock.tick(1)
    plain = StoreConfig(store_path_root_dir=directory / "plain")
    noted = StoreConfig(store_path_root_dir=directory / "noted", enable_consume_queue_ext=True)
    with (
        MessageStore.open(plain, clock=clock) as store,
        MessageStore.open(noted, clock=clock, bitmap_of=filters.bitmap_of) as with_bit_maps,
    ):
        fill(store)
        fill(with_bit_maps)
        by_tag = tag_filter(subscribe("orders", "Tag3"))
        works: dict[str, Callable[[], int]] = {
            "scan, everything handed out": partial(scan, store, EVERYTHING),
            "scan by tag": partial(scan, store, by_tag),
            "scan by expression": partial(scan, store, sql_filter(compile_sql(SELECTIVE))),
            "scan by tag, with extension": partial(scan, with_bit_maps, by_tag),
            "scan by bit map and expression": partial(scan, with_bit_maps, group_filter(known, filters)),
        }
        rates = alternate(works)
    return [Figure(name, rate, "messages/s", rate / rates["scan by tag"], "by tag") for name, rate in rates.items()]


def fill(store: MessageStore) -> None:
    host = pack_host("127.0.0.1", 10911)
    for number in range(MESSAGES):
        text = TEXT.replace("a\x0112", f"a\x01{number % 16}").replace("TagA", f"Tag{number % 16}")
        append(store, [[NewMessage("orders", 0, bytes(128), text.encode(), 1, host, host)]])


def scan(store: MessageStore, wanted: MessageFilter) -> int:
    offset = 0
    while offset < MESSAGES:
        found = store.read("orders", 0, offset, 32, matches=wanted.matches_entry, matches_record=wanted.matches_record)
        offset = found.next_begin_offset
    return MESSAGES


if __name__ == "__main__":
    print(table(run()))
