"""`make bench`: every benchmark but the longest; tables, bench/results/latest.* and pictures.

python -m bench                   all of them
python -m bench send peers        those named; latest.* are left alone
QUICK=1 python -m bench           a short run that shows that all of them work
python -m bench failover --help   one of them with options of its own
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from bench import machine, plots
from bench.report import QUICK, Figure, NotMeasured, Row
from bench.results import RESULTS, Benchmark, Run, compact_table

ALL: Final = (
    "send", "pull", "pop", "latency", "peers", "start_up", "connections", "many_topics", "delay", "timer",
    "transactions", "requests", "request_path",
    "grpc", "replication", "tls", "accounts", "sql_filter", "producer", "consumer", "lite_pull",
    "spark_archive", "spark_lake", "spark_read", "spark_write",
    "codec", "namesrv", "store", "key_index",
)  # fmt: skip
ON_REQUEST: Final = ("failover", "big_store", "spark_growth")
"""Take ten minutes, or 20 GiB of disk: run only when named."""
LONGEST_SECONDS: Final = 600.0
"""For one benchmark. All of them together take less than twenty minutes."""


def main() -> None:
    names = sys.argv[1:] or ALL
    if len(names) > 1 and names[0] in ON_REQUEST and names[1].startswith("-"):
        importlib.import_module(f"bench.{names[0]}").main(names[1:])
        return
    for name in names:
        if name not in (*ALL, *ON_REQUEST):
            sys.exit(f"bench: there is no benchmark {name}; there are {', '.join((*ALL, *ON_REQUEST))}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # servers end with us
    machine.adopt_orphans()
    run = Run(datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), machine.describe(), QUICK)
    for name in names:
        done = measure(name)
        run.benchmarks.append(done)
        print(f"\n## {name} ({done.seconds:.0f} s)\n\n{compact_table(done.rows)}", flush=True)
    if len(sys.argv) == 1:
        run.write()
        print(f"\n{RESULTS / 'latest.md'} written")
        for line in plots.draw(run, RESULTS):
            print(line)
    missing = [f"{one.name}: {row.name}" for one in run.benchmarks for row in one.rows if isinstance(row, NotMeasured)]
    if missing:
        print(f"\nnot measured: {'; '.join(missing)}")


def measure(name: str) -> Benchmark:
    """One benchmark in a process of its own, so that none finds the memory, the threads or the ruins of another."""
    before, started = machine.Usage.now(), time.monotonic()
    rows = _rows(name)
    seconds = time.monotonic() - started
    machine.reap(10)
    return Benchmark(name, rows, seconds, machine.Usage.now().others_since(before, seconds))


def _rows(name: str) -> list[Row]:
    if importlib.util.find_spec(f"bench.{name}") is None:
        return [NotMeasured(name, "this benchmark is not there")]
    longest = None if name in ON_REQUEST else LONGEST_SECONDS
    # Whatever becomes of the process, its files go with this directory.
    with tempfile.TemporaryDirectory(prefix="bench-") as directory, tempfile.TemporaryFile("w+") as errors:
        written = Path(directory) / "rows.json"
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.one", name, written],
            stdout=None if name in ON_REQUEST else subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, "TMPDIR": directory},
            start_new_session=True,  # when it takes too long, its servers end with it
        )
        try:
            code = process.wait(longest)
        except subprocess.TimeoutExpired:
            return [NotMeasured(name, f"took longer than {longest:g} s")]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or [f"exit code {code}"])[-1]
            return [NotMeasured(name, f"failed: {last}".replace("|", "/"))]
        found = json.loads(written.read_text())
        return [Figure(*fields) if is_figure else NotMeasured(*fields) for is_figure, *fields in found]


if __name__ == "__main__":
    main()
