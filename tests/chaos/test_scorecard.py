"""The scorecard is what the committed results say, and rows are resumed, judged and kept as they should be."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import main
from tests.chaos.result import RESULTS, load, path_of
from tests.chaos.row import Round, Row
from tests.chaos.scorecard import PAGE, page
from tests.chaos.table import ROWS
from tests.support.history import Event


def test_the_scorecard_is_in_step_with_the_results() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.chaos.scorecard`"


def test_rows_have_the_numbers_of_the_table_and_results_have_rows() -> None:
    assert [row.number for row in ROWS] == list(range(1, 14))
    assert {path.name for path in RESULTS.glob("*.json")} <= {path_of(row).name for row in ROWS}


Run = Callable[..., int]
MEETING = "met-"


async def count_to_three(round_: Round) -> None:
    round_.figures["things"] += 3


async def lose_one(round_: Round) -> None:
    known: dict[str, Any] = {"process": "p", "op": "send", "topic": "t", "id": "m1"}
    round_.judge([Event(time=1, phase="invoke", **known), Event(time=2, phase="ok", queue="a/0", offset=0, **known)])


async def break_down(round_: Round) -> None:
    raise ValueError("no way")


def row_of(number: int, play: Callable[[Round], Awaitable[None]]) -> Row:
    return replace(ROWS[number - 1], asked={"things": 6}, play=play, in_memory=True, missing=lambda: "", lanes=1)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr("logging.disable", lambda: None)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)

    def call(row: Row, *arguments: str) -> int:
        monkeypatch.setattr(main, "ROWS", (row,))
        return main.main([str(row.number), "--results", str(tmp_path), *arguments])

    return call


def test_a_row_goes_on_where_it_ended(run: Run, tmp_path: Path) -> None:
    row = row_of(1, count_to_three)
    assert run(row, "--scale", "0.5") == 0
    assert load(row, tmp_path).rounds == 1
    assert run(row) == 0
    result = load(row, tmp_path)
    assert (result.rounds, result.figures) == (2, {"things": 6})
    assert run(row, "--fresh", "--scale", "0.1") == 0
    assert load(row, tmp_path).rounds == 1


@pytest.mark.parametrize(("play", "told"), [(lose_one, "lost: m1"), (break_down, "ValueError('no way')")])
def test_what_is_wrong_is_kept_with_its_seed_and_ends_the_row(
    run: Run, tmp_path: Path, play: Callable[[Round], Awaitable[None]], told: str
) -> None:
    row = row_of(1, play)
    assert run(row) == 1
    result = load(row, tmp_path)
    assert (result.rounds, result.failed_rounds) == (1, 1)
    assert result.faults[0].startswith("seed ")
    assert told in result.faults[0]
    assert told in page(tmp_path)


async def meet(round_: Round) -> None:
    """Wait for the other rounds: this ends only if they run side by side."""
    parent = round_.directory.parent
    (parent / f"{MEETING}{round_.number}").touch()
    while len(list(parent.glob(f"{MEETING}*"))) < 3:
        await asyncio.sleep(0.01)
    round_.figures["things"] += 6
    round_.figures[f"round {round_.number}"] += 1


@pytest.mark.timeout(120)
def test_rounds_run_side_by_side(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.chaos.lanes.IN_MEMORY", tmp_path)
    monkeypatch.setattr("tests.chaos.lanes.START_SECONDS", 0.1)
    row = replace(row_of(1, meet), lanes=3)
    assert run(row) == 0
    figures = {"things": 18, "round 0": 1, "round 1": 1, "round 2": 1}
    assert load(row, tmp_path).figures == figures


async def die(round_: Round) -> None:
    round_.directory.rmdir()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_round_whose_process_dies_is_wrong(run: Run, tmp_path: Path) -> None:
    row = row_of(1, die)
    assert run(row) == 1
    assert "the process of the round died" in load(row, tmp_path).faults[0]


async def never_end(round_: Round) -> None:
    (round_.directory.parent / MEETING).touch()
    await asyncio.Event().wait()


@pytest.mark.timeout(120)
def test_ctrl_c_clears_away_the_rounds_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("logging.disable", lambda: None)
    monkeypatch.setattr("tests.chaos.lanes.IN_MEMORY", tmp_path)
    monkeypatch.setattr(main, "ROWS", (row_of(1, never_end),))

    def interrupt() -> None:
        while not (tmp_path / MEETING).exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread, before = threading.Thread(target=interrupt), signal.getsignal(signal.SIGTERM)
    thread.start()
    try:
        assert main.main(["1", "--results", str(tmp_path / "results")]) == 130
    finally:
        thread.join()
        signal.signal(signal.SIGTERM, before)
    assert [path.name for path in tmp_path.iterdir()] == [MEETING]
    assert capfd.readouterr() == ("interrupted in row 1; the same command goes on with it\n", "")


def test_a_row_for_which_the_machine_lacks_something_is_left_out(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = replace(row_of(3, break_down), missing=lambda: "mkfs.xfs not found")
    assert run(row) == 0
    assert "row 3 (power-cut-async) is left out: mkfs.xfs not found" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_row_for_which_no_time_is_left_keeps_its_result(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = row_of(1, count_to_three)
    assert run(row, "--scale", "0.5") == 0
    capsys.readouterr()
    assert run(row, "--fresh", "--minutes", "0") == 0
    assert capsys.readouterr().out.splitlines() == [
        "row 1 (kill) is left out: the time is over",
        "0 of 1 rows were played and have found nothing wrong",
    ]
    assert load(row, tmp_path).rounds == 1


def test_a_row_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["14"])
    assert "there is no row 14; rows are 1 to 13" in capsys.readouterr().err
