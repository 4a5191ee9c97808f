"""Replies to sends: from what is known of many requests to whole frames, without an object for each reply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, Protocol

from downrange.compiled import accelerated
from downrange.model.message_id import offset_message_id
from downrange.protocol.bodies.fields import encode_fields
from downrange.protocol.bodies.send import SendMessageResponse
from downrange.protocol.codes import SerializeType
from downrange.protocol.command import ONEWAY_FLAG, RESPONSE_FLAG, Command
from downrange.protocol.framing import PREFIX, encode

BINARY: Final = int(SerializeType.ROCKETMQ)
ALL, AT_ONCE, WHEN_SAFE = range(3)
"""Which requests to answer: all, those that do not wait until their messages are safe, or those that do."""

# Where a message went: physical offset, size of its record, queue offset.
Place = tuple[int, int, int]


class Placed(Protocol):
    """A batch of messages that were stored."""

    @property
    def places(self) -> Sequence[Place]: ...


# Serialize type, code, opaque, flag, queue id, first message, how many, whether it waits, the reply if it is ready. No
# NamedTuple, because one is made for each request.
_Request = tuple[int, int, int, int, int, int, int, bool, bytes | None]


@accelerated
class SendReplies:
    """The requests of one batch of messages, and what each of them is answered with.

    A send is answered with the places of its messages, any other request with a frame that is ready.
    """

    __slots__ = ("_requests",)

    def __init__(self) -> None:
        self._requests: list[_Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def add(
        self, kind: int, code: int, opaque: int, flag: int, queue_id: int, first: int, count: int, waits: bool
    ) -> None:
        """Add a send with this serialize type and header, whose messages are `count` from number `first` on.

        `waits`: its sender is answered when the messages are as safe as the broker promises.
        """
        self._requests.append((kind, code, opaque, flag, queue_id, first, count, waits, None))

    def add_ready(self, code: int, reply: bytes, first: int, count: int, waits: bool) -> None:
        """Add a request that is answered with this frame, or not at all if that is empty."""
        self._requests.append((0, code, 0, 0, 0, first, count, waits, reply))

    def set_ready(self, number: int, reply: bytes) -> None:
        """Answer a request with this frame after all."""
        self._requests[number] = *self._requests[number][:8], reply

    def request(self, number: int) -> tuple[int, int, int, int, int, int]:
        """Serialize type, code, opaque and flag of a request, and its messages: the first one and how many."""
        kind, code, opaque, flag, _, first, count, _, _ = self._requests[number]
        return kind, code, opaque, flag, first, count

    @property
    def code(self) -> int:
        """The code that all requests have; -1 when they differ."""
        codes = {request[1] for request in self._requests}
        return codes.pop() if len(codes) == 1 else -1

    def codes(self) -> dict[int, int]:
        """How many requests there are of each code."""
        return dict(Counter([request[1] for request in self._requests]))

    def batches(self) -> list[tuple[int, int]]:
        """The sends that have several messages: the number of the first one, and how many."""
        return [(first, count) for *_, first, count, _, ready in self._requests if ready is None and count > 1]

    def encode(self, template: SendReply, messages: Placed, which: int) -> tuple[bytes, list[int] | None]:
        """The replies as frames, one behind the other, and the numbers of the requests they answer; None means all."""
        places = messages.places
        pieces: list[bytes] = []
        answered: list[int] = []
        for number, (kind, _, opaque, flag, queue_id, first, count, waits, ready) in enumerate(self._requests):
            if which != ALL and waits != (which == WHEN_SAFE):
                continue
            if ready is not None:
                reply = ready
            elif flag & ONEWAY_FLAG:
                continue
            elif count > 1:
                reply = template.encode_batch(kind, opaque, queue_id, places[first : first + count])
            elif kind == BINARY:
                reply = template.encode_binary(opaque, queue_id, places[first])
            else:
                reply = template.encode_json(opaque, queue_id, places[first])
            if reply:
                pieces.append(reply)
                answered.append(number)
        return b"".join(pieces), None if len(answered) == len(self._requests) else answered


# Values that stand for what changes from reply to reply while the text around them is being made.
_PLACE_MARK: Final = "0123456789ABCDEF"
_QUEUE_ID_MARK: Final = 1_357_924_680
_QUEUE_OFFSET_MARK: Final = 7_036_874_417_766_350_246
_OPAQUE_MARK: Final = 1_928_374_650
_CODE_TO_VERSION: Final = slice(8, 13)  # of a frame with a binary header
_FLAG_AND_REMARK: Final = slice(17, 25)
_EXT_AT: Final = 29


class SendReply:
    """A template for the replies to sends that ended with one code: all but what changes from message to message.

    Holds always: it writes the bytes that `encode(command.reply(code, header=SendMessageResponse(…)))` gives.
    """

    __slots__ = ("_code", "_region", "_store_host", "_trace_on", "binary_pieces", "id_size", "json_pieces")

    def __init__(self, code: int, store_host: bytes, region: str, trace_on: bool) -> None:
        self._code = code
        self._store_host = store_host
        self._region = region
        self._trace_on = trace_on
        self.id_size = 2 * len(store_host)
        fields = self._fields(store_host.hex().upper() + _PLACE_MARK, _QUEUE_ID_MARK, _QUEUE_OFFSET_MARK)
        place, *numbers = _PLACE_MARK.encode(), b"%d" % _QUEUE_ID_MARK, b"%d" % _QUEUE_OFFSET_MARK
        text = encode(Command(code, _OPAQUE_MARK, RESPONSE_FLAG, fields))[PREFIX.size :]
        self.json_pieces = _split(text, place, *numbers, b"%d" % _OPAQUE_MARK)
        frame = encode(Command(code, 0, RESPONSE_FLAG, fields, serialize_type=BINARY))
        lengthy = [len(number).to_bytes(4, "big") + number for number in numbers]
        around = _split(frame[_EXT_AT:], place, *lengthy)
        self.binary_pieces = frame[_CODE_TO_VERSION], frame[_FLAG_AND_REMARK], *around

    def encode_json(self, opaque: int, queue_id: int, place: Place) -> bytes:
        first, second, third, fourth, last = self.json_pieces
        text = b"%b%016X%b%d%b%d%b%d%b" % (first, place[0], second, queue_id, third, place[2], fourth, opaque, last)
        return PREFIX.pack(4 + len(text), len(text)) + text

    def encode_binary(self, opaque: int, queue_id: int, place: Place) -> bytes:
        before, after, first, second, third, last = self.binary_pieces
        queue, offset = b"%d" % queue_id, b"%d" % place[2]
        ext = b"%b%016X%b\0\0\0%c%b%b\0\0\0%c%b%b" % (
            first, place[0], second, len(queue), queue, third, len(offset), offset, last,
        )  # fmt: skip
        opaque_bytes = opaque.to_bytes(4, "big", signed=True)
        header = b"".join((before, opaque_bytes, after, len(ext).to_bytes(4, "big"), ext))
        return PREFIX.pack(4 + len(header), BINARY << 24 | len(header)) + header

    def encode_batch(self, kind: int, opaque: int, queue_id: int, places: Sequence[Place]) -> bytes:
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


def _split(text: bytes, *marks: bytes) -> tuple[bytes, ...]:
    """What stands around the marks; they follow each other in the text."""
    pieces = []
    for mark in marks:
        piece, found, text = text.partition(mark)
        assert found
        pieces.append(piece)
    return *pieces, text
