"""Appends to a store until it is killed, and says what it was promised: `python -m tests.support.store_writer …`.

Every line of output is one acknowledged message: its id. What an id stands for is computed, not transmitted, so a test
knows the bytes of every message that can exist.
"""

from __future__ import annotations

import argparse
import os
import random
from pathlib import Path
from typing import NamedTuple

from downrange.model.message_id import pack_host
from downrange.store.config import FlushDiskType, StoreConfig
from downrange.store.message_store import MessageStore
from downrange.store.new_message import NewMessage
from tests.support.stores import append_batch

HOST = pack_host("10.0.0.1", 10911)
TOPICS = ("orders", "payments", "%RETRY%billing", "SCHEDULE_TOPIC_XXXX")
QUEUES = 3
MOST_PER_APPEND = 24
_MOST_PER_GROUP = 4


class Written(NamedTuple):
    """The message that belongs to an id."""

    topic: str
    queue_id: int
    body: bytes
    properties: bytes


def message_of(number: int) -> Written:
    """Queue, size, tags and keys vary; the same number gives the same message in every process."""
    own = random.Random(number)
    topic, queue_id = own.choice(TOPICS), own.randrange(QUEUES)
    body = f"{number}:".encode() + own.randbytes(own.choice((0, 3, 50, 700, 3000)))
    properties = f"UNIQ_KEY\x01U{number}\x02KEYS\x01k{number} all\x02TAGS\x01T{number % 5}"
    if topic == TOPICS[3]:
        properties += "\x02DELAY\x012"
    return Written(topic, queue_id, body, properties.encode())


def number_of(body: bytes) -> int:
    return int(body.partition(b":")[0])


def config_of(root: Path, flush: FlushDiskType) -> StoreConfig:
    return StoreConfig(
        store_path_root_dir=root,
        mapped_file_size_commit_log=64 << 10,
        mapped_file_size_consume_queue=2000,
        max_hash_slot_num=50,
        max_index_num=300,
        flush_disk_type=flush,
    )


def append_some(store: MessageStore, number: int, chance: random.Random) -> tuple[int, int]:
    """Append a batch of messages from this id on, mostly of several queues and cut into groups.

    Return the next free id, and where the batch ends in the log.
    """
    groups = []
    stop = number + (1 if chance.random() < 0.5 else chance.randint(2, MOST_PER_APPEND))
    while number < stop:
        size = min(chance.randint(1, _MOST_PER_GROUP), stop - number)
        chosen = map(message_of, range(number, number + size))
        groups.append([NewMessage(*one, born_timestamp=1, born_host=HOST, store_host=HOST) for one in chosen])
        number += size
    results, refusal = append_batch(store, groups)
    assert refusal is None, refusal
    return number, results[-1].end_offset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("flush", type=FlushDiskType)
    parser.add_argument("first", type=int, help="id of the first message")
    options = parser.parse_args()
    store = MessageStore.open(config_of(options.root, options.flush), disk_use=lambda path: 0.1)
    number = options.first
    chosen = random.Random(number)
    while True:
        following, end = append_some(store, number, chosen)
        if options.flush is FlushDiskType.SYNC_FLUSH:
            assert store.flush_commit_log() >= end
        os.write(1, "".join(f"{one}\n" for one in range(number, following)).encode())
        number = following
        match chosen.randrange(40):  # what a broker's services do now and then
            case 0:
                store.write_pending()
                store.flush_queues(thorough=chosen.random() < 0.5)
            case 1:
                store.flush_commit_log()
            case 2 if store.needs_next_file:
                store.prepare_next_file()
            case 3:
                store.release_idle()


if __name__ == "__main__":
    main()
