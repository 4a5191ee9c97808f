"""Clients and their groups: heartbeats (34), leaving (35), members of a group (38), checks of subscriptions (46).

Also the queue locks of orderly consumers (41, 42).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeVar
from weakref import WeakSet

import msgspec

from downrange.broker.clients import Client, ConsumerGroup
from downrange.broker.compiled_sql import compiled
from downrange.broker.live_config import LiveConfig
from downrange.broker.queue_locks import QueueLocks
from downrange.broker.routes import RouteTable
from downrange.broker.tables import Tables
from downrange.clock import Clock
from downrange.model.sql.errors import SqlError
from downrange.model.subscription import SQL92
from downrange.model.topics import retry_topic
from downrange.protocol.bodies.body import Body, BodyError, decode_body, encode_body
from downrange.protocol.bodies.groups import (
    CheckClientBody,
    ConsumerData,
    ConsumerGroupRequest,
    ConsumerIds,
    HeartbeatData,
    LockBatchBody,
    LockedQueues,
    UnregisterClientRequest,
)
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command, request
from downrange.protocol.errors import BrokerError, SubscriptionParseFailed
from downrange.store.config import BrokerRole
from downrange.transport.connection import Connection
from downrange.transport.errors import TransportError

T = TypeVar("T", bound=Body)

# The bit of a topic to which only unit clients subscribe.
UNIT_SUBSCRIPTION: Final = 2
# Parsing Java's non-standard JSON is slow: a body longer than any genuine one must be standard JSON.
MAX_LENIENT_BYTES: Final = 1 << 20
# Clients that were connected before a restart have sent a heartbeat after this time: they do so every 30 s.
GATHERING_SECONDS: Final = 40.0


@dataclass(eq=False)
class ClientHandlers:
    """Keeps the tables of connected clients and their filters, and tells the members of a group about changes."""

    _config: LiveConfig
    _tables: Tables
    _locks: QueueLocks
    _clock: Clock
    was_killed: bool = False
    """Whether this broker did not stop in good order before it started: the clients that it had may still be there."""

    def __post_init__(self) -> None:
        self._started = self._clock.monotonic()
        self._heard: WeakSet[Connection] = WeakSet()
        self._asking: dict[str, WeakSet[Connection]] = {}
        self._tables.consumers.on_change = self._notify
        self._tables.consumers.on_gone = self._tables.filters.retire

    @property
    def routes(self) -> RouteTable:
        return {
            RequestCode.HEART_BEAT: self.heartbeat,
            RequestCode.UNREGISTER_CLIENT: self.unregister,
            RequestCode.GET_CONSUMER_LIST_BY_GROUP: self.consumer_list,
            RequestCode.CHECK_CLIENT_CONFIG: self.check_subscription,
            RequestCode.LOCK_BATCH_MQ: self.lock,
            RequestCode.UNLOCK_BATCH_MQ: self.unlock,
        }

    # --- coming and going ---------------------------------------------------------------------------------------

    def heartbeat(self, command: Command, connection: Connection) -> Command:
        data = _body(HeartbeatData, command)
        self._heard.add(connection)
        client = Client(connection, data.client_id, command.language, command.version, self._clock.now())
        for consumer in data.consumer_data_set:
            self._join(consumer, client)
        for producer in data.producer_data_set:
            self._tables.producers.heartbeat(producer.group_name, client)
        return command.reply()

    def _join(self, consumer: ConsumerData, client: Client) -> None:
        name = consumer.group_name
        group = self._tables.groups.find(name, auto_create=self._config.broker.auto_create_subscription_group)
        # A consumer of an unknown group becomes a member, too; only its pulls are refused.
        if group is not None:
            unit = UNIT_SUBSCRIPTION if consumer.unit_mode else 0
            self._tables.topics.ensure(retry_topic(name), group.retry_queue_nums, topic_sys_flag=unit)
        self._tables.consumers.heartbeat(
            name,
            client,
            consume_type=consumer.consume_type,
            message_model=consumer.message_model,
            consume_from_where=consumer.consume_from_where,
            subscriptions=consumer.subscription_data_set,
        )
        self._tables.filters.register(name, consumer.subscription_data_set)

    def unregister(self, command: Command, connection: Connection) -> Command:
        header = command.header(UnregisterClientRequest)
        if header.producer_group is not None:
            self._tables.producers.leave(header.producer_group, connection)
        if header.consumer_group is not None:
            self._tables.consumers.leave(header.consumer_group, connection)
        return command.reply(ext_fields={})

    def _notify(self, group: ConsumerGroup) -> None:
        """Ask every member to redistribute the queues (request 40)."""
        known = self._tables.groups.get(group.name)
        if not self._config.broker.notify_consumer_ids_changed_enable or not (
            known is None or known.notify_consumer_ids_changed_enable
        ):
            return
        notice = request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, ConsumerGroupRequest(group.name), oneway=True)
        for member in list(group.members):
            try:
                member.oneway(notice)
            except TransportError:
                continue  # this member is about to leave, which is another change

    # --- questions ----------------------------------------------------------------------------------------------

    def consumer_list(self, command: Command, connection: Connection) -> Command:
        name = command.header(ConsumerGroupRequest).consumer_group
        group = self._tables.consumers.get(name)
        if group is None or self._is_gathering(group, connection):
            return command.reply(ResponseCode.SYSTEM_ERROR, f"no consumer for this group, {name}", ext_fields={})
        ids = ConsumerIds(tuple(client.client_id for client in group.members.values()))
        return command.reply(ext_fields={}, body=encode_body(ids))

    def _is_gathering(self, group: ConsumerGroup, asking: Connection) -> bool:
        """Whether members that were there before this broker started have not sent a heartbeat yet.

        Clients send one every 30 s, and ask for the list of members meanwhile. A client that finds itself missing in
        the list gives up all its queues; the C++ client may then stop for ever. Without a list it keeps its queues.
        """
        if not self.was_killed or self._clock.monotonic() - self._started > GATHERING_SECONDS:
            self._asking.clear()
            return False
        members = self._asking.setdefault(group.name, WeakSet())
        members.add(asking)
        return any(member.is_open and member not in self._heard for member in members)

    def check_subscription(self, command: Command, connection: Connection) -> Command:
        """Check whether this broker can filter by the expression of the consumer."""
        subscription = _body(CheckClientBody, command).subscription_data
        if subscription.is_tag_type:
            return command.reply()
        kind = subscription.expression_type
        if not self._config.broker.enable_property_filter:
            raise BrokerError(f"The broker does not support consumer to filter message by {kind}")
        if kind != SQL92:
            raise SubscriptionParseFailed(f"unknown expression type {kind}: expected TAG or SQL92")
        expression = compiled(subscription.expression)
        if isinstance(expression, SqlError):
            raise SubscriptionParseFailed(str(expression))
        return command.reply()

    # --- queue locks --------------------------------------------------------------------------------------------

    def lock(self, command: Command, connection: Connection) -> Command:
        """Request 41. Under a controller only a master locks: another broker may be master, and does."""
        wanted = _body(LockBatchBody, command)
        if self._config.broker.enable_controller_mode and self._config.store.broker_role is BrokerRole.SLAVE:
            return command.reply(body=encode_body(LockedQueues(frozenset())))
        held = self._locks.lock(wanted.consumer_group, wanted.client_id, wanted.mq_set, self._clock.now())
        return command.reply(body=encode_body(LockedQueues(frozenset(held))))

    def unlock(self, command: Command, connection: Connection) -> Command:
        given_up = _body(LockBatchBody, command)
        self._locks.unlock(given_up.consumer_group, given_up.client_id, given_up.mq_set)
        return command.reply()


def _body(body_type: type[T], command: Command) -> T:
    data = command.body_bytes
    if len(data) > MAX_LENIENT_BYTES:
        try:
            msgspec.json.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            limit = f"at most {MAX_LENIENT_BYTES} are read"
            raise BodyError(f"{body_type.__name__}: {len(data)} bytes that are not standard JSON, {limit}") from None
    return decode_body(body_type, data)
