"""How fast the store is, in ratios to what the same machine does at the same moment.

    python -m bench.store [--records N] [--directory DIR]

Appends are compared with plain `write` calls of the same bytes to one file, reads with appends. Absolute numbers say
more about the machine than about us.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.quiet import touch_memory
from bench.report import Figure, table
from bench.storing import append
from downrange.model.message_id import pack_host
from downrange.store.config import StoreConfig
from downrange.store.message_store import MessageStore
from downrange.store.new_message import NewMessage

TOPIC = "BenchmarkTest"
QUEUES = 4
HOST = pack_host("10.0.0.1", 10911)
GIBIBYTE = 1 << 30
CHUNK = 256


def message(body: bytes, number: int) -> NewMessage:
    properties = (
        f"UNIQ_KEY\x0110CD4E0E2F2A49F681BC{number // 64:08X}{number % 65536:04X}\x02WAIT\x01true\x02TAGS\x01TagA"
    )
    return NewMessage(TOPIC, number % QUEUES, body, properties.encode(), 1_700_000_000_000, HOST, HOST)


@contextmanager
def fresh_directory(parent: Path | None) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="bench-store-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def timed(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def append_each(store: MessageStore, messages: list[NewMessage]) -> None:
    for one in messages:
        append(store, [[one]])


def append_batches(store: MessageStore, batches: list[list[NewMessage]]) -> None:
    """Each batch is one group, as that of a producer."""
    for batch in batches:
        append(store, [batch])


def read_all(store: MessageStore, queue_id: int) -> int:
    found = offset = 0
    while True:
        result = store.read(TOPIC, queue_id, offset, 32)
        if not result.message_count:
            return found
        found += result.message_count
        offset = result.next_begin_offset


def write_all(path: Path, data: bytes, count: int) -> None:
    with path.open("wb", buffering=0) as stream:
        for _ in range(count):
            stream.write(data)


def bench_size(size: int, count: int, parent: Path | None) -> list[Figure]:
    body = os.urandom(size)
    append_seconds = batch_seconds = 0.0
    with fresh_directory(parent) as directory, MessageStore.open(StoreConfig(store_path_root_dir=directory)) as store:
        # In chunks, so that messages are as fresh in the processor's cache as those that a socket just delivered.
        for start in range(0, count, CHUNK):
            messages = [message(body, number) for number in range(start, start + CHUNK)]
            append_seconds += timed(lambda messages=messages: append_each(store, messages))  # type: ignore[misc]
        record_size = store.max_offset // count
        assert store.max_offset_of(TOPIC, 0) == count // QUEUES
        for start in range(count, 2 * count, CHUNK):
            batches = [
                [message(body, QUEUES * number) for number in range(first, first + 32)]
                for first in range(start, start + CHUNK, 32)
            ]
            batch_seconds += timed(lambda batches=batches: append_batches(store, batches))  # type: ignore[misc]
        assert store.max_offset_of(TOPIC, 0) == count // QUEUES + count
        read = 0
        read_seconds = 0.0
        for queue_id in range(1, QUEUES):
            read_seconds += timed(lambda queue_id=queue_id: read_all(store, queue_id))  # type: ignore[misc]
            read += store.max_offset_of(TOPIC, queue_id)
        write_seconds = timed(lambda: write_all(directory / "plain", b"x" * record_size, count))
    name = f"{size} B"
    appends, in_batches, reads = count / append_seconds, count / batch_seconds, read / read_seconds
    return [
        Figure(f"plain write, {name}", count / write_seconds, "records/s"),
        Figure(f"append, {name}", appends, "records/s", write_seconds / append_seconds, "plain write"),
        Figure(f"append in batches of 32, {name}", in_batches, "records/s", in_batches / appends, "append"),
        Figure(f"read in batches of 32, {name}", reads, "records/s", reads / appends, "append"),
    ]


def bench_recovery(parent: Path | None, total: int = GIBIBYTE) -> list[Figure]:
    """A log of 1 KiB messages, the process gone without a word; then again, as after a power cut."""
    body = os.urandom(1024)
    rows = []
    with fresh_directory(parent) as directory:
        config = StoreConfig(store_path_root_dir=directory)
        store = MessageStore.open(config)
        count = 0
        while store.max_offset < total - 4096:
            append(store, [[message(body, count)]])
            count += 1
        store.write_pending()
        # What a dead process leaves: nothing is closed, only its lock goes.
        store._segments.close()
        store._lock.release()
        for name, prepare in (
            ("recovery after kill -9", lambda: None),
            ("recovery after a power cut", lambda: (directory / "abort").write_text("")),
        ):
            prepare()
            began = time.perf_counter()
            recovered = MessageStore.open(config)
            seconds = time.perf_counter() - began
            assert recovered.recovery.records == count, recovered.recovery
            recovered._segments.close()
            recovered._lock.release()
            rows.append(Figure(f"{name}, {total >> 20} MiB of 1 KiB messages", seconds, "s"))
    return rows


def run(count: int = 200_000, parent: Path | None = None, recovery_bytes: int = GIBIBYTE) -> list[Figure]:
    count -= count % CHUNK
    touch_memory(GIBIBYTE, parent)
    gc.collect()
    gc.disable()
    try:
        rows = bench_size(128, count, parent) + bench_size(1024, count, parent)
        if recovery_bytes:
            rows += bench_recovery(parent, recovery_bytes)
    finally:
        gc.enable()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--directory", type=Path, help="where to put the files (default: the temporary directory)")
    parser.add_argument("--recovery-mib", type=int, default=1024, help="0 leaves recovery out")
    options = parser.parse_args()
    print(table(run(options.records, options.directory, options.recovery_mib << 20)))


if __name__ == "__main__":
    main()
