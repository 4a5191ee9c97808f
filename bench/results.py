"""What a run leaves in bench/results: latest.json with everything, latest.md for people, pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.report import Figure, NotMeasured, Row, number_text, table

RESULTS: Final = Path(__file__).parent / "results"
BUSY: Final = 0.2
"""Cores used by others from which on figures are labelled."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One benchmark of a run."""

    name: str
    rows: Sequence[Row]
    seconds: float
    others_cores: float
    """Cores that were not ours to use meanwhile."""

    def as_json(self) -> dict[str, Any]:
        return {
            "seconds": round(self.seconds, 1),
            "others_cores": round(self.others_cores, 2),
            "figures": [row._asdict() for row in self.rows if isinstance(row, Figure)],
            "not_measured": [row._asdict() for row in self.rows if isinstance(row, NotMeasured)],
        }


@dataclass(frozen=True, slots=True)
class Run:
    """One run of `make bench`."""

    started: str
    machine: dict[str, Any]
    is_quick: bool
    benchmarks: list[Benchmark] = field(default_factory=list)

    @property
    def is_busy(self) -> bool:
        """By the benchmarks that can tell: nobody waits for the workers of Spark, which so look like others."""
        return any(one.others_cores > BUSY for one in self.benchmarks if not one.name.startswith("spark"))

    def figure(self, benchmark: str, name: str) -> float | None:
        for one in self.benchmarks:
            if one.name == benchmark:
                for row in one.rows:
                    if isinstance(row, Figure) and row.name == name:
                        return row.value
        return None

    def as_json(self) -> dict[str, Any]:
        return {
            "started": self.started,
            "machine": self.machine,
            "quick": self.is_quick,
            "busy": self.is_busy,
            "benchmarks": {one.name: one.as_json() for one in self.benchmarks},
        }

    def as_markdown(self) -> str:
        machine = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in self.machine.items())
        parts = [
            "# Latest results",
            f"Started {self.started}. {machine}. What each figure means: [README](../README.md).",
        ]
        if self.is_quick:
            parts.append("**A quick run: it shows that everything works. Its figures are worth little.**")
        if self.is_busy:
            parts.append(
                "**Other programs used this machine at the same time: these are no results to quote. Each section says "
                "how many cores were not ours.**"
            )
        for one in self.benchmarks:
            whose = "by others or by workers of Spark" if one.name.startswith("spark") else "by others"
            note = f"{one.seconds:.0f} s, {one.others_cores:.2f} cores used {whose} meanwhile"
            parts += [f"## {one.name}", note, compact_table(one.rows)]
        return "\n\n".join(parts) + "\n"

    def write(self) -> None:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "latest.json").write_text(json.dumps(self.as_json(), indent=1, ensure_ascii=False) + "\n")
        (RESULTS / "latest.md").write_text(self.as_markdown())


def compact_table(rows: Sequence[Row]) -> str:
    """Figures named `X: part` become columns of the row X, ratios in brackets; without any, one figure is one row."""
    figures = {row.name: row for row in rows if isinstance(row, Figure)}
    main = [row for row in rows if row.name.rpartition(": ")[0] not in figures]
    parts = [row for row in rows if isinstance(row, Figure) and row.name.rpartition(": ")[0] in figures]
    if not parts:
        return table(rows)
    columns = list(dict.fromkeys((row.name.rpartition(": ")[2], row.unit) for row in parts))
    lines = table(main).splitlines()
    lines[0] += "".join(f" {name}, {unit} |" for name, unit in columns)
    lines[1] += "---|" * len(columns)
    for number, row in enumerate(main, 2):
        for name, _ in columns:
            part = figures.get(f"{row.name}: {name}")
            ratio = "" if part is None or part.ratio is None else f" ({part.ratio:.2f} x)"
            lines[number] += f" {number_text(part.value)}{ratio} |" if part else " |"
    return "\n".join(lines)
