"""Frames are cut into runs of one family; each run passes admission; what is admitted reaches its family in order."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from random import Random
from typing import cast

import pytest

from downrange.auth.gate import Refusal
from downrange.broker import request_path
from downrange.broker.admission import Admission
from downrange.broker.request_path import RequestPath
from downrange.protocol.codes import ResponseCode
from downrange.protocol.command import ONEWAY_FLAG, Command
from downrange.protocol.errors import SystemBusy
from downrange.protocol.framing import Frame, FrameDecoder, decode_frame, encode
from downrange.transport.connection import Connection
from tests.unit.broker.wired import FakeConnection

BROKEN: Frame = (1, b"\0", b"")


class Family:
    """Keeps the opaques of the requests it takes, run by run; those in `fills` fill their connection."""

    def __init__(self, *codes: int) -> None:
        self.codes = frozenset(codes)
        self.runs: list[list[int]] = []
        self.fills: set[int] = set()

    def take(self, frames: list[Frame], origins: list[Connection], at: int, stop: int) -> None:
        self.runs.append([])
        for number in range(at, stop):
            if origins[number].is_full:
                origins[number].defer(frames[number])
                continue
            opaque = decode_frame(frames[number]).opaque
            self.runs[-1].append(opaque)
            if opaque in self.fills:
                origins[number].is_full = True

    @property
    def taken(self) -> list[int]:
        return [opaque for run in self.runs for opaque in run]


class Door:
    """Refuses some opaques."""

    def __init__(self) -> None:
        self.refused: set[int] = set()

    def admitted(
        self, frames: list[Frame], origins: list[Connection], at: int, stop: int
    ) -> tuple[int, Refusal | None]:
        for number in range(at, stop):
            if decode_frame(frames[number]).opaque in self.refused:
                return number, Refusal(SystemBusy("closed"))
        return stop, None


class Parts:
    def __init__(self) -> None:
        self.door, self.commands, self.sends, self.pulls = Door(), Family(), Family(10, 310), Family(11)
        self.path = RequestPath(cast(Admission, self.door), self.commands, self.sends, self.pulls)
        self.near, self.far = FakeConnection(), FakeConnection()

    def serve(self, *codes: int, flag: int = 0) -> None:
        """Requests with these codes and growing opaques, alternately over both connections."""
        frames = [frame_of(code, number, flag) for number, code in enumerate(codes)]
        self.path.serve(frames, [(self.near, self.far)[number % 2] for number in range(len(frames))])


def frame_of(code: int, opaque: int, flag: int = 0) -> Frame:
    (frame,) = FrameDecoder().frames(encode(Command(code, opaque, flag)))
    return frame


@pytest.fixture
async def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    monkeypatch.setattr(request_path, "thread_time", lambda: 0.0)
    return Parts()


async def test_requests_that_follow_each_other_are_taken_together_by_their_family(parts: Parts) -> None:
    parts.serve(310, 10, 310, 11, 11, 34, 35, 310, 99999, -1)
    assert parts.sends.runs == [[0, 1, 2], [7]]
    assert parts.pulls.runs == [[3, 4]]
    assert parts.commands.runs == [[5], [6], [8], [9]], "codes without a family, known or not, one by one"


async def test_a_request_that_is_refused_is_answered_between_the_others(parts: Parts) -> None:
    parts.door.refused = {0, 2, 3, 5}
    parts.serve(310, 310, 310, 11, 11, 34)
    assert (parts.sends.runs, parts.pulls.runs, parts.commands.runs) == ([[1]], [[4]], [])
    refused = [*parts.near.replies(), *parts.far.replies()]
    assert [(reply.opaque, reply.code, reply.remark) for reply in refused] == [
        (opaque, ResponseCode.SYSTEM_BUSY, "closed") for opaque in (0, 2, 3, 5)
    ]


@pytest.mark.parametrize("flag", [1, ONEWAY_FLAG, 3])
async def test_replies_and_oneway_requests_are_refused_silently(parts: Parts, flag: int) -> None:
    parts.door.refused = {0, 1, 2}
    parts.serve(310, 11, 34, flag=flag)
    assert parts.near.replies() == parts.far.replies() == []
    assert parts.sends.taken == parts.pulls.taken == parts.commands.taken == []


async def test_a_header_that_cannot_be_read_closes_its_own_connection_and_what_came_behind_it_is_left_out(
    parts: Parts,
) -> None:
    near, far = parts.near, parts.far
    frames = [frame_of(310, 0), BROKEN, frame_of(310, 2), frame_of(310, 3), frame_of(34, 4), frame_of(34, 5)]
    parts.path.serve(frames, [near, near, far, near, far, near])
    assert (near.transport.is_aborted, far.transport.is_aborted) == (True, False)
    assert (parts.sends.runs, parts.commands.runs) == ([[0], [2]], [[4]])


async def test_what_follows_over_a_connection_that_is_full_is_deferred(parts: Parts) -> None:
    parts.pulls.fills = {0}
    parts.serve(11, 11, 310, 310, 34, 34)
    assert (parts.pulls.taken, parts.sends.taken, parts.commands.taken) == ([0, 1], [3], [5])
    assert [decode_frame(frame).opaque for frame in parts.near._deferred] == [2, 4]


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_comes_each_request_is_taken_or_refused_once_and_in_order(parts: Parts, seed: int) -> None:
    random = Random(seed)
    codes = random.choices([310, 10, 11, 34, 0], k=100)
    parts.door.refused = set(random.sample(range(100), 20))
    parts.serve(*codes)
    for family in (parts.sends, parts.pulls, parts.commands):
        assert family.taken == sorted(family.taken)
        assert all(codes[opaque] in family.codes for opaque in family.taken if family.codes)
    taken = {*parts.sends.taken, *parts.pulls.taken, *parts.commands.taken}
    answered = [reply.opaque for one in (parts.near, parts.far) for reply in one.replies()]
    assert set(answered) == parts.door.refused
    assert taken == set(range(100)) - parts.door.refused
    assert len(answered) == 20


class SlowClock:
    """Time goes on by a part of a slice whenever somebody asks for it."""

    def __init__(self, step: float = request_path.SLICE_SECONDS * 0.4) -> None:
        self.now = 0.0
        self._step = step

    def __call__(self) -> float:
        self.now += self._step
        return self.now


async def test_a_peer_with_many_requests_does_not_keep_others_waiting(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_path, "thread_time", SlowClock())
    monkeypatch.setattr(Connection, "_serve", lambda self, frames: parts.path.serve(frames, [self] * len(frames)))
    frames = [frame_of(34, opaque) for opaque in range(22)]
    parts.path.serve(frames, [*[parts.near] * 20, *[parts.far] * 2])
    assert parts.commands.taken == [0, 1, 2, 3, 20, 21], "a slice of the first connection, then the other one"
    parts.path.serve([frame_of(34, 100)], [parts.far])
    assert parts.commands.taken[-1] == 100
    while len(parts.commands.taken) < 23:
        await asyncio.sleep(0)
    taken = parts.commands.taken
    assert [opaque for opaque in taken if opaque < 20] == list(range(20)), "the order of a connection is kept"
    assert not parts.near.is_full


async def test_each_connection_has_its_first_request_served_however_many_came_before_it(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_path, "thread_time", SlowClock(request_path.TURN_SECONDS))
    origins = [FakeConnection() for _ in range(10)]
    frames = [frame_of(34, opaque) for opaque in range(20)]
    parts.path.serve(frames, [origins[number // 2] for number in range(20)])
    assert parts.commands.taken == [0, 1, *range(2, 20, 2)], "the rest has to wait: the turn is over"


async def test_connections_that_wait_go_on_by_turns(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_path, "thread_time", SlowClock())
    monkeypatch.setattr(Connection, "_serve", lambda self, frames: parts.path.serve(frames, [self] * len(frames)))
    frames = [frame_of(34, opaque) for opaque in range(40)]
    parts.path.serve(frames, [*[parts.near] * 20, *[parts.far] * 20])
    while len(parts.commands.taken) < 40:
        await asyncio.sleep(0)
    owners = ["near" if opaque < 20 else "far" for opaque in parts.commands.taken]
    changes = sum(one != other for one, other in pairwise(owners))
    assert changes > 5
    assert sorted(parts.commands.taken) == list(range(40))
