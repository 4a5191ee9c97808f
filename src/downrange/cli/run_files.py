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


class Noted(NamedTuple):
    """By what a server can be called: its address, and if it has them, its name and its directory."""

    address: str
    name: str = ""
    directory: str = ""


class RunningServer(NamedTuple):
    """A server process that is alive."""

    role: str
    address: str
    pid: int
    name: str = ""
    directory: str = ""

    def is_called(self, which: str) -> bool:
        """Whether `which` is the port, the address, the name or the directory of this server."""
        names = {self.address, self.address.rpartition(":")[2], self.name} - {""}
        return which in names or (bool(self.directory) and str(Path(which).resolve()) == self.directory)


def directory() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "downrange" if base else Path.home() / ".downrange" / "run"


@contextmanager
def noted(role: str, server: Noted) -> Iterator[None]:
    """Keep the file of a server while the block runs. Without a writable directory only `downrange shutdown` fails."""
    path = directory() / f"{role}-{server.address.rpartition(':')[2]}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join((f"{os.getpid()} {started(os.getpid())} {server.address}", *server[1:], "")))
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
            first, name, directory_of, *_ = path.read_text().split("\n")
            pid, since, address = first.split()
            if started(int(pid)) == since:
                found.append(RunningServer(role, address, int(pid), name, directory_of))
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
