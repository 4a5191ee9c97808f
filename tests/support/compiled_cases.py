"""Inputs for the compiled twins: what clients write, and the same with something wrong in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

from downrange.model.message_id import pack_host
from downrange.protocol.bodies.fields import encode_fields
from downrange.protocol.bodies.send import SendMessageRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command
from downrange.protocol.framing import Frame, FrameDecoder, encode
from downrange.store.queues import PlainMessage, QueueState
from tests.support.golden import scenarios

HOSTS = (pack_host("10.1.2.3", 50000), pack_host("10.9.8.7", 10911), pack_host("fe80::1", 10911))
_WORDS = ("", "a", "TagA", "ß", "\u4e2d\u6587", "\U0001f600", "two words", " ", '"', "\\", "/", "\t", "\x7f", "x" * 300)
_NAMES = ("TAGS", "KEYS", "UNIQ_KEY", "WAIT", "MYKEYS", "TAGSX", "")
_NUMBERS = (0, 1, 9, 10, -1, 2**31 - 1, -(2**31), 123456789) * 4 + (2**31, -(2**31) - 1)
# Pieces that mean something to a parser of headers.
_PIECES = (
    b'"', b"\\", b"{", b"}", b",", b":", b"\\u0001", b"\\u00e9", b"\\u00c3\\u00a9", b"\\ud83d", b"\\ud83d\\ude00",
    b"\\x", b"-", b"0", b"00", b"1e5", b"1.0", b" ", b"null", b"true", b'"b":"again"', b'"m":"true"', b'"e":0',
    b'"opaque":1', b'"flag":2', b"\0", b"\0\1e", b"\0\0\0\1", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\xc3",
    b"\xed\xa0\x80", b"9999999999999999999",
)  # fmt: skip


def text(random: Random) -> str:
    """Properties: usual names and odd ones, in any order and number, ended or not."""
    parts = [f"{random.choice(_NAMES)}\x01{random.choice(_WORDS)}" for _ in range(random.randrange(6))]
    if random.random() < 0.7:
        parts.append(f"UNIQ_KEY\x017F0000011A2B18B4AAC20000{random.getrandbits(32):08X}")
    random.shuffle(parts)
    return "\x02".join(parts) + random.choice(("", "\x02", "\x02\x02", "\x01"))


def frame(random: Random) -> Frame:
    """A send as a client writes it, with one of the two headers."""
    fields = encode_fields(
        SendMessageRequest(
            producer_group=random.choice(("group", "G" * 40) * 5 + ("gr\u00fcn",)),
            topic=random.choice(("TopicA", "a", "%RETRY%g", "T\u00f6pic", 'quo"te')),
            queue_id=random.choice(_NUMBERS),
            sys_flag=random.choice(_NUMBERS),
            born_timestamp=random.choice((1_790_000_000_000, 0, -5) * 4 + (2**62,)),
            flag=random.choice(_NUMBERS),
            properties=text(random),
            reconsume_times=random.choice(_NUMBERS),
            unit_mode=random.random() < 0.1,
            batch=random.random() < 0.1,
            max_reconsume_times=random.choice((None, 16)),
            bname=random.choice((None, "broker-a")),
        )
    )
    if random.random() < 0.2:
        fields |= {"AccessKey": "user", random.choice(("Signature", "N\u00e4me", "z", "")): random.choice(_WORDS)}
    for letter in random.sample(sorted(fields), random.choice((0,) * 8 + (1, 3))):
        if random.random() < 0.5:
            del fields[letter]
        else:
            fields[letter] = random.choice(("", "0", "-0", "007", "+1", "1 ", "True", "1", "null", "x", "5" * 19))
    command = Command(
        random.choice((RequestCode.SEND_MESSAGE_V2,) * 9 + (RequestCode.PULL_MESSAGE,)),
        random.choice((0, 7, -1, 2**31 - 1, -(2**31))),
        random.choice((0, 2)),
        fields,
        random.randbytes(random.choice((0, 1, 7, 8, 9, 128, 1000))),
        serialize_type=random.randrange(2),
    )
    (made,) = FrameDecoder().frames(encode(command))
    return made


def broken(random: Random, whole: Frame) -> Frame:
    """The frame with its header changed in a few places."""
    kind, header, body = whole
    changed = bytearray(header)
    for _ in range(random.randrange(1, 4)):
        at = random.randrange(len(changed) + 1)
        match random.randrange(5):
            case 0:
                changed[at : at + 1] = random.randbytes(1)
            case 1:
                del changed[at : at + random.randrange(1, 20)]
            case 2:
                changed[at:at] = random.choice(_PIECES)
            case 3:
                piece = random.choice(_PIECES)
                changed[at : at + len(piece)] = piece
            case _:
                changed[at:at] = changed[at : at + random.randrange(30)]
    return kind, bytes(changed), body


def golden_sends() -> Iterator[Frame]:
    """Every captured send, as genuine clients wrote it."""
    for rows in scenarios().values():
        for row in rows:
            if row.code == RequestCode.SEND_MESSAGE_V2 and not row.is_response:
                yield from FrameDecoder().frames(row.frame)


def message(random: Random, state: QueueState) -> PlainMessage:
    properties = text(random)
    return (
        state,
        random.randbytes(random.choice((0, 1, 7, 8, 9, 128, 600))),
        properties.encode(),
        properties,
        random.choice((1_790_000_000_000, 0, -5, 2**62)),
        random.choice((0, 5, -(2**31), 2**31 - 1)),
        random.choice((0, 1, 48, 2**31 - 1)),
        random.choice((0, 3)),
    )


def files_of(root: Path) -> dict[str, bytes]:
    """The messages, queues and keys of a store as they lie on disk."""
    found = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
    return {
        name: path.read_bytes()
        for name, path in sorted(found.items())
        if name.startswith(("commitlog", "consumequeue", "index"))
    }
