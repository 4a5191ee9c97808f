"""`/metrics` for Prometheus and `/healthz` for a supervisor. Names and labels: docs/reference/metrics.md."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from downrange.broker.live_config import LiveConfig
from downrange.broker.statistics import Statistics
from downrange.broker.tables import Tables
from downrange.broker.timer_metrics import TimerMetrics
from downrange.clock import Clock
from downrange.model.histogram import Histogram
from downrange.transport.http_pages import HttpReply, HttpServer

if TYPE_CHECKING:
    from downrange.broker.metrics_collector import BrokerCollector

# Reasons to refuse appends that are no fault: the store of a slave takes no messages from producers.
_HEALTHY_REFUSALS: Final = frozenset({"slave"})


class StoreFigures(Protocol):
    """The part of a MessageStore that metrics read."""

    @property
    def min_offset(self) -> int: ...
    @property
    def max_offset(self) -> int: ...
    @property
    def flushed_offset(self) -> int: ...
    @property
    def dispatch_behind_bytes(self) -> int: ...
    @property
    def earliest_store_time(self) -> int: ...
    @property
    def refusals(self) -> dict[str, str]: ...
    def min_offset_of(self, topic: str, queue_id: int) -> int: ...
    def max_offset_of(self, topic: str, queue_id: int) -> int: ...
    def store_time_of(self, topic: str, queue_id: int, queue_offset: int) -> int: ...


class FamilyFigures(Protocol):
    """The part of a family of requests that metrics read: how many requests a compiled step has served or not."""

    accelerated: int
    not_accelerated: int


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """A broker under a controller, at one moment."""

    role: str
    epoch: int
    sync_state_set_size: int
    lease_left_seconds: float
    elections_won: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """What goes through a broker: its counters, and the requests of each family.

    Optional are half messages by topic, log bytes that slaves have not reported yet by address of the slave, what
    access control refused, the role that a controller gave, and what POP consumers hold.
    """

    statistics: Statistics
    families: Mapping[str, FamilyFigures]
    half_messages: Callable[[], Mapping[str, int]] | None = None
    slave_lags: Callable[[], Mapping[str, int]] | None = None
    refused: Callable[[], Mapping[str, int]] | None = None
    replica: Callable[[], ReplicaFigures] | None = None
    pop: PopFigures | None = None


class PopFigures(Protocol):
    """The part of a PopState that metrics read."""

    checkpoints: int
    acknowledgements: int
    revived: Counter[tuple[str, str]]
    scan_millis: Histogram

    @property
    def leases(self) -> LeaseFigures: ...
    @property
    def overdue_millis(self) -> int: ...
    def needed_records(self) -> dict[int, tuple[int, int]]: ...


class LeaseFigures(Sized, Protocol):
    """The part of the Leases that metrics read."""

    ended: int

    @property
    def messages(self) -> int: ...


class TimerFigures(Protocol):
    """The part of a TimerService that metrics read."""

    metrics: TimerMetrics

    @property
    def enqueue_behind(self) -> int: ...
    @property
    def enqueue_behind_millis(self) -> int: ...
    @property
    def read_behind_millis(self) -> int: ...
    def count_within(self, seconds: int) -> int: ...
    def count_overdue(self) -> int: ...


@dataclass(frozen=True, slots=True)
class MetricSources:
    """The parts of a broker that a scrape reads; it changes nothing."""

    config: LiveConfig
    store: StoreFigures
    tables: Tables
    traffic: Traffic
    clock: Clock
    timer: TimerFigures | None = None


class MetricsServer:
    """Serves the two pages of one broker on `metricsPort`: 0 takes a free port, -1 turns them off.

    `port` is the real port while serving, and None otherwise.
    """

    def __init__(self, sources: MetricSources) -> None:
        self._sources = sources
        self._http: HttpServer | None = None
        self._collector: BrokerCollector | None = None
        self._scraping = asyncio.Lock()

    @property
    def port(self) -> int | None:
        return None if self._http is None else self._http.port

    async def start(self) -> None:
        port = self._sources.config.broker.metrics_port
        if port < 0 or self._http is not None:
            return
        http = HttpServer({"/metrics": self._metrics, "/healthz": self._health}, "127.0.0.1", port)
        await http.start()
        self._http = http

    async def stop(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            await http.stop()

    async def _metrics(self) -> HttpReply:
        # One scrape at a time: many scrapers must not multiply the work. A thread would not help: it would hold the
        # interpreter for 5 ms at a time, while making a piece takes 1 ms.
        async with self._scraping:
            if self._collector is None:
                self._collector = await asyncio.to_thread(_load_collector, self._sources)
            parts = []
            for piece in self._collector.pieces():
                parts.append(piece)
                await asyncio.sleep(0)
        return HttpReply(HTTPStatus.OK, b"".join(parts), self._collector.content_type)

    async def _health(self) -> HttpReply:
        health = health_of(self._sources)
        status = HTTPStatus.OK if health.status == "ok" else HTTPStatus.SERVICE_UNAVAILABLE
        return HttpReply(status, msgspec.json.encode(health) + b"\n", "application/json")


def _load_collector(sources: MetricSources) -> BrokerCollector:
    # prometheus-client takes 60 ms to import; a broker starts without it.
    from downrange.broker.metrics_collector import BrokerCollector

    return BrokerCollector(sources)


class Health(msgspec.Struct, frozen=True, rename="camel"):
    """The page `/healthz`: the status is ok or unhealthy; if appends are refused, the reasons say why."""

    status: str
    broker: str
    role: str
    store_writable: bool
    reasons: tuple[str, ...]
    uptime_seconds: int


def health_of(sources: MetricSources) -> Health:
    """The health of a broker: it is healthy while its store takes messages, or if it is a slave."""
    refusals = sources.store.refusals
    return Health(
        status="ok" if refusals.keys() <= _HEALTHY_REFUSALS else "unhealthy",
        broker=sources.config.broker.broker_name,
        role=sources.config.store.broker_role.value,
        store_writable=not refusals,
        reasons=tuple(refusals.values()),
        uptime_seconds=max(0, sources.clock.now() - sources.traffic.statistics.started_millis) // 1000,
    )
