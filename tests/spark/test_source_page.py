"""The Python of docs/how-to/spark.md, and of the README, runs as it stands, but for the address."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from downrange.testing import broker
from tests.spark.messages import send

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "spark.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def test_the_blocks_run(spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Spark runs where its session was started, which is not here.
    blocks = [re.sub(r'"(store|orders\.\w+)"', rf'"{tmp_path}/\1"', block) for block in BLOCKS]
    from_store = [block for block in blocks if "storePath" in block]
    assert (len(BLOCKS), len(from_store)) == (4, 1)
    with broker(data=tmp_path) as mq:
        send(mq, "orders", range(30))
        for block in blocks:
            if block not in from_store:
                exec(block.replace("127.0.0.1:9876", mq.namesrv), {})  # noqa: S102  our own page
    exec(from_store[0], {})  # noqa: S102
    said = capsys.readouterr().out
    assert "|   a|   10|" in said
    assert "<Lag 0 messages in 0 queues>" in said
    assert said.endswith("30 orders\n")
    assert spark.read.parquet(str(tmp_path / "orders.parquet")).count() == 30


def test_the_example_of_the_readme_runs(spark: SparkSession, capsys: pytest.CaptureFixture[str]) -> None:
    readme = (PAGE.parents[2] / "README.md").read_text("utf-8")
    found = re.search(r"<!-- example: spark -->\n```python\n(.*?)```", readme, re.DOTALL)
    assert found is not None
    with broker() as mq:
        send(mq, "orders", range(30))
        exec(found[1].replace("127.0.0.1:9876", mq.namesrv), {})  # noqa: S102  our own page
    assert "|   a|   10|" in capsys.readouterr().out
