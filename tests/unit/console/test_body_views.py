"""Bodies as people read them; any bytes are safe."""

from __future__ import annotations

import gzip
import json
import re
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from downrange.console.body_views import MASKED, MOST_SHOWN, look, masked_properties, summary


@given(body=st.binary(max_size=2000))
def test_any_bytes_have_a_view(body: bytes) -> None:
    found = look(body)
    assert found.views
    assert "hex" in found.names
    summary(body)
    look(body, re.compile("card"))


@given(body=st.binary(max_size=500), head=st.sampled_from([b"\x1f\x8b\x08", b"\x78\x9c", b"{", b"[", b"\x0a"]))
def test_bytes_that_begin_like_a_format(body: bytes, head: bytes) -> None:
    assert look(head + body).views
    summary(head + body)


@pytest.mark.parametrize(
    ("body", "best", "part"),
    [
        (b'{"a": 1}', "JSON", '"a": 1'),
        ("Grüße".encode(), "text", "Grüße"),
        ("Grüße".encode("latin-1"), "Latin-1", "Grüße"),
        (b"", "text", ""),
        (bytes(range(256)), "hex", "00 01 02 03"),
        (b"\x08\x96\x01\x12\x07testing\x1a\x03\x08\x96\x01", "Protobuf", '2: "testing"'),
    ],
)
def test_the_best_view_comes_first(body: bytes, best: str, part: str) -> None:
    found = look(body)
    assert found.views[0].name == best
    assert part in found.views[0].text


def test_protobuf_within_protobuf() -> None:
    assert look(b"\x08\x96\x01\x1a\x03\x08\x96\x01").views[0].text == "1: 150\n3: {\n  1: 150\n}"


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_packed_bodies_are_unpacked(pack: object) -> None:
    body = pack(json.dumps({"order": 17}).encode())  # type: ignore[operator]
    found = look(body)
    assert found.names[0] == "JSON"
    assert "packed" in found.names
    assert summary(body) == '{"order": 17}'


def test_a_bomb_is_not_unpacked() -> None:
    bomb = gzip.compress(bytes(1 << 30), 9)
    tracemalloc.start()
    found = look(bomb)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "larger than" in found.notes[0]
    assert peak < 20 << 20


def test_a_large_body_is_cut() -> None:
    view = look(b"x" * (4 << 20)).views[0]
    assert view.is_cut
    assert len(view.text) == MOST_SHOWN


def test_masked_values_are_nowhere() -> None:
    mask = re.compile("card|ssn")
    body = json.dumps({"order": 1, "card": "4111", "deep": [{"ssn": "123", "ok": "shown"}]}).encode()
    found = look(body, mask)
    assert found.names == ["JSON"]
    assert "4111" not in found.views[0].text
    assert "123" not in found.views[0].text
    assert "shown" in found.views[0].text
    assert look(b"card=4111", mask).views == []
    assert masked_properties({"card": "4111", "region": "eu"}, mask) == {"card": MASKED, "region": "eu"}
