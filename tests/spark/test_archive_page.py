"""The examples of docs/how-to/archive-to-parquet.md run as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from downrange import Message
from downrange.testing import broker
from tests.docs.test_docs import ROOT, example

PAGE = ROOT / "docs" / "how-to" / "archive-to-parquet.md"


def test_the_examples_of_the_page(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with broker() as mq:
        producer = mq.producer()
        for number in range(20):
            producer.send(Message("orders", b"%d" % number, tags="paid" if number % 4 else "new", keys=f"key-{number}"))
        for name in ("functions", "dataset", "pandas"):
            exec(example(PAGE, name).replace("127.0.0.1:9876", mq.namesrv), {})  # noqa: S102  our own page
        shown = capsys.readouterr().out
        outside = subprocess.run(  # DuckDB does not like the threads that Spark leaves behind
            [sys.executable, "-c", example(PAGE, "duckdb")], capture_output=True, text=True, timeout=60, check=True
        )
        assert len(mq.messages("orders-again")) == 15
    assert shown.startswith("20 archived\n")
    assert "15 sent again\n20\n" in shown
    assert "key-" in shown
    assert re.search(r"orders\W+\d{4}-\d\d-\d\d\W+20\b", outside.stdout)
