"""What ten thousand topics cost: memory, descriptors, mappings, appends and starts, against ten topics.

    python -m bench.many_topics [--topics N] [--directory DIR]

First the whole broker, over the wire (many_topics_served.py). Then the store alone: messages go to random queues, in
runs of 64, by the way that a broker takes for plain sends. Each number of topics gets processes of its own, so that
its memory is its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import many_topics_served
from bench.report import Figure, table
from downrange.model.message_id import pack_host
from downrange.store.config import StoreConfig
from downrange.store.message_store import MessageStore
from downrange.store.new_message import NewMessage, PutMessageStatus
from downrange.store.run import PlainMessage, run_of

QUEUES = 4
MESSAGES = 200_000
FEW, MANY = 10, 10_000
_RUN = 64
_BODY = bytes(128)
HOST = pack_host("10.0.0.1", 10911)


def resident_bytes() -> int:
    """Memory of this process that is not a file's: pages of the mapped log belong to the page cache."""
    with open("/proc/self/smaps_rollup") as file:  # exact; the counters in "status" lag behind
        fields = dict(line.split(":", 1) for line in list(file)[1:])
    return int(fields["Anonymous"].split()[0]) * 1024


def mappings() -> int:
    with open("/proc/self/maps") as file:
        return sum(1 for _ in file)


def append_to_each(store: MessageStore, queues: list[tuple[str, int]]) -> None:
    for topic, queue_id in queues:
        assert store.append(_message(topic, queue_id, _BODY, 0)).status is PutMessageStatus.PUT_OK


def append_at_random(store: MessageStore, queues: list[tuple[str, int]], messages: int) -> float:
    """Appends a second of CPU time, finding the queues included."""
    chance = random.Random(1)
    seconds = 0.0
    states = store.queues.states
    for first in range(0, messages, _RUN):
        # Made in small numbers, so that the memory measured is the store's.
        chosen = [chance.choice(queues) for _ in range(_RUN)]
        texts = [_properties(number) for number in range(first, first + _RUN)]
        named = [
            # A topic that came from a socket is a text of its own.
            (topic.encode().decode(), queue_id, text.encode(), text)
            for (topic, queue_id), text in zip(chosen, texts, strict=True)
        ]
        started = time.process_time()
        run: list[PlainMessage] = []
        for topic, queue_id, properties, text in named:
            run.append((states[topic, queue_id], _BODY, properties, text, 1_700_000_000_000, 0, 0, 0))
        if not store.append_run(run_of(run), HOST, HOST, time.time_ns() // 1_000_000):
            append_to_each(store, chosen)  # the file of the log was full
        seconds += time.process_time() - started
    return messages / seconds


def _properties(number: int) -> str:
    return f"UNIQ_KEY\x0110CD4E0E2F2A49F681BC{number // 64:08X}{number % 65536:04X}\x02TAGS\x01TagA"


def _message(topic: str, queue_id: int, body: bytes, number: int) -> NewMessage:
    return NewMessage(topic, queue_id, body, _properties(number).encode(), 1_700_000_000_000, HOST, HOST)


def measure(directory: Path, topics: int, messages: int) -> dict[str, float]:
    """Runs in a process of its own."""
    config = StoreConfig(store_path_root_dir=directory)
    store = MessageStore.open(config)
    queues = [(f"topic-{number:05}", queue_id) for number in range(topics) for queue_id in range(QUEUES)]
    empty = resident_bytes()
    append_to_each(store, queues)
    once = resident_bytes() - empty
    rate = append_at_random(store, queues, messages)
    started = time.perf_counter()
    store.write_pending()
    written = time.perf_counter() - started
    figures = {
        "rate": rate,
        "write seconds": written,
        "bytes once": once,
        "bytes": resident_bytes() - empty,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": mappings(),
    }
    store.release_idle()
    figures["idle bytes"] = resident_bytes() - empty
    figures["idle descriptors"] = len(os.listdir("/proc/self/fd"))
    started = time.perf_counter()
    store.close()
    figures["close seconds"] = time.perf_counter() - started
    for name in ("open seconds", "open after kill seconds"):
        started = time.perf_counter()
        store = MessageStore.open(config)
        figures[name] = time.perf_counter() - started
        # What a dead process leaves: nothing is closed, only its lock goes.
        store._segments.close()
        store._lock.release()
    return figures


def measure_unused(directory: Path) -> dict[str, float]:
    """The memory of queues that are there and that nobody uses, in a process of its own."""
    empty = resident_bytes()
    store = MessageStore.open(StoreConfig(store_path_root_dir=directory))
    figures = {"unused bytes": float(resident_bytes() - empty)}
    store.close()
    return figures


def in_a_process(topics: int, messages: int, parent: Path | None) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="bench-topics-", dir=parent) as directory:
        command = [sys.executable, "-m", "bench.many_topics", "--measure", directory, "--topics", str(topics)]
        command += ["--messages", str(messages)]
        figures: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        command[command.index("--measure")] = "--measure-unused"
        figures |= json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return figures


def run(topics: int = MANY, messages: int = MESSAGES, parent: Path | None = None) -> list[Figure]:
    few, many = (in_a_process(count, messages, parent) for count in (FEW, topics))
    queues = topics * QUEUES
    name = f"{topics:,} topics of {QUEUES} queues"
    few_name = f"{FEW} topics"
    return [
        *many_topics_served.figures(FEW, topics),
        Figure(f"store: append to {FEW} topics", few["rate"], "/s"),
        Figure(f"store: append to {name}", many["rate"], "/s", many["rate"] / few["rate"], few_name),
        Figure("store: private memory for them, not used since the start", many["unused bytes"] / 1e6, "MB"),
        Figure("store: private memory for them, after one message to each", many["bytes once"] / 1e6, "MB"),
        Figure("store: private memory for them, all in use", many["bytes"] / 1e6, "MB"),
        Figure("store: private memory for them, idle again", many["idle bytes"] / 1e6, "MB"),
        Figure("store: private memory for an unused queue", many["unused bytes"] / queues, "B"),
        Figure("store: descriptors", many["descriptors"], "", many["descriptors"] / few["descriptors"], few_name),
        Figure("store: descriptors when idle", many["idle descriptors"], ""),
        Figure("store: mappings", many["mappings"], "", many["mappings"] / few["mappings"], few_name),
        Figure("store: write the entries of all queues", many["write seconds"], "s"),
        Figure("store: orderly stop, every queue synced", many["close seconds"], "s"),
        Figure("store: start after an orderly stop", many["open seconds"], "s"),
        Figure("store: start after kill -9", many["open after kill seconds"], "s"),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topics", type=int, default=MANY)
    parser.add_argument("--messages", type=int, default=MESSAGES)
    parser.add_argument("--directory", type=Path, help="where to put the files (default: the temporary directory)")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure-unused", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure_unused is not None:
        print(json.dumps(measure_unused(options.measure_unused)))
    elif options.measure is not None:
        print(json.dumps(measure(options.measure, options.topics, options.messages)))
    else:
        print(table(run(options.topics, options.messages, options.directory)))


if __name__ == "__main__":
    main()
