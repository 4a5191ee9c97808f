"""Pops and acknowledgements straight from and to frames: what nearly all clients write, in one step each.

The headers of POP requests are JSON: their codes do not fit a binary header. `cut_pops` and `read_pop` read the headers
of 200050 without the `Command` that any other header takes, `read_acks` reads a run of 200051 or of 200151.
`found_head` and `done` write the bytes that `encode(command.reply(…))` would.
"""

from __future__ import annotations

from typing import Final, cast

import msgspec

from downrange.compiled import accelerated
from downrange.protocol import header_json
from downrange.protocol.bodies.body import BodyError, decode_body
from downrange.protocol.bodies.fields import Int32, encode_fields
from downrange.protocol.bodies.pop import (
    AckMessageRequest,
    BatchAckMessageBody,
    HandleError,
    PopMessageRequest,
    PopMessageResponse,
    ReceiptHandle,
    decode_bits,
)
from downrange.protocol.codes import RequestCode, SerializeType
from downrange.protocol.command import RESPONSE_FLAG, Command
from downrange.protocol.framing import PREFIX, Frame, encode, with_prefix

_JSON: Final = int(SerializeType.JSON)
_POP: Final = int(RequestCode.POP_MESSAGE)
_ACK: Final = int(RequestCode.ACK_MESSAGE)
_BATCH: Final = int(RequestCode.BATCH_ACK_MESSAGE)
_POP_START: Final = b'{"code":%d,' % _POP
_ACK_START: Final = b'{"code":%d,' % _ACK
_BATCH_START: Final = b'{"code":%d,' % _BATCH
_OPAQUE: Final = b'"opaque":'
_BORN: Final = b'"bornTime":"'
_MARK: Final = 7

# --- pops -------------------------------------------------------------------------------------------------------------

# Between two pops of one consumer only two numbers change. The text around them is read once and remembered by callers.


@accelerated
def cut_pops(frames: list[Frame], at: int, stop: int) -> tuple[int, bytes, list[int], list[int]]:
    """Cut the headers of pops from `frames[at]` on, up to `stop` or the first that asks for something else.

    Return the position of the first that was not cut, the text without bornTime and opaque that all of them share, and
    the opaque and the time (0: it has none) of each. A header that is written in an unusual way is not cut.
    """
    shared = b""
    opaques: list[int] = []
    borns: list[int] = []
    while at < stop:
        kind, header, _ = frames[at]
        cut = _cut_pop(header) if kind == _JSON else None
        if cut is None or (opaques and cut[0] != shared):
            break
        shared, opaque, born = cut
        opaques.append(opaque)
        borns.append(born)
        at += 1
    return at, shared, opaques, borns


def _cut_pop(header: bytes) -> tuple[bytes, int, int] | None:
    if not header.startswith(_POP_START):
        return None
    born_at = born_end = header.find(_BORN) + len(_BORN)
    if born_at < len(_BORN):
        born_at = born_end = 0
        born = b"0"
    else:
        born_end = header.find(b'"', born_at)
        born = header[born_at:born_end]
    opaque_at = header.find(_OPAQUE, born_end) + len(_OPAQUE)
    opaque_end = header.find(b",", opaque_at)
    opaque = header[opaque_at:opaque_end]
    if opaque_at < len(_OPAQUE) or opaque_end < 0 or not (_is_number(opaque, 9) and _is_number(born, 18)):
        return None
    return header[:born_at] + header[born_end:opaque_at] + header[opaque_end:], int(opaque), int(born)


def _is_number(digits: bytes, most: int) -> bool:
    return digits.isdigit() and len(digits) <= most


class _JsonPop(msgspec.Struct, gc=False, rename={"ext": "extFields"}):
    """What a JSON header says of a pop."""

    ext: PopMessageRequest
    code: Int32
    opaque: Int32 = 0
    flag: Int32 = 0


_decode_pop = msgspec.json.Decoder(_JsonPop, strict=False).decode


def read_pop(text: bytes) -> PopMessageRequest | None:
    """The request that `cut_pops` has cut, with any bornTime; None when the text cannot be read as it was cut."""
    has_born = _BORN + b'"' in text
    if text.count(_OPAQUE) != 1 or text.count(b'"bornTime"') != has_born:
        return None
    marked = text.replace(_OPAQUE, b"%b%d" % (_OPAQUE, _MARK)).replace(_BORN, b"%b%d" % (_BORN, _MARK))
    try:
        pop = _decode_pop(marked)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    is_cut_right = pop.opaque == _MARK and pop.ext.born_time == (_MARK if has_born else 0)
    return pop.ext if is_cut_right and pop.code == _POP and pop.flag == 0 else None


def _template(command: Command, marks: tuple[str | int, ...]) -> bytes:
    """The header of a reply with a place for each of these values, in the order of the header."""
    text = encode(command)[PREFIX.size :]
    assert b"%" not in text
    for mark in marks:
        value = str(mark).encode()
        assert text.count(value) == 1
        text = text.replace(value, b"%b" if isinstance(mark, str) else b"%d")
    return text


_NUMBERS: Final = (1_000_000_001, 1_000_000_002, 1_000_000_003, 1_000_000_004)
_TEXTS: Final = ("starts", "offsets")
_OPAQUE_MARK: Final = 1_000_000_005
_FOUND: Final = _template(
    Command(
        0,
        _OPAQUE_MARK,
        RESPONSE_FLAG,
        encode_fields(
            PopMessageResponse(
                pop_time=_NUMBERS[0],
                invisible_time=_NUMBERS[1],
                revive_qid=_NUMBERS[2],
                rest_num=_NUMBERS[3],
                start_offset_info=_TEXTS[0],
                msg_offset_info=_TEXTS[1],
            )
        ),
        remark="FOUND",
    ),
    (*_NUMBERS, *_TEXTS, _OPAQUE_MARK),
)
FOUND_PIECES: Final = tuple(_FOUND.replace(b"%b", b"%d").split(b"%d"))
"""What stands around the values in the header of a reply with messages: four numbers, two texts, and the opaque."""


def found_head(
    numbers: tuple[int, int, int, int], starts: bytes, offsets: bytes, opaque: int, body_length: int
) -> bytes:
    """The answer to a pop that has found messages, up to its body.

    The numbers are pop time, invisible time, revive queue, rest; the texts are startOffsetInfo and msgOffsetInfo.
    """
    return with_prefix(_JSON, _FOUND % (*numbers, starts, offsets, opaque), body_length)


# --- acknowledgements -------------------------------------------------------------------------------------------------

_DONE: Final = _template(Command(0, _OPAQUE_MARK, RESPONSE_FLAG), (_OPAQUE_MARK,))
DONE_PIECES: Final = tuple(_DONE.split(b"%d"))
"""What stands around the opaque in the header of a reply that says nothing but yes."""

AckGroup = tuple[str, str, int, int, int, int, int, int]
"""Acknowledged messages of one lease: topic, group, queue, start offset, pop time, invisible time, revive queue, and
their bits: bit n for the offset `start + n`."""
# A bit set of the compiled step is a number of 64 bits, one of which is a sign.
_MOST_BITS: Final = 63


def done(opaque: int) -> bytes:
    """The frame of a reply that says nothing but yes."""
    return with_prefix(_JSON, _DONE % opaque, 0)


@accelerated
def read_acks(
    frames: list[Frame], at: int, stop: int, pieces: tuple[bytes, ...]
) -> tuple[int, int, list[AckGroup], bytes]:
    """Read acknowledgements (200051, or 200151) from `frames[at]` on, up to `stop` or the first that is unusual.

    Return the position of the first that was not read, the code of those that were, the messages by lease, and the
    replies that say yes to all of them, made with `DONE_PIECES`. Batches of retry topics are unusual.
    """
    groups: dict[tuple[str, str, int, int, int, int, int], int] = {}
    replies = []
    known = 0
    while at < stop:
        found = _read_ack(frames[at])
        if found is None or (known and found[0] != known):
            break
        known, opaque, acks = found
        for *key, bits in acks:
            lease = cast("tuple[str, str, int, int, int, int, int]", tuple(key))
            groups[lease] = groups.get(lease, 0) | bits
        replies.append(done(opaque))
        at += 1
    return at, known, [(*key, bits) for key, bits in groups.items()], b"".join(replies)


class _JsonAck(msgspec.Struct, gc=False, rename={"ext": "extFields"}):
    """What a JSON header says of an acknowledgement."""

    code: Int32
    opaque: Int32 = 0
    flag: Int32 = 0
    ext: msgspec.Raw = header_json.NO_EXT


_decode_ack = msgspec.json.Decoder(_JsonAck, strict=False).decode
_decode_fields = msgspec.json.Decoder(AckMessageRequest, strict=False).decode


def _read_ack(frame: Frame) -> tuple[int, int, list[AckGroup]] | None:
    """Code and opaque of a request, and the messages that it acknowledges."""
    kind, header, body = frame
    if kind != _JSON or not header.startswith((_ACK_START, _BATCH_START)):
        return None
    try:
        ack = _decode_ack(header)
        if ack.flag or ack.code not in (_ACK, _BATCH):
            return None
        found = _single(_decode_fields(ack.ext)) if ack.code == _ACK else _batch(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, HandleError, BodyError):
        return None
    return None if not found else (ack.code, ack.opaque, found)


def _single(asked: AckMessageRequest) -> list[AckGroup]:
    handle = ReceiptHandle.parse(asked.extra_info)
    distance = asked.offset - handle.start_offset
    if not 0 <= distance < _MOST_BITS:
        return []
    return [
        (
            asked.topic, asked.consumer_group, asked.queue_id, handle.start_offset, handle.pop_time,
            handle.invisible_time, handle.revive_queue, 1 << distance,
        )
    ]  # fmt: skip


def _batch(body: bytes) -> list[AckGroup]:
    """What a batch acknowledges; nothing when an entry is unusual."""
    found: list[AckGroup] = []
    for ack in decode_body(BatchAckMessageBody, body).acks:
        bits = decode_bits(ack.bits)
        if ack.retry != "0" or not 0 < bits < 1 << _MOST_BITS:
            return []
        found.append(
            (
                ack.topic, ack.consumer_group, ack.queue_id, ack.start_offset, ack.pop_time, ack.invisible_time,
                ack.revive_queue_id, bits,
            )
        )  # fmt: skip
    return found
