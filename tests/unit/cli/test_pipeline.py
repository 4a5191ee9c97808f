"""`downrange pipeline …` as far as it goes without Spark: a lake needs none; wrong input is told before it starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from downrange.cli import pipeline, pipeline_latest
from downrange.spark.lake.lake import Lake
from tests.support.lake_messages import commit, messages
from tests.unit.cli.conftest import Command


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = Lake.create(tmp_path / "lake")
    for batch in range(3):
        commit(lake, batch, messages(batch * 10, batch * 10 + 10))
    return lake


def test_compact_and_check(command: Command, lake: Lake) -> None:
    checked = command("pipeline", "check", str(lake.location))
    assert checked.out == "3 files, 30 messages: everything is as the log says\n"
    done = command("pipeline", "compact", str(lake.location), "--json")
    assert [(one["replaced"], one["messages"]) for one in done.document["compacted"]] == [(3, 30)]
    assert command("pipeline", "compact", str(lake.location)).out == "joined 0 files into 0, deleted 0 old ones\n"
    lake.location.remove(lake.files()[0].path)
    broken = command("pipeline", "check", str(lake.location), "--json")
    assert broken.code == 1
    assert len(broken.document["problems"]) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["check", "nowhere"], "is not a lake: it has no Delta table"),
        (["archive", "{lake}"], "nothing to read: name topics, or give --pattern or --store"),
        (["archive", "{lake}", "orders", "-o", "nonsense=1"], "unknown option nonsense"),
        (["archive", "{lake}", "orders", "-o", "nonsense"], "'nonsense' is not key=value"),
        (["check", "http://nowhere/lake"], "cannot be at http://nowhere/lake: expected a directory, or a URL with"),
        (["check", "{lake}", "--storage-option", "nonsense"], "'nonsense' is not key=value"),
        (["archive", "{lake}", "or/ders"], "illegal characters"),
        (["archive", "{lake}", "orders", "--store", "nowhere"], "nowhere is not a store directory"),
        (["archive", "{lake}", "orders", "--name", "a/b"], "'a/b' cannot name a pipeline"),
        (["archive", "{lake}", "orders", "--every", "0"], "expected more than 0"),
        (["archive", "{lake}", "orders", "--every", "nan"], "nan seconds between batches"),
        (["archive", "ftp://nowhere/lake", "orders"], "cannot be at ftp://nowhere/lake"),
        (["archive", "{lake}/topic=orders", "orders"], "is not a lake and not empty"),
        (["archive", "{lake}", "orders", "--storage-option", "nonsense"], "'nonsense' is not key=value"),
        (["latest", "ftp://nowhere/table", "orders"], "cannot be at ftp://nowhere/table"),
        (["stats", "out", "--lake", "nowhere"], "is not a lake"),
        (["replay", "{lake}"], "say where to send: --to TOPIC, or --to-own"),
        (["replay", "{lake}", "--to", "a", "--to-own"], "say where to"),
        (["replay", "{lake}", "--to", "a/b"], "illegal characters"),
        (["replay", "{lake}", "--to", "again", "--begin", "noon"], "'noon' is not a time"),
        (["replay", "nowhere", "--to", "again"], "is not a lake"),
        (["sql", "SELECT 1"], "the query has nothing to read"),
        (["sql", "SELECT 1", "--lake", "{lake}", "--output", "parquet"], "--output parquet and --to DIR go together"),
        (["sql", "SELECT 1", "--topic", "1=orders"], "'1' cannot be a view"),
        (["sql", "SELECT 1", "--lake", "nowhere"], "is not a lake: it has no Delta table"),
        (["stats", "out"], "nothing to read"),
        (["stats", "out", "--lake", "{lake}", "--window", "5 bananas"], "window '5 bananas': expected a number"),
        (["stats", "{lake}/_delta_log/00000000000000000000.json", "--lake", "{lake}"], ".json: it is a file"),
        (["stats", "out", "--lake", "{lake}", "--pattern", "x"], "exclude each other"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    command: Command, lake: Lake, arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for module in (pipeline, pipeline_latest):
        monkeypatch.setattr(module, "spark_session", None)  # it must not come to that
    result = command("pipeline", *(argument.replace("{lake}", str(lake.location)) for argument in arguments))
    assert result.code == 2
    assert text in result.err
    assert len(result.err.strip().splitlines()) == 1
    assert result.out == ""


def test_without_spark_it_says_how_to_get_it(command: Command, lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    result = command("pipeline", "archive", str(lake.location), "orders")
    assert result.code == 2
    assert result.err == (
        "downrange: pipelines run on Spark, and pyspark is not installed: pip install 'downrange[spark]'\n"
    )


def test_without_java_it_says_so(command: Command, lake: Lake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    result = command("pipeline", "sql", "SELECT 1", "--lake", str(lake.location))
    assert result.code == 2
    assert result.err == "downrange: Spark needs Java 17 or newer: install it, or set JAVA_HOME\n"


def test_a_wrong_java_home_is_named(
    command: Command, lake: Lake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    result = command("pipeline", "sql", "SELECT 1", "--lake", str(lake.location))
    assert result.code == 2
    assert result.err == (
        f"downrange: JAVA_HOME={tmp_path} has no bin/java: set it to the directory of Java 17 or newer, or unset it\n"
    )


def test_a_master_that_spark_does_not_know_is_refused(command: Command, lake: Lake) -> None:
    result = command("pipeline", "sql", "SELECT 1", "--lake", str(lake.location), "--master", "nonsense")
    assert (result.code, len(result.err.splitlines())) == (2, 1)
    assert result.err.startswith("downrange: --master nonsense: expected local, ")
