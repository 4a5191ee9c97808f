"""Drivers of their own that are killed in the middle of a batch, and tasks that are tried twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from downrange.testing import EmbeddedBroker
from tests.support.dying_sink import (
    AFTER_CLOSE,
    AFTER_DECIDE,
    AFTER_END,
    AMID_END,
    BEFORE_COMMIT,
    TASK,
)

ROOT = Path(__file__).parents[2]
ROWS = 300


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Three hundred rows in two files, every second with a sharding key."""
    directory = tmp_path / "source"
    directory.mkdir()
    for number in range(2):
        rows = [str(row) for row in range(ROWS) if row % 2 == number]
        keys = [f"key{int(row) % 5}" if int(row) % 3 else None for row in rows]
        table = pa.table({"body": rows, "sharding_key": pa.array(keys, pa.string())})
        pq.write_table(table, directory / f"{number}.parquet")
    return directory


def run_driver(mq: EmbeddedBroker, source: Path, checkpoint: Path, level: str, **more: str) -> int:
    given = {
        "namesrv": mq.namesrv,
        "topic": "orders",
        "source": str(source),
        "checkpoint": str(checkpoint),
        "level": level,
        **more,
    }
    command = [sys.executable, "-m", "tests.support.dying_sink", json.dumps(given)]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    # Into a file: workers of a killed driver may hold a pipe open for a while.
    output = checkpoint.with_suffix(".output")
    with output.open("wb") as file:
        ended = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=file, timeout=240, check=False)
    if ended.returncode and "point" not in more:
        pytest.fail(output.read_text("utf-8", "replace")[-3000:])
    return ended.returncode


def bodies(mq: EmbeddedBroker) -> Counter[str]:
    return Counter(message.body.decode() for message in mq.messages("orders"))


ONCE = Counter(str(row) for row in range(ROWS))


def kill_and_run_again(mq: EmbeddedBroker, source: Path, checkpoint: Path, level: str, point: str) -> Counter[str]:
    assert run_driver(mq, source, checkpoint, level, point=point) != 0
    at_death = bodies(mq)
    run_driver(mq, source, checkpoint, level)
    return at_death


pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # each starts one or two Spark drivers


@pytest.mark.parametrize(
    ("point", "visible_at_death"),
    [(BEFORE_COMMIT, 0), (AFTER_DECIDE, 0), (AMID_END, ROWS // 2), (AFTER_END, ROWS), (AFTER_CLOSE, ROWS)],
)
def test_a_killed_driver_leaves_a_transactional_batch_that_arrives_once(
    rocketmq: EmbeddedBroker, source: Path, tmp_path: Path, point: str, visible_at_death: int
) -> None:
    at_death = kill_and_run_again(rocketmq, source, tmp_path / "checkpoint", "transactional", point)
    assert at_death.total() == visible_at_death
    assert bodies(rocketmq) == ONCE


@pytest.mark.parametrize(("point", "times"), [(BEFORE_COMMIT, 2), (AFTER_CLOSE, 1)])
def test_a_killed_driver_repeats_an_idempotent_batch_only_before_its_marker(
    rocketmq: EmbeddedBroker, source: Path, tmp_path: Path, point: str, times: int
) -> None:
    kill_and_run_again(rocketmq, source, tmp_path / "checkpoint", "idempotent", point)
    assert bodies(rocketmq) == Counter(dict.fromkeys(ONCE, times))


@pytest.mark.parametrize("level", ["at-least-once", "idempotent", "transactional"])
def test_a_task_that_is_tried_twice(rocketmq: EmbeddedBroker, source: Path, tmp_path: Path, level: str) -> None:
    """The first attempt has sent half of its rows. Only halves can be taken back."""
    assert run_driver(rocketmq, source, tmp_path / "checkpoint", level, point=TASK, master="local[2,2]") == 0
    found = bodies(rocketmq)
    assert set(found) == set(ONCE)
    if level == "transactional":
        assert found == ONCE
        return
    assert found.total() > ROWS
    rows: dict[str, set[bytes]] = {}
    for message in rocketmq.messages("orders"):
        rows.setdefault(message.properties["SPARK_ROW"], set()).add(message.body)
    assert len(rows) == ROWS, "who drops what has a known row key gets every row once"
    assert all(len(same) == 1 for same in rows.values())
