"""The batch of messages that `MessageStore.append` takes: the only thing that flows into the store."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from downrange.compiled import accelerated
from downrange.model.message import TRANSACTION_MASK, PhysicalOffset, QueueOffset, SysFlag
from downrange.model.properties import find_tags_and_keys
from downrange.model.record import FIXED_SIZE
from downrange.store.new_message import NewMessage

if TYPE_CHECKING:
    from downrange.store.queue.queues import QueueState

# Where a message went: physical offset, size of its record, queue offset. Plain numbers: one is made for each message.
Place = tuple[PhysicalOffset, int, QueueOffset]
# Topic, UNIQ_KEY, KEYS, physical offset and store timestamp of a message that goes into the key index.
Keyed = tuple[str, str | None, str | None, int, int]
_ROLLBACK: Final = int(SysFlag.TRANSACTION_ROLLBACK)
_SIZE_WITHOUT_HOSTS: Final = FIXED_SIZE - 16


@accelerated
class NewMessages:
    """Messages for the log, in order, each with its queue; once stored, a message has its place in `places`.

    Messages that were added as one group are stored together or not at all. `_compiled/new_messages.c` has a class with
    these members that keeps no Python object for a message.
    """

    __slots__ = ("_codes", "_timestamps", "group_ends", "messages", "places", "special", "states", "tags_and_keys")

    def __init__(self) -> None:
        self.messages: list[NewMessage] = []
        self.states: list[QueueState] = []
        self.places: list[Place] = []
        self.special: list[int] = []
        """The numbers of the messages whose queue entries hold something else than a tag hash."""
        self.group_ends: list[int] = []
        """For each group the number behind its last message."""
        self._codes: dict[int, int] = {}
        self.tags_and_keys: list[tuple[str | None, str | None, str | None]] = []
        """TAGS, UNIQ_KEY and KEYS of each message, which queue and index are made of."""
        self._timestamps: list[int] = []

    def __len__(self) -> int:
        return len(self.messages)

    def add(self, state: QueueState, message: NewMessage, begins_group: bool) -> None:
        """Add a message for this queue; without `begins_group` it belongs to the group of the message before it."""
        self.messages.append(message)
        self.states.append(state)
        self.tags_and_keys.append(find_tags_and_keys(message.properties.decode("utf-8", "replace")))
        number = len(self.messages)
        if begins_group:
            self.group_ends.append(number)
        else:
            self.group_ends[-1] = number
        if state.is_special:
            self.special.append(number - 1)

    def cut(self, count: int) -> None:
        """Keep only so many messages: the first ones."""
        for each in (self.messages, self.states, self.tags_and_keys, self.places, self._timestamps):
            del each[count:]

    def place(self, places: Sequence[Place], store_timestamp: int) -> None:
        """The next messages were stored at this time, and lie at these places."""
        self.places += places
        self._timestamps += [store_timestamp] * len(places)

    def timestamp(self, number: int) -> int:
        """When a message was stored."""
        return self._timestamps[number]

    def properties(self, number: int) -> bytes:
        """The stored property text of one message."""
        return self.messages[number].properties

    def properties_for(self, state: QueueState) -> Iterator[bytes]:
        """The property texts of the messages of one queue."""
        return (message.properties for message, one in zip(self.messages, self.states, strict=True) if one is state)

    def tags(self, number: int) -> str | None:
        """The TAGS of one message."""
        return self.tags_and_keys[number][0]

    def keyed(self, number: int, stop: int) -> list[Keyed]:
        """The unique ids and KEYS of messages that were stored, from `number` to `stop`: those that have any."""
        return [
            (message.topic, unique_key, keys, place[0], timestamp)
            for message, (_, unique_key, keys), place, timestamp in zip(
                self.messages[number:stop],
                self.tags_and_keys[number:stop],
                self.places[number:stop],
                self._timestamps[number:stop],
                strict=True,
            )
            if (unique_key or keys) and message.sys_flag & TRANSACTION_MASK != _ROLLBACK
        ]

    def sys_flag(self, number: int) -> int:
        return self.messages[number].sys_flag

    def set_code(self, number: int, code: int) -> None:
        """Let the queue entry of a special message hold this number instead of a tag hash."""
        self._codes[number] = code

    def code(self, number: int) -> int | None:
        """The number that was set for a special message; None for all others."""
        return self._codes.get(number)

    @property
    def stored(self) -> int:
        """How many messages have their places: the first ones."""
        return len(self.places)

    def bounds(self, number: int, stop: int) -> tuple[PhysicalOffset, PhysicalOffset]:
        """Where the records of messages that were stored, from `number` to `stop`, begin and end in the log."""
        physical_offset, size, _ = self.places[stop - 1]
        return self.places[number][0], physical_offset + size  # type: ignore[return-value]  # NewTypes are calls, too

    @property
    def end_offset(self) -> int:
        """Where the last record that was stored ends in the log."""
        return self.places[-1][0] + self.places[-1][1]

    @property
    def largest(self) -> int:
        """The size of the largest record that was stored."""
        return max([place[1] for place in self.places])

    def group_size(self, number: int) -> int:
        """How many bytes of the log the group takes that begins with this message."""
        return sum(map(self._record_size, range(number, self.group_ends[bisect_right(self.group_ends, number)])))

    def _record_size(self, number: int) -> int:
        message = self.messages[number]
        hosts = len(message.born_host) + len(message.store_host)
        topic = len(self.states[number].topic_field) - 1
        return _SIZE_WITHOUT_HOSTS + hosts + topic + len(message.body) + len(message.properties)
