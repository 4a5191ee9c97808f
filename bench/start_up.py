"""A broker process from start to ready: empty, and after kill -9 with a log to recover; and its memory.

Private memory belongs to no file. Resident memory includes pages of the mapped log, which the kernel takes back when it
needs them.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Final

from bench.report import QUICK, Figure, table
from bench.served import target
from downrange.load import SendPlan, send_load
from downrange.load.server_process import ServerProcess
from tests.support.standalone_process import standalone_process

ROUNDS: Final = 2 if QUICK else 5
LOG_BYTES: Final = (64 if QUICK else 1024) << 20
UNDER_LOAD: Final = 50_000 if QUICK else 1_000_000


def start_seconds(directory: Path) -> float:
    started = time.perf_counter()
    with standalone_process(directory, log_level="ERROR"):
        return time.perf_counter() - started


def recover(directory: Path) -> tuple[float, int]:
    """Fill a log, kill the broker, start it again: seconds until it is ready, and how long the log was."""
    settings = {"waitTimeMillsInSendQueue": 10_000}
    with standalone_process(directory, settings, log_level="ERROR") as running:
        written = 0
        while written < LOG_BYTES:
            before = sum(end for _, end in (target(running, "log").ranges or {}).values())
            send_load(target(running, "log"), SendPlan(1.0, 0, 1024, batch=16, connections=4, outstanding=4))
            after = sum(end for _, end in (target(running, "log").ranges or {}).values())
            written += (after - before) * 1200  # a record of 1 KiB with its head and properties
        running.process.kill()
    started = time.perf_counter()
    with standalone_process(directory, settings, log_level="ERROR") as running:
        seconds = time.perf_counter() - started
        assert sum(end for _, end in (target(running, "log").ranges or {}).values()) == after
    return seconds, written


def memory(directory: Path) -> list[Figure]:
    with standalone_process(directory, {"waitTimeMillsInSendQueue": 10_000}, log_level="ERROR") as running:
        server = ServerProcess(running.process.pid)
        idle = server.private_bytes, server.resident_bytes
        sent = 0
        while sent < UNDER_LOAD:
            sent += send_load(target(running, "load"), SendPlan(2.0, 0, 128)).messages
        loaded = server.private_bytes, server.resident_bytes
    name = f"after {UNDER_LOAD:,} messages"
    return [
        Figure("memory idle, private", idle[0] / 1e6, "MB"),
        Figure("memory idle, resident", idle[1] / 1e6, "MB"),
        Figure(f"memory {name}, private", loaded[0] / 1e6, "MB", loaded[0] / idle[0], "idle"),
        Figure(f"memory {name}, resident", loaded[1] / 1e6, "MB", loaded[1] / idle[1], "idle"),
    ]


def run() -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="bench-") as parent:
        seconds = []
        for number in range(ROUNDS):
            fresh = Path(parent) / f"start-{number}"
            fresh.mkdir()
            seconds.append(start_seconds(fresh))
        figures = [Figure("start to ready, name server and broker in one process", min(seconds), "s")]
        for name in ("memory", "recovery"):
            (Path(parent) / name).mkdir()
        figures += memory(Path(parent) / "memory")
        recovered, written = recover(Path(parent) / "recovery")
        label = f"start to ready after kill -9, log of {written >> 20} MiB of 1 KiB messages"
        figures.append(Figure(label, recovered, "s", recovered / min(seconds), "an empty start"))
    return figures


if __name__ == "__main__":
    print(table(run()))
