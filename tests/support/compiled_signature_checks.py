"""Checks that the compiled step lets exactly those requests pass that Python would: signed well, and known."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from downrange import _steps
from downrange.auth.signed_requests import allowed_key
from downrange.protocol.command import Command
from downrange.protocol.errors import RemoteProtocolError
from downrange.protocol.framing import Frame, FrameDecoder, decode_frame, encode
from downrange.protocol.signing import ACCESS_KEY, SIGNATURE, Signer, signature
from tests.support import compiled_cases as cases

SECRETS = {"short": "s3", "one-account": "secret-of-one", "long": "x" * 65, "block": "y" * 64, "ünï": "gehéim"}


@dataclass
class From:
    """An origin as the step knows it."""

    peer_host: bytes


def same_signatures(random: Random) -> None:
    """Frames, signed and spoiled in all ways: the step stops at the first that Python would not let pass."""
    origins = [From(random.choice([b"\x7f\0\0\x01", b"\x0a\0\0\x07", b"\xfe" * 16]) + bytes(4)) for _ in range(12)]
    frames = [_frame(random) for _ in origins]
    allowed: set[bytes] = set()
    for frame, origin in zip(frames, origins, strict=True):
        key = _passing_key(frame, origin)
        if key is not None and random.random() < 0.9:
            allowed.add(key)
    keys = {name.encode(): _steps.hmac_states(secret.encode()) for name, secret in SECRETS.items()}
    at = random.randrange(len(frames))
    stop = random.randrange(at, len(frames) + 1)
    found = _steps.first_not_allowed(frames, list(origins), at, stop, keys, allowed)
    assert at <= found <= stop
    for n in range(at, found):  # nothing passes that Python refuses
        assert _passing_key(frames[n], origins[n]) in allowed, f"{n}: {frames[n]!r}"
    if found < stop and _is_usual(frames[found]):  # usual requests that Python lets pass do pass
        assert _passing_key(frames[found], origins[found]) not in allowed, f"{found}: {frames[found]!r}"


def same_states(random: Random) -> None:
    """A request with any body, signed with any secret."""
    secret = random.randbytes(random.choice([0, 1, 19, 63, 64, 65, 200]))
    body = random.randbytes(random.choice([0, 1, 54, 55, 56, 63, 64, 119, 120, 1000]))
    fields = {"topic": "t", "consumerGroup": "g" * random.randrange(1, 70), ACCESS_KEY: "k"}
    text = signature(fields, body, secret)
    assert hmac.new(secret, b"k" + fields["consumerGroup"].encode() + b"t" + body, hashlib.sha1).digest()
    command = Command(11, raw_ext={**fields, SIGNATURE: text}, body=body)
    (frame,) = FrameDecoder().frames(encode(command, 1))
    key = allowed_key("k", command, bytes(8))
    assert key is not None
    assert _steps.first_not_allowed([frame], [From(bytes(8))], 0, 1, {b"k": _steps.hmac_states(secret)}, {key}) == 1


def refuses_nonsense_about_signatures(random: Random) -> None:
    """Wrong arguments raise TypeError; frames that are none are left to Python."""
    frame = _frame(random)
    wrong: tuple[tuple[Any, ...], ...] = (
        ((frame,), [From(bytes(8))], 0, 1, {}, set()),
        ([frame], [], 0, 1, {}, set()),
        ([frame], [From(bytes(8))], 0, 2, {}, set()),
        ([frame], [From(bytes(8))], 1, 0, {}, set()),
        ([frame], [From(bytes(8))], 0, 1, [], set()),
        ([frame], [From(bytes(8))], 0, 1, {}, []),
    )
    for arguments in wrong:
        with pytest.raises(TypeError):
            _steps.first_not_allowed(*arguments)
    for odd in (None, (), (0, b""), (0, "text", b""), (7, b"{}", b""), (0, b"{}", None)):
        assert _steps.first_not_allowed([odd], [From(bytes(8))], 0, 1, {}, set()) == 0  # type: ignore[list-item]


def _frame(random: Random) -> Frame:
    if random.random() < 0.3:
        frame = cases.send(random)
    else:
        text = random.choice(["t", "TopicTest", "tüv", "a\\b", 'q"', "x\u0001y"])
        fields = {"topic": text, "b": random.choice([text, "other"]), "consumerGroup": "group", "i": "TAGS\1a\2K\1b"}
        code = random.choice([10, 11, 310, 320, 361, 12])
        flag, kind, body = random.choice([0, 0, 0, 1, 2]), random.randrange(2), random.randbytes(random.randrange(200))
        command = Command(code, raw_ext=fields, body=body, flag=flag, serialize_type=kind)
        (frame,) = FrameDecoder().frames(encode(command, 7))
    try:
        command = decode_frame(frame)
        name = random.choice(list(SECRETS))
        signed = Signer(name, SECRETS[name] if random.random() < 0.9 else "wrong").sign(command)
        (frame,) = FrameDecoder().frames(encode(signed, 7))
    except RemoteProtocolError:
        return frame
    return cases.broken(random, frame) if random.random() < 0.1 else frame


def _passing_key(frame: Frame, origin: From) -> bytes | None:
    try:
        command = decode_frame(frame)
        fields = command.ext_fields
    except RemoteProtocolError:
        return None
    account = fields.get(ACCESS_KEY, "")
    secret = SECRETS.get(account)
    if secret is None or command.is_response:
        return None
    if signature(fields, command.body_bytes, secret.encode()) != fields.get(SIGNATURE):
        return None
    return allowed_key(account, command, origin.peer_host)


def _is_usual(frame: Frame) -> bool:
    """Whether a frame is one that clients write: all of its texts are plain, and no name comes twice."""
    kind, header, _ = frame
    if kind == 1:
        return header[21:].isascii() and header[13:17] == bytes(4) and int.from_bytes(header[17:21]) == len(header) - 21
    return header.startswith(b'{"code":') and b"\\" not in header and header.isascii()
