from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from downrange.model.errors import MessageError
from downrange.model.properties import decode_properties, encode_properties, find_property
from downrange.model.subscription import SQL92, parse_tags, subscribe
from downrange.model.topics import check_group_name, check_topic_name, is_system_topic

names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x01\x02"), min_size=1, max_size=10)
values = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x02"), min_size=1, max_size=10)


@given(st.dictionaries(names, values))
def test_properties_survive_a_round_trip(properties: dict[str, str]) -> None:
    text = encode_properties(properties)
    assert decode_properties(text) == properties
    assert decode_properties(text.removesuffix("\x02")) == properties, "4.9 writes no separator at the end"


@given(st.dictionaries(names, values), names)
def test_one_property_is_found_without_reading_the_others(properties: dict[str, str], name: str) -> None:
    for text in (encode_properties(properties), encode_properties(properties).removesuffix("\x02")):
        assert find_property(text, name) == properties.get(name)
        for known, value in properties.items():
            assert find_property(text, known) == value


def test_an_empty_value_does_not_hide_an_earlier_one() -> None:
    text = "a\x011\x02b\x012\x02a\x01\x02"
    assert find_property(text, "a") == decode_properties(text)["a"] == "1"
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
