from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from downrange.store.errors import StoreClosed, StoreCorrupt, StoreError
from downrange.store.files import OS_FILES
from downrange.store.queue.consume_queue_ext import FIRST_ADDRESS, ConsumeQueueExt, ExtUnit


def ext_at(directory: Path, *, writable: bool = True) -> ConsumeQueueExt:
    ext = ConsumeQueueExt(directory, 100, OS_FILES, writable=writable)
    ext.load()
    ext.recover()
    return ext


def unit(number: int, bitmap_size: int = 10) -> ExtUnit:
    return ExtUnit(number, 1_700_000_000_000 + number, bytes([number % 256]) * bitmap_size)


def test_a_unit_never_spans_two_files(tmp_path: Path) -> None:
    ext = ext_at(tmp_path)
    addresses = [ext.put(*unit(number)) for number in range(5)]
    assert [address - FIRST_ADDRESS for address in addresses] == [0, 30, 60, 100, 130]
    first = (tmp_path / ("0" * 20)).read_bytes()
    assert first[90:] == b"\xff\xff" + bytes(8)
    assert [ext.get(address) for address in addresses] == [unit(number) for number in range(5)]


@given(sizes=st.lists(st.integers(0, 76), max_size=30), kept=st.integers(0, 29))
@settings(deadline=None)
def test_what_was_put_survives_a_restart_and_a_cut(sizes: list[int], kept: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        ext = ext_at(Path(name))
        units = [unit(number, size) for number, size in enumerate(sizes)]
        addresses = [ext.put(*one) for one in units]
        ext.release()
        again = ext_at(Path(name))
        assert again.max_address == ext.max_address
        assert [again.get(address) for address in addresses] == units
        if kept < len(units):
            again.truncate_by_max_address(addresses[kept])
            for one in (again, ext_at(Path(name))):
                found = [one.get(address) for address in addresses]
                assert found == [*units[: kept + 1], *[None] * (len(units) - kept - 1)]
            address = again.put(7, 8, b"new")
            again.release()
            assert ext_at(Path(name)).get(address) == (7, 8, b"new")


def test_files_before_the_smallest_address_go_but_never_the_last(tmp_path: Path) -> None:
    ext = ext_at(tmp_path)
    addresses = [ext.put(*unit(number)) for number in range(9)]
    assert ext.truncate_by_min_address(addresses[2]) == 0
    assert ext.truncate_by_min_address(addresses[3]) == 1
    assert (ext.get(addresses[0]), ext.get(addresses[3])) == (None, unit(3))
    assert ext.truncate_by_min_address(-(1 << 40)) == 1
    assert ext.min_address == 200 + FIRST_ADDRESS
    assert ext.truncate_by_min_address(5) == 0  # not an address


@pytest.mark.parametrize("tags_code", [0, 2598919, -(1 << 31)])
def test_a_tag_hash_is_not_an_address(tmp_path: Path, tags_code: int) -> None:
    ext = ext_at(tmp_path)
    ext.put(1, 2, b"")
    assert not ext.is_ext_address(tags_code)
    assert ext.get(tags_code) is None


def test_an_address_inside_or_behind_the_units_finds_nothing(tmp_path: Path) -> None:
    ext = ext_at(tmp_path)
    address = ext.put(*unit(1))
    assert ext.get(address + 3) is None
    assert ext.get(address + 30) is None
    assert ext.get(address + 5_000) is None


def test_a_bitmap_too_large_leaves_the_tags_code_in_the_queue(tmp_path: Path) -> None:
    assert ext_at(tmp_path).put(2598919, 5, bytes(77)) == 2598919
    assert list(tmp_path.iterdir()) == []


def damage(path: Path, at: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(at)
        stream.write(b"\x00\x05")


def test_what_lies_behind_a_damaged_unit_of_the_last_file_is_cut(tmp_path: Path) -> None:
    ext = ext_at(tmp_path)
    addresses = [ext.put(*unit(number)) for number in range(9)]
    ext.release()
    damage(tmp_path / f"{200:020d}", 30)
    again = ext_at(tmp_path)
    assert [again.get(address) for address in addresses] == [unit(number) for number in range(7)] + [None] * 2
    assert again.put(*unit(7)) == addresses[7]
    assert ext_at(tmp_path).max_address == addresses[8]


def test_a_damaged_unit_further_back_is_lost_alone(tmp_path: Path) -> None:
    ext = ext_at(tmp_path)
    addresses = [ext.put(*unit(number)) for number in range(9)]
    ext.release()
    damage(tmp_path / f"{100:020d}", 30)
    again = ext_at(tmp_path)
    assert [again.get(address) for address in addresses] == [
        None if number == 4 else unit(number) for number in range(9)
    ]


def test_a_file_without_any_unit_is_dropped(tmp_path: Path) -> None:
    ext = ext_at(tmp_path)
    addresses = [ext.put(*unit(number)) for number in range(3)]
    ext.release()
    OS_FILES.create(tmp_path / f"{100:020d}", 100)
    again = ext_at(tmp_path)
    assert again.max_address == addresses[2] + 30
    assert not (tmp_path / f"{100:020d}").exists()


def test_flush_and_destroy(tmp_path: Path) -> None:
    directory = tmp_path / "orders" / "0"
    ext = ext_at(directory)
    assert ext.flush() is False
    ext.put(*unit(1))
    assert ext.flush() is True
    assert ext.flush() is False
    ext.destroy()
    assert not directory.exists()


def test_a_reader_changes_nothing(tmp_path: Path) -> None:
    ext_at(tmp_path).put(*unit(1))
    reader = ext_at(tmp_path, writable=False)
    assert reader.get(FIRST_ADDRESS) == unit(1)
    with pytest.raises(StoreClosed):
        reader.put(*unit(2))
    reader.destroy()
    assert ext_at(tmp_path).get(FIRST_ADDRESS) == unit(1)


def test_bad_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="too small"):
        ConsumeQueueExt(tmp_path, 23, OS_FILES)
    (tmp_path / f"{0:020d}").write_bytes(bytes(50))
    with pytest.raises(StoreCorrupt, match=r"has 50 bytes.*consumequeue_ext"):
        ext_at(tmp_path)
