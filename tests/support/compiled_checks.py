"""What must hold between the compiled twins and their twins in Python, for one random input each."""

from __future__ import annotations

import struct
from array import array
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from downrange.store.run import run_of

from downrange import compiled
from downrange.store import dispatcher, run
from downrange.store.index import key_index
from downrange.store.index.index_file import SLOT
from downrange.store.log import commit_log
from downrange.store.message_store import MessageStore
from downrange.store.new_message import PutMessageStatus
from downrange.store.queue.queue_tails import QueueTails
from tests.support import compiled_cases as cases
from tests.support.store_files import files_of
from tests.support.stores import append
from tests.unit.store.small_store import NOW, new_message, open_store

_QUEUES = [("TopicA", 0), ("TopicA", 1), ("T\u00f6pic\U0001f600", 0)]


def same_files(random: Random, root: str) -> None:
    """Feed the same runs to two stores, one without the twins; small files, so that every boundary is met."""
    seed = random.getrandbits(64)
    with_twins = _filled(Random(seed), Path(root, "compiled"))
    with ExitStack() as stack:
        for module in (commit_log, dispatcher, key_index):
            stack.enter_context(patch.object(module, "steps", None))
        assert _filled(Random(seed), Path(root, "mixed")) == with_twins  # the runs are compiled ones
        stack.enter_context(patch.object(run, "steps", None))
        assert _filled(Random(seed), Path(root, "pure")) == with_twins
    for other in ("mixed", "pure"):
        assert files_of(Path(root, "compiled")) == files_of(Path(root, other))


def _filled(random: Random, root: Path) -> list[Any]:
    born_host, store_host = random.choice(cases.HOSTS), random.choice(cases.HOSTS)
    seen: list[Any] = []
    store = open_store(root, mapped_file_size_commit_log=16384, max_hash_slot_num=7, max_index_num=50)
    for topic, queue_id in _QUEUES:
        assert append(store, new_message(topic=topic, queue_id=queue_id)).status is PutMessageStatus.PUT_OK
    states = list(store.queues.states.values())
    for number in range(random.randrange(1, 12)):
        _spoil_slots(random, store)
        chosen = random.choices(states, k=random.choice((1, 2, 30)))
        messages = run_of([cases.message(random, state) for state in chosen])
        if store.append_run(messages, born_host, store_host, NOW + 700 * number):
            seen.append((messages.places, messages.largest, messages.end))
        else:  # the file is full: what `append` is there for
            assert append(store, new_message(b"x" * 300)).status is PutMessageStatus.PUT_OK
        seen.append([(state.next_offset, repr(state.queue), state.queue.max_physical_offset) for state in states])
    store.close()
    return seen


def _spoil_slots(random: Random, store: MessageStore) -> None:
    """Let slots of the index point anywhere, as a crash may leave them."""
    index = store._dispatcher.index
    current = index._current if index is not None else None
    if current is not None and current.map is not None and random.random() < 0.3:
        for slot in range(7):
            number = random.choice((0, -1, 1, current.next_entry, current.next_entry + 1, 2**31 - 1))
            SLOT.pack_into(current.map, 40 + 4 * slot, number)


class _State:
    """What the twins want to know of a queue."""

    def __init__(self) -> None:
        self.row: object = 0
        self.queue_id: object = 1
        self.topic: object = "TopicA"
        self.topic_field: object = b"\6TopicA"


_NONSENSE: tuple[Any, ...] = (None, "x", b"x", 2**63, -(2**63), -1, 2**31, 1.5, [], (), object())


def refuses_nonsense(random: Random) -> None:
    """Spoil one thing: the twins say no, and nothing is different afterwards; or it made no difference to them."""
    steps: Any = compiled.steps
    good, other = _State(), _State()
    other.row = 8
    tails = QueueTails()
    for _ in (good, other):
        tails.add_row()
    tails.make_room(random.choice((0, 2, 3, 40)))
    rows, tail = tails.rows, tails.memory
    for row in (0, 8):
        rows[row : row + 5] = array("q", (5, 100, 0, random.choice((0, 256, 272, 276)), random.choice((0, 140, 200))))
    if random.random() < 0.3:
        rows[random.randrange(16)] = random.choice((-1, 1, 257, 20 * 2**58, 2**63 - 1, -(2**63), 1 << 40))
    if random.random() < 0.3:
        struct.pack_into("=q", tail, 8 * random.randrange(3), random.choice((-1, 1, 256, 512, 2**63 - 1, -(2**63))))
    messages: list[Any] = [cases.message(random, state) for state in (good, other, good)]  # type: ignore[arg-type]
    places: list[Any] = [(0, 200, 5), (200, 200, 5), (400, 200, 6)]
    memory = bytearray(random.choice((0, 8, 500, 4000)))
    before = bytes(memory)
    spoilt: Any = random.choice(_NONSENSE)
    which = random.randrange(len(messages))
    match random.randrange(4):
        case 0:
            setattr(messages[which][0], random.choice(("row", "queue_id", "topic", "topic_field")), spoilt)
        case 1:
            parts = list(messages[which])
            parts[random.randrange(1, len(parts))] = spoilt
            messages[which] = tuple(parts)
        case 2:
            messages[which] = random.choice((spoilt, messages[which][:7], (*messages[which], 1)))
        case _:
            run = _run_of(messages)
            numbers = list(rows)
            arguments: list[Any] = [run, cases.HOSTS[0], cases.HOSTS[1], NOW, memory, 0, 3000, 0, rows]
            arguments[random.randrange(len(arguments))] = spoilt
            if steps.append_run(*arguments) is None:
                assert (bytes(memory), list(rows)) == (before, numbers)
            numbers, entries = list(rows), bytes(tail)
            run.places = places
            arguments = [run, rows, tail]
            arguments[random.randrange(len(arguments))] = spoilt
            assert steps.put_entries(*arguments) is None
            assert (list(rows), bytes(tail)) == (numbers, entries)
            arguments = [run, memory, 7, 2, 60, 0, 0, 0]
            before = bytes(memory)
            arguments[random.randrange(len(arguments))] = spoilt
            if steps.index_keys(*arguments) is None:
                assert memory == before
            return
    run = steps.run_of(messages, [], 310)
    if run is None:
        return
    numbers = list(rows)
    limit = random.choice((len(memory), len(memory) + 1, 100))
    if steps.append_run(run, *cases.HOSTS[:2], NOW, memory, 0, limit, 0, rows) is None:
        assert (bytes(memory), list(rows)) == (before, numbers)
    else:
        assert memory[:8] != before[:8]
    with suppress(TypeError):
        run.places = random.choice((places, places[:2], [*places[:2], spoilt], [*places[:2], (spoilt, 1, 6)]))
    numbers, entries = list(rows), bytes(tail)
    if steps.put_entries(run, rows, tail) is None:
        assert (list(rows), bytes(tail)) == (numbers, entries)
    before = bytes(memory)
    if steps.index_keys(run, memory, 7, 2, random.choice((10, 150, 10**6)), 0, 0, 0) is None:
        assert memory == before


def _run_of(messages: list[Any]) -> Any:
    run = compiled.steps.run_of(messages, [], 310)
    assert run is not None
    return run
