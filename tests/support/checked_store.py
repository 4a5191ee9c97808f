"""`store check` as an assertion."""

from __future__ import annotations

from pathlib import Path

from downrange.store.check.directory import StoreDirectory
from downrange.store.check.store_check import StoreReport, check

REPOSITORY = Path(__file__).parents[2]  # where `python -m tests.support.…` works


def checked(root: Path, *, slots: int = 100, entries: int = 200) -> StoreReport:
    return check(StoreDirectory(root, index_slots=slots, index_entries=entries))


def assert_clean(root: Path, *, slots: int = 100, entries: int = 200) -> StoreReport:
    report = checked(root, slots=slots, entries=entries)
    assert report.is_clean, "\n".join(map(str, report.problems))
    return report
