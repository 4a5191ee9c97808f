"""Statistics: runtime information (request 28), one counter (315), the progress of delayed messages (45)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from downrange.broker.admission import FlowControl
from downrange.broker.live_config import LiveConfig
from downrange.broker.routes import RouteTable
from downrange.broker.runtime_info import runtime_info
from downrange.broker.statistics import Statistics
from downrange.clock import Clock
from downrange.protocol.bodies.body import encode_body
from downrange.protocol.bodies.kv_config import KVTable
from downrange.protocol.bodies.offsets import DelayOffsets
from downrange.protocol.bodies.statistics import ViewBrokerStatsRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError
from downrange.store.message_store import MessageStore
from downrange.transport.connection import Connection


class DelayProgress(Protocol):
    """The progress of the delivery of delayed messages."""

    def progress(self) -> Mapping[int, tuple[int, int]]:
        """Level -> (offset of the next message to deliver, end of its queue)."""
        ...

    def table(self) -> DelayOffsets:
        """Level -> offset of the next message to deliver, in the form for slaves."""
        ...


class TimerFigures(Protocol):
    """The progress of timer messages."""

    def runtime_info(self) -> Mapping[str, str]: ...


@dataclass(frozen=True, slots=True)
class ServiceFigures:
    """The services of a broker that request 28 asks for their figures."""

    delay: DelayProgress
    flow: FlowControl
    timer: TimerFigures | None = None
    replication: Callable[[], Mapping[str, str]] = dict


@dataclass(eq=False)
class StatisticsHandlers:
    """Figures for operators, dashboards and slaves."""

    _config: LiveConfig
    _store: MessageStore
    _statistics: Statistics
    _services: ServiceFigures
    _clock: Clock

    @property
    def routes(self) -> RouteTable:
        return {
            RequestCode.VIEW_BROKER_STATS_DATA: self.view_counter,
            RequestCode.GET_BROKER_RUNTIME_INFO: self.get_runtime_info,
            RequestCode.GET_ALL_DELAY_OFFSET: self.get_delay_offsets,
        }

    def view_counter(self, command: Command, connection: Connection) -> Command:
        """Request 315: one counter."""
        header = command.header(ViewBrokerStatsRequest)
        data = self._statistics.data(header.stats_name, header.stats_key)
        if data is None:
            raise BrokerError(f"The stats <{header.stats_name}> <{header.stats_key}> not exist")
        return command.reply(body=encode_body(data))

    def get_runtime_info(self, command: Command, connection: Connection) -> Command:
        """Request 28: runtime information."""
        table = runtime_info(
            self._config,
            self._store,
            self._statistics,
            self._clock.now(),
            delay_offsets=self._services.delay.progress(),
            waited_millis=self._services.flow.waited_millis,
            transient_buffers=self._store.transient_buffers_available,
        )
        timer = {} if self._services.timer is None else self._services.timer.runtime_info()
        return command.reply(body=encode_body(KVTable({**table, **timer, **self._services.replication()})))

    def get_delay_offsets(self, command: Command, connection: Connection) -> Command:
        """Request 45: the progress of delayed messages."""
        return command.reply(body=encode_body(self._services.delay.table()))
