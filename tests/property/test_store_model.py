"""Whatever is done to a store, in whatever order: it behaves like lists of messages in a dictionary."""

from __future__ import annotations

import errno
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from downrange.clock import ManualClock
from downrange.model.message_id import pack_host
from downrange.model.record import decode_record, decode_records
from downrange.store.config import StoreConfig
from downrange.store.message_store import MessageStore
from downrange.store.new_message import NewMessage, PutMessageStatus
from downrange.store.new_messages import NewMessages
from downrange.store.queue import queues
from downrange.store.read_result import GetMessageStatus
from downrange.store.retention import Retention
from tests.unit.store.small_store import FailingFiles, clean_up_round

HOSTS = (pack_host("10.0.0.1", 10911), pack_host("2001:db8::1", 10911))
QUEUES = st.sampled_from([("A", 0), ("A", 1), ("Bee", 0), ("ünï", 5)])
BODIES = st.integers(0, 1200).map(lambda size: bytes(size % 251 for _ in range(size)))
KEYS = st.sampled_from(["", "k1", "k2", "k1 k2", "schlüssel"])
PARTS = st.tuples(QUEUES, BODIES, KEYS, st.sampled_from(HOSTS))
NOW = 1_794_727_122_803
FILE_SIZE = 4096
Part = tuple[tuple[str, int], bytes, str, bytes]


@dataclass(frozen=True)
class Stored:
    """What the model knows of one message."""

    physical_offset: int
    body: bytes
    keys: str
    store_timestamp: int


class StoreMachine(RuleBasedStateMachine):
    """Random operations on a store with tiny files, beside a plain dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="store-model-"))
        self.clock = ManualClock(NOW)
        self.model: dict[tuple[str, int], list[Stored]] = {}
        self.disk_fill = 0.1
        self.files = FailingFiles()
        self.config = StoreConfig(
            store_path_root_dir=self.directory,
            mapped_file_size_commit_log=FILE_SIZE,
            mapped_file_size_consume_queue=200,
            max_hash_slot_num=7,
            max_index_num=20,
        )

    @initialize()
    def open(self) -> None:
        self.store = MessageStore.open(
            self.config, clock=self.clock, files=self.files, disk_use=lambda path: self.disk_fill
        )
        self.retention = Retention(self.store, hour_of=lambda now: 4)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.directory)

    def remember(self, queue: tuple[str, int], offset: int, queue_offset: int, body: bytes, keys: str) -> None:
        messages = self.model.setdefault(queue, [])
        assert queue_offset == len(messages)
        messages.append(Stored(offset, body, keys, self.clock.now()))

    def new(self, queue: tuple[str, int], body: bytes, keys: str, host: bytes) -> NewMessage:
        properties = f"KEYS\x01{keys}\x02".encode() if keys else b""
        return NewMessage(*queue, body, properties, NOW, host, HOSTS[0])

    @rule(part=PARTS)
    def append(self, part: Part) -> None:
        self.append_batch([[part]])

    @rule(groups=st.lists(st.lists(PARTS, min_size=1, max_size=3), min_size=1, max_size=5))
    def append_batch(self, groups: list[list[Part]]) -> None:
        """Groups of messages, each of any queues."""
        messages = self.added(groups)
        assert self.store.append(messages) is None
        self.stored(messages, groups)

    @rule(
        groups=st.lists(st.lists(PARTS, min_size=1, max_size=3), min_size=1, max_size=5),
        fail=st.sampled_from(["create", "reserve", "write_at"]),
    )
    def append_to_a_full_disk(self, groups: list[list[Part]], fail: str) -> None:
        """What is in the log already gets into its queue when there is room again."""
        messages = self.added(groups)
        self.files.fail[fail] = errno.ENOSPC
        refusal = self.store.append(messages)
        self.files.fail.clear()
        if refusal is not None:
            assert refusal.status is PutMessageStatus.SERVICE_NOT_AVAILABLE
            assert messages.stored < len(messages)
        if "dispatch" in self.store.refusals:
            assert self.store.add(NewMessages(), [self.new(("A", 0), b"", "", HOSTS[0])]) is not None
            self.store.dispatch_pending()
        assert self.store.refusals == {}
        self.stored(messages, groups)

    @rule(part=PARTS, large=st.sampled_from([4000, 70_000]))
    def append_too_much(self, part: Part, large: int) -> None:
        """What is refused takes no place, nor do the messages of its group."""
        messages = NewMessages()
        refused = self.new(part[0], bytes(large), "", HOSTS[0])
        assert self.store.add(messages, [self.new(*part), refused]) is not None
        assert len(messages) == 0
        self.append(part)

    def added(self, groups: list[list[Part]]) -> NewMessages:
        messages = NewMessages()
        for group in groups:
            assert self.store.add(messages, [self.new(*part) for part in group]) is None
        return messages

    def stored(self, messages: NewMessages, groups: list[list[Part]]) -> None:
        """Exactly the first messages are there, each group in one file or nowhere."""
        places = iter(messages.places)
        left = messages.stored
        for group in groups:
            assert left == 0 or left >= len(group)
            files = set()
            for (queue, body, keys, _), (offset, _, queue_offset) in zip(group[:left], places, strict=False):
                self.remember(queue, offset, queue_offset, body, keys)
                files.add(offset // FILE_SIZE)
            left -= len(group[:left])
            assert len(files) <= 1
        assert (left, next(places, None)) == (0, None)

    @rule(seconds=st.floats(0, 7200))
    def let_time_pass(self, seconds: float) -> None:
        self.clock.tick(seconds)

    @rule()
    def flush(self) -> None:
        self.store.write_pending()
        self.store.flush_queues(thorough=True)
        assert self.store.flush_commit_log() == self.store.max_offset

    @rule()
    def prepare_and_release(self) -> None:
        self.store.prepare_next_file()
        self.store.release_idle()

    @rule(how=st.sampled_from(["in order", "killed", "power cut"]))
    def restart(self, how: str) -> None:
        end = self.store.max_offset
        if how == "in order":
            self.store.close()
        else:
            self.store._segments.close()
            self.store._lock.release()
            if how == "power cut":
                (self.directory / "abort").write_bytes(b"")
        self.open()
        assert self.store.recovery.warnings == []
        assert self.store.max_offset == end

    @precondition(lambda self: len(self.store._segments) > 2)
    @rule(count=st.integers(1, 3))
    def lose_the_oldest_files(self, count: int) -> None:
        self.store.remove_files(self.store.take_oldest_files(count))
        self.retention.clean_dependents()

    @rule()
    def fill_the_disk_for_a_moment(self) -> None:
        self.disk_fill = 0.86
        clean_up_round(self.retention, self.store, self.clock.now())
        self.disk_fill = 0.1

    @rule()
    def lose_queues_and_index(self) -> None:
        if self.store.min_offset > 0:
            return  # what was deleted from the log cannot be numbered again
        self.store.close()
        shutil.rmtree(self.directory / "consumequeue", ignore_errors=True)
        shutil.rmtree(self.directory / "index", ignore_errors=True)
        self.open()

    @rule(queue=QUEUES, back=st.integers(-2, 30), count=st.integers(0, 40))
    def read(self, queue: tuple[str, int], back: int, count: int) -> None:
        messages = self.model.get(queue, [])
        first = self.first_of(messages)
        offset = len(messages) - back
        result = self.store.read(*queue, offset, count)
        found = [message for part in result.slices for message in decode_records(part)]
        if not messages:
            assert result.status is GetMessageStatus.NO_MESSAGE_IN_QUEUE
        elif offset < first:
            assert (result.status, result.next_begin_offset) == (GetMessageStatus.OFFSET_TOO_SMALL, first)
        elif offset > len(messages):
            expected = GetMessageStatus.OFFSET_OVERFLOW_BADLY, len(messages)
            assert (result.status, result.next_begin_offset) == expected
        elif offset == len(messages):
            assert (result.status, result.next_begin_offset) == (GetMessageStatus.OFFSET_OVERFLOW_ONE, offset)
        else:
            # Ten entries in a queue file: a read stops there.
            stop = min(len(messages), offset + max(1, min(count, 32)), offset - offset % 10 + 10)
            assert result.status is GetMessageStatus.FOUND
            assert [message.body for message in found] == [message.body for message in messages[offset:stop]]
            assert [message.queue_offset for message in found] == list(range(offset, stop))
            assert result.next_begin_offset == stop

    @rule(queue=QUEUES, key=st.sampled_from(["k1", "k2", "schlüssel", "nobody"]))
    def query(self, queue: tuple[str, int], key: str) -> None:
        topic = queue[0]
        found = {
            message.physical_offset
            for part in self.store.query(topic, key, 64, 0, 1 << 62).slices
            if (message := decode_record(part)).topic == topic and key in message.keys
        }
        expected = {
            message.physical_offset
            for (name, _), messages in self.model.items()
            for message in messages[self.first_of(messages) :]
            if name == topic and key in message.keys.split(" ")
        }
        assert found <= expected
        if len(expected) <= 10:  # more may hide behind other keys in the same slots
            assert found == expected

    def first_of(self, messages: list[Stored]) -> int:
        """The queue offset of the first message whose file is still there; the end when there is none."""
        minimum = self.store.min_offset
        return next((n for n, message in enumerate(messages) if message.physical_offset >= minimum), len(messages))

    @invariant()
    def ranges_agree(self) -> None:
        if not hasattr(self, "store"):
            return
        for queue, messages in self.model.items():
            assert self.store.max_offset_of(*queue) == len(messages)
            assert self.store.min_offset_of(*queue) == self.first_of(messages)
        self.store.commit_log.check()
        for state in self.store.queues:
            state.queue.check()
            assert state.next_offset == state.queue.max_offset


class SleepyStoreMachine(StoreMachine):
    """The same with queues that sleep whenever they may."""

    def __init__(self) -> None:
        super().__init__()
        self.few_awake = patch.object(queues, "_ALWAYS_AWAKE", 0)
        self.few_awake.start()

    @rule()
    def rest(self) -> None:
        self.flush()
        for _ in range(3):
            self.store.release_idle()
        awake = {key for key, state in self.store.queues.states.items() if not state.queue.may_sleep}
        assert set(self.store.queues.states) == awake
        assert {*self.store.queues.names()} >= self.model.keys()

    def teardown(self) -> None:
        self.few_awake.stop()
        super().teardown()


for machine in (StoreMachine, SleepyStoreMachine):
    machine.TestCase.settings = settings(
        max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
TestStore = StoreMachine.TestCase
TestSleepyStore = SleepyStoreMachine.TestCase
