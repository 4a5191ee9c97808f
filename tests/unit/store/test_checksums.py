"""The checksum of a body is zlib's, whoever computes it: it is done in other ways for short, long and odd lengths."""

from __future__ import annotations

from pathlib import Path
from random import Random
from zlib import crc32

import pytest

from tests.support.stores import append_batch
from tests.unit.store.small_store import new_message, open_store

LENGTHS = (*range(700), 1023, 1024, 1025, 4095, 4096, 4097, 65_535, 65_536, 65_601)


@pytest.mark.parametrize("seed", range(3))
def test_bodies_of_every_length_have_the_checksum_of_zlib(tmp_path: Path, seed: int) -> None:
    chance = Random(seed)
    bodies = [chance.randbytes(length) for length in LENGTHS]
    with open_store(tmp_path, mapped_file_size_commit_log=4 << 20) as store:
        results, refusal = append_batch(store, [[new_message(body)] for body in bodies])
        assert refusal is None
        for body, result in zip(bodies, results, strict=True):
            record = store.commit_log.slice(result.physical_offset, result.size)
            assert record is not None
            assert int.from_bytes(record[8:12], "big") == crc32(body) & 0x7FFFFFFF, len(body)
            assert record[88 : 88 + len(body)] == body
