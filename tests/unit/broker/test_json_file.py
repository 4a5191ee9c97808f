from __future__ import annotations

import os
from pathlib import Path

import pytest

from downrange.broker.json_file import JsonFile, pretty
from downrange.protocol.bodies.body import Body
from downrange.protocol.bodies.groups import SubscriptionGroupTable
from downrange.protocol.bodies.offsets import ConsumerOffsets, DelayOffsets
from downrange.protocol.bodies.topics import TopicConfigTable
from downrange.settings import ConfigError
from downrange.store.files import OsFiles
from tests.support.golden_store import unpack

TABLES: dict[str, type[Body]] = {
    "topics.json": TopicConfigTable,
    "subscriptionGroup.json": SubscriptionGroupTable,
    "consumerOffset.json": ConsumerOffsets,
    "delayOffset.json": DelayOffsets,
}


@pytest.mark.parametrize("store", ["clean", "killed", "ext"])
def test_java_s_files_are_written_back_byte_for_byte(store: str, tmp_path: Path) -> None:
    config = unpack(store, tmp_path).root / "config"
    compared = 0
    for name, table_type in TABLES.items():
        for path in (config / name, config / f"{name}.bak"):
            if not path.exists():
                continue
            table = JsonFile(path).load(table_type)
            assert table is not None
            copy = JsonFile(tmp_path / "copy" / path.name)
            copy.save(table)
            assert copy.path.read_bytes() == path.read_bytes(), path.name
            compared += 1
    assert compared >= 4


def test_maps_with_numbers_as_keys_stand_bare_on_one_line() -> None:
    assert pretty({"a": {"0": 1, "-3": 2}, "b": {}, "c": {"x": True}}) == (
        '{\n\t"a":{0:1,-3:2\n\t},\n\t"b":{},\n\t"c":{\n\t\t"x":true\n\t}\n}'
    )


def table(offset: int) -> DelayOffsets:
    return DelayOffsets(offset_table={1: offset})


def test_a_missing_file_is_nothing_and_no_directory_is_made_for_it(tmp_path: Path) -> None:
    assert JsonFile(tmp_path / "none" / "delayOffset.json").load(DelayOffsets) is None
    assert not (tmp_path / "none").exists()


def test_the_last_version_but_one_is_kept(tmp_path: Path) -> None:
    file = JsonFile(tmp_path / "config" / "delayOffset.json")
    for offset in (1, 2, 3):
        file.save(table(offset))
    assert file.load(DelayOffsets) == table(3)
    assert JsonFile(tmp_path / "config" / "delayOffset.json.bak").load(DelayOffsets) == table(2)
    assert sorted(os.listdir(tmp_path / "config")) == ["delayOffset.json", "delayOffset.json.bak"]


@pytest.mark.parametrize("damage", [b"", b"  \n", b'{"offsetTable":', b'{"offsetTable":[]}', b"\xff\xfe"])
def test_a_damaged_file_gives_way_to_its_backup(damage: bytes, tmp_path: Path) -> None:
    file = JsonFile(tmp_path / "delayOffset.json")
    file.save(table(1))
    file.save(table(2))
    file.path.write_bytes(damage)
    assert file.load(DelayOffsets) == table(1)


def test_a_crash_between_the_two_renames_loses_one_version_at_most(tmp_path: Path) -> None:
    file = JsonFile(tmp_path / "delayOffset.json")
    file.save(table(1))
    os.replace(file.path, tmp_path / "delayOffset.json.bak")
    assert file.load(DelayOffsets) == table(1)


def test_a_damaged_file_without_a_good_backup_stops_the_start(tmp_path: Path) -> None:
    file = JsonFile(tmp_path / "delayOffset.json")
    file.path.write_bytes(b"not json")
    (tmp_path / "delayOffset.json.bak").write_bytes(b"not json either")
    with pytest.raises(ConfigError, match=r"delayOffset.json and its .bak cannot be read"):
        file.load(DelayOffsets)


def test_a_path_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "delayOffset.json").mkdir()
    with pytest.raises(ConfigError, match=r"cannot read .*delayOffset.json"):
        JsonFile(tmp_path / "delayOffset.json").load(DelayOffsets)


def test_a_version_written_late_does_not_replace_a_newer_one(tmp_path: Path) -> None:
    file = JsonFile(tmp_path / "delayOffset.json")
    late = file.prepare_save(table(1))
    file.save(table(2))
    late()
    assert file.load(DelayOffsets) == table(2)


def test_a_version_that_could_not_be_written_may_be_tried_again(tmp_path: Path) -> None:
    file = JsonFile(tmp_path / "config" / "delayOffset.json")
    (tmp_path / "config").write_bytes(b"in the way")
    write = file.prepare_save(table(1))
    with pytest.raises(OSError, match="config"):
        write()
    (tmp_path / "config").unlink()
    write()
    assert file.load(DelayOffsets) == table(1)


def test_the_name_of_a_saved_file_is_on_the_disk_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[Path, str]] = []
    file = JsonFile(tmp_path / "delayOffset.json")
    monkeypatch.setattr(OsFiles, "sync_directory", lambda self, path: synced.append((path, file.path.read_text())))
    file.save(table(2))
    assert synced == [(tmp_path, file.path.read_text())]
