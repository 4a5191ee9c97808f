"""The two streams of replication, whole and cut anywhere."""

from __future__ import annotations

import pytest

from downrange.broker.replication.errors import ReplicationError
from downrange.broker.replication.wire import HEADER, REPORT, PacketReader, ReportReader


def packet(offset: int, data: bytes) -> bytes:
    return HEADER.pack(offset, len(data)) + data


def read(*chunks: bytes) -> tuple[dict[int, bytes], list[int]]:
    """What was read: log bytes by place, and the places at which packets ended."""
    reader = PacketReader()
    log: dict[int, bytes] = {}
    ends = []
    for chunk in chunks:
        for offset, data, ends_packet in reader.feed(memoryview(chunk)):
            log |= {offset + number: data[number : number + 1].tobytes() for number in range(len(data))}
            if ends_packet:
                ends.append(offset + len(data))
    return log, ends


def test_a_stream_may_be_cut_anywhere() -> None:
    wire = packet(100, b"") + packet(100, b"abcdefg") + packet(107, b"h") + packet(108, b"")
    whole = read(wire)
    assert b"".join(whole[0].values()) == b"abcdefgh"
    assert whole[1] == [100, 107, 108, 108]
    for cut in range(len(wire) + 1):
        assert read(wire[:cut], wire[cut:]) == whole
    assert read(*(wire[at : at + 1] for at in range(len(wire)))) == whole


def test_a_packet_larger_than_any_buffer_is_passed_on_as_it_comes() -> None:
    reader = PacketReader()
    assert reader.feed(memoryview(HEADER.pack(0, 2**31 - 1))) == []
    (piece,) = reader.feed(memoryview(b"x" * 10))
    assert (piece.offset, len(piece.data), piece.ends_packet) == (0, 10, False)


@pytest.mark.parametrize("header", [HEADER.pack(0, -1), HEADER.pack(-8, 4)])
def test_what_is_no_packet_is_an_error(header: bytes) -> None:
    with pytest.raises(ReplicationError, match="no replication packet"):
        PacketReader().feed(memoryview(header))


def test_only_the_newest_whole_report_counts() -> None:
    reader = ReportReader()
    wire = b"".join(map(REPORT.pack, (1, 2, 3)))
    assert reader.feed(wire[:7]) is None
    assert reader.feed(wire[7:20]) == 2
    assert reader.feed(wire[20:]) == 3
    assert reader.feed(b"") is None
