"""The progress of groups, and requests that compare or copy offsets: 208, 303, 308, 314, 317."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from downrange.broker.live_config import LiveConfig
from downrange.broker.routes import RouteTable
from downrange.broker.statistics import Statistics
from downrange.broker.tables import Tables
from downrange.clock import Clock
from downrange.model.message import MessageQueue
from downrange.model.topics import TopicConfig, popped_topic
from downrange.protocol.bodies.body import encode_body, encode_java_body
from downrange.protocol.bodies.offsets import CloneGroupOffsetRequest, CorrectionOffsets, QueryCorrectionOffsetRequest
from downrange.protocol.bodies.statistics import (
    ConsumeStats,
    ConsumeStatsList,
    ConsumeTimeSpanRequest,
    ConsumeTimeSpans,
    GetBrokerConsumeStatsRequest,
    GetConsumeStatsRequest,
    OffsetWrapper,
    QueueTimeSpan,
)
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command
from downrange.protocol.errors import TopicNotExist
from downrange.store.message_store import MessageStore
from downrange.transport.connection import Connection
from downrange.transport.serving import LaterReply

log = logging.getLogger(__name__)

# The answer of 308 for a queue in which all other groups are ahead of the compared one: nothing to correct.
NOTHING_TO_CORRECT: Final = 0x7FFF_FFFF_FFFF_FFFF


@dataclass(eq=False)
class ProgressHandlers:
    """Requests of operators about the progress of consumer groups.

    Queues as keys are written in Java's form: some tools read no other.
    """

    _config: LiveConfig
    _tables: Tables
    _store: MessageStore
    _statistics: Statistics
    _clock: Clock

    @property
    def routes(self) -> RouteTable:
        return {
            RequestCode.GET_CONSUME_STATS: self.get_consume_stats,
            RequestCode.GET_BROKER_CONSUME_STATS: self.get_broker_consume_stats,
            RequestCode.QUERY_CONSUME_TIME_SPAN: self.get_time_spans,
            RequestCode.QUERY_CORRECTION_OFFSET: self.get_correction_offsets,
            RequestCode.CLONE_GROUP_OFFSET: self.clone_offsets,
        }

    # --- how far groups are -------------------------------------------------------------------------------------

    def get_consume_stats(self, command: Command, connection: Connection) -> Command:
        """Request 208: the progress of one group, in one topic or in all topics it has consumed."""
        header = command.header(GetConsumeStatsRequest)
        group = header.consumer_group
        table: dict[MessageQueue, OffsetWrapper] = {}
        tps = 0.0
        for config in self._consumed_topics(group, _named_topics(header)):
            table |= self._progress(config, group)
            tps += self._statistics.get_tps(config.topic_name, group)
        return command.reply(body=encode_java_body(ConsumeStats(offset_table=table, consume_tps=tps)))

    def get_broker_consume_stats(self, command: Command, connection: Connection) -> LaterReply:
        """Request 317: the progress of every group in every topic, or only in ordered topics."""
        only_ordered = command.header(GetBrokerConsumeStatsRequest).is_order
        return asyncio.ensure_future(self._broker_consume_stats(command, only_ordered))

    async def _broker_consume_stats(self, command: Command, only_ordered: bool) -> Command | None:
        by_group = []
        behind = 0
        for group in [config.group_name for config in self._tables.groups]:
            stats = tuple(
                ConsumeStats(
                    offset_table=self._progress(config, group),
                    consume_tps=self._statistics.get_tps(config.topic_name, group),
                )
                for config in self._consumed_topics(group)
                if config.order or not only_ordered
            )
            by_group.append({group: stats})
            behind += sum(queue.behind for one in stats for queue in one.offset_table.values())
            await asyncio.sleep(0)  # thousands of groups would make senders wait too long
        body = ConsumeStatsList(
            broker_addr=self._config.broker.address, consume_stats_list=tuple(by_group), total_diff=behind
        )
        return command.reply(body=encode_java_body(body))

    def _consumed_topics(
        self, group: str, named: Iterable[str] = (), *, even_unsubscribed: bool = False
    ) -> list[TopicConfig]:
        """Topics of this broker that a group consumes; while the group is online, only those it subscribes to.

        Pop retry topics count with their topic: nobody subscribes to them while the group pops.
        """
        names = set(named) or self._tables.offsets.topics_of(group)
        live = self._tables.consumers.get(group)
        if live is not None and live.subscriptions and not even_unsubscribed:
            names = {name for name in names if {name, popped_topic(name, group)} & live.subscriptions.keys()}
        return [config for name in sorted(names) if (config := self._tables.topics.get(name)) is not None]

    def _progress(self, config: TopicConfig, group: str) -> dict[MessageQueue, OffsetWrapper]:
        topic, broker_name = config.topic_name, self._config.broker.broker_name
        table = {}
        for queue_id in range(config.read_queue_nums):
            committed = max(0, self._tables.offsets.get(topic, group, queue_id) or 0)
            table[MessageQueue(topic, broker_name, queue_id)] = OffsetWrapper(
                broker_offset=self._store.max_offset_of(topic, queue_id),
                consumer_offset=committed,
                last_timestamp=max(0, self._store.store_time_of(topic, queue_id, committed - 1)),
            )
        return table

    def get_time_spans(self, command: Command, connection: Connection) -> Command:
        """Request 303: the times of the first and last message of each queue, and of the group's next message."""
        header = command.header(ConsumeTimeSpanRequest)
        config = self._tables.topics.get(header.topic)
        if config is None:
            raise TopicNotExist(f"topic[{header.topic}] not exist")
        spans = tuple(self._time_span(header, queue_id) for queue_id in range(config.write_queue_nums))
        return command.reply(body=encode_body(ConsumeTimeSpans(spans)))

    def _time_span(self, header: ConsumeTimeSpanRequest, queue_id: int) -> QueueTimeSpan:
        topic, store = header.topic, self._store
        begin, end = store.min_offset_of(topic, queue_id), store.max_offset_of(topic, queue_id)
        committed = self._tables.offsets.get(topic, header.group, queue_id) or 0
        first_time = store.store_time_of(topic, queue_id, begin)
        # A group whose offset is before the oldest message continues at the oldest message.
        next_time = store.store_time_of(topic, queue_id, max(begin, committed)) if committed < end else -1
        return QueueTimeSpan(
            message_queue=MessageQueue(topic, self._config.broker.broker_name, queue_id),
            min_time_stamp=first_time,
            max_time_stamp=store.store_time_of(topic, queue_id, end - 1),
            consume_time_stamp=store.store_time_of(topic, queue_id, committed - 1) if committed > 0 else first_time,
            delay_time=max(0, self._clock.now() - next_time) if next_time > 0 else 0,
        )

    # --- offsets of groups --------------------------------------------------------------------------------------

    def get_correction_offsets(self, command: Command, connection: Connection) -> Command:
        """Request 308: the smallest committed offset in each queue, without the groups that the request names."""
        header = command.header(QueryCorrectionOffsetRequest)
        left_out = {group.strip() for group in (header.filter_groups or "").split(",")}
        smallest: dict[int, int] = {}
        for group in self._tables.offsets.groups_of(header.topic) - left_out:
            for queue_id, offset in self._tables.offsets.of(header.topic, group).items():
                if offset >= self._store.min_offset_of(header.topic, queue_id):
                    smallest[queue_id] = min(offset, smallest.get(queue_id, offset))
        for queue_id, offset in self._tables.offsets.of(header.topic, header.compare_group).items():
            if smallest.get(queue_id, 0) > offset:
                smallest[queue_id] = NOTHING_TO_CORRECT
        return command.reply(body=encode_body(CorrectionOffsets(smallest)))

    def clone_offsets(self, command: Command, connection: Connection) -> Command:
        """Request 314: copy the offsets of one group to another, in one topic or in all."""
        header = command.header(CloneGroupOffsetRequest)
        named = [header.topic] if header.topic else []
        for config in self._consumed_topics(header.src_group, named, even_unsubscribed=header.offline):
            self._tables.offsets.clone(header.src_group, header.dest_group, config.topic_name)
            log.info("offsets cloned from=%s to=%s topic=%s", header.src_group, header.dest_group, config.topic_name)
        return command.reply()


def _named_topics(header: GetConsumeStatsRequest) -> list[str]:
    """The topics a request asks for: one in `topic`, or several in `topicList` of 5.x."""
    if header.topic:
        return [header.topic]
    return [topic for topic in (header.topic_list or "").split(";") if topic]
