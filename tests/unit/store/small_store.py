"""A store with small files on a clock that stands still, and messages for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from downrange.clock import ManualClock
from downrange.model.message import StoredMessage
from downrange.model.message_id import pack_host
from downrange.model.record import decode_records
from downrange.store.config import StoreConfig
from downrange.store.files import OsFiles
from downrange.store.message_store import MessageStore
from downrange.store.new_message import AppendResult, NewMessage, PutMessageStatus
from downrange.store.new_messages import NewMessages, Place
from downrange.store.retention import Retention
from tests.support.stores import append

BORN_HOST = pack_host("10.1.2.3", 50000)
STORE_HOST = pack_host("10.9.8.7", 10911)
NOW = 1_794_727_122_803


class FailingFiles(OsFiles):
    """The real files, except that what is named in `fail` fails with the given error number."""

    def __init__(self) -> None:
        self.fail: dict[str, int] = {}
        self.syncs = 0

    def _maybe_fail(self, what: str) -> None:
        if what in self.fail:
            raise OSError(self.fail[what], os.strerror(self.fail[what]))

    def create(self, path: Path | str, size: int) -> None:
        self._maybe_fail("create")
        super().create(path, size)

    def reserve(self, descriptor: int, position: int, length: int) -> None:
        self._maybe_fail("reserve")
        super().reserve(descriptor, position, length)

    def write_at(self, descriptor: int, data: bytes | bytearray | memoryview, position: int) -> None:
        self._maybe_fail("write_at")
        super().write_at(descriptor, data, position)

    def sync(self, descriptor: int) -> None:
        self._maybe_fail("sync")
        self.syncs += 1
        super().sync(descriptor)


def small_config(root: Path, **changes: Any) -> StoreConfig:
    values: dict[str, Any] = {
        "store_path_root_dir": root,
        "mapped_file_size_commit_log": 4096,
        "mapped_file_size_consume_queue": 1000,
        "max_hash_slot_num": 100,
        "max_index_num": 200,
    }
    return StoreConfig(**(values | changes))


def open_store(root: Path, **changes: Any) -> MessageStore:
    """Settings and arguments of the store in one; the clock stands still unless one is given."""
    options: dict[str, Any] = {"disk_use": lambda path: 0.1, "clock": ManualClock(NOW)}
    for name in ("clock", "files", "disk_use", "read_only", "bitmap_of"):
        if name in changes:
            options[name] = changes.pop(name)
    return MessageStore.open(small_config(root, **changes), **options)


def new_message(
    body: bytes = b"hello",
    topic: str = "TopicTest",
    queue_id: int = 0,
    properties: dict[str, str] | bytes = b"",
    **changes: Any,
) -> NewMessage:
    if isinstance(properties, dict):
        properties = "\x02".join(f"{name}\x01{value}" for name, value in properties.items()).encode()
    values: dict[str, Any] = {
        "born_timestamp": 1_700_000_000_000,
        "born_host": BORN_HOST,
        "store_host": STORE_HOST,
    }
    return NewMessage(topic, queue_id, body, properties, **(values | changes))


def put(store: MessageStore, *args: Any, **changes: Any) -> AppendResult:
    result = append(store, new_message(*args, **changes))
    assert result.status is PutMessageStatus.PUT_OK, result
    return result


def read_all(store: MessageStore, topic: str = "TopicTest", queue_id: int = 0) -> list[StoredMessage]:
    """Every message of a queue, read in as many steps as it takes."""
    messages: list[StoredMessage] = []
    offset = store.min_offset_of(topic, queue_id)
    while offset < store.max_offset_of(topic, queue_id):
        result = store.read(topic, queue_id, offset, 32)
        for part in result.slices:
            messages += decode_records(part)
        assert result.next_begin_offset > offset
        offset = result.next_begin_offset
    return messages


def bodies(store: MessageStore, topic: str = "TopicTest", queue_id: int = 0) -> list[bytes]:
    return [message.body for message in read_all(store, topic, queue_id)]


def kill(store: MessageStore) -> None:
    """What is left when the process dies: files as they are, nothing flushed or closed in order, the lock gone."""
    store._segments.close()
    store._lock.release()


def pull_the_plug(store: MessageStore) -> None:
    """As `kill`, but the next start cannot know that the machine did not stop."""
    kill(store)
    (store.config.store_path_root_dir / "abort").write_bytes(b"")


def clean_up_round(retention: Retention, store: MessageStore, now: int) -> tuple[list[Path], int]:
    """One whole round of the retention: the log files that went, and how many files pointed at them."""
    _, taken = retention.judge(now)
    store.remove_files(taken)
    return taken, retention.clean_dependents()


def dispatched(store: MessageStore) -> list[Place]:
    """Let queues and index follow the log; the places of the messages that they got."""
    told: list[NewMessages] = []
    store.dispatch_pending(told.append)
    return [place for messages in told for place in messages.places]
