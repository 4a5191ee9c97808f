"""Pull requests that are filled in, and replies to them that are looked at where they lie."""

from __future__ import annotations

import pytest

from downrange.load.pull_replies import PullReplies, count_records, expected_header, next_offset_in
from downrange.load.pull_requests import PullRequests
from downrange.load.replies import ReplyLayout, learn_layout
from downrange.protocol.bodies.fields import encode_fields
from downrange.protocol.bodies.pull import PullMessageRequest, PullMessageResponse
from downrange.protocol.bodies.pull_frames import parse_pull
from downrange.protocol.codes import ResponseCode, SerializeType
from downrange.protocol.command import Command
from downrange.protocol.errors import RemoteProtocolError
from downrange.protocol.framing import FrameDecoder, decode_frame, encode

FIRST = 100_000_000
KINDS = pytest.mark.parametrize("kind", list(SerializeType))
BODY = b"".join(size.to_bytes(4, "big") + bytes(size - 4) for size in (40, 91, 250))


def found(opaque: int, next_offset: int, kind: SerializeType = SerializeType.JSON, code: int = 0) -> bytes:
    header = PullMessageResponse(
        suggest_which_broker_id=0, next_begin_offset=next_offset, min_offset=0, max_offset=99_999
    )
    fields = encode_fields(header)
    return encode(Command(code, opaque, 1, fields, BODY, remark="FOUND", serialize_type=int(kind)))


def layout_of(frame: bytes) -> ReplyLayout:
    (command,) = FrameDecoder().feed(frame)
    return learn_layout(frame[: -len(BODY)], command)


@KINDS
@pytest.mark.parametrize("topic", ["TopicA", "100%", "%RETRY%g", "%d%b", "t" * 37])  # 37: a length that is a %
def test_a_request_is_what_the_codec_makes_of_it(kind: SerializeType, topic: str) -> None:
    requests = PullRequests(topic, kind, "broker-a", hold_millis=15_000)
    for offset in (0, 9, 10, 99, 2048, 2080, 1_234_567_890, 5, 7):
        (frame,) = FrameDecoder().frames(requests.frame(FIRST + 1, 3, offset, 32))
        header = decode_frame(frame).header(PullMessageRequest)
        assert (header.topic, header.queue_id, header.queue_offset, header.max_msg_nums) == (topic, 3, offset, 32)
        assert parse_pull(frame) is not None


def test_not_every_request_is_remembered() -> None:
    requests = PullRequests("TopicA", SerializeType.JSON)
    for opaque in range(10_000):
        requests.frame(FIRST + opaque, 0, 7, 32)
    assert len(requests._templates) < 5000


@KINDS
def test_replies_may_be_cut_anywhere(kind: SerializeType) -> None:
    wire = found(FIRST + 1, 32, kind) + found(FIRST + 2, 64, kind)
    layout = layout_of(found(FIRST, 32, kind))
    for cut in range(len(wire) + 1):
        replies = PullReplies()
        seen = []
        for part in (wire[:cut], wire[cut:]):
            for key, at, body_at, stop in replies.feed(part, layout):
                assert replies.data[body_at:stop] == BODY
                seen.append((key, replies.data[at:stop]))
        keys = layout.key(FIRST + 1), layout.key(FIRST + 2)
        assert seen == [(keys[0], found(FIRST + 1, 32, kind)), (keys[1], found(FIRST + 2, 64, kind))]


@KINDS
def test_a_header_holds_only_its_own_next_offset(kind: SerializeType) -> None:
    (place,) = (replies := PullReplies()).feed(found(FIRST, 320, kind), layout_of(found(FIRST, 0, kind)))
    _, at, body_at, _ = place
    offsets = (320, 32, 20, 3200, 0, 99_999)
    held = [offset for offset in offsets if replies.data.find(expected_header(kind, offset), at, body_at) > 0]
    assert held == [320]


@KINDS
def test_what_is_no_success_has_no_key(kind: SerializeType) -> None:
    refusal = found(FIRST, 0, kind, ResponseCode.SYSTEM_BUSY)
    ((key, at, _, stop),) = (replies := PullReplies()).feed(refusal, layout_of(found(FIRST, 0, kind)))
    assert (key, replies.data[at:stop]) == (b"", refusal)
    ((key, *_),) = PullReplies().feed(found(FIRST, 0, kind), None)
    assert key == b"", "nothing is known of this broker's replies yet"


@pytest.mark.parametrize("nonsense", [b"HTTP/1.1 400 Bad Request\r\n", bytes(12), b"\xff" * 12])
def test_nonsense_is_an_error(nonsense: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="a frame of"):
        PullReplies().feed(nonsense, None)


def test_records_are_counted_and_must_fill_the_body() -> None:
    data = b"head" + BODY
    assert count_records(data, 4, len(data)) == 3
    for wrong in (data[:-1], data + b"\0\0\0\0", data + b"\0\0\0"):
        with pytest.raises(RemoteProtocolError, match="a record of"):
            count_records(wrong, 4, len(wrong))


def test_records_behind_the_end_of_a_stretch_are_not_counted() -> None:
    records = [bytearray(size.to_bytes(4, "big") + bytes(size - 4)) for size in (40, 91, 250)]
    for offset, record in zip((7, 12, 900), records, strict=True):
        record[20:28] = offset.to_bytes(8, "big")
    data = b"".join(records)
    assert [count_records(data, 0, len(data), end) for end in (7, 8, 13, 901)] == [0, 1, 2, 3]


@KINDS
@pytest.mark.parametrize("offset", [0, 7, 320, 12_345_678_901])
def test_the_next_offset_is_read_from_a_header(kind: SerializeType, offset: int) -> None:
    frame = b"before" + found(FIRST, offset, kind)
    assert next_offset_in(kind, frame, 6, len(frame) - len(BODY)) == offset
    assert next_offset_in(kind, frame, 6, 20) == -1
