"""A property text means one thing: every scanner, in Python and in C, finds what `decode_properties` finds.

The tests run as built, and once more in a process without the compiled module.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from downrange.broker.filtering import MessageFilter, sql_filter, tag_filter
from downrange.broker.waiting_pulls import WaitingPull, WaitingPulls
from downrange.client.consumer.messages import read_in_python, read_pulled
from downrange.compiled import steps
from downrange.model import properties as names
from downrange.model.hashing import tags_code
from downrange.model.message import MessageQueue, PhysicalOffset, QueueOffset, StoredMessage, TopicQueue
from downrange.model.message_id import HostPort, pack_host
from downrange.model.properties import decode_properties, find_in_bytes, find_property, find_tags_and_keys
from downrange.model.record import decode_records, encode_record, properties_of
from downrange.model.sql.expression import compile_sql
from downrange.model.subscription import subscribe
from downrange.protocol.command import Buffer
from downrange.spark.property_arrays import PropertyArrays, read_properties
from downrange.spark.record_arrays import RecordArrays, walk
from downrange.store.message_store import MessageStore
from tests.unit.store.small_store import open_store, put

TOPIC = "TopicTest"
HOST = HostPort("10.0.0.1", 10911)
LOOKED_UP = (names.TAGS, names.KEYS, names.UNIQ_KEY, "a", "é", "XTAGS", "TAG")

TRICKY = (
    "",
    "\x01",
    "\x02",
    "\x02\x02\x02",
    "TAGS\x01a",
    "TAGS\x01a\x02",
    "\x02TAGS\x01a\x02",
    "TAGS\x01a\x02TAGS\x01\x02",  # an empty value does not hide the one before
    "TAGS\x01a\x02TAGS\x01",
    "TAGS\x01a\x02TAGS\x01b\x02TAGS\x01\x02TAGS\x02",
    "TAGS\x01\x02TAGS\x01a",
    "TAGS\x01\x02",
    "TAGS",
    "TAGS\x02",
    "\x01a\x02TAGS\x01b",  # a value without a name
    "TAGS\x01a\x01b\x02KEYS\x01\x01\x02",  # values that hold \x01
    "a\x01TAGS\x01b\x02TAGS\x01a",
    "a\x01TAGS\x01b",
    "XTAGS\x01b\x02",
    "TAGS\x01a\x02XTAGS\x01b",
    "XTAGS\x01b\x02TAGSX\x01b\x02TAG\x01b",
    "KEYS\x01a b  c\x02UNIQ_KEY\x01u\x02TAGS\x01é",
    "KEYS\x01a\x02KEYS\x01\x02UNIQ_KEY\x01u\x02UNIQ_KEY\x01",
    "UNIQ_KEY\x01\x02KEYS\x01 ",
    "é\x01ü\x02TAGS\x01😀\x02é\x01ö",
)
texts = st.lists(
    st.sampled_from(["TAGS", "KEYS", "UNIQ_KEY", "XTAGS", "a", "b", "é", " ", "\x01", "\x01", "\x02", "\x02"]),
    max_size=14,
).map("".join)
many_texts = st.lists(texts, min_size=1, max_size=8)
FILTERS: tuple[tuple[MessageFilter, Callable[[dict[str, str]], bool]], ...] = (
    (tag_filter(subscribe(TOPIC, "a")), lambda found: tags_code(found.get("TAGS", "")) == tags_code("a")),
    (tag_filter(subscribe(TOPIC, "b || é")), lambda found: found.get("TAGS") in ("b", "é")),
    (sql_filter(compile_sql("TAGS = 'a'")), lambda found: found.get("TAGS") == "a"),
    (sql_filter(compile_sql("KEYS IS NULL AND XTAGS IS NOT NULL")), lambda f: "KEYS" not in f and "XTAGS" in f),
    (sql_filter(compile_sql("a IS NOT NULL OR b = 'a'")), lambda found: "a" in found or found.get("b") == "a"),
)


def record_of(text: str) -> bytes:
    message = StoredMessage(
        topic=TOPIC, queue_id=0, queue_offset=QueueOffset(0), physical_offset=PhysicalOffset(0), body=b"body",
        properties_text=text, sys_flag=0, flag=0, born_timestamp=1, born_host=HOST, store_timestamp=2, store_host=HOST,
        reconsume_times=0, prepared_transaction_offset=0, body_crc=0, store_size=0,
    )  # fmt: skip
    return encode_record(message, pack_host(*HOST), pack_host(*HOST))


def keys_of(found: dict[str, str]) -> list[str]:
    return [key for key in found.get(names.KEYS, "").split(" ") if key]


def checks_text(text: str) -> None:
    """One text: the functions of the model, and a consumer's message."""
    found = decode_properties(text)
    for name in LOOKED_UP:
        value = found.get(name)
        assert find_property(text, name) == value
        assert find_in_bytes(text.encode(), name.encode()) == (None if value is None else value.encode())
    assert find_tags_and_keys(text) == (found.get("TAGS"), found.get("UNIQ_KEY"), found.get("KEYS"))
    record = record_of(text)
    assert properties_of(record) == text
    queue = MessageQueue(TOPIC, "broker-a", 0)
    (read,) = read_pulled(record, queue, min_offset=0, max_offset=1)
    (in_python,) = read_in_python(record, queue, 0, 1, 0, "")
    for message in (read, in_python):
        assert message.properties == found | {names.MIN_OFFSET: "0", names.MAX_OFFSET: "1"}
        assert (message.tags, message.unique_key, message.keys) == (
            found.get("TAGS"), found.get("UNIQ_KEY"), keys_of(found)
        )  # fmt: skip


def checks_columns(many: Sequence[str]) -> None:
    """Spark: every property as a column, and all as a map."""
    data = b"".join(map(record_of, many))
    records = RecordArrays(np.frombuffer(data, np.uint8), walk(data))
    buffer = pa.py_buffer(data)
    expected = list(map(decode_properties, many))
    for read in (read_properties(records, buffer, LOOKED_UP, wants_map=True), PropertyArrays(records, buffer)):
        for name in LOOKED_UP:
            assert read.column(name).to_pylist() == [found.get(name) for found in expected]
        maps = read.all(pa.map_(pa.string(), pa.string())).to_pylist()
        assert [dict(one) for one in maps] == expected


def checks_store(root: Path, many: Sequence[str]) -> None:
    """Queue entries, index and pulls with a filter, of messages as they were appended and as they are replayed."""
    with open_store(root, mapped_file_size_commit_log=1 << 16) as store:
        for number, text in enumerate(many):
            put(store, b"%d" % number, properties=text.encode())
        checks_queue_and_index(store, many)
    shutil.rmtree(root / "consumequeue", ignore_errors=True)
    shutil.rmtree(root / "index", ignore_errors=True)
    with open_store(root, mapped_file_size_commit_log=1 << 16) as store:
        checks_queue_and_index(store, many)


def checks_queue_and_index(store: MessageStore, many: Sequence[str]) -> None:
    expected = list(map(decode_properties, many))
    entries = store.entries(TOPIC, 0, 0, len(many) + 1)
    assert [entry.tags_code for entry in entries] == [tags_code(found.get("TAGS", "")) for found in expected]
    by_key: dict[str, list[int]] = {}
    for entry, found in zip(entries, expected, strict=True):
        for key in {*keys_of(found), *([found["UNIQ_KEY"]] if "UNIQ_KEY" in found else [])}:
            by_key.setdefault(key, []).append(entry.physical_offset)
    words = {word for text in many for word in text.replace("\x01", " ").replace("\x02", " ").split(" ") if word}
    assert store.index is not None
    for word in words | set(by_key):
        indexed = store.index.query(TOPIC, word, 64, 0, 1 << 62).physical_offsets
        assert sorted(set(indexed)) == sorted(by_key.get(word, ())), word
    for wanted, is_wanted in FILTERS:
        right = [number for number, found in enumerate(expected) if is_wanted(found)]
        assert pulled(store, wanted, len(many)) == right


def pulled(store: MessageStore, wanted: MessageFilter, count: int) -> list[int]:
    numbers: list[int] = []
    offset = 0
    while offset < count:
        result = store.read(
            TOPIC, 0, offset, 32, matches=wanted.matches_entry, matches_record=wanted.matches_record
        )  # fmt: skip
        numbers += [int(message.body) for part in result.slices for message in decode_records(part)]
        offset = result.next_begin_offset
    return numbers


async def checks_waiting_pulls(many: Sequence[str]) -> None:
    """A pull that waits is woken by a message that it wants, and by no other."""
    waiting = WaitingPulls()
    for text in many:
        found = decode_properties(text)
        woken: list[int] = []

        def read(number: int, woken: list[int] = woken) -> list[Buffer]:
            woken.append(number)
            return []

        for number, (wanted, _) in enumerate(FILTERS):
            waiting.add(WaitingPull(TopicQueue(TOPIC, 0), 0, wanted, Mock(), partial(read, number)), 60)
        waiting.notify(TOPIC, 0, 0, partial(list, [text.encode()]))
        await asyncio.sleep(0)  # the end of the loop's turn, where pulls are woken
        await asyncio.sleep(0)
        assert woken == [number for number, (_, is_wanted) in enumerate(FILTERS) if is_wanted(found)], text
        waiting.notify_all()


def test_tricky_texts(tmp_path: Path) -> None:
    for text in TRICKY:
        checks_text(text)
    checks_columns(TRICKY)
    checks_store(tmp_path, TRICKY)
    asyncio.run(checks_waiting_pulls(TRICKY))


@given(texts)
@example("TAGS\x01a\x02TAGS\x01\x02")
def test_one_text(text: str) -> None:
    checks_text(text)


@given(many_texts)
def test_columns(many: list[str]) -> None:
    checks_columns(many)


@given(many_texts)
@settings(max_examples=25, deadline=None)
def test_queues_index_and_pulls(many: list[str]) -> None:
    with TemporaryDirectory() as root:
        checks_store(Path(root), many)


@given(many_texts)
@settings(max_examples=25)
def test_waiting_pulls(many: list[str]) -> None:
    asyncio.run(checks_waiting_pulls(many))


@pytest.mark.skipif(steps is None, reason="this is that process")
def test_the_same_without_the_compiled_module() -> None:
    pure = {**os.environ, "DOWNRANGE_PURE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=pure, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
