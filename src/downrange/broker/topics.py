"""The topics of this broker, how they are created, and the file that keeps them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from sys import intern

from msgspec import structs

from downrange.broker.config import BrokerConfig
from downrange.broker.json_file import JsonFile, SavedTable
from downrange.clock import Clock
from downrange.model.message import TopicQueue
from downrange.model.topics import (
    AUTO_CREATE_TOPIC,
    BENCHMARK_TOPIC,
    HALF_TOPIC,
    OFFSET_MOVED_TOPIC,
    OP_HALF_TOPIC,
    READ_WRITE,
    REPLY_TOPIC_SUFFIX,
    SCHEDULE_TOPIC,
    SELF_TEST_TOPIC,
    TABLE_TOPIC,
    Perm,
    TopicConfig,
    is_send_forbidden,
    is_system_topic,
)
from downrange.protocol.bodies.data_version import DataVersion
from downrange.protocol.bodies.topics import TopicConfigTable

log = logging.getLogger(__name__)

_INHERITABLE = int(READ_WRITE | Perm.INHERIT)
# Topics to which the broker writes although they are not in the table.
_WITHOUT_CONFIGURATION = frozenset({OP_HALF_TOPIC, TABLE_TOPIC})


class Topics(SavedTable):
    """Topic name -> configuration.

    Holds always: every change raises the data version. `on_change` is called after each change with the changed topic,
    or with None when a topic was deleted.
    """

    def __init__(self, file: JsonFile, config: BrokerConfig, clock: Clock, schedule_queues: int = 18) -> None:
        super().__init__(file)
        self._clock = clock
        self._table: dict[str, TopicConfig] = {}
        self._own_names = {
            config.broker_cluster_name,
            config.broker_name,
            config.broker_cluster_name + REPLY_TOPIC_SUFFIX,
        }
        self.data_version = DataVersion(counter=0, timestamp=clock.now())
        self.on_change: Callable[[TopicConfig | None], None] = lambda topic: None
        self.on_table_change: Callable[[str, TopicConfig | None], None] = lambda topic, config: None
        """Called with the name of a topic that was put or deleted, and its configuration; None when deleted."""
        self.on_usual_change: Callable[[str | None], None] = lambda topic: None
        """Called with a topic, or with None for all topics, when its entry in `usual` may have changed."""
        # Topics to which any client may send: the table without the forbidden names.
        self.sendable: dict[str, TopicConfig] = {}
        # Topics to which a usual send may go, with their number of queues for writing.
        self.usual: dict[str, int] = {}
        self._create_system_topics(config, schedule_queues)
        self._load()

    def _create_system_topics(self, config: BrokerConfig, schedule_queues: int) -> None:
        own = int(READ_WRITE)
        cluster, broker = config.broker_cluster_name, config.broker_name
        topics = [
            (SELF_TEST_TOPIC, 1, own),
            (BENCHMARK_TOPIC, 1024, own),
            (cluster, 16, _INHERITABLE if config.cluster_topic_enable else int(Perm.INHERIT)),
            (broker, 1, _INHERITABLE if config.broker_topic_enable else int(Perm.INHERIT)),
            (OFFSET_MOVED_TOPIC, 1, own),
            (SCHEDULE_TOPIC, schedule_queues, own),
            (cluster + REPLY_TOPIC_SUFFIX, 1, own),
            (HALF_TOPIC, 1, own),
        ]
        if config.auto_create_topic_enable:
            topics.append((AUTO_CREATE_TOPIC, config.default_topic_queue_nums, _INHERITABLE))
        if config.trace_topic_enable:
            topics.append((config.msg_trace_topic_name, 1, own))
        for name, queues, perm in topics:
            self._set(TopicConfig(name, queues, queues, perm))

    def _load(self) -> None:
        saved = self._file.load(TopicConfigTable)
        if saved is not None:
            for name, config in saved.topic_config_table.items():
                # Equal texts are shared: so nothing of the parsed file is kept, and its memory is freed in one piece.
                self._set(replace(config, topic_name=intern(name), topic_filter_type=intern(config.topic_filter_type)))
            self.data_version = saved.data_version

    def _set(self, config: TopicConfig) -> None:
        name = intern(config.topic_name)
        self._table[name] = config
        self.on_usual_change(name)
        if not is_send_forbidden(name):
            self.sendable[name] = config
            if config.topic_filter_type == "MULTI_TAG" or name.startswith("%"):
                self.usual.pop(name, None)
            else:
                self.usual[name] = config.write_queue_nums

    def __len__(self) -> int:
        return len(self._table)

    def __iter__(self) -> Iterator[TopicConfig]:
        return iter(list(self._table.values()))

    def __contains__(self, topic: str) -> bool:
        return topic in self._table

    def get(self, topic: str) -> TopicConfig | None:
        return self._table.get(topic)

    def is_system(self, topic: str) -> bool:
        """Whether clients may neither create nor delete this topic."""
        return is_system_topic(topic) or topic in self._own_names

    def table(self) -> TopicConfigTable:
        """All topics with their data version, in the form for slaves and name servers."""
        return TopicConfigTable(topic_config_table=dict(self._table), data_version=self.data_version)

    def create_like(self, topic: str, template: str, queue_nums: int, *, enabled: bool) -> TopicConfig | None:
        """Create a topic like the template that a producer named, if the template has the permission INHERIT."""
        like = self._table.get(template)
        if like is None or not like.perm & Perm.INHERIT or (template == AUTO_CREATE_TOPIC and not enabled):
            return None
        queues = max(0, min(queue_nums, like.write_queue_nums))
        config = TopicConfig(topic, queues, queues, like.perm & ~Perm.INHERIT, like.topic_filter_type)
        log.info("topic created topic=%s queues=%d like=%s", topic, queues, template)
        return self.put(config)

    def ensure(
        self, topic: str, queue_nums: int, perm: int = int(READ_WRITE), *, topic_sys_flag: int = 0
    ) -> TopicConfig:
        """The topic, created with `queue_nums` queues if it is missing: for retry, dead-letter and half topics."""
        known = self._table.get(topic)
        if known is not None:
            return known
        log.info("topic created topic=%s queues=%d", topic, queue_nums)
        return self.put(TopicConfig(topic, queue_nums, queue_nums, perm, topic_sys_flag=topic_sys_flag))

    def put(self, config: TopicConfig) -> TopicConfig:
        """Create or change a topic."""
        self._set(config)
        self._changed(config)
        self.on_table_change(config.topic_name, config)
        return config

    def delete(self, topic: str) -> bool:
        if self._table.pop(topic, None) is None:
            return False
        self.sendable.pop(topic, None)
        self.usual.pop(topic, None)
        self.on_usual_change(topic)
        log.info("topic deleted topic=%s", topic)
        self._changed(None)
        self.on_table_change(topic, None)
        return True

    def adopt(self, queues: Iterable[TopicQueue]) -> list[str]:
        """Add topics that have queues in the store but no configuration; return their names.

        A broker that dies between storing the first message of a new topic and saving the topic leaves such queues
        behind; their messages must stay readable.
        """
        counts: dict[str, int] = {}
        for topic, queue_id in queues:
            if topic not in self._table and topic not in _WITHOUT_CONFIGURATION:
                counts[topic] = max(counts.get(topic, 0), queue_id + 1)
        for topic, count in counts.items():
            log.warning("topic without configuration was added because it has queues topic=%s queues=%d", topic, count)
            self.ensure(topic, count)
        return list(counts)

    def set_order_topics(self, ordered: set[str]) -> None:
        """Mark exactly these topics, which the name server named, as ordered."""
        wrong = [config for config in self._table.values() if config.order != (config.topic_name in ordered)]
        for config in wrong:
            self._set(replace(config, order=not config.order))
        if wrong:
            self._bump()

    def follow(self, changed: Mapping[str, TopicConfig], deleted: Iterable[str], version: DataVersion) -> None:
        """Make changes that a master made, and take over its version."""
        for topic in deleted:
            self._table.pop(topic, None)
            self.sendable.pop(topic, None)
            self.usual.pop(topic, None)
            self.on_usual_change(topic)
        for config in changed.values():
            self._set(config)
        self.data_version = version
        self.mark_unsaved()

    def replace_all(self, table: TopicConfigTable) -> None:
        """Take over the table of a master, version included."""
        self._table.clear()
        self.sendable.clear()
        self.usual.clear()
        self.on_usual_change(None)
        for config in table.topic_config_table.values():
            self._set(config)
        self.data_version = table.data_version
        self.mark_unsaved()

    def enter_epoch(self, epoch: int) -> None:
        """Raise the data version to that of an epoch: name servers prefer it to those of earlier epochs."""
        self.data_version = structs.replace(self.data_version, state_version=epoch)
        self.bump()

    def bump(self) -> None:
        """Raise the data version without a change of the table: registrations depend on more than the table."""
        self._changed(None)

    def _changed(self, config: TopicConfig | None) -> None:
        self._bump()
        self.on_change(config)

    def _bump(self) -> None:
        self.data_version = self.data_version.bumped(self._clock.now())
        self.mark_unsaved()
