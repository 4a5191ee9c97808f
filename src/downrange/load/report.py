"""The report of a load."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Self

from downrange.load.histogram import Histogram
from downrange.load.server_process import ServerProcess


class Moment(NamedTuple):
    """Time, CPU time and count at one moment of a load; figures are differences of two moments."""

    nanos: int
    own_cpu: float
    server_cpu: float
    messages: int

    @classmethod
    def now(cls, server: ServerProcess | None, messages: int) -> Self:
        own = resource.getrusage(resource.RUSAGE_SELF)
        server_cpu = 0.0 if server is None else server.cpu_seconds
        return cls(time.monotonic_ns(), own.ru_utime + own.ru_stime, server_cpu, messages)


@dataclass(frozen=True, slots=True)
class Latency:
    """Percentiles of a latency in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    p999: float
    max: float

    @classmethod
    def of(cls, seen: Histogram) -> Self:
        parts = (seen.mean, *map(seen.percentile, (50, 90, 99, 99.9)), seen.largest)
        return cls(*(part / 1e6 for part in parts))


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Figures of the measured part of a load. Those of the server are None when its process is unknown."""

    workload: str
    messages: int
    seconds: float
    latency: Mapping[str, Latency]
    """By kind: `reply`, `pull`, `end to end`; with a rate also `sent late`, the delay that the generator caused."""
    own_cpu_micros: float
    """CPU time of the generator a message, in microseconds."""
    server_cpu_micros: float | None = None
    server_resident_bytes: int | None = None
    server_private_bytes: int | None = None
    refused: Mapping[str, int] = field(default_factory=dict)
    """The number of requests refused with a code that means "not now", by the name of the code."""

    @classmethod
    def between(
        cls,
        workload: str,
        begun: Moment,
        ended: Moment,
        server: ServerProcess | None,
        latency: Mapping[str, Histogram],
        refused: Mapping[str, int],
    ) -> Self:
        messages = ended.messages - begun.messages
        each = 1e6 / max(messages, 1)
        return cls(
            workload=workload,
            messages=messages,
            seconds=(ended.nanos - begun.nanos) / 1e9,
            latency={name: Latency.of(seen) for name, seen in latency.items()},
            own_cpu_micros=(ended.own_cpu - begun.own_cpu) * each,
            server_cpu_micros=None if server is None else (ended.server_cpu - begun.server_cpu) * each,
            server_resident_bytes=None if server is None else server.resident_bytes,
            server_private_bytes=None if server is None else server.private_bytes,
            refused=dict(refused),
        )

    @property
    def rate(self) -> float:
        return self.messages / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "rate": self.rate}
