"""Flip one bit of a store anywhere: it opens or says why not, serves no wrong body, and `check` knows about it."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from downrange.model.errors import MQError
from downrange.model.message import QueueOffset, StoredMessage
from downrange.model.record import CorruptRecord, crc32, decode_record
from downrange.store.message_store import MessageStore
from downrange.store.queue.consume_queue import ENTRY
from tests.support.checked_store import checked
from tests.support.damage import CrashedStore, flip

TopicQueueOffset = tuple[str, int, int]
KINDS = ("commitlog", "consumequeue", "index", "checkpoint", "config")


def data_bytes(path: Path) -> list[int]:
    """Places worth flipping: everything up to the last byte that is not zero, and a little beyond."""
    data = path.read_bytes()
    return list(range(min(len(data), len(data.rstrip(b"\0")) + 24)))


def served(store: MessageStore) -> tuple[list[StoredMessage], list[str]]:
    """What every queue serves, and which of it is no message."""
    messages, refused = [], []
    for state in store.queues:
        offset = store.min_offset_of(state.topic, state.queue_id)
        while offset < store.max_offset_of(state.topic, state.queue_id):
            for physical_offset, size, _ in ENTRY.iter_unpack(state.queue.read(offset, 1)):
                record = store.commit_log.slice(physical_offset, size)
                try:
                    if record is not None:
                        messages.append(decode_record(record))
                except CorruptRecord as error:
                    refused.append(str(error))
            offset = QueueOffset(offset + 1)
    return messages, refused


def essence(crashed: CrashedStore, messages: list[StoredMessage]) -> dict[TopicQueueOffset, tuple[object, ...]]:
    """What a flip must not change unnoticed, by queue and number: the body has its checksum, tags stand in the queue,
    and keys in the index, unless a power cut means that it is built again from the log."""
    return {
        (message.topic, message.queue_id, message.queue_offset): (
            message.body,
            message.tags,
            None if crashed.plug_pulled else message.keys,
        )
        for message in messages
    }


def survive_flip(crashed: CrashedStore, kind: str, chance: random.Random) -> str:
    """Flip one bit of a copy, look at what becomes of it; return what happened."""
    root = crashed.copy()
    paths = [path for path in sorted(root.rglob("*")) if path.is_file() and path.relative_to(root).parts[0] == kind]
    path = chance.choice(paths)
    at, bit = chance.choice(data_bytes(path)), chance.randrange(8)
    flip(path, at, bit)
    what = f"bit {bit} of byte {at} of {path.relative_to(root)}"
    try:
        return _survive(crashed, root, what)
    finally:
        shutil.rmtree(root)


def _survive(crashed: CrashedStore, root: Path, what: str) -> str:
    before = essence(crashed, crashed.before)
    reported = not checked(root).is_clean
    assert reported  # at least that it was not stopped in order
    try:
        store = crashed.reopen(root)
    except MQError:
        return "refused"
    with store:
        messages, refused = served(store)
        assert refused == [] or not store.recovery.clean, what
        for message in messages:
            if message.physical_offset >= store.recovery.start_offset:  # what lies before was safe and is not read
                assert crc32(message.body) == message.body_crc, what
        found = essence(crashed, messages)
        cut = bool(store.recovery.warnings)
    report = checked(root)
    if not report.is_clean:
        return "reported"
    assert not refused, what
    if cut:
        assert found.items() <= before.items(), what
        return "cut"
    assert found == before, what
    return "repaired"
