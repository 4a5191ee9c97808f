from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from downrange.model.errors import MessageError
from downrange.model.properties import (
    decode_properties,
    encode_properties,
    find_in_bytes,
    find_property,
    find_tags_and_keys,
)
from downrange.model.subscription import SQL92, parse_tags, subscribe
from downrange.model.topics import check_group_name, check_topic_name, is_system_topic

names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x01\x02"), min_size=1, max_size=10)
values = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x02"), min_size=1, max_size=10)


@given(st.dictionaries(names, values))
def test_properties_survive_a_round_trip(properties: dict[str, str]) -> None:
    text = encode_properties(properties)
    assert decode_properties(text) == properties
    assert decode_properties(text.removesuffix("\x02")) == properties, "4.9 writes no separator at the end"


pieces = st.text(st.sampled_from("ab\x01\x02é"), max_size=30)


@given(pieces, st.text(st.sampled_from("abé"), min_size=1, max_size=2))
def test_one_property_is_found_without_reading_the_others(text: str, name: str) -> None:
    value = decode_properties(text).get(name)
    assert find_property(text, name) == value
    assert find_in_bytes(text.encode(), name.encode()) == (value.encode() if value else None)


@given(pieces)
def test_what_queue_and_index_want_is_found_at_once(text: str) -> None:
    text = text.replace("a", "TAGS").replace("b", "KEYS").replace("é", "UNIQ_KEY")
    found = decode_properties(text)
    assert find_tags_and_keys(text) == (found.get("TAGS"), found.get("UNIQ_KEY"), found.get("KEYS"))


def test_an_empty_value_does_not_hide_an_earlier_one() -> None:
    text = "TAGS\x011\x02b\x012\x02TAGS\x01\x02TAGS\x01"
    assert find_property(text, "TAGS") == decode_properties(text)["TAGS"] == "1"
    assert find_in_bytes(text.encode(), b"TAGS") == b"1"
    assert find_tags_and_keys(text) == ("1", None, None)
    assert find_property("a\x01\x02", "a") is None


def test_pieces_without_name_or_value_are_dropped_and_the_last_of_several_wins() -> None:
    text = "a\x011\x02b\x01\x02\x01c\x02d\x02a\x012\x02e\x01x\x01y"
    assert decode_properties(text) == {"a": "2", "e": "x\x01y"}
    assert find_property(text, "a") == "2"
    assert find_property(text, "b") is None
    assert find_property("XTAGS\x01t\x02TAGS\x01right", "TAGS") == "right"


def test_tag_expressions() -> None:
    assert parse_tags("TagA || TagB||  || TagA") == {"TagA", "TagB"}
    for everything in (None, "", "*"):
        assert parse_tags(everything) == frozenset()
    subscription = subscribe("T", "TagA || TagB", version=5)
    assert subscription.codes == {2598919, 2598920}
    assert subscribe("T", "a > 5", SQL92).codes == frozenset()
    assert subscribe("T", None).expression == "*"


@pytest.mark.parametrize("name", ["TopicTest", "%RETRY%group", "a|b-c_d", "x" * 127])
def test_names_that_are_allowed(name: str) -> None:
    check_topic_name(name)
    check_group_name(name)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("", "blank"), ("  ", "blank"), ("a b", "illegal characters"), ("../x", "illegal"), ("ä", "illegal")],
)
def test_names_that_are_not(name: str, complaint: str) -> None:
    with pytest.raises(MessageError, match=complaint):
        check_topic_name(name)
    with pytest.raises(MessageError, match=complaint):
        check_group_name(name)


def test_names_have_a_length() -> None:
    with pytest.raises(MessageError, match="longer than topic max length"):
        check_topic_name("x" * 128)
    check_group_name("x" * 255)
    with pytest.raises(MessageError, match="longer than group max length"):
        check_group_name("x" * 256)


def test_system_topics_are_known() -> None:
    assert is_system_topic("TBW102")
    assert is_system_topic("rmq_sys_anything")
    assert not is_system_topic("orders")
