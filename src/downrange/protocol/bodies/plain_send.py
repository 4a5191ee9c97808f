"""The plain send, the most frequent request of all: its header is read, and its reply written, in one step each.

`parse_send` and `SendReply` do what `Command.header(SendMessageRequest)` and `Command.reply(header=…)` do, for request
310 (V2 names) only, without the objects in between. `parse_send` gives None for what only `Command.header` reads.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Protocol

from downrange.compiled import steps
from downrange.model.message_id import offset_message_id
from downrange.protocol import header_binary
from downrange.protocol.bodies.fields import FieldError, decode_fields, encode_fields
from downrange.protocol.bodies.plain_header import BINARY, JSON, PlainHeader
from downrange.protocol.bodies.send import SendMessageRequest, SendMessageResponse
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import ONEWAY_FLAG, RESPONSE_FLAG, Command
from downrange.protocol.errors import RemoteProtocolError
from downrange.protocol.framing import PREFIX, Frame, encode

SEND_HEADER: Final = PlainHeader(RequestCode.SEND_MESSAGE_V2, SendMessageRequest)

# Opaque, flag of the command, topic, queue id, sysFlag, born timestamp, flag of the message, properties, reconsume
# times. A plain tuple: an object would cost as much as reading the header.
PlainSend = tuple[int, int, str, int, int, int, int, str, int]
# The values of a send that its reply needs: serialize type, opaque, flag of the command, queue id, number of messages.
Sent = tuple[int, int, int, int, int]
# The place of a stored message: physical offset, size, queue offset.
Place = tuple[int, int, int]


class Stored(Protocol):
    """The stored messages of a run of sends, with their places."""

    @property
    def sends(self) -> Sequence[Sent]: ...
    @property
    def places(self) -> Sequence[Place]: ...


def parse_send(frame: Frame) -> PlainSend | None:
    """The values of a plain send; None when the frame is another request, or has to be read leniently, or is wrong."""
    kind, header, _ = frame
    if kind == JSON:
        send = SEND_HEADER.read_json(header)
    elif kind == BINARY and header.startswith(SEND_HEADER.binary_start):
        usual = _parse_usual(header)
        if usual is not None:
            return usual
        send = SEND_HEADER.read_binary(header)
    else:
        return None
    if send is None or send.ext.batch:
        return None
    ext = send.ext
    return (
        send.opaque,
        send.flag,
        ext.topic,
        ext.queue_id,
        ext.sys_flag,
        ext.born_timestamp,
        ext.flag,
        ext.properties,
        ext.reconsume_times,
    )


# The binary header of a send as every client writes it: fixed part, then the fields in the order of their letters.
# Fields before `e` and after `i` rarely change from message to message, so they are read once and remembered. Between
# them only the queue id may vary in length, as long as sysFlag and flag have one digit and the time has thirteen.
_FIXED: Final = struct.Struct(">hbhiiii")  # code, language, version, opaque, flag, remark length, ext length
_FIXED_SIZE: Final = _FIXED.size
_QUEUE_ID_KEY: Final = b"\0\1e\0\0\0"
_MIDDLE: Final = struct.Struct(">7s1s7s13s7s1s3sI")  # f, g, h, and the length of i
_SYS_FLAG_KEY: Final = b"\0\1f\0\0\0\1"
_BORN_KEY: Final = b"\0\1g\0\0\0\r"
_FLAG_KEY: Final = b"\0\1h\0\0\0\1"
_PROPERTIES_KEY: Final = b"\0\1i"


def _parse_usual(header: bytes) -> PlainSend | None:
    """Read a header in the usual order and length of fields; four times as fast as reading any header."""
    try:
        _, _, _, opaque, flag, remark_length, ext_length = _FIXED.unpack_from(header)
        queue_id_at = header.find(_QUEUE_ID_KEY, _FIXED_SIZE)
        topic = _topic_of(header[_FIXED_SIZE:queue_id_at])
        middle_at = queue_id_at + 7 + header[queue_id_at + 6]
        queue_id = header[queue_id_at + 7 : middle_at]
        f_key, sys_flag, g_key, born, h_key, message_flag, i_key, length = _MIDDLE.unpack_from(header, middle_at)
        properties_at = middle_at + 43
        properties = header[properties_at : properties_at + length]
        reconsume_times = _reconsume_times_of(header[properties_at + length :])
    except (struct.error, IndexError):
        return None
    if (
        topic is None
        or reconsume_times is None
        or remark_length
        or ext_length != len(header) - _FIXED_SIZE
        or f_key != _SYS_FLAG_KEY
        or g_key != _BORN_KEY
        or h_key != _FLAG_KEY
        or i_key != _PROPERTIES_KEY
        or not queue_id.isdigit()
        or (queue_id[0] == 48 and len(queue_id) > 1)
        or not born.isdigit()
        or not sys_flag.isdigit()
        or not message_flag.isdigit()
        or not properties.isascii()
        or len(properties) != length
        or len(queue_id) > 9
    ):
        return None
    return (
        opaque,
        flag,
        topic,
        int(queue_id),
        int(sys_flag),
        int(born),
        int(message_flag),
        properties.decode(),
        reconsume_times,
    )


@lru_cache(maxsize=4096)
def _topic_of(fields_before: bytes) -> str | None:
    """The topic, from the fields before the queue id; None when these are not exactly the usual ones."""
    request = _read_some(fields_before, "abcd", {"e": "0", "g": "0"})
    return request.topic if request is not None else None


@lru_cache(maxsize=4096)
def _reconsume_times_of(fields_after: bytes) -> int | None:
    """The reconsume times, from the fields after the properties; None when these are unusual, or for a batch."""
    request = _read_some(fields_after, "jklmn", {"a": "-", "b": "-", "e": "0", "g": "0"})
    return request.reconsume_times if request is not None and not request.batch else None


def _read_some(block: bytes, letters: str, rest: dict[str, str]) -> SendMessageRequest | None:
    try:
        fields = header_binary.decode_ext_fields(block)
        if not all(name in letters for name in fields):
            return None
        return decode_fields(SendMessageRequest, {**rest, **fields})
    except (RemoteProtocolError, FieldError):
        return None


# Marks that stand for the changing values while the text around them is made.
_PLACE_MARK: Final = "0123456789ABCDEF"
_QUEUE_ID_MARK: Final = 1_357_924_680
_QUEUE_OFFSET_MARK: Final = 7_036_874_417_766_350_246
_OPAQUE_MARK: Final = 1_928_374_650
_CODE_TO_VERSION: Final = slice(8, 13)
_FLAG_AND_REMARK: Final = slice(17, 25)
_EXT_AT: Final = 29


class SendReply:
    """The replies to plain sends with one response code, without the values that change from message to message.

    Holds always: it writes the bytes that `encode(command.reply(code, header=SendMessageResponse(…)))` gives.
    """

    __slots__ = (
        "_around_opaque",
        "_binary_ext",
        "_binary_pieces",
        "_code",
        "_ext_size",
        "_fixed",
        "_id_size",
        "_json",
        "_json_heads",
        "_json_pieces",
        "_region",
        "_store_host",
        "_trace_on",
    )

    def __init__(self, code: int, store_host: bytes, region: str, trace_on: bool) -> None:
        self._code = code
        self._store_host = store_host
        self._region = region
        self._trace_on = trace_on
        fields = self._fields(store_host.hex().upper() + _PLACE_MARK, _QUEUE_ID_MARK, _QUEUE_OFFSET_MARK)
        texts = (
            (_PLACE_MARK.encode(), b"%016X"),
            (b"%d" % _QUEUE_ID_MARK, b"%d"),
            (b"%d" % _QUEUE_OFFSET_MARK, b"%d"),
            (b"%d" % _OPAQUE_MARK, b"%d"),
        )
        text = encode(Command(code, _OPAQUE_MARK, RESPONSE_FLAG, fields))[PREFIX.size :]
        self._json = _form(text, texts)
        self._json_heads: dict[int, bytes] = {}

        frame = encode(Command(code, 0, RESPONSE_FLAG, fields, serialize_type=BINARY))
        block = frame[_EXT_AT:]
        lengthy = (texts[0], *[(len(mark).to_bytes(4, "big") + mark, b"\0\0\0%c%d") for mark, _ in texts[1:3]])
        self._binary_ext = _form(block, lengthy)
        self._ext_size = len(block) - len(texts[1][0]) - len(texts[2][0])
        self._fixed = frame[_CODE_TO_VERSION], frame[_FLAG_AND_REMARK]
        # The texts that the compiled function puts between the numbers.
        self._json_pieces = _split(text, texts)
        self._binary_pieces = *self._fixed, *_split(block, lengthy)
        self._around_opaque: dict[int, tuple[bytes, bytes]] = {}
        self._id_size = 2 * len(store_host)

    def encode(self, run: Stored) -> bytes:
        """The replies to a run of sends as whole frames, one after the other."""
        if steps is not None:
            encoded = steps.encode_answers(self._json_pieces, self._binary_pieces, self._id_size, run)
            if encoded is not None:
                return encoded
        return self.encode_in_python(run)

    def encode_in_python(self, run: Stored) -> bytes:
        """As `encode`, without the compiled function."""
        places = run.places
        form, heads = self._json, self._json_heads
        pieces: list[bytes] = []
        at = 0
        for kind, opaque, flag, queue_id, count in run.sends:
            place = places[at]
            at += count
            if flag & ONEWAY_FLAG:
                continue
            if count > 1:
                pieces.append(self._encode_batch(kind, opaque, queue_id, places[at - count : at]))
                continue
            if kind == BINARY:
                pieces.append(self._encode_binary(opaque, place[0], queue_id, place[2]))
                continue
            text = form % (place[0], queue_id, place[2], opaque)
            size = len(text)
            if size not in heads:
                heads[size] = PREFIX.pack(4 + size, size)
            pieces += heads[size], text
        return b"".join(pieces)

    def _encode_binary(self, opaque: int, physical_offset: int, queue_id: int, queue_offset: int) -> bytes:
        id_size = 1 if queue_id < 10 else len(str(queue_id))
        offset_size = len(str(queue_offset))
        around = self._around_opaque.get(id_size + offset_size)
        if around is None:
            around = self._around(id_size + offset_size)
        ext = self._binary_ext % (physical_offset, id_size, queue_id, offset_size, queue_offset)
        return b"".join((around[0], opaque.to_bytes(4, "big", signed=True), around[1], ext))

    def _encode_batch(self, kind: int, opaque: int, queue_id: int, places: Sequence[Place]) -> bytes:
        ids = ",".join([offset_message_id(self._store_host, place[0]) for place in places])
        fields = self._fields(ids, queue_id, places[0][2])
        return encode(Command(self._code, opaque, RESPONSE_FLAG, fields, serialize_type=kind))

    def _fields(self, ids: str, queue_id: int, queue_offset: int) -> dict[str, str]:
        return encode_fields(
            SendMessageResponse(
                msg_id=ids,
                queue_id=queue_id,
                queue_offset=queue_offset,
                msg_region=self._region,
                trace_on=self._trace_on,
            )
        )

    def _around(self, digits: int) -> tuple[bytes, bytes]:
        """The texts before and after the opaque, when both numbers together have `digits` digits."""
        ext_size = self._ext_size + digits
        size = _FIXED_SIZE + ext_size
        before = PREFIX.pack(4 + size, BINARY << 24 | size) + self._fixed[0]
        around = self._around_opaque[digits] = before, self._fixed[1] + ext_size.to_bytes(4, "big")
        return around


def _form(text: bytes, marks: tuple[tuple[bytes, bytes], ...]) -> bytes:
    """`text` as a format for the % operator, in which the marks are replaced by placeholders."""
    text = text.replace(b"%", b"%%")
    for mark, place in marks:
        assert mark in text
        text = text.replace(mark, place, 1)
    return text


def _split(text: bytes, marks: tuple[tuple[bytes, bytes], ...]) -> tuple[bytes, ...]:
    """The texts around the marks, which occur in this order."""
    pieces = []
    for mark, _ in marks:
        piece, found, text = text.partition(mark)
        assert found
        pieces.append(piece)
    return *pieces, text
