"""What must hold between the compiled replay of the log and its twin in Python, for one random input each."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from downrange import compiled
from downrange.clock import ManualClock
from downrange.model.message import PhysicalOffset, QueueOffset, StoredMessage
from downrange.model.message_id import HostPort
from downrange.model.record import encode_record
from downrange.model.topics import SCHEDULE_TOPIC
from downrange.store.config import BrokerRole
from downrange.store.errors import StoreCorrupt
from downrange.store.message_store import MessageStore
from downrange.store.new_message import NewMessage
from downrange.store.new_messages import NewMessages
from tests.support import compiled_cases as cases
from tests.support.store_files import files_of
from tests.support.stores import append_batch
from tests.support.twins import pure_twin
from tests.unit.store.small_store import NOW, kill, open_store, pull_the_plug

_TOPICS = ("TopicA", "TopicA", "T\u00f6pic\U0001f600", "x", "y" * 127)
SETTINGS: dict[str, Any] = {"mapped_file_size_commit_log": 16384, "max_hash_slot_num": 7}
NONSENSE: tuple[Any, ...] = (None, "x", b"x", 2**63, -(2**63), -1, 2**31, 1.5, [], (), {}, object())


def same_recovery(random: Random, root: str) -> None:
    """Recover what a crash left, or worse, compiled and in Python."""
    settings = SETTINGS | {"max_index_num": random.choice((5, 50, 1000))}
    crashed = Path(root, "crashed")
    store = open_store(crashed, **settings)
    fill(random, store, random.choice((1, 20, 150)))
    if random.random() < 0.5:
        store.write_pending()
        store.flush_queues(thorough=random.random() < 0.5)
        fill(random, store, random.choice((0, 30)))
    end = store.max_offset
    random.choice((kill, pull_the_plug, MessageStore.close))(store)
    if random.random() < 0.5:
        lose_files(random, crashed)
    if random.random() < 0.4:
        damage(random, crashed, end)
    with_twins, pure = Path(root, "compiled"), Path(root, "pure")
    shutil.copytree(crashed, with_twins)
    shutil.copytree(crashed, pure)
    settings["broker_role"] = random.choice(("ASYNC_MASTER", "SLAVE"))
    settings["check_crc_on_recover"] = random.random() < 0.8
    seen = _recovered(with_twins, settings)
    assert pure_twin(__name__)._recovered(pure, settings) == seen
    assert files_of(with_twins) == files_of(pure)


def same_slaves(random: Random, root: str) -> None:
    """Feed a log to two slaves, piece by piece, one of them in Python; both tell the same of it."""
    settings = SETTINGS | {"max_index_num": random.choice((5, 50, 1000))}
    master = open_store(Path(root, "master"), **settings)
    fill(random, master, random.choice((1, 20, 150)))
    data = b"".join(segment.view[: segment.wrote] for segment in master.commit_log.segments)
    master.close()
    cuts = sorted(random.randrange(len(data) + 1) for _ in range(random.choice((0, 2, 20))))
    pieces = list(zip([0, *cuts], [*cuts, len(data)], strict=True))
    seen = _follow(Path(root, "compiled"), settings, data, pieces)
    assert pure_twin(__name__)._follow(Path(root, "pure"), settings, data, pieces) == seen
    assert files_of(Path(root, "compiled")) == files_of(Path(root, "pure"))


def _follow(root: Path, settings: dict[str, Any], data: bytes, pieces: list[tuple[int, int]]) -> list[Any]:
    seen: list[Any] = []
    with open_store(root, broker_role=BrokerRole.SLAVE, **settings) as slave:
        for begin, end in pieces:
            slave.append_data(begin, data[begin:end])
            told: list[NewMessages] = []
            slave.dispatch_pending(told.append)
            seen += [_told(told), slave.dispatch_behind_bytes, slave.refusals, _states(slave)]
    return seen


def refuses_nonsense_about_a_replay(random: Random) -> None:
    """Damaged records in a buffer of their own, and arguments that only a bug can pass: an exception, and no crash."""
    steps: Any = compiled.steps
    state = _State(0)
    log = bytearray(b"".join(record(random, 5 + number) for number in range(3)))
    for _ in range(random.randrange(3)):
        log[random.randrange(len(log))] = random.choice((0, 1, 0x7F, 0x80, 0xFF))
    del log[random.randrange(len(log) + 1) if random.random() < 0.3 else len(log) :]
    queues = SimpleNamespace(
        by_raw_topic={(b"TopicA", 1): state},
        rows_by_topic=steps.TopicTable(),
        by_row=random.choice(([state], [], [None])),
    )
    messages = NewMessages()
    arguments: list[Any] = [
        messages, bytes(log), 0, len(log), 1000, random.random() < 0.5, queues, random.random() < 0.8,
    ]  # fmt: skip
    if random.random() < 0.4:
        arguments[random.randrange(len(arguments))] = random.choice(NONSENSE)
    elif random.random() < 0.2:
        setattr(queues, random.choice(("by_raw_topic", "rows_by_topic", "by_row")), random.choice(NONSENSE))
    if random.random() < 0.2:
        setattr(state, random.choice(("row", "is_special")), random.choice(NONSENSE))
    try:
        stop = steps.read_records(*arguments)
    except (TypeError, AttributeError, BufferError, OverflowError):
        return
    assert 0 <= stop <= len(log)
    assert sum(place[1] for place in messages.places) == stop - arguments[2]


class _State:
    """As much of a queue as the compiled step wants to know."""

    def __init__(self, row: int) -> None:
        self.row: object = row
        self.is_special: object = False


def record(random: Random, queue_offset: int, topic: str = "TopicA", text: str | None = None) -> bytes:
    text = cases.text(random) if text is None else text
    message = StoredMessage(
        topic=topic,
        queue_id=1,
        queue_offset=QueueOffset(queue_offset),
        physical_offset=PhysicalOffset(0),
        body=random.randbytes(random.choice((0, 5, 70, 200))),
        properties_text=text,
        sys_flag=random.choice((0, 0, 0, 1, 8)),
        flag=0,
        born_timestamp=NOW,
        born_host=HostPort("", 0),
        store_timestamp=NOW,
        store_host=HostPort("", 0),
        reconsume_times=0,
        prepared_transaction_offset=0,
        body_crc=0,
        store_size=0,
    )
    return encode_record(message, random.choice(cases.HOSTS), random.choice(cases.HOSTS))


def fill(random: Random, store: MessageStore, count: int) -> None:
    """Messages of every kind, most of them usual."""
    clock = store._now.__self__  # type: ignore[attr-defined]
    assert isinstance(clock, ManualClock)
    left = count
    while left > 0:
        clock.set(clock.now() + random.choice((0, 1, 2000)))
        if random.random() < 0.01:
            store.remove_topic(random.choice(_TOPICS))
        sizes = [random.choice((1, 1, 1, 3)) for _ in range(random.choice((1, 1, 10)))]
        append_batch(store, [[_message(random) for _ in range(size)] for size in sizes])
        left -= sum(sizes)


def _message(random: Random) -> NewMessage:
    if random.random() < 0.05:
        return cases.message(random, SCHEDULE_TOPIC, 3)
    return cases.message(random, random.choice(_TOPICS), random.randrange(3))


def lose_files(random: Random, root: Path) -> None:
    for name in ("consumequeue", "index"):
        if random.random() < 0.6:
            found = sorted(path for path in (root / name).rglob("*") if path.is_file())
            for path in found if random.random() < 0.5 else random.sample(found, min(1, len(found))):
                path.unlink()


def damage(random: Random, root: Path, end: int) -> None:
    """Change some bytes of the log."""
    files = sorted((root / "commitlog").iterdir())
    if not files:
        return
    path = random.choice(files)
    used = max(1, min(end - int(path.name), 16384))
    with path.open("r+b") as stream:
        for _ in range(random.choice((1, 3))):
            stream.seek(random.randrange(used))
            stream.write(random.choice((b"\0", b"\xff", b"\0" * 100, random.randbytes(3))))


def _recovered(root: Path, settings: dict[str, Any]) -> list[Any]:
    try:
        store = open_store(root, **settings | {"broker_role": BrokerRole(settings["broker_role"])})
    except StoreCorrupt as error:  # some damage is refused: numbers of messages have no checksum
        return [str(error).replace(str(root), "")]
    report = store.recovery
    warnings = [warning.replace(str(root), "") for warning in report.warnings]
    seen = [
        (report.start_offset, report.end_offset, report.records, report.replayed, report.cut_bytes),
        (report.rebuilt_queues, warnings),
        (store.commit_log.last_store_timestamp, store._dispatcher.last_store_timestamp),
        _states(store),
    ]
    store.close()
    return seen


def _states(store: MessageStore) -> list[Any]:
    """The numbers of every queue but its place in memory, and how far the index is."""
    found = sorted(store.queues.states.items())
    numbers = [
        (key, state.next_offset, state.queue.min_offset, state.queue.max_offset, state.queue.max_physical_offset)
        for key, state in found
    ]
    return [numbers, None if store.index is None else repr(store.index).split(" ", 2)[2], store.queues.take_counts()]


def _told(told: list[NewMessages]) -> Any:
    """Queue, place, store time and properties of each message, however many came in one batch."""
    return [
        (state.topic, state.queue_id, place, one.timestamp(number), one.properties(number))
        for one in told
        for number, (state, place) in enumerate(zip(one.states, one.places, strict=True))
    ]
