from __future__ import annotations

import contextlib
import random
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from downrange.protocol.codes import LanguageCode, SerializeType
from downrange.protocol.command import Command
from downrange.protocol.errors import RemoteProtocolError
from downrange.protocol.framing import MAX_FRAME, FrameDecoder, encode
from tests.support.golden import all_rows

int32 = st.integers(-(2**31), 2**31 - 1)
int16 = st.integers(-(2**15), 2**15 - 1)
# A binary header cannot tell an empty text from none, so texts are not empty here.
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)


@st.composite
def commands(draw: st.DrawFn) -> Command:
    kind = draw(st.sampled_from(SerializeType))
    return Command(
        code=draw(int16 if kind == SerializeType.ROCKETMQ else int32),
        opaque=draw(int32),
        flag=draw(int32),
        raw_ext=draw(st.none() | st.dictionaries(texts, texts, max_size=8)),
        body=draw(st.binary(max_size=300)),
        remark=draw(st.none() | texts),
        language=draw(st.sampled_from(LanguageCode)),
        version=draw(int16),
        serialize_type=kind,
    )


@given(command=commands(), tail=st.binary(max_size=3), data=st.data())
def test_a_frame_may_be_cut_anywhere(command: Command, tail: bytes, data: st.DataObject) -> None:
    wire = encode(command)
    cut = data.draw(st.integers(0, len(wire)))
    decoder = FrameDecoder()
    assert [*decoder.feed(wire[:cut]), *decoder.feed(wire[cut:] + tail)] == [command]
    assert decoder.error is None
    assert decoder.buffered == len(tail)


@given(sent=st.lists(commands(), max_size=6), sizes=st.lists(st.integers(1, 50), min_size=1))
def test_many_frames_in_pieces_of_any_size_come_out_in_order(sent: list[Command], sizes: list[int]) -> None:
    wire = b"".join(map(encode, sent))
    decoder = FrameDecoder()
    received = []
    at = turn = 0
    while at < len(wire):
        size = sizes[turn % len(sizes)]
        received += decoder.feed(wire[at : at + size])
        at += size
        turn += 1
    assert received == sent


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing(data: bytes) -> None:
    decoder = FrameDecoder()
    for command in decoder.feed(data):
        look_at(command)
    assert decoder.buffered <= len(data)


def look_at(command: Command) -> None:
    with contextlib.suppress(RemoteProtocolError):
        assert isinstance(dict(command.ext_fields), dict)


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_mutated_captured_frames_are_read_or_refused(seed: int) -> None:
    mutate_and_feed(random.Random(seed), rounds=20)


def test_three_hundred_thousand_mutated_frames() -> None:
    seed = time.time_ns()
    print("seed", seed)  # shown when the test fails
    mutate_and_feed(random.Random(seed), rounds=300_000)


FRAMES: list[bytes] = []


def mutate_and_feed(chance: random.Random, rounds: int) -> None:
    if not FRAMES:
        FRAMES.extend(row.frame for row in all_rows() if len(row.frame) < 2000)
    for _ in range(rounds):
        frame = bytearray(chance.choice(FRAMES))
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(frame)) if chance.random() < 0.7 else chance.randrange(min(40, len(frame)))
            match chance.randrange(4):
                case 0:
                    frame[at] = chance.randrange(256)
                case 1:
                    frame[at] ^= 1 << chance.randrange(8)
                case 2:
                    del frame[at : at + chance.randint(1, 8)]
                case _:
                    frame[at:at] = chance.randbytes(chance.randint(1, 8))
            if not frame:
                break
        decoder = FrameDecoder()
        for command in decoder.feed(bytes(frame)):
            look_at(command)
        assert decoder.buffered <= MAX_FRAME
