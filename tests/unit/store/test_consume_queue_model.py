"""Random operations: the consume queue behaves like a list that can lose its ends."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from downrange.model.message import PhysicalOffset, QueueOffset, TopicQueue
from downrange.store.files import OS_FILES
from downrange.store.queue.consume_queue import ENTRY, ConsumeQueue

FILE_ENTRIES = 4


class QueueMachine(RuleBasedStateMachine):
    """`entries[i]` is what the queue must hold at offset `base + i`."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.base = 0
        self.entries: list[tuple[int, int, int]] = []
        self.log_min = 0
        self.log_end = 0
        self.queue = self.reopened(clean=False)

    def reopened(self, *, clean: bool) -> ConsumeQueue:
        directory = self.root / "consumequeue" / "t" / "0"
        queue = ConsumeQueue(directory, TopicQueue("t", 0), FILE_ENTRIES * ENTRY.size, OS_FILES)
        queue.load()
        queue.recover(clean=clean)
        queue.correct_min_offset(PhysicalOffset(self.log_min))
        return queue

    def teardown(self) -> None:
        self.queue.release()
        shutil.rmtree(self.root)

    def record_starts(self) -> st.SearchStrategy[int]:
        return st.sampled_from([*(offset for offset, _, _ in self.entries), self.log_end])

    @initialize(first=st.integers(0, 11))
    def begin(self, first: int) -> None:
        self.base = first
        self.log_end = first * 10
        self.put([(10, 1)])

    @rule(records=st.lists(st.tuples(st.integers(1, 40), st.integers(-(1 << 63), (1 << 63) - 1)), max_size=10))
    def put(self, records: list[tuple[int, int]]) -> None:
        if not self.entries:
            self.base = self.queue.max_offset or self.base
        for size, tags_code in records:
            self.queue.put(QueueOffset(self.base + len(self.entries)), PhysicalOffset(self.log_end), size, tags_code)
            self.entries.append((self.log_end, size, tags_code))
            self.log_end += size

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def put_again(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.entries) - 1))
        physical_offset, size, tags_code = self.entries[at]
        self.queue.put(QueueOffset(self.base + at), PhysicalOffset(physical_offset), size, tags_code)

    @rule()
    def write_pending(self) -> None:
        self.queue.write_pending()

    @rule()
    def release(self) -> None:
        self.queue.release()

    @rule(least_pages=st.integers(0, 1))
    def flush(self, least_pages: int) -> None:
        self.queue.write_pending()
        self.queue.flush(least_pages)

    @rule(clean=st.booleans())
    def restart(self, clean: bool) -> None:
        self.queue.write_pending()
        self.queue.release()
        self.queue = self.reopened(clean=clean)

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        cut = data.draw(self.record_starts())
        self.queue.truncate(PhysicalOffset(cut))
        self.entries = [entry for entry in self.entries if entry[0] < cut]
        self.queue.correct_min_offset(PhysicalOffset(self.log_min))
        self.log_end = max((offset + size for offset, size, _ in self.entries), default=cut)

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        self.log_min = data.draw(self.record_starts())
        removed = self.queue.delete_expired(PhysicalOffset(self.log_min))
        assert removed >= 0
        gone = sum(offset < self.log_min for offset, _, _ in self.entries)
        self.base += gone
        del self.entries[:gone]

    @invariant()
    def reads_like_a_list(self) -> None:
        queue = self.queue
        if not self.entries:
            assert queue.min_offset == queue.max_offset
            return
        assert (queue.min_offset, queue.max_offset) == (self.base, self.base + len(self.entries))
        last_offset, last_size, _ = self.entries[-1]
        assert queue.max_physical_offset == last_offset + last_size
        found: list[tuple[int, int, int]] = []
        while len(found) < len(self.entries):
            at = self.base + len(found)
            block = queue.read(QueueOffset(at), 3)
            assert 0 < len(block) <= (queue.next_file_offset(QueueOffset(at)) - at) * ENTRY.size
            found += ENTRY.iter_unpack(block)
        assert found == self.entries
        assert queue.read(queue.max_offset, 1) == b""

    @invariant()
    def finds_every_time(self) -> None:
        if (
            self.entries and self.queue.next_file_offset(QueueOffset(self.base)) >= self.queue.max_offset
        ):  # one file: its age is no matter
            for number, (offset, _, _) in enumerate(self.entries):
                found = self.queue.search_by_time(
                    offset, PhysicalOffset(self.log_min), lambda physical_offset: physical_offset
                )
                assert found == self.base + number


TestConsumeQueueModel = QueueMachine.TestCase
TestConsumeQueueModel.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
