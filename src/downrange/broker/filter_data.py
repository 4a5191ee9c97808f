"""The SQL92 filters of consumer groups, kept in config/consumerFilter.json. [ConsumerFilterManager]

A filter comes with the heartbeats of its group. It stays for a day after the group has gone, so that messages which
arrive in this time have right bit maps when the group comes back. A changed filter gets a new `born_time`, since the
bit maps of older messages were made for the former filter.
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
from downrange.clock import Clock
from downrange.model.properties import find_property
from downrange.model.sql.expression import SqlExpression
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
    """The content of consumerFilter.json."""

    filter_data_by_topic: dict[str, TopicFilterData] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConsumerFilter:
    """The filter of a group for a topic. `mask` has its bits in the bit maps of messages stored after `born_time`."""

    topic: str
    group: str
    expression: SqlExpression
    client_version: int
    born_time: int
    mask: int
    dead_time: int = 0

    @property
    def is_dead(self) -> bool:
        """Whether the group has gone or no longer subscribes to the topic."""
        return self.dead_time >= self.born_time


class ConsumerFilters(SavedTable):
    """(topic, group) -> filter. Called in the broker's own thread, also by the store when it appends a message.

    Holds always: every filter compiles, and the bit maps of messages stored after its `born_time` were made with it.
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
        """The bit map of a message: bits of all groups whose filter matches it; empty if the topic has no filter."""
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
        """Take the filters from a heartbeat of the group. An expression that does not compile removes its filter."""
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
            return  # if two members of a group have different filters, the first one wins, as in RocketMQ
        expression = compiled(text)
        if isinstance(expression, SqlExpression):
            mask = mask_of(self._positions(topic, group))
            self._put(ConsumerFilter(topic, group, expression, version, self._clock.now(), mask))
            log.info("filter registered topic=%s group=%s expression=%.500r", topic, group, text)
        elif known is not None:
            self._remove(known)  # the former filter would be wrong; without one, pulls of the group are refused

    def retire(self, group: str) -> None:
        """Mark the filters of a group whose last member left as dead."""
        if group in self._topics_of:
            self._retire(group, self._topics_of[group])

    def _retire(self, group: str, topics: Iterable[str]) -> None:
        for topic in topics:
            known = self._by_topic[topic][group]
            if not known.is_dead:
                self._put(replace(known, dead_time=max(known.born_time, self._clock.now())))

    def clean(self, keep_millis: int) -> None:
        """Forget filters that have been dead for `keep_millis`."""
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
                        # No consumer is connected yet: every filter is dead until the first heartbeat of its group.
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
