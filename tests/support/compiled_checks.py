"""What must hold between the compiled steps of the way into the store and Python, for one random input each."""

from __future__ import annotations

import errno
import struct
from array import array
from pathlib import Path
from random import Random
from typing import Any

from downrange import compiled
from downrange.clock import ManualClock
from downrange.model.topics import SCHEDULE_TOPIC
from downrange.store.index.index_file import SLOT
from downrange.store.message_store import MessageStore
from downrange.store.new_messages import NewMessages
from downrange.store.queue.queue_tails import QueueTails
from tests.support import compiled_cases as cases
from tests.support.store_files import files_of
from tests.support.twins import pure_twin
from tests.unit.store.small_store import NOW, FailingFiles, open_store

_QUEUES = [("TopicA", 0), ("TopicA", 1), ("T\u00f6pic\U0001f600", 0), ("x" * 127, 7), (SCHEDULE_TOPIC, 2)]
_LOUD = (TypeError, ValueError, IndexError, AttributeError)
"""What a compiled step may raise when its arguments are those of a bug."""


def same_files(random: Random, root: str) -> None:
    """Feed batches to two stores, one of them in Python; small files, so that every boundary is met."""
    seed = random.getrandbits(64)
    seen = _filled(Random(seed), Path(root, "compiled"))
    assert pure_twin(__name__)._filled(Random(seed), Path(root, "pure")) == seen
    assert files_of(Path(root, "compiled")) == files_of(Path(root, "pure"))


def _filled(random: Random, root: Path) -> list[Any]:
    seen: list[Any] = []
    files, clock = FailingFiles(), ManualClock(NOW)
    store = open_store(
        root,
        files=files,
        clock=clock,
        mapped_file_size_commit_log=16384,
        max_hash_slot_num=7,
        max_index_num=random.choice((5, 50)),
        enable_consume_queue_ext=random.random() < 0.2,
    )
    for _ in range(random.randrange(1, 12)):
        clock.set(clock.now() + random.choice((0, 0, 700, -5)))
        _spoil_slots(random, store)
        messages = NewMessages()
        for _ in range(random.choice((1, 2, 30))):
            queues = random.choices(_QUEUES, k=random.choice((1, 1, 1, 2, 5)))
            refusal = store.add(messages, [cases.message(random, *queue) for queue in queues])
            seen.append(None if refusal is None else (refusal.status.value, refusal.reason))
        if random.random() < 0.1:
            files.fail[random.choice(("create", "reserve", "write_at"))] = errno.ENOSPC
        refusal = store.append(messages)
        if files.fail:
            files.fail.clear()
            if "dispatch" in store.refusals:
                store.dispatch_pending()
        seen.append(None if refusal is None else (refusal.status.value, refusal.reason.replace(str(root), "")))
        seen.append(_told_by(messages))
        for state in store.queues:
            queue = state.queue
            seen.append((state.next_offset, queue.min_offset, queue.max_offset, queue.max_physical_offset))
        seen.append(sorted(store.queues.take_counts()))
    store.close()
    return seen


def _told_by(messages: NewMessages) -> list[Any]:
    """Everything a batch says of itself."""
    numbers = range(len(messages))
    told: list[Any] = [len(messages), messages.stored, messages.places, messages.special]
    told += [[(state.topic, state.queue_id) for state in messages.states]]
    told += [[messages.properties(n) for n in numbers], [messages.sys_flag(n) for n in numbers]]
    told += [[messages.code(n) for n in messages.special], [messages.group_size(n) for n in numbers]]
    told += [[*messages.properties_for(state)] for state in messages.states[:1]]
    if messages.stored:
        told += [messages.end_offset, messages.largest, messages.bounds(0, messages.stored)]
    return told


def _spoil_slots(random: Random, store: MessageStore) -> None:
    """Let slots of the index point anywhere, as a crash may leave them."""
    index = store._dispatcher.index
    current = index._current if index is not None else None
    if current is not None and current.map is not None and random.random() < 0.3:
        for slot in range(7):
            number = random.choice((0, -1, 1, current.next_entry, current.next_entry + 1, 2**31 - 1))
            SLOT.pack_into(current.map, 40 + 4 * slot, number)


class _State:
    """What the steps want to know of a queue."""

    def __init__(self, row: int) -> None:
        self.row: object = row
        self.queue_id: object = 1
        self.topic: object = "TopicA"
        self.topic_field: object = b"\6TopicA"
        self.is_special: object = False


NONSENSE: tuple[Any, ...] = (None, "x", b"x", 2**63, -(2**63), -1, 2**31, 1.5, [], (), {}, object())


def refuses_nonsense(random: Random) -> None:
    """Spoil one thing: the steps raise an exception, and nothing is different afterwards; or it made no difference."""
    steps: Any = compiled.steps
    spoilt: Any = random.choice(NONSENSE)
    states = [_State(0), _State(8)]
    if random.random() < 0.3:
        name = random.choice(("row", "queue_id", "topic", "topic_field", "is_special"))
        setattr(random.choice(states), name, spoilt)
    messages = steps.NewMessages()
    for number in range(3):
        message: Any = cases.message(random, "TopicA", 1)
        if random.random() < 0.1:
            setattr(message, random.choice(message.__struct_fields__), spoilt)
        arguments = [states[number % 2], message, random.random() < 0.7 or not number]
        if random.random() < 0.1:
            arguments[random.randrange(3)] = spoilt
        expected = len(messages)
        if not raises(messages.add, *arguments):
            expected += 1
        assert len(messages) == expected
    _ask_nonsense(random, messages, spoilt)
    tails = QueueTails()
    for _ in states:
        tails.add_row()
    tails.make_room(random.choice((0, 2, 3, 40)))
    rows, tail = tails.rows, tails.memory
    for row in (0, 8):
        at, spill_at = random.choice((0, 256, 272, 276)), random.choice((0, 140, 200))
        rows[row : row + 8] = array("q", (5, 100, 0, at, 0, 0, spill_at, 100))
    if random.random() < 0.3:
        rows[random.randrange(16)] = random.choice((-1, 1, 257, 20 * 2**58, 2**63 - 1, -(2**63), 1 << 40))
    if random.random() < 0.3:
        struct.pack_into("=q", tail, 8 * random.randrange(3), random.choice((-1, 1, 256, 512, 2**63 - 1, -(2**63))))
    memory = bytearray(random.choice((0, 8, 500, 4000)))
    limit = random.choice((len(memory), len(memory) + 1, 100))
    arguments = [messages, 0, memory, random.choice((0, 8, 5000)), limit, random.choice((0, 2**62)), NOW, rows]
    if random.random() < 0.3:
        arguments[random.randrange(len(arguments))] = spoilt
    before = bytes(memory), list(rows), messages.stored
    if raises(steps.write_records, *arguments):
        assert (bytes(memory), list(rows), messages.stored) == before
    arguments = [messages, 0, messages.stored, rows, tail]
    if random.random() < 0.3:
        arguments[random.randrange(len(arguments))] = spoilt
    entries = bytes(tail)
    numbers = list(rows)
    if raises(steps.put_entries, *arguments):
        assert (list(rows), bytes(tail[: len(entries)])) == (numbers, entries)
    index = bytearray(random.choice((0, 40, 40 + 4 * 7 + 20 * 60)))
    limit = random.choice((10, 60, 150, 10**6))
    arguments = [messages, 0, messages.stored, index, 7, random.choice((1, 2, 5)), limit, 0, 0, NOW]
    if random.random() < 0.3:
        arguments[random.randrange(len(arguments))] = spoilt
    if raises(steps.index_keys, *arguments):
        assert not any(index)


def _ask_nonsense(random: Random, messages: Any, spoilt: Any) -> None:
    for name in ("properties", "sys_flag", "code", "group_size"):
        if not isinstance(spoilt, int) or not 0 <= spoilt < len(messages):
            assert raises(getattr(messages, name), spoilt)
    assert raises(messages.bounds, 0, spoilt)
    assert raises(messages.bounds, spoilt, 1)
    assert raises(messages.set_code, random.choice((spoilt, 99)), 1)
    assert raises(messages.set_code, 0, random.choice((None, "x", 1.5, 2**64)))
    assert [*messages.properties_for(spoilt)] == []
    assert raises(lambda: messages.end_offset)
    assert raises(type(messages), spoilt)


def raises(step: Any, *arguments: Any) -> bool:
    """Whether the step called these arguments wrong; any other exception is a fault."""
    try:
        step(*arguments)
    except _LOUD:
        return True
    return False
