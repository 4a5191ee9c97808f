"""What the rounds of a row gave, as JSON: written after every round, so that a run that was stopped is resumed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.machine import describe
from tests.chaos.row import Played, Row

RESULTS: Final = Path(__file__).parent / "results"
KEPT_FAULTS: Final = 20


class Result(msgspec.Struct, kw_only=True):
    """The sum of all rounds of a row so far."""

    row: int
    name: str
    figures: dict[str, float] = {}
    measured: dict[str, float] = {}
    rounds: int = 0
    failed_rounds: int = 0
    faults: list[str] = []
    """What was wrong, each with the seed of its round."""
    seconds: float = 0.0
    last_run: str = ""
    machine: dict[str, Any] = {}

    @property
    def is_good(self) -> bool:
        return self.rounds > 0 and not self.failed_rounds

    def add(self, seed: int, played: Played, seconds: float) -> None:
        for name, figure in played.figures.items():
            self.figures[name] = self.figures.get(name, 0) + figure
        for name, most in played.measured.items():
            self.measured[name] = max(self.measured.get(name, most), most)
        self.rounds += 1
        self.failed_rounds += bool(played.wrong)
        self.faults = [*self.faults, *(f"seed {seed}: {text}" for text in played.wrong)][:KEPT_FAULTS]
        self.seconds = round(self.seconds + seconds, 1)
        self.last_run = time.strftime("%Y-%m-%d", time.gmtime())
        self.machine = describe()


def path_of(row: Row, directory: Path = RESULTS) -> Path:
    return directory / f"{row.number:02d}-{row.name}.json"


def load(row: Row, directory: Path = RESULTS) -> Result:
    """What is known of a row; an empty result before its first round."""
    path = path_of(row, directory)
    if not path.exists():
        return Result(row=row.number, name=row.name)
    return msgspec.json.decode(path.read_bytes(), type=Result)


def save(row: Row, result: Result, directory: Path = RESULTS) -> None:
    path = path_of(row, directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".tmp")
    written.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    os.replace(written, path)
