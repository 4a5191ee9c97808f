"""`downrange standalone` as a real process, with the configuration a test wants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import Running, running


def resident_bytes(pid: int) -> int:
    """Memory of a process that is private to it: mapped store files come and go as the kernel likes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not tell RssAnon")


@dataclass(frozen=True)
class Standalone:
    """A running name server and broker: where they listen, and the process to look at, stop or kill."""

    process: Running
    namesrv: str
    broker: str
    grpc: str
    """Where gRPC clients connect; `off` if they cannot."""

    @property
    def resident_bytes(self) -> int:
        return resident_bytes(self.process.pid)

    @property
    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))


@contextmanager
def standalone_process(
    directory: Path,
    settings: Mapping[str, object] | None = None,
    *,
    namesrv_port: int = 0,
    broker_port: int = 0,
    grpc_port: int = -1,
    log_level: str = "WARNING",
) -> Iterator[Standalone]:
    """A process on free ports unless told otherwise; `settings` are keys of a broker.conf."""
    config = directory / "broker.conf"
    defaults = {"brokerName": "broker-a", "waitTimeMillsInSendQueue": 5000}  # a busy machine is no reason to refuse
    lines = [f"{key}={value}" for key, value in {**defaults, **(settings or {})}.items()]
    config.write_text("\n".join(lines) + "\n")
    with running(
        "standalone",
        *("--data", str(directory / "data"), "--config", str(config), "--log-level", log_level),
        *("--namesrv-port", str(namesrv_port), "--broker-port", str(broker_port), "--metrics-port", "-1"),
        *("--grpc-port", str(grpc_port)),
    ) as process:
        namesrv = process.wait_for(r"name server +(\S+)")[1]
        broker = process.wait_for(r"broker +(\S+) \(")[1]
        yield Standalone(process, namesrv, broker, process.wait_for(r"gRPC +(\S+)")[1])
