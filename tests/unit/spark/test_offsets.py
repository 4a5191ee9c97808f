"""Offsets and their JSON: what Spark keeps in its checkpoint, and what a user writes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from downrange.model.message import MessageQueue
from downrange.spark.errors import OptionError, SparkSourceError
from downrange.spark.offsets import Offsets, from_json, parse_assign, parse_offsets, to_json

queues = st.builds(MessageQueue, st.text(min_size=1, max_size=9), st.text(min_size=1, max_size=9), st.integers(0, 500))


@given(st.dictionaries(queues, st.integers(0, 2**62), max_size=9))
def test_offsets_come_back(offsets: Offsets) -> None:
    assert from_json(json.loads(json.dumps(to_json(offsets)))) == offsets


def test_the_same_offsets_are_the_same_text() -> None:
    one, two = MessageQueue("b", "x", 10), MessageQueue("a", "y", 9)
    assert json.dumps(to_json({one: 1, two: 2})) == json.dumps(to_json({two: 2, one: 1}))
    assert json.dumps(to_json({one: 1})) == '{"v": 1, "q": {"b": {"x": {"10": 1}}}}'


@pytest.mark.parametrize("value", [{}, {"v": 2, "q": {}}, {"v": 1}, {"v": 1, "q": []}, {"v": 1, "q": {"t": 3}}])
def test_a_foreign_checkpoint_is_refused(value: dict[str, object]) -> None:
    with pytest.raises(SparkSourceError, match="checkpoint"):
        from_json(value)


def test_what_a_user_writes() -> None:
    text = '{"orders": {"broker-a": {"0": 42, "1": -1}}}'
    assert parse_offsets("startingOffsets", text) == {
        MessageQueue("orders", "broker-a", 0): 42,
        MessageQueue("orders", "broker-a", 1): -1,
    }
    assert parse_assign("assign", '{"orders": {"broker-a": [0, 2]}}') == {"orders": {"broker-a": frozenset({0, 2})}}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", '{"orders": 3}', '{"orders": {"b": [1]}}', '{"orders": {"b": {"x": 1}}}',
     '{"orders": {"b": {"0": "1"}}}', '{"orders": {"b": {"0": true}}}', '{"orders": {"b": {"0": 1.5}}}'],
)  # fmt: skip
def test_bad_offsets_name_the_option_and_the_form(text: str) -> None:
    with pytest.raises(OptionError, match=r'startingOffsets is not what is expected, \{"topic": \{"broker": \{"0": 42'):
        parse_offsets("startingOffsets", text)


@pytest.mark.parametrize("text", ["", "[]", '{"orders": [0]}', '{"orders": {"b": [-1]}}', '{"orders": {"b": ["0"]}}',
                                  "{}", '{"orders": {"b": []}}', '{"orders": {"b": [true]}}'])  # fmt: skip
def test_bad_queues_name_the_option_and_the_form(text: str) -> None:
    with pytest.raises(OptionError, match="assign is not what is expected"):
        parse_assign("assign", text)
