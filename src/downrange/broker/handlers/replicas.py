"""Requests about replication under a controller: elections (1008), epochs (1007), figures (907), addresses (906)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from downrange.broker.live_config import LiveConfig
from downrange.broker.replication.auto_switch import AutoSwitchReplication, HaRole
from downrange.broker.routes import RouteTable
from downrange.protocol.bodies.body import encode_body
from downrange.protocol.bodies.controller import EpochEntryCache, ExchangeHAInfo, NotifyBrokerRoleChangedRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError
from downrange.transport.connection import Connection


class HearsOfElections(Protocol):
    def notified(self, master_epoch: int | None) -> None: ...


@dataclass(eq=False)
class ReplicaHandlers:
    """Answers for a broker in controller mode; any other broker says that it is not."""

    _config: LiveConfig
    _replication: AutoSwitchReplication | None
    _manager: HearsOfElections | None

    @property
    def routes(self) -> RouteTable:
        return {
            RequestCode.CONTROLLER_NOTIFY_BROKER_ROLE_CHANGED: self.role_changed,
            RequestCode.CONTROLLER_GET_BROKER_EPOCH_CACHE: self.get_epochs,
            RequestCode.GET_BROKER_HA_STATUS: self.get_ha_status,
            RequestCode.EXCHANGE_BROKER_HA_INFO: self.exchange_ha_info,
        }

    def _own(self) -> AutoSwitchReplication:
        if self._replication is None:
            raise BrokerError("this broker has no controller: enableControllerMode=false")
        return self._replication

    def role_changed(self, command: Command, connection: Connection) -> Command:
        """Request 1008, a hint: the controller is asked before anything is done."""
        self._own()
        if self._manager is not None:
            self._manager.notified(command.header(NotifyBrokerRoleChangedRequest).master_epoch)
        return command.reply()

    def get_epochs(self, command: Command, connection: Connection) -> Command:
        """Request 1007: which part of the log was written in which epoch."""
        own, broker = self._own(), self._config.broker
        body = EpochEntryCache(
            broker_id=broker.broker_id,
            broker_name=broker.broker_name,
            cluster_name=broker.broker_cluster_name,
            epoch_list=own.epoch_entries(),
            max_offset=own.max_offset,
        )
        return command.reply(body=encode_body(body))

    def get_ha_status(self, command: Command, connection: Connection) -> Command:
        """Request 907: who follows, and how far they are."""
        return command.reply(body=encode_body(self._own().ha_runtime_info()))

    def exchange_ha_info(self, command: Command, connection: Connection) -> Command:
        """Request 906 of a slave that looks for its master's port; other brokers say nothing about themselves."""
        own = self._own()
        if own.role is not HaRole.MASTER:
            return command.reply()
        info = ExchangeHAInfo(
            master_ha_address=self._config.ha_address,
            master_flush_offset=own.max_offset,
            master_address=self._config.broker.address,
        )
        return command.reply(header=info)
