"""The master's side of replication: one link per slave, fed from the mapped log. [HAService, HAConnection]

The rules of the stream, what each side waits for and when it gives up: docs/formats/replication.md.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from dataclasses import replace
from typing import Final, NamedTuple, cast

from downrange.auth.login_failures import LoginFailures
from downrange.broker.live_config import LiveConfig
from downrange.broker.replication.errors import ReplicationError, SlaveAhead, SlaveTooFarBehind
from downrange.broker.replication.login import NONCE_SIZE, LoginFailed, MasterLogin, slave_access
from downrange.broker.replication.waiting import Tell, WaitingSenders
from downrange.broker.replication.wire import HEADER, ReportReader
from downrange.clock import Clock
from downrange.model.message import PhysicalOffset
from downrange.store.config import BrokerRole
from downrange.store.message_store import MessageStore
from downrange.transport.accepting import Acceptor
from downrange.transport.limits import Limits
from downrange.transport.tls import ServerTls

log = logging.getLogger(__name__)

# Log bytes given to one connection in one turn of the loop, and unsent bytes with which it counts as slow.
_TURN_BYTES: Final = 1 << 20
_BUFFERED_BYTES: Final = 1 << 20
_MOST_LINKS: Final = 64
_LOGIN_SECONDS: Final = 5.0
_TICK_SECONDS: Final = 0.1
_IDLE_SECONDS: Final = 1.0  # without slaves
# How long an orderly stop waits for slaves to get the end of the log.
_STOP_SECONDS: Final = 3.0


class SlaveState(NamedTuple):
    """The progress of one slave, for operators."""

    address: str
    reported_offset: int
    sent_offset: int


class SlaveLink(asyncio.Protocol):
    """The connection to one slave.

    Holds always: nothing is sent before the slave's login and its first report; then the log is sent without a gap, in
    packets that each lie in one file. A slave that does not read is not written to. A report counts only if it names
    bytes that the slave can have.
    """

    def __init__(self, slaves: Slaves, store: MessageStore, config: LiveConfig, clock: Clock) -> None:
        self._slaves = slaves
        self._store = store
        self._config = config
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._reports = ReportReader()
        self._transport: asyncio.Transport | None = None
        self._is_paused = False
        self._written_at = self._heard_at = clock.monotonic()
        self._login: MasterLogin | None = None
        self.address = "unknown"
        self.broker_id: int | None = None
        """The broker id of a slave that logged in."""
        self.reported_offset: int | None = None
        self.sent_offset = 0

    def __repr__(self) -> str:
        return f"<SlaveLink {self.address} reported={self.reported_offset} sent={self.sent_offset}>"

    # --- the connection -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_BUFFERED_BYTES)
        peer = transport.get_extra_info("peername")
        self.address = f"{peer[0]}:{peer[1]}" if peer else "unknown"
        host = peer[0] if peer else ""
        access = self._slaves.access
        if not access.may_connect(host):
            self._slaves.refused(self, LoginFailed("its address is not in haAllowedSlaveAddresses"))
            return
        is_required = not access.may_follow(host)
        self._login = MasterLogin(access.secret, secrets.token_bytes(NONCE_SIZE), is_required=is_required)
        self._slaves.opened(self, is_known=not is_required)

    def connection_lost(self, error: Exception | None) -> None:
        self._slaves.closed(self, error)

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self.push()

    def data_received(self, data: bytes) -> None:
        if self._login is not None:
            try:
                data = self._logging_in(self._login, data)
            except LoginFailed as error:
                self._slaves.refused(self, error)
                return
        try:
            self._received(data)
        except ReplicationError as error:
            self._refuse(error)

    def _received(self, data: bytes) -> None:
        """Take what comes behind a login. Raises ReplicationError."""
        offset = self._reports.feed(data)
        if offset is not None:
            self._take_report(offset)

    def _take_report(self, offset: int) -> None:
        self._heard_at = self._clock.monotonic()
        self._check(offset)
        is_first = self.reported_offset is None
        self.reported_offset = offset
        self._slaves.reported(self, offset)
        if is_first:
            log.info("slave follows address=%s offset=%d", self.address, offset)
            self.sent_offset = offset or self._beginning()
            # The heartbeat tells an empty slave where its log begins, before the log has anything to send.
            self._write_heartbeat()
            self.push()

    def _logging_in(self, login: MasterLogin, data: bytes) -> bytes:
        """Take bytes of the login; return those behind it."""
        answer, rest = login.feed(data)
        if answer and self._transport is not None:
            self._transport.write(answer)
        if login.is_done:
            self._login, self.broker_id = None, login.broker_id
            self._slaves.logged_in(self)
        return rest

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- what is sent -------------------------------------------------------------------------------------------

    def push(self) -> None:
        """Send the part of the log that was not sent yet, as far as the slave reads it."""
        transport = self._transport
        if self.reported_offset is None or self._is_paused or transport is None or transport.is_closing():
            return
        commit_log = self._store.commit_log
        end = commit_log.max_offset
        most = self._config.store.ha_transfer_batch_size
        pieces: list[bytes | memoryview] = []
        offset = self.sent_offset
        turn_end = offset + _TURN_BYTES
        while offset < end and offset < turn_end:
            data = commit_log.readable_from(PhysicalOffset(offset), self._most_from(offset, most))
            if data is None:
                self._refuse(
                    SlaveTooFarBehind(f"the log has nothing at {offset}; it begins at {self._store.min_offset}")
                )
                return
            pieces.append(self._header(offset, len(data)))
            pieces.append(data)
            offset += len(data)
        if not pieces:
            return
        self.sent_offset = offset
        self._written_at = self._clock.monotonic()
        transport.writelines(pieces)
        if offset < end and not self._is_paused:
            self._loop.call_soon(self.push)  # other work of the loop comes first

    def tick(self) -> None:
        """Called regularly: close the link of a silent slave, and send a heartbeat if nothing else was sent."""
        now = self._clock.monotonic()
        limit = self._config.store.ha_housekeeping_interval / 1000
        if self._login is not None:
            limit = min(limit, _LOGIN_SECONDS)
        if now - self._heard_at > limit:
            log.warning("slave given up address=%s reason=no report for %g s", self.address, limit)
            self.abort()
            return
        self.push()
        is_idle = now - self._written_at > self._config.store.ha_send_heartbeat_interval / 1000
        if is_idle and self.reported_offset is not None and not self._is_paused:
            self._write_heartbeat()

    def _write_heartbeat(self) -> None:
        assert self._transport is not None
        self._written_at = self._clock.monotonic()
        self._transport.write(self._header(self.sent_offset, 0))

    def _header(self, offset: int, length: int) -> bytes:
        return HEADER.pack(offset, length)

    def _most_from(self, offset: int, most: int) -> int:
        """How many bytes one packet may have that begins at `offset`."""
        return most

    # --- checks -------------------------------------------------------------------------------------------------

    def _check(self, offset: int) -> None:
        lowest, highest = self._store.min_offset, self._store.max_offset
        if offset < 0:
            raise ReplicationError(f"a log cannot end at {offset}")
        if offset > highest:
            raise SlaveAhead(
                f"its log ends at {offset}, ours at {highest}: it has what this master lost. Stop one of the two and "
                "decide which log is right; nothing was overwritten"
            )
        # An empty slave of a master that has stored nothing was sent nothing, and says so again and again.
        if self.reported_offset is not None and offset > max(0, self.sent_offset):
            raise ReplicationError(f"it claims to have {offset}, but it was sent no more than {self.sent_offset}")
        if self.reported_offset is None and 0 < offset < lowest:
            raise SlaveTooFarBehind(
                f"its log ends at {offset}, ours begins at {lowest}: it needs a newer copy of the store"
            )

    def _refuse(self, error: ReplicationError) -> None:
        log.error("slave refused address=%s reason=%s", self.address, error)
        self.abort()

    def _beginning(self) -> int:
        """The offset where an empty slave begins. Like RocketMQ, a master does not send older files."""
        return self._beginning_of_last_file()

    def _beginning_of_last_file(self) -> int:
        end = self._store.max_offset
        return end - end % self._config.store.mapped_file_size_commit_log


class Slaves:
    """All slaves of a master, and the senders that wait for them. For the loop's thread.

    `links` is always the same set object: code that stores a message looks into it before calling `wake`.
    """

    def __init__(self, store: MessageStore, config: LiveConfig, clock: Clock) -> None:
        self.links: set[SlaveLink] = set()
        self.access = slave_access(config.store)
        self._strangers: dict[SlaveLink, None] = {}  # have not logged in yet; the oldest first
        self._failures = LoginFailures()
        self._store = store
        self._config = config
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._senders = WaitingSenders(config, clock)
        self._is_woken = False
        self._has_news = asyncio.Event()
        self._acceptor: Acceptor | None = None

    def __repr__(self) -> str:
        return f"<Slaves {sorted(link.address for link in self.links)} waiting={len(self._senders)}>"

    @property
    def log_end(self) -> int:
        return self._store.max_offset

    @property
    def makes_senders_wait(self) -> bool:
        """Whether senders wait for slaves, or are answered before a slave has their messages."""
        return self._config.store.broker_role is BrokerRole.SYNC_MASTER

    @property
    def acknowledged_offset(self) -> int:
        return self._senders.acknowledged_offset

    def states(self) -> list[SlaveState]:
        """The slaves that follow, the most advanced first."""
        found = [
            SlaveState(link.address, link.reported_offset, link.sent_offset)
            for link in self.links
            if link.reported_offset is not None
        ]
        return sorted(found, key=lambda state: (-state.reported_offset, state.address))

    def tell_when_copied(self, end_offset: int, tell: Tell) -> None:
        """Call `tell` when a slave has the log up to `end_offset`, perhaps at once; `tell` must not raise."""
        self._senders.tell_when_copied(end_offset, tell, slaves=self._following)

    @property
    def _following(self) -> int:
        return sum([link.reported_offset is not None for link in self.links])

    def wake(self) -> None:
        """Push the log at the end of this turn of the loop, so that one packet has all that was appended in it."""
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon(self._push)

    def _push(self) -> None:
        self._is_woken = False
        for link in list(self.links):
            link.push()

    # --- running ------------------------------------------------------------------------------------------------

    async def start(self, listening: socket.socket, tls: ServerTls | None = None) -> None:
        """Accept slaves on a listening socket, with TLS and without, as `tls` says."""
        limits = replace(Limits(), idle_seconds=self._config.store.ha_housekeeping_interval / 1000)
        self._acceptor = Acceptor(self._make_link, limits, tls)
        self._acceptor.listen([listening])

    async def run(self) -> None:
        """Call the regular duties of links, and end the waits of senders that waited too long."""
        while True:
            await self._clock.sleep(_TICK_SECONDS if self.links else _IDLE_SECONDS)
            self.tick()

    def tick(self) -> None:
        self._senders.expire()
        for link in [*self.links, *self._strangers]:
            link.tick()

    async def stop(self) -> None:
        """Let the slaves get the end of the log, for a short time at most, then close their links."""
        if self._acceptor is not None:
            await self._acceptor.stop()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                while any(state.reported_offset < self._store.max_offset for state in self.states()):
                    self._has_news.clear()
                    await self._has_news.wait()
        except TimeoutError:
            log.warning("stopped before every slave had the end of the log %s", self.states())
        self.close_links()
        self._senders.close()

    def close_links(self) -> None:
        for link in [*self.links, *self._strangers]:
            link.abort()

    def _make_link(self) -> SlaveLink:
        return SlaveLink(self, self._store, self._config, self._clock)

    # --- called by links ----------------------------------------------------------------------------------------

    def opened(self, link: SlaveLink, *, is_known: bool) -> None:
        """A peer connected; one that is not known must log in, and has no claim to a place before that."""
        if not is_known:
            if len(self._strangers) >= _MOST_LINKS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.abort()
            self._strangers[link] = None
        elif self._has_place(link):
            self.links.add(link)

    def logged_in(self, link: SlaveLink) -> None:
        """A peer has shown that it may follow. An older connection of the slave with its broker id is replaced."""
        if link in self._strangers:
            del self._strangers[link]
            if not self._has_place(link):
                return
            self.links.add(link)
        for other in [one for one in self.links if one is not link and one.broker_id is not None]:
            if other.broker_id == link.broker_id:
                log.warning("slave replaced address=%s by=%s brokerId=%d", other.address, link.address, link.broker_id)
                other.abort()

    def refused(self, link: SlaveLink, error: LoginFailed) -> None:
        """A peer may not follow: one line for each address and minute."""
        left_out = self._failures.failed(link.address.rpartition(":")[0], self._clock.monotonic())
        if left_out is not None:
            log.error("slave refused address=%s reason=%s left_out=%d", link.address, error, left_out)
        link.abort()

    def _has_place(self, link: SlaveLink) -> bool:
        if len(self.links) < _MOST_LINKS:
            return True
        log.error("slave refused address=%s reason=%d are connected already", link.address, len(self.links))
        link.abort()
        return False

    def closed(self, link: SlaveLink, error: Exception | None) -> None:
        self._strangers.pop(link, None)
        if link in self.links:
            self.links.remove(link)
            if link.reported_offset is not None:
                log.info("slave gone address=%s reported=%d reason=%s", link.address, link.reported_offset, error)
        self._has_news.set()

    def reported(self, link: SlaveLink, offset: int) -> None:
        self._senders.acknowledge(offset)
        self._has_news.set()
