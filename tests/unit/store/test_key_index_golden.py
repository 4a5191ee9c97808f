"""The same keys through our class give the very bytes that RocketMQ wrote, and the same lookups."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from downrange.model.message import TRANSACTION_MASK, SysFlag
from downrange.model.properties import KEYS, find_property
from downrange.store.files import OS_FILES
from downrange.store.index.key_index import KeyIndex
from tests.support.golden_store import files_under, unpack


@pytest.fixture(autouse=True)
def utc() -> Iterator[None]:
    """Index files are named by local time; the golden ones were written in UTC."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def millis_of(name: str) -> int:
    moment = datetime.strptime(name[:14], "%Y%m%d%H%M%S").replace(tzinfo=UTC)
    return int(moment.timestamp()) * 1000 + int(name[14:])


@pytest.mark.parametrize("name", ["clean", "ext"])
def test_the_same_keys_give_the_same_index_files(tmp_path: Path, name: str) -> None:
    golden = unpack(name, tmp_path)
    theirs = golden.files_under("index")
    creations = iter(sorted(theirs))
    index = KeyIndex(
        tmp_path / "ours",
        golden.setting("maxHashSlotNum"),
        golden.setting("maxIndexNum"),
        OS_FILES,
        lambda: millis_of(next(creations)),
    )
    index.load()
    for message in golden.records():
        if message.sys_flag & TRANSACTION_MASK != SysFlag.TRANSACTION_ROLLBACK:
            keys = find_property(message.properties_text, KEYS)
            keyed = message.topic, message.unique_key, keys, message.physical_offset
            index.put_keys([(*keyed, message.store_timestamp)])
    index.close()
    assert len(theirs) >= 2
    assert files_under(tmp_path / "ours") == theirs


@pytest.mark.parametrize("name", ["clean", "ext"])
def test_a_loaded_index_finds_what_the_genuine_broker_finds(tmp_path: Path, name: str) -> None:
    golden = unpack(name, tmp_path)
    slots, entries = golden.setting("maxHashSlotNum"), golden.setting("maxIndexNum")
    index = KeyIndex(golden.root / "index", slots, entries, OS_FILES, lambda: 0, writable=False)
    index.load()
    assert len(golden.manifest["keyLookups"]) > 30
    messages = {int(message.physical_offset): message for message in golden.records()}
    for row in golden.manifest["keyLookups"]:
        query = index.query(row["topic"], row["key"], 64, 0, 1 << 62)
        # The index knows hashes only; the genuine client compares the texts.
        found = {
            offset
            for offset in query.physical_offsets
            if row["key"] in (messages[offset].unique_key, *messages[offset].keys)
            and messages[offset].topic == row["topic"]
        }
        if row["uniqueKey"]:  # of several records with one id the client takes the one stored first
            found = {min(found, key=lambda offset: messages[offset].store_timestamp)}
        wanted = {hit["physicalOffset"] for hit in row["hits"]}
        assert found == wanted, row
    newest = max(messages)
    assert index.query("x", "y", 1, 0, 1).last_update_physical_offset <= newest
    index.close()
