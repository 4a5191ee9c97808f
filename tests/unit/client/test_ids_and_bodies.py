"""Unique ids, compressed bodies and traces: rules without a server."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator

import pytest

from downrange.client.compression import Compression, compress, plain_body
from downrange.client.unique_id import UniqueIds, month_around
from downrange.clock import ManualClock
from downrange.model.errors import MessageError
from downrange.model.message import PhysicalOffset, QueueOffset, StoredMessage, SysFlag
from downrange.model.message_id import HostPort

NOV_15 = 1794732491499  # 2026-11-15 08:48:11 UTC


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Local time is UTC."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("utc")
def test_an_id_tells_host_process_time_and_number() -> None:
    clock = ManualClock(NOV_15)
    ids = UniqueIds(clock, host="127.0.0.1", process_id=0x110CD)
    first, second = ids.next(), ids.next()
    assert first[:12] == "7F00000110CD"
    since_month_began = NOV_15 - 1793491200000  # 2026-11-01 00:00 UTC
    assert int(first[20:28], 16) == since_month_began
    assert (first[28:], second[28:]) == ("0000", "0001")
    assert first[:28] == second[:28]
    assert len(first) == 32
    assert first == first.upper()


@pytest.mark.usefixtures("utc")
def test_the_counter_wraps_and_the_base_moves_with_the_month() -> None:
    clock = ManualClock(NOV_15)
    ids = UniqueIds(clock, host="10.0.0.9")
    seen = {ids.next() for _ in range(65536)}
    assert len(seen) == 65536
    assert ids.next()[28:] == "0000"
    december = 1796083200000
    clock.set(december + 5)
    assert int(ids.next()[20:28], 16) == 5
    assert month_around(december - 1) == (1793491200000, december)
    assert month_around(december)[1] == 1798761600000  # January of the next year


def stored(body: bytes, sys_flag: int) -> StoredMessage:
    host = HostPort("10.0.0.1", 10911)
    return StoredMessage(
        topic="t",
        queue_id=0,
        queue_offset=QueueOffset(0),
        physical_offset=PhysicalOffset(0),
        body=body,
        properties_text="",
        sys_flag=sys_flag,
        flag=0,
        born_timestamp=0,
        born_host=host,
        store_timestamp=0,
        store_host=host,
        reconsume_times=0,
        prepared_transaction_offset=0,
        body_crc=0,
        store_size=0,
    )


def test_a_compressed_body_is_given_back_plain() -> None:
    assert plain_body(stored(b"as it is", 0)) == b"as it is"
    packed = zlib.compress(b"text " * 100)
    for flag in (SysFlag.COMPRESSED, SysFlag.COMPRESSED | SysFlag.ZLIB):
        assert plain_body(stored(packed, flag)) == b"text " * 100


@pytest.mark.parametrize(
    ("body", "flag", "problem"),
    [
        (b"not zlib", SysFlag.COMPRESSED, "cannot be decompressed"),
        (zlib.compress(b"x" * 5000)[:-4], SysFlag.COMPRESSED, "cut off"),
        (zlib.compress(b"x" * 5001), SysFlag.COMPRESSED, "larger than 5000"),
        (b"", SysFlag.COMPRESSED | SysFlag.ZSTD, "cut off"),
        (b"not zstd", SysFlag.COMPRESSED | SysFlag.ZSTD, "cannot be decompressed"),
        (b"not lz4 at all", SysFlag.COMPRESSED | SysFlag.LZ4, "cannot be decompressed"),
        (compress(b"x" * 5001, Compression.LZ4, 0)[0], SysFlag.COMPRESSED | SysFlag.LZ4, "larger than 5000"),
        (compress(b"x" * 5001, Compression.ZSTD, 3)[0], SysFlag.COMPRESSED | SysFlag.ZSTD, "larger than 5000"),
        (b"", SysFlag.COMPRESSED | 0x400, "type 4, which is not supported"),
    ],
)
def test_a_body_that_cannot_be_inflated_says_why(body: bytes, flag: int, problem: str) -> None:
    with pytest.raises(MessageError, match=problem):
        plain_body(stored(body, flag), max_bytes=5000)
