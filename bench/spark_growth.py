"""How archive and scan grow: with 1 and 2 cores, 1 and 16 million messages, 4 and 4,000 queues.

    python -m bench spark_growth
    python -m bench spark_growth --directory DIR [--fill] [--millions 1 16] [--queues 4 4000] [--cores 1 2]

Messages have 100 bytes, half of them random, and are read from the store's files. Each case is a process of its own
with a Spark session of its own, bound with Java and all workers to that many cores. The log was read once into the page
cache, and a small archive has started the workers. Of two scans the second counts: during the first one Java compiles.

Takes ten minutes and 10 GiB of disk, so it runs only when named. With a directory the stores are kept there: make them
with --fill, then measure one case after another.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from bench.big_store import open_store
from bench.report import QUICK, Figure, table
from bench.storing import append
from downrange.model.message_id import pack_host
from downrange.store.new_message import NewMessage

TOPIC: Final = "growth"
WARM_UP: Final = "warm-up"
SCANNED: Final = (
    "topic string, broker string, queue_id int, queue_offset long, tags string, body binary, store_time timestamp"
)
BODY_BYTES: Final = 100
BATCH: Final = 1000
FLUSHED_EVERY: Final = 1_000_000
HOST: Final = pack_host("10.0.0.1", 10911)


def run() -> Iterator[Figure]:
    yield from measured([0.05] if QUICK else [1, 16], [4, 400] if QUICK else [4, 4000], [1, 2], None)


def measured(
    millions: Sequence[float], queues: Sequence[int], cores: Sequence[int], directory: Path | None
) -> Iterator[Figure]:
    for count in (int(number * 1_000_000) for number in millions):
        for number in queues:
            with tempfile.TemporaryDirectory(prefix="downrange-growth-") as path:
                place = filled(directory or Path(path), count, number)
                for used in cores:
                    yield from case(place, count, number, used)


def filled(directory: Path, count: int, queues: int) -> Path:
    """The directory of the store with so many messages and queues below `directory`; the store is made if missing."""
    place = directory / f"growth-{count}-{queues}"
    if not place.is_dir():
        with tempfile.TemporaryDirectory(prefix="filling-", dir=directory) as path:
            fill(Path(path) / "store", count, queues)
            place.mkdir()
            (Path(path) / "store").rename(place / "store")
    return place


def fill(directory: Path, count: int, queues: int) -> None:
    """A closed store with these messages, spread evenly over the queues, and a small topic to warm up with."""
    chance = random.Random(count)
    store = open_store(directory)
    for topic, wanted in ((WARM_UP, 10_000), (TOPIC, count)):
        for first in range(0, wanted, BATCH):
            append(store, ([_message(topic, number, queues, chance)] for number in range(first, first + BATCH)))
            if store.needs_next_file:
                store.prepare_next_file()
            if first % FLUSHED_EVERY == 0:
                store.flush_commit_log()
    store.close()


def _message(topic: str, number: int, queues: int, chance: random.Random) -> NewMessage:
    body = chance.randbytes(BODY_BYTES // 2).hex().encode()
    properties = f"UNIQ_KEY\x0110CD4E0E2F2A49F681BC{number:012X}\x02TAGS\x01tag{number % 5}\x02KEYS\x01order-{number}"
    return NewMessage(topic, number % queues, body, properties.encode(), 1_700_000_000_000, HOST, HOST)


def case(directory: Path, count: int, queues: int, cores: int) -> Iterator[Figure]:
    command = [sys.executable, "-m", "bench.spark_growth", "--case", str(directory), str(count), str(cores)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    name = f"{count / 1e6:g} M messages, {queues} queues, {cores} cores"
    for what in ("archive", "scan"):
        rate = count / found[what]
        yield Figure(f"{what}, {name}", rate, "rows/s")
        yield Figure(f"{what}, {name}, a core", rate / cores, "rows/s")
    yield Figure(f"plan, {name}", found["plan"] * 1000, "ms")
    yield Figure(f"slowest commit, {name}", found["commit"] * 1000, "ms")
    yield Figure(f"memory of driver and JVM, {name}", found["memory"] / 2**20, "MiB")


# --- in a process of its own ------------------------------------------------------------------------------------------


def work(directory: Path, count: int, cores: int) -> dict[str, float]:
    """Seconds of archive, scan, planning and the slowest commit, and the most memory in bytes."""
    import downrange.spark
    from downrange.spark.lake.log import DeltaLog
    from downrange.spark.pipelines.archive import archive

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    commits = _timed(DeltaLog, "commit")
    spark = downrange.spark.session("growth", master=f"local[{cores}]", log_level="ERROR")
    root = str(directory / "store")
    _read_once(directory / "store" / "commitlog")
    with tempfile.TemporaryDirectory(dir=directory) as lakes:
        warm_up = {"storePath": root, "subscribe": WARM_UP, "minPartitions": str(cores)}  # every worker starts
        archive(spark, Path(lakes) / "warm-up", warm_up)
        commits.clear()
        options = {"storePath": root, "subscribe": TOPIC}
        began = time.perf_counter()
        done = archive(spark, Path(lakes) / "lake", options)
        archived = time.perf_counter() - began
        assert done.messages == count, done
    for _ in range(2):
        began = time.perf_counter()
        frame = spark.read.format("rocketmq").schema(SCANNED).options(**options).load()
        partitions = frame.rdd.getNumPartitions()
        planned = time.perf_counter() - began
        assert partitions > 0
        began = time.perf_counter()
        frame.write.format("noop").mode("overwrite").save()
        scanned = time.perf_counter() - began
    memory = _most_memory()
    spark.stop()
    return {"archive": archived, "scan": scanned, "plan": planned, "commit": max(commits), "memory": memory}


def _read_once(directory: Path) -> None:
    for path in sorted(directory.iterdir()):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def _timed(owner: Any, name: str) -> list[float]:
    """Seconds of each call of a method from now on."""
    seconds: list[float] = []
    method: Callable[..., Any] = getattr(owner, name)

    def timed(*given: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*given, **named)
        finally:
            seconds.append(time.perf_counter() - began)

    setattr(owner, name, timed)
    return seconds


def _most_memory() -> float:
    """The most that this process and its JVM had in memory, in bytes."""
    total = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                status = dict(line.split(":", 1) for line in (entry / "status").read_text().splitlines() if ":" in line)
            except OSError:
                continue
            if status["Name"].strip() == "java" and _is_ours(int(entry.name)):
                total += int(status["VmHWM"].split()[0]) * 1024
    return float(total)


def _is_ours(process: int) -> bool:
    while process > 1:
        if process == os.getpid():
            return True
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return False


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["--case"]:
        directory, count, cores = arguments[1:]
        print(json.dumps(work(Path(directory), int(count), int(cores))))
        return
    parser = argparse.ArgumentParser(prog="python -m bench.spark_growth", description="How archive and scan grow.")
    parser.add_argument("--millions", type=float, nargs="+", default=[1, 16], help="millions of messages")
    parser.add_argument("--queues", type=int, nargs="+", default=[4, 4000])
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--directory", type=Path, help="where stores are kept for the next run")
    parser.add_argument("--fill", action="store_true", help="only make the stores")
    chosen = parser.parse_args(arguments)
    if chosen.fill:
        if chosen.directory is None:
            parser.error("--fill needs a --directory")
        for count in chosen.millions:
            for queues in chosen.queues:
                print(filled(chosen.directory, int(count * 1_000_000), queues), flush=True)
        return
    for figure in measured(chosen.millions, chosen.queues, chosen.cores, chosen.directory):  # as they come
        print(table([figure]).splitlines()[-1], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
