"""What a large store costs: the same work on an empty store and on one of 20 GiB.

    python -m bench big_store
    python -m bench.big_store [--gib N] [--directory DIR]

The log is filled through the store itself, with messages of 4 KiB in four queues, and closed in good order. Takes
minutes and as much disk, so it runs only when named. Filling and measuring are processes of their own. Times are CPU
time, but for start and stop.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.report import QUICK, Figure, NotMeasured, Row, table
from bench.storing import append
from downrange.model.message_id import pack_host
from downrange.store.config import StoreConfig
from downrange.store.message_store import MessageStore
from downrange.store.new_message import NewMessage

TOPIC = "BenchmarkTest"
QUEUES = 4
GIB = 1 << 30
MESSAGES = 200_000
BATCH = 64
HOST = pack_host("10.0.0.1", 10911)
_SPARE_BYTES = 4 * GIB
_OLD_BODY = bytes(range(256)) * 16


def private_bytes() -> int:
    """Memory of this process that is not a file's: pages of the mapped log belong to the page cache."""
    with open("/proc/self/smaps_rollup") as file:  # exact; the counters in "status" lag behind
        fields = dict(line.split(":", 1) for line in list(file)[1:])
    return int(fields["Anonymous"].split()[0]) * 1024


def mappings() -> int:
    with open("/proc/self/maps") as file:
        return sum(1 for _ in file)


def open_store(directory: Path) -> MessageStore:
    # The disk may be as full as it likes: nothing is to be removed or refused meanwhile.
    return MessageStore.open(StoreConfig(store_path_root_dir=directory), disk_use=lambda _: 0.1)


class Sender:
    """Makes batches of messages, each with an id that no other has."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.sent = 0

    def batch(self) -> list[list[NewMessage]]:
        return [[self._message(number % QUEUES)] for number in range(BATCH)]

    def _message(self, queue_id: int) -> NewMessage:
        self.sent += 1
        properties = f"UNIQ_KEY\x0110CD4E0E2F2A49F681BC{len(self._body):04X}{self.sent:08X}\x02TAGS\x01TagA"
        return NewMessage(TOPIC, queue_id, self._body, properties.encode(), 1_700_000_000_000, HOST, HOST)


def fill(directory: Path, size: int) -> None:
    store = open_store(directory)
    sender = Sender(_OLD_BODY)
    next_flush = GIB
    while store.max_offset < size:
        append(store, sender.batch())
        if store.needs_next_file:
            store.prepare_next_file()
        if store.max_offset > next_flush:
            next_flush += GIB
            store.flush_commit_log()
    store.close()


def measure(directory: Path) -> dict[str, float]:
    """Runs in a process of its own."""
    figures = {}
    started = time.perf_counter()
    store = open_store(directory)
    figures["start"] = time.perf_counter() - started
    figures["memory"] = private_bytes()
    assert store.recovery.records == 0, "a start after an orderly stop reads none of the log"
    gc.disable()
    sender = Sender(bytes(128))
    first = [store.max_offset_of(TOPIC, queue_id) for queue_id in range(QUEUES)]
    seconds = 0.0
    for _ in range(MESSAGES // BATCH):
        batch = sender.batch()
        moment = time.process_time()
        append(store, batch)
        seconds += time.process_time() - moment
        if store.needs_next_file:
            store.prepare_next_file()
    figures["append"] = MESSAGES / seconds
    found = 0
    moment = time.process_time()
    for queue_id, offset in enumerate(first):
        while (result := store.read(TOPIC, queue_id, offset, 32)).message_count:
            found += result.message_count
            offset = result.next_begin_offset
    figures["pull"] = found / (time.process_time() - moment)
    now = time.time_ns() // 1_000_000
    figures["by time"] = _each(lambda: store.offset_by_time(TOPIC, 0, now - 1000), 200)
    figures["by key"] = _each(lambda: store.query(TOPIC, "0" * 32, 32, 0, now), 200)
    figures["retention"] = _each(lambda: (store.file_times(), store.delete_dependents()), 20)
    figures["memory in use"] = private_bytes()
    figures["mappings"] = mappings()
    started = time.perf_counter()
    store.close()
    figures["stop"] = time.perf_counter() - started
    return figures


def _each(work: Callable[[], object], times: int) -> float:
    moment = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - moment) / times


def in_a_process(directory: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "bench.big_store", "--in", str(directory), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def run(gib: float = 0.25 if QUICK else 20, parent: Path | None = None) -> list[Row]:
    size = int(gib * GIB)
    name = f"{gib:g} GiB"
    with tempfile.TemporaryDirectory(prefix="bench-empty-", dir=parent) as empty_directory:
        if shutil.disk_usage(empty_directory).free < size + _SPARE_BYTES:
            return [NotMeasured(f"a store of {name}", "the disk has no room for it")]
        with tempfile.TemporaryDirectory(prefix="bench-big-", dir=parent) as big_directory:
            in_a_process(Path(big_directory), "--fill", str(size))
            empty, big = (json.loads(in_a_process(Path(directory))) for directory in (empty_directory, big_directory))
    rows: list[Row] = []
    for key, title, unit, factor in (
        ("append", "append of 128 B", "/s", 1.0),
        ("pull", "read of what is recent, 32 at once", "/s", 1.0),
        ("start", "start after an orderly stop", "ms", 1e3),
        ("stop", "orderly stop", "ms", 1e3),
        ("memory", "private memory of the process after the start", "MB", 1e-6),
        ("memory in use", "the same after these messages", "MB", 1e-6),
        ("mappings", "mappings", "", 1.0),
        ("by time", "find an offset by time", "ms", 1e3),
        ("by key", "look for a key that nobody has", "ms", 1e3),
        ("retention", "look for files that expired", "ms", 1e3),
    ):
        rows.append(Figure(f"{title}, empty store", empty[key] * factor, unit))
        ratio = big[key] / empty[key] if empty[key] else None
        rows.append(Figure(f"{title}, {name}", big[key] * factor, unit, ratio, "empty store" if ratio else ""))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=20)
    parser.add_argument("--directory", type=Path, help="where to put the files (default: the temporary directory)")
    parser.add_argument("--in", dest="store", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--fill", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.store is None:
        print(table(run(options.gib, options.directory)))
    elif options.fill is not None:
        fill(options.store, options.fill)
    else:
        print(json.dumps(measure(options.store)))


if __name__ == "__main__":
    main()
