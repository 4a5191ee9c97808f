"""Epochs of a log: the list, the common point of two logs, and the files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from downrange.store.epoch_file import EPOCH_FILE, EpochFile, decode_epochs, encode_epochs
from downrange.store.epochs import Epoch, EpochList, StaleEpoch, common_point
from downrange.store.errors import StoreCorrupt, StoreError
from tests.support.dying_files import Died, DyingFiles
from tests.support.golden import captured_file

CAPTURED = b"3\n1896215331\n1-0\n2-1638\n3-3276\n"


def epochs(*pairs: tuple[int, int]) -> EpochList:
    return EpochList(Epoch(*pair) for pair in pairs)


def test_a_captured_file_is_read_and_written_byte_for_byte() -> None:
    assert decode_epochs(CAPTURED) == epochs((1, 0), (2, 1638), (3, 3276))
    assert encode_epochs(decode_epochs(CAPTURED)) == CAPTURED
    assert encode_epochs(epochs((1, 0))) == b"1\n1725254278\n1-0\n"


def test_line_ends_of_windows_and_an_unchecked_file_are_read() -> None:
    assert decode_epochs(b"1\r\n0\r\n1-0\r\n") == epochs((1, 0))


@pytest.mark.parametrize(
    "data",
    [b"", b"1\n", b"1\n0\n", b"2\n0\n1-0\n", b"1\n7\n1-0\n", b"1\n0\n1\n", b"2\n0\n2-5\n1-9\n",
     b"2\n0\n1-5\n2-5\n", b"\xff"],
)  # fmt: skip
def test_a_damaged_file_is_refused(data: bytes) -> None:
    with pytest.raises(StoreError):
        decode_epochs(data)


def test_an_epoch_that_begins_where_the_last_one_began_replaces_it() -> None:
    assert epochs((1, 0), (2, 100)).appended(3, 100) == epochs((1, 0), (3, 100))
    assert epochs((1, 0), (5, 100), (6, 200)).appended(3, 100) == epochs((1, 0), (3, 100))
    with pytest.raises(StaleEpoch):
        epochs((1, 0), (2, 100)).appended(2, 150)


def test_cuts() -> None:
    whole = epochs((1, 0), (2, 100), (3, 200))
    assert whole.before(100) == epochs((1, 0))
    assert whole.within(100) == epochs((1, 0), (2, 100))
    assert whole.without_prefix(100) == whole
    assert whole.without_prefix(101) == epochs((2, 100), (3, 200))
    assert whole.without_prefix(5000) == epochs((3, 200))
    assert whole.at(99) == (1, 0)
    assert whole.at(100) == (2, 100)
    assert epochs((2, 100)).at(5) is None


def test_common_points() -> None:
    assert common_point(epochs((1, 0)), 50, epochs((1, 0)), 70) == 50
    assert common_point(epochs((1, 0), (2, 60)), 90, epochs((1, 0), (3, 40)), 70) == 40
    assert common_point(epochs((1, 0), (2, 60)), 90, epochs((1, 0), (2, 60), (4, 80)), 120) == 80
    assert common_point(epochs((2, 0)), 10, epochs((3, 0), (4, 1)), 10) == 0
    assert common_point(epochs((5, 1000)), 1200, epochs((7, 3000)), 4000) is None


@st.composite
def histories(draw: st.DrawFn) -> tuple[tuple[list[int], EpochList], tuple[list[int], EpochList]]:
    """Two logs of one broker set: each record is unique, each master keeps its log, each follower cuts to the common
    point before it copies. A record has length 1."""
    logs: list[list[int]] = [[], [], []]
    lists = [EpochList() for _ in logs]
    message = 0
    for epoch in range(1, draw(st.integers(1, 8)) + 1):
        master = draw(st.integers(0, 2))
        lists[master] = lists[master].appended(epoch, len(logs[master]))
        for _ in range(draw(st.integers(0, 3))):
            logs[master].append(message := message + 1)
        for slave in set(range(3)) - {master}:
            if draw(st.booleans()):
                continue
            point = common_point(lists[slave], len(logs[slave]), lists[master], len(logs[master])) if logs[slave] else 0
            assert point is not None
            copied = draw(st.integers(point, len(logs[master])))
            logs[slave] = logs[slave][:point] + logs[master][point:copied]
            lists[slave] = EpochList(entry for entry in lists[master].entries if entry.start < copied)
    first, second = draw(st.permutations(range(3)))[:2]
    return (logs[first], lists[first]), (logs[second], lists[second])


@given(histories())
def test_the_common_point_is_where_the_bytes_begin_to_differ(
    history: tuple[tuple[list[int], EpochList], tuple[list[int], EpochList]],
) -> None:
    (own, own_epochs), (theirs, their_epochs) = history
    point = common_point(own_epochs, len(own), their_epochs, len(theirs))
    equal = next((at for at, (a, b) in enumerate(zip(own, theirs, strict=False)) if a != b), min(len(own), len(theirs)))
    if own and theirs:
        assert point is not None
        assert own[:point] == theirs[:point], "never more than what is equal"
        assert point == equal, "and all of it"


def test_the_files_survive_a_start(tmp_path: Path) -> None:
    file = EpochFile(tmp_path)
    file.load(0)
    assert file.epochs == EpochList()
    assert file.seen == -1
    file.see(4)
    file.change(file.epochs.appended(1, 0))
    file.change(file.epochs.appended(3, 700))
    again = EpochFile(tmp_path)
    again.load(700)
    assert again.epochs == epochs((1, 0), (3, 700))
    assert again.seen == 4
    again.load(699)
    assert again.epochs == epochs((1, 0)), "the log does not reach the start of the last epoch"
    (tmp_path / EPOCH_FILE).write_bytes(b"3\n17\n")
    again.load(700)
    assert again.epochs == epochs((1, 0))
    (tmp_path / f"{EPOCH_FILE}.bak").write_bytes(b"")
    with pytest.raises(StoreCorrupt, match="empty directory"):
        again.load(700)


def test_a_crash_at_any_step_leaves_the_old_or_the_new_epochs(tmp_path: Path) -> None:
    old, new = epochs((1, 0), (2, 50)), epochs((1, 0), (2, 50), (3, 90))
    for steps in range(100):
        directory = tmp_path / str(steps)
        directory.mkdir()
        file = EpochFile(directory)
        file.change(old.before(50))
        file.change(old)
        try:
            dying = EpochFile(directory, DyingFiles(steps))
            dying.load(100)
            dying.change(new)
        except Died:
            again = EpochFile(directory)
            again.load(100)
            assert again.epochs in (old, new)
        else:
            break
    assert steps > 8


def test_captured_files_of_a_real_broker_are_read() -> None:
    for name, count in (("broker1", 3), ("broker2", 2)):
        captured = captured_file("controller-533.tar.xz", f"frames/controller-533/files/{name}/{EPOCH_FILE}")
        assert len(decode_epochs(captured).entries) == count
        assert encode_epochs(decode_epochs(captured)) == captured
