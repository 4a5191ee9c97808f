"""YAML of access-control files: what a file may not do, and that no text does harm."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from downrange.auth import acl_yaml
from downrange.auth.acl_yaml import MAX_SIZE, YamlError, read_yaml, write_yaml


@pytest.fixture(params=[yaml.CSafeLoader, yaml.SafeLoader], ids=["libyaml", "python"], autouse=True)
def _loader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test with both parsers of PyYAML."""
    monkeypatch.setattr(acl_yaml, "_Loader", request.param)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"a: !!python/object/apply:os.system [id]", r"type tags are not allowed \(line 1\)"),
        (b"a:\n- !!javax.script.ScriptEngineManager [1]", r"type tags are not allowed \(line 2\)"),
        (b"%TAG ! tag:x,2000:\n--- !foo a", "type tags are not allowed"),
        (b"a: &x [1]\nb: [*x, *x]", r"anchors and aliases are not allowed \(line 1\)"),
        (b"b: *x", "anchors and aliases are not allowed"),
        (b"[" * 200_000, "more than 8 levels"),
        (b'{"a":' * 200_000, "more than 8 levels"),
        (b"- " * 200_000 + b"a", "more than 8 levels"),
        (b"a: 1\na: 2", r"a key stands there twice \(line 2\)"),
        (b"? [a]\n: b", "a key must be a text"),
        (b"? {a: b}\n: b", "a key must be a text"),
        (b"--- a\n--- b", "more than one YAML document"),
        (b"\xff\xfe", "not UTF-8 text"),
        (b'"\\UFFFFFFFF"', "not YAML"),
        (b"a: [", "not YAML"),
        (b"a: 'x", "not YAML"),
        (b"\x00", "not YAML"),
        (b"%YAML 9.9\n---\na", "not YAML"),
        (b" " * (MAX_SIZE + 1), "more than 1048576 bytes"),
    ],
    ids=str,
)
def test_hostile_text_is_refused_in_one_line(text: bytes, complaint: str) -> None:
    with pytest.raises(YamlError, match=complaint) as refused:
        read_yaml(text)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 200


def test_texts_stay_as_they_are_written() -> None:
    text = b"a: 0123456789\nb: '12'\nc: true\nd:\ne: ~\nf: null\ng: 'null'\nh: 2026-11-16\n<<: 1.50\n"
    expected = {"a": "0123456789", "b": "12", "c": "true", "d": None, "e": None, "f": None, "g": "null"}
    assert read_yaml(text) == {**expected, "h": "2026-11-16", "<<": "1.50"}
    assert read_yaml(b"") is read_yaml(b"# nothing\n") is None
    assert read_yaml("\ufeffschlüssel: ä".encode()) == {"schlüssel": "ä"}


texts = st.text(
    st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("\n\t:#-'\"[]{}&*!|>%@` "), max_size=30
)
values = st.recursive(
    st.none() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(values)
@settings(max_examples=200)
def test_what_is_written_is_read_again(value: acl_yaml.Yaml) -> None:
    try:
        assert read_yaml(write_yaml(value)) == value
    except YamlError as error:
        assert "levels" in str(error)  # noqa: PT017


@given(
    st.binary(max_size=200)
    | texts.map(str.encode)
    | st.text("ab:-[]{}&*!? \n'\"|>,#%\\U0", max_size=60).map(str.encode)
)
@settings(max_examples=400)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        read_yaml(data)
    except YamlError as error:
        assert len(str(error)) < 200  # noqa: PT017
