"""The SQL92 filters of consumer groups, kept in config/consumerFilter.json. [ConsumerFilterManager]

A filter comes with the heartbeats of its group. It stays for a day after the group has gone: the bit maps of messages
that arrive meanwhile are right when the group comes back. A filter that changes is born again, since bit maps of older
messages speak of the former one.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from msgspec import field

from downrange.broker.bloom_filter import BloomFilter, mask_of
from downrange.broker.compiled_sql import compiled
from downrange.broker.json_file import JsonFile, SavedTable
from downrange.broker.sql.expression import SqlExpression
from downrange.clock import Clock
from downrange.model.properties import find_property
from downrange.model.subscription import SQL92, Subscription
from downrange.protocol.bodies.body import Body
from downrange.protocol.bodies.fields import Int32, Int64

log = logging.getLogger(__name__)


class BloomFilterData(Body, frozen=True):
    """The bits of one consumer, and the size of the bit maps they stand in."""

    bit_num: Int32
    bit_pos: tuple[Int32, ...]


class FilterData(Body, frozen=True, kw_only=True):
    """One filter as it is saved. [ConsumerFilterData]"""

    topic: str
    consumer_group: str
    expression: str
    expression_type: str = SQL92
    client_version: Int64 = 0
    born_time: Int64 = 0
    dead_time: Int64 = 0
    dead: bool = False
    bloom_filter_data: BloomFilterData | None = None


class TopicFilterData(Body, frozen=True, kw_only=True):
    """The filters of one topic, by group. [FilterDataMapByTopic]"""

    topic: str
    group_filter_data: dict[str, FilterData] = field(default_factory=dict)


class FilterDataTable(Body, frozen=True, kw_only=True):
    """All of consumerFilter.json."""

    filter_data_by_topic: dict[str, TopicFilterData] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConsumerFilter:
    """What one group wants of one topic. `mask` are its bits in the bit maps of messages stored after `born_time`."""

    topic: str
    group: str
    expression: SqlExpression
    client_version: int
    born_time: int
    mask: int
    dead_time: int = 0

    @property
    def is_dead(self) -> bool:
        """Has the group gone, or given the topic up?"""
        return self.dead_time >= self.born_time


class ConsumerFilters(SavedTable):
    """(topic, group) -> filter. The broker's own thread calls it, and the store when it enters a message.

    Holds always: a filter here compiles, and no message stored after its `born_time` had another one of its group in
    its bit map.
    """

    def __init__(self, file: JsonFile, bloom: BloomFilter, clock: Clock) -> None:
        super().__init__(file)
        self.bloom = bloom
        self._clock = clock
        self._by_topic: dict[str, dict[str, ConsumerFilter]] = {}
        self._topics_of: defaultdict[str, set[str]] = defaultdict(set)
        saved = file.load(FilterDataTable)
        if saved is not None:
            self._take_over(saved)

    def __iter__(self) -> Iterator[ConsumerFilter]:
        return iter([known for filters in self._by_topic.values() for known in filters.values()])

    def get(self, topic: str, group: str) -> ConsumerFilter | None:
        filters = self._by_topic.get(topic)
        return None if filters is None else filters.get(group)

    def bitmap_of(self, topic: str, properties: bytes, store_timestamp: int) -> bytes:
        """The bits of everyone who wants this message; empty when nobody filters the topic."""
        filters = self._by_topic.get(topic)
        if not filters:
            return b""
        find = partial(find_property, properties.decode("utf-8", "replace"))
        mask = 0
        for known in filters.values():
            if known.expression.matches(find):
                mask |= known.mask
        return self.bloom.bitmap(mask)

    # --- heartbeats ---------------------------------------------------------------------------------------------

    def register(self, group: str, subscriptions: Iterable[Subscription]) -> None:
        """Take over what a heartbeat of the group says. An expression that does not compile leaves it no filter."""
        wanted = {known.topic: known for known in subscriptions if known.expression_type == SQL92}
        for subscription in wanted.values():
            self._register(group, subscription)
        if group in self._topics_of:
            self._retire(group, self._topics_of[group] - wanted.keys())

    def _register(self, group: str, subscription: Subscription) -> None:
        topic, text, version = subscription.topic, subscription.expression, subscription.version
        known = self.get(topic, group)
        if known is not None and version < known.client_version:
            return
        if known is not None and text == known.expression.text:
            if version > known.client_version or known.is_dead:
                self._put(replace(known, client_version=version, dead_time=0))
            return
        if known is not None and version == known.client_version:
            return  # two members of one group that want different things: the first of them wins, as in RocketMQ
        expression = compiled(text)
        if isinstance(expression, SqlExpression):
            mask = mask_of(self._positions(topic, group))
            self._put(ConsumerFilter(topic, group, expression, version, self._clock.now(), mask))
            log.info("filter registered topic=%s group=%s expression=%.500r", topic, group, text)
        elif known is not None:
            self._remove(known)  # rather none than the former one: the group is told so when it pulls

    def retire(self, group: str) -> None:
        """The last member of the group has left."""
        if group in self._topics_of:
            self._retire(group, self._topics_of[group])

    def _retire(self, group: str, topics: Iterable[str]) -> None:
        for topic in topics:
            known = self._by_topic[topic][group]
            if not known.is_dead:
                self._put(replace(known, dead_time=max(known.born_time, self._clock.now())))

    def clean(self, keep_millis: int) -> None:
        """Forget the filters that have been dead for so long."""
        now = self._clock.now()
        for known in self:
            if known.is_dead and now - known.dead_time >= keep_millis:
                log.info("filter forgotten topic=%s group=%s", known.topic, known.group)
                self._remove(known)

    def _put(self, known: ConsumerFilter) -> None:
        self._by_topic.setdefault(known.topic, {})[known.group] = known
        self._topics_of[known.group].add(known.topic)
        self.mark_unsaved()

    def _remove(self, known: ConsumerFilter) -> None:
        del self._by_topic[known.topic][known.group]
        if not self._by_topic[known.topic]:
            del self._by_topic[known.topic]
        self._topics_of[known.group].discard(known.topic)
        if not self._topics_of[known.group]:
            del self._topics_of[known.group]
        self.mark_unsaved()

    def _positions(self, topic: str, group: str) -> tuple[int, ...]:
        return self.bloom.positions(f"{group}#{topic}")

    # --- the file -----------------------------------------------------------------------------------------------

    def _take_over(self, saved: FilterDataTable) -> None:
        found = [data for topic in saved.filter_data_by_topic.values() for data in topic.group_filter_data.values()]
        if any(data.bloom_filter_data != self._bits(data.topic, data.consumer_group) for data in found):
            log.warning("filters forgotten reason=the size of the bit maps changed filters=%d", len(found))
            self.mark_unsaved()
            return
        now = self._clock.now()
        for data in found:
            expression = compiled(data.expression)
            if data.expression_type == SQL92 and isinstance(expression, SqlExpression):
                mask = mask_of(self._positions(data.topic, data.consumer_group))
                self._put(
                    ConsumerFilter(
                        data.topic,
                        data.consumer_group,
                        expression,
                        data.client_version,
                        data.born_time,
                        mask,
                        # Nobody is here yet: every filter is dead until its group's first heartbeat.
                        data.dead_time if data.dead else max(now, data.born_time),
                    )
                )

    def _bits(self, topic: str, group: str) -> BloomFilterData:
        return BloomFilterData(self.bloom.bit_count, self._positions(topic, group))

    def table(self) -> FilterDataTable:
        return FilterDataTable(
            filter_data_by_topic={
                topic: TopicFilterData(
                    topic=topic, group_filter_data={group: self._data(filters[group]) for group in filters}
                )
                for topic, filters in self._by_topic.items()
            }
        )

    def _data(self, known: ConsumerFilter) -> FilterData:
        return FilterData(
            topic=known.topic,
            consumer_group=known.group,
            expression=known.expression.text,
            client_version=known.client_version,
            born_time=known.born_time,
            dead_time=known.dead_time,
            dead=known.is_dead,
            bloom_filter_data=self._bits(known.topic, known.group),
        )
