"""A batch is stored by the fast way of plain messages where it can be; both ways leave the same bytes behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from downrange.clock import ManualClock
from downrange.model.message_id import pack_host
from downrange.store.config import StoreConfig
from downrange.store.message_appender import MessageAppender
from downrange.store.message_store import MessageStore
from downrange.store.new_message import AppendResult, BatchUnit, NewMessage, PutMessageStatus
from tests.support.store_files import files_of

HOST = pack_host("10.0.0.1", 10911)
HOST_V6 = pack_host("fe80::1", 10911)
UNITS = [
    BatchUnit(0, b"", b""),
    BatchUnit(7, b"one", b"TAGS\x01A\x02KEYS\x01k1 k2\x02UNIQ_KEY\x01U1\x02"),
    BatchUnit(0, b"x" * 3000, "KEYS\x01größe\x02colour\x01blue".encode()),
    BatchUnit(0, b"four", b"TAGS\x01B\x02"),
]


def written(root: Path, born_host: bytes, shared: bytes) -> tuple[list[AppendResult], dict[str, bytes]]:
    clock = ManualClock(1_700_000_000_000)
    config = StoreConfig(
        store_path_root_dir=root, mapped_file_size_commit_log=64 * 1024, max_hash_slot_num=100, max_index_num=400
    )
    store = MessageStore.open(config, clock=clock)
    results = []
    for number in range(12):  # over the end of several files
        message = NewMessage("orders", number % 3, b"", shared, 1_600_000_000_000, born_host, HOST, 0, 1, 2)
        results.append(store.append_batch(message, UNITS * 2))
    store.close()
    return results, files_of(root)


@pytest.mark.parametrize("born_host", [HOST, HOST_V6], ids=["IPv4", "IPv6"])
@pytest.mark.parametrize("shared", [b"", b"CLUSTER\x01c\x02WAIT\x01true"])
def test_both_ways_store_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, born_host: bytes, shared: bytes
) -> None:
    fast_results, fast = written(tmp_path / "fast", born_host, shared)
    monkeypatch.setattr(MessageAppender, "_append_as_run", lambda *arguments: None)
    slow_results, slow = written(tmp_path / "slow", born_host, shared)
    assert fast_results == slow_results
    assert all(result.status is PutMessageStatus.PUT_OK for result in fast_results)
    assert len(fast) >= 6  # two files of the log, three queues, an index
    assert fast == slow


def test_the_fast_way_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    run = MessageAppender.append_run

    def watched(self: MessageAppender, *arguments: object) -> object:
        is_stored = run(self, *arguments)  # type: ignore[arg-type]
        taken.append(is_stored)
        return is_stored

    monkeypatch.setattr(MessageAppender, "append_run", watched)
    written(tmp_path, HOST, b"")
    assert taken.count(True) >= 10
    assert False in taken  # at the end of a file the ordinary way goes on
