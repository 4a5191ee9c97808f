"""The frames between a master and a slave under a controller: given vectors, captured streams, any cut, nonsense."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from downrange.broker.replication.auto_switch_wire import (
    LogPiece,
    MasterFrames,
    MasterHandshake,
    SlaveFrames,
    SlaveHandshake,
    TransferHeader,
    encode_report,
)
from downrange.broker.replication.errors import ReplicationError
from downrange.store.epochs import Epoch, EpochList
from tests.support.golden import captured_ha_rows

SCENARIOS = ["ctl_second_broker", "ctl_elect", "ctl_elect_manual", "ctl_old_master_returns"]
ONE = EpochList([Epoch(1, 0)])


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (SlaveHandshake(2).encode(), "00000001 0000 0000 0000000000000002"),
        (SlaveHandshake(1, from_last_file=True, is_learner=True).encode(), "00000001 0001 0001 0000000000000001"),
        (MasterHandshake(0, ONE).encode(), "00000001 0000000c 0000000000000000 00000001 00000001 0000000000000000"),
        (encode_report(195), "00000002 00000000000000c3"),
        (
            TransferHeader(0, -1, Epoch(1, 0), 0).encode(),
            "00000002 00000000 ffffffffffffffff 00000001 0000000000000000 0000000000000000",
        ),
        (
            TransferHeader(0, 13206, Epoch(2, 13206), 34194).encode(),
            "00000002 00000000 0000000000003396 00000002 0000000000003396 0000000000008592",
        ),
    ],
)
def test_given_vectors(frame: bytes, text: str) -> None:
    assert frame == bytes.fromhex(text)


def read_master(data: bytes, cuts: list[int]) -> list[object]:
    """All frames of a master, its log bytes joined, when the stream comes in these portions."""
    frames, found = MasterFrames(), list[object]()
    edges = [0, *sorted(cuts), len(data)]
    for start, end in pairwise(edges):
        for frame in frames.feed(memoryview(data)[start:end]):
            last = found[-1] if found else None
            if isinstance(frame, LogPiece) and isinstance(last, tuple) and last[0] == "log":
                found[-1] = ("log", last[1], last[2] + bytes(frame.data))
            elif isinstance(frame, LogPiece):
                found.append(("log", frame.offset, bytes(frame.data)))
            else:
                found.append(frame)
    return found


def written_again(frames: list[object]) -> bytes:
    parts = []
    for frame in frames:
        if isinstance(frame, MasterHandshake | TransferHeader):
            parts.append(frame.encode())
        else:
            assert isinstance(frame, tuple)
            parts.append(frame[2])
    return b"".join(parts)


def is_of_slave(data: bytes) -> bool:
    """Whether these bytes are frames of a slave and nothing else."""
    try:
        frames = list(SlaveFrames().feed(data))
    except ReplicationError:
        return False
    return b"".join(one.encode() if isinstance(one, SlaveHandshake) else encode_report(one) for one in frames) == data


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_captured_streams_are_read_and_written_byte_for_byte(scenario: str) -> None:
    rows = captured_ha_rows("controller-533.tar.xz", f"frames/controller-533/{scenario}.ha.jsonl")
    streams: dict[tuple[int, str], bytes] = {}
    for row in rows:
        streams[row.connection, row.sender] = streams.get((row.connection, row.sender), b"") + row.data
    masters = slaves = 0
    for data in streams.values():
        if is_of_slave(data):
            slaves += 1
        else:
            assert written_again(read_master(data, [])) == data
            assert read_master(data, list(range(1, len(data)))) == read_master(data, [])
            masters += 1
    assert masters
    assert slaves


epoch_lists = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 1 << 40)), max_size=5).map(
    lambda steps: EpochList(
        Epoch(sum(step for step, _ in steps[: at + 1]), sum(step for _, step in steps[: at + 1]))
        for at in range(len(steps))
    )
)
packets = st.tuples(st.integers(0, 1 << 50), st.binary(max_size=40), st.integers(0, 1 << 30))


@given(epoch_lists, st.lists(packets, max_size=5), st.data())
def test_any_stream_of_a_master_survives_any_cut(
    epochs: EpochList, sent: list[tuple[int, bytes, int]], data: st.DataObject
) -> None:
    stream = MasterHandshake(77, epochs).encode()
    for offset, payload, confirm in sent:
        stream += TransferHeader(len(payload), offset, Epoch(3, 5), confirm).encode() + payload
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
    found = read_master(stream, cuts)
    assert found[0] == MasterHandshake(77, epochs)
    assert written_again(found) == stream


@given(
    st.lists(st.one_of(st.integers(0, 1 << 62), st.builds(SlaveHandshake, st.integers(0, 1 << 40))), max_size=6),
    st.data(),
)
def test_any_stream_of_a_slave_survives_any_cut(sent: list[int | SlaveHandshake], data: st.DataObject) -> None:
    stream = b"".join(encode_report(one) if isinstance(one, int) else one.encode() for one in sent)
    edges = [0, *sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8))), len(stream)]
    frames = SlaveFrames()
    found = [one for start, end in pairwise(edges) for one in frames.feed(stream[start:end])]
    assert found == sent


@pytest.mark.parametrize("state", [0, 3, 4, -1, 0x44524C4F])
def test_other_states_are_refused(state: int) -> None:
    data = state.to_bytes(4, "big", signed=True) + bytes(40)
    with pytest.raises(ReplicationError):
        list(SlaveFrames().feed(data))
    with pytest.raises(ReplicationError):
        list(MasterFrames().feed(memoryview(data)))


@pytest.mark.parametrize(
    "text",
    [
        "00000001 00000005 0000000000000000 00000001",  # not whole entries
        "00000001 7ffffffc 0000000000000000 00000001",
        "00000001 fffffff4 0000000000000000 00000001",
        "00000001 00000018 0000000000000000 00000001 00000002 0000000000000000 00000001 0000000000000005",
        "00000002 ffffffff 0000000000000000 00000001 0000000000000000 0000000000000000",
        "00000002 7fffffff 0000000000000000 00000001 0000000000000000 0000000000000000",
        "00000002 00000000 fffffffffffffffe 00000001 0000000000000000 0000000000000000",
    ],
)
def test_nonsense_of_a_master_is_refused(text: str) -> None:
    with pytest.raises(ReplicationError):
        list(MasterFrames().feed(memoryview(bytes.fromhex(text))))
