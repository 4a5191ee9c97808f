"""What each level promises, with a driver that dies at every point a driver can die at."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from downrange.client.producer.transaction_producer import LocalTransactionState
from downrange.spark.delivery import (
    HANDOVER_MILLIS,
    Level,
    Marker,
    Step,
    commit_steps,
    is_delivered,
    may_roll_back,
    valid_marker,
    verdict,
)

QUERY = "query"
ROWS = ("a", "b", "c")


class Died(Exception):
    """The driver was killed."""


@dataclass
class Cluster:
    """What survives a driver: messages consumers can see, half messages, markers. As strict as RocketMQ is not: a
    transaction that is ended twice is delivered twice."""

    visible: Counter[str] = field(default_factory=Counter)
    ended: set[tuple[str, str]] = field(default_factory=set)
    halves: dict[tuple[str, str], int] = field(default_factory=dict)
    """(token, row) -> batch"""
    markers: list[Marker] = field(default_factory=list)
    now: int = 0

    def newest(self) -> Marker | None:
        return valid_marker(self.markers)

    def of_batch(self, batch: int) -> Marker | None:
        return valid_marker(marker for marker in self.markers if marker.batch == batch)

    def write(self, marker: Marker) -> None:
        self.now += 1
        self.markers.append(replace(marker, written=self.now))

    def end(self, half: tuple[str, str]) -> None:
        self.visible[half[1]] += 1
        self.ended.add(half)

    def check_back(self) -> None:
        """The broker asks about every half message it has heard nothing of."""
        for half, batch in self.halves.items():
            if half in self.ended:
                continue
            match verdict(self.of_batch(batch), self.newest(), batch, half[0], self.now):
                case LocalTransactionState.COMMIT:
                    self.end(half)
                case LocalTransactionState.ROLLBACK:
                    self.ended.add(half)
                case LocalTransactionState.UNKNOWN:
                    pass


@dataclass
class Fuse:
    """Lets so many actions happen and then kills the driver; None never does."""

    left: int | None = None

    def burn(self) -> None:
        if self.left is not None:
            if self.left == 0:
                raise Died
            self.left -= 1


_tokens = (f"token{number}" for number in itertools.count())


def run_batch(cluster: Cluster, level: Level, batch: int, fuse: Fuse) -> None:
    """One try of a batch: a task that sends the rows, then the commit, each action one chance to die."""
    token = next(_tokens)
    sent = 0
    if level is Level.AT_LEAST_ONCE or not is_delivered(cluster.newest(), batch):
        for row in ROWS:
            fuse.burn()
            sent += 1
            if level is Level.TRANSACTIONAL:
                cluster.halves[token, row] = batch
            else:
                cluster.visible[row] += 1
    fuse.burn()
    own = [(token, row) for row in ROWS[:sent]]
    marker = cluster.newest()
    for step in commit_steps(level, marker, batch, rows=sent):
        fuse.burn()
        match step:
            case Step.DECIDE:
                marker = Marker(QUERY, batch, is_closed=False, tokens=(token,))
                cluster.write(marker)
            case Step.END:
                for half in own:
                    fuse.burn()
                    cluster.end(half)
            case Step.SETTLE:
                assert marker is not None
                for half in [half for half in cluster.halves if half[0] in marker.tokens]:
                    fuse.burn()
                    if half not in cluster.ended:
                        cluster.end(half)
            case Step.CLOSE:
                if marker is None or marker.batch < batch:
                    marker = Marker(QUERY, batch, is_closed=True)
                cluster.write(replace(marker, is_closed=True))
            case Step.ROLL_BACK:
                cluster.ended.update(own)
    fuse.burn()  # Spark writes its own checkpoint


def deaths() -> list[tuple[int | None, int | None]]:
    """Every action of a try is a point to die at, twice in a row; None: this try goes through."""
    points: list[int | None] = [*range(13), None]
    return list(itertools.product(points, points))


@pytest.mark.parametrize("check_between", [False, True])
@pytest.mark.parametrize("points", deaths())
def test_a_transactional_batch_is_delivered_once_whenever_its_driver_dies(
    points: tuple[int | None, int | None], check_between: bool
) -> None:
    cluster = Cluster()
    for point in (*points, None):
        try:
            run_batch(cluster, Level.TRANSACTIONAL, 7, Fuse(point))
        except Died:
            assert all(count == 1 for count in cluster.visible.values())
            if check_between:
                cluster.check_back()
    assert cluster.visible == Counter(ROWS)
    cluster.check_back()
    assert cluster.visible == Counter(ROWS)
    assert cluster.ended == set(cluster.halves), "every half message of every try is ended"


@pytest.mark.parametrize("points", deaths())
def test_a_batch_that_is_never_run_again_is_delivered_whole_or_not_at_all(
    points: tuple[int | None, int | None],
) -> None:
    cluster = Cluster()
    for point in points:
        try:
            run_batch(cluster, Level.TRANSACTIONAL, 7, Fuse(point))
        except Died:
            continue
    cluster.now += HANDOVER_MILLIS + 1
    cluster.check_back()
    assert cluster.visible in (Counter(), Counter(ROWS))


@pytest.mark.parametrize("point", [*range(8), None])
def test_an_idempotent_batch_is_sent_again_only_until_its_marker_is_written(point: int | None) -> None:
    cluster = Cluster()
    with contextlib.suppress(Died):
        run_batch(cluster, Level.IDEMPOTENT, 7, Fuse(point))
    was_marked = bool(cluster.markers)
    before = cluster.visible.copy()
    run_batch(cluster, Level.IDEMPOTENT, 7, Fuse())
    assert cluster.visible == (before if was_marked else before + Counter(ROWS))
    assert cluster.visible >= Counter(ROWS), "nothing is lost"
    after = cluster.visible.copy()
    run_batch(cluster, Level.IDEMPOTENT, 7, Fuse())
    assert cluster.visible == after


@pytest.mark.parametrize("point", [*range(5), None])
def test_at_least_once_loses_nothing_and_repeats_whole_tries(point: int | None) -> None:
    cluster = Cluster()
    with contextlib.suppress(Died):
        run_batch(cluster, Level.AT_LEAST_ONCE, 7, Fuse(point))
    run_batch(cluster, Level.AT_LEAST_ONCE, 7, Fuse())
    assert cluster.visible >= Counter(ROWS)
    assert cluster.markers == []


@pytest.mark.parametrize("level", list(Level))
def test_batches_follow_one_another(level: Level) -> None:
    cluster = Cluster()
    for batch in range(3):
        run_batch(cluster, level, batch, Fuse())
    assert cluster.visible == Counter(ROWS * 3)


def test_without_rows_nothing_is_written() -> None:
    for level in Level:
        assert commit_steps(level, None, 3, rows=0) == ()


def test_a_marker_of_an_earlier_batch_says_nothing_about_this_one() -> None:
    before = Marker(QUERY, 2, is_closed=True, tokens=("t",))
    assert not is_delivered(before, 3)
    assert commit_steps(Level.TRANSACTIONAL, before, 3, rows=1) == (Step.DECIDE, Step.END, Step.CLOSE)
    assert commit_steps(Level.IDEMPOTENT, before, 3, rows=1) == (Step.CLOSE,)


def test_tasks_that_sent_after_another_driver_decided_are_undone() -> None:
    decided = Marker(QUERY, 3, is_closed=False, tokens=("theirs",))
    assert commit_steps(Level.TRANSACTIONAL, decided, 3, rows=1) == (Step.ROLL_BACK, Step.SETTLE, Step.CLOSE)
    closed = replace(decided, is_closed=True)
    assert commit_steps(Level.TRANSACTIONAL, closed, 3, rows=1) == (Step.ROLL_BACK,)
    assert commit_steps(Level.TRANSACTIONAL, closed, 3, rows=0) == ()


def test_of_two_drivers_the_first_to_decide_counts() -> None:
    first = Marker(QUERY, 3, is_closed=False, tokens=("one",), written=10)
    second = Marker(QUERY, 3, is_closed=False, tokens=("two",), written=11)
    closed = replace(first, is_closed=True, written=12)
    later = replace(second, is_closed=True, written=13)
    for order in itertools.permutations([first, second, closed, later]):
        assert valid_marker(order) == closed
    assert valid_marker([second, first]) == first
    assert valid_marker([]) is None


def test_a_failed_commit_leaves_halves_alone_and_a_failed_task_does_not() -> None:
    assert not may_roll_back(all_tasks_ended=True)
    assert may_roll_back(all_tasks_ended=False)


OPEN = Marker(QUERY, 5, is_closed=False, tokens=("winner",), written=1000)
CLOSED = replace(OPEN, is_closed=True, written=2000)
NEXT = Marker(QUERY, 6, is_closed=True, tokens=("other",), written=3000)


@pytest.mark.parametrize(
    ("of_batch", "newest", "token", "now", "expected"),
    [
        (None, None, "winner", 0, LocalTransactionState.UNKNOWN),  # undecided: the tasks may still be running
        (None, replace(NEXT, batch=4), "winner", 0, LocalTransactionState.UNKNOWN),
        (None, NEXT, "winner", 0, LocalTransactionState.ROLLBACK),  # the query has gone on without it
        (OPEN, OPEN, "loser", 1001, LocalTransactionState.ROLLBACK),  # an attempt that was replaced
        (OPEN, OPEN, "winner", 1001, LocalTransactionState.UNKNOWN),  # the driver is at it
        (OPEN, OPEN, "winner", 1001 + HANDOVER_MILLIS, LocalTransactionState.COMMIT),  # the driver is gone
        (CLOSED, CLOSED, "winner", 2001, LocalTransactionState.COMMIT),
        (CLOSED, NEXT, "winner", 3001, LocalTransactionState.COMMIT),
        (CLOSED, NEXT, "loser", 3001, LocalTransactionState.ROLLBACK),
    ],
)
def test_the_answer_to_a_broker_that_asks(
    of_batch: Marker | None, newest: Marker | None, token: str, now: int, expected: LocalTransactionState
) -> None:
    assert verdict(of_batch, newest, 5, token, now) is expected
