"""`downrange console` as a real process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import Running, running


@dataclass(frozen=True)
class ConsoleProcess:
    """A running console: its process, its address without the last slash, and what its start cost."""

    process: Running
    address: str
    start_seconds: float
    start_processor_seconds: float

    def cluster(self, *parts: str) -> str:
        """The address of a page of the cluster `local`."""
        return "/".join((self.address, "c", "local", *parts))

    @property
    def resident_bytes(self) -> int:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("the kernel does not tell VmRSS")


@contextmanager
def console_process(namesrv: str, *arguments: str, port: int = 0) -> Iterator[ConsoleProcess]:
    """A console of the cluster `local`, on a free port unless told otherwise."""
    began = time.monotonic()
    with running("console", "-n", f"local={namesrv}", "--port", str(port), *arguments) as process:
        address = process.wait_for(r"console ready on (\S+)/")[1]
        yield ConsoleProcess(process, address, time.monotonic() - began, _processor_seconds(process.pid))


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
