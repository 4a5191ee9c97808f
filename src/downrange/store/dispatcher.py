"""From a record of the log to its consume queue and the key index.

The same code runs for a message that was just appended and for one that is replayed after a crash, so both leave the
same bytes behind.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final

from downrange.model.hashing import tags_code
from downrange.store.commit_log import WalkedRecord
from downrange.store.key_index import KeyIndex
from downrange.store.queues import ConsumeQueues, QueueState

_TRANSACTION_MASK: Final = 12
_ROLLBACK: Final = 12

# topic, properties, store timestamp -> the bit map of the filters that match
BitmapOf = Callable[[str, bytes, int], bytes]


@lru_cache(maxsize=65_536)
def _code_of(tags: bytes) -> int:
    return tags_code(tags.decode("utf-8", "replace"))


def _text(raw: bytes | None) -> str | None:
    if not raw:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("utf-8", "replace")


def find_in(properties: bytes, name: bytes) -> bytes | None:
    """The value of one property in the stored text; `name` ends with the separator \\x01."""
    at = properties.rfind(b"\x02" + name)
    if at >= 0:
        start = at + 1 + len(name)
    elif properties.startswith(name):
        start = len(name)
    else:
        return None
    end = properties.find(b"\x02", start)
    return (properties[start:] if end < 0 else properties[start:end]) or None


class Dispatcher:
    """Applies records to everything that is derived from the log. For the store's own thread only."""

    def __init__(
        self,
        queues: ConsumeQueues,
        index: KeyIndex | None,
        delay_millis: tuple[int, ...],
        bitmap_of: BitmapOf | None = None,
    ) -> None:
        self._queues = queues
        self._index = index
        self._delay_millis = delay_millis
        self._bitmap_of = bitmap_of
        # Store time of the newest record that has its queue entry: what the checkpoint may claim after a flush.
        self.last_store_timestamp = 0
        # Records before this offset need not be offered to the index again.
        self.indexed_up_to = 0

    def apply(
        self,
        state: QueueState,
        queue_offset: int,
        physical_offset: int,
        size: int,
        sys_flag: int,
        store_timestamp: int,
        properties: bytes,
    ) -> None:
        """Enter one record into its queue and the index; what is there already stays as it is."""
        kind = sys_flag & 12
        if kind == 0 or kind == 8:
            # `find_in`, written out: this runs for every message.
            at = properties.rfind(b"TAGS\x01")
            if at < 0:
                code = 0
            elif at == 0 or properties[at - 1] == 2:
                end = properties.find(b"\x02", at)
                code = _code_of(properties[at + 5 :] if end < 0 else properties[at + 5 : end])
            else:
                code = _code_of(find_in(properties, b"TAGS\x01") or b"")
            if state.is_special:
                code = self._special_code(state, code, physical_offset + size, store_timestamp, properties)
            state.queue.put(queue_offset, physical_offset, size, code)
            self.last_store_timestamp = store_timestamp
        elif kind == _ROLLBACK:
            return
        if self._index is not None:
            at = properties.rfind(b"UNIQ_KEY\x01")
            if at < 0:
                unique = None
            elif at == 0 or properties[at - 1] == 2:
                end = properties.find(b"\x02", at)
                unique = properties[at + 9 :] if end < 0 else properties[at + 9 : end]
            else:
                unique = find_in(properties, b"UNIQ_KEY\x01")
            keys = find_in(properties, b"KEYS\x01") if properties.find(b"KEYS\x01") >= 0 else None
            if unique or keys:
                try:
                    unique_key = unique.decode() if unique else None
                except UnicodeDecodeError:
                    unique_key = _text(unique)
                self._index.put(
                    state.topic, unique_key, _text(keys) if keys else None, physical_offset, store_timestamp
                )

    def index_only(self, record: WalkedRecord) -> None:
        """Enter a replayed record into the index and leave its queue alone."""
        physical_offset, _, topic, _, _, sys_flag, store_timestamp, properties = record
        if self._index is not None and sys_flag & _TRANSACTION_MASK != _ROLLBACK:
            unique, keys = find_in(properties, b"UNIQ_KEY\x01"), find_in(properties, b"KEYS\x01")
            if unique or keys:
                name = topic.decode("utf-8", "replace")
                self._index.put(name, _text(unique), _text(keys), physical_offset, store_timestamp)

    def _special_code(
        self, state: QueueState, code: int, physical_end: int, store_timestamp: int, properties: bytes
    ) -> int:
        """What stands in the entry of a delayed message, or of one with an ext unit, instead of a tag hash."""
        if state.is_schedule:
            code = self._delivery_time(properties, store_timestamp, code)
        if state.ext is None or physical_end <= state.queue.max_physical_offset:
            return code  # the second: the entry is there already, and so is its unit
        bitmap = self._bitmap_of(state.topic, properties, store_timestamp) if self._bitmap_of else b""
        return state.ext.put(code, store_timestamp, bitmap)

    def _delivery_time(self, properties: bytes, store_timestamp: int, otherwise: int) -> int:
        delay = find_in(properties, b"DELAY\x01")
        if delay is None or not delay.isdigit():
            return otherwise
        level = min(int(delay), len(self._delay_millis))
        return store_timestamp + self._delay_millis[level - 1] if level > 0 else otherwise

    def replay(self, record: WalkedRecord) -> QueueState | None:
        """Apply one record of a walk; return its queue when the record takes part in one."""
        physical_offset, size, topic, queue_id, queue_offset, sys_flag, store_timestamp, properties = record
        state = self._queues.of_record(topic, queue_id)
        if state is None:
            return None
        if sys_flag & 4:  # prepared or rolled back
            self.apply(state, queue_offset, physical_offset, size, sys_flag, store_timestamp, properties)
            return None
        queue = state.queue
        if physical_offset + size <= queue.max_physical_offset:
            if physical_offset < self.indexed_up_to:
                self.last_store_timestamp = store_timestamp
                return state
        elif queue_offset == 0 and queue.max_physical_offset > 0:
            # A queue has one first message. This topic was deleted and made again: forget its former life.
            self._queues.destroy(state)
        self.apply(state, queue_offset, physical_offset, size, sys_flag, store_timestamp, properties)
        # With the transient pool messages may have been numbered that are not in the queue yet.
        if state.next_offset < queue.max_offset:
            state.next_offset = queue.max_offset
        return state
