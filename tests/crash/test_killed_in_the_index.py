"""A process can die in the middle of entering keys. No older key may be lost by that, and none entered twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from downrange.store.files import OsFiles
from downrange.store.index import index_file, key_index
from downrange.store.index.key_index import KeyIndex
from tests.support.checked_store import assert_clean, checked
from tests.support.damage import CrashedStore, everything

SLOTS, ENTRIES = 3, 40  # so few slots that every chain is long
NOW = 1_794_727_122_803


class Killed(BaseException):
    """The process is gone at this point."""


def open_index(root: Path) -> KeyIndex:
    index = KeyIndex(root / "index", SLOTS, ENTRIES, OsFiles(), lambda: NOW)
    index.load()
    return index


def put(index: KeyIndex, number: int) -> None:
    index.put_keys([("T", f"u{number}", f"k{number} more{number}", 100 * number, NOW)])


def found(index: KeyIndex, key: str) -> Sequence[int]:
    return index.query("T", key, 64, 0, 1 << 62).physical_offsets


def die_in(monkeypatch: pytest.MonkeyPatch, step: str, call: int) -> None:
    """Let the process die right before the n-th time that `put` does this."""
    module = index_file if step == "_pack_header" else key_index
    real, calls = getattr(module, step), 0

    def maybe_die(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Killed
        real(*arguments)

    monkeypatch.setattr(module, step, maybe_die)


@pytest.mark.parametrize(
    ("step", "call"),
    [("_pack_entry", 1), ("_pack_slot", 1), ("_pack_entry", 2), ("_pack_slot", 3), ("_pack_header", 1)],
)
def test_entries_that_the_header_does_not_count_are_taken_back(
    step: str, call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = open_index(tmp_path)
    for number in range(11):
        put(index, number)
    path = next((tmp_path / "index").iterdir())
    before = path.read_bytes()
    with monkeypatch.context() as patched:
        die_in(patched, step, call)
        with pytest.raises(Killed):
            put(index, 11)

    index = open_index(tmp_path)
    assert path.read_bytes() == before
    # Another message comes next: the keys of the one that was not finished must not stand in its way.
    index.put_keys([("T", "other", None, 5000, NOW)])
    for number in range(11):
        for key in (f"u{number}", f"k{number}", f"more{number}"):
            assert found(index, key) == [100 * number]
    assert found(index, "k11") == []
    assert found(index, "other") == [5000]
    index.close()


def test_a_new_file_that_got_no_header_is_made_again(tmp_path: Path) -> None:
    """Otherwise the index would seem to end at 0, and the whole log would be entered once more."""
    crashed = CrashedStore(tmp_path / "store", tmp_path, plug_pulled=False)
    files = sorted((crashed.root / "index").iterdir())
    new = files[-1].with_name(f"{int(files[-1].name) + 1:017d}")
    new.write_bytes(bytes(files[-1].stat().st_size))
    keys = checked(crashed.root).index_keys
    with crashed.reopen(crashed.root) as store:
        assert everything(store) == crashed.before
    assert assert_clean(crashed.root).index_keys <= keys + 3
