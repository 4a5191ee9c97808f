"""A broker's part in replication under a controller, whose role changes while it runs. [AutoSwitchHAService]

How it is put together in a broker:

    slaves = InSyncSlaves(store, live, clock)
    writer = MessageWriter(store, waiting, flusher, statistics, clock, slaves)
    replication = AutoSwitchReplication(live, writer, flusher, slaves, clock, HaPort(listening, server_tls, client_tls))
    replication.broker_id = 2                  # the controller id, once it is known
    replication.propose = ...                  # asks the controller with request 1001
    replication.on_given_up = ...              # the lease ran out: a new epoch is needed
    replication.on_truncated = ...             # the log was cut: what is derived from it has to follow
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Final, NamedTuple

from downrange.broker.live_config import LiveConfig
from downrange.broker.message_writer import MessageWriter
from downrange.broker.replication.auto_switch_slave import AutoSwitchFollower, Copying
from downrange.broker.replication.in_sync import InSyncSlaves, ProposalAnswer, Propose, boot_seconds
from downrange.broker.replication.master import SlaveState
from downrange.broker.services.flushing import Flusher
from downrange.broker.services.replication import Replication
from downrange.clock import Clock
from downrange.model.fencing import AckRules, Mastership, may_enter
from downrange.protocol.bodies.controller import OPEN_END, EpochEntry, HAClientInfo, HAConnectionInfo, HARuntimeInfo
from downrange.store.config import BrokerRole
from downrange.store.epoch_file import EpochFile
from downrange.store.epochs import StaleEpoch
from downrange.transport.tls import ClientTls, ServerTls

__all__ = ["AutoSwitchReplication", "HaPort", "HaRole", "ProposalAnswer", "Propose", "StaleEpoch", "boot_seconds"]

log = logging.getLogger(__name__)

_PREFIX_SECONDS: Final = 10.0


class HaRole(Enum):
    """The role that a controller gave this broker; FENCED until it gave one, and after a master gave its role up."""

    FENCED = "FENCED"
    MASTER = "MASTER"
    SLAVE = "SLAVE"


class HaPort(NamedTuple):
    """The listening socket for slaves and how both sides of the stream are encrypted."""

    listening: socket.socket
    server_tls: ServerTls | None = None
    client_tls: ClientTls | None = None


class AutoSwitchReplication(Replication):
    """Serves slaves, follows a master, or neither, as a controller says. For the loop's thread.

    Holds always: an epoch is on disk as seen before this broker acts in it; it acts in the newest one that it has seen,
    or not at all. Only as MASTER with a lease does it take messages.
    """

    def __init__(
        self,
        config: LiveConfig,
        writer: MessageWriter,
        flusher: Flusher,
        slaves: InSyncSlaves,
        clock: Clock,
        port: HaPort,
    ) -> None:
        self._config = config
        self._writer = writer
        self._store = store = writer.store
        self._slaves = slaves
        self._clock = clock
        self._port = port
        self._epoch_file = EpochFile(store.config.store_path_root_dir)
        self._epoch_file.load(store.max_offset)
        self._copying = Copying(config, writer, flusher, self._epoch_file, clock)
        self._follower: AutoSwitchFollower | None = None
        self._following: asyncio.Task[None] | None = None
        self._fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._given_up_epoch = -1
        self.role = HaRole.FENCED
        self.epoch = -1
        """The epoch of the role; -1 before the first one."""
        self.broker_id: int | None = None
        """The controller id of this broker. To be set before it gets a role."""
        self.on_given_up: Callable[[], object] = lambda: None
        """Called when the lease of this master ran out, and its role with it."""
        slaves.on_confirmed = writer.dispatched
        slaves.on_lease_lost = self._lease_lost
        store.set_role(BrokerRole.SLAVE)
        was_controlled = self._epoch_file.epochs.last is not None
        self._hide(min(store.checkpoint.confirm_phy_offset, store.max_offset) if was_controlled else store.max_offset)

    def __repr__(self) -> str:
        role = repr(self._follower) if self._follower is not None else repr(self._slaves)
        return f"<AutoSwitchReplication {self.role.value} epoch={self.epoch} seen={self.seen_epoch} {role}>"

    # --- what others set and ask --------------------------------------------------------------------------------

    @property
    def propose(self) -> Propose | None:
        """Asks the controller for another sync-state set, with request 1001."""
        return self._slaves.propose

    @propose.setter
    def propose(self, propose: Propose) -> None:
        self._slaves.propose = propose

    @property
    def on_truncated(self) -> Callable[[int], object]:
        """Called with the new end after the log was cut."""
        return self._copying.on_truncated

    @on_truncated.setter
    def on_truncated(self, on_truncated: Callable[[int], object]) -> None:
        self._copying.on_truncated = on_truncated

    @property
    def seen_epoch(self) -> int:
        """The newest epoch that this broker was told of; it survives a start."""
        return self._epoch_file.seen

    @property
    def max_offset(self) -> int:
        return self._store.max_offset

    @property
    def confirm_offset(self) -> int:
        """The end of the part of the log that consumers may read."""
        if self._store.follower.at_once:
            return self._store.max_offset
        return self._slaves.confirm_offset if self.role is HaRole.MASTER else self._copying.confirm_offset

    @property
    def sync_state_set(self) -> frozenset[int]:
        """The committed set that this master knows; empty on others."""
        return self._slaves.term.committed if self._slaves.term is not None else frozenset()

    @property
    def sync_state_set_epoch(self) -> int:
        return self._slaves.term.committed_epoch if self._slaves.term is not None else 0

    @property
    def lease_left_seconds(self) -> float:
        """How long this master may go on acknowledging without a renewal; 0 without a lease."""
        term = self._slaves.term
        return max(0.0, term.deadline - self._slaves.now()) if term is not None and term.deadline is not None else 0.0

    def epoch_entries(self) -> tuple[EpochEntry, ...]:
        """The epochs of this log, for request 1007."""
        entries = self._epoch_file.epochs.entries
        ends = [*(entry.start for entry in entries[1:]), OPEN_END]
        return tuple(
            EpochEntry(end_offset=end, epoch=entry.epoch, start_offset=entry.start)
            for entry, end in zip(entries, ends, strict=False)
        )

    def ha_runtime_info(self) -> HARuntimeInfo:
        """The state of replication, for request 907."""
        if self.role is not HaRole.MASTER:
            return HARuntimeInfo(ha_client_runtime_info=self._client_info())
        end = self._store.max_offset
        links = self._slaves.in_sync_links()
        connections = tuple(
            HAConnectionInfo(
                addr=link.address,
                diff=end - (link.reported_offset or 0),
                in_sync=is_in_sync,
                slave_ack_offset=link.reported_offset or 0,
                transfer_from_where=link.sent_offset,
            )
            for link, is_in_sync in links
        )
        count = sum(is_in_sync for _, is_in_sync in links)
        return HARuntimeInfo(
            ha_connection_info=connections, in_sync_slave_nums=count, master=True, master_commit_log_max_offset=end
        )

    def _client_info(self) -> HAClientInfo:
        follower = self._follower
        if follower is None:
            return HAClientInfo(max_offset=self._store.max_offset)
        link = follower.link
        return HAClientInfo(
            last_read_timestamp=link.last_read_at if link is not None else 0,
            last_write_timestamp=link.last_write_at if link is not None else 0,
            master_addr=follower.address,
            max_offset=self._store.max_offset,
        )

    # --- roles --------------------------------------------------------------------------------------------------

    async def become_master(self, epoch: int, sync_state_set: frozenset[int], sync_state_set_epoch: int) -> None:
        """Be master in `epoch`. Sends are taken after the first `renewed`. Raises StaleEpoch."""
        assert self.broker_id is not None, "the controller id comes first"
        if epoch == self.epoch and self.role is HaRole.MASTER:
            self.sync_state_set_committed(sync_state_set, sync_state_set_epoch)
            return
        await self._enter(epoch)
        await self._copying.cut_torn_record()
        store, epochs = self._store, self._epoch_file.epochs
        start = store.max_offset
        if epochs.last is None:
            self._epoch_file.change(epochs.appended(epoch, max(0, store.min_offset)))  # also what was stored before
        elif epochs.last.epoch != epoch:
            self._epoch_file.change(epochs.appended(epoch, start))
        self._number_everything()
        self._slaves.confirm_offset = min(self._copying.confirm_offset, start)
        self.role, self.epoch = HaRole.MASTER, epoch
        settings = self._config.store
        rules = AckRules(
            settings.min_in_sync_replicas, settings.all_ack_in_sync_state_set, max(1, settings.in_sync_replicas)
        )
        store.set_role(BrokerRole.SYNC_MASTER)
        self._slaves.lead(
            Mastership(self.broker_id, epoch, start, sync_state_set, sync_state_set_epoch, rules), self._epoch_file
        )
        log.info("leads epoch=%d start=%d syncStateSet=%s", epoch, start, sorted(sync_state_set))

    async def become_slave(self, epoch: int, master_ha_address: str | None) -> None:
        """Follow the master of `epoch`, whose address may not be known yet. Raises StaleEpoch."""
        assert self.broker_id is not None, "the controller id comes first"
        await self._enter(epoch)
        self.role, self.epoch = HaRole.SLAVE, epoch
        self._store.set_fence(None)
        self._follower = AutoSwitchFollower(self._copying, epoch, self.broker_id, self._port.client_tls)
        if master_ha_address is not None:
            self._follower.set_address(master_ha_address)
        self._following = asyncio.create_task(self._follower.run())
        self._following.add_done_callback(self._followed)

    def _followed(self, following: asyncio.Task[None]) -> None:
        """A follower ends when it is cancelled. Anything else is a fault of this program, which `run` raises."""
        if not following.cancelled() and not self._fault.done():
            self._fault.set_exception(following.exception() or RuntimeError("a follower ended by itself"))

    def set_master_ha_address(self, address: str) -> None:
        """Say where the master of this epoch can be reached now."""
        if self._follower is not None:
            self._follower.set_address(address)

    def give_up(self) -> None:
        """Be neither master nor slave: sends get 14 until the next `become_…`."""
        if self.role is HaRole.MASTER:
            self._given_up_epoch = self.epoch
            self._copying.confirm_offset = self.confirm_offset
        self.role = HaRole.FENCED
        self._store.set_role(BrokerRole.SLAVE)
        self._store.set_fence("this broker has no role: it waits for its controller")
        self._slaves.resign()
        if self._follower is not None:
            self._follower.close()
        if self._following is not None:
            self._following.cancel()

    async def _enter(self, epoch: int) -> None:
        """Leave the role of an older epoch: nothing of it is taken, sent, or reported when this returns."""
        if not may_enter(epoch, self.seen_epoch) or epoch <= self._given_up_epoch:
            raise StaleEpoch(f"epoch {epoch} is over: this broker has seen epoch {self.seen_epoch}")
        self._epoch_file.see(epoch)
        self.give_up()
        following, self._following, self._follower = self._following, None, None
        if following is not None:
            with suppress(asyncio.CancelledError):
                await following

    def _hide(self, confirmed: int) -> None:
        """Let records be read up to the confirm offset."""
        self._copying.confirm_offset = confirmed
        if self._store.max_offset > confirmed:
            self._store.hide_unconfirmed(confirmed)
        else:
            self._store.set_confirm_offset(confirmed)

    def _number_everything(self) -> None:
        """Count the queue offsets of all records, also of those that may not be read yet: new ones come behind them."""
        confirmed = self._copying.confirm_offset
        self._store.set_confirm_offset(None)
        self._store.dispatch_pending()
        self._store.hide_unconfirmed(confirmed)

    # --- the controller -----------------------------------------------------------------------------------------

    def renewed(self, sent_at: float, lease_millis: int, epoch: int) -> None:
        """The controller answered "you are master in this epoch" to a heartbeat sent at `sent_at` of `boot_seconds`."""
        if self.role is HaRole.MASTER and epoch == self.epoch:
            self._slaves.renewed(sent_at, lease_millis / 1000)

    def sync_state_set_committed(self, sync_state_set: frozenset[int], sync_state_set_epoch: int) -> None:
        """The controller says which set is in force in this epoch; resolves proposals whose answer was lost."""
        self._slaves.committed(sync_state_set, sync_state_set_epoch)

    def _lease_lost(self) -> None:
        if self.role is HaRole.MASTER:
            log.error("role given up epoch=%d reason=the lease ran out", self.epoch)
            self.give_up()
            self.on_given_up()

    # --- running ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self._slaves.start(self._port.listening, self._port.server_tls)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._slaves.run())
            tasks.create_task(self._slaves.keep_sync_state_set())
            tasks.create_task(self._forget_deleted_epochs())
            await self._fault

    async def _forget_deleted_epochs(self) -> None:
        while True:
            await self._clock.sleep(_PREFIX_SECONDS)
            if self._store.min_offset > 0:
                self._epoch_file.change(self._epoch_file.epochs.without_prefix(self._store.min_offset))

    async def stop(self) -> None:
        await self._slaves.stop()
        self.give_up()
        following, self._following = self._following, None
        if following is not None:
            with suppress(asyncio.CancelledError):
                await following

    def states(self) -> list[SlaveState]:
        return self._slaves.states()

    def lags(self) -> dict[str, int]:
        return {state.address: self._slaves.log_end - state.reported_offset for state in self.states()}

    def runtime_info(self) -> dict[str, str]:
        """Figures about replication for request 28 that RocketMQ's brokers do not have."""
        figures = {"haRole": self.role.value, "haEpoch": str(self.epoch), "haConfirmOffset": str(self.confirm_offset)}
        if self.role is HaRole.MASTER:
            figures["haSyncStateSet"] = ",".join(map(str, sorted(self.sync_state_set)))
            for link, is_in_sync in self._slaves.in_sync_links():
                state = f"reported={link.reported_offset} sent={link.sent_offset} inSync={str(is_in_sync).lower()}"
                figures[f"haSlave_{link.address}"] = state
        elif self._follower is not None:
            following = self._follower.address if self._follower.link is not None else None
            figures |= {"haMaster": following or "", "haTrouble": self._follower.trouble or ""}
        return figures
