"""A forked process is a process like others: output, exit code, and an end by a signal."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from downrange import __version__
from tests.support.processes import Running, namesrv


@pytest.fixture(autouse=True)
def _forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Running, "forks", True)


def test_output_and_exit_code() -> None:
    process = Running("--version")
    assert process.wait_for(r"downrange (\S+)")[1] == __version__
    assert process.wait() == 0
    process.close()


def test_a_wrong_command_is_told_on_standard_error() -> None:
    process = Running("brocker")
    assert process.wait() == 2
    assert "brocker" in process.errors
    process.close()


def test_it_ends_in_order_or_is_killed(tmp_path: Path) -> None:
    with namesrv(tmp_path / "one") as (one, _), namesrv(tmp_path / "other") as (other, _):
        assert one.pid != other.pid
        assert one.stop() == 0
        other.kill()
        assert other.wait() == -signal.SIGKILL
