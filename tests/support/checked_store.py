"""`store check` as an assertion."""

from __future__ import annotations

from pathlib import Path

from downrange.store.check.directory import StoreDirectory
from downrange.store.check.store_check import StoreReport, check

REPOSITORY = Path(__file__).parents[2]  # where `python -m tests.support.…` works


def checked(root: Path) -> StoreReport:
    return check(StoreDirectory(root))


def assert_clean(root: Path) -> StoreReport:
    report = checked(root)
    assert report.is_clean, "\n".join(map(str, report.problems))
    return report
