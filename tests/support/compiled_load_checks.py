"""Checks of the compiled reader of replies, on random input; see tests/property/test_compiled_load.py."""

from __future__ import annotations

from array import array
from random import Random
from typing import Any

import pytest

from downrange.compiled import steps
from downrange.load.outstanding import FIRST_OPAQUE
from downrange.load.replies import ReplyLayout, learn_layout, read_replies
from downrange.protocol.codes import SerializeType
from downrange.protocol.command import Command
from downrange.protocol.framing import decode_frame, encode

_SLOTS = 40


def _reply(random: Random, opaque: int, kind: SerializeType) -> bytes:
    fields = {"msgId": f"{random.getrandbits(128):032X}", "queueId": "1", "queueOffset": str(random.getrandbits(12))}
    code = 0 if random.random() < 0.95 else random.choice((1, 2, 14, 215))
    body = b"" if random.random() < 0.95 else random.randbytes(20)
    return encode(Command(code, opaque, 1, fields, body, serialize_type=int(kind)))


def _layout(random: Random, kind: SerializeType) -> ReplyLayout:
    if random.random() < 0.1:
        return ReplyLayout(random.random() < 0.5, random.randbytes(random.randrange(4)), random.randrange(200))
    frame = encode(Command(0, FIRST_OPAQUE, 1, {}, serialize_type=int(kind)))
    return learn_layout(frame, decode_frame((frame[4], frame[8:], b"")))


def _wire(random: Random, kind: SerializeType) -> bytes:
    strangers = (FIRST_OPAQUE - 1, FIRST_OPAQUE + _SLOTS, 7, 2**31 - 1, -1)
    wire = bytearray()
    for _ in range(random.randrange(30)):
        is_stranger = random.random() < 0.02
        opaque = random.choice(strangers) if is_stranger else FIRST_OPAQUE + random.randrange(_SLOTS)
        wire += _reply(random, opaque, kind)
    for _ in range(random.randrange(3) if wire else 0):
        wire[random.randrange(len(wire))] = random.randrange(256)
    return bytes(wire[: random.randrange(len(wire) + 1)] if random.random() < 0.3 else wire)


def same_replies_read(random: Random) -> None:
    """Also of damaged replies, of unknown and repeated ones, from any place on."""
    kind = random.choice(list(SerializeType))
    layout, wire = _layout(random, kind), _wire(random, kind)
    at = random.randrange(len(wire) + 1) if random.random() < 0.1 else 0
    ours = array("q", random.choices((0, 1, 2, 2**62), (1, 9, 9, 1), k=_SLOTS))
    compiled = ours[:]
    expected = read_replies(*layout, FIRST_OPAQUE, ours, wire, at)
    assert steps.read_replies(*layout, FIRST_OPAQUE, compiled, wire, at) == expected
    assert compiled == ours


def refuses_nonsense_about_replies(random: Random) -> None:
    frame = encode(Command(0, FIRST_OPAQUE, 1, {}))
    right: list[Any] = [True, b'{"code":0,', 10, FIRST_OPAQUE, array("q", [1] * 3), frame, 0]
    wrong = random.choice((None, "text", 1.5, [], (), object(), memoryview(b"\0" * 8), -1, 2**40))
    right[random.choice((0, 2, 4, 5, 6))] = wrong
    with pytest.raises((TypeError, BufferError)):
        steps.read_replies(*right)
    with pytest.raises(TypeError):
        steps.read_replies(*right[: random.randrange(7)])
