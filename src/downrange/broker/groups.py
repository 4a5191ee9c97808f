"""The consumer groups of this broker and their committed offsets."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from downrange.broker.json_file import JsonFile, SavedTable
from downrange.clock import Clock
from downrange.model.errors import MessageError
from downrange.model.topics import (
    BUILT_IN_GROUPS,
    SYSTEM_GROUP_PREFIX,
    GroupRetryPolicy,
    SubscriptionGroupConfig,
    check_group_name,
)
from downrange.protocol.bodies.data_version import DataVersion
from downrange.protocol.bodies.groups import SubscriptionGroupTable
from downrange.protocol.bodies.offsets import ConsumerOffsets

log = logging.getLogger(__name__)

_NO_OFFSETS: dict[int, int] = {}


class Groups(SavedTable):
    """Group name -> configuration. Every change raises the data version."""

    def __init__(self, file: JsonFile, clock: Clock) -> None:
        super().__init__(file)
        self._clock = clock
        self._table = {name: SubscriptionGroupConfig(name) for name in BUILT_IN_GROUPS}
        self.data_version = DataVersion(counter=0, timestamp=clock.now())
        self.on_table_change: Callable[[str, SubscriptionGroupConfig | None], None] = lambda group, config: None
        """Called with the name of a group that was put or deleted, and its configuration; None when deleted."""
        saved = file.load(SubscriptionGroupTable)
        if saved is not None:
            for name, config in saved.subscription_group_table.items():
                self._table[name] = replace(config, group_name=name)
            self.data_version = saved.data_version

    def __len__(self) -> int:
        return len(self._table)

    def __iter__(self) -> Iterator[SubscriptionGroupConfig]:
        return iter(list(self._table.values()))

    def get(self, group: str) -> SubscriptionGroupConfig | None:
        return self._table.get(group)

    def find(self, group: str, *, auto_create: bool) -> SubscriptionGroupConfig | None:
        """The group; a missing one is created if `auto_create` and its name is legal."""
        known = self._table.get(group)
        if known is not None or not (auto_create or group.startswith(SYSTEM_GROUP_PREFIX)):
            return known
        try:
            check_group_name(group)
        except MessageError:
            return None
        log.info("group created group=%s", group)
        return self.put(SubscriptionGroupConfig(group))

    def put(self, config: SubscriptionGroupConfig) -> SubscriptionGroupConfig:
        # 4.x clients do not know these members: they are kept only where they say something.
        if config.consume_message_orderly is False:
            config = replace(config, consume_message_orderly=None)
        if config.group_retry_policy == GroupRetryPolicy():
            config = replace(config, group_retry_policy=None)
        self._table[config.group_name] = config
        self._changed()
        self.on_table_change(config.group_name, config)
        return config

    def delete(self, group: str) -> bool:
        if self._table.pop(group, None) is None:
            return False
        log.info("group deleted group=%s", group)
        self._changed()
        self.on_table_change(group, None)
        return True

    def table(self) -> SubscriptionGroupTable:
        return SubscriptionGroupTable(subscription_group_table=dict(self._table), data_version=self.data_version)

    def follow(
        self, changed: Mapping[str, SubscriptionGroupConfig], deleted: Iterable[str], version: DataVersion
    ) -> None:
        """Make changes that a master made, and take over its version."""
        for group in deleted:
            self._table.pop(group, None)
        self._table.update(changed)
        self.data_version = version
        self.mark_unsaved()

    def replace_all(self, table: SubscriptionGroupTable) -> None:
        """Take over the table of a master, version included."""
        self._table = dict(table.subscription_group_table)
        self.data_version = table.data_version
        self.mark_unsaved()

    def _changed(self) -> None:
        self.data_version = self.data_version.bumped(self._clock.now())
        self.mark_unsaved()


class CommittedOffsets(SavedTable):
    """(topic, group) -> queue id -> offset of the message that the group consumes next.

    A commit may also move an offset backwards. Commits are on disk after the next `save`.
    """

    def __init__(self, file: JsonFile) -> None:
        super().__init__(file)
        self.on_table: Callable[[], None] = lambda: None
        """Called before the whole table is saved or sent: parts that keep offsets of their own commit them then."""
        self.changed: set[tuple[str, str]] | None = None
        """Topics and groups whose offsets changed, until somebody takes them; None when nobody wants to know."""
        self._table: defaultdict[tuple[str, str], dict[int, int]] = defaultdict(dict)
        saved = file.load(ConsumerOffsets)
        if saved is not None:
            for name, offsets in saved.offset_table.items():
                topic, _, group = name.partition("@")
                self._table[topic, group] = dict(offsets)

    def commit(self, topic: str, group: str, queue_id: int, offset: int) -> None:
        key = topic, group
        self._table[key][queue_id] = offset
        if self.changed is not None:
            self.changed.add(key)
        self.mark_unsaved()

    def get(self, topic: str, group: str, queue_id: int) -> int | None:
        offsets = self._table.get((topic, group))
        return None if offsets is None else offsets.get(queue_id)

    def of_queues(self, topic: str, group: str) -> dict[int, int]:
        """The offsets of a group by queue; they change with every commit. Whoever changes them calls `moved`."""
        return self._table.get((topic, group), _NO_OFFSETS)

    def of(self, topic: str, group: str) -> dict[int, int]:
        """The offsets of a group in all queues of a topic."""
        return dict(self._table.get((topic, group), {}))

    def topics_of(self, group: str) -> set[str]:
        return {topic for topic, owner in self._table if owner == group}

    def groups_of(self, topic: str) -> set[str]:
        return {group for name, group in self._table if name == topic}

    def clone(self, source: str, target: str, topic: str) -> None:
        """Copy the offsets of the group `source` to the group `target`."""
        offsets = self._table.get((topic, source))
        if offsets is not None:
            self._table[topic, target] = dict(offsets)
            self.moved(topic, target)

    def remove_group(self, group: str) -> None:
        for key in [key for key in self._table if key[1] == group]:
            del self._table[key]
            self.moved(*key)

    def moved(self, topic: str, group: str) -> None:
        """Offsets of a group have changed: they are to be saved."""
        if self.changed is not None:
            self.changed.add((topic, group))
        self.mark_unsaved()

    def take_changed(self) -> ConsumerOffsets:
        """The offsets that changed since the last call; those of a group that was removed are empty."""
        changed, self.changed = self.changed or set(), set()
        return ConsumerOffsets(
            offset_table={f"{topic}@{group}": self.of(topic, group) for topic, group in sorted(changed)}
        )

    def follow(self, table: ConsumerOffsets) -> None:
        """Make changes that a master made: each topic and group that is named has exactly these offsets."""
        for name, offsets in table.offset_table.items():
            topic, _, group = name.partition("@")
            if offsets:
                self._table[topic, group] = dict(offsets)
            else:
                self._table.pop((topic, group), None)
        self.mark_unsaved()

    def table(self) -> ConsumerOffsets:
        self.on_table()
        return ConsumerOffsets(
            offset_table={f"{topic}@{group}": dict(offsets) for (topic, group), offsets in self._table.items()}
        )

    def merge(self, table: ConsumerOffsets) -> None:
        """Replace our offsets by those of a master, where it has any."""
        for name, offsets in table.offset_table.items():
            topic, _, group = name.partition("@")
            ours = self._table[topic, group]
            if not offsets.items() <= ours.items():
                ours.update(offsets)
                self.mark_unsaved()
