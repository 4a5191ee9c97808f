"""A broker's part in replication under a controller, whose role changes while it runs. [AutoSwitchHAService]

The interface first; see `AutoSwitchReplication`. How it is put together in a broker:

    slaves = InSyncSlaves(store, live, clock)                  # broker/replication/in_sync.py
    writer = MessageWriter(store, waiting, flusher, statistics, clock, slaves)
    replication = AutoSwitchReplication(live, writer, flusher, slaves, clock, HaPort(listening, server_tls, client_tls))
    replication.broker_id = 2                                  # the controller id, once it is known
    replication.propose = ...                                  # asks the controller with request 1001
    replication.on_given_up = ...                              # the lease ran out: a new epoch is needed
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import NamedTuple

from downrange.protocol.bodies.controller import EpochEntry, HARuntimeInfo
from downrange.transport.tls import ClientTls, ServerTls


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


class ProposalAnswer(NamedTuple):
    """The definite answer of the controller to a proposed sync-state set.

    `code` 0: `sync_state_set` is in force with `sync_state_set_epoch`. Else the proposal was refused (2000-2003, 2006,
    2013) and never comes into force. An answer that is not definite (time-out, 2007, closed connection) is no
    ProposalAnswer: `propose` raises MQError or OSError, and the proposal counts as perhaps in force.
    """

    code: int
    sync_state_set: frozenset[int] = frozenset()
    sync_state_set_epoch: int = 0


Propose = Callable[[frozenset[int], int], Awaitable[ProposalAnswer]]
"""Called by a master with the new set and the epoch of the set that it replaces, for request 1001."""


class AutoSwitchReplication:
    """Interface; all methods are for the loop's thread. `start`, `run` and `stop` are those of `Replication`.

    - `await become_master(epoch, sync_state_set, sync_state_set_epoch)`: stores the epoch durably, closes every link,
      cuts an incomplete record, writes the epoch file, makes all of the log readable, and accepts sends. Raises
      StaleEpoch when a newer epoch was seen.
    - `await become_slave(epoch, master_ha_address)`: stores the epoch durably, closes every link, refuses sends, and
      follows the master at that address from then on (None: not known yet, see `set_master_ha_address`). Raises
      StaleEpoch.
    - `set_master_ha_address(address)`: where the master of this epoch can be reached now.
    - `renewed(sent_at, lease_millis, epoch)`: the controller answered "you are master in this epoch" to a heartbeat
      that was sent at `sent_at`, a time of `boot_seconds()`.
    - `sync_state_set_committed(sync_state_set, sync_state_set_epoch)`: read from the controller (1004, 1008, a
      heartbeat's answer); resolves proposals whose answer was lost.
    - `give_up()`: become FENCED now; sends get 14 until the next `become_…`. Called by itself when the lease ran out.
    - `role`, `epoch` (of the role; -1 before the first one), `seen_epoch`, `max_offset`, `confirm_offset`,
      `sync_state_set`, `sync_state_set_epoch`, `lease_left_seconds`.
    - `ha_runtime_info()`: the body of request 907. `epoch_entries()`: the entries of request 1007.
    """

    broker_id: int | None = None
    propose: Propose | None = None
    on_given_up: Callable[[], object]
    role: HaRole
    epoch: int
    seen_epoch: int
    max_offset: int
    confirm_offset: int
    sync_state_set: frozenset[int]
    sync_state_set_epoch: int

    async def become_master(self, epoch: int, sync_state_set: frozenset[int], sync_state_set_epoch: int) -> None:
        raise NotImplementedError

    async def become_slave(self, epoch: int, master_ha_address: str | None) -> None:
        raise NotImplementedError

    def set_master_ha_address(self, address: str) -> None:
        raise NotImplementedError

    def renewed(self, sent_at: float, lease_millis: int, epoch: int) -> None:
        raise NotImplementedError

    def sync_state_set_committed(self, sync_state_set: frozenset[int], sync_state_set_epoch: int) -> None:
        raise NotImplementedError

    def give_up(self) -> None:
        raise NotImplementedError

    def ha_runtime_info(self) -> HARuntimeInfo:
        raise NotImplementedError

    def epoch_entries(self) -> tuple[EpochEntry, ...]:
        raise NotImplementedError
