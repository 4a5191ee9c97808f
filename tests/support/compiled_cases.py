"""Inputs for the compiled twins: what clients write, and the same with something wrong in it."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from downrange.model.message_id import pack_host
from downrange.protocol.bodies.fields import encode_fields
from downrange.protocol.bodies.send import _V1_NAMES as V1_NAMES
from downrange.protocol.bodies.send import BatchEntry, SendMessageRequest, encode_batch
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command
from downrange.protocol.framing import Frame, FrameDecoder, encode
from downrange.store.log.commit_log import topic_field
from downrange.store.new_message import NewMessage
from tests.support.golden import scenarios

HOSTS = (pack_host("10.1.2.3", 50000), pack_host("10.9.8.7", 10911), pack_host("fe80::1", 10911))
_WORDS = (
    "",
    "a",
    "true",
    "false",
    "2",
    "TagA",
    "ß",
    "\u4e2d\u6587",
    "\U0001f600",
    "two words",
    " ",
    '"',
    "\\",
    "/",
    "\t",
    "\x7f",
    "x" * 300,
)
_NAMES = ("TAGS", "KEYS", "UNIQ_KEY", "WAIT", "AWAIT", "MYKEYS", "TAGSX", "DELAY", "TRAN_MSG", "TIMER_DELIVER_MS", "")
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


def send(random: Random, unusual: float = 0.1) -> Frame:
    """A send as a client writes it: with one of the two headers, one message or a batch, V2 names or V1."""
    (made,) = FrameDecoder().frames(wire(random, unusual))
    return made


def wire(random: Random, unusual: float = 0.1) -> bytes:
    """Its bytes. So many of the values are such that few clients would send them."""

    def value(*usual: Any, odd: tuple[Any, ...]) -> Any:
        return random.choice(odd if random.random() < unusual else usual)

    code = random.choice(
        (RequestCode.SEND_MESSAGE_V2,) * 3 + (RequestCode.SEND_BATCH_MESSAGE, RequestCode.SEND_MESSAGE)
    )
    batch = code == RequestCode.SEND_BATCH_MESSAGE or random.random() < 0.2
    request = SendMessageRequest(
        producer_group=value("group", "G" * 40, odd=("gr\u00fcn",)),
        topic=value("TopicA", "T\u00f6pic", odd=("a", "%RETRY%g", "Many", "Unknown", 'quo"te')),
        queue_id=value(0, 1, odd=_NUMBERS),
        sys_flag=value(0, 1, 2, odd=_NUMBERS),
        born_timestamp=value(1_790_000_000_000, odd=(0, -5, 2**62)),
        flag=value(0, 5, odd=_NUMBERS),
        properties=text(random) if random.random() < unusual else _usual_text(random),
        reconsume_times=value(0, 3, odd=_NUMBERS),
        unit_mode=random.random() < 0.1,
        batch=batch,
        max_reconsume_times=random.choice((None, 16)),
        bname=random.choice((None, "broker-a")),
    )
    fields = encode_fields(request)
    if random.random() < 0.2:
        fields |= {"AccessKey": "user", value("Signature", odd=("N\u00e4me", "z", "")): value("x", odd=_WORDS)}
    for letter in random.sample(sorted(fields), value(0, odd=(0, 1, 3))):
        if random.random() < 0.5:
            del fields[letter]
        else:
            fields[letter] = random.choice(("", "0", "-0", "007", "+1", "1 ", "True", "1", "null", "x", "5" * 19))
    if code == RequestCode.SEND_MESSAGE:
        fields = {V1_NAMES.get(name, name): field for name, field in fields.items()}
    body = random.randbytes(random.choice((0, 1, 7, 8, 9, 128, 400)))
    if batch and random.random() >= unusual / 10:
        body = encode_batch(batch_entry(random) for _ in range(value(1, 2, 5, odd=(0, 30))))
    return encode(
        Command(
            value(code, odd=(code, RequestCode.PULL_MESSAGE)),
            random.choice((0, 7, -1, 2**31 - 1, -(2**31))),
            value(0, 2, odd=(1, 3)),
            fields,
            body,
            serialize_type=random.randrange(2),
        )
    )


def _usual_text(random: Random) -> str:
    wait = random.choice(("true", "true", "false"))
    unique_key = f"UNIQ_KEY\x017F0000011A2B18B4AAC20000{random.getrandbits(32):08X}"
    pairs = [unique_key, f"WAIT\x01{wait}", "TAGS\x01Tag\u00c4"]
    random.shuffle(pairs)
    return "\x02".join(pairs[: random.randrange(4)]) + random.choice(("", "\x02"))


def batch_entry(random: Random) -> BatchEntry:
    body = random.randbytes(random.choice((0, 1, 8, 128)))
    return BatchEntry(random.choice((0, 5, -1)), body, text(random) if random.random() < 0.3 else _usual_text(random))


def sent_as(command: Command, header: SendMessageRequest, code: RequestCode) -> bytes:
    """The same send with V2 names."""
    return encode(
        Command(
            code, command.opaque, command.flag, encode_fields(header), command.body,
            serialize_type=command.serialize_type,
        )
    )  # fmt: skip


def broken_body(random: Random, whole: Frame) -> Frame:
    """The frame with its body changed in a few places: what matters to batches."""
    kind, header, body = whole
    return kind, header, broken(random, (kind, body, b""))[1]


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


def message(random: Random, topic: str, queue_id: int) -> NewMessage:
    """A message as the store may get it: most of them usual, some in no queue, some with a text that is no UTF-8."""
    properties = text(random).encode()
    if random.random() < 0.05:
        properties += b"\x02" + random.choice((b"TAGS\x01\xff", b"KEYS\x01\xc3", b"\xff", b"DELAY\x012"))
    return NewMessage(
        topic,
        queue_id,
        random.randbytes(random.choice((0, 1, 7, 8, 9, 128, 600))),
        properties,
        random.choice((1_790_000_000_000, 0, -5, 2**62)),
        random.choice(HOSTS),
        random.choice(HOSTS),
        flag=random.choice((0, 5, -(2**31), 2**31 - 1)),
        sys_flag=random.choice((0,) * 12 + (1, 4, 8, 12, 48)),
        reconsume_times=random.choice((0, 3)),
        prepared_transaction_offset=random.choice((0, 0, 77, 2**62)),
    )


def packed(topic: str, rows: Sequence[int]) -> bytes:
    """What `Destinations` has for a topic."""
    return struct.pack(f"=i{len(rows)}i", len(rows), *rows) + topic_field(topic)
