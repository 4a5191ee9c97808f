from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from downrange.store.checkpoint import AbortMarker, Checkpoint, DirectoryLock
from downrange.store.errors import StoreLocked
from downrange.store.files import OS_FILES

HOLD_THE_LOCK = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0, os.SEEK_SET)
print("locked", flush=True)
sys.stdin.read()
"""


def test_the_times_are_three_longs_in_4096_bytes(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    checkpoint = Checkpoint(path, OS_FILES)
    checkpoint.load()
    assert checkpoint.safe_timestamp(with_index=False) == 0
    checkpoint.physic_msg_timestamp = 10_000
    checkpoint.logics_msg_timestamp = 9_000
    checkpoint.index_msg_timestamp = 5_000
    checkpoint.write()
    data = path.read_bytes()
    assert len(data) == 4096
    assert [int.from_bytes(data[at : at + 8], "big") for at in (0, 8, 16)] == [10_000, 9_000, 5_000]
    assert not any(data[24:])
    again = Checkpoint(path, OS_FILES)
    again.load()
    assert again.safe_timestamp(with_index=False) == 6_000
    assert again.safe_timestamp(with_index=True) == 2_000


def test_what_5x_keeps_in_the_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    path.write_bytes(bytes(24) + b"\x01" * 16 + bytes(4056))
    checkpoint = Checkpoint(path, OS_FILES)
    checkpoint.load()
    checkpoint.physic_msg_timestamp = 1
    checkpoint.write()
    assert path.read_bytes()[24:40] == b"\x01" * 16


def test_the_crash_mark_knows_the_boot_it_was_made_in(tmp_path: Path) -> None:
    mark = AbortMarker(tmp_path / "abort", OS_FILES, boot_id="boot-1")
    assert (mark.is_set, mark.is_of_this_boot) == (False, False)
    mark.set()
    assert (mark.is_set, mark.is_of_this_boot) == (True, True)
    assert not AbortMarker(tmp_path / "abort", OS_FILES, boot_id="boot-2").is_of_this_boot
    assert not AbortMarker(tmp_path / "abort", OS_FILES, boot_id="").is_of_this_boot
    mark.clear()
    assert (mark.is_set, mark.is_of_this_boot) == (False, False)


def test_the_mark_of_java_is_empty_and_belongs_to_no_boot(tmp_path: Path) -> None:
    (tmp_path / "abort").touch()
    mark = AbortMarker(tmp_path / "abort", OS_FILES)
    assert mark.is_set
    assert not mark.is_of_this_boot


def test_another_process_with_the_lock_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_THE_LOCK, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(StoreLocked, match=f"{tmp_path} is in use by process {other.pid}"):
            DirectoryLock(path).take()
        other.communicate()
    lock = DirectoryLock(path)
    lock.take()
    assert path.read_bytes() == b"lock"
    lock.release()
    lock.release()
