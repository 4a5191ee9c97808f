"""Every frame ever captured from the genuine servers and clients, through our codec and back."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.framing import MAX_FRAME, FrameDecoder, encode
from tests.support.golden import scenarios


@pytest.mark.parametrize("name", sorted(scenarios()))
def test_captured_frames_decode_and_encode_to_an_equal_command(name: str) -> None:
    rows = scenarios()[name]
    assert rows
    for row in rows:
        decoder = FrameDecoder(max_header=MAX_FRAME)
        (command,) = decoder.feed(row.frame)
        assert decoder.error is None, row.place
        assert decoder.buffered == 0, row.place
        assert (command.code, command.flag, command.opaque) == (row.code, row.flag, row.opaque), row.place
        # With the ext fields as values, so that they are written by us and not passed on as they came.
        fields = None if command.raw_ext is None else dict(command.ext_fields)
        (again,) = FrameDecoder(max_header=MAX_FRAME).feed(encode(replace(command, raw_ext=fields)))
        assert again == command, row.place


def test_every_captured_code_has_a_name() -> None:
    for rows in scenarios().values():
        for row in rows:
            if row.is_response:
                ResponseCode(row.code)
            elif row.code not in (9999, 12345):  # asked on purpose to see the refusal
                RequestCode(row.code)


def test_a_whole_conversation_cut_into_odd_pieces_is_the_same_conversation() -> None:
    rows = scenarios()["498-json/push_concurrent"]
    stream = b"".join(row.frame for row in rows)
    for size in (1, 7, 1000, 65536):
        decoder = FrameDecoder()
        commands = [command for at in range(0, len(stream), size) for command in decoder.feed(stream[at : at + size])]
        assert decoder.error is None
        assert [command.opaque for command in commands] == [row.opaque for row in rows]
