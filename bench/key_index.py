"""Puts and lookups a second of the key index, among a million keys.

    python -m bench.key_index

`unique ids` are what producers make: 32 hexadecimal digits that end in a counter, eight producers, a few ids each per
millisecond. `random keys` share nothing. CPU time, so that other work on the machine counts less.
"""

from __future__ import annotations

import hashlib
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.report import Figure, table
from downrange.store.files import OS_FILES
from downrange.store.index.key_index import KeyIndex

KEYS = 1_000_000
LOOKUPS = 50_000
PRODUCERS = 8
PORTION = 1_000

KeyOf = Callable[[int], str | None]


def unique_id(n: int) -> str:
    producer, millis, counter = n % PRODUCERS, n // 100, n // PRODUCERS & 0xFFFF
    return f"7F000001{1000 + producer:04X}4E0E2F2A{millis:08X}{counter:04X}"


def random_key(n: int) -> str:
    return hashlib.blake2b(n.to_bytes(8, "big"), digest_size=12).hexdigest()


def no_key(n: int) -> None:
    return None


def run(count: int = KEYS) -> list[Figure]:
    figures = []
    for name, id_of, key_of in (
        ("unique id", unique_id, no_key),
        ("random key", no_key, random_key),
        ("unique id and random key", unique_id, random_key),
    ):
        with tempfile.TemporaryDirectory() as directory:
            index = KeyIndex(Path(directory), 5_000_000, 20_000_000, OS_FILES, lambda: 1_700_000_000_000)
            figures.append(Figure(f"put by {name}", count / put_all(index, count, id_of, key_of), "messages/s"))
            asked = [random.randrange(count) for _ in range(LOOKUPS)]
            keys = [(n, id_of(n) or key_of(n) or "") for n in asked]
            figures.append(Figure(f"look up by {name}", LOOKUPS / look_up(index, keys), "lookups/s"))
            index.destroy()
    return figures


def put_all(index: KeyIndex, count: int, id_of: KeyOf, key_of: KeyOf) -> float:
    """Seconds for putting `count` messages. Their keys are made in small portions, as fresh as a broker gets them."""
    seconds = 0.0
    put = index.put_keys
    for first in range(0, count, PORTION):
        portion = [(id_of(n), key_of(n), n * 300, 1_700_000_000_000 + n // 100) for n in range(first, first + PORTION)]
        begin = time.process_time()
        for unique_key, keys, physical_offset, store_timestamp in portion:
            put([("TopicTest", unique_key, keys, physical_offset, store_timestamp)])
        seconds += time.process_time() - begin
    return seconds


def look_up(index: KeyIndex, keys: list[tuple[int, str]]) -> float:
    """Seconds for finding all `keys`; each must be there."""
    begin = time.process_time()
    for n, key in keys:
        assert n * 300 in index.query("TopicTest", key, 32, 0, 1 << 60).physical_offsets
    return time.process_time() - begin


if __name__ == "__main__":
    print(table(run()))
