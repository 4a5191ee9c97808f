"""A consumer failed and sends its message back (36): it comes again later, or ends in the dead-letter queue."""

from __future__ import annotations

import random
from typing import Final

from downrange.broker.delayed import delayed, stored_text
from downrange.broker.groups import Groups
from downrange.broker.handlers.clients import UNIT_SUBSCRIPTION
from downrange.broker.handlers.send import refuse_messages_on_slave
from downrange.broker.live_config import LiveConfig
from downrange.broker.message_writer import MessageWriter
from downrange.broker.routes import RouteTable
from downrange.broker.topics import Topics
from downrange.model import properties as names
from downrange.model.message import StoredMessage, SysFlag
from downrange.model.message_id import pack_host
from downrange.model.record import CorruptRecord, decode_record
from downrange.model.topics import Perm, SubscriptionGroupConfig, TopicConfig, dlq_topic, retry_topic
from downrange.protocol.bodies.send import ConsumerSendMessageBackRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError, NoPermission, SubscriptionGroupNotExist
from downrange.store.message_store import MessageStore
from downrange.store.new_message import NewMessage, PutMessageStatus
from downrange.transport.connection import Connection

FAQ: Final = "\nSee http://rocketmq.apache.org/docs/faq/ for further details."
# Level of the first retry when the broker decides; each further one waits a level longer.
FIRST_RETRY_LEVEL: Final = 3
# Older clients do not mean what stands in maxReconsumeTimes.
VERSION_3_4_9: Final = 121
_MOST_TIMES: Final = 0x7FFFFFFF


class SendBackHandlers:
    """Stores what consumers could not consume once more, under their group's retry or dead-letter topic."""

    def __init__(
        self, config: LiveConfig, topics: Topics, groups: Groups, store: MessageStore, writer: MessageWriter
    ) -> None:
        self._config = config
        self._topics = topics
        self._groups = groups
        self._store = store
        self._writer = writer

    @property
    def routes(self) -> RouteTable:
        return {RequestCode.CONSUMER_SEND_MSG_BACK: self.send_back}

    def send_back(self, command: Command, connection: Connection) -> Command:
        header = command.header(ConsumerSendMessageBackRequest)
        refuse_messages_on_slave(self._config)
        group = self._group(header.group)
        if group.retry_queue_nums <= 0:
            return command.reply()  # this group does without retries: the message is dropped
        self._retry_topic(group, unit_mode=header.unit_mode)
        failed = self._look_up(header.offset)
        limit = group.retry_max_times
        if header.max_reconsume_times is not None and command.version >= VERSION_3_4_9:
            limit = header.max_reconsume_times
        is_dead = failed.reconsume_times >= limit or header.delay_level < 0
        again = self._dead(group, failed) if is_dead else self._retried(group, failed, header.delay_level)
        result = self._writer.append(again)
        if result.status is not PutMessageStatus.PUT_OK:
            raise BrokerError(result.status.value)
        statistics = self._writer.statistics
        statistics.sent_back(failed.properties.get(names.RETRY_TOPIC, failed.topic), header.group)
        if is_dead:
            statistics.sent_to_dlq(header.group)
        return command.reply()

    # --- checks -------------------------------------------------------------------------------------------------

    def _group(self, name: str) -> SubscriptionGroupConfig:
        broker = self._config.broker
        group = self._groups.find(name, auto_create=broker.auto_create_subscription_group)
        if group is None:
            raise SubscriptionGroupNotExist(f"subscription group not exist, {name} {FAQ}")
        if not broker.broker_permission & Perm.WRITE:
            raise NoPermission(f"the broker[{broker.broker_ip1}] sending message is forbidden")
        return group

    def _retry_topic(self, group: SubscriptionGroupConfig, *, unit_mode: bool) -> TopicConfig:
        name = retry_topic(group.group_name)
        sys_flag = UNIT_SUBSCRIPTION if unit_mode else 0
        topic = self._topics.ensure(name, group.retry_queue_nums, topic_sys_flag=sys_flag)
        if not topic.perm & Perm.WRITE:
            raise NoPermission(f"the topic[{name}] sending message is forbidden")
        return topic

    def _look_up(self, offset: int) -> StoredMessage:
        record = self._store.record_at(offset)
        try:
            if record is not None:
                return decode_record(record)
        except CorruptRecord:
            pass  # something at this offset looks like a record, and is none
        raise BrokerError(f"look message by offset failed, {offset}")

    # --- the message once more ----------------------------------------------------------------------------------

    def _retried(self, group: SubscriptionGroupConfig, failed: StoredMessage, level: int) -> NewMessage:
        queue_id = random.randrange(group.retry_queue_nums)  # noqa: S311  spreading, not secrecy
        level = level or FIRST_RETRY_LEVEL + failed.reconsume_times
        properties = _properties(failed, level)
        again = _again(failed, retry_topic(group.group_name), queue_id, properties)
        if level <= 0 or failed.sys_flag & SysFlag.TRANSACTION_PREPARED:
            return again  # a producer counted attempts below zero, or it is a half message, which is never delayed
        return delayed(again, properties, level, self._writer.max_delay_level)

    def _dead(self, group: SubscriptionGroupConfig, failed: StoredMessage) -> NewMessage:
        topic = self._topics.ensure(dlq_topic(group.group_name), 1)
        return _again(failed, topic.topic_name, 0, _properties(failed, 0))


def _properties(failed: StoredMessage, level: int) -> dict[str, str]:
    properties = failed.properties
    properties.setdefault(names.RETRY_TOPIC, failed.topic)
    properties.setdefault(names.ORIGIN_MESSAGE_ID, failed.offset_message_id)
    return {**properties, names.WAIT: "false", names.DELAY: str(level)}


def _again(failed: StoredMessage, topic: str, queue_id: int, properties: dict[str, str]) -> NewMessage:
    """The same message for another queue, one attempt older; it keeps its hosts, as RocketMQ lets it."""
    return NewMessage(
        topic=topic,
        queue_id=queue_id,
        body=failed.body,
        properties=stored_text(properties),
        born_timestamp=failed.born_timestamp,
        born_host=pack_host(*failed.born_host),
        store_host=pack_host(*failed.store_host),
        flag=failed.flag,
        sys_flag=failed.sys_flag,
        reconsume_times=min(failed.reconsume_times + 1, _MOST_TIMES),
    )
