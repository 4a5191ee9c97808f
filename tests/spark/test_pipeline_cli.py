"""`downrange pipeline …` from end to end, in this process and its Spark session."""

from __future__ import annotations

import json
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
from tests.support.object_store import LakePlace


def test_archive_sql_replay_and_stats(
    spark: SparkSession,
    place: LakePlace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @contextmanager
    def shared_session(_: str | None) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr(pipeline, "spark_session", shared_session)

    def run(*arguments: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["downrange", "pipeline", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        assert ended.value.code == code, shown.err
        return shown.out if code == 0 else shown.err

    lake = place.url
    storage = [part for name, value in place.options.items() for part in ("--storage-option", f"{name}={value}")]
    with broker() as mq:
        producer = mq.producer()
        archive = ("archive", lake, "orders", "-n", mq.namesrv, "--json", *storage)
        for numbers, options, compactions in ((range(20), (), 0), (range(20, 30), ("--compact",), 1)):
            for number in numbers:
                producer.send(Message("orders", b"%d" % number, tags=f"tag{number % 2}", keys=f"key-{number}"))
            done = json.loads(run(*archive, *options))
            assert (done["messages"], len(done.get("compacted", ()))) == (len(numbers), compactions)
        query = (
            "SELECT l.tags, count(*) AS n FROM lake l JOIN orders o ON l.keys = o.keys GROUP BY l.tags ORDER BY l.tags"
        )
        table = run("sql", query, "--lake", lake, "--topic", "orders", "-n", mq.namesrv, *storage)
        assert [line.split() for line in table.splitlines()] == [["#tags", "#n"], ["tag0", "15"], ["tag1", "15"]]
        assert json.loads(
            run("sql", "SELECT body FROM lake WHERE keys = 'key-7'", "--lake", lake, "--output", "json", *storage)
        ) == {"body": "7"}
        assert "cannot be resolved" in run("sql", "SELECT nothing FROM lake", "--lake", lake, *storage, code=2)
        chosen = ("replay", lake, "orders", "--to", "again", "--where", "tags = 'tag1'", *storage)
        assert run(*chosen, "--dry-run").splitlines()[-1] == "15 messages would be sent"
        assert run(*chosen, "-n", mq.namesrv) == "sent 15 messages\n"
        assert run(*chosen, "-n", mq.namesrv).startswith("an earlier run sent all 15 messages")
        assert len(mq.messages("again")) == 15
        counted = json.loads(run("stats", str(tmp_path / "out"), "orders", "-n", mq.namesrv, "--json"))
        assert counted["messages"] == 30
        assert (tmp_path / "out" / "messages.png").exists()
        assert "no topic nowhere" in run(
            "archive", lake, "nowhere", "-n", mq.namesrv, "--name", "other", *storage, code=2
        )
