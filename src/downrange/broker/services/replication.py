"""A broker's part in replication, by its role: a master pushes its log, a slave follows and copies tables."""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import Final

from downrange.broker.live_config import LiveConfig
from downrange.broker.message_writer import MessageWriter
from downrange.broker.replication.master import Slaves, SlaveState
from downrange.broker.replication.slave import Follower
from downrange.broker.services.flushing import Flusher
from downrange.broker.services.registration import Registration
from downrange.broker.services.slave_sync import SlaveSync
from downrange.clock import Clock
from downrange.transport.errors import listen_failed
from downrange.transport.tls import ServerTls

_BACKLOG: Final = 64


class Replication:
    """A broker's part in replication; by itself that of a broker without master and slaves."""

    async def start(self) -> None:
        """Accept slaves."""

    async def run(self) -> None:
        """Replicate until cancelled."""

    async def stop(self) -> None:
        """Let slaves get the end of the log."""

    def states(self) -> list[SlaveState]:
        """The slaves that follow this broker."""
        return []

    def lags(self) -> dict[str, int]:
        """The number of log bytes that each slave has not reported yet."""
        return {}

    def runtime_info(self) -> dict[str, str]:
        """Figures about replication for request 28 that RocketMQ's brokers do not have."""
        return {}


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that has the port for slaves, so that the port can be announced; it accepts no slave yet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise listen_failed(host, port, error, " for slaves") from None


class MasterReplication(Replication):
    """Serves slaves on a socket of their own."""

    def __init__(self, slaves: Slaves, listening: socket.socket, tls: ServerTls | None = None) -> None:
        self._slaves = slaves
        self._listening = listening
        self._tls = tls

    def __repr__(self) -> str:
        return repr(self._slaves)

    async def start(self) -> None:
        await self._slaves.start(self._listening, self._tls)

    async def run(self) -> None:
        await self._slaves.run()

    async def stop(self) -> None:
        await self._slaves.stop()

    def states(self) -> list[SlaveState]:
        return self._slaves.states()

    def lags(self) -> dict[str, int]:
        return {state.address: self._slaves.log_end - state.reported_offset for state in self.states()}

    def runtime_info(self) -> dict[str, str]:
        states = self.states()
        slaves = {
            f"haSlave_{state.address}": f"reported={state.reported_offset} sent={state.sent_offset}" for state in states
        }
        return {"haSlaves": str(len(states)), **slaves} if states else {}


class SlaveReplication(Replication):
    """Copies the master's log, makes it readable, and copies tables that are not in the log."""

    def __init__(
        self,
        config: LiveConfig,
        registration: Registration,
        writer: MessageWriter,
        flusher: Flusher,
        sync: SlaveSync,
        clock: Clock,
    ) -> None:
        self._store = writer.store
        self._writer = writer
        self._flusher = flusher
        self._sync = sync
        connected = partial(sync.connected, writer.store)
        self.follower = Follower(writer.store, config, registration, connected, self._appended, clock)
        self.follower.tls = registration.tls

    def __repr__(self) -> str:
        return repr(self.follower)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.follower.run())
            tasks.create_task(self._sync.run())

    def runtime_info(self) -> dict[str, str]:
        return {"haMaster": self.follower.master or "", "haTrouble": self.follower.trouble or ""}

    def _appended(self) -> None:
        queues = self._writer.dispatched()
        self._sync.received(queues)
        if self._flusher.is_sync and queues:
            # Nobody waits for the disk, but it is to have them soon.
            self._flusher.tell_when_flushed(self._store.max_offset, lambda outcome: None, may_block=False)
