"""A consumer failed and sends its message back (36): it comes again later, or ends in the dead-letter queue."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from downrange.broker.delayed import delayed, stored_text
from downrange.broker.groups import Groups
from downrange.broker.handlers.clients import UNIT_SUBSCRIPTION
from downrange.broker.handlers.send_reader import FAQ, refuse_messages_on_slave
from downrange.broker.handlers.storing import Storing
from downrange.broker.live_config import LiveConfig
from downrange.broker.message_writer import MessageWriter
from downrange.broker.stored_topics import named_record
from downrange.broker.topics import Topics
from downrange.model import properties as names
from downrange.model.message import SysFlag
from downrange.model.message_id import offset_message_id
from downrange.model.topics import Perm, SubscriptionGroupConfig, TopicConfig, dlq_topic, retry_topic
from downrange.protocol.bodies.send import ConsumerSendMessageBackRequest
from downrange.protocol.codes import ResponseCode
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError, NoPermission, SubscriptionGroupNotExist
from downrange.store.kept_message import KeptMessage, read_kept
from downrange.store.message_store import MessageStore
from downrange.store.new_message import NewMessage
from downrange.transport.connection import Connection

# Level of the first retry when the broker decides; each further one waits a level longer.
FIRST_RETRY_LEVEL: Final = 3
# Older clients do not mean what stands in maxReconsumeTimes.
VERSION_3_4_9: Final = 121
_MOST_TIMES: Final = 0x7FFFFFFF
_WRITE: Final = int(Perm.WRITE)
_PREPARED: Final = int(SysFlag.TRANSACTION_PREPARED)


@dataclass(eq=False)
class SendBackReader:
    """Makes messages for a group's retry or dead-letter topic of those that its consumers could not consume."""

    _config: LiveConfig
    _topics: Topics
    _groups: Groups
    _store: MessageStore
    _writer: MessageWriter

    def read(self, command: Command, origin: Connection) -> Storing | Command:
        """36."""
        header = command.header(ConsumerSendMessageBackRequest)
        refuse_messages_on_slave(self._config)
        group = self._group(header.group)
        if group.retry_queue_nums <= 0:
            return command.reply()  # this group does without retries: the message is dropped
        self._retry_topic(group, unit_mode=header.unit_mode)
        kept = self._look_up(header.offset)
        message, properties = kept.message, kept.properties
        topic = properties.setdefault(names.RETRY_TOPIC, message.topic)
        properties.setdefault(names.ORIGIN_MESSAGE_ID, offset_message_id(message.store_host, kept.physical_offset))
        properties[names.WAIT] = "false"
        limit = group.retry_max_times
        if header.max_reconsume_times is not None and command.version >= VERSION_3_4_9:
            limit = header.max_reconsume_times
        is_dead = message.reconsume_times >= limit or header.delay_level < 0
        if is_dead:
            again = self._dead(group, message, properties)
        else:
            again = self._retried(group, message, properties, header.delay_level)
        # One attempt older; it keeps its hosts, as RocketMQ lets it.
        again.reconsume_times = min(again.reconsume_times + 1, _MOST_TIMES)
        again.prepared_transaction_offset = 0
        return Storing(
            (again,),
            lambda command, refusal: command.reply(ResponseCode.SYSTEM_ERROR, refusal.status.value),
            waits=False,
            reply=command.reply(),
            then=lambda _: self._count(topic, header.group, is_dead=is_dead),
        )

    def _count(self, topic: str, group: str, *, is_dead: bool) -> None:
        self._writer.statistics.sent_back(topic, group)
        if is_dead:
            self._writer.statistics.sent_to_dlq(group)

    # --- checks -------------------------------------------------------------------------------------------------

    def _group(self, name: str) -> SubscriptionGroupConfig:
        broker = self._config.broker
        group = self._groups.find(name, auto_create=broker.auto_create_subscription_group)
        if group is None:
            raise SubscriptionGroupNotExist(f"subscription group not exist, {name} {FAQ}")
        if not broker.broker_permission & _WRITE:
            raise NoPermission(f"the broker[{broker.broker_ip1}] sending message is forbidden")
        return group

    def _retry_topic(self, group: SubscriptionGroupConfig, *, unit_mode: bool) -> TopicConfig:
        name = retry_topic(group.group_name)
        sys_flag = UNIT_SUBSCRIPTION if unit_mode else 0
        topic = self._topics.ensure(name, group.retry_queue_nums, topic_sys_flag=sys_flag)
        if not topic.perm & _WRITE:
            raise NoPermission(f"the topic[{name}] sending message is forbidden")
        return topic

    def _look_up(self, offset: int) -> KeptMessage:
        found = named_record(self._store, offset)
        if found is None:
            raise BrokerError(f"look message by offset failed, {offset}")
        return read_kept(found[0])

    # --- the message once more ----------------------------------------------------------------------------------

    def _retried(
        self, group: SubscriptionGroupConfig, message: NewMessage, properties: dict[str, str], level: int
    ) -> NewMessage:
        level = level or FIRST_RETRY_LEVEL + message.reconsume_times
        properties[names.DELAY] = str(level)
        message.topic = retry_topic(group.group_name)
        message.queue_id = random.randrange(group.retry_queue_nums)  # noqa: S311  spreading, not secrecy
        if level > 0 and not message.sys_flag & _PREPARED:
            return delayed(message, properties, level, self._writer.max_delay_level)
        # A producer counted attempts below zero, or it is a half message, which is never delayed.
        message.properties = stored_text(properties)
        return message

    def _dead(self, group: SubscriptionGroupConfig, message: NewMessage, properties: dict[str, str]) -> NewMessage:
        properties[names.DELAY] = "0"
        message.topic = self._topics.ensure(dlq_topic(group.group_name), 1).topic_name
        message.queue_id = 0
        message.properties = stored_text(properties)
        return message
