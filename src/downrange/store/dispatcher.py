"""From a record of the log to its consume queue and the key index.

The same code runs for a message that was just appended and for one that is replayed after a crash, so both leave the
same bytes behind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from downrange.compiled import steps
from downrange.model.hashing import tags_code
from downrange.store.index.key_hashes import Keyed
from downrange.store.index.key_index import KeyIndex
from downrange.store.log.walk import WalkedRecord
from downrange.store.queue.consume_queue import ENTRY, ConsumeQueue
from downrange.store.queue.queue_tails import BLOCK, PUT_STATE, ROW, RUN_DONE
from downrange.store.queue.queues import ConsumeQueues, QueueState
from downrange.store.run import Run

_TRANSACTION_MASK: Final = 12
_COMMIT: Final = 8
_ROLLBACK: Final = 12

# topic, properties, store timestamp -> the bit map of the filters that match
BitmapOf = Callable[[str, bytes, int], bytes]


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


def _find(text: str, name: str) -> str | None:
    """The same in the decoded text; `name` stands between its separators \\x02 and \\x01."""
    start = text.rfind(name)
    if start >= 0:
        start += len(name)
    elif text.startswith(name[1:]):
        start = len(name) - 1
    else:
        return None
    end = text.find("\x02", start)
    return (text[start:] if end < 0 else text[start:end]) or None


def _looked_up(text: str) -> tuple[int, str | None, str | None]:
    """All that queue and index want of a message's properties: its tag as a hash, its unique id, its keys."""
    tags = _find(text, "\x02TAGS\x01")
    code = 0 if tags is None else tags_code(tags)
    return code, _find(text, "\x02UNIQ_KEY\x01"), _find(text, "\x02KEYS\x01")


class Dispatcher:
    """Applies records to everything that is derived from the log. For the store's own thread only."""

    def __init__(
        self,
        queues: ConsumeQueues,
        index: KeyIndex | None,
        delay_millis: tuple[int, ...],
        bitmap_of: BitmapOf | None = None,
    ) -> None:
        self.queues = queues
        self.index = index
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
        text: str,
    ) -> None:
        """Enter one record into its queue and the index; what is there already stays as it is.

        `text` is that of its properties.
        """
        kind = sys_flag & _TRANSACTION_MASK
        if kind == _ROLLBACK:
            return
        code, unique, keys = _looked_up(text)
        if kind == 0 or kind == _COMMIT:
            if state.is_special:
                code = self._special_code(state, code, physical_offset + size, store_timestamp, text)
            state.queue.put(queue_offset, physical_offset, size, code)
            self.last_store_timestamp = store_timestamp
        if self.index is not None and (unique or keys):
            self.index.put(state.topic, unique, keys, physical_offset, store_timestamp)

    def apply_run(self, run: Run, store_timestamp: int) -> None:
        """`apply` for records that were appended in one run to queues that are not special."""
        if steps is not None and self._apply_compiled(run, store_timestamp):
            return
        tails = self.queues.tails
        tails.make_room(len(run))
        rows, memory = tails.rows, tails.memory
        unpack, pack, pack_entry = PUT_STATE.unpack_from, RUN_DONE.pack_into, ENTRY.pack_into
        full: dict[int, ConsumeQueue] = {}
        keyed: list[Keyed] = []
        for message, (physical_offset, size, queue_offset) in zip(run.messages, run.places, strict=True):
            state = message[0]
            code, unique, keys = _looked_up(message[3])
            # What `ConsumeQueue.put` does, but for writing what is full, which is done for all at the end.
            numbers = state.row * 8 + 8
            position = queue_offset * 20
            physical_end = physical_offset + size
            end, last_physical_end, at, count, total, spill_at = unpack(rows, numbers)
            if position != end or physical_end <= last_physical_end or not spill_at:
                takes_place = state.queue.prepare(position, physical_end)
                _, _, at, count, total, spill_at = unpack(rows, numbers)
            else:
                takes_place = True
            if takes_place:
                if not at % BLOCK:
                    at = tails.take_block(at)
                pack_entry(memory, at, physical_offset, size, code)
                pack(rows, numbers, position + 20, physical_end, at + 20, count + 1, total + size)
                if position + 20 >= spill_at:
                    full[state.row] = state.queue
            if unique or keys:
                keyed.append((state.topic, unique, keys, physical_offset))
        self.last_store_timestamp = store_timestamp
        for queue in full.values():
            queue.spill()
        if self.index is not None and keyed:
            self.index.put_run(keyed, store_timestamp)

    def _apply_compiled(self, run: Run, store_timestamp: int) -> bool:
        """The same by the compiled twins; False, and nothing was done, when they do not take this run."""
        assert steps is not None
        queues = self.queues
        full = steps.put_entries(run, queues.tails.rows, queues.tails.memory)
        if full is None:
            return False
        self.last_store_timestamp = store_timestamp
        for row in full:
            state = queues.by_row[row // ROW]
            assert state is not None
            state.queue.spill()
        index = self.index
        if index is not None and not index.put_compiled(run, store_timestamp):
            keyed: list[Keyed] = []
            for message, place in zip(run.messages, run.places, strict=True):
                _, unique, keys = _looked_up(message[3])
                if unique or keys:
                    keyed.append((message[0].topic, unique, keys, place[0]))
            if keyed:
                index.put_run(keyed, store_timestamp)
        return True

    def index_only(self, record: WalkedRecord) -> None:
        """Enter a replayed record into the index and leave its queue alone."""
        physical_offset, _, topic, _, _, sys_flag, store_timestamp, properties = record
        if self.index is not None and sys_flag & _TRANSACTION_MASK != _ROLLBACK:
            text = properties.decode("utf-8", "replace")
            _, unique, keys = _looked_up(text)
            if unique or keys:
                self.index.put(topic.decode("utf-8", "replace"), unique, keys, physical_offset, store_timestamp)

    def _special_code(self, state: QueueState, code: int, physical_end: int, store_timestamp: int, text: str) -> int:
        """What stands in the entry of a delayed message, or of one with an ext unit, instead of a tag hash."""
        if state.is_schedule:
            code = self._delivery_time(text, store_timestamp, code)
        if state.ext is None or physical_end <= state.queue.max_physical_offset:
            return code  # the second: the entry is there already, and so is its unit
        bitmap = self._bitmap_of(state.topic, text.encode(), store_timestamp) if self._bitmap_of else b""
        return state.ext.put(code, store_timestamp, bitmap)

    def _delivery_time(self, text: str, store_timestamp: int, otherwise: int) -> int:
        delay = _find(text, "\x02DELAY\x01")
        if delay is None or not (delay.isascii() and delay.isdigit()):
            return otherwise
        level = min(int(delay), len(self._delay_millis))
        return store_timestamp + self._delay_millis[level - 1] if level > 0 else otherwise

    def replay(self, record: WalkedRecord) -> QueueState | None:
        """Apply one record of a walk; return its queue when the record takes part in one."""
        physical_offset, size, topic, queue_id, queue_offset, sys_flag, store_timestamp, properties = record
        state = self.queues.of_record(topic, queue_id)
        if state is None:
            return None
        text = properties.decode("utf-8", "replace")
        if sys_flag & 4:  # prepared or rolled back
            self.apply(state, queue_offset, physical_offset, size, sys_flag, store_timestamp, text)
            return None
        queue = state.queue
        if physical_offset + size <= queue.max_physical_offset:
            if physical_offset < self.indexed_up_to:
                self.last_store_timestamp = store_timestamp
                return state
        elif queue_offset == 0 and queue.max_physical_offset > 0:
            # A queue has one first message. This topic was deleted and made again: forget its former life.
            self.queues.destroy(state)
        self.apply(state, queue_offset, physical_offset, size, sys_flag, store_timestamp, text)
        # With the transient pool messages may have been numbered that are not in the queue yet.
        if state.next_offset < queue.max_offset:
            state.next_offset = queue.max_offset
        return state
