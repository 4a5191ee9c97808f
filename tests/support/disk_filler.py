"""Fills the disk under a store, makes room again, and says what happened: `python -m tests.support.disk_filler DIR`.

A process of its own: touching a mapped page for which a full disk has no block would kill it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from downrange.model.message_id import pack_host
from downrange.store.config import StoreConfig
from downrange.store.errors import StoreError
from downrange.store.message_store import MessageStore
from downrange.store.new_message import NewMessage, PutMessageStatus
from tests.support.stores import append, append_batch

HOST = pack_host("10.0.0.1", 10911)
QUEUES = 50
BATCH = 100
MOST = 200_000


def message(number: int) -> NewMessage:
    properties = f"UNIQ_KEY\x01U{number}\x02KEYS\x01k{number}".encode()
    return NewMessage("T", number % QUEUES, b"%d" % number + bytes(500), properties, 1, HOST, HOST)


def fill(store: MessageStore, first: int) -> tuple[int, str]:
    """Append batches over all queues until the store says no; the number of messages it has then, and its reason."""
    number = first
    while number < MOST:
        results, refusal = append_batch(store, [[message(number + more)] for more in range(BATCH)])
        number += len(results)
        if refusal is not None:
            assert refusal.status is PutMessageStatus.SERVICE_NOT_AVAILABLE, refusal
            return number, refusal.reason
        if number % 1000 < BATCH:
            try:  # what the broker's services do
                store.flush_commit_log()
                store.write_pending()
                store.flush_queues(thorough=number % 3000 < BATCH)
                if store.needs_next_file:
                    store.prepare_next_file()
            except StoreError:
                continue
    raise AssertionError("the disk does not get full")


def readable(store: MessageStore) -> int:
    found = 0
    for queue_id in range(QUEUES):
        offset = 0
        while offset < store.max_offset_of("T", queue_id):
            result = store.read("T", queue_id, offset, 32)
            found += result.message_count
            offset = result.next_begin_offset
    return found


def main(directory: Path) -> None:
    ballast = [directory / "ballast-1", directory / "ballast-2"]
    for path in ballast:
        path.write_bytes(os.urandom(6 << 20))
    config = StoreConfig(
        store_path_root_dir=directory / "store",
        mapped_file_size_commit_log=4 << 20,
        mapped_file_size_consume_queue=20_000,
        max_hash_slot_num=1000,
        max_index_num=5000,
    )
    store = MessageStore.open(config, disk_use=lambda path: 0.5)
    rounds = []
    count = 0
    for path in ballast:
        count, reason = fill(store, count)
        rounds.append({"count": count, "reason": reason, "readable": readable(store)})
        path.unlink()
        if "dispatch" in store.refusals:
            store.dispatch_pending()
        if "queues" in store.refusals:
            store.write_pending()
        assert store.is_writable, store.refusals
    assert append(store, message(count)).status is PutMessageStatus.PUT_OK
    rounds.append({"count": count + 1, "reason": "", "readable": readable(store)})
    store.close()
    print(json.dumps(rounds))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
