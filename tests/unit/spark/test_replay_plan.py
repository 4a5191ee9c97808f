from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import Row

from downrange.spark.lake.layout import LakeError
from downrange.spark.lake.location import Location
from downrange.spark.pipelines.replay_plan import Choice, Position, State, message_of, read_state, write_state

ROW = Row(
    topic="orders",
    unique_key="7F0001",
    msg_id="AC11",
    tags="paid",
    keys="a b",
    body=bytearray(b"body"),
    properties={"TAGS": "paid", "UNIQ_KEY": "7F0001", "WAIT": "true", "color": "green", "__SHARDINGKEY": "user-1"},
)


def test_a_message_keeps_what_its_sender_gave_it() -> None:
    message = message_of(ROW, None)
    assert (message.topic, message.body, message.tags, message.keys) == ("orders", b"body", "paid", "a b")
    assert message.sharding_key == "user-1"
    assert message.properties == {"color": "green", "REPLAY_OF": "7F0001"}


def test_a_message_for_another_topic() -> None:
    assert message_of(ROW, "again").topic == "again"


def test_a_message_without_properties_is_still_a_message() -> None:
    bare = Row(topic="t", unique_key=None, msg_id="AC11", tags=None, keys="", body=None, properties=None)
    message = message_of(bare, None)
    assert (message.body, message.tags, message.keys, message.sharding_key) == (b"", None, None, None)
    assert message.properties == {"REPLAY_OF": "AC11"}


def test_the_same_choice_has_the_same_name() -> None:
    assert Choice("a", ("x",), where="1=1").name == Choice("a", ("x",), where="1=1").name
    names = {Choice(None).name, Choice("a").name, Choice("a", ("x",)).name, Choice("a", keys=("x",)).name}
    assert len(names) == 4


def test_how_far_it_is_survives(tmp_path: Path) -> None:
    lake = Location.of(tmp_path)
    choice = Choice("again", ("orders",), 1, 2, ("k",), "tags = 'paid'")
    assert read_state(lake, choice) == State(choice)
    state = State(choice, 7, Position("2026-11-15", 123, "orders", "broker-a", 0, 6))
    write_state(lake, state)
    assert read_state(lake, choice) == state
    lake.write_whole(f"_replay/{choice.name}.json", b"{")
    with pytest.raises(LakeError, match="is damaged"):
        read_state(lake, choice)
