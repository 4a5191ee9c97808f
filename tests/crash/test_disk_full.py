"""A full disk refuses messages with a reason; reading goes on, and with room again so does writing."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from downrange.store.errors import DiskFull
from downrange.store.new_message import PutMessageStatus
from tests.support.checked_store import REPOSITORY, assert_clean
from tests.support.stores import append
from tests.unit.store.small_store import FailingFiles, bodies, new_message, open_store, put


def test_a_disk_that_fills_up_twice_kills_nobody(small_disk: Path) -> None:
    command = [sys.executable, "-m", "tests.support.disk_filler", str(small_disk)]
    filler = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert filler.returncode == 0, f"ended with {filler.returncode}: {filler.stderr[-2000:]}"
    rounds = json.loads(filler.stdout)
    for one in rounds[:2]:
        assert "No space left on device" in one["reason"]
        assert one["readable"] == one["count"]
    assert rounds[0]["count"] < rounds[1]["count"] < rounds[2]["count"] == rounds[2]["readable"]
    report = assert_clean(small_disk / "store")
    assert report.records == rounds[2]["count"]


@pytest.mark.parametrize("what", ["create", "reserve"])
def test_no_room_for_the_log_is_a_refusal(what: str, tmp_path: Path) -> None:
    files = FailingFiles()
    with open_store(tmp_path, files=files) as store:
        expected = []
        for number in range(5):
            body = b"%d" % number + bytes(600)
            expected.append(body)
            put(store, body)
        files.fail[what] = errno.ENOSPC
        # What was reserved before may still be used; then it is over.
        results = [append(store, new_message(b"x" * 700)) for _ in range(10)]
        expected += [b"x" * 700 for result in results if result.status is PutMessageStatus.PUT_OK]
        assert results[-1].status is PutMessageStatus.SERVICE_NOT_AVAILABLE
        assert "No space left on device" in results[-1].reason
        assert bodies(store) == expected
        files.fail.clear()
        put(store, b"again")
        assert bodies(store) == [*expected, b"again"]
    assert_clean(tmp_path)


def test_no_room_for_queue_entries_loses_none_of_them(tmp_path: Path) -> None:
    files = FailingFiles()
    with open_store(tmp_path, files=files) as store:
        put(store, b"first")
        files.fail["write_at"] = errno.ENOSPC
        put(store, b"second")
        with pytest.raises(DiskFull, match="consume queues"):
            store.write_pending()
        refused = append(store, new_message(b"third"))
        assert refused.status is PutMessageStatus.SERVICE_NOT_AVAILABLE
        assert "No space left on device" in refused.reason
        assert bodies(store) == [b"first", b"second"]
        files.fail.clear()
        store.write_pending()
        put(store, b"fourth")
        assert bodies(store) == [b"first", b"second", b"fourth"]
    assert_clean(tmp_path)


def test_no_room_for_the_checkpoint_is_an_error_with_a_name(tmp_path: Path) -> None:
    files = FailingFiles()
    with open_store(tmp_path, files=files) as store:
        put(store)
        store.write_pending()
        files.fail["write_at"] = errno.ENOSPC
        with pytest.raises(DiskFull, match="checkpoint"):
            store.flush_queues(thorough=True)
        files.fail.clear()
        assert store.is_writable
    assert_clean(tmp_path)
