"""Queues shared out by the broker (400), and whether a group pulls or pops them (401, 402)."""

from __future__ import annotations

from downrange.broker.handlers.topics import refuse_on_slave
from downrange.broker.live_config import LiveConfig
from downrange.broker.pop.assignment import RequestModes, popped_by, shared_out
from downrange.broker.pull_checks import FAQ
from downrange.broker.routes import RouteTable
from downrange.broker.tables import Tables
from downrange.model.message import MessageQueue
from downrange.model.topics import RETRY_PREFIX
from downrange.protocol.bodies.body import decode_body, encode_body
from downrange.protocol.bodies.pop import (
    POP,
    PULL,
    AssignmentBody,
    MessageRequestMode,
    QueryAssignmentBody,
    QueueAssignment,
)
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError, NoPermission, SubscriptionGroupNotExist, TopicNotExist
from downrange.transport.connection import Connection


class AssignmentHandlers:
    """Tells consumers which queues they have, and whether they pull or pop."""

    def __init__(self, config: LiveConfig, tables: Tables, modes: RequestModes) -> None:
        self._config = config
        self._tables = tables
        self._modes = modes

    @property
    def routes(self) -> RouteTable:
        return {
            RequestCode.QUERY_ASSIGNMENT: self.query,
            RequestCode.SET_MESSAGE_REQUEST_MODE: self.set_mode,
            RequestCode.GET_ALL_MESSAGE_REQUEST_MODE: self.all_modes,
        }

    def query(self, command: Command, connection: Connection) -> Command:
        asked = decode_body(QueryAssignmentBody, command.body_bytes)
        return command.reply(body=encode_body(AssignmentBody(message_queue_assignments=self._assignments(asked))))

    def _assignments(self, asked: QueryAssignmentBody) -> tuple[QueueAssignment, ...] | None:
        """What a consumer gets; None when it is to keep what it has."""
        topic, group = asked.topic, asked.consumer_group
        config = self._tables.topics.get(topic)
        if config is None:
            return None
        set_mode = self._modes.get(topic, group)
        mode = PULL if set_mode is None or topic.startswith(RETRY_PREFIX) else set_mode.mode
        queues = config.read_queue_nums
        if asked.message_model == "BROADCASTING":
            found = list(range(queues))
        else:
            live = self._tables.consumers.get(group)
            if live is None:
                return None
            clients = [client.client_id for client in live.members.values()]
            if mode == POP and set_mode is not None:
                found = popped_by(queues, clients, asked.client_id, asked.strategy_name, set_mode.pop_share_queue_num)
            else:
                found = shared_out(queues, clients, asked.client_id, asked.strategy_name)
        name = self._config.broker.broker_name
        return tuple(
            QueueAssignment(message_queue=MessageQueue(topic, name, queue_id), mode=mode) for queue_id in found
        )

    def set_mode(self, command: Command, connection: Connection) -> Command:
        refuse_on_slave(self._config)
        mode = decode_body(MessageRequestMode, command.body_bytes)
        if mode.topic.startswith(RETRY_PREFIX):
            raise NoPermission("retry topic is not allowed to set mode")
        if mode.topic not in self._tables.topics:
            raise TopicNotExist(f"topic[{mode.topic}] not exist, apply first please! {FAQ}")
        if self._tables.groups.get(mode.consumer_group) is None:
            raise SubscriptionGroupNotExist(f"subscription group [{mode.consumer_group}] does not exist, {FAQ}")
        if mode.mode not in (PULL, POP):
            raise BrokerError(f"mode {mode.mode!r} is neither PULL nor POP", ResponseCode.INVALID_PARAMETER)
        self._modes.put(mode)
        return command.reply()

    def all_modes(self, command: Command, connection: Connection) -> Command:
        return command.reply(body=encode_body(self._modes.table()))
