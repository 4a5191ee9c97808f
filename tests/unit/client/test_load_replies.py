"""Replies to sends, read fast, and what is not as expected read whole."""

from __future__ import annotations

import pytest

from downrange.load.outstanding import Outstanding
from downrange.load.replies import ReplyLayout, ReplyReader, learn_layout
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


def asked(slots: int = 2000) -> Outstanding:
    """Everything is on its way; slot n since moment n + 1."""
    outstanding = Outstanding(slots)
    outstanding.add_each(0, range(1, slots + 1))
    return outstanding


@KINDS
def test_every_success_answers_its_request(kind: SerializeType) -> None:
    outstanding = asked()
    opaques = range(FIRST + 1, FIRST + 2000)
    wire = b"".join(reply(opaque, kind) for opaque in opaques)
    moments, refused = ReplyReader(layout(reply(FIRST, kind)), outstanding).feed(wire)
    assert (moments, refused) == (list(range(2, 2001)), [])
    assert (len(outstanding), outstanding.moments[0]) == (1, 1)


@KINDS
def test_requests_sent_at_once_have_one_moment(kind: SerializeType) -> None:
    outstanding = Outstanding(100)
    outstanding.add(0, 40, 7)
    outstanding.add(40, 41, 8)
    outstanding.add(41, 50, 7)
    wire = b"".join(reply(FIRST + number, kind) for number in range(50))
    assert ReplyReader(layout(reply(FIRST, kind)), outstanding).feed(wire) == ([7] * 40 + [8] + [7] * 9, [])
    assert not outstanding


@KINDS
def test_replies_may_be_cut_anywhere(kind: SerializeType) -> None:
    wire = reply(FIRST + 1, kind) + reply(FIRST + 2, kind)
    learnt = layout(reply(FIRST, kind))
    for cut in range(len(wire) + 1):
        reader = ReplyReader(learnt, outstanding := asked())
        (early, _), (late, _) = reader.feed(wire[:cut]), reader.feed(wire[cut:])
        assert early + late == [2, 3]
        assert len(outstanding) == 1998


@KINDS
def test_a_refusal_is_handed_over_whole(kind: SerializeType) -> None:
    refusal = reply(FIRST + 1, kind, ResponseCode.SYSTEM_BUSY, "[PCBUSY]")
    reader = ReplyReader(layout(reply(FIRST, kind)), outstanding := asked())
    moments, refused = reader.feed(reply(FIRST, kind) + refusal + reply(FIRST + 2, kind))
    assert (moments, len(outstanding)) == ([1, 3], 1997)
    assert [(each.code, each.opaque, each.remark) for each in refused] == [(2, FIRST + 1, "[PCBUSY]")]


@KINDS
@pytest.mark.parametrize("wrong", [FIRST, FIRST + 2000, FIRST - 1, 5])
def test_a_reply_to_what_is_not_outstanding_is_an_error(kind: SerializeType, wrong: int) -> None:
    reader = ReplyReader(layout(reply(FIRST, kind)), asked())
    reader.feed(reply(FIRST, kind))
    with pytest.raises(RemoteProtocolError, match=f"not outstanding: {wrong}"):
        reader.feed(reply(FIRST + 1, kind) + reply(wrong, kind))


@KINDS
def test_two_replies_to_one_request_are_an_error_also_at_once(kind: SerializeType) -> None:
    with pytest.raises(RemoteProtocolError, match="not outstanding"):
        ReplyReader(layout(reply(FIRST, kind)), asked()).feed(2 * reply(FIRST + 1, kind))


def test_a_broker_that_orders_its_header_otherwise_is_understood() -> None:
    header = b'{"opaque":100000007,"code":0,"flag":1,"version":409}'
    frame = (len(header) + 4).to_bytes(4, "big") + len(header).to_bytes(4, "big") + header
    assert ReplyReader(layout(frame), asked()).feed(frame) == ([8], [])


def test_the_first_reply_may_be_a_refusal() -> None:
    learnt = layout(reply(FIRST, code=ResponseCode.SYSTEM_BUSY, remark="busy"))
    assert ReplyReader(learnt, asked()).feed(reply(FIRST + 3)) == ([4], [])


def test_a_request_of_the_broker_is_no_reply() -> None:
    request = encode(Command(40, 5, 0, {"consumerGroup": "g"}))
    assert ReplyReader(layout(reply(FIRST)), asked()).feed(request) == ([], [])


@pytest.mark.parametrize("nonsense", [b"HTTP/1.1 400 Bad Request\r\n", bytes(12), b"\xff" * 12])
def test_nonsense_is_an_error(nonsense: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="a frame of"):
        ReplyReader(layout(reply(FIRST)), asked()).feed(nonsense)


def test_a_slot_is_free_when_its_request_is_answered() -> None:
    outstanding = Outstanding(10)
    outstanding.add(2, 4, 99)
    assert (outstanding.is_free(0, 2), outstanding.is_free(3, 4), outstanding.is_free(0, 10)) == (True, False, False)
    assert (outstanding.take(FIRST + 3), outstanding.take(FIRST + 3), outstanding.take(FIRST + 99)) == (99, 0, 0)
    assert (len(outstanding), outstanding.is_free(3, 4)) == (1, True)
