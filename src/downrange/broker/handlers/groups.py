"""Groups for operators: their configuration and their connected members."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from downrange.broker.clients import Client
from downrange.broker.handlers.topics import MAX_QUEUES, refuse_on_slave
from downrange.broker.live_config import LiveConfig
from downrange.broker.routes import RouteTable
from downrange.broker.statistics import Statistics
from downrange.broker.tables import Tables
from downrange.model.topics import RETRY_POLICIES, GroupRetryPolicy, SubscriptionGroupConfig, check_group_name
from downrange.protocol.bodies.body import decode_body, encode_body
from downrange.protocol.bodies.groups import Connection as ConnectionBody
from downrange.protocol.bodies.groups import (
    ConsumerConnection,
    ConsumerGroupRequest,
    DeleteSubscriptionGroupRequest,
    GroupRequest,
    ProducerConnection,
    ProducerGroupRequest,
    ProducerInfo,
    ProducerTable,
    SubscriptionGroups,
)
from downrange.protocol.codes import LanguageCode, RequestCode
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError, ConsumerNotOnline, SubscriptionGroupNotExist
from downrange.transport.connection import Connection

log = logging.getLogger(__name__)


@dataclass(eq=False)
class GroupHandlers:
    """Requests of operators about consumer and producer groups. A slave refuses changes."""

    _config: LiveConfig
    _tables: Tables
    _statistics: Statistics

    @property
    def routes(self) -> RouteTable:
        return {
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: self.create,
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: self.create_several,
            RequestCode.DELETE_SUBSCRIPTIONGROUP: self.delete,
            RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: self.get_all,
            RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: self.get,
            RequestCode.GET_CONSUMER_CONNECTION_LIST: self.get_consumers,
            RequestCode.GET_PRODUCER_CONNECTION_LIST: self.get_producers,
            RequestCode.GET_ALL_PRODUCER_INFO: self.get_all_producers,
        }

    # --- configuration ------------------------------------------------------------------------------------------

    def create(self, command: Command, connection: Connection) -> Command:
        """Request 200: create a group or replace its configuration."""
        refuse_on_slave(self._config)
        return self._create([decode_body(SubscriptionGroupConfig, command.body_bytes)], command, connection)

    def create_several(self, command: Command, connection: Connection) -> Command:
        """Request 225 (of 5.x): create or change several groups; if one is wrong, none."""
        refuse_on_slave(self._config)
        return self._create(decode_body(SubscriptionGroups, command.body_bytes).group_config_list, command, connection)

    def _create(self, configs: Sequence[SubscriptionGroupConfig], command: Command, connection: Connection) -> Command:
        for config in configs:
            _check(config)
        for config in configs:
            self._tables.groups.put(config)
            log.info("group set by request group=%s config=%s peer=%s", config.group_name, config, connection.peer)
        return command.reply()

    def delete(self, command: Command, connection: Connection) -> Command:
        """Request 207: delete a group."""
        refuse_on_slave(self._config)
        header = command.header(DeleteSubscriptionGroupRequest)
        self._tables.groups.delete(header.group_name)
        self._statistics.forget_group(header.group_name)
        if header.removes_offsets:
            self._tables.offsets.remove_group(header.group_name)
        log.info(
            "group deleted by request group=%s with_offsets=%s peer=%s",
            header.group_name,
            header.removes_offsets,
            connection.peer,
        )
        return command.reply()

    def get_all(self, command: Command, connection: Connection) -> Command:
        """Request 201: the configuration of all groups."""
        return command.reply(body=encode_body(self._tables.groups.table()))

    def get(self, command: Command, connection: Connection) -> Command:
        """Request 352 (of 5.x): the configuration of one group."""
        group = command.header(GroupRequest).group
        config = self._tables.groups.get(group)
        if config is None:
            raise SubscriptionGroupNotExist(f"No group in this broker. group: {group}")
        return command.reply(body=encode_body(config))

    # --- members ------------------------------------------------------------------------------------------------

    def get_consumers(self, command: Command, connection: Connection) -> Command:
        """Request 203: the connected consumers of a group."""
        group = command.header(ConsumerGroupRequest).consumer_group
        live = self._tables.consumers.get(group)
        if live is None:
            raise ConsumerNotOnline(f"the consumer group[{group}] not online")
        body = ConsumerConnection(
            connection_set=tuple(_connection(client) for client in live.members.values()),
            subscription_table=dict(live.subscriptions),
            consume_type=live.consume_type,
            message_model=live.message_model,
            consume_from_where=live.consume_from_where,
        )
        return command.reply(body=encode_body(body))

    def get_producers(self, command: Command, connection: Connection) -> Command:
        """Request 204: the connected producers of a group."""
        group = command.header(ProducerGroupRequest).producer_group
        members = self._tables.producers.get(group)
        if members is None:
            raise BrokerError(f"the producer group[{group}] not exist")
        return command.reply(body=encode_body(ProducerConnection(tuple(_connection(client) for client in members))))

    def get_all_producers(self, command: Command, connection: Connection) -> Command:
        """Request 328: the connected producers of all groups."""
        data = {group: tuple(_producer(client) for client in members) for group, members in self._tables.producers}
        return command.reply(body=encode_body(ProducerTable(data)))


def _check(config: SubscriptionGroupConfig) -> None:
    check_group_name(config.group_name)
    numbers = {  # they must fit the fields of Java's class
        "retryMaxTimes": (config.retry_max_times, 31),
        "brokerId": (config.broker_id, 63),
        "whichBrokerWhenConsumeSlowly": (config.which_broker_when_consume_slowly, 63),
    }
    for key, (value, bits) in numbers.items():
        if not -(1 << bits) <= value < 1 << bits:
            raise BrokerError(f"{key}={value} of group[{config.group_name}]: expected a number of {bits + 1} bits")
    if not 0 <= config.retry_queue_nums <= MAX_QUEUES:
        raise BrokerError(
            f"retryQueueNums={config.retry_queue_nums} of group[{config.group_name}]: expected 0 to {MAX_QUEUES}"
        )
    _check_retry_policy(config.group_retry_policy)


def _check_retry_policy(policy: GroupRetryPolicy | None) -> None:
    if policy is None:
        return
    if policy.type not in RETRY_POLICIES:
        raise BrokerError(f"groupRetryPolicy of type {policy.type}: expected {' or '.join(RETRY_POLICIES)}")
    growing, listed = policy.exponential_retry_policy, policy.customized_retry_policy
    if growing is not None and not (0 < growing.initial <= growing.max < 1 << 63 and growing.multiplier >= 1):
        raise BrokerError("exponentialRetryPolicy: expected 0 < initial <= max in ms, and a multiplier of 1 or more")
    if listed is not None and not (listed.next and all(0 <= pause < 1 << 63 for pause in listed.next)):
        raise BrokerError("customizedRetryPolicy: expected next, a list of pauses in ms, none of them below 0")


def _connection(client: Client) -> ConnectionBody:
    return ConnectionBody(
        client_id=client.client_id,
        client_addr=client.connection.peer,
        language=_language(client.language),
        version=client.version,
    )


def _producer(client: Client) -> ProducerInfo:
    return ProducerInfo(
        client_id=client.client_id,
        remote_ip=f"/{client.connection.peer}",
        language=_language(client.language),
        version=client.version,
        last_update_timestamp=client.heard_millis,
    )


def _language(code: int) -> str:
    """The name of a client's language; a name that RocketMQ's tools do not know would break them."""
    try:
        return LanguageCode(code).name
    except ValueError:
        return LanguageCode.OTHER.name
