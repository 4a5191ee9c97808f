"""What must hold between the compiled steps of timer messages and their twins in Python, for one random input each."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from array import array
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from downrange import compiled
from downrange.clock import ManualClock
from downrange.model.topics import HALF_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC
from downrange.store.new_messages import NewMessages
from downrange.store.queue.queue_entry import ENTRY
from downrange.store.timer import timer_log
from downrange.store.timer.timer_log import UNIT
from tests.support import compiled_cases as cases
from tests.support.compiled_replay_checks import NONSENSE, _State, record
from tests.support.store_files import files_of
from tests.support.stores import append_batch
from tests.support.timed_broker import NOW, TimedBroker
from tests.support.twins import pure_twin

_TOPICS = (
    "orders",
    "orders",
    "orders",
    "orders",
    "orders",
    "T\u00f6pic",
    "y" * 127,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
    HALF_TOPIC,
    "../x",
    "",
)
_SETTINGS: dict[str, Any] = {"mapped_file_size_commit_log": 65536, "timer_roll_window_slot": 12}


def same_deliveries(random: Random, root: str) -> None:
    """Deliver timer messages of every kind, and some that no broker would store, compiled and in Python."""
    waiting = Path(root, "waiting")
    asyncio.run(_fill(random, waiting))
    copies = Path(root, "compiled"), Path(root, "pure")
    for copy in copies:
        shutil.copytree(waiting, copy)
    recalled = random.random() < 0.5
    seen = asyncio.run(_deliver(copies[0], recalled))
    assert asyncio.run(pure_twin(__name__)._deliver(copies[1], recalled)) == seen
    assert files_of(copies[0]) == files_of(copies[1])


def same_intake(random: Random, root: str) -> None:
    """Take timer messages of every kind into the index, compiled and in Python: all files are the same."""
    seed = random.getrandbits(64)
    copies = Path(root, "compiled"), Path(root, "pure")
    asyncio.run(_fill(Random(seed), copies[0]))
    asyncio.run(pure_twin(__name__)._fill(Random(seed), copies[1]))
    assert files_of(copies[0]) == files_of(copies[1])


async def _fill(random: Random, root: Path) -> None:
    broker = TimedBroker(root, ManualClock(NOW), **_SETTINGS)
    broker.service.turn()
    broker.save()  # from now on nothing can have been delivered before
    for _ in range(random.choice((5, 60, 200))):
        append_batch(broker.store, [[_waiting(random)]])
    broker.work()
    broker.close()


def _waiting(random: Random) -> Any:
    message = cases.message(random, TIMER_TOPIC, 0)
    out = NOW + random.choice((0, 1000, 1000, 1000, 2000, 30_000))
    ends = [
        f"TIMER_OUT_MS\x01{out}",
        f"REAL_TOPIC\x01{random.choice(_TOPICS)}",
        f"REAL_QID\x01{random.choice('00012x')}",
    ]
    if random.random() < 0.1:
        random.shuffle(ends)
    if random.random() < 0.1:
        ends.insert(random.randrange(4), random.choice(("TIMER_ENQUEUE_MS\x015", "", "QUEUE_MS\x01", "x")))
    text = message.properties.decode("utf-8", "replace").replace("TIMER_D", "timer_d").rstrip("\x01")
    if random.random() < 0.1:
        ends.insert(0, f"TIMER_DEL_UNIQKEY\x01orders+{random.choice('ab')}")
    elif random.random() < 0.3:
        ends.insert(0, f"UNIQ_KEY\x01{random.choice('ab')}")
    message.properties = (text + random.choice(("\x02",) * 9 + ("",)) + "\x02".join(ends)).encode()
    if random.random() < 0.03:
        message.properties = b"own\x01\xff\x02" + message.properties
    if random.random() < 0.03:
        message.properties = b"own\x01" + b"x" * (32767 - 5 - len(message.properties)) + b"\x02" + message.properties
        message.body = b""
    return message


async def _deliver(root: Path, recalled: bool) -> Any:
    clock = ManualClock(NOW + 137)
    broker = TimedBroker(root, clock, **_SETTINGS)
    if recalled:
        broker.delete(b"a", NOW + 1001)
    broker.work()
    for _ in range(40):
        clock.set(clock.now() + 1000)
        broker.work()
    metrics = broker.service.metrics
    seen = [
        dict(metrics.dequeue_total),
        metrics.waiting_by_topic(),
        broker.store.max_offset,
        broker.service.index.check(),
    ]
    broker.close()
    return seen


def same_chains(random: Random) -> None:
    """Follow a chain through a file of the timer log, sound or damaged."""
    start = random.choice((0, 1024, 2**40))
    memory = bytearray(random.choice((0, 10, 52, 530, 1024)))
    for at in range(0, len(memory) - UNIT.size + 1, UNIT.size):
        previous = random.choice(
            (-1, start + at - UNIT.size, start + at - 2 * UNIT.size, start - 52, start + at, 2**62)
        )
        numbers = random.choice((1, 1, 1, 2, 3, 4, 5, 7, 15, 16, 0)), NOW, 5000, random.getrandbits(60), 300, -5, 0
        UNIT.pack_into(memory, at, random.choice((52,) * 20 + (51,)), previous, *numbers)
    position = start + random.randrange(len(memory) // UNIT.size + 2) * UNIT.size
    arguments = bytes(memory), start, position, random.choice((0, 1, 5, 1000))
    steps: Any = compiled.steps
    pure: Any = pure_twin(timer_log.__name__)
    assert steps.follow_chain(*arguments) == pure.follow_chain(*arguments)


def refuses_nonsense_about_timers(random: Random) -> None:
    """Damaged records in a buffer of their own, and arguments that only a bug can pass: an exception, and no crash."""
    steps: Any = compiled.steps
    chain: list[Any] = [bytes(104), 0, 52, 5]
    chain[random.randrange(4)] = random.choice(NONSENSE)
    with contextlib.suppress(TypeError, BufferError):
        steps.follow_chain(*chain)
    units_to_put: list[Any] = [
        [(NOW + 5000, NOW, 5, 300, -7, False, "T")] * 3, 0, bytearray(32 * 8), (8, -1), bytearray(520), (0, 0, 508),
        (1000, 10**6, 5000, 2000, NOW, NOW),
    ]  # fmt: skip
    units_to_put[random.randrange(7)] = random.choice(
        (*NONSENSE, [(1, 2)], (1,) * 6, (9**9,) * 6, (0, 9, 10**6), (9, 9))
    )
    with contextlib.suppress(TypeError, BufferError, OverflowError):
        assert len(steps.put_units(*units_to_put)) == 3
    log, offsets = _records(random)
    entries = b"".join(
        ENTRY.pack(at, int.from_bytes(log[at - 1000 : at - 996], "big", signed=True), 0) for at in offsets
    )
    backlog: list[Any] = [entries, memoryview(log), 1000, len(log)]
    if random.random() < 0.4:
        backlog[random.randrange(4)] = random.choice(NONSENSE)
    with contextlib.suppress(TypeError, BufferError, OverflowError):
        assert len(steps.timed_records(tuple(backlog))) <= len(offsets)
    state = _State(0)
    queues = SimpleNamespace(
        by_raw_topic={(b"orders", 0): state}, rows_by_topic=steps.TopicTable(), by_row=random.choice(([state], [None]))
    )
    units = array("q", [number for offset in offsets for number in (offset, NOW)])
    file: list[Any] = [memoryview(log), 1000, len(log)]
    tick: list[Any] = [NOW, NOW + 1000, random.choice((set(), {"orders+a"}))]
    messages = NewMessages()
    arguments: list[Any] = [messages, units, len(offsets), 1000, file, tick, queues, 4096]
    if random.random() < 0.4:
        changed = random.choice((file, tick, arguments))
        changed[random.randrange(len(changed))] = random.choice(NONSENSE)
    if random.random() < 0.2:
        setattr(queues, random.choice(("by_raw_topic", "rows_by_topic", "by_row")), random.choice(NONSENSE))
    if random.random() < 0.2:
        setattr(state, random.choice(("row", "is_special")), random.choice(NONSENSE))
    arguments[4:6] = [
        tuple(part) if isinstance(part, list) and len(part) == 3 else part for part in arguments[4:6]
    ]  # tuples, as LogFile and Tick are
    try:
        at, work = steps.add_due(*arguments)
    except (TypeError, AttributeError, BufferError, OverflowError):
        return
    assert at + len(messages) == arguments[2]
    assert work <= arguments[3]


def _records(random: Random) -> tuple[bytes, list[int]]:
    """Records of the timer topic, some damaged, as they lie in a file whose offset is 1000; and where they begin."""
    log, offsets = b"", []
    for number in range(3):
        offsets.append(1000 + len(log))
        log += record(random, number, TIMER_TOPIC, _waiting(random).properties.decode("utf-8", "replace"))
    damaged = bytearray(log)
    for _ in range(random.randrange(3)):
        damaged[random.randrange(len(damaged))] = random.choice((0, 1, 0x7F, 0x80, 0xFF))
    offsets[random.randrange(3)] += random.choice((0, 0, 0, 1, -2000, 2**40))
    return bytes(damaged), offsets
