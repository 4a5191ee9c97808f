from __future__ import annotations

import json

import pytest

from downrange.protocol.codes import LanguageCode, RequestCode, SerializeType, version_name
from downrange.protocol.command import Command, request
from downrange.protocol.errors import LocalProtocolError, RemoteProtocolError
from downrange.protocol.framing import MAX_FRAME, FrameDecoder, decode_frame, encode, encode_parts

# One route request in both header encodings, as 4.9.8 writes it.
ROUTE_JSON = bytes.fromhex(
    "00000084000000807B22636F6465223A3130352C226578744669656C6473223A7B22746F706963223A22546F70696341227D2C22666C6167223A"
    "302C226C616E6775616765223A224A415641222C226F7061717565223A312C2273657269616C697A655479706543757272656E74525043223A22"
    "4A534F4E222C2276657273696F6E223A3430397D"
)
ROUTE_BINARY = bytes.fromhex(
    "0000002A010000260069000199000000010000000000000000000000110005746F70696300000006546F70696341"
)


def decode_one(frame: bytes) -> Command:
    decoder = FrameDecoder()
    (command,) = decoder.feed(frame)
    assert decoder.error is None
    assert decoder.buffered == 0
    return command


def refused(frame: bytes, **limits: int) -> str:
    decoder = FrameDecoder(**limits)
    assert decoder.feed(frame) == []
    assert decoder.error is not None
    return str(decoder.error)


def json_frame(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (4 + len(text) + len(body)).to_bytes(4, "big") + len(text).to_bytes(4, "big") + text + body


@pytest.mark.parametrize("frame", [ROUTE_JSON, ROUTE_BINARY], ids=["json", "binary"])
def test_javas_route_request_is_read_and_written_back_byte_for_byte(frame: bytes) -> None:
    command = decode_one(frame)
    assert command.code == RequestCode.GET_ROUTEINFO_BY_TOPIC
    assert command.ext_fields == {"topic": "TopicA"}
    assert (command.opaque, command.flag, command.version) == (1, 0, 409)
    assert command.language == LanguageCode.JAVA
    assert encode(command) == frame


def test_a_reply_keeps_the_opaque_and_the_header_encoding_of_its_request() -> None:
    for frame in (ROUTE_JSON, ROUTE_BINARY):
        question = decode_one(frame)
        answer = decode_one(encode(question.reply(17, "no such topic", ext_fields={"a": "1"}, body=b"xyz")))
        assert answer.is_response
        assert not answer.is_oneway
        assert answer.opaque == question.opaque
        assert answer.serialize_type == question.serialize_type
        assert (answer.code, answer.remark, answer.ext_fields, answer.body) == (17, "no such topic", {"a": "1"}, b"xyz")


def test_a_body_of_several_buffers_is_sent_without_joining() -> None:
    parts: list[bytes | bytearray | memoryview] = [memoryview(b"one"), b"", b"two"]
    frame = encode_parts(request(11, body=parts))
    assert frame[1] is parts[0]
    assert decode_one(b"".join(frame)).body == b"onetwo"


def test_javas_lenience_about_headers_is_ours() -> None:
    command = decode_one(
        json_frame(
            {
                "code": 34,
                "unknown": [1, {"x": 2}],
                "language": 1,
                "extFields": {"number": 1, "yes": True, "nothing": None, "text": "t"},
            }
        )
    )
    assert command.language == LanguageCode.CPP
    assert command.version == 0
    assert command.ext_fields == {"number": "1", "yes": "true", "text": "t"}
    assert decode_one(json_frame({"code": 1})).language == LanguageCode.JAVA
    assert decode_one(json_frame({"code": 1, "language": "COBOL"})).language == LanguageCode.OTHER
    assert decode_one(json_frame({"code": 1, "language": None})).language == LanguageCode.OTHER
    assert decode_one(json_frame({"code": 1, "extFields": None})).ext_fields == {}
    assert decode_one(json_frame(b' {\n "code" : 7 } ')).code == 7


def test_properties_with_separators_and_non_ascii_text_survive_both_encodings() -> None:
    fields = {"i": "TAGS\x01Tag\u00e4\x02KEYS\x01k \u4f60\u597d \U0001f680", "\u00fc": "v"}
    for kind in SerializeType:
        command = Command(code=310, raw_ext=fields, remark="\u00df", serialize_type=kind)
        assert decode_one(encode(command)) == command


def test_an_empty_text_counts_as_absent_in_a_binary_header() -> None:
    command = decode_one(encode(Command(code=1, raw_ext={"a": "", "b": "x"}, remark="", serialize_type=1)))
    assert command.ext_fields == {"b": "x"}
    assert command.remark is None


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        ((MAX_FRAME - 3).to_bytes(4, "big") + bytes(4), "frame of 16777213 bytes"),
        (b"\xff" * 4 + bytes(4), "frame of -1 bytes"),
        (b"\x00\x00\x00\x03abcd", "frame of 3 bytes"),
        (b"\x00\x00\x00\x0a\x02\x00\x00\x00" + bytes(6), "unknown serialize type 2"),
        (b"\x00\x00\x00\x0a\x00\x00\x00\x07", "header of 7 bytes in a frame of 10"),
        (b"\x00\x0f\xff\xff\x00\x01\x00\x01", "header of 65537 bytes; at most 65536"),
        (json_frame(b"not json"), "JSON header cannot be read"),
        (json_frame(b"[1]"), "JSON header cannot be read"),
        (json_frame(b"{}"), "missing required field `code`"),
        (json_frame({"code": "x"}), "JSON header cannot be read"),
        (json_frame({"code": 1, "opaque": 2**31}), "JSON header cannot be read"),
        (json_frame({"code": 1.5}), "JSON header cannot be read"),
        (json_frame(b'{"code":1,"x":' + b"[" * 20000 + b"]" * 20000 + b"}"), "JSON header cannot be read"),
        (json_frame(b'{"code":1,"remark":"\xff"}'), "JSON header cannot be read"),
        (b"\x00\x00\x00\x08\x01\x00\x00\x04abcd", "binary header cannot be read"),
        (b"\x00\x00\x00\x19\x01\x00\x00\x15" + b"\x00" * 13 + b"\x00\x00\x00\x05" + b"\x00" * 4, "remark of 5 bytes"),
        (b"\x00\x00\x00\x19\x01\x00\x00\x15" + b"\x00" * 13 + b"\xff\xff\xff\xff" + b"\x00" * 4, "remark of -1 bytes"),
        (b"\x00\x00\x00\x19\x01\x00\x00\x15" + b"\x00" * 17 + b"\x00\x00\x00\x01", "ext fields of 1 bytes"),
    ],
)
def test_bytes_that_break_a_rule_are_refused_with_the_rule(frame: bytes, reason: str) -> None:
    assert reason in refused(frame)


def test_a_bad_ext_block_of_a_binary_header_is_found_when_it_is_read() -> None:
    good = encode(Command(code=1, raw_ext={"topic": "T"}, serialize_type=1))
    for cut in range(1, 8):
        block = decode_one(good).raw_ext
        assert isinstance(block, bytes)
        with pytest.raises(RemoteProtocolError):
            Command(code=1, raw_ext=block[:-cut], serialize_type=1).ext_fields  # noqa: B018
    negative = b"\x00\x01k\xff\xff\xff\xff"
    with pytest.raises(RemoteProtocolError):
        Command(code=1, raw_ext=negative, serialize_type=1).ext_fields  # noqa: B018


def test_commands_before_a_bad_frame_are_not_lost() -> None:
    decoder = FrameDecoder()
    assert len(decoder.feed(ROUTE_JSON + ROUTE_BINARY + b"\xff" * 8 + ROUTE_JSON)) == 2
    assert decoder.error is not None
    assert decoder.feed(ROUTE_JSON) == []


def test_an_unfinished_large_frame_is_held_once_and_not_looked_at_again_for_each_piece() -> None:
    frame = encode(request(310, body=bytes(4 * 1024 * 1024)))
    decoder = FrameDecoder()
    for at in range(0, len(frame) - 1, 65536):
        assert decoder.feed(frame[at : min(at + 65536, len(frame) - 1)]) == []
    assert decoder.buffered == len(frame) - 1
    (command,) = decoder.feed(frame[-1:])
    assert len(command.body) == 4 * 1024 * 1024
    assert decoder.buffered == 0


def test_what_a_frame_cannot_carry_is_refused_when_it_is_written() -> None:
    with pytest.raises(LocalProtocolError, match="at most 16777212"):
        encode(request(310, body=bytes(MAX_FRAME)))
    with pytest.raises(LocalProtocolError, match="code 200050"):
        encode(request(RequestCode.POP_MESSAGE, serialize_type=SerializeType.ROCKETMQ))


def test_version_numbers_have_names() -> None:
    assert [version_name(v) for v in (409, 408, 373, 213, 413, 479)] == [
        "V4_9_8",
        "V4_9_8_SNAPSHOT",
        "V4_8_0",
        "V4_0_0",
        "V5_0_0",
        "V5_3_3",
    ]


def test_a_header_with_two_codes_is_no_header() -> None:
    """Admission looks at the first, and nothing may run under another."""
    for second in ('"code"', '"\\u0063ode"'):
        header = f'{{"code":310,"opaque":1,{second}:37}}'.encode()
        with pytest.raises(RemoteProtocolError, match="two codes, 310 and 37"):
            decode_frame((0, header, b""))
    assert decode_frame((0, b'{"code":310,"opaque":1,"code":310}', b"")).code == 310
