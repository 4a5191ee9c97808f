"""Our reader of header fields against the package hpack, which is the judge."""

from __future__ import annotations

import contextlib

import hpack
from hypothesis import given
from hypothesis import strategies as st

from downrange.proxy.http2.frames import Http2Error
from downrange.proxy.http2.header_fields import HeaderDecoder

names = st.one_of(
    st.sampled_from([b":path", b":method", b"content-type", b"x-mq-client-id"]), st.binary(min_size=1, max_size=40)
)
fields = st.lists(st.tuples(names, st.binary(max_size=200), st.booleans()), max_size=12)


@given(st.lists(st.tuples(fields, st.one_of(st.none(), st.integers(0, 4096))), max_size=6), st.booleans())
def test_blocks_of_a_connection_are_read_as_hpack_reads_them(
    blocks: list[tuple[list[tuple[bytes, bytes, bool]], int | None]], huffman: bool
) -> None:
    encoder, judge, ours = hpack.Encoder(), hpack.Decoder(), HeaderDecoder(1 << 20)
    for block, size in blocks:
        if size is not None:
            encoder.header_table_size = size
        data = encoder.encode([hpack.HeaderTuple(*one[:2]) if one[2] else hpack.NeverIndexedHeaderTuple(*one[:2])
                               for one in block], huffman=huffman)  # fmt: skip
        expected = {bytes(name): bytes(value) for name, value in judge.decode(data, raw=True)}
        assert ours.decode(data) == expected


@given(st.lists(st.binary(max_size=60), max_size=5))
def test_any_bytes_are_read_or_refused(blocks: list[bytes]) -> None:
    judge, ours = hpack.Decoder(), HeaderDecoder(1 << 20)
    for data in blocks:
        refused = None
        with contextlib.suppress(Http2Error):
            refused = ours.decode(data)
        if refused is None:
            return  # the connection ends
        judged = {bytes(name): bytes(value) for name, value in judge.decode(data, raw=True)}
        assert judged == refused
