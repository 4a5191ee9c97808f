"""Topics for operators: create, change, delete and list them, show their offsets, and remove their old files."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from downrange.broker.live_config import LiveConfig
from downrange.broker.routes import RouteTable
from downrange.broker.statistics import Statistics
from downrange.broker.tables import Tables
from downrange.model.message import MessageQueue
from downrange.model.topics import (
    RETRY_PREFIX,
    SYSTEM_TOPICS,
    TopicConfig,
    changed_attributes,
    check_topic_name,
    parse_attributes,
    popped_topic,
)
from downrange.protocol.bodies.body import decode_body, encode_body, encode_java_body
from downrange.protocol.bodies.groups import GroupList
from downrange.protocol.bodies.routes import TopicList
from downrange.protocol.bodies.statistics import TopicOffset, TopicStats
from downrange.protocol.bodies.topics import CreateTopicRequest, TopicConfigs, TopicRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError, TopicNotExist
from downrange.store.config import BrokerRole
from downrange.store.message_store import MessageStore
from downrange.store.retention import Retention
from downrange.transport.connection import Connection
from downrange.transport.serving import LaterReply

log = logging.getLogger(__name__)

# Statistics walk every queue of a topic: a mistyped number must not create a topic that stalls the broker.
MAX_QUEUES: Final = 65536
_MAX_PERM: Final = 15
_FILTER_TYPES: Final = ("SINGLE_TAG", "MULTI_TAG")


@dataclass(eq=False)
class TopicHandlers:
    """Requests of operators about topics. A slave copies the tables of its master and refuses changes."""

    _config: LiveConfig
    _tables: Tables
    _store: MessageStore
    _retention: Retention
    _statistics: Statistics
    _register: Callable[[], Awaitable[object]]

    @property
    def routes(self) -> RouteTable:
        return {
            RequestCode.UPDATE_AND_CREATE_TOPIC: self.create,
            RequestCode.UPDATE_AND_CREATE_TOPIC_LIST: self.create_several,
            RequestCode.DELETE_TOPIC_IN_BROKER: self.delete,
            RequestCode.GET_ALL_TOPIC_CONFIG: self.get_all,
            RequestCode.GET_TOPIC_CONFIG: self.get,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: self.get_system_topics,
            RequestCode.GET_TOPIC_STATS_INFO: self.get_stats,
            RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: self.get_groups,
            RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE: self.remove_expired_queues,
            RequestCode.CLEAN_UNUSED_TOPIC: self.remove_unused_topics,
            RequestCode.DELETE_EXPIRED_COMMITLOG: self.remove_expired_files,
        }

    # --- changing -----------------------------------------------------------------------------------------------

    def create(self, command: Command, connection: Connection) -> LaterReply:
        """Request 17: create a topic or replace its configuration."""
        refuse_on_slave(self._config)
        header = command.header(CreateTopicRequest)
        config = replace(header.config, attributes=parse_attributes(header.attributes))
        return self._create([config], command, connection)

    def create_several(self, command: Command, connection: Connection) -> LaterReply:
        """Request 18 (of 5.x): create or change several topics; if one is wrong, none."""
        refuse_on_slave(self._config)
        return self._create(decode_body(TopicConfigs, command.body_bytes).topic_config_list, command, connection)

    def _create(self, configs: Sequence[TopicConfig], command: Command, connection: Connection) -> LaterReply:
        """Create the topics, and answer once the name servers know them: clients can then send to them at once."""
        for config in configs:
            self._check(config)
        for config in [self._with_attributes(config) for config in configs]:
            self._put(config, connection)

        async def reply() -> Command | None:
            await self._register()
            return command.reply()

        return asyncio.ensure_future(reply())

    def delete(self, command: Command, connection: Connection) -> Command:
        """Request 215: delete a topic, its retry topics of POP, and their queues; offsets stay, as in 4.9."""
        refuse_on_slave(self._config)
        topic = command.header(TopicRequest).topic
        check_topic_name(topic)
        self._refuse_system(topic)
        removed = []
        for each in (topic, *self._pop_retry_topics(topic)):
            self._tables.topics.delete(each)
            self._statistics.forget_topic(each)
            removed += self._store.remove_topic(each)
        log.info("topic deleted by request topic=%s queues=%d peer=%s", topic, len(removed), connection.peer)
        return command.reply()

    def _pop_retry_topics(self, topic: str) -> list[str]:
        names = [config.topic_name for config in self._tables.topics if config.topic_name.startswith(RETRY_PREFIX)]
        groups_of = self._tables.offsets.groups_of
        return [name for name in names if any(popped_topic(name, group) == topic for group in groups_of(name))]

    def _check(self, config: TopicConfig) -> None:
        check_topic_name(config.topic_name)
        self._refuse_system(config.topic_name)
        for field, value in (
            ("readQueueNums", config.read_queue_nums),
            ("writeQueueNums", config.write_queue_nums),
        ):
            if not 0 <= value <= MAX_QUEUES:
                raise BrokerError(f"{field}={value} of topic[{config.topic_name}]: expected 0 to {MAX_QUEUES}")
        if not 0 <= config.perm <= _MAX_PERM:
            raise BrokerError(f"perm={config.perm} of topic[{config.topic_name}]: expected 0 to {_MAX_PERM}")
        if config.topic_filter_type not in _FILTER_TYPES:
            raise BrokerError(
                f"topicFilterType={config.topic_filter_type} of topic[{config.topic_name}]: "
                f"expected {' or '.join(_FILTER_TYPES)}"
            )

    def _with_attributes(self, config: TopicConfig) -> TopicConfig:
        """The configuration with the attributes that stay: a request names only those that change."""
        known = self._tables.topics.get(config.topic_name)
        before = None if known is None else known.attributes
        return replace(config, attributes=changed_attributes(before, config.attributes or {}))

    def _refuse_system(self, topic: str) -> None:
        if self._tables.topics.is_system(topic):
            raise BrokerError(f"The topic[{topic}] is conflict with system topic.")

    def _put(self, config: TopicConfig, connection: Connection) -> None:
        # The name server decides whether a topic is ordered; the answer to the next registration says so.
        known = self._tables.topics.get(config.topic_name)
        self._tables.topics.put(replace(config, order=known is not None and known.order))
        log.info("topic set by request topic=%s config=%s peer=%s", config.topic_name, config, connection.peer)

    # --- looking ------------------------------------------------------------------------------------------------

    def get_all(self, command: Command, connection: Connection) -> Command:
        """Request 21: the configuration of all topics."""
        return command.reply(body=encode_body(self._tables.topics.table()))

    def get(self, command: Command, connection: Connection) -> Command:
        """Request 351 (of 5.x): the configuration of one topic."""
        topic = command.header(TopicRequest).topic
        config = self._tables.topics.get(topic)
        if config is None:
            raise TopicNotExist(f"No topic in this broker. topic: {topic}")
        return command.reply(body=encode_body(config))

    def get_system_topics(self, command: Command, connection: Connection) -> Command:
        """Request 305: the names of system topics."""
        topics = self._tables.topics
        present = {config.topic_name for config in topics if topics.is_system(config.topic_name)}
        return command.reply(body=encode_body(TopicList(tuple(sorted(present | SYSTEM_TOPICS)))))

    def get_stats(self, command: Command, connection: Connection) -> Command:
        """Request 202: the offset range of every queue to which producers write."""
        topic = command.header(TopicRequest).topic
        config = self._tables.topics.get(topic)
        if config is None:
            raise TopicNotExist(f"topic[{topic}] not exist")
        broker_name = self._config.broker.broker_name
        table = {
            MessageQueue(topic, broker_name, queue_id): self._reach(topic, queue_id)
            for queue_id in range(config.write_queue_nums)
        }
        return command.reply(body=encode_java_body(TopicStats(offset_table=table)))

    def _reach(self, topic: str, queue_id: int) -> TopicOffset:
        end = self._store.max_offset_of(topic, queue_id)
        return TopicOffset(
            min_offset=self._store.min_offset_of(topic, queue_id),
            max_offset=end,
            last_update_timestamp=max(0, self._store.store_time_of(topic, queue_id, end - 1)),
        )

    def get_groups(self, command: Command, connection: Connection) -> Command:
        """Request 300: groups that subscribe to a topic or have consumed it."""
        topic = command.header(TopicRequest).topic
        groups = self._tables.consumers.groups_of(topic) | self._tables.offsets.groups_of(topic)
        return command.reply(body=encode_body(GroupList(tuple(sorted(groups)))))

    # --- cleaning up --------------------------------------------------------------------------------------------

    def remove_expired_queues(self, command: Command, connection: Connection) -> Command:
        """Request 306: remove queues all of whose messages are gone."""
        removed = self._store.remove_expired_queues()
        log.info("expired queues removed count=%d peer=%s", len(removed), connection.peer)
        return command.reply()

    def remove_unused_topics(self, command: Command, connection: Connection) -> Command:
        """Request 316: remove queues of topics that this broker does not have."""
        removed = self._store.remove_unused_topics(config.topic_name for config in self._tables.topics)
        log.info("queues of unknown topics removed count=%d peer=%s", len(removed), connection.peer)
        return command.reply()

    def remove_expired_files(self, command: Command, connection: Connection) -> Command:
        """Request 329: let the next clean-up rounds delete expired files at any hour."""
        self._retention.arm_manually()
        log.info("clean-up of expired files asked for peer=%s", connection.peer)
        return command.reply()


def refuse_on_slave(config: LiveConfig) -> None:
    if config.store.broker_role is BrokerRole.SLAVE:
        raise BrokerError("Can't modify topic or subscription group from slave, please execute it from master.")
