from __future__ import annotations

import mmap
from pathlib import Path

from downrange.store.log import memory_lock
from tests.unit.store.small_store import open_store, put


def locked_kilobytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmLck:")).split()[1])


def test_a_mapping_is_kept_in_memory_until_it_is_let_go() -> None:
    before = locked_kilobytes()
    with mmap.mmap(-1, 64 * 1024) as mapping:
        assert memory_lock.lock(mapping)
        assert locked_kilobytes() == before + 64
        memory_lock.unlock(mapping)
        assert locked_kilobytes() == before


def test_a_warmed_file_is_locked_until_the_log_has_rolled_on(tmp_path: Path) -> None:
    before = locked_kilobytes()
    with open_store(tmp_path, warm_mapped_file_enable=True) as store:
        put(store, b"x")
        store.prepare_next_file()
        per_file = locked_kilobytes() - before
        assert per_file > 0
        first_end = store.config.mapped_file_size_commit_log
        while store.max_offset <= first_end:
            put(store, bytes(300))
        while store.max_offset <= 2 * first_end:
            put(store, bytes(300))
        store.prepare_next_file()
        assert locked_kilobytes() - before == per_file
    assert locked_kilobytes() == before
