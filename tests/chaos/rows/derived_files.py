"""Row 6: files that are derived from the log are missing, cut short, garbage, or of another store."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Final

from downrange.store.errors import StoreCorrupt
from tests.chaos.row import Round, Row
from tests.support.checked_store import checked
from tests.support.damage import CrashedStore, everything

DAMAGES_PER_ROUND: Final = 100
DERIVED: Final = ("consumequeue", "index", "checkpoint")


def derived(root: Path) -> list[Path]:
    return [path for path in sorted(root.rglob("*")) if path.is_file() and path.relative_to(root).parts[0] in DERIVED]


def remove(path: Path, foreign: Path, chance: Random) -> None:
    path.unlink()


def cut(path: Path, foreign: Path, chance: Random) -> None:
    path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])


def clear(path: Path, foreign: Path, chance: Random) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def replace_by_garbage(path: Path, foreign: Path, chance: Random) -> None:
    path.write_bytes(chance.randbytes(path.stat().st_size))


def replace_by_foreign(path: Path, foreign: Path, chance: Random) -> None:
    others = [one for one in derived(foreign) if one.parts[-2:-1] == path.parts[-2:-1]] or derived(foreign)
    shutil.copyfile(chance.choice(others), path)


DAMAGES: Final[tuple[Callable[[Path, Path, Random], None], ...]] = (
    remove,
    cut,
    clear,
    replace_by_garbage,
    replace_by_foreign,
)


def survive(crashed: CrashedStore, foreign: Path, chance: Random) -> str:
    """Damage one file of a copy. It is built again at the next start, or when the advice of `store check` was taken."""
    root = crashed.copy()
    path, damage = chance.choice(derived(root)), chance.choice(DAMAGES)
    damage(path, foreign, chance)
    what = f"{damage.__name__} {path.relative_to(root)}"
    outcome = "at start"
    try:
        found = read(crashed, root)
        is_right = found == crashed.before and checked(root).is_clean
    except StoreCorrupt:
        is_right = False
    if not is_right:
        outcome = "as advised"
        assert not checked(root).is_clean, f"{what}: wrong, and `store check` does not know"
        for name in DERIVED:
            shutil.rmtree(root / name, ignore_errors=True)
            if (root / name).is_file():
                (root / name).unlink()
        found = read(crashed, root)
    assert found == crashed.before, f"{what}: {len(found)} of {len(crashed.before)} messages"
    report = checked(root)
    assert report.is_clean, f"{what}: " + "; ".join(map(str, report.problems))
    shutil.rmtree(root)
    return outcome


def read(crashed: CrashedStore, root: Path) -> list[object]:
    with crashed.reopen(root) as store:
        return list(everything(store))


async def play(round_: Round) -> None:
    plug_pulled = round_.chance.random() < 0.5
    crashed = CrashedStore(round_.directory / "store", round_.directory, plug_pulled=plug_pulled)
    foreign = CrashedStore(round_.directory / "foreign", round_.directory, messages=35)
    for _ in range(DAMAGES_PER_ROUND):
        round_.figures[f"rebuilt {survive(crashed, foreign.root, round_.chance)}"] += 1
        round_.figures["files"] += 1


ROW: Final = Row(
    6,
    "derived-files",
    "missing, truncated, foreign derived files",
    {"files": 1_000},
    "all files are rebuilt",
    play,
    "one queue, index or checkpoint file is removed, cut, cleared, filled with garbage, or taken from another store; "
    "`store check` runs after it",
    in_memory=True,
    lanes=2,
)
