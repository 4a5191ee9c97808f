"""Timer messages when the process dies at any step, and when the power fails: none is lost, none early, none twice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from downrange.broker.services import timer
from downrange.clock import ManualClock
from downrange.store.files import OsFiles
from tests.crash.test_power_cut import UncertainDisk
from tests.support.timed_broker import NOW, Killed, Steps, TimedBroker, check_times

# Seconds after the beginning at which a message is sent, seconds until it is due, and whether it is deleted at once.
MESSAGES = {
    b"a": (0.0, 2.3, False),
    b"b": (0.1, 2.6, False),
    b"c": (0.2, 4.0, True),
    b"d": (0.3, 20.0, False),  # is rolled
    b"e": (0.4, 3.9, False),
    b"f": (1.2, 3.0, False),
    b"g": (2.5, 0.2, False),
    b"h": (3.5, 18.0, True),
}
END = 30.0
WINDOW = 12


class NoSync(OsFiles):
    """Files that are not synced: a process that dies leaves them as they are, and a test of many deaths is quick."""

    def sync(self, descriptor: int) -> None: ...

    def sync_directory(self, path: Path) -> None: ...


def due_of(body: bytes) -> int:
    sent, delay, _ = MESSAGES[body]
    return NOW + int(sent * 1000) + int(delay * 1000)


def script() -> Iterator[tuple[float, str, bytes]]:
    """What happens when: sends and deletions, and a look at the clock twenty-five times in ten seconds."""
    actions = [(sent, "send", body) for body, (sent, _, _) in MESSAGES.items()]
    actions += [(sent + 0.05, "delete", body) for body, (sent, _, is_deleted) in MESSAGES.items() if is_deleted]
    actions += [(number * 0.4, "work", b"") for number in range(int(END / 0.4))]
    actions += [(number * 1.7 + 0.9, "save", b"") for number in range(int(END / 1.7))]
    yield from sorted(actions)


def run(root: Path, die_at: int) -> tuple[int, set[bytes]]:
    """Play the script; die once at a step and start again. How many steps it takes, and whose sends got no answer."""
    clock = ManualClock(NOW)
    steps = Steps(die_at)
    broker = TimedBroker(root, clock, steps, NoSync(), timer_roll_window_slot=WINDOW)
    unanswered: set[bytes] = set()
    for at, action, body in script():
        clock.set(max(clock.now(), NOW + int(at * 1000)))
        try:
            act(broker, action, body)
        except Killed:
            if action in ("send", "delete"):
                unanswered.add(body)
            broker.kill()
            broker = TimedBroker(root, clock, None, NoSync(), timer_roll_window_slot=WINDOW)
    taken, steps.die_at = steps.taken, -1
    clock.set(NOW + int((END + 5) * 1000))
    broker.work()
    clock.set(clock.now() + 20_000)  # what was rolled late
    broker.work()
    wanted = {body for body, (_, _, is_deleted) in MESSAGES.items() if not is_deleted} - unanswered
    messages = broker.delivered()
    counts = Counter(message.body for message in messages)
    assert counts.keys() - unanswered == wanted, steps.names[-1]
    assert max(counts.values()) == 1, (steps.names[-1], counts)
    check_times(messages, {body: due_of(body) for body in MESSAGES})
    assert broker.service.index.check() == []
    broker.close()
    return taken, unanswered


def act(broker: TimedBroker, action: str, body: bytes) -> None:
    match action:
        case "send":
            broker.send(body, due_of(body))
        case "delete":
            broker.delete(body, due_of(body))
        case "work":
            broker.work()
        case _:
            broker.save()


@pytest.mark.parametrize("is_one_by_one", [True, False])
async def test_a_process_that_dies_at_any_step_loses_nothing_and_delivers_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_one_by_one: bool
) -> None:
    if is_one_by_one:  # there is a step between the unit of a message and its slot, as there is inside `put_units`
        monkeypatch.setattr(timer, "timed_records", lambda backlog: [])
    taken, unanswered = run(tmp_path / "whole", -1)
    assert not unanswered
    assert taken > (100 if is_one_by_one else 80)
    for die_at in range(taken):
        run(tmp_path / str(die_at), die_at)


async def test_a_process_that_is_away_for_a_while_delivers_late_what_was_due(tmp_path: Path) -> None:
    clock = ManualClock(NOW)
    broker = TimedBroker(tmp_path, clock, timer_roll_window_slot=WINDOW)
    due = {b"%d" % number: NOW + 700 * (number + 1) for number in range(40)}
    for body, time in due.items():
        broker.send(body, time)
    clock.set(NOW + 3500)
    broker.work()
    first = len(broker.delivered())
    assert 0 < first < len(due)
    broker.kill()
    clock.set(NOW + 20 * 86_400_000)  # longer than the wheel has slots
    broker = TimedBroker(tmp_path, clock, timer_roll_window_slot=WINDOW)
    broker.send(b"new", clock.now() + 2000)
    broker.work()
    clock.set(clock.now() + 1000)  # those that were to be rolled come a tick later
    broker.work()
    assert sorted(message.body for message in broker.delivered()) == sorted(due)
    clock.set(clock.now() + 3000)
    broker.work()
    assert broker.delivered()[-1].body == b"new"
    broker.close()


def survive_power_cuts(directory: Path, seed: int) -> None:
    """Cut the power again and again. What was flushed before a cut is delivered, and once."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    clock = ManualClock(NOW)
    root = directory / "0"
    root.mkdir(parents=True)
    due: dict[bytes, int] = {}
    promised: set[bytes] = set()
    deleted: set[bytes] = set()
    number = 0
    for cut in range(6):
        disk = UncertainDisk(root)
        broker = TimedBroker(root, clock, files=disk, timer_roll_window_slot=WINDOW)
        sent: set[bytes] = set()
        for _ in range(chance.randint(5, 40)):
            clock.set(clock.now() + chance.randint(10, 700))
            match chance.randrange(6):
                case 0 | 1 | 2:
                    number += 1
                    body = b"m%d" % number
                    due[body] = clock.now() + chance.randint(1, 25_000)
                    broker.send(body, due[body])
                    sent.add(body)
                case 3:
                    broker.work()
                case 4:
                    broker.save()  # flushes the log, too: what was sent is safe
                    promised |= sent
                    sent.clear()
                case _ if sent and cut:
                    body = sorted(sent)[0]
                    if due[body] - clock.now() > 3000:
                        broker.delete(body, due[body])
                        deleted.add(body)
        broker.kill()
        (root / "abort").write_bytes(b"")
        after = directory / str(cut + 1)
        disk.leave_after_power_cut(root, after, chance)
        root = after
        clock.set(clock.now() + chance.randint(0, 5000))
    broker = TimedBroker(root, clock, timer_roll_window_slot=WINDOW)
    for _ in range(6):
        clock.set(clock.now() + 13_000)
        broker.work()
    messages = broker.delivered()
    counts = Counter(message.body for message in messages)
    assert promised - deleted <= counts.keys(), sorted(promised - deleted - counts.keys())
    assert max(counts.values(), default=1) == 1, counts
    check_times(messages, due)
    assert broker.service.index.check() == []
    broker.close()


@pytest.mark.parametrize("seed", range(12))
async def test_a_power_cut_loses_nothing_that_was_flushed_and_delivers_nothing_twice(tmp_path: Path, seed: int) -> None:
    survive_power_cuts(tmp_path, seed)
