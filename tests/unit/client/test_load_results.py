"""What a run of `make bench` writes: nothing that failed is hidden, nothing of a busy machine looks like a result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import __main__ as runner
from bench import results
from bench.machine import Usage
from bench.report import Figure, NotMeasured, Row
from bench.results import Benchmark, Run, compact_table

SEND: list[Row] = [
    Figure("send", 12_345.6, "messages/s", 1.0, "send"),
    Figure("send: server CPU", 5.25, "µs a message"),
    Figure("batches", 99_999.0, "messages/s", 8.1, "send"),
    Figure("batches: server CPU", 2.5, "µs a message", 0.476, "send"),
    NotMeasured("Redis Streams", "redis-server is not installed"),
]


def run_of(*benchmarks: Benchmark, is_quick: bool = False) -> Run:
    return Run("2026-01-01 00:00 UTC", {"cores": 2}, is_quick, list(benchmarks))


def test_parts_of_a_figure_become_columns_and_what_is_missing_stays() -> None:
    assert compact_table(SEND).splitlines() == [
        "| figure | value | ratio | server CPU, µs a message |",
        "|---|---|---|---|",
        "| send | 12,346 messages/s | 1.00 x send | 5.25 |",
        "| batches | 99,999 messages/s | 8.10 x send | 2.5 (0.48 x) |",
        "| Redis Streams | not measured: redis-server is not installed | | |",
    ]


def test_a_run_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    run_of(Benchmark("send", SEND, 3.0, 0.05)).write()
    document = json.loads((tmp_path / "latest.json").read_text())
    assert document["busy"] is False
    send = document["benchmarks"]["send"]
    assert [figure["value"] for figure in send["figures"]] == [12_345.6, 5.25, 99_999.0, 2.5]
    assert send["not_measured"] == [{"name": "Redis Streams", "reason": "redis-server is not installed"}]
    assert "no results to quote" not in (tmp_path / "latest.md").read_text()


def test_results_of_a_busy_machine_or_a_quick_run_say_so() -> None:
    busy = run_of(Benchmark("send", SEND, 3.0, 1.4), is_quick=True)
    assert busy.is_busy
    assert "no results to quote" in busy.as_markdown()
    assert "quick run" in busy.as_markdown()
    assert "1.40 cores" in busy.as_markdown()


def test_cpu_of_others_is_what_is_neither_idle_nor_ours() -> None:
    before, after = Usage(busy=100, stolen=1, own=50), Usage(busy=120, stolen=3, own=56)
    assert after.others_since(before, seconds=10) == pytest.approx((20 - 6 + 2) / 10)


def test_a_benchmark_that_is_not_there_or_fails_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runner.measure("nothing").rows == [NotMeasured("nothing", "this benchmark is not there")]
    # A module of this package that has no `run`: it fails as any benchmark may fail.
    (failed,) = runner.measure("report").rows
    assert isinstance(failed, NotMeasured)
    assert failed.reason.startswith("failed: AttributeError")
