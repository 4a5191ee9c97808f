"""`downrange pipeline run`: the project of docs/how-to/declarative-pipelines.md runs as it stands there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from downrange import Message
from downrange.client.pipeline_status import PipelineStatus
from downrange.testing import EmbeddedBroker, broker
from tests.docs.test_docs import ROOT, example
from tests.support.processes import DOWNRANGE

PAGE = ROOT / "docs" / "how-to" / "declarative-pipelines.md"


def project(directory: Path) -> Path:
    spec = re.search(r"<!-- example: spec -->\n```yaml\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert spec is not None
    (directory / "transformations").mkdir()
    (directory / "spark-pipeline.yml").write_text(spec[1])
    (directory / "transformations" / "orders.py").write_text(example(PAGE, "definitions"))
    return directory


def run(mq: EmbeddedBroker, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*DOWNRANGE, "pipeline", "run", str(directory), "-n", mq.namesrv, "--master", "local[1]", "--json"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=directory)


def send(mq: EmbeddedBroker, first: int, count: int) -> None:
    for number in range(first, first + count):
        mq.producer().send(Message("orders", b"%d" % number, "paid" if number % 2 else "new", f"k{number}"))


@pytest.mark.slow
@pytest.mark.timeout(900)  # it starts Spark four times
def test_a_project_runs_goes_on_and_fails_with_an_exit_code(tmp_path: Path) -> None:
    directory = project(tmp_path)
    with broker() as mq:
        mq.create_topic("paid", 1)
        send(mq, 0, 10)
        checked = run(mq, directory, "--dry-run")
        assert checked.returncode == 0, checked.stderr
        assert mq.messages("paid") == []
        first = run(mq, directory)
        assert first.returncode == 0, first.stderr
        assert "Run is COMPLETED." in json.loads(first.stdout)["events"]
        assert sorted(message.body for message in mq.messages("paid")) == [b"1", b"3", b"5", b"7", b"9"]
        told = [PipelineStatus.decode(message.body) for message in mq.messages("DOWNRANGE_PIPELINES")]
        assert {(status.name, status.kind) for status in told if status is not None} == {("orders", "declarative")}
        last = max((status for status in told if status is not None), key=lambda status: status.timestamp)
        assert last.lag == {"orders": 0}
        assert last.batch_seconds is not None
        send(mq, 10, 4)
        second = run(mq, directory)
        assert second.returncode == 0, second.stderr
        assert sorted(int(message.body) for message in mq.messages("paid")) == [1, 3, 5, 7, 9, 11, 13]
        tables = directory / "storage" / "tables"
        assert pq.read_table(tables / "orders").num_rows == 14
        counts = pq.read_table(tables / "by_tag").to_pylist()
        assert {row["tags"]: row["count"] for row in counts} == {"paid": 7, "new": 7}
        definitions = directory / "transformations" / "orders.py"
        definitions.write_text(definitions.read_text().replace('groupBy("tags")', 'groupBy("colour")'))
        failed = run(mq, directory)
        assert failed.returncode in (1, 2)
        assert "colour" in failed.stderr.splitlines()[-1]


READ = """
import sys
from pathlib import Path
from downrange.spark.pipelines.declarative import Refresh, read_project
from downrange.spark.pipelines.errors import PipelineError

for text in sys.argv[2:]:
    Path(sys.argv[1], "spark-pipeline.yml").write_text(text) if text else None
    try:
        print(read_project(Path(sys.argv[1])).storage)
    except PipelineError as error:
        print(error)
try:
    Refresh(only=["a"], full_all=True)
except PipelineError as error:
    print(error)
"""


def test_specifications_that_are_none(tmp_path: Path) -> None:
    wrong = {
        "": "does not exist",
        "name: x": "storage",
        "name: x\nstorage: y\ncolour: red": "colour",
        "name: [": "expected",
        "name: x\nstorage: y\nlibraries: [a]": "spark-pipeline.yml",
    }
    # In a process of its own: Spark's part for projects cannot be imported beside a session of another kind.
    command = [sys.executable, "-c", READ, str(tmp_path), *wrong, "name: x\nstorage: there"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *told, storage, refused = done.stdout.splitlines()
    for reason, line in zip(wrong.values(), told, strict=True):
        assert reason in line
    assert storage == f"file://{tmp_path}/there"
    assert "excludes single tables" in refused
