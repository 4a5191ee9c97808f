"""The last step of docs/tutorial.md: the archive of the page, in the session of these tests, and its questions."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from downrange import Message
from downrange.cli import pipeline
from downrange.cli.main import main
from downrange.testing import broker
from tests.support.tutorial import steps


def test_the_lake_answers(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = next(step for step in steps() if step.title == "6. Query the lake")
    archive, asking = step.commands
    assert asking == "python ask.py"

    @contextmanager
    def shared_session(_: str | None) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr(pipeline, "spark_session", shared_session)
    monkeypatch.chdir(tmp_path)
    with broker() as mq:
        producer = mq.producer()
        for number in range(30):
            producer.send(Message("orders", b"%d" % number, tags="paid" if number % 3 else "open"))
        monkeypatch.setattr(sys, "argv", [*shlex.split(archive), "-n", mq.namesrv])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 0
    (tmp_path / "ask.py").write_text(step.files["ask.py"])
    asked = subprocess.run([sys.executable, "ask.py"], capture_output=True, text=True, timeout=60, check=True)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in asked.stdout.splitlines() if "|" in line]
    assert [row[::2] for row in cells if row[0] in ("open", "paid")] == [["open", "10"], ["paid", "20"]]
    assert cells[-1] == ["30", "30"]
