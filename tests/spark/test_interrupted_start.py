"""Ctrl-C while a pipeline starts Spark."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from downrange.spark.lake.lake import Lake
from tests.support.lake_messages import commit, messages


def _jvm_of(process: subprocess.Popen[bytes]) -> Path | None:
    """The directory in /proc of the JVM that a process has started."""
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        directory = Path("/proc", child)
        command = (directory / "cmdline").read_bytes().split(b"\0")
        if command[0].endswith(b"/java") and b"pyspark-shell" in command:
            return directory
    return None


def test_ctrl_c_while_spark_starts_leaves_no_jvm(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    commit(lake, 0, messages(0, 10))
    # A shell lets what it starts in the background ignore Ctrl-C, and so would the command.
    command = [
        "env",
        "--default-signal=INT",
        sys.executable,
        "-m",
        "downrange.cli.main",
        "pipeline",
        "sql",
        "SELECT 1",
        "--lake",
        str(lake.location),
    ]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while (jvm := _jvm_of(process)) is None:  # the test's time-out ends it
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
    assert not jvm.exists()
