"""The machine a run was made on, and how much of it others used meanwhile: figures of a busy machine say so."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

_TICK = os.sysconf("SC_CLK_TCK")
_PR_SET_CHILD_SUBREAPER = 36


def describe() -> dict[str, Any]:
    cpu = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "unknown"
    )
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(memory / (1 << 20), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def adopt_orphans() -> None:
    """From now on processes whose parent has ended are ours to wait for, and so count as ours: Spark leaves some."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap(seconds: float) -> None:
    """Wait for every process that is still there, but not for ever."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            time.sleep(0.05)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds so far: of the whole machine, taken by others on the same host, and of processes we waited for."""

    busy: float
    stolen: float
    own: float

    @classmethod
    def now(cls) -> Self:
        # user nice system idle iowait irq softirq steal: see proc(5)
        fields = [int(field) / _TICK for field in (_lines("/proc/stat") or ["cpu" + " 0" * 8])[0].split()[1:9]]
        children, own = resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF)
        return cls(
            busy=sum(fields[:3]) + sum(fields[5:7]),
            stolen=fields[7],
            own=children.ru_utime + children.ru_stime + own.ru_utime + own.ru_stime,
        )

    def others_since(self, before: Usage, seconds: float) -> float:
        """Cores that were not ours to use, on average: other programs, and other machines on the same host."""
        busy, own = self.busy - before.busy, self.own - before.own
        return max(busy - own + self.stolen - before.stolen, 0.0) / max(seconds, 1e-9)
