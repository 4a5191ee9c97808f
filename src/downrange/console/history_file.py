"""The SQLite file of a console: figures over 30 days, jobs with an outcome for each message, plans of the last minutes.

Without a file the database is in memory, so that there is one path for both. Minutes are kept for a day and every
tenth minute for 30 days. One thread at a time uses the connection. What was written survives the end of the process,
whatever ends it; a power cut may take the last moments.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from downrange.console.history import DAY, Row
from downrange.model.errors import MQError

_TABLES: Final = """
CREATE TABLE IF NOT EXISTS figures (
    cluster TEXT NOT NULL, name TEXT NOT NULL, seconds INTEGER NOT NULL, row TEXT NOT NULL,
    PRIMARY KEY (cluster, name, seconds)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, cluster TEXT NOT NULL, kind TEXT NOT NULL, subject TEXT NOT NULL, who TEXT NOT NULL,
    created INTEGER NOT NULL, state TEXT NOT NULL, rate REAL NOT NULL, detail TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS items (
    job TEXT NOT NULL, place TEXT NOT NULL, number INTEGER NOT NULL, letter TEXT NOT NULL, message TEXT NOT NULL,
    state TEXT NOT NULL, at INTEGER NOT NULL, mark TEXT NOT NULL, topic TEXT NOT NULL, result TEXT NOT NULL,
    PRIMARY KEY (job, place)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS plans (id TEXT PRIMARY KEY, made INTEGER NOT NULL, plan BLOB NOT NULL);
"""
_KEPT: Final = 30 * DAY
_TEN_MINUTES: Final = 600


class HistoryFileUnusable(MQError):
    """The file of --history cannot be opened."""


class HistoryFile:
    """The database. Every method may be called from any thread."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(str(path or ":memory:"), check_same_thread=False, isolation_level=None)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.executescript(_TABLES)
        except (sqlite3.Error, OSError) as error:
            raise HistoryFileUnusable(f"--history {path}: {error}; name a file that can be written") from None

    def __repr__(self) -> str:
        return f"<HistoryFile {self.path or 'in memory'}>"

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def execute(self, statement: str, values: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
        with self._lock:
            return self._database.execute(statement, values).fetchall()

    def execute_many(self, statement: str, values: Iterable[tuple[object, ...]]) -> None:
        """Several rows in one transaction."""
        with self._lock:
            self._database.execute("BEGIN")
            try:
                self._database.executemany(statement, values)
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    # --- plans ----------------------------------------------------------------------------------------------------

    def write_plan(self, plan_id: str, made: int, plan: bytes) -> None:
        self.execute("INSERT OR REPLACE INTO plans VALUES (?, ?, ?)", (plan_id, made, plan))

    def plans(self) -> list[tuple[int, bytes]]:
        """When each plan was made, and the plan."""
        found = self.execute("SELECT made, plan FROM plans")
        return [(int(str(made)), plan) for made, plan in found if isinstance(plan, bytes)]

    def forget_plans(self, before: int) -> None:
        self.execute("DELETE FROM plans WHERE made < ?", (before,))

    # --- figures --------------------------------------------------------------------------------------------------

    def write_figures(self, cluster: str, rows: Iterable[tuple[str, Row]]) -> None:
        self.execute_many(
            "INSERT OR REPLACE INTO figures VALUES (?, ?, ?, ?)",
            ((cluster, name, int(row[0]), _text(row)) for name, row in rows),
        )

    def figures(self, cluster: str, name: str, begin: float) -> list[Row]:
        found = self.execute(
            "SELECT seconds, row FROM figures WHERE cluster = ? AND name = ? AND seconds >= ? ORDER BY seconds",
            (cluster, name, int(begin)),
        )
        return [_row(seconds, text) for seconds, text in found]

    def names(self, cluster: str, begin: float) -> list[str]:
        """What there are figures of, since `begin`."""
        found = self.execute(
            "SELECT DISTINCT name FROM figures WHERE cluster = ? AND seconds >= ?", (cluster, int(begin))
        )
        return [str(name) for (name,) in found]

    def thin(self, now: float) -> None:
        """Delete what is older than 30 days, and of what is older than a day all but every tenth minute."""
        self.execute("DELETE FROM figures WHERE seconds < ?", (int(now - _KEPT),))
        self.execute(
            f"DELETE FROM figures WHERE seconds < ? AND seconds % {_TEN_MINUTES} >= 60",  # noqa: S608  a constant
            (int(now - DAY),),
        )


def _text(row: Row) -> str:
    return json.dumps([None if figure != figure else figure for figure in row[1:]])  # NaN is not equal to itself


def _row(seconds: object, text: object) -> Row:
    figures = json.loads(str(text))
    return (float(str(seconds)), *(float("nan") if figure is None else float(figure) for figure in figures))
