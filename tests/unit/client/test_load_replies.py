"""Replies to sends, read fast, and what is not as expected read whole."""

from __future__ import annotations

import pytest

from downrange.client.load.replies import ReplyLayout, ReplyReader, learn_layout
from downrange.protocol.codes import ResponseCode, SerializeType
from downrange.protocol.command import Command
from downrange.protocol.errors import RemoteProtocolError
from downrange.protocol.framing import FrameDecoder, encode

FIRST = 100_000_000
KINDS = pytest.mark.parametrize("kind", list(SerializeType))


def reply(opaque: int, kind: SerializeType = SerializeType.JSON, code: int = 0, remark: str | None = None) -> bytes:
    ext = {"msgId": "7F00000100002A9F0000000000000000", "queueId": "1", "queueOffset": str(opaque % 1000)}
    return encode(Command(code, opaque, 1, ext, remark=remark, serialize_type=int(kind)))


def layout(frame: bytes) -> ReplyLayout:
    (command,) = FrameDecoder().feed(frame)
    return learn_layout(frame, command)


@KINDS
def test_every_success_gives_the_key_of_its_request(kind: SerializeType) -> None:
    learnt = layout(reply(FIRST, kind))
    opaques = range(FIRST + 1, FIRST + 2000)
    succeeded, others = ReplyReader(learnt).feed(b"".join(reply(opaque, kind) for opaque in opaques))
    assert succeeded == [learnt.key(opaque) for opaque in opaques]
    assert others == []


@KINDS
def test_replies_may_be_cut_anywhere(kind: SerializeType) -> None:
    wire = reply(FIRST + 1, kind) + reply(FIRST + 2, kind)
    learnt = layout(reply(FIRST, kind))
    for cut in range(len(wire) + 1):
        reader = ReplyReader(learnt)
        succeeded = reader.feed(wire[:cut])[0] + reader.feed(wire[cut:])[0]
        assert succeeded == [learnt.key(FIRST + 1), learnt.key(FIRST + 2)]


@KINDS
def test_a_refusal_is_handed_over_whole(kind: SerializeType) -> None:
    refusal = reply(FIRST + 1, kind, ResponseCode.SYSTEM_BUSY, "[PCBUSY]")
    succeeded, others = ReplyReader(layout(reply(FIRST, kind))).feed(refusal + reply(FIRST + 2, kind))
    assert len(succeeded) == 1
    assert [(each.code, each.opaque, each.remark) for each in others] == [(2, FIRST + 1, "[PCBUSY]")]


def test_a_broker_that_orders_its_header_otherwise_is_understood() -> None:
    header = b'{"opaque":100000007,"code":0,"flag":1,"version":409}'
    frame = (len(header) + 4).to_bytes(4, "big") + len(header).to_bytes(4, "big") + header
    succeeded, _ = ReplyReader(layout(frame)).feed(frame)
    assert succeeded == [b"100000007"]


def test_the_first_reply_may_be_a_refusal() -> None:
    learnt = layout(reply(FIRST, code=ResponseCode.SYSTEM_BUSY, remark="busy"))
    assert ReplyReader(learnt).feed(reply(FIRST + 3))[0] == [b"%d" % (FIRST + 3)]


def test_a_request_of_the_broker_is_no_reply() -> None:
    asked = encode(Command(40, 5, 0, {"consumerGroup": "g"}))
    assert ReplyReader(layout(reply(FIRST))).feed(asked) == ([], [])


def test_nonsense_is_an_error() -> None:
    with pytest.raises(RemoteProtocolError, match="a frame of"):
        ReplyReader(layout(reply(FIRST))).feed(b"HTTP/1.1 400 Bad Request\r\n")
