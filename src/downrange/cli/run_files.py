"""Small files, one for each server that this user runs on this machine, so that `downrange shutdown` finds them.

A file has the process id and the start time: a process that got the same id later is never signalled.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple


class RunningServer(NamedTuple):
    """A server process that is alive."""

    role: str
    address: str
    pid: int


def directory() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "downrange" if base else Path.home() / ".downrange" / "run"


@contextmanager
def noted(role: str, address: str) -> Iterator[None]:
    """Keep the file of a server while the block runs. Without a writable directory only `downrange shutdown` fails."""
    path = directory() / f"{role}-{address.rpartition(':')[2]}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{os.getpid()} {started(os.getpid())} {address}\n")
    except OSError:
        yield
        return
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def running(role: str) -> list[RunningServer]:
    """The running servers of a role; files of dead processes are removed."""
    found = []
    for path in sorted(directory().glob(f"{role}-*")):
        try:
            pid, since, address = path.read_text().split()
            if started(int(pid)) == since:
                found.append(RunningServer(role, address, int(pid)))
                continue
        except (OSError, ValueError):
            pass
        path.unlink(missing_ok=True)
    return found


def stop(server: RunningServer, seconds: float) -> bool:
    """Ask a server to stop and wait for it; True when it is gone."""
    since = started(server.pid)
    os.kill(server.pid, signal.SIGTERM)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if started(server.pid) != since:
            return True
        time.sleep(0.05)
    return False


def started(pid: int) -> str:
    """The start time of a process in clock ticks of the kernel; empty when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
