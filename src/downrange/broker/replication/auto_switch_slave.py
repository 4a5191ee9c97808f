"""The slave's side of replication under a controller: agree with the master on a common point, cut, follow, report."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from downrange.broker.live_config import LiveConfig
from downrange.broker.message_writer import MessageWriter
from downrange.broker.replication.auto_switch_wire import (
    LogPiece,
    MasterFrames,
    MasterHandshake,
    SlaveHandshake,
    TransferHeader,
    encode_report,
)
from downrange.broker.replication.errors import LogsDiffer, ReplicationError
from downrange.broker.replication.login import NONCE_SIZE, SlaveLogin, read_secret
from downrange.broker.replication.slave import MasterLink
from downrange.broker.services.flushing import Flusher
from downrange.clock import Clock
from downrange.model.errors import MQError
from downrange.model.fencing import may_report
from downrange.store.epoch_file import EpochFile
from downrange.store.epochs import common_point
from downrange.store.errors import StoreError
from downrange.store.group_commit import FlushOutcome
from downrange.store.message_store import MessageStore
from downrange.transport.errors import ConnectFailed
from downrange.transport.pool import open_link
from downrange.transport.tls import ClientTls

log = logging.getLogger(__name__)

_CONNECT_SECONDS: Final = 3.0
_TICK_SECONDS: Final = 0.2
_FIRST_PAUSE_SECONDS: Final = 0.02
_LONGEST_PAUSE_SECONDS: Final = 1.0


@dataclass(eq=False)
class Copying:
    """This replica's log as the copy of a master's: bytes, epochs and confirm offset that come in.

    Holds always: the entry of an epoch is on disk before the first byte of that epoch is in the log.
    """

    config: LiveConfig
    writer: MessageWriter
    flusher: Flusher
    epoch_file: EpochFile
    clock: Clock
    confirm_offset: int = field(init=False, default=0)
    on_truncated: Callable[[int], object] = field(init=False, default_factory=lambda: lambda offset: None)
    """Called with the new end after the log was cut: what is derived from it has to follow."""

    @property
    def store(self) -> MessageStore:
        return self.writer.store

    @property
    def durable_end(self) -> int:
        """The end of the part of the log that may be reported."""
        return self.store.flushed_offset if self.flusher.is_sync else self.store.max_offset

    def appended(self) -> None:
        """Make readable what is confirmed."""
        self.store.set_confirm_offset(self.confirm_offset)
        self.writer.dispatched()

    def take_header(self, header: TransferHeader) -> None:
        """A packet begins. Raises ReplicationError."""
        store, epochs = self.store, self.epoch_file.epochs
        if header.offset < 0:
            return  # nothing is stored at the master
        is_empty = store.min_offset < 0
        if not is_empty and header.offset != store.max_offset:
            raise ReplicationError(f"the master sends bytes from {header.offset}, this log ends at {store.max_offset}")
        if header.epoch != epochs.last:
            self.epoch_file.change(epochs.appended(*header.epoch))
        if is_empty and header.offset:
            store.append_data(header.offset, b"")  # it begins with the file in which the master begins
        self.confirm_offset = max(self.confirm_offset, min(header.confirm_offset, header.offset + header.length))

    async def cut_torn_record(self) -> None:
        """Cut off the beginning of a record whose rest did not come."""
        end = self.store.whole_end
        if end < self.store.max_offset:
            await self.cut(end)

    async def cut(self, offset: int) -> None:
        """Cut the log on disk, and what is derived from it."""
        async with self.flusher.at_rest():
            self.store.truncate(offset)
        self.confirm_offset = min(self.confirm_offset, offset)
        self.on_truncated(offset)

    async def agree(self, handshake: MasterHandshake, address: str) -> None:
        """Cut off what the master does not have. Raises LogsDiffer if it cannot be told what that is."""
        store, epochs = self.store, self.epoch_file.epochs
        end = store.max_offset
        point: int | None = 0
        if end:
            point = common_point(epochs, end, handshake.epochs, handshake.max_offset)
        if point is None or (end and point < store.min_offset):
            raise LogsDiffer(
                f"the epochs of this log ({epochs}) and of the log of the master {address} ({handshake.epochs}) have "
                "nothing in common. Give this replica an empty directory; nothing was overwritten"
            )
        if point < end:
            log.warning("cutting what the master lacks master=%s from=%d to=%d", address, point, end)
            await self.cut(point)
        self.epoch_file.change(epochs.before(point))


class AutoSwitchLink(MasterLink):
    """The connection to the master of one epoch.

    Holds always: nothing is reported before the logs agree up to the reported end, on disk.
    """

    def __init__(self, copying: Copying, hello: SlaveHandshake, login: SlaveLogin | None) -> None:
        super().__init__(copying.store, copying.appended, copying.config, copying.clock, login)
        self._copying = copying
        self._hello = hello
        self._frames = MasterFrames()
        self._is_following = False
        self.last_read_at = self.last_write_at = 0
        self.handshake: asyncio.Future[MasterHandshake] = asyncio.get_running_loop().create_future()

    def say_hello(self) -> None:
        if self._transport is not None:
            self._transport.write(self._hello.encode())

    def follow(self) -> None:
        """The logs agree: say where this one ends, and take what comes."""
        self._is_following = True
        self.report()

    def report(self) -> None:
        if self._is_following:
            self._report_if_new(is_due=True)

    def _report_if_new(self, *, is_due: bool = False) -> None:
        end = self._copying.durable_end
        if is_due or end > self._reported_offset:
            self.last_write_at = self._clock.now()
            self._write([end])

    def _take(self, data: memoryview) -> None:
        if self.closed.done():
            return  # the role was left: nothing of the old epoch may come in any more
        self.last_read_at = self._clock.now()
        for frame in self._frames.feed(data):
            if isinstance(frame, MasterHandshake):
                if self._is_following:
                    raise ReplicationError("a handshake in the middle of the log")
                if not self.handshake.done():
                    self.handshake.set_result(frame)
            elif not self._is_following:
                raise ReplicationError("the master sends its log before it was asked for it")
            elif isinstance(frame, LogPiece):
                self._store.append_data(frame.offset, frame.data)
            else:
                self._copying.take_header(frame)
        if self._is_following:
            self._on_appended()
            self._store.check_takes_data()  # bytes that cannot be read must not be reported
            self._report_when_durable()

    def _report_when_durable(self) -> None:
        flusher, end = self._copying.flusher, self._store.max_offset
        if flusher.is_sync and end > self._store.flushed_offset:
            flusher.tell_when_flushed(end, self._flushed, may_block=False)
        else:
            self._report_if_new()

    def _flushed(self, outcome: FlushOutcome) -> None:
        if outcome is FlushOutcome.FLUSHED and not self.closed.done():
            self._report_if_new()

    def _encode_report(self, offset: int) -> bytes:
        return encode_report(offset)


class AutoSwitchFollower:
    """Follows the master of one epoch, for as long as `run` runs."""

    def __init__(self, copying: Copying, epoch: int, broker_id: int, tls: ClientTls | None) -> None:
        self._copying = copying
        self._epoch = epoch
        self._broker_id = broker_id
        self._tls = tls
        self._moved = asyncio.Event()
        self.address: str | None = None
        self._opened: AutoSwitchLink | None = None
        self.link: AutoSwitchLink | None = None
        """The link on which the master's log comes in; None while there is none."""
        self.trouble: str | None = None

    def __repr__(self) -> str:
        state = f"follows {self.address}" if self.link else f"follows nobody: {self.trouble}"
        return f"<AutoSwitchFollower epoch={self._epoch} {state}>"

    def set_address(self, address: str) -> None:
        if address != self.address:
            self.address = address
            self._moved.set()

    def close(self) -> None:
        """Take and report nothing more, from this moment on. `run` has to be cancelled, too."""
        if self._opened is not None:
            self._opened.close()

    async def run(self) -> None:
        """Connect, follow, and when the connection ends connect again: at once, or with short pauses."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            if self.address is None:
                await self._moved.wait()
            self._moved.clear()
            has_followed, level = False, logging.WARNING
            try:
                has_followed = await self._follow(self.address or "")
                trouble = "the master closed the connection"
            except (ReplicationError, StoreError) as error:
                trouble, level = str(error), logging.ERROR
            except (MQError, OSError) as error:
                trouble = str(error)
            finally:
                self.link = None
            if trouble != self.trouble:  # one line for many attempts that fail alike
                log.log(level, "not following, trying again epoch=%d reason=%s", self._epoch, trouble)
            self.trouble = trouble
            pause = _FIRST_PAUSE_SECONDS if has_followed else min(2 * pause, _LONGEST_PAUSE_SECONDS)
            try:
                async with asyncio.timeout(pause):
                    await self._moved.wait()
            except TimeoutError:
                pass

    async def _follow(self, address: str) -> bool:
        """Follow until the connection ends; return whether the master sent its log."""
        await self._copying.cut_torn_record()
        link = self._opened = await self._connect(address)
        try:
            await self._wait(link, link.logged_in, "the login")
            link.say_hello()
            await self._wait(link, link.handshake, "the handshake")
            handshake = link.handshake.result()
            self._check_epoch(handshake, address)
            await self._copying.agree(handshake, address)
            link.follow()
            self.link, self.trouble = link, None
            end = self._copying.store.max_offset
            log.info("following master=%s epoch=%d offset=%d", address, self._epoch, end)
            while not link.closed.done() and not self._moved.is_set():
                await asyncio.wait([link.closed], timeout=_TICK_SECONDS)
                if not link.closed.done():
                    link.tick()
            if link.closed.done():
                link.closed.result()
        finally:
            link.close()
            link.closed.exception()  # who is cancelled here does not want to know it
        return True

    @staticmethod
    async def _wait(link: AutoSwitchLink, answer: asyncio.Future[Any], what: str) -> None:
        """Wait for an answer of the master. Raises what closed the connection, or ConnectFailed."""
        await asyncio.wait([answer, link.closed], timeout=_CONNECT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if link.closed.done():
            link.closed.result()
            raise ConnectFailed(f"the master closed the connection before {what}: its own log says why")
        if not answer.done():
            raise ConnectFailed(f"the master did not answer {what} within {_CONNECT_SECONDS:g} s")

    def _check_epoch(self, handshake: MasterHandshake, address: str) -> None:
        """Reports go to the master of exactly the newest epoch that is known, and to no other."""
        last = handshake.epochs.last
        epoch = last.epoch if last is not None else -1
        if not may_report(epoch, self._epoch):
            raise ConnectFailed(f"the broker at {address} is master of epoch {epoch}, and not of {self._epoch}")

    async def _connect(self, address: str) -> AutoSwitchLink:
        config = self._copying.config
        secret = read_secret(config.store.ha_secret_file)
        hello = SlaveHandshake(self._broker_id, config.store.sync_from_last_file, config.store.async_learner)

        def make() -> AutoSwitchLink:
            login = None
            if secret is not None:
                login = SlaveLogin(secret, self._broker_id, secrets.token_bytes(NONCE_SIZE))
            return AutoSwitchLink(self._copying, hello, login)

        return await open_link(make, address, _CONNECT_SECONDS, self._tls)
