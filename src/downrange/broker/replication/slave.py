"""The slave's side of replication: append what the master sends, make it readable, and report. [HAClient]"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Protocol, cast

from downrange.broker.live_config import LiveConfig
from downrange.broker.replication.errors import ReplicationError
from downrange.broker.replication.login import NONCE_SIZE, SlaveLogin, read_secret
from downrange.broker.replication.wire import REPORT, PacketReader
from downrange.clock import Clock
from downrange.model.errors import MQError
from downrange.store.errors import StoreError
from downrange.store.message_store import MessageStore
from downrange.transport.errors import ConnectFailed
from downrange.transport.pool import open_link
from downrange.transport.tls import ClientTls

log = logging.getLogger(__name__)

# Bytes read at once, and so the bytes of the log that are made readable in one step.
_READ_BYTES: Final = 256 << 10
_CONNECT_SECONDS: Final = 3.0
_TICK_SECONDS: Final = 0.2
_FIRST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 5.0


class MasterAddresses(Protocol):
    """An object that knows the address of the master."""

    master_ha_address: str | None

    async def register(self) -> int: ...


class MasterLink(asyncio.BufferedProtocol):
    """The connection to the master.

    Holds always: all that was reported is in the log and its records in the queues. `closed` ends with the error for
    which we closed the connection, or without an error if the master or the network closed it.
    """

    def __init__(
        self,
        store: MessageStore,
        on_appended: Callable[[], object],
        config: LiveConfig,
        clock: Clock,
        login: SlaveLogin | None = None,
    ) -> None:
        self._store = store
        self._on_appended = on_appended
        self._config = config
        self._clock = clock
        self._packets = PacketReader()
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._transport: asyncio.Transport | None = None
        self._reported_offset = 0
        self._written_at = self._heard_at = clock.monotonic()
        self._login = login
        self.has_heard = False
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.logged_in: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when reports may be sent."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._login is None:
            self.logged_in.set_result(None)
        else:
            self._transport.write(self._login.greeting)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._heard_at = self._clock.monotonic()
        try:
            if self._login is not None:
                self._log_in(self._login, bytes(self._buffer[:nbytes]))
                return
            self.has_heard = True
            self._take(self._buffer[:nbytes])
        except (ReplicationError, StoreError) as error:
            self.close(error)

    def _log_in(self, login: SlaveLogin, data: bytes) -> None:
        answer = login.feed(data)
        if answer is not None and self._transport is not None:
            self._transport.write(answer)
            self._login = None
            self.logged_in.set_result(None)

    def close(self, error: Exception | None = None) -> None:
        if not self.closed.done():
            if error is None:
                self.closed.set_result(None)
            else:
                self.closed.set_exception(error)
        if self._transport is not None:
            self._transport.abort()

    def report(self) -> None:
        """Tell the master where our log ends."""
        self._write([self._store.max_offset])

    def tick(self) -> None:
        """Called regularly: report now and then, and close the connection to a silent master."""
        now = self._clock.monotonic()
        limit = self._config.store.ha_housekeeping_interval / 1000
        if now - self._heard_at > limit:
            self.close(ConnectFailed(f"the master sent nothing for {limit:g} s"))
        elif now - self._written_at > self._config.store.ha_send_heartbeat_interval / 1000:
            self.report()

    def _take(self, data: memoryview) -> None:
        store = self._store
        reports = [self._reported_offset]
        for offset, part, ends_packet in self._packets.feed(data):
            if part or offset:  # a heartbeat at 0 does not say yet in which file an empty slave begins
                store.append_data(offset, part)
            if ends_packet and store.max_offset > reports[-1]:
                reports.append(store.max_offset)
        self._on_appended()
        store.check_takes_data()  # bytes that cannot be read must not be reported
        if len(reports) > 1:
            self._write(reports[1:])

    def _write(self, reports: list[int]) -> None:
        """Send one report for each packet, as RocketMQ's slaves do."""
        if self._transport is None or self._transport.is_closing():
            return
        self._reported_offset = reports[-1]
        self._written_at = self._clock.monotonic()
        self._transport.write(b"".join(map(self._encode_report, reports)))

    def _encode_report(self, offset: int) -> bytes:
        return REPORT.pack(offset)


@dataclass(eq=False)
class Follower:
    """Keeps this slave's log a copy of its master's, for as long as `run` runs.

    `check` is called on each new connection before bytes are taken; `on_appended` is called after log bytes were
    appended, and has to make them readable.
    """

    _store: MessageStore
    _config: LiveConfig
    _addresses: MasterAddresses
    _check: Callable[[], Awaitable[None]]
    _on_appended: Callable[[], object]
    _clock: Clock
    tls: ClientTls | None = field(init=False, default=None)
    master: str | None = field(init=False, default=None)
    """The address of the master that is followed now."""
    trouble: str | None = field(init=False, default=None)
    """The reason why no master is followed."""

    def __repr__(self) -> str:
        state = f"follows {self.master}" if self.master else f"follows no master: {self.trouble}"
        return f"<Follower {state} offset={self._store.max_offset}>"

    async def run(self) -> None:
        """Connect, follow, and when the connection ends connect again, at once or with growing pauses."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            has_followed, level = False, logging.WARNING
            try:
                has_followed = await self._follow()
                trouble = f"the master closed the connection{'' if has_followed else ': its own log says why'}"
            except (ReplicationError, StoreError) as error:
                trouble, level = str(error), logging.ERROR  # an operator must repair this
            except (MQError, OSError) as error:
                trouble = str(error)
            finally:
                self.master = None
            self._note(trouble, level)
            pause = _FIRST_PAUSE_SECONDS if has_followed else min(2 * pause, _LONGEST_PAUSE_SECONDS)
            await self._clock.sleep(pause)
            if not has_followed:
                await self._addresses.register()  # the answer of the name server says where the master is now

    async def _follow(self) -> bool:
        """Follow until the connection ends; return whether the master sent anything."""
        if not self._address():
            await self._addresses.register()
        address = self._address()
        if not address:
            raise ConnectFailed("no name server knows a master of this broker name, and haMasterAddress is not set")
        self._on_appended()  # bytes that could not be made readable last time
        link = await self._connect(address)
        try:
            await self._check()
            await asyncio.wait(
                [link.logged_in, link.closed], timeout=_CONNECT_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if link.logged_in.done():
                link.report()
            elif not link.closed.done():
                raise ConnectFailed(f"the master did not answer the login within {_CONNECT_SECONDS:g} s")
            self._tick(link, address)
            await asyncio.wait([link.closed])
            link.closed.result()
        finally:
            link.close()
        return link.has_heard

    def _tick(self, link: MasterLink, address: str) -> None:
        """Look after a connection, and again and again until it is closed."""
        if link.closed.done():
            return
        asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick, link, address)
        if link.has_heard and self.master is None:
            self._note_master(address)
        link.tick()

    def _address(self) -> str | None:
        return self._config.store.ha_master_address or self._addresses.master_ha_address

    async def _connect(self, address: str) -> MasterLink:
        secret = read_secret(self._config.store.ha_secret_file)

        def make() -> MasterLink:
            login = None
            if secret is not None:
                login = SlaveLogin(secret, self._config.broker.broker_id, secrets.token_bytes(NONCE_SIZE))
            return MasterLink(self._store, self._on_appended, self._config, self._clock, login)

        return await open_link(make, address, _CONNECT_SECONDS, self.tls)

    def _note_master(self, address: str) -> None:
        self.master, self.trouble = address, None
        log.info("following master=%s offset=%d", address, self._store.max_offset)

    def _note(self, trouble: str, level: int) -> None:
        if trouble != self.trouble:  # one line for many attempts that fail alike
            log.log(level, "not following, trying again reason=%s", trouble)
        self.trouble = trouble
